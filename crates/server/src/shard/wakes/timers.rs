//! Sleeps and timeouts in handlers and tasks.
//!
//! Their wheel is finer than that of the connections' limits: a step is 2^20 ns, about a
//! millisecond. A timer goes off up to one step late and never early.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use pin_project_lite::pin_project;
use ringserve_core::Time;
use ringserve_core::internals::Wheel;

use ringserve_base::clock::Clock;
use ringserve_base::guard::{Panicked, discard, wake};

const STEP_SHIFT: u32 = 20;

/// A shard's timers. Clones share them.
#[derive(Clone)]
pub(crate) struct Timers {
    inner: Rc<Shared>,
    clock: Clock,
}

struct Shared {
    /// The earlier one of [`Alarms::next`] and `publication`, or [`Time::NEVER`], so that a turn
    /// need not compute it.
    next: Cell<Time>,
    /// When the shard's figures are to be published, or [`Time::NEVER`]: here, since a turn looks
    /// for what is due here anyway.
    publication: Cell<Time>,
    state: RefCell<Inner>,
}

impl Shared {
    fn set_next(&self, alarms: &Alarms) {
        self.next.set(alarms.next().unwrap_or(Time::NEVER).min(self.publication.get()));
    }
}

struct Inner {
    alarms: Alarms,
    fired: Vec<u32>,
    /// Woken when a task begins to sleep.
    on_sleep: Option<Waker>,
}

impl Timers {
    pub(crate) fn new(clock: Clock) -> Timers {
        let state = RefCell::new(Inner { alarms: Alarms::new(), fired: Vec::new(), on_sleep: None });
        let (next, publication) = (Cell::new(Time::NEVER), Cell::new(Time::NEVER));
        Timers { inner: Rc::new(Shared { next, publication, state }), clock }
    }

    /// Reads the time on the shard's clock.
    #[inline]
    pub(crate) fn now(&self) -> Time {
        self.clock.now()
    }

    /// The time for which the calling thread was on a CPU. In a simulation, that of the shard whose
    /// round it is.
    pub(crate) fn ran(&self) -> Duration {
        self.clock.ran()
    }

    pub(crate) fn clock(&self) -> &Clock {
        &self.clock
    }

    /// Wakes this waker from now on when a task begins to sleep: for a shard whose user code also
    /// runs outside of its turns.
    #[cfg(feature = "runtime-tokio")]
    pub(crate) fn wake_when_set(&self, waker: Waker) {
        self.inner.state.borrow_mut().on_sleep = Some(waker);
    }

    /// The time before which no task is to be woken, and no figures are to be published.
    #[inline]
    pub(crate) fn next(&self) -> Time {
        self.inner.next.get()
    }

    /// True if a task may have slept until `now`, or figures are to be published.
    #[inline]
    pub(crate) fn is_due(&self, now: Time) -> bool {
        self.next() <= now
    }

    /// Figures are to be published at `time`; never by [`Time::NEVER`].
    pub(crate) fn set_publication(&self, time: Time) {
        self.inner.publication.set(time);
        match time {
            Time::NEVER => self.inner.set_next(&self.inner.state.borrow().alarms),
            time => self.inner.next.set(self.inner.next.get().min(time)),
        }
    }

    /// True if that time has come.
    pub(crate) fn is_publication_due(&self, now: Time) -> bool {
        self.inner.publication.get() <= now
    }

    /// Wakes the tasks that slept until `now`.
    ///
    /// # Errors
    /// The panic of a waker; the others were woken.
    pub(crate) fn fire(&self, now: Time) -> Result<(), Panicked> {
        let mut inner = self.inner.state.borrow_mut();
        let mut all = Ok(());
        let mut fired = std::mem::take(&mut inner.fired);
        inner.alarms.advance(now, &mut fired);
        for number in fired.drain(..) {
            let waker = inner.alarms.take(number);
            if let Some(waker) = waker {
                // A waker is user code.
                drop(inner);
                all = all.and(wake(waker));
                inner = self.inner.state.borrow_mut();
            }
        }
        inner.fired = fired;
        self.inner.set_next(&inner.alarms);
        all
    }

    pub(crate) fn sleep(&self, time: Duration) -> Sleep {
        self.sleep_until(self.now() + time)
    }

    fn sleep_until(&self, until: Time) -> Sleep {
        Sleep { until, timers: self.clone(), number: None }
    }

    pub(crate) fn interval(&self, period: Duration) -> Interval {
        let sleep = self.sleep_until(self.now());
        Interval { period: period.max(PERIOD_MIN), sleep, waited: true }
    }
}

/// Wakers with the times at which they are due. Each has a number as long as its task sleeps.
pub(crate) struct Alarms {
    wheel: Wheel,
    /// By number; `None` if the number is free, or the timer went off.
    wakers: Vec<Option<Waker>>,
    free: Vec<u32>,
}

impl Alarms {
    pub(crate) fn new() -> Alarms {
        Alarms { wheel: Wheel::with_step_shift(STEP_SHIFT), wakers: Vec::new(), free: Vec::new() }
    }

    fn is_empty(&self) -> bool {
        self.free.len() == self.wakers.len()
    }

    /// A time before which no task is to be woken.
    pub(crate) fn next(&self) -> Option<Time> {
        if self.is_empty() { None } else { self.wheel.next() }
    }

    /// Moves the numbers that are due into `fired`.
    pub(crate) fn advance(&mut self, now: Time, fired: &mut Vec<u32>) {
        if !self.is_empty() {
            self.wheel.advance(now, fired);
        }
    }

    /// The waker of a number that is due. The number stays taken until it is
    /// [cleared](Alarms::clear).
    pub(crate) fn take(&mut self, number: u32) -> Option<Waker> {
        self.wakers[number as usize].take()
    }

    /// Wakes `waker` when `until` has passed, under `number`, or a new number if there is none yet.
    pub(crate) fn set(&mut self, number: &mut Option<u32>, until: Time, waker: Waker) -> Setting {
        let number = *number.get_or_insert_with(|| {
            self.free.pop().unwrap_or_else(|| {
                self.wakers.push(None);
                self.wakers.len() as u32 - 1
            })
        });
        // Rounded up, so that no timer is early.
        let step = self.wheel.step_at(until).saturating_add(1);
        let set = self.wheel.set_earlier(number, step);
        let old = self.wakers[number as usize].replace(waker);
        Setting { old, set }
    }

    /// True if this number's timer is set and wakes this waker.
    #[cfg(feature = "http")]
    pub(crate) fn is_set_for(&self, number: u32, waker: &Waker) -> bool {
        self.wakers[number as usize].as_ref().is_some_and(|known| known.will_wake(waker))
    }

    /// Gives a number back.
    pub(crate) fn clear(&mut self, number: u32) -> Option<Waker> {
        self.wheel.clear(number);
        self.free.push(number);
        self.wakers[number as usize].take()
    }
}

/// The rest of [`Alarms::set`], for a moment at which nothing is borrowed: wakers are user code.
#[must_use]
pub(crate) struct Setting {
    old: Option<Waker>,
    set: bool,
}

impl Setting {
    /// Drops the former waker. If there was no memory for the timer, `waker` is woken at once: a
    /// check in each turn keeps the promise.
    pub(crate) fn finish(self, waker: &Waker) {
        drop(self.old);
        if !self.set {
            waker.wake_by_ref();
        }
    }
}

/// Waits for a point in time. See [`Cx::sleep`](crate::Cx::sleep).
#[must_use = "a future does nothing until it is awaited"]
pub struct Sleep {
    until: Time,
    timers: Timers,
    number: Option<u32>,
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<()> {
        let this = &mut *self;
        if this.timers.now() >= this.until {
            return Poll::Ready(());
        }
        let waker = task.waker().clone();
        let mut inner = this.timers.inner.state.borrow_mut();
        let setting = inner.alarms.set(&mut this.number, this.until, waker);
        this.timers.inner.set_next(&inner.alarms);
        let shard = inner.on_sleep.clone();
        drop(inner);
        setting.finish(task.waker());
        if let Some(shard) = shard {
            shard.wake();
        }
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        let Some(number) = self.number else { return };
        let mut inner = self.timers.inner.state.borrow_mut();
        let waker = inner.alarms.clear(number);
        self.timers.inner.set_next(&inner.alarms);
        drop(inner);
        discard(waker);
    }
}

impl fmt::Debug for Sleep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sleep(until {} ms)", self.until.as_millis())
    }
}

/// The least period of an [`Interval`], since timers are no finer.
const PERIOD_MIN: Duration = Duration::from_millis(1);

/// Ticks at whole periods after its first tick. See [`Shard::interval`](crate::Shard::interval).
pub struct Interval {
    period: Duration,
    /// Ends at the next tick.
    sleep: Sleep,
    /// True if other tasks had a turn since the last tick, and before the first tick.
    waited: bool,
}

impl Interval {
    /// Waits for the next tick, and returns the time at which it was due. It comes up to about a
    /// millisecond late and never early.
    ///
    /// If ticks were missed it returns the first of them, and the next tick is due at the next
    /// whole period. Before a late tick other tasks of the shard have their turn, so a task whose
    /// work takes longer than its period does not keep the shard to itself. Dropping the future
    /// loses no tick.
    pub async fn tick(&mut self) -> Time {
        poll_fn(|task| self.poll_tick(task)).await
    }

    /// Time from tick to tick.
    pub fn period(&self) -> Duration {
        self.period
    }

    fn poll_tick(&mut self, task: &mut Context<'_>) -> Poll<Time> {
        if Pin::new(&mut self.sleep).poll(task).is_pending() {
            self.waited = true;
            return Poll::Pending;
        }
        if !std::mem::take(&mut self.waited) {
            self.waited = true;
            task.waker().wake_by_ref();
            return Poll::Pending;
        }
        let (due, timers) = (self.sleep.until, &self.sleep.timers);
        let missed = (timers.now() - due).as_nanos() / self.period.as_nanos();
        let periods = self.period.as_nanos().saturating_mul(missed + 1);
        let next = due + Duration::from_nanos(u64::try_from(periods).unwrap_or(u64::MAX));
        self.sleep = timers.sleep_until(next);
        Poll::Ready(due)
    }
}

impl fmt::Debug for Interval {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Interval")
            .field("period", &self.period)
            .field("next", &self.sleep)
            .finish_non_exhaustive()
    }
}

pin_project! {
    /// A future with a time limit. See [`Cx::timeout`](crate::Cx::timeout).
    #[must_use = "a future does nothing until it is awaited"]
    pub struct Timeout<'a, F> {
        #[pin]
        future: F,
        time: Duration,
        timers: &'a Timers,
        sleep: Option<Sleep>,
    }
}

impl<'a, F> Timeout<'a, F> {
    #[inline]
    pub(crate) fn new(timers: &'a Timers, time: Duration, future: F) -> Timeout<'a, F> {
        Timeout { future, time, timers, sleep: None }
    }
}

impl<F: Future> Future for Timeout<'_, F> {
    type Output = Result<F::Output, Elapsed>;

    #[inline]
    fn poll(self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        if let Poll::Ready(output) = this.future.poll(task) {
            return Poll::Ready(Ok(output));
        }
        // Only a pending future needs a timer, and only then is the clock read.
        let sleep = this.sleep.get_or_insert_with(|| this.timers.sleep(*this.time));
        Pin::new(sleep).poll(task).map(|()| Err(Elapsed))
    }
}

impl<F> fmt::Debug for Timeout<'_, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Timeout").field("time", &self.time).finish_non_exhaustive()
    }
}

/// The time given to [`Cx::timeout`](crate::Cx::timeout) was over before the future was done.
#[derive(Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Elapsed;

impl fmt::Display for Elapsed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the time is over")
    }
}

ringserve_buf::debug_is_display!(Elapsed);

impl std::error::Error for Elapsed {}

#[cfg(test)]
mod tests {
    use ringserve_base::guard::wakers::Woken;

    use super::*;
    use std::sync::Arc;

    #[test]
    fn a_sleep_is_woken_once_it_is_over_and_not_before() {
        let timers = Timers::new(Clock::start());
        let woken = Arc::new(Woken::default());
        let waker = Waker::from(woken.clone());
        let mut task = Context::from_waker(&waker);
        let mut sleep = timers.sleep(Duration::from_secs(3600));
        assert!(Pin::new(&mut sleep).poll(&mut task).is_pending());
        timers.fire(Time::ZERO + Duration::from_secs(3599)).unwrap();
        assert_eq!(woken.count(), 0);
        assert_ne!(timers.next(), Time::NEVER);
        timers.fire(Time::ZERO + Duration::from_secs(3601)).unwrap();
        assert_eq!(woken.count(), 1);
    }

    #[test]
    fn sleeps_end_in_time_whatever_the_clock_did_before() {
        let second = Duration::from_secs(1);
        let day = second * 24 * 3600;
        let wraps = [52, 55, 56, 60].map(|bits| Duration::from_nanos(1 << bits) - second);
        let ages = [Duration::ZERO, day * 30, day * 53, day * 835].into_iter().chain(wraps);
        for age in ages {
            // A second, and a time that is over after the next wrap.
            for time in [second, second * 2, second * 3600, day * 60, day * 900] {
                let timers = Timers::new(Clock::of_age(age));
                assert!(timers.now() >= Time::ZERO + age);
                let woken = Arc::new(Woken::default());
                let waker = Waker::from(woken.clone());
                let mut sleep = timers.sleep(time);
                assert!(Pin::new(&mut sleep).poll(&mut Context::from_waker(&waker)).is_pending());
                let mut turns = 0;
                while woken.count() == 0 {
                    let next = timers.next();
                    assert_ne!(next, Time::NEVER, "it sleeps");
                    assert!(next > timers.now(), "the shard would spin, {age:?} and {time:?}");
                    assert!(next >= sleep.until, "too early, {age:?} and {time:?}");
                    assert!(next - sleep.until <= Duration::from_millis(3), "too late, {age:?} and {time:?}");
                    timers.fire(Time::from_nanos(next.as_nanos() - 1)).unwrap();
                    assert_eq!(woken.count(), 0, "too early, {age:?} and {time:?}");
                    timers.fire(next).unwrap();
                    turns += 1;
                }
                assert_eq!(turns, 1, "turns, {age:?} and {time:?}");
            }
        }
    }

    #[test]
    fn a_waker_that_panics_keeps_no_other_from_being_woken() {
        let timers = Timers::new(Clock::start());
        let woken = Arc::new(Woken::default());
        let (good, bad) = (Waker::from(woken.clone()), ringserve_base::guard::wakers::bomb());
        let mut sleeps: Vec<Sleep> = (0..6).map(|_| timers.sleep(Duration::from_secs(1))).collect();
        for (n, sleep) in sleeps.iter_mut().enumerate() {
            let waker = if n % 2 == 0 { &bad } else { &good };
            assert!(Pin::new(sleep).poll(&mut Context::from_waker(waker)).is_pending());
        }
        assert!(timers.fire(Time::ZERO + Duration::from_secs(9)).is_err());
        assert_eq!(woken.count(), 3);
        assert!(timers.fire(Time::ZERO + Duration::from_secs(10)).is_ok());
    }

    #[test]
    fn a_sleep_for_ever_is_no_reason_to_wake() {
        let timers = Timers::new(Clock::of_age(Duration::ZERO));
        let mut sleep = timers.sleep(Duration::MAX);
        assert!(Pin::new(&mut sleep).poll(&mut Context::from_waker(Waker::noop())).is_pending());
        assert_eq!(timers.next(), Time::NEVER);
    }

    #[test]
    fn a_dropped_sleep_leaves_no_timer_and_its_number_is_used_again() {
        let timers = Timers::new(Clock::start());
        for _ in 0..3 {
            let mut sleep = timers.sleep(Duration::from_secs(3600));
            assert!(Pin::new(&mut sleep).poll(&mut Context::from_waker(Waker::noop())).is_pending());
            drop(sleep);
            assert_eq!(timers.next(), Time::NEVER);
        }
        assert_eq!(timers.inner.state.borrow().alarms.wakers.len(), 1);
    }
}
