//! Calls that wait for a connection.

use std::cell::RefCell;
use std::future::poll_fn;
use std::io;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use super::{Connection, Kept, Pool, Pools, nanos};
use crate::view::Member;

/// A call in the queue. What it waits for is put here, so that no call that comes later gets in
/// between.
pub(super) struct Waiter<C> {
    result: RefCell<Option<io::Result<Kept<C>>>>,
    waker: RefCell<Option<Waker>>,
}

impl<C> Waiter<C> {
    /// Hands it a connection, or the error of one.
    pub(super) fn give(&self, result: io::Result<Kept<C>>) {
        *self.result.borrow_mut() = Some(result);
        // A waker is user code: nothing is borrowed.
        let waker = self.waker.borrow_mut().take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    fn poll(&self, task: &mut Context<'_>) -> Poll<io::Result<Kept<C>>> {
        if let Some(result) = self.result.borrow_mut().take() {
            return Poll::Ready(result);
        }
        let waker = task.waker().clone();
        let old = self.waker.borrow_mut().replace(waker);
        drop(old);
        Poll::Pending
    }
}

/// The place of a call in the queue. Its drop leaves the queue, and passes on a connection that the
/// call has not seen.
pub(super) struct Waiting<'a, C: Connection> {
    pools: &'a Rc<Pools<C>>,
    member: &'a Rc<Member<Pool<C>>>,
    waiter: Rc<Waiter<C>>,
}

impl<'a, C: Connection> Waiting<'a, C> {
    pub(super) fn begin(pools: &'a Rc<Pools<C>>, member: &'a Rc<Member<Pool<C>>>) -> Waiting<'a, C> {
        let waiter = Rc::new(Waiter { result: RefCell::default(), waker: RefCell::default() });
        let (pool, now) = (&member.part, pools.view.now());
        // Where none waited for as long as that, nothing is known.
        let quiet = now.saturating_sub(pool.waited_at.get());
        if pool.waiters.borrow().is_empty() && quiet >= nanos(pools.limits().failfast_after) {
            pool.stuck_since.set(now);
        }
        pool.waiters.borrow_mut().push_back(waiter.clone());
        pools.waiting.set(pools.waiting.get() + 1);
        Waiting { pools, member, waiter }
    }

    pub(super) async fn result(&mut self) -> io::Result<Kept<C>> {
        poll_fn(|task| self.waiter.poll(task)).await
    }
}

impl<C: Connection> Drop for Waiting<'_, C> {
    fn drop(&mut self) {
        self.pools.waiting.set(self.pools.waiting.get() - 1);
        self.member.part.waited_at.set(self.pools.view.now());
        let unseen = self.waiter.result.borrow_mut().take();
        match unseen {
            Some(Ok(kept)) => self.pools.shelve(self.member, kept),
            Some(Err(_)) => {}
            None => self.member.part.waiters.borrow_mut().retain(|waiter| !Rc::ptr_eq(waiter, &self.waiter)),
        }
    }
}
