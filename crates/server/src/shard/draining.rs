//! Waiting for the server's shutdown.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use crate::guard::{Panicked, discard, wake};

/// When connections end that end by themselves in a drain.
#[derive(Clone, Copy, Debug, Default)]
#[cfg_attr(not(feature = "http"), allow(dead_code, reason = "connections of HTTP ask for it"))]
pub(crate) struct Moment {
    /// Time over which they do, each at a random moment.
    pub(crate) spread: Duration,
    /// Time that a request which is on its way may take.
    pub(crate) first: Duration,
}

#[cfg(feature = "http")]
impl Moment {
    /// The time until the moment of one of them, by a random number.
    pub(crate) fn of(self, random: u64) -> Duration {
        self.spread.mul_f64(random as f64 / u64::MAX as f64)
    }

    /// The same for one that may be asked meanwhile.
    pub(crate) fn behind_first(self, random: u64) -> Duration {
        let spread = self.spread.saturating_sub(self.first);
        self.first + Moment { spread, ..self }.of(random)
    }
}

/// The state of the drain, with the tasks that wait for it. Clones share it.
#[derive(Clone, Default)]
pub(crate) struct DrainFlag {
    inner: Rc<Inner>,
}

#[derive(Default)]
struct Inner {
    begun: Cell<bool>,
    waiters: RefCell<Waiters>,
}

#[derive(Default)]
struct Waiters {
    /// By number; `None` if the number is free.
    wakers: Vec<Option<Waker>>,
    free: Vec<u32>,
}

impl DrainFlag {
    pub(crate) fn has_begun(&self) -> bool {
        self.inner.begun.get()
    }

    /// Wakes every task that waits for the drain. If a waker panicked, the others were woken.
    pub(crate) fn begin(&self) -> Result<(), Panicked> {
        self.inner.begun.set(true);
        let (mut number, mut all) = (0, Ok(()));
        loop {
            // One after the other, with nothing borrowed meanwhile: a waker is user code.
            let waker = match self.inner.waiters.borrow_mut().wakers.get_mut(number) {
                Some(waker) => waker.take(),
                None => return all,
            };
            if let Some(waker) = waker {
                all = all.and(wake(waker));
            }
            number += 1;
        }
    }

    pub(crate) fn wait(&self) -> Draining {
        Draining { draining: self.clone(), number: None }
    }
}

/// Waits until the server shuts down. See [`Shard::draining`](crate::Shard::draining).
#[must_use = "a future does nothing until it is awaited"]
pub struct Draining {
    draining: DrainFlag,
    number: Option<u32>,
}

impl Future for Draining {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<()> {
        let this = &mut *self;
        if this.draining.has_begun() {
            return Poll::Ready(());
        }
        let waiters = &this.draining.inner.waiters;
        // Mostly the same task polls again.
        if let Some(number) = this.number
            && let Some(known) = &waiters.borrow().wakers[number as usize]
            && known.will_wake(task.waker())
        {
            return Poll::Pending;
        }
        // Cloning and dropping a waker is user code: nothing is borrowed meanwhile.
        let waker = task.waker().clone();
        let mut borrowed = waiters.borrow_mut();
        let waiters = &mut *borrowed;
        let number = *this.number.get_or_insert_with(|| {
            waiters.free.pop().unwrap_or_else(|| {
                waiters.wakers.push(None);
                waiters.wakers.len() as u32 - 1
            })
        });
        let old = waiters.wakers[number as usize].replace(waker);
        drop(borrowed);
        drop(old);
        Poll::Pending
    }
}

impl Drop for Draining {
    fn drop(&mut self) {
        let Some(number) = self.number else { return };
        let mut waiters = self.draining.inner.waiters.borrow_mut();
        waiters.free.push(number);
        let waker = waiters.wakers[number as usize].take();
        drop(waiters);
        discard(waker);
    }
}

impl fmt::Debug for Draining {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Draining({})", self.draining.has_begun())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dropped_wait_leaves_nothing_and_its_number_is_used_again() {
        let draining = DrainFlag::default();
        for _ in 0..3 {
            let mut wait = draining.wait();
            assert!(Pin::new(&mut wait).poll(&mut Context::from_waker(Waker::noop())).is_pending());
        }
        assert_eq!(draining.inner.waiters.borrow().wakers.len(), 1);
        let mut wait = draining.wait();
        draining.begin().unwrap();
        assert!(Pin::new(&mut wait).poll(&mut Context::from_waker(Waker::noop())).is_ready());
    }

    #[test]
    fn a_waker_that_panics_keeps_no_other_from_being_woken() {
        use crate::shard::inbox::{RemoteShard, TaskWaker};
        let draining = DrainFlag::default();
        let mut waits = [draining.wait(), draining.wait()];
        let bad = crate::guard::tests::bomb();
        assert!(Pin::new(&mut waits[0]).poll(&mut Context::from_waker(&bad)).is_pending());
        let remote = RemoteShard::new();
        let good = TaskWaker::new(&remote, 7).waker();
        assert!(Pin::new(&mut waits[1]).poll(&mut Context::from_waker(&good)).is_pending());
        assert!(draining.begin().is_err());
        assert!(!remote.fall_asleep(), "the second one was woken");
    }
}
