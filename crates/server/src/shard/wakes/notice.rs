//! Something that happens once on a shard, and that a task anywhere waits for.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use ringserve_base::guard::{discard, wake};

/// One notice, with its waiter and its giver.
pub(crate) fn notice() -> (Noticed, Notify) {
    let notice = Arc::new(Notice(Mutex::new(State::Waits(None))));
    (Noticed(notice.clone()), Notify(notice))
}

/// Shared by both. The lock is held for a move of a waker.
struct Notice(Mutex<State>);

enum State {
    Waits(Option<Waker>),
    Given,
}

impl Notice {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Done once the notice is given. Any executor may poll it.
pub(crate) struct Noticed(Arc<Notice>);

impl Future for Noticed {
    type Output = ();

    fn poll(self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<()> {
        // Cloning and dropping a waker is user code: outside of the lock.
        let mut waker = Some(task.waker().clone());
        let polled = match &mut *self.0.state() {
            State::Given => Poll::Ready(()),
            State::Waits(known) => {
                std::mem::swap(known, &mut waker);
                Poll::Pending
            }
        };
        drop(waker);
        polled
    }
}

impl Drop for Noticed {
    fn drop(&mut self) {
        let waker = match &mut *self.0.state() {
            State::Waits(waker) => waker.take(),
            State::Given => None,
        };
        discard(waker);
    }
}

/// Gives the notice when it is dropped, for whatever reason: then nothing waits for what will not
/// come.
pub(crate) struct Notify(Arc<Notice>);

impl Notify {
    /// False if nothing waits for it.
    fn is_awaited(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }
}

impl Drop for Notify {
    fn drop(&mut self) {
        let state = std::mem::replace(&mut *self.0.state(), State::Given);
        if let State::Waits(Some(waker)) = state {
            // If it panics, the task that waits is not woken.
            let _ = wake(waker);
        }
    }
}

/// Notices that are given together, when this one is dropped.
#[derive(Default)]
pub(crate) struct Notices {
    all: Vec<Notify>,
    /// The number of notices at which those that nothing waits for are removed.
    sweep_at: usize,
}

/// Fewer are not swept.
const SWEPT_MIN: usize = 8;

impl Notices {
    /// Adds one. At most half of those that are kept are without a task that waits, and 8 more.
    pub(crate) fn push(&mut self, notify: Notify) {
        if self.all.len() >= self.sweep_at {
            self.all.retain(Notify::is_awaited);
            self.sweep_at = (2 * self.all.len()).max(SWEPT_MIN);
        }
        self.all.push(notify);
    }
}

#[cfg(test)]
mod tests {
    use ringserve_base::guard::wakers::Woken;

    use super::*;

    #[test]
    fn notice_wakes_the_last_waker_once() {
        let (mut noticed, notify) = notice();
        let woken = [Arc::new(Woken::default()), Arc::new(Woken::default())];
        for waker in &woken {
            let waker = Waker::from(waker.clone());
            assert!(Pin::new(&mut noticed).poll(&mut Context::from_waker(&waker)).is_pending());
        }
        drop(notify);
        assert_eq!(woken.map(|woken| woken.count()), [0, 1]);
        assert!(Pin::new(&mut noticed).poll(&mut Context::from_waker(Waker::noop())).is_ready());
    }

    #[test]
    fn notices_that_nothing_waits_for_do_not_pile_up() {
        let mut notices = Notices::default();
        let waiting: Vec<Noticed> = (0..100)
            .map(|_| {
                let (noticed, notify) = notice();
                notices.push(notify);
                noticed
            })
            .collect();
        (0..100_000).for_each(|_| notices.push(notice().1));
        assert!(notices.all.len() <= 2 * 100 + SWEPT_MIN, "{} notices", notices.all.len());
        drop(notices);
        for mut noticed in waiting {
            assert!(Pin::new(&mut noticed).poll(&mut Context::from_waker(Waker::noop())).is_ready());
        }
    }
}
