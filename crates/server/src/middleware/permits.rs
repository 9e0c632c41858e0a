//! A semaphore of one shard, first in, first out.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use crate::guard::{discard, wake};

/// A bound on how many calls hold a permit at once.
///
/// Invariant: while a call waits, no permit is free. A returned permit goes to the first waiting call by taking that off the
/// list; a call that finds itself off the list has a permit.
#[derive(Debug)]
pub(crate) struct Permits {
    free: Cell<usize>,
    /// Waiting calls, by a number that only grows: a dropped call leaves without a search through the others.
    waiting: RefCell<BTreeMap<u64, Waker>>,
    next: Cell<u64>,
}

impl Permits {
    pub(crate) fn new(permits: usize) -> Permits {
        Permits { free: Cell::new(permits), waiting: RefCell::default(), next: Cell::new(0) }
    }

    pub(crate) fn free(&self) -> usize {
        self.free.get()
    }

    pub(crate) fn waiting(&self) -> usize {
        self.waiting.borrow().len()
    }

    /// Waits for a permit, behind the calls that wait already.
    pub(crate) fn acquire(&self) -> Acquire<'_> {
        Acquire { permits: self, number: None }
    }

    /// Passes a permit on.
    fn release(&self) {
        let first = self.waiting.borrow_mut().pop_first();
        match first {
            // A waker is user code: nothing is borrowed here, and this may be a drop in the middle of another panic.
            Some((_number, waker)) => _ = wake(waker),
            None => self.free.set(self.free.get() + 1),
        }
        self.invariants();
    }

    fn invariants(&self) {
        debug_assert!(self.free() == 0 || self.waiting() == 0, "{self:?}");
    }
}

/// Waits for a permit. A drop leaves the list, and passes on a permit that was given and not taken.
pub(crate) struct Acquire<'a> {
    permits: &'a Permits,
    /// The number while it waits, or has a permit without knowing it.
    number: Option<u64>,
}

impl<'a> Future for Acquire<'a> {
    type Output = Permit<'a>;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<Permit<'a>> {
        let permits = self.permits;
        let Some(number) = self.number else {
            if permits.free() == 0 {
                // Cloning a waker is user code, which may give a permit back.
                let waker = task.waker().clone();
                if permits.free() == 0 {
                    let number = permits.next.replace(permits.next.get() + 1);
                    permits.waiting.borrow_mut().insert(number, waker);
                    self.number = Some(number);
                    return Poll::Pending;
                }
                discard(Some(waker));
            }
            permits.free.set(permits.free() - 1);
            return Poll::Ready(Permit { permits });
        };
        let known = permits.waiting.borrow().get(&number).map(|waker| waker.will_wake(task.waker()));
        match known {
            None => {
                self.number = None;
                return Poll::Ready(Permit { permits });
            }
            Some(true) => {}
            Some(false) => {
                // Cloning and dropping a waker is user code: nothing is borrowed meanwhile.
                let mut waker = task.waker().clone();
                let given = match permits.waiting.borrow_mut().get_mut(&number) {
                    Some(known) => {
                        std::mem::swap(known, &mut waker);
                        false
                    }
                    None => true,
                };
                drop(waker);
                if given {
                    self.number = None;
                    return Poll::Ready(Permit { permits });
                }
            }
        }
        Poll::Pending
    }
}

impl Drop for Acquire<'_> {
    fn drop(&mut self) {
        let Some(number) = self.number else { return };
        let waited = self.permits.waiting.borrow_mut().remove(&number);
        if waited.is_none() {
            self.permits.release();
        }
        discard(waited);
    }
}

/// The right to go on. Its drop returns the permit.
pub(crate) struct Permit<'a> {
    permits: &'a Permits,
}

impl Drop for Permit<'_> {
    #[inline]
    fn drop(&mut self) {
        self.permits.release();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guard::tests::Woken;
    use std::sync::Arc;

    fn poll<'a>(acquire: &mut Acquire<'a>, woken: &Arc<Woken>) -> Option<Permit<'a>> {
        let waker = Waker::from(woken.clone());
        match Pin::new(acquire).poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(permit) => Some(permit),
            Poll::Pending => None,
        }
    }

    #[test]
    fn permits_go_to_those_who_waited_longest() {
        let permits = Permits::new(1);
        let woken: Vec<Arc<Woken>> = (0..3).map(|_| Arc::default()).collect();
        let mut first = permits.acquire();
        let held = poll(&mut first, &woken[0]).expect("one is free");
        let (mut second, mut third) = (permits.acquire(), permits.acquire());
        assert!(poll(&mut second, &woken[1]).is_none() && poll(&mut third, &woken[2]).is_none());
        drop(held);
        assert_eq!((woken[1].count(), woken[2].count()), (1, 0));
        // The permit belongs to the second call already: a new call does not get in between.
        let mut late = permits.acquire();
        assert!(poll(&mut late, &woken[0]).is_none());
        drop(poll(&mut second, &woken[1]).expect("it was given one"));
        assert_eq!(woken[2].count(), 1);
        drop(poll(&mut third, &woken[2]).expect("it was given one"));
        drop(poll(&mut late, &woken[0]).expect("it was given one"));
        assert_eq!((permits.free(), permits.waiting()), (1, 0));
    }

    #[test]
    fn one_that_is_dropped_while_it_waits_leaves_the_list() {
        let permits = Permits::new(1);
        let woken: Arc<Woken> = Arc::default();
        let held = poll(&mut permits.acquire(), &woken).expect("one is free");
        let (mut second, mut third) = (permits.acquire(), permits.acquire());
        assert!(poll(&mut second, &woken).is_none() && poll(&mut third, &woken).is_none());
        drop(second);
        assert_eq!(permits.waiting(), 1);
        drop(held);
        assert!(poll(&mut third, &woken).is_some());
        assert_eq!((permits.free(), permits.waiting()), (1, 0));
    }

    #[test]
    fn one_that_is_dropped_with_a_permit_it_does_not_know_of_passes_it_on() {
        let permits = Permits::new(1);
        let woken: Arc<Woken> = Arc::default();
        let held = poll(&mut permits.acquire(), &woken).expect("one is free");
        let (mut second, mut third) = (permits.acquire(), permits.acquire());
        assert!(poll(&mut second, &woken).is_none() && poll(&mut third, &woken).is_none());
        drop(held);
        drop(second);
        assert_eq!(woken.count(), 2, "the third one is woken in its place");
        assert!(poll(&mut third, &woken).is_some());
        drop(third);
        assert_eq!((permits.free(), permits.waiting()), (1, 0));
    }

    #[test]
    fn the_waker_of_the_last_poll_is_woken() {
        let permits = Permits::new(1);
        let (old, new): (Arc<Woken>, Arc<Woken>) = Default::default();
        let held = poll(&mut permits.acquire(), &old).expect("one is free");
        let mut second = permits.acquire();
        assert!(poll(&mut second, &old).is_none() && poll(&mut second, &new).is_none());
        drop(held);
        assert_eq!((old.count(), new.count()), (0, 1));
    }
}
