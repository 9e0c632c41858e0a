//! A semaphore of one shard: first in, first out, and what comes last first while calls wait for
//! too long.
//!
//! ```text
//!                 ┌─ late: waited too long, woken to ask its service
//!   queue   1 2 3 │ 4 5 6 7   ◀── new calls
//!                 │ ▲     ▲
//!                 │ │     └── a permit goes here while calls are late
//!                 │ └──────── and here else
//!   insists 0 2   ◀── late ones that are to be served all the same: before all others
//! ```

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use ringserve_base::guard::{discard, wake};
use ringserve_core::{Frame, Time};

use super::sojourn::Sojourn;
use crate::overload::{Load, Shed};
use crate::shard::face::cx::Cx;
use crate::shard::face::handle::Shard;
use crate::shard::face::service::Service;

/// The wait of a call while its shard sheds requests, at most and unless the program says how long:
/// twice the wait at which Facebook's CoDel sees a queue that stands.
const LATE_AFTER: Duration = Duration::from_millis(10);

/// Late calls that are woken at once. More of them are found by the next permit that comes back,
/// and the next call.
const LATE_AT_ONCE: usize = 32;

/// A bound on how many calls hold a permit at once.
///
/// Invariant: while a call waits, no permit is free. A returned permit goes to a waiting call by
/// taking that off the lists; a call that finds itself off the lists has a permit. A lower bound
/// takes no permit back: more than `max` are held until as many came back.
#[derive(Debug)]
pub(crate) struct Permits {
    held: Cell<usize>,
    max: Cell<usize>,
    waiting: RefCell<Waiting>,
    next: Cell<u64>,
    /// `None` if the load of the shard alone makes calls late.
    sojourn: Option<Sojourn>,
    /// The shard, once a call waited that may be late.
    shard: OnceCell<Shard>,
}

/// Waiting calls, by a number that only grows: a dropped call leaves without a search through the
/// others.
#[derive(Debug, Default)]
struct Waiting {
    queue: BTreeMap<u64, Waits>,
    insists: BTreeMap<u64, Waker>,
    /// Calls of the queue with smaller numbers are late.
    late_below: u64,
}

#[derive(Debug)]
struct Waits {
    /// `None` once it is woken since it is late.
    waker: Option<Waker>,
    since: Time,
}

impl Waiting {
    fn len(&self) -> usize {
        self.queue.len() + self.insists.len()
    }

    /// When the first call began to wait that is not late.
    fn oldest(&self) -> Option<Time> {
        self.queue.range(self.late_below..).next().map(|(_, waits)| waits.since)
    }

    /// Takes the waker of the first call that is not late and began to wait before, and makes it
    /// late. `None` in it if that was taken before.
    fn make_late(&mut self, before: Time) -> Option<Option<Waker>> {
        let (number, waits) = self.queue.range_mut(self.late_below..).next()?;
        if waits.since >= before {
            return None;
        }
        self.late_below = number + 1;
        Some(waits.waker.take())
    }

    /// Takes the call off the lists that is next. Without a waker it is woken already.
    fn take_next(&mut self, last_first: bool) -> Option<Option<Waker>> {
        if let Some((_, waker)) = self.insists.pop_first() {
            return Some(Some(waker));
        }
        let (_, waits) = if last_first { self.queue.pop_last()? } else { self.queue.pop_first()? };
        Some(waits.waker)
    }

    fn waker(&mut self, number: u64) -> Option<&mut Option<Waker>> {
        self.queue.get_mut(&number).map(|waits| &mut waits.waker)
    }
}

impl Permits {
    pub(crate) fn new(permits: usize) -> Permits {
        Permits {
            held: Cell::new(0),
            max: Cell::new(permits),
            waiting: RefCell::default(),
            next: Cell::new(0),
            sojourn: None,
            shard: OnceCell::new(),
        }
    }

    /// The same where calls are late in a queue that stands, whatever the load of the shard.
    pub(crate) fn late_after(self, time: Duration) -> Permits {
        Permits { sojourn: Some(Sojourn::new(time)), ..self }
    }

    fn is_free(&self) -> bool {
        self.held.get() < self.max.get()
    }

    /// Permits that calls hold, those included that were given to a call which does not know of it
    /// yet.
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

    /// Waits for a permit, after the calls that wait already. None of them is late.
    #[cfg(feature = "tower")]
    pub(crate) async fn acquire(&self) -> Permit<'_> {
        let mut acquire = Acquire::new(self, None);
        loop {
            match poll_fn(|task| acquire.poll(task)).await {
                Ok(permit) => return permit,
                Err(Late) => acquire.insist(),
            }
        }
    }

    /// Waits for a permit for a call of `service`. `None` if the call was late, and the service
    /// answered it.
    pub(crate) async fn for_call<S: Service<H>, H>(
        &self,
        service: &S,
        cx: &Cx<'_, S::Session>,
        frame: &Frame<H>,
    ) -> Option<Permit<'_>> {
        let mut acquire = Acquire::new(self, Some(cx.shard()));
        loop {
            match poll_fn(|task| acquire.poll(task)).await {
                Ok(permit) => return Some(permit),
                Err(Late) => {
                    if service.shed(cx, frame, cx.load().max(Load::Shedding)) == Shed::Answered {
                        cx.head().count_shed();
                        return None;
                    }
                    acquire.insist();
                }
            }
        }
    }

    /// Since when a call must have waited to be late; `None` while none is. The time now, for that.
    fn late_since(&self) -> Option<Time> {
        let shard = self.shard.get()?;
        let is_shed = shard.load() >= Load::Shedding;
        let Some(sojourn) = &self.sojourn else {
            return is_shed.then(|| before(shard.now(), LATE_AFTER));
        };
        let now = shard.now();
        let oldest = self.waiting.borrow().oldest();
        let stands = sojourn.look(now, oldest.map_or(Duration::ZERO, |since| now - since));
        (stands || is_shed).then(|| before(now, sojourn.late_after()))
    }

    /// Wakes calls that are late. True while there may be such.
    fn wake_late(&self) -> bool {
        let Some(since) = self.late_since() else { return false };
        for _ in 0..LATE_AT_ONCE {
            let late = self.waiting.borrow_mut().make_late(since);
            match late {
                // A waker is user code: nothing is borrowed here, and this may be a drop in the
                // middle of another panic.
                Some(waker) => _ = waker.map(wake),
                None => break,
            }
        }
        true
    }

    /// Gives a call that waits a permit. False if no call waits.
    fn grant_next(&self) -> bool {
        if self.waiting() == 0 {
            return false;
        }
        let last_first = self.wake_late();
        let next = self.waiting.borrow_mut().take_next(last_first);
        next.map(|waker| waker.map(wake)).is_some()
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

fn before(now: Time, time: Duration) -> Time {
    Time::from_nanos(now.as_nanos().saturating_sub(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)))
}

/// A call waits for too long.
pub(crate) struct Late;

/// Waits for a permit. A drop leaves the lists, and passes on a permit that was given and not
/// taken.
struct Acquire<'a, 's> {
    permits: &'a Permits,
    /// For calls that may be late.
    shard: Option<&'s Shard>,
    /// The number while it waits, or has a permit without knowing it.
    number: Option<u64>,
}

impl<'a, 's> Acquire<'a, 's> {
    fn new(permits: &'a Permits, shard: Option<&'s Shard>) -> Acquire<'a, 's> {
        Acquire { permits, shard, number: None }
    }

    #[inline]
    fn poll(&mut self, task: &mut Context<'_>) -> Poll<Result<Permit<'a>, Late>> {
        let permits = self.permits;
        if self.number.is_none() && permits.is_free() {
            if let Some(sojourn) = &permits.sojourn {
                sojourn.is_empty();
            }
            permits.held.set(permits.held() + 1);
            return Poll::Ready(Ok(Permit { permits }));
        }
        self.poll_waiting(task)
    }

    #[cold]
    fn poll_waiting(&mut self, task: &mut Context<'_>) -> Poll<Result<Permit<'a>, Late>> {
        let permits = self.permits;
        let Some(number) = self.number else {
            // Cloning a waker is user code, which may give a permit back.
            let waker = task.waker().clone();
            if permits.is_free() {
                discard(Some(waker));
                permits.held.set(permits.held() + 1);
                return Poll::Ready(Ok(Permit { permits }));
            }
            let since =
                self.shard.map_or(Time::ZERO, |shard| permits.shard.get_or_init(|| shard.clone()).now());
            let number = permits.next.replace(permits.next.get() + 1);
            permits.waiting.borrow_mut().queue.insert(number, Waits { waker: Some(waker), since });
            self.number = Some(number);
            // Where no permit comes back others may be late all the same.
            permits.wake_late();
            return Poll::Pending;
        };
        let waiting = permits.waiting.borrow();
        let is_late = number < waiting.late_below;
        let known = match waiting.queue.get(&number) {
            Some(_) if is_late => return Poll::Ready(Err(Late)),
            Some(waits) => waits.waker.as_ref(),
            None => waiting.insists.get(&number),
        };
        let known = known.map(|waker| waker.will_wake(task.waker()));
        drop(waiting);
        match known {
            None => return Poll::Ready(Ok(self.given())),
            Some(true) => return Poll::Pending,
            Some(false) => {}
        }
        // Cloning and dropping a waker is user code: nothing is borrowed meanwhile.
        let mut waker = Some(task.waker().clone());
        let mut waiting = permits.waiting.borrow_mut();
        let is_given = match waiting.insists.get_mut(&number) {
            Some(known) => {
                waker = waker.map(|waker| std::mem::replace(known, waker));
                false
            }
            None => match waiting.waker(number) {
                Some(known) => {
                    std::mem::swap(known, &mut waker);
                    false
                }
                None => true,
            },
        };
        drop(waiting);
        discard(waker);
        if is_given { Poll::Ready(Ok(self.given())) } else { Poll::Pending }
    }

    /// The permit that another call passed on.
    fn given(&mut self) -> Permit<'a> {
        self.number = None;
        Permit { permits: self.permits }
    }

    /// Waits on although it is late. The next poll leaves its waker.
    fn insist(&mut self) {
        let Some(number) = self.number else { return };
        let mut waiting = self.permits.waiting.borrow_mut();
        if waiting.queue.remove(&number).is_some() {
            waiting.insists.insert(number, Waker::noop().clone());
        }
    }
}

impl Drop for Acquire<'_, '_> {
    fn drop(&mut self) {
        let Some(number) = self.number else { return };
        let mut waiting = self.permits.waiting.borrow_mut();
        let queued = waiting.queue.remove(&number).map(|waits| waits.waker);
        let waited = queued.or_else(|| waiting.insists.remove(&number).map(Some));
        drop(waiting);
        match waited {
            Some(waker) => discard(waker),
            None => self.permits.release(),
        }
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
    use ringserve_base::guard::wakers::Woken;

    use super::*;
    use std::sync::Arc;

    fn poll<'a>(acquire: &mut Acquire<'a, '_>, woken: &Arc<Woken>) -> Option<Permit<'a>> {
        let waker = Waker::from(woken.clone());
        match acquire.poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(Ok(permit)) => Some(permit),
            Poll::Ready(Err(Late)) => panic!("a call is late without a shard"),
            Poll::Pending => None,
        }
    }

    fn acquire(permits: &Permits) -> Acquire<'_, '_> {
        Acquire::new(permits, None)
    }

    #[test]
    fn permits_go_to_those_who_waited_longest() {
        let permits = Permits::new(1);
        let woken: Vec<Arc<Woken>> = (0..3).map(|_| Arc::default()).collect();
        let mut first = acquire(&permits);
        let held = poll(&mut first, &woken[0]).expect("one is free");
        let (mut second, mut third) = (acquire(&permits), acquire(&permits));
        assert!(poll(&mut second, &woken[1]).is_none() && poll(&mut third, &woken[2]).is_none());
        drop(held);
        assert_eq!((woken[1].count(), woken[2].count()), (1, 0));
        // The permit belongs to the second call already: a new call does not get in between.
        let mut late = acquire(&permits);
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
        let held = poll(&mut acquire(&permits), &woken).expect("one is free");
        let (mut second, mut third) = (acquire(&permits), acquire(&permits));
        assert!(poll(&mut second, &woken).is_none() && poll(&mut third, &woken).is_none());
        drop(second);
        assert_eq!(permits.waiting(), 1);
        drop(held);
        assert!(poll(&mut third, &woken).is_some());
        assert_eq!((permits.held(), permits.waiting()), (0, 0));
    }

    #[test]
    fn waiter_dropped_with_an_unseen_permit_hands_it_on() {
        let permits = Permits::new(1);
        let woken: Arc<Woken> = Arc::default();
        let held = poll(&mut acquire(&permits), &woken).expect("one is free");
        let (mut second, mut third) = (acquire(&permits), acquire(&permits));
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
        let held = poll(&mut acquire(&permits), &old).expect("one is free");
        let mut second = acquire(&permits);
        assert!(poll(&mut second, &old).is_none() && poll(&mut second, &new).is_none());
        drop(held);
        assert_eq!((old.count(), new.count()), (0, 1));
    }
    #[test]
    fn lower_bound_takes_back_and_a_higher_one_passes_on() {
        let permits = Permits::new(2);
        let woken: Arc<Woken> = Arc::default();
        let mut held: Vec<_> = (0..2).filter_map(|_| poll(&mut acquire(&permits), &woken)).collect();
        let mut waits: Vec<_> = (0..3).map(|_| acquire(&permits)).collect();
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
