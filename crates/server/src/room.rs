//! Room for what a service keeps: it is taken, and free again once what took it is dropped.

use std::cell::Cell;
use std::fmt;
use std::rc::Rc;

/// Room for what a service keeps on a shard, in bytes or in any other unit: messages that wait for
/// a client, entries of a cache.
///
/// The value that [`take`](Capacity::take) returns is kept with the thing that takes the room, and
/// frees it when it is dropped, so nothing is counted by hand. A room may be
/// [within](Capacity::within) another one, which then bounds all of its parts together. The default
/// has room for nothing. Clones are the same room.
///
/// ```
/// use ringserve::limits::Capacity;
///
/// let all = Capacity::new(100);
/// let (one, other) = (all.within(60), all.within(60));
/// let kept = one.take(60).expect("room for 60");
/// assert!(one.take(1).is_none(), "it has its part");
/// assert!(other.take(41).is_none(), "40 are left for all others");
/// drop(kept);
/// assert_eq!((one.taken(), all.taken()), (0, 0));
/// ```
#[derive(Clone, Default)]
#[doc(alias = "Room")]
pub struct Capacity {
    inner: Rc<Inner>,
}

#[derive(Default)]
struct Inner {
    taken: Cell<usize>,
    max: usize,
    within: Option<Capacity>,
}

/// A part of a [`Capacity`] that is taken until this is dropped.
#[derive(Debug)]
#[must_use = "it is free again once this is dropped"]
#[doc(alias = "Taken")]
pub struct Reservation {
    room: Capacity,
    amount: usize,
}

impl Capacity {
    /// Room for `max`.
    pub fn new(max: usize) -> Capacity {
        Capacity { inner: Rc::new(Inner { max, ..Inner::default() }) }
    }

    /// Room for `max` that is taken from this room too.
    pub fn within(&self, max: usize) -> Capacity {
        Capacity { inner: Rc::new(Inner { max, taken: Cell::default(), within: Some(self.clone()) }) }
    }

    /// Takes `amount`. `None`, and nothing is taken, if that is too much for this room or for one
    /// that it is within.
    pub fn take(&self, amount: usize) -> Option<Reservation> {
        let mut taken = Reservation { room: self.clone(), amount: 0 };
        taken.resize(amount).then_some(taken)
    }

    /// The part that is taken.
    pub fn taken(&self) -> usize {
        self.inner.taken.get()
    }

    /// This room, and those that it is within.
    fn all(&self) -> impl Iterator<Item = &Inner> {
        std::iter::successors(Some(&*self.inner), |inner| inner.within.as_ref().map(|within| &*within.inner))
    }
}

impl Reservation {
    /// Takes `amount` instead. False, and nothing changes, if there is no room for that; less
    /// always fits.
    pub fn resize(&mut self, amount: usize) -> bool {
        let (before, grows) = (self.amount, amount > self.amount);
        let others = |room: &Inner| room.taken.get() - before;
        let fits = |room: &Inner| others(room).checked_add(amount).is_some_and(|after| after <= room.max);
        if grows && !self.room.all().all(fits) {
            return false;
        }
        self.room.all().for_each(|room| room.taken.set(others(room) + amount));
        self.amount = amount;
        true
    }

    /// The amount that it takes.
    pub fn amount(&self) -> usize {
        self.amount
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.resize(0);
    }
}

impl fmt::Debug for Capacity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Room({} of {})", self.taken(), self.inner.max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_takes_of_all_that_it_is_within_or_of_none() {
        let all = Capacity::new(10);
        let half = all.within(8);
        let quarter = half.within(100);
        let first = quarter.take(6).unwrap();
        assert_eq!([&all, &half, &quarter].map(Capacity::taken), [6, 6, 6]);
        assert!(quarter.take(3).is_none(), "the middle one has room for 2");
        assert!(quarter.take(usize::MAX).is_none());
        assert_eq!([&all, &half, &quarter].map(Capacity::taken), [6, 6, 6]);
        let _second = all.take(3).unwrap();
        assert!(half.take(2).is_none(), "the outer one has room for 1");
        drop(first);
        assert_eq!([&all, &half, &quarter].map(Capacity::taken), [3, 0, 0]);
    }

    #[test]
    fn a_room_without_a_bound_counts_no_further_than_it_can() {
        let room = Capacity::new(usize::MAX);
        let all = room.take(usize::MAX).unwrap();
        assert!(room.take(1).is_none());
        drop(all);
        assert_eq!((room.taken(), room.take(1).is_some()), (0, true));
    }

    #[test]
    fn what_is_taken_grows_as_far_as_there_is_room() {
        let room = Capacity::new(10);
        let (mut taken, _other) = (room.take(4).unwrap(), room.take(5).unwrap());
        assert!(!taken.resize(6));
        assert_eq!((taken.amount(), room.taken()), (4, 9));
        assert!(taken.resize(5) && taken.resize(0));
        assert_eq!((taken.amount(), room.taken()), (0, 5));
    }

    #[test]
    fn room_for_nothing_lets_nothing_be_taken() {
        assert!(Capacity::default().take(1).is_none());
        assert_eq!(Capacity::default().take(0).unwrap().amount(), 0);
    }
}
