//! News of the task that drives a connection for hyper.

use std::cell::{Cell, RefCell};
use std::task::{Context, Poll, Waker};

use ringserve_upstream::IdleEvent;

/// Whether a connection ended, and the task to wake when it does.
#[derive(Default)]
pub(super) struct News {
    ended: Cell<Option<IdleEvent>>,
    waker: RefCell<Option<Waker>>,
}

impl News {
    pub(super) fn end(&self, event: IdleEvent) {
        self.ended.set(Some(event));
        let waker = self.waker.take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Waits for the end. The last task that polled is woken.
    pub(super) fn poll(&self, task: &mut Context<'_>) -> Poll<IdleEvent> {
        if let Some(event) = self.ended.get() {
            return Poll::Ready(event);
        }
        let mut waker = self.waker.borrow_mut();
        if !waker.as_ref().is_some_and(|known| known.will_wake(task.waker())) {
            *waker = Some(task.waker().clone());
        }
        Poll::Pending
    }
}
