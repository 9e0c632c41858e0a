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
/// list; a call that finds itself off the list has a permit. A lower bound takes no permit back: more than `max` are held until
/// as many came back.
#[derive(Debug)]
pub(crate) struct Permits {
    held: Cell<usize>,
    max: Cell<usize>,
    /// Waiting calls, by a number that only grows: a dropped call leaves without a search through the others.
    waiting: RefCell<BTreeMap<u64, Waker>>,
    next: Cell<u64>,
}

impl Permits {
    pub(crate) fn new(permits: usize) -> Permits {
        Permits {
            held: Cell::new(0),
            max: Cell::new(permits),
            waiting: RefCell::default(),
            next: Cell::new(0),
        }
    }

    fn is_free(&self) -> bool {
        self.held.get() < self.max.get()
    }

    /// Permits that calls hold, those included that were given to a call which does not know of it yet.
    pub(crate) fn held(&self) -> usize {
        self.held.get()
    }

    pub(crate) fn max(&self) -> usize {
        self.max.get()
    }

    /// Sets how many may be held at once from now on.
    pub(crate) fn set_max(&self, max: usize) {
        self.max.set(max);
        while self.is_free() && self.grant_next() {
            self.held.set(self.held() + 1);
        }
        self.invariants();
    }

    pub(crate) fn waiting(&self) -> usize {
        self.waiting.borrow().len()
    }

    /// Waits for a permit, behind the calls that wait already.
    pub(crate) fn acquire(&self) -> Acquire<'_> {
        Acquire { permits: self, number: None }
    }

    /// Gives the first call that waits a permit. False if no call waits.
    fn grant_next(&self) -> bool {
        let first = self.waiting.borrow_mut().pop_first();
        // A waker is user code: nothing is borrowed here, and this may be a drop in the middle of another panic.
        first.map(|(_number, waker)| wake(waker)).is_some()
    }

    /// Takes a permit back, or passes it on.
    fn release(&self) {
        if self.held() > self.max() || !self.grant_next() {
            self.held.set(self.held() - 1);
        }
        self.invariants();
    }

    fn invariants(&self) {
        debug_assert!(!self.is_free() || self.waiting() == 0, "{self:?}");
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
            if !permits.is_free() {
                // Cloning a waker is user code, which may give a permit back.
                let waker = task.waker().clone();
                if !permits.is_free() {
                    let number = permits.next.replace(permits.next.get() + 1);
                    permits.waiting.borrow_mut().insert(number, waker);
                    self.number = Some(number);
                    return Poll::Pending;
                }
                discard(Some(waker));
            }
            permits.held.set(permits.held() + 1);
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
        assert_eq!((permits.held(), permits.waiting()), (0, 0));
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
        assert_eq!((permits.held(), permits.waiting()), (0, 0));
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
        assert_eq!((permits.held(), permits.waiting()), (0, 0));
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
    #[test]
    fn lower_bound_takes_back_and_a_higher_one_passes_on() {
        let permits = Permits::new(2);
        let woken: Arc<Woken> = Arc::default();
        let mut held: Vec<_> = (0..2).filter_map(|_| poll(&mut permits.acquire(), &woken)).collect();
        let mut waits: Vec<_> = (0..3).map(|_| permits.acquire()).collect();
        assert!(waits.iter_mut().all(|one| poll(one, &woken).is_none()));
        permits.set_max(1);
        held.pop();
        assert_eq!(
            (permits.held(), permits.waiting(), woken.count()),
            (1, 3, 0),
            "the permit is not passed on"
        );
        permits.set_max(3);
        assert_eq!((permits.held(), permits.waiting(), woken.count()), (3, 1, 2));
        held.extend(waits.iter_mut().filter_map(|one| poll(one, &woken)));
        assert_eq!(held.len(), 3);
        drop((waits, held));
        assert_eq!((permits.held(), permits.waiting()), (0, 0));
    }
}
