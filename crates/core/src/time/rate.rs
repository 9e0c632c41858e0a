//! Rates, as token buckets: pure arithmetic over a time that is an argument.
//!
//! A bucket is one number, its *theoretical arrival time* (GCRA): the time at which it would be
//! full again. Each token moves it by an interval, and a token is available while the bucket is no
//! further ahead of the clock than the burst.
//!
//! ```text
//!                now            now + tolerance
//!   ──────────────┼──────────────────┼──────────▶ time
//!        ▲ full       ▲ some tokens       ▲ none
//! ```

use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use core::time::Duration;

use crate::Time;

/// Nanoseconds of a second.
pub(crate) const SECOND: u64 = 1_000_000_000;

/// A rate with a burst: at most `burst + rate × time` tokens in any time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gcra {
    /// The time between two tokens, in nanoseconds. Rounded up, so that the rate is never exceeded.
    interval: u64,
    /// The most that a bucket may be ahead.
    tolerance: u64,
}

impl Gcra {
    /// Makes a rate; `per_second` and `burst` are at least 1.
    pub fn new(per_second: u32, burst: u32) -> Gcra {
        debug_assert!(per_second > 0 && burst > 0);
        let interval = SECOND.div_ceil(u64::from(per_second.max(1)));
        Gcra { interval, tolerance: interval * u64::from(burst.saturating_sub(1)) }
    }

    /// The bucket without one of its tokens. `None` if it has none. A bucket that was not touched
    /// yet is 0.
    #[inline]
    pub fn take(&self, bucket: u64, now: u64) -> Option<u64> {
        (bucket <= now + self.tolerance).then(|| self.pay(bucket, now))
    }

    /// The bucket without one of its tokens, which may have been asked for at any time since
    /// `from`, which is not after `now`: over all of that time as many are granted as if each had
    /// been asked for as soon as it was available.
    #[inline]
    pub fn take_since(&self, bucket: u64, from: u64, now: u64) -> Option<u64> {
        (bucket <= now + self.tolerance).then(|| self.pay(bucket, from.min(now)))
    }

    /// The bucket without one more of its tokens, whether it has one or not.
    #[inline]
    pub(crate) fn pay(&self, bucket: u64, now: u64) -> u64 {
        bucket.max(now) + self.interval
    }

    /// The time at which the bucket has this many tokens, at most the burst.
    pub(crate) fn has(&self, bucket: u64, tokens: u64) -> u64 {
        (bucket + self.interval * tokens.saturating_sub(1)).saturating_sub(self.tolerance)
    }

    /// Tokens of a full bucket.
    fn burst(&self) -> u64 {
        self.tolerance / self.interval + 1
    }
}

/// The time in which a rate gives that many units, in nanoseconds, rounded up.
pub(crate) fn time_of(units: u64, per_second: u64) -> u64 {
    let per_second = per_second.max(1);
    match units.checked_mul(SECOND) {
        Some(product) => product.div_ceil(per_second),
        None => {
            let time = (u128::from(units) * u128::from(SECOND)).div_ceil(per_second.into());
            u64::try_from(time).unwrap_or(u64::MAX)
        }
    }
}

/// A rate of units that are taken several at a time, bytes for example. A take may exceed the
/// available units as long as there is one, and then leaves a debt: over any time at most `burst +
/// rate × time` units are given, plus the last take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnitRate {
    per_second: u64,
    /// The most that a bucket may be ahead.
    tolerance: u64,
}

impl UnitRate {
    /// Makes a rate; `per_second` and `burst` are at least 1.
    pub fn new(per_second: u64, burst: u64) -> UnitRate {
        debug_assert!(per_second > 0 && burst > 0);
        UnitRate { per_second, tolerance: time_of(burst.saturating_sub(1), per_second) }
    }

    /// The time until there is a unit, in nanoseconds; 0 if there is one.
    #[inline]
    pub fn wait(&self, bucket: u64, now: u64) -> u64 {
        bucket.saturating_sub(now.saturating_add(self.tolerance))
    }

    /// The bucket without these units, whether it has them or not.
    #[inline]
    pub fn pay(&self, bucket: u64, units: u64, now: u64) -> u64 {
        bucket.max(now).saturating_add(time_of(units, self.per_second))
    }
}

/// A rate that other threads may change, or switch off. For a moment a reader may see the interval
/// of one rate and the burst of another.
#[derive(Debug, Default)]
pub struct SharedGcra {
    /// 0 if there is no rate.
    interval: AtomicU64,
    tolerance: AtomicU64,
}

impl SharedGcra {
    /// Makes it with this rate; `None` is no rate.
    pub fn new(gcra: Option<Gcra>) -> SharedGcra {
        let shared = SharedGcra::default();
        shared.set(gcra);
        shared
    }

    /// The current rate.
    #[inline]
    pub fn get(&self) -> Option<Gcra> {
        let interval = self.interval.load(Ordering::Relaxed);
        (interval > 0).then(|| Gcra { interval, tolerance: self.tolerance.load(Ordering::Relaxed) })
    }

    /// Sets another rate.
    pub fn set(&self, gcra: Option<Gcra>) {
        self.tolerance.store(gcra.map_or(0, |gcra| gcra.tolerance), Ordering::Relaxed);
        self.interval.store(gcra.map_or(0, |gcra| gcra.interval), Ordering::Relaxed);
    }
}

/// The longest that a shard waits for several tokens at once: with thousands in a second it would
/// wake for each of them.
const TOKENS_FOR: u64 = SECOND / 1000;

/// The rate at which all shards of a server take connections. It rises from a tenth of the set rate
/// to all of it after a start, and after each [`begin_again`](AcceptRate::begin_again).
///
/// It counts in the time of a clock that runs at the speed of the slope, so that the interval
/// between two tokens is the same number at any time:
///
/// ```text
///   speed  1 ┤        ┌────────
///            │     ／
///        0.1 ┤ ／
///            └─┬──────┬──────▶ time
///            began  + slow_start
/// ```
#[derive(Debug)]
pub struct AcceptRate {
    gcra: SharedGcra,
    /// The duration of the slope in nanoseconds.
    slow_start: u64,
    /// The current slope, and the one before it: a shard that looks meanwhile takes from either,
    /// and never from the bucket of one by the clock of the other.
    slopes: [Slope; 2],
    current: AtomicUsize,
    /// Connections in a second, and in the lower half the burst, as set: an interval is rounded.
    set: AtomicU64,
}

#[derive(Debug)]
struct Slope {
    /// The time when it began; [`u64::MAX`] before that.
    began: AtomicU64,
    /// The bucket, by the clock with this slope.
    bucket: AtomicU64,
}

impl Slope {
    fn began_at(nanos: u64) -> Slope {
        Slope { began: AtomicU64::new(nanos), bucket: AtomicU64::new(0) }
    }
}

impl AcceptRate {
    /// Makes a rate of `per_second` connections, and `burst` of them at once; both are at least 1.
    pub fn new(per_second: u32, burst: u32, slow_start: Duration) -> AcceptRate {
        AcceptRate {
            gcra: SharedGcra::new(Some(Gcra::new(per_second, burst))),
            slow_start: u64::try_from(slow_start.as_nanos()).unwrap_or(u64::MAX),
            slopes: [Slope::began_at(u64::MAX), Slope::began_at(u64::MAX)],
            current: AtomicUsize::new(0),
            set: AtomicU64::new(AcceptRate::pair(per_second, burst)),
        }
    }

    /// Sets another rate, with all of its burst. The slope goes on. A shard that waits for a token
    /// of the former rate waits to the end.
    pub fn set(&self, per_second: u32, burst: u32) {
        self.gcra.set(Some(Gcra::new(per_second, burst)));
        self.slope().bucket.store(0, Ordering::Relaxed);
        self.set.store(AcceptRate::pair(per_second, burst), Ordering::Relaxed);
    }

    /// Connections in a second, and the burst, as they were set last.
    pub fn get(&self) -> (u32, u32) {
        let set = self.set.load(Ordering::Relaxed);
        ((set >> 32) as u32, set as u32)
    }

    fn pair(per_second: u32, burst: u32) -> u64 {
        u64::from(per_second) << 32 | u64::from(burst)
    }

    fn gcra(&self) -> Gcra {
        // It is set from the beginning on.
        self.gcra.get().unwrap_or(Gcra { interval: 1, tolerance: 0 })
    }

    /// Notes that a shard begins to accept. The first one of all begins the slope.
    pub(crate) fn begin(&self, now: Time) {
        let began = now.as_nanos();
        let _ = self.slope().began.compare_exchange(u64::MAX, began, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Begins the slope again, with all of its burst: new connections had to wait, and come back at
    /// once. Does nothing to a rate without a slope. Call it rarely, and from one thread.
    pub fn begin_again(&self, now: Time) {
        if self.slow_start == 0 {
            return;
        }
        let next = 1 - self.current.load(Ordering::Relaxed);
        self.slopes[next].began.store(now.as_nanos(), Ordering::Relaxed);
        self.slopes[next].bucket.store(0, Ordering::Relaxed);
        self.current.store(next, Ordering::Release);
    }

    fn slope(&self) -> &Slope {
        &self.slopes[self.current.load(Ordering::Acquire)]
    }

    /// The time by the clock with this slope.
    fn time_on(&self, slope: &Slope, now: Time) -> u64 {
        // A shard's turn may have begun before the one that began the slope.
        let time = now.as_nanos().saturating_sub(slope.began.load(Ordering::Relaxed));
        let (slope, on_it) = (u128::from(self.slow_start), u128::from(time.min(self.slow_start)));
        // The area below the slope: time / 10 + 9 time² / (20 slow_start).
        let below = on_it / 10 + (9 * on_it * on_it).checked_div(20 * slope).unwrap_or(0);
        u64::try_from(below).unwrap_or(u64::MAX) + time.saturating_sub(self.slow_start)
    }

    /// The time at which the clock with this slope has that value.
    fn time_of(&self, slope: &Slope, value: u64) -> Time {
        let began = slope.began.load(Ordering::Relaxed);
        let whole = self.time_on(slope, Time::from_nanos(began.saturating_add(self.slow_start)));
        if value >= whole {
            return Time::from_nanos(began.saturating_add(self.slow_start).saturating_add(value - whole));
        }
        // The inverse: 9 time² + 2 slow_start time - 20 slow_start slope = 0.
        let (all, below) = (u128::from(self.slow_start), u128::from(value));
        let time = ((all * all + 180 * all * below).isqrt().saturating_sub(all)) / 9;
        // One microsecond more than was rounded away: a shard that wakes too early would wake again
        // at once.
        Time::from_nanos(began.saturating_add(u64::try_from(time).unwrap_or(u64::MAX)).saturating_add(1000))
    }

    /// Takes a token.
    ///
    /// # Errors
    /// If there is none: the time to ask again, at which there is one, or several if they come
    /// fast.
    pub(crate) fn take(&self, now: Time) -> Result<(), Time> {
        let (slope, gcra) = (self.slope(), self.gcra());
        let time = self.time_on(slope, now);
        let take = |bucket| gcra.take(bucket, time);
        match slope.bucket.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take) {
            Ok(_) => Ok(()),
            Err(bucket) => Err(self.retry_at(slope, bucket, now)),
        }
    }

    /// The time to ask again, if there is no token now.
    pub(crate) fn held_until(&self, now: Time) -> Option<Time> {
        let slope = self.slope();
        let bucket = slope.bucket.load(Ordering::Relaxed);
        let is_empty = self.gcra().take(bucket, self.time_on(slope, now)).is_none();
        is_empty.then(|| self.retry_at(slope, bucket, now))
    }

    fn retry_at(&self, slope: &Slope, bucket: u64, now: Time) -> Time {
        let gcra = self.gcra();
        let most = (gcra.burst() / 2).max(1);
        let tokens = (TOKENS_FOR / gcra.interval).clamp(1, most);
        self.time_of(slope, gcra.has(bucket, tokens)).max(now + Duration::from_nanos(1))
    }

    /// Gives back the token of a connection that was refused for a reason that is older, or that
    /// another shard takes.
    pub(crate) fn give_back(&self) {
        let interval = self.gcra().interval;
        let back = |bucket: u64| Some(bucket.saturating_sub(interval));
        let _ = self.slope().bucket.fetch_update(Ordering::Relaxed, Ordering::Relaxed, back);
    }
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::*;

    fn at(millis: u64) -> Time {
        Time::from_nanos(millis * 1_000_000)
    }

    #[test]
    fn bucket_gives_its_burst_and_then_its_rate() {
        let gcra = Gcra::new(10, 3);
        let (mut bucket, mut taken) = (0, Vec::new());
        for millis in 0..1000 {
            while let Some(next) = gcra.take(bucket, millis * 1_000_000) {
                bucket = next;
                taken.push(millis);
            }
        }
        assert_eq!(taken, [0, 0, 0, 100, 200, 300, 400, 500, 600, 700, 800, 900]);
        // It is never fuller than its burst.
        let later = 3600 * SECOND;
        let mut after_an_hour = 0;
        while let Some(next) = gcra.take(bucket, later) {
            (bucket, after_an_hour) = (next, after_an_hour + 1);
        }
        assert_eq!(after_an_hour, 3);
    }

    #[test]
    fn rate_that_divides_no_second_is_never_exceeded() {
        for per_second in [3, 7, 999_999] {
            let gcra = Gcra::new(per_second, 1);
            assert!(gcra.interval * u64::from(per_second) >= SECOND);
        }
    }

    #[test]
    fn units_are_there_at_their_rate_and_a_large_take_is_paid_off() {
        // One unit at a time is the same as a bucket of tokens.
        let (units, tokens) = (UnitRate::new(7, 3), Gcra::new(7, 3));
        let (mut bucket, mut taken) = (0, 0);
        for now in (0..10 * SECOND).step_by(1_000_000) {
            while units.wait(bucket, now) == 0 {
                assert_eq!(tokens.take(bucket, now), Some(units.pay(bucket, 1, now)));
                (bucket, taken) = (units.pay(bucket, 1, now), taken + 1);
            }
            assert_eq!(tokens.take(bucket, now), None);
        }
        assert_eq!(taken, 72, "3 at once, and 69 in ten seconds: the 70th is due behind them");
        let bytes = UnitRate::new(1_000_000_000, 1_000_000_000);
        assert_eq!(bytes.pay(0, 1, 0), 1, "a fast rate is exact");
        let debt = bytes.pay(0, 5_000_000_000, 0);
        assert_eq!(bytes.wait(debt, 0), 4 * SECOND + 1);
        assert_eq!(UnitRate::new(1, 1).pay(0, u64::MAX, 7), u64::MAX);
    }

    #[test]
    fn slope_rises_from_a_tenth_to_the_whole_rate() {
        let rate = AcceptRate::new(1000, 2, Duration::from_secs(10));
        rate.begin(at(0));
        let mut by_second = [0; 13];
        for millis in 0..13_000 {
            while rate.take(at(millis)).is_ok() {
                by_second[millis as usize / 1000] += 1;
            }
        }
        // A tenth and 9 % more with each second, measured in its middle.
        for (second, taken) in by_second.into_iter().enumerate() {
            let expected: usize = if second < 10 { 100 + 45 + 90 * second } else { 1000 };
            assert!(expected.abs_diff(taken) <= 2, "{taken} in second {second}, and {expected} are expected");
        }
    }

    #[test]
    fn slope_that_begins_again_is_the_same_slope() {
        for slow in [0, 10] {
            let rate = AcceptRate::new(1000, 2, Duration::from_secs(slow));
            rate.begin(at(0));
            let taken = |from: u64| {
                (from..from + 1000)
                    .map(|millis| (0..).take_while(|_| rate.take(at(millis)).is_ok()).count())
                    .sum()
            };
            let (first, later): (usize, usize) = (taken(0), taken(20_000));
            rate.begin_again(at(30_000));
            let again: usize = taken(30_000);
            rate.begin_again(at(40_000));
            let third: usize = taken(40_000);
            assert!(later >= 1000, "{later}");
            let expected = if slow == 0 { 1000 } else { first };
            assert!(
                again.abs_diff(expected) <= 2 && third.abs_diff(expected) <= 2,
                "{first}, {again}, {third}"
            );
        }
    }

    #[test]
    fn shard_that_waits_as_told_finds_tokens() {
        for (per_second, burst, slow) in
            [(1, 1, 60), (7, 3, 10), (20_000, 5000, 10), (20_000, 1, 0), (1, 9, 0)]
        {
            let rate = AcceptRate::new(per_second, burst, Duration::from_secs(slow));
            let mut now = at(5000);
            rate.begin(now);
            for _ in 0..200 {
                let mut taken = 0;
                let retry_at = loop {
                    match rate.take(now) {
                        Ok(()) => taken += 1,
                        Err(retry_at) => break retry_at,
                    }
                };
                assert!(taken > 0, "woken for nothing at {now:?}, with {per_second} a second");
                assert_eq!(rate.held_until(now), Some(retry_at));
                assert!(retry_at > now);
                now = retry_at;
            }
            rate.give_back();
            assert!(rate.take(now).is_ok() || burst > 1);
        }
    }

    #[test]
    fn rate_that_is_set_holds_from_then_on() {
        let rate = AcceptRate::new(1, 100, Duration::ZERO);
        rate.begin(at(0));
        let taken = |millis| (0..).take_while(|_| rate.take(at(millis)).is_ok()).count();
        assert_eq!(taken(0), 100);
        rate.set(1000, 10);
        // Debt at the former rate is forgotten.
        assert_eq!((taken(0), taken(5), taken(1000)), (10, 5, 10));
    }

    #[test]
    fn first_shard_begins_the_slope() {
        let rate = AcceptRate::new(10, 1, Duration::from_secs(10));
        rate.begin(at(1000));
        rate.begin(at(9000));
        assert_eq!(rate.time_on(rate.slope(), at(11_000)), 5_500_000_000);
        // The turn of another shard that began earlier.
        assert_eq!(rate.time_on(rate.slope(), at(0)), 0);
        assert_eq!(rate.time_of(rate.slope(), 5_500_000_000), at(11_000));
        let middle = rate.time_of(rate.slope(), rate.time_on(rate.slope(), at(4000)));
        assert!(middle >= at(4000) && middle - at(4000) < Duration::from_micros(10), "{middle:?}");
    }
}
