//! One timer for each slot, on a hierarchical wheel.
//!
//! Eight levels of 64 buckets. A bucket of level 0 is one step of about 17 ms wide, a bucket of the
//! next level is as wide as the whole level below it:
//!
//! ```text
//! level    bucket     whole level
//!   0       17 ms       1.07 s
//!   1      1.07 s       69 s
//!   2        69 s       73 min
//!   3      73 min       78 h
//!   4        78 h       208 days
//!   5    208 days       36 years      (levels 6 and 7: all that a clock of 64 bits counts)
//! ```
//!
//! Setting, moving and clearing a timer costs a few nanoseconds and no memory beyond 16 bytes for
//! each slot. When the wheel reaches a bucket of an upper level, its timers move down. Time in
//! which no bucket has a timer is passed in one jump, however long it was. A timer fires up to one
//! step late and never early.
//!
//! Steps are counted in 48 bits, which no clock of 64 bits of nanoseconds exceeds while a step has
//! 2^16 of them or more.

use core::cell::Cell;
use core::time::Duration;

use crate::Time;
use crate::tables::Chunked;

/// A step of connections' limits is 2^24 ns: fine enough for limits given in tenths of a second,
/// and found by a shift.
const STEP_SHIFT: u32 = 24;

/// The longest time limit: 2^31 steps, 417 days. Longer ones are cut to it, here and nowhere else.
/// [`Limits::check`] refuses those of more than a year. Connections keep 32 bits of a step, which
/// suffice for times up to twice as long ago.
///
/// [`Limits::check`]: crate::Limits::check
pub(crate) const STEPS_MAX: u32 = 1 << 31;

/// The width of a step, which is how late a timer may fire.
pub(crate) const STEP: Duration = Duration::from_nanos(1 << STEP_SHIFT);

const LEVELS: usize = 8;
const BUCKET_BITS: u32 = 6;
const BUCKETS: usize = 1 << BUCKET_BITS;

const NONE: u32 = u32::MAX;
/// The last step: the levels count up to it, and a [`Node`] has room for it.
const LAST: u64 = (1 << (LEVELS as u32 * BUCKET_BITS)) - 1;
/// The narrowest steps: narrower ones would not fit.
const STEP_SHIFT_MIN: u32 = 16;
/// The bucket of a timer that is not set.
const UNSET: u16 = u16::MAX;

#[derive(Clone, Copy, Debug)]
struct Node {
    /// The low 32 bits of the step in which it goes off.
    deadline_low: u32,
    prev: u32,
    next: u32,
    /// The upper 16 bits of that step.
    deadline_high: u16,
    /// Level and bucket.
    bucket: u16,
}

impl Default for Node {
    fn default() -> Node {
        Node { deadline_low: 0, prev: NONE, next: NONE, deadline_high: 0, bucket: UNSET }
    }
}

impl Node {
    fn deadline(&self) -> u64 {
        u64::from(self.deadline_high) << 32 | u64::from(self.deadline_low)
    }
}

/// A timer wheel: one timer for each number, set and cleared at a constant cost.
#[derive(Debug)]
pub struct Wheel {
    nodes: Chunked<Node>,
    heads: [[u32; BUCKETS]; LEVELS],
    /// Bit n is set exactly when bucket n of the level has a timer.
    occupied: [u64; LEVELS],
    /// Bit n is set exactly when level n has a timer.
    levels: u32,
    /// A bound below all deadlines in a bucket, so that no shard wakes only to sort timers.
    earliest: [[u64; BUCKETS]; LEVELS],
    /// Every step up to this one has fired.
    now: u64,
    /// The last result of [`next`](Wheel::next), if nothing changed it since, else 0.
    next: Cell<u64>,
    /// A step is two to the power of this many nanoseconds.
    step_shift: u32,
    /// Steps at which [`advance`](Wheel::advance) stopped.
    #[cfg(test)]
    stops: u64,
}

impl Default for Wheel {
    fn default() -> Wheel {
        Wheel::new()
    }
}

impl Wheel {
    /// A wheel with no timer set, at time zero, and with the steps of connections' limits.
    pub fn new() -> Wheel {
        Wheel::with_step_shift(STEP_SHIFT)
    }

    /// A wheel with steps of two to the power of `step_shift` nanoseconds, 16 or more.
    pub fn with_step_shift(step_shift: u32) -> Wheel {
        debug_assert!(step_shift >= STEP_SHIFT_MIN, "steps that 48 bits cannot count");
        Wheel {
            step_shift,
            nodes: Chunked::new(),
            heads: [[NONE; BUCKETS]; LEVELS],
            occupied: [0; LEVELS],
            levels: 0,
            earliest: [[u64::MAX; BUCKETS]; LEVELS],
            now: 0,
            next: Cell::new(0),
            #[cfg(test)]
            stops: 0,
        }
    }

    /// Sets the timer of `slot` to a step, or to the next one if that has passed, unless it is set
    /// to go off earlier. False if the system has no memory.
    pub fn set_earlier(&mut self, slot: u32, step: u64) -> bool {
        if !self.nodes.grow_to(slot) {
            return false;
        }
        let step = step.max(self.now + 1).min(LAST);
        let Some(node) = self.nodes.get(slot).copied() else { return false };
        if node.bucket == UNSET {
            self.outlet(slot, step);
        } else if step < node.deadline() {
            self.unlink(slot);
            self.outlet(slot, step);
        }
        true
    }

    /// Clears the timer of `slot`, if it is set.
    pub fn clear(&mut self, slot: u32) {
        if self.nodes.get(slot).is_some_and(|node| node.bucket != UNSET) {
            self.unlink(slot);
        }
    }

    /// A time before which no timer goes off; `None` if no timer is set.
    #[inline]
    pub fn next(&self) -> Option<Time> {
        let next = self.next_step();
        (next != u64::MAX).then(|| self.time_of(next))
    }

    /// The time before which no timer goes off; [`Time::NEVER`] if no timer is set.
    #[inline]
    pub fn next_or_never(&self) -> Time {
        self.time_of(self.next_step())
    }

    #[inline]
    fn next_step(&self) -> u64 {
        let mut next = self.next.get();
        if next == 0 {
            next = self.find_next();
            self.next.set(next);
        }
        next
    }

    /// The step of [`next`](Wheel::next), or the largest number.
    #[inline(never)]
    fn find_next(&self) -> u64 {
        let mut next = u64::MAX;
        let mut levels = self.levels;
        while levels != 0 {
            let level = levels.trailing_zeros() as usize;
            levels &= levels - 1;
            // The first bucket after the current one has the level's earliest timers.
            let first = self.bucket_of(self.now, level);
            let ahead = self.occupied[level].rotate_right(first as u32).trailing_zeros() as usize;
            next = next.min(self.earliest[level][(first + ahead) % BUCKETS]);
        }
        next.max(self.now + 1)
    }

    /// True if [`advance`](Wheel::advance) to `now` may find a timer that goes off.
    #[inline]
    pub fn is_due(&self, now: Time) -> bool {
        self.now < self.step_at(now)
    }

    /// Moves on to `now` and puts the slots whose timer went off into `fired`, in the order of
    /// their steps.
    #[inline]
    pub fn advance(&mut self, now: Time, fired: &mut impl Extend<u32>) {
        let target = self.step_at(now);
        if self.now < target {
            self.advance_to(target, fired);
        }
    }

    /// Stops at each step at which a bucket with timers comes round: at most once in each level for
    /// each of them.
    fn advance_to(&mut self, target: u64, fired: &mut impl Extend<u32>) {
        if target >= self.next.get() {
            self.next.set(0);
        }
        loop {
            let stop = self.next_stop();
            if stop > target {
                self.now = target;
                return;
            }
            #[cfg(test)]
            (self.stops += 1);
            self.now = stop;
            for level in 1..LEVELS {
                if self.occupied[level] >> self.bucket_of(stop, level) & 1 == 1 {
                    self.cascade(level);
                }
            }
            self.fire(fired);
        }
    }

    /// The next step at which a bucket with timers comes round.
    fn next_stop(&self) -> u64 {
        let mut next = u64::MAX;
        for level in 0..LEVELS {
            if self.occupied[level] != 0 {
                let shift = BUCKET_BITS * level as u32;
                let after = (self.now >> shift) + 1;
                let ahead = self.occupied[level].rotate_right(after as u32 % BUCKETS as u32).trailing_zeros();
                next = next.min((after + u64::from(ahead)) << shift);
            }
        }
        next
    }

    /// The last step of this wheel that has begun at `time`.
    #[inline]
    pub fn step_at(&self, time: Time) -> u64 {
        time.as_nanos() >> self.step_shift
    }

    /// The time at which a step begins, or the end of time if the clock does not count so far.
    fn time_of(&self, step: u64) -> Time {
        Time::from_nanos(step.saturating_mul(1 << self.step_shift))
    }

    /// The bucket of a level to which a step belongs.
    #[inline]
    fn bucket_of(&self, step: u64, level: usize) -> usize {
        (step >> (BUCKET_BITS * level as u32)) as usize % BUCKETS
    }

    fn fire(&mut self, fired: &mut impl Extend<u32>) {
        let bucket = self.bucket_of(self.now, 0);
        while self.heads[0][bucket] != NONE {
            let slot = self.heads[0][bucket];
            self.unlink(slot);
            fired.extend([slot]);
        }
    }

    fn cascade(&mut self, level: usize) {
        let bucket = self.bucket_of(self.now, level);
        let mut slot = self.heads[level][bucket];
        while slot != NONE {
            let node = self.nodes.get(slot).copied().unwrap_or_default();
            self.unlink(slot);
            // A deadline that is this very step belongs to bucket `now` of level 0, which fires
            // next.
            self.outlet(slot, node.deadline());
            slot = node.next;
        }
    }

    fn outlet(&mut self, slot: u32, deadline: u64) {
        self.next.set(self.next.get().min(deadline));
        let (level, bucket) = self.place(deadline);
        let head = self.heads[level][bucket];
        if let Some(node) = self.nodes.get_mut(slot) {
            *node = Node {
                deadline_low: deadline as u32,
                prev: NONE,
                next: head,
                deadline_high: (deadline >> 32) as u16,
                bucket: (level * BUCKETS + bucket) as u16,
            };
        }
        if let Some(old) = self.nodes.get_mut(head) {
            old.prev = slot;
        }
        self.heads[level][bucket] = slot;
        if self.occupied[level] & 1 << bucket == 0 {
            self.occupied[level] |= 1 << bucket;
            self.levels |= 1 << level;
            self.earliest[level][bucket] = u64::MAX;
        }
        self.earliest[level][bucket] = self.earliest[level][bucket].min(deadline);
    }

    fn unlink(&mut self, slot: u32) {
        let Some(node) = self.nodes.get_mut(slot) else { return };
        let Node { prev, next, bucket, .. } = *node;
        // It may have been the next one.
        self.next.set(0);
        *node = Node::default();
        let (level, bucket) = (usize::from(bucket) / BUCKETS, usize::from(bucket) % BUCKETS);
        if let Some(next) = self.nodes.get_mut(next) {
            next.prev = prev;
        }
        if prev == NONE {
            self.heads[level][bucket] = next;
        } else if let Some(prev) = self.nodes.get_mut(prev) {
            prev.next = next;
        }
        if self.heads[level][bucket] == NONE {
            self.occupied[level] &= !(1 << bucket);
            if self.occupied[level] == 0 {
                self.levels &= !(1 << level);
            }
        }
    }

    /// The place where a deadline waits now: the lowest level whose buckets have not come round to
    /// it twice.
    fn place(&self, deadline: u64) -> (usize, usize) {
        let mut level = 0;
        let (mut to, mut from) = (deadline, self.now);
        // The last level holds all deadlines.
        while to - from >= BUCKETS as u64 {
            (to, from, level) = (to >> BUCKET_BITS, from >> BUCKET_BITS, level + 1);
        }
        (level, to as usize % BUCKETS)
    }

    /// Panics if the lists, the bits and the bounds disagree.
    pub fn invariants(&self) {
        let cached = self.next.get();
        assert!(cached == 0 || (self.now < cached && cached <= self.find_next()), "the next timer is sooner");
        for level in 0..LEVELS {
            assert_eq!(self.occupied[level] != 0, self.levels >> level & 1 == 1);
            for bucket in 0..BUCKETS {
                let mut slot = self.heads[level][bucket];
                assert_eq!(slot != NONE, self.occupied[level] >> bucket & 1 == 1);
                let mut prev = NONE;
                while slot != NONE {
                    let node = self.nodes.get(slot).expect("a set timer is in the table");
                    assert_eq!((node.prev, usize::from(node.bucket)), (prev, level * BUCKETS + bucket));
                    assert!(node.deadline() > self.now, "a timer did not go off");
                    assert!(node.deadline() >= self.earliest[level][bucket]);
                    assert_eq!(bucket, self.bucket_of(node.deadline(), level));
                    prev = slot;
                    slot = node.next;
                }
            }
        }
    }
}

/// The last step of connections' limits that has begun at `time`.
#[inline]
pub fn step_at(time: Time) -> u64 {
    time.as_nanos() >> STEP_SHIFT
}

/// The number of steps, after one that has begun, within which a time limit is over for certain, at
/// most [`STEPS_MAX`].
pub(crate) fn steps_for(limit: Duration) -> u32 {
    let steps = limit.as_nanos().div_ceil(1 << STEP_SHIFT) + 1;
    u32::try_from(steps).unwrap_or(STEPS_MAX).min(STEPS_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::collections::BTreeMap;
    use alloc::vec::Vec;
    use proptest::prelude::*;

    /// Steps at which a wheel starts: none, one second before the counters of former wheels ended,
    /// and long after.
    const STARTS: [u64; 6] = [0, (1 << 28) - 60, (1 << 31) - 60, (1 << 32) - 60, 3 << 32, LAST - (1 << 33)];

    fn at(steps: u64) -> Time {
        Time::from_nanos(steps << STEP_SHIFT)
    }

    /// A wheel with steps so narrow that a clock counts all of them.
    fn wheel_at(step: u64) -> Wheel {
        let mut wheel = Wheel::with_step_shift(STEP_SHIFT_MIN);
        wheel.advance(wheel.time_of(step), &mut Vec::new());
        wheel
    }

    #[test]
    fn a_timer_far_ahead_fires_on_its_step_after_one_wake_up() {
        for start in STARTS {
            for ahead in [1, 63, 64, 65, 4095, 4096, 4097, 300_000, 20_000_000, 1 << 32] {
                let mut wheel = wheel_at(start);
                wheel.set_earlier(7, start + ahead);
                let mut fired = Vec::new();
                let next = wheel.next().unwrap();
                assert_eq!(next, wheel.time_of(start + ahead));
                wheel.advance(Time::from_nanos(next.as_nanos() - 1), &mut fired);
                wheel.invariants();
                assert!(fired.is_empty());
                wheel.advance(next, &mut fired);
                wheel.invariants();
                assert_eq!((fired, wheel.now), (alloc::vec![7], start + ahead));
            }
        }
    }

    #[test]
    fn an_empty_stretch_of_years_is_passed_in_one_jump() {
        let (day, mut fired) = (Duration::from_secs(24 * 3600), Vec::new());
        let mut wheel = Wheel::with_step_shift(20);
        wheel.advance(Time::ZERO + day * 365 * 500, &mut fired);
        assert_eq!(wheel.stops, 0);
        let mut wheel = Wheel::with_step_shift(20);
        // A shard that was quiet for a month has not moved its wheel.
        let quiet = Time::ZERO + day * 30;
        wheel.set_earlier(0, wheel.step_at(quiet + Duration::from_secs(1)));
        wheel.set_earlier(1, wheel.step_at(quiet + day * 835));
        wheel.set_earlier(2, u64::MAX);
        wheel.advance(quiet, &mut fired);
        assert!(fired.is_empty() && wheel.stops <= LEVELS as u64, "{} stops", wheel.stops);
        wheel.advance(quiet + day * 1000, &mut fired);
        assert_eq!(fired, [0, 1]);
        assert!(wheel.stops <= 2 * LEVELS as u64, "{} stops", wheel.stops);
        // The end of time never comes.
        assert_eq!(wheel.next(), Some(Time::from_nanos(u64::MAX)));
    }

    #[test]
    fn a_timer_is_moved_only_forward_to_an_earlier_time() {
        let mut wheel = Wheel::new();
        wheel.set_earlier(1, 500);
        wheel.set_earlier(1, 900);
        assert_eq!(wheel.next(), Some(at(500)));
        wheel.set_earlier(1, 3);
        assert_eq!(wheel.next(), Some(at(3)));
        wheel.clear(1);
        wheel.clear(1);
        assert_eq!(wheel.next(), None);
    }

    #[test]
    fn a_limit_is_never_over_early_and_at_most_two_steps_late() {
        let limit = Duration::from_millis(100);
        for nanos in [0, 1, (1 << STEP_SHIFT) - 1, 1 << STEP_SHIFT, 12_345_678_901, (1 << 56) - 1] {
            let from = Time::from_nanos(nanos);
            let over = at(step_at(from) + u64::from(steps_for(limit)));
            assert!(over >= from + limit && over - from <= limit + 2 * STEP);
        }
    }

    #[test]
    fn a_limit_of_ages_is_cut_to_the_longest() {
        assert!(steps_for(Duration::from_secs(365 * 24 * 3600)) < STEPS_MAX, "a year is not cut");
        assert_eq!(
            (steps_for(Duration::MAX), steps_for(Duration::from_secs(1 << 40))),
            (STEPS_MAX, STEPS_MAX)
        );
    }

    proptest! {
        #[test]
        fn the_wheel_fires_what_a_sorted_map_would(
            start in prop::sample::select(&STARTS[..]),
            steps in prop::collection::vec((0u32..40, 0u64..1 << 40, 0u8..4, 0u32..41), 1..300)
        ) {
            let mut wheel = wheel_at(start);
            let mut model: BTreeMap<u32, u64> = BTreeMap::new();
            let mut now = start;
            for (slot, ahead, what, shift) in steps {
                let ahead = (ahead >> shift).min(LAST - 1 - now);
                match what {
                    0 => {
                        now += ahead;
                        let mut fired = Vec::new();
                        let (set, stops) = (model.len() as u64, wheel.stops);
                        wheel.advance(wheel.time_of(now), &mut fired);
                        prop_assert!(wheel.stops - stops <= set * LEVELS as u64);
                        let in_order = fired.windows(2).all(|two| model[&two[0]] <= model[&two[1]]);
                        prop_assert!(in_order, "{:?} of {:?}", fired, model);
                        fired.sort_unstable();
                        let due: Vec<u32> =
                            model.iter().filter(|(_, deadline)| **deadline <= now).map(|(slot, _)| *slot).collect();
                        prop_assert_eq!(&fired, &due);
                        model.retain(|_, deadline| *deadline > now);
                    }
                    1 => {
                        wheel.clear(slot);
                        model.remove(&slot);
                    }
                    _ => {
                        wheel.set_earlier(slot, now + ahead);
                        let deadline = (now + ahead).max(now + 1);
                        let entry = model.entry(slot).or_insert(deadline);
                        *entry = (*entry).min(deadline);
                    }
                }
                wheel.invariants();
                if let Some(first) = model.values().min() {
                    let next = wheel.next().unwrap();
                    prop_assert!(next <= wheel.time_of(*first) && next > wheel.time_of(now));
                } else {
                    prop_assert_eq!(wheel.next(), None);
                }
            }
        }
    }
}
