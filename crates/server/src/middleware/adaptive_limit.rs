//! A bound on the calls in flight that follows the time they take.

use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::time::Duration;

use ringserve_core::Frame;

use super::permits::Permits;
use crate::shard::face::closed::Failure;
use crate::shard::face::cx::Cx;
use crate::shard::face::service::{Service, delegate_to_service};

/// Bounds the calls in flight of a shard as [`ConcurrencyLimit`](super::ConcurrencyLimit) does, by
/// a number that it finds itself: for calls that wait for something whose capacity changes or is
/// not known, as a database.
///
/// As calls take longer than they used to, the bound falls, since those beyond what the other side
/// can do wait there in a queue; as they take as long as before, it rises. The rule is
/// [`Gradient2`]. Only calls that wait are timed; one that finishes at once costs no clock read. It
/// takes some 100 bytes for each shard.
///
/// ```
/// use ringserve::middleware::{AdaptiveLimit, Gradient2};
/// # use ringserve::{Cx, Frame, Server, Service};
/// # struct Db;
/// # impl Service for Db {
/// #     type Session = ();
/// #     type Error = std::convert::Infallible;
/// #     async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Self::Error> {
/// #         cx.reply(frame);
/// #         Ok(())
/// #     }
/// # }
/// # let running =
/// Server::bind("127.0.0.1:0").start(|_shard| AdaptiveLimit::new(Db, Gradient2::default()))?;
/// # running.shutdown();
/// # running.wait()?;
/// # Ok::<(), ringserve::Error>(())
/// ```
#[derive(Debug)]
pub struct AdaptiveLimit<S> {
    service: S,
    permits: Permits,
    rule: RefCell<Gradient2>,
}

impl<S> AdaptiveLimit<S> {
    /// Bounds the calls of `service` in flight by `rule`, on the shard on which this value is made.
    pub fn new(service: S, rule: Gradient2) -> AdaptiveLimit<S> {
        AdaptiveLimit { service, permits: Permits::new(rule.limit()), rule: RefCell::new(rule) }
    }

    /// Sheds calls that wait for too long: while the oldest of those that wait has waited for more
    /// than half of `time` at each moment of the last `10 * time`, the call that came last goes
    /// first, and one that waits for more than `time` is given to [`Service::shed`], whatever the
    /// load of the shard. Where that has it served the call waits on, before all that came later
    /// and were not asked about. 10 ms is prudent for calls of 1 ms.
    ///
    /// Callers that each wait for their answer make such a queue too, if they are more than the
    /// bound: leave this out for them. Without it calls are shed so, after 10 ms, only from
    /// [`Load::Shedding`](crate::overload::Load::Shedding) on.
    #[must_use]
    pub fn shed_after(self, time: Duration) -> Self {
        Self { permits: self.permits.late_after(time), ..self }
    }

    /// The service inside.
    pub fn inner(&self) -> &S {
        &self.service
    }

    /// The bound now.
    pub fn limit(&self) -> usize {
        self.permits.max()
    }

    /// Calls in flight now, without those that wait for their turn. More than
    /// [`limit`](AdaptiveLimit::limit) for a moment after that fell.
    pub fn in_flight(&self) -> usize {
        self.permits.held()
    }

    /// Calls that wait for their turn now.
    pub fn waiting(&self) -> usize {
        self.permits.waiting()
    }
}

impl<S: Service<H>, H: 'static> Service<H> for AdaptiveLimit<S> {
    type Session = S::Session;
    type Error = S::Error;

    async fn call(&self, cx: &Cx<'_, S::Session>, frame: Frame<H>) -> Result<(), S::Error> {
        let Some(_permit) = self.permits.for_call(&self.service, cx, &frame).await else { return Ok(()) };
        let (mut call, mut since) = (pin!(self.service.call(cx, frame)), None);
        let result = poll_fn(|task| {
            let polled = call.as_mut().poll(task);
            if polled.is_pending() && since.is_none() {
                since = Some(cx.shard().now());
            }
            polled
        })
        .await;
        if let Some(since) = since {
            let took = cx.shard().now() - since;
            let limit = self.rule.borrow_mut().sample(took, self.permits.held());
            self.permits.set_max(limit);
        }
        result
    }

    fn failed(&self, cx: &Cx<'_, S::Session>, failure: &Failure<'_, S::Error>) {
        self.service.failed(cx, failure);
    }

    delegate_to_service!(S, H, true);
}

/// The rule of Netflix's [concurrency-limits] by that name: the bound is multiplied by how much
/// longer calls used to take than they do now, and grows by a few more for as long as they take no
/// longer.
///
/// ```text
/// short    = mean of the last window of calls, as many as the bound and at least 10
/// long     = moving average of some 600 windows;  a twentieth less if it is over twice `short`
/// gradient = 1.5 * long / short, within 0.5 and 1
/// limit    = 0.8 * limit + 0.2 * (limit * gradient + 4), within `min` and `max`
/// ```
///
/// While fewer than half of the bound are in flight the bound stays: such calls say nothing of it.
///
/// [concurrency-limits]: https://github.com/Netflix/concurrency-limits
#[derive(Clone, Debug)]
pub struct Gradient2 {
    min: usize,
    max: usize,
    limit: f64,
    /// The moving average, in seconds.
    long: f64,
    /// Windows so far, up to [`WARM_UP`].
    windows: u32,
    /// Seconds of the calls in the window, and how many they are.
    window: (f64, usize),
}

/// The factor by which calls may take longer than on average before the bound falls.
const TOLERANCE: f64 = 1.5;

/// The share of a new value in the bound.
const SMOOTHING: f64 = 0.2;

/// The step by which the bound grows in a window in which calls take no longer.
const GROWTH: f64 = 4.0;

/// Windows of which `long` is the average.
const LONG_WINDOWS: f64 = 600.0;

/// Windows at the start of which `long` is the plain mean.
const WARM_UP: u32 = 10;

/// Calls of a window at least.
const WINDOW_MIN: usize = 10;

impl Default for Gradient2 {
    /// From 20 to 200 calls, beginning at 20.
    fn default() -> Gradient2 {
        Gradient2::within(20, 200)
    }
}

impl Gradient2 {
    /// From `min` to `max` calls in flight on a shard, beginning at `min`.
    ///
    /// # Panics
    /// If `min` is 0, since no call could ever run, or above `max`.
    #[track_caller]
    pub fn within(min: usize, max: usize) -> Gradient2 {
        assert!(min > 0, "a bound of 0 lets no call pass; `min` must be 1 or more");
        assert!(min <= max, "the bound cannot be within {min} and {max}: `min` is above `max`");
        Gradient2 { min, max, limit: min as f64, long: 0.0, windows: 0, window: (0.0, 0) }
    }

    /// The bound now.
    pub fn limit(&self) -> usize {
        (self.limit as usize).clamp(self.min, self.max)
    }

    /// Takes the time of a call that ended while `in_flight` were in flight, itself included.
    /// Returns the bound from now on.
    pub fn sample(&mut self, time: Duration, in_flight: usize) -> usize {
        let (sum, calls) = &mut self.window;
        (*sum, *calls) = (*sum + time.as_secs_f64(), *calls + 1);
        if *calls >= WINDOW_MIN.max(self.limit as usize) {
            // A clock may stand still.
            let short = (*sum / *calls as f64).max(1e-9);
            self.window = (0.0, 0);
            self.update(short, in_flight);
        }
        self.limit()
    }

    fn update(&mut self, short: f64, in_flight: usize) {
        let warms_up = self.windows < WARM_UP;
        self.windows += u32::from(warms_up);
        let share = if warms_up { 1.0 / f64::from(self.windows) } else { 2.0 / (LONG_WINDOWS + 1.0) };
        self.long += (short - self.long) * share;
        if self.long / short > 2.0 {
            self.long *= 0.95;
        }
        if (in_flight as f64) < self.limit / 2.0 {
            return;
        }
        let gradient = (TOLERANCE * self.long / short).clamp(0.5, 1.0);
        let aim = self.limit * gradient + GROWTH;
        let next = self.limit * (1.0 - SMOOTHING) + aim * SMOOTHING;
        self.limit = next.clamp(self.min as f64, self.max as f64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIME: Duration = Duration::from_millis(10);

    /// The bound after `windows` windows of calls that take `time`, with as many in flight as it
    /// lets.
    fn after(rule: &mut Gradient2, windows: usize, time: Duration) -> usize {
        for _ in 0..windows {
            let calls = WINDOW_MIN.max(rule.limit());
            (0..calls).for_each(|_| _ = rule.sample(time, rule.limit()));
        }
        rule.limit()
    }

    #[test]
    fn bound_grows_while_calls_take_as_long_as_before() {
        let mut rule = Gradient2::default();
        assert_eq!(after(&mut rule, 10, TIME), 28, "0.8 in each window");
        assert_eq!(after(&mut rule, 1000, TIME), 200);
    }

    #[test]
    fn bound_falls_as_calls_take_longer_and_never_below_min() {
        let mut rule = Gradient2::within(5, 100);
        assert_eq!(after(&mut rule, 300, TIME), 100);
        assert_eq!(after(&mut rule, 10, 10 * TIME), 40, "a tenth in a window, and 0.8 more");
        // Time without end: each window takes longer than the one before.
        let mut time = 10 * TIME;
        for _ in 0..100 {
            time = time.saturating_mul(2).min(Duration::from_secs(1 << 40));
            after(&mut rule, 1, time);
        }
        assert!(rule.limit() >= 5);
        let mut rule = Gradient2::within(5, 100);
        after(&mut rule, 300, TIME);
        assert_eq!(after(&mut rule, 1, Duration::from_secs(3600)), 90, "at most a tenth in a window");
    }

    #[test]
    fn bound_stays_while_few_calls_are_in_flight() {
        let mut rule = Gradient2::default();
        after(&mut rule, 50, TIME);
        let before = rule.limit();
        for _ in 0..1000 {
            rule.sample(TIME * 50, before / 2 - 1);
        }
        assert_eq!(rule.limit(), before);
    }

    #[test]
    fn calls_that_take_no_time_are_no_division_by_zero() {
        let mut rule = Gradient2::default();
        assert_eq!(after(&mut rule, 1000, Duration::ZERO), 200);
    }

    #[test]
    #[should_panic(expected = "`min` is above `max`")]
    fn bounds_that_contradict_each_other_are_refused() {
        Gradient2::within(3, 2);
    }
}
