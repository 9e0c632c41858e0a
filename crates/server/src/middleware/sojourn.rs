//! Whether a queue stands: the shortest wait of a while, as in CoDel.
//!
//! A queue that was empty, or nearly so, at any moment of the last interval takes up a burst, and
//! is as it should be. One whose oldest call waited for longer than the target at each moment of it
//! only makes all of them wait.

use std::cell::Cell;
use std::time::Duration;

use ringserve_core::Time;

/// The interval, beside what a call may wait: CoDel's 100 ms beside Facebook's 10 ms.
const INTERVAL: u32 = 10;

/// The target, as a part of what a call may wait: Facebook's 5 ms beside 10 ms.
const TARGET_PART: u32 = 2;

/// The shortest wait of the interval that runs, and what came of the one before.
#[derive(Debug)]
pub(super) struct Sojourn {
    late_after: Duration,
    ends: Cell<Time>,
    shortest: Cell<Duration>,
    stands: Cell<bool>,
}

impl Sojourn {
    pub(super) fn new(late_after: Duration) -> Sojourn {
        Sojourn {
            late_after,
            ends: Cell::new(Time::ZERO),
            shortest: Cell::new(Duration::ZERO),
            stands: Cell::new(false),
        }
    }

    /// The time that a call may wait in a queue that stands.
    pub(super) fn late_after(&self) -> Duration {
        self.late_after
    }

    /// No call waits. Costs no look at the clock.
    #[inline]
    pub(super) fn is_empty(&self) {
        self.shortest.set(Duration::ZERO);
    }

    /// Takes how long the oldest call has waited. True if the queue stands.
    pub(super) fn look(&self, now: Time, oldest: Duration) -> bool {
        let ends = self.ends.get();
        if now >= ends {
            let interval = self.late_after.saturating_mul(INTERVAL);
            // Of an interval that was not looked at nothing is known.
            let was_looked_at = now - ends < interval;
            self.stands.set(was_looked_at && self.shortest.get() > self.late_after / TARGET_PART);
            self.ends.set(now + interval);
            self.shortest.set(oldest);
        } else {
            self.shortest.set(self.shortest.get().min(oldest));
        }
        self.stands.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// Times from then on, each millisecond, at which the queue stands with these waits.
    fn stands(sojourn: &Sojourn, from: u64, waits: impl Iterator<Item = u64>) -> Vec<u64> {
        let times = (from..).zip(waits);
        times
            .filter(|(at, wait)| sojourn.look(Time::from_nanos(at * 1_000_000), ms(*wait)))
            .map(|(at, _)| at)
            .collect()
    }

    #[test]
    fn queue_stands_after_an_interval_above_the_target() {
        let sojourn = Sojourn::new(ms(10));
        let stood = stands(&sojourn, 1000, (0..300).map(|_| 6));
        // The first look begins an interval.
        assert_eq!((stood.first(), stood.len()), (Some(&1100), 200));
        // A single moment at which it was short ends that with the interval.
        let stood = stands(&sojourn, 1300, (0..250).map(|n| if n == 50 { 5 } else { 600 }));
        assert_eq!(stood, (1300..1400).chain(1500..1550).collect::<Vec<_>>());
    }

    #[test]
    fn queue_that_was_empty_or_not_looked_at_does_not_stand() {
        let sojourn = Sojourn::new(ms(10));
        assert!(!stands(&sojourn, 1000, (0..150).map(|_| 50)).is_empty());
        sojourn.is_empty();
        assert_eq!(stands(&sojourn, 1200, (0..50).map(|_| 50)), [0; 0]);
        // After a pause of hours.
        assert_eq!(stands(&sojourn, 9_000_000, (0..100).map(|_| 50)), [0; 0]);
        assert_eq!(stands(&sojourn, 9_000_100, (0..3).map(|_| 50)).len(), 3);
    }
}
