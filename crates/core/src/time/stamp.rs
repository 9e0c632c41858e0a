//! Points in time in the form that connections keep: 32 bits.

use core::time::Duration;

use super::wheel::{STEP, STEPS_MAX, step_at};
use crate::Time;

/// The low 32 bits of a step of the connections' wheel. They come round every 2.28 years, and the
/// only use of a stamp is its age, modulo that time: a running limit is looked at when it is over,
/// 417 days after its stamp at the latest (`STEPS_MAX`), and a stamp that no limit looks at for
/// longer is renewed before one does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stamp(u32);

/// A limit that is switched off, and a timer that is not set. Longer than any limit.
pub(crate) const NEVER: u32 = u32::MAX;

/// Steps until [`NEVER`] is over.
pub(crate) const FOR_EVER: i64 = NEVER as i64;

impl Stamp {
    /// The time since this stamp at `now`, counted in steps: up to a step more or less.
    pub(crate) fn age(self, now: Stamp) -> Duration {
        STEP * now.0.wrapping_sub(self.0)
    }

    /// As a word, for a place that has room for no more.
    pub(crate) fn to_bits(self) -> u32 {
        self.0
    }

    /// The stamp of such a word.
    pub(crate) fn from_bits(bits: u32) -> Stamp {
        Stamp(bits)
    }

    /// The step of `time`.
    #[inline]
    pub(crate) fn at(time: Time) -> Stamp {
        Stamp(step_at(time) as u32)
    }

    /// Steps from `now` until `limit` steps after this one are over, negative if that was earlier;
    /// [`FOR_EVER`] if the limit is [`NEVER`].
    #[inline]
    pub(crate) fn left(self, limit: u32, now: Stamp) -> i64 {
        if limit == NEVER { FOR_EVER } else { i64::from(limit) - i64::from(now.0.wrapping_sub(self.0)) }
    }
}

/// The time at which a connection's timer goes off, if it is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Timer(u32);

impl Timer {
    /// A timer that is not set.
    pub(crate) const UNSET: Timer = Timer(NEVER);

    /// A timer that goes off `ahead` steps after `now`, or one earlier: one step in 2^32 has the
    /// name of `UNSET`.
    #[inline]
    pub(crate) fn ahead(now: Stamp, ahead: i64) -> Timer {
        debug_assert!((1..=i64::from(STEPS_MAX)).contains(&ahead));
        Timer(now.0.wrapping_add(ahead as u32).min(NEVER - 1))
    }

    #[inline]
    pub(crate) fn is_set(self) -> bool {
        self != Timer::UNSET
    }

    /// Steps from `now` until it goes off; [`FOR_EVER`] if it is not set.
    #[inline]
    pub(crate) fn left(self, now: Stamp) -> i64 {
        if self.is_set() { i64::from(self.0.wrapping_sub(now.0)) } else { FOR_EVER }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rest_of_a_limit_is_the_same_before_and_after_a_wrap() {
        let second = |time: Time| time + Duration::from_secs(1);
        let steps = |seconds: u64| (Duration::from_secs(seconds).as_nanos() >> 24) as u32;
        for nanos in [0, (1 << 55) - 5, (1 << 56) - 500_000_000, (1 << 56) - 1, 1 << 56, (99 << 56) - 1] {
            let from = Time::from_nanos(nanos);
            let (stamp, now) = (Stamp::at(from), Stamp::at(second(from)));
            let gone = i64::from(steps(10)) - stamp.left(steps(10), now);
            assert!((i64::from(steps(1))..=i64::from(steps(1)) + 1).contains(&gone), "{gone}");
            assert_eq!(stamp.left(0, now), -gone);
            assert_eq!((stamp.left(STEPS_MAX, stamp), stamp.left(NEVER, now)), (1 << 31, FOR_EVER));
        }
    }

    #[test]
    fn a_timer_that_is_set_never_looks_unset() {
        for before in 1..=3 {
            let now = Stamp(NEVER - before);
            for ahead in 1..=5 {
                let timer = Timer::ahead(now, ahead);
                assert!(timer.is_set() && (ahead - 1..=ahead).contains(&timer.left(now)), "{timer:?}");
            }
        }
        assert_eq!((Timer::UNSET.is_set(), Timer::UNSET.left(Stamp(7))), (false, FOR_EVER));
    }
}
