//! When a backend is taken out of the choice for what its requests met, and for how long.

use super::{SECOND, part_of};

/// Failures one after the other.
pub(crate) const IN_A_ROW: u32 = 5;

/// Parts of the time that is looked at, each of a second.
const BUCKETS: usize = 10;

/// Fewer requests than this say nothing of a rate.
const REQUESTS_MIN: u32 = 20;

/// Percent of the requests that have to succeed.
const SUCCESS_MIN: u32 = 80;

/// The first ejection, and the longest one.
const EJECTED_FOR: u64 = 5 * SECOND;
const EJECTED_FOR_MAX: u64 = 300 * SECOND;

/// Requests of the last ten seconds that succeeded, and that failed. Counts and no average: an
/// average hides an outage behind a burst.
#[derive(Clone, Debug, Default)]
pub(crate) struct Window {
    buckets: [(u32, u32); BUCKETS],
    newest: u64,
}

impl Window {
    pub(crate) fn add(&mut self, now: u64, succeeded: u32, failed: u32) {
        let second = now / SECOND;
        if second > self.newest {
            for gone in (self.newest + 1).max(second.saturating_sub(BUCKETS as u64 - 1))..=second {
                self.buckets[gone as usize % BUCKETS] = (0, 0);
            }
            self.newest = second;
        }
        let (good, bad) = &mut self.buckets[self.newest as usize % BUCKETS];
        *good = good.saturating_add(succeeded);
        *bad = bad.saturating_add(failed);
    }

    /// True if too many of the requests failed.
    pub(crate) fn is_bad(&self) -> bool {
        let sum = |of: fn(&(u32, u32)) -> u32| self.buckets.iter().map(|bucket| u64::from(of(bucket))).sum();
        let (good, bad): (u64, u64) = (sum(|bucket| bucket.0), sum(|bucket| bucket.1));
        good + bad >= u64::from(REQUESTS_MIN) && good * 100 < (good + bad) * u64::from(SUCCESS_MIN)
    }
}

/// True if one more of `count` backends may be ejected where `ejected` are: never more than half,
/// and never the only one.
pub(crate) fn may_eject(ejected: usize, count: usize) -> bool {
    ejected < count / 2
}

/// Nanoseconds of the ejection that is a backend's `times`th in a row, more or less a fifth.
pub(crate) fn ejected_for(times: u32, random: u64) -> u64 {
    let time = (EJECTED_FOR * u64::from(times.clamp(1, 100))).min(EJECTED_FOR_MAX);
    time / 5 * 4 + part_of(time / 5 * 2, random)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn rate_needs_enough_requests_and_forgets() {
        let mut window = Window::default();
        window.add(0, 0, 19);
        assert!(!window.is_bad());
        window.add(SECOND, 1, 0);
        assert!(window.is_bad());
        window.add(2 * SECOND, 100, 0);
        assert!(!window.is_bad(), "19 of 120");
        window.add(3 * SECOND, 0, 20);
        assert!(window.is_bad(), "39 of 140");
        window.add(100 * SECOND, 0, 0);
        assert!(!window.is_bad());
    }

    proptest! {
        #[test]
        fn half_of_the_backends_stay(count in 0usize..100) {
            let mut ejected = 0;
            while may_eject(ejected, count) {
                ejected += 1;
            }
            prop_assert_eq!(ejected, count / 2);
        }

        #[test]
        fn each_ejection_is_longer_than_the_last_and_has_an_end(times in 1u32..1000, random: u64) {
            let time = ejected_for(times, random);
            prop_assert!((4 * SECOND..=360 * SECOND).contains(&time));
            prop_assert!(times > 20 || ejected_for(times + 10, random) > time);
        }
    }
}
