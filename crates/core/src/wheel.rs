//! One timer for each slot, on a hierarchical wheel.
//!
//! Four levels of 64 buckets. A bucket of level 0 is one step of about 17 ms wide, a bucket of the next level
//! is as wide as the whole level below it:
//!
//! ```text
//! level    bucket     whole level
//!   0       17 ms       1.07 s
//!   1      1.07 s       69 s
//!   2        69 s       73 min
//!   3      73 min       78 h     (later deadlines wait in the last bucket and are sorted in again)
//! ```
//!
//! Setting, moving and clearing a timer costs a few nanoseconds and no memory beyond 16 bytes for each slot.
//! When the wheel reaches a bucket of an upper level, its timers move down. A timer fires up to one step late
//! and never early.

use core::time::Duration;

use crate::Time;
use crate::chunked::Chunked;

/// A step of connections' limits is 2^24 ns: fine enough for limits given in tenths of a second, and found by a shift.
const STEP_SHIFT: u32 = 24;

/// The width of a step, which is how late a timer may fire.
pub(crate) const STEP: Duration = Duration::from_nanos(1 << STEP_SHIFT);

const LEVELS: usize = 4;
const BUCKET_BITS: u32 = 6;
const BUCKETS: usize = 1 << BUCKET_BITS;

const NONE: u32 = u32::MAX;
/// The last step there is, two years after the start.
const LAST: u32 = u32::MAX - 2;
/// The bucket of a timer that is not set.
const UNSET: u16 = u16::MAX;

#[derive(Clone, Copy, Debug)]
struct Node {
    /// In steps since the shard's start; 32 bits last for two years.
    deadline: u32,
    prev: u32,
    next: u32,
    /// Level and bucket.
    bucket: u16,
}

impl Default for Node {
    fn default() -> Node {
        Node { deadline: 0, prev: NONE, next: NONE, bucket: UNSET }
    }
}

/// See the module.
#[derive(Debug)]
pub struct Wheel {
    nodes: Chunked<Node>,
    heads: [[u32; BUCKETS]; LEVELS],
    /// Bit n is set exactly when bucket n of the level has a timer.
    occupied: [u64; LEVELS],
    /// A bound below all deadlines in a bucket, so that nobody wakes only to sort timers.
    earliest: [[u32; BUCKETS]; LEVELS],
    /// Every step up to this one has fired.
    now: u32,
    /// A step is two to the power of this many nanoseconds.
    step_shift: u32,
}

impl Default for Wheel {
    fn default() -> Wheel {
        Wheel::new()
    }
}

impl Wheel {
    /// A wheel with no timer set, at time zero, and the steps of connections' limits.
    pub fn new() -> Wheel {
        Wheel::with_step_shift(STEP_SHIFT)
    }

    /// One with steps of two to the power of `step_shift` nanoseconds.
    pub fn with_step_shift(step_shift: u32) -> Wheel {
        Wheel {
            step_shift,
            nodes: Chunked::new(),
            heads: [[NONE; BUCKETS]; LEVELS],
            occupied: [0; LEVELS],
            earliest: [[u32::MAX; BUCKETS]; LEVELS],
            now: 0,
        }
    }

    /// Sets the timer of `slot` to a step, or to the next one if that has passed, unless it is set to go off
    /// earlier. False if the system has no memory.
    pub fn set_earlier(&mut self, slot: u32, step: u32) -> bool {
        if !self.nodes.grow_to(slot) {
            return false;
        }
        let step = step.max(self.now + 1);
        let Some(node) = self.nodes.get(slot).copied() else { return false };
        if node.bucket == UNSET {
            self.link(slot, step);
        } else if step < node.deadline {
            self.unlink(slot);
            self.link(slot, step);
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
    pub fn next(&self) -> Option<Time> {
        let mut next = u32::MAX;
        for level in 0..LEVELS {
            if self.occupied[level] != 0 {
                // The first bucket after the one of now has the level's earliest timers.
                let first = (self.now >> (BUCKET_BITS * level as u32)) % BUCKETS as u32;
                let ahead = self.occupied[level].rotate_right(first).trailing_zeros();
                next = next.min(self.earliest[level][(first + ahead) as usize % BUCKETS]);
            }
        }
        (next != u32::MAX).then(|| Time::from_nanos(u64::from(next.max(self.now + 1)) << self.step_shift))
    }

    /// Moves on to `now` and puts the slots whose timer went off into `fired`.
    pub fn advance(&mut self, now: Time, fired: &mut impl Extend<u32>) {
        let target = self.step_at(now);
        while self.now < target {
            if self.occupied == [0; LEVELS] {
                self.now = target;
                return;
            }
            self.now += 1;
            let mut level = 1;
            // When a level comes round to bucket 0 the next bucket of the level above moves down.
            while level < LEVELS && self.now.trailing_zeros() >= BUCKET_BITS * level as u32 {
                self.cascade(level);
                level += 1;
            }
            self.fire(fired);
            if self.occupied[0] == 0 {
                self.skip_to_next_bucket(target);
            }
        }
    }

    /// The last step of this wheel that has begun at `time`.
    pub fn step_at(&self, time: Time) -> u32 {
        ((time.as_nanos() >> self.step_shift) as u32).min(LAST)
    }

    /// Nothing is due on level 0: go to the step before the next one at which a bucket moves down.
    fn skip_to_next_bucket(&mut self, target: u32) {
        let last = self.now | (BUCKETS as u32 - 1);
        self.now = self.now.max(last.min(target));
    }

    fn fire(&mut self, fired: &mut impl Extend<u32>) {
        let bucket = self.now as usize % BUCKETS;
        while self.heads[0][bucket] != NONE {
            let slot = self.heads[0][bucket];
            self.unlink(slot);
            fired.extend([slot]);
        }
    }

    fn cascade(&mut self, level: usize) {
        let bucket = (self.now >> (BUCKET_BITS * level as u32)) as usize % BUCKETS;
        let mut slot = self.heads[level][bucket];
        while slot != NONE {
            let node = self.nodes.get(slot).copied().unwrap_or_default();
            self.unlink(slot);
            // A deadline that is this very step belongs to bucket `now` of level 0, which fires next.
            self.link(slot, node.deadline);
            slot = node.next;
        }
    }

    fn link(&mut self, slot: u32, deadline: u32) {
        let (level, bucket) = self.place(deadline);
        let head = self.heads[level][bucket];
        if let Some(node) = self.nodes.get_mut(slot) {
            *node = Node { deadline, prev: NONE, next: head, bucket: (level * BUCKETS + bucket) as u16 };
        }
        if let Some(old) = self.nodes.get_mut(head) {
            old.prev = slot;
        }
        self.heads[level][bucket] = slot;
        if self.occupied[level] & 1 << bucket == 0 {
            self.occupied[level] |= 1 << bucket;
            self.earliest[level][bucket] = u32::MAX;
        }
        self.earliest[level][bucket] = self.earliest[level][bucket].min(deadline);
    }

    fn unlink(&mut self, slot: u32) {
        let Some(node) = self.nodes.get_mut(slot) else { return };
        let Node { prev, next, bucket, .. } = *node;
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
        }
    }

    /// Where a deadline waits now: the lowest level whose buckets have not come round to it twice.
    fn place(&self, deadline: u32) -> (usize, usize) {
        for level in 0..LEVELS {
            let shift = BUCKET_BITS * level as u32;
            if (deadline >> shift) - (self.now >> shift) < BUCKETS as u32 {
                return (level, (deadline >> shift) as usize % BUCKETS);
            }
        }
        let shift = BUCKET_BITS * (LEVELS as u32 - 1);
        (LEVELS - 1, ((self.now >> shift) as usize + BUCKETS - 1) % BUCKETS)
    }

    /// Panics if the lists, the bits and the bounds disagree.
    pub fn invariants(&self) {
        for level in 0..LEVELS {
            for bucket in 0..BUCKETS {
                let mut slot = self.heads[level][bucket];
                assert_eq!(slot != NONE, self.occupied[level] >> bucket & 1 == 1);
                let mut prev = NONE;
                while slot != NONE {
                    let node = self.nodes.get(slot).expect("a set timer is in the table");
                    assert_eq!((node.prev, usize::from(node.bucket)), (prev, level * BUCKETS + bucket));
                    assert!(node.deadline > self.now, "a timer did not go off");
                    assert!(node.deadline >= self.earliest[level][bucket]);
                    prev = slot;
                    slot = node.next;
                }
            }
        }
    }
}

/// The last step that has begun at `time`.
#[inline]
pub fn step_at(time: Time) -> u32 {
    ((time.as_nanos() >> STEP_SHIFT) as u32).min(LAST)
}

/// How many steps after one that has begun a time limit is over for certain.
pub(crate) fn steps_for(limit: Duration) -> u32 {
    let steps = limit.as_nanos().div_ceil(1 << STEP_SHIFT) + 1;
    u32::try_from(steps).unwrap_or(LAST).min(LAST)
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::collections::BTreeMap;
    use alloc::vec::Vec;
    use proptest::prelude::*;

    fn at(steps: u64) -> Time {
        Time::from_nanos(steps << STEP_SHIFT)
    }

    #[test]
    fn a_timer_far_ahead_fires_on_its_step_and_wakes_nobody_before() {
        for deadline in [1, 63, 64, 65, 4095, 4096, 4097, 300_000, 20_000_000] {
            let mut wheel = Wheel::new();
            wheel.set_earlier(7, deadline);
            let mut wakes = 0;
            let mut fired = Vec::new();
            while fired.is_empty() {
                let next = wheel.next().unwrap();
                wheel.advance(next, &mut fired);
                wheel.invariants();
                wakes += 1;
                assert!(wakes <= 1, "woken for nothing on the way to {deadline}");
            }
            assert_eq!(wheel.now, deadline);
        }
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
        for nanos in [0, 1, (1 << STEP_SHIFT) - 1, 1 << STEP_SHIFT, 12_345_678_901] {
            let from = Time::from_nanos(nanos);
            let over = Time::from_nanos(u64::from(step_at(from) + steps_for(limit)) << STEP_SHIFT);
            assert!(over >= from + limit && over - from <= limit + 2 * STEP);
        }
    }

    proptest! {
        #[test]
        fn the_wheel_fires_what_a_sorted_map_would(
            steps in prop::collection::vec((0u32..40, 0u64..1 << 20, 0u8..4, 0u32..21), 1..300)
        ) {
            let mut wheel = Wheel::new();
            let mut model: BTreeMap<u32, u64> = BTreeMap::new();
            let mut now = 0u64;
            for (slot, ahead, what, shift) in steps {
                let ahead = ahead >> shift;
                match what {
                    0 => {
                        now += ahead;
                        let mut fired = Vec::new();
                        wheel.advance(at(now), &mut fired);
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
                        wheel.set_earlier(slot, (now + ahead) as u32);
                        let deadline = (now + ahead).max(now + 1);
                        let entry = model.entry(slot).or_insert(deadline);
                        *entry = (*entry).min(deadline);
                    }
                }
                wheel.invariants();
                if let Some(first) = model.values().min() {
                    prop_assert!(wheel.next().unwrap() <= at(*first));
                } else {
                    prop_assert_eq!(wheel.next(), None);
                }
            }
        }
    }
}
