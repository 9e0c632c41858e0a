//! A state of the shard that begins once, with the tasks that wait for it.

use std::cell::{Cell, RefCell};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use ringserve_base::guard::{Panicked, discard, wake};

/// Something that begins once. Clones share it.
#[derive(Clone, Default)]
pub(crate) struct Flag {
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

impl Flag {
    pub(crate) fn has_begun(&self) -> bool {
        self.inner.begun.get()
    }

    /// Wakes every task that waits for it. If a waker panicked, the others were woken.
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

    pub(crate) fn wait(&self) -> FlagWait {
        FlagWait { flag: self.clone(), number: None }
    }
}

/// Waits until it has begun.
pub(crate) struct FlagWait {
    flag: Flag,
    number: Option<u32>,
}

impl FlagWait {
    /// True if there is nothing to wait for.
    pub(crate) fn is_over(&self) -> bool {
        self.flag.has_begun()
    }
}

impl Future for FlagWait {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<()> {
        let this = &mut *self;
        if this.flag.has_begun() {
            return Poll::Ready(());
        }
        let waiters = &this.flag.inner.waiters;
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

impl Drop for FlagWait {
    fn drop(&mut self) {
        let Some(number) = self.number else { return };
        let mut waiters = self.flag.inner.waiters.borrow_mut();
        waiters.free.push(number);
        let waker = waiters.wakers[number as usize].take();
        drop(waiters);
        discard(waker);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dropped_wait_leaves_nothing_and_its_number_is_used_again() {
        let flag = Flag::default();
        for _ in 0..3 {
            let mut wait = flag.wait();
            assert!(Pin::new(&mut wait).poll(&mut Context::from_waker(Waker::noop())).is_pending());
        }
        assert_eq!(flag.inner.waiters.borrow().wakers.len(), 1);
        let mut wait = flag.wait();
        flag.begin().unwrap();
        assert!(Pin::new(&mut wait).poll(&mut Context::from_waker(Waker::noop())).is_ready());
    }

    #[test]
    fn a_waker_that_panics_keeps_no_other_from_being_woken() {
        use crate::shard::wakes::inbox::{ShardRemote, TaskWaker};
        let flag = Flag::default();
        let mut waits = [flag.wait(), flag.wait()];
        let bad = ringserve_base::guard::wakers::bomb();
        assert!(Pin::new(&mut waits[0]).poll(&mut Context::from_waker(&bad)).is_pending());
        let remote = ShardRemote::new();
        let good = TaskWaker::new(&remote, 7).waker();
        assert!(Pin::new(&mut waits[1]).poll(&mut Context::from_waker(&good)).is_pending());
        assert!(flag.begin().is_err());
        assert!(!remote.fall_asleep(), "the second one was woken");
    }
}
