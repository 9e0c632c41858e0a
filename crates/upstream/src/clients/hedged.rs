//! A question that is asked of two backends, where the first one takes longer than most.

use std::cell::RefCell;
use std::future::poll_fn;
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use crate::error::UpstreamError;
use crate::view::{Member, Part, View};

/// The backends at which a question is, or was.
pub(super) struct Visits<P>(RefCell<Vec<Rc<Member<P>>>>);

impl<P> Default for Visits<P> {
    fn default() -> Visits<P> {
        Visits(RefCell::default())
    }
}

impl<P> Visits<P> {
    pub(super) fn add(&self, member: &Rc<Member<P>>) {
        self.0.borrow_mut().push(member.clone());
    }

    pub(super) fn all(&self) -> Vec<Rc<Member<P>>> {
        self.0.borrow().clone()
    }
}

/// Waits for the first of two, of which the second one begins after the delay, if the budget has
/// one left. The other one is dropped.
pub(super) async fn hedged<P: Part, T>(
    view: &View<P>,
    delay: u64,
    first: impl Future<Output = Result<T, UpstreamError>>,
    second: impl Future<Output = Result<T, UpstreamError>>,
) -> Result<T, UpstreamError> {
    let (mut first, mut second) = (pin!(first), pin!(second));
    if let Ok(answer) = view.shard.timeout(Duration::from_nanos(delay), &mut first).await {
        return answer;
    }
    if !view.upstream.state().may_hedge(view.now()) {
        return first.await;
    }
    let (mut of_first, mut has_failed) = (None, false);
    poll_fn(|task| {
        if of_first.is_none()
            && let Poll::Ready(answer) = first.as_mut().poll(task)
        {
            if answer.is_ok() || has_failed {
                return Poll::Ready(answer);
            }
            of_first = Some(answer);
        }
        if !has_failed && let Poll::Ready(answer) = second.as_mut().poll(task) {
            if answer.is_ok() {
                return Poll::Ready(answer);
            }
            has_failed = true;
        }
        // Where both fail, the first one says why.
        match (has_failed, of_first.take()) {
            (true, Some(answer)) => Poll::Ready(answer),
            (_, waits) => {
                of_first = waits;
                Poll::Pending
            }
        }
    })
    .await
}
