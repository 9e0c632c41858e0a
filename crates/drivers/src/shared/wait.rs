//! Ends of waits: a wake from another thread, by an eventfd, or a timer that is set once for many
//! waits.
//!
//! A time given with `io_uring_enter` or `epoll_wait` sets a timer of the kernel's and clears it
//! again, in every call that blocks: measured, half a microsecond, 6 % of a turn with one request
//! in it. The deadlines of a server are usually far away, and move away. So one timer (a timeout
//! operation, a timerfd) stays with the kernel until it goes off, and waits that end later need no
//! separate time. It is set again for a wait that ends sooner. It may go off once when nothing is
//! due; a wait may end early, and up to a millisecond late. A short wait passes its time in the
//! call, unless the timer goes off by then: reading the clock costs less.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{self, Wake as _};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};

/// Makes a turn return, from any thread. Clones wake the same shard.
///
/// Writes before [`wake`](Waker::wake) are visible to the shard after the turn that it ended.
#[derive(Clone, Debug)]
pub struct Waker {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    eventfd: OwnedFd,
    /// True exactly from a wake until the shard saw it: further wakes cost no system call.
    pending: AtomicBool,
}

impl task::Wake for Inner {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if !self.pending.swap(true, Ordering::AcqRel) {
            // The write cannot block: the counter is far from its maximum, since each wake that was
            // seen empties it or adds one.
            let _ = rustix::io::write(&self.eventfd, &1u64.to_ne_bytes());
        }
    }
}

impl Waker {
    /// Creates a waker, for the kernel half of a driver.
    ///
    /// # Errors
    /// If there is no descriptor left.
    pub fn new() -> io::Result<Waker> {
        // Not NONBLOCK: on such a descriptor the ring's read would end at once instead of waiting.
        let eventfd = eventfd(0, EventfdFlags::CLOEXEC)?;
        Ok(Waker { inner: Arc::new(Inner { eventfd, pending: AtomicBool::new(false) }) })
    }

    /// Wakes the shard: its turn returns, or the next one does not wait.
    pub fn wake(&self) {
        self.inner.wake_by_ref();
    }

    /// Notes, for the kernel half of a driver, that the shard saw the wake and its eventfd was
    /// read. Writes of the waking threads before the wake are visible from here on.
    pub fn seen(&self) {
        self.inner.pending.swap(false, Ordering::AcqRel);
    }

    /// Converts the waker into a task's waker.
    pub fn to_task(&self) -> task::Waker {
        task::Waker::from(self.inner.clone())
    }

    pub(crate) fn raw(&self) -> RawFd {
        self.inner.eventfd.as_raw_fd()
    }
}

/// The eventfd, which is readable from a wake until it is read.
impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.eventfd.as_fd()
    }
}

/// Waits up to this long pass their time in the call, unless the timer is already set: setting it,
/// and the next one, would cost more.
const SHORT: Duration = Duration::from_millis(20);

/// The shortest wait that a timer is set for.
pub(crate) const SET_FROM: Duration = Duration::from_millis(21);

/// A wait that ends this little before the timer ends with it, unless it is a short one: the same
/// deadline is a different wait in each turn.
const SLACK: Duration = Duration::from_millis(1);

/// The timer is set no further ahead, so that every time fits into the kernel's type.
const LONG: Duration = Duration::from_secs(24 * 60 * 60);

/// The monotonic clock's time.
#[expect(clippy::disallowed_methods, reason = "drivers wait in real time, and read its clock here")]
pub(crate) fn now() -> Duration {
    Duration::from_nanos(monotonic_nanos())
}

/// The state of the kernel's timer, in nanoseconds of the monotonic clock: each turn reads it.
#[derive(Default)]
pub(crate) struct Timer {
    /// The time at which it goes off.
    armed: Option<u64>,
    /// The clock when it was last read.
    read: u64,
}

/// The event that ends a wait.
#[derive(Debug, PartialEq)]
pub(crate) enum Bound {
    /// The timer, which is set.
    Timer,
    /// The timer, once it is set to this time of the monotonic clock. `again` if it has not gone
    /// off since it last was.
    Set { until: Duration, again: bool },
    /// The time given in the call.
    Call,
}

impl Timer {
    /// Decides how to end a wait of this length. The caller must do what [`Bound::Set`] asks for,
    /// or call [`went_off`](Timer::went_off). The timer is not set unless it `can` be.
    #[inline]
    pub(crate) fn bound(&mut self, wait: Duration, can: bool) -> Bound {
        let wait = nanos(wait.min(LONG));
        if self.ends(self.read + wait + slack(wait)) {
            // The timer also ends a wait that begins now, which is later.
            return Bound::Timer;
        }
        self.bound_now(wait, can)
    }

    #[inline(never)]
    fn bound_now(&mut self, wait: u64, can: bool) -> Bound {
        if wait <= nanos(SHORT) && self.armed.is_none() {
            return Bound::Call;
        }
        self.read = nanos(now());
        self.bound_at(self.read, wait, can)
    }

    /// True if the timer goes off by then.
    #[inline]
    fn ends(&self, until: u64) -> bool {
        self.armed.is_some_and(|armed| armed <= until)
    }

    fn bound_at(&mut self, now: u64, wait: u64, can: bool) -> Bound {
        let until = now + wait;
        match self.armed {
            _ if self.ends(until + slack(wait)) => Bound::Timer,
            _ if !can || wait <= nanos(SHORT) => Bound::Call,
            armed => {
                self.armed = Some(until);
                Bound::Set { until: Duration::from_nanos(until), again: armed.is_some() }
            }
        }
    }

    /// Notes that the timer went off, or could not be set.
    pub(crate) fn went_off(&mut self) {
        self.armed = None;
    }
}

/// The longest time by which a wait may end late: a short one by an eighth.
#[inline]
const fn slack(wait: u64) -> u64 {
    let eighth = wait / 8;
    if eighth < nanos(SLACK) { eighth } else { nanos(SLACK) }
}

/// Nanoseconds of a time of less than 500 years.
#[inline]
const fn nanos(time: Duration) -> u64 {
    time.as_secs() * 1_000_000_000 + time.subsec_nanos() as u64
}

/// Nanoseconds on the system's monotonic clock.
///
/// A third of the instructions of `Instant`, which keeps seconds and nanoseconds apart: a shard
/// reads the clock every turn.
#[expect(clippy::disallowed_methods, reason = "what the shard's clock stands on")]
#[inline]
pub fn monotonic_nanos() -> u64 {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a timespec of this function. The clock exists on every Linux, so
    // the call does not fail.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut now) };
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Duration = Duration::from_secs(1);

    fn set(seconds: u32, again: bool) -> Bound {
        Bound::Set { until: S * seconds, again }
    }

    #[track_caller]
    fn expect(timer: &mut Timer, now: u32, wait: u32, expected: Bound) {
        assert_eq!(
            timer.bound_at(nanos(S * now), nanos(S * wait), true),
            expected,
            "a wait of {wait} s at {now} s"
        );
    }

    #[test]
    fn one_setting_serves_many_waits() {
        let mut timer = Timer::default();
        expect(&mut timer, 0, 60, set(60, false));
        (0..60).for_each(|now| expect(&mut timer, now, 60, Bound::Timer));
        expect(&mut timer, 59, 1, Bound::Timer);
        timer.went_off();
        expect(&mut timer, 60, 60, set(120, false));
    }

    #[test]
    fn a_wait_that_ends_sooner_sets_it_again() {
        let mut timer = Timer::default();
        expect(&mut timer, 0, 60, set(60, false));
        expect(&mut timer, 10, 50, Bound::Timer);
        assert_eq!(timer.bound_at(nanos(S * 10), nanos(S * 50 - SLACK), true), Bound::Timer);
        expect(&mut timer, 10, 49, set(59, true));
        assert_eq!(timer.bound_at(nanos(S * 10), nanos(S * 10), false), Bound::Call);
        expect(&mut timer, 10, 49, Bound::Timer);
    }

    #[test]
    fn short_wait_and_one_without_timer_have_separate_times() {
        let mut timer = Timer::default();
        assert_eq!(timer.bound(SHORT, true), Bound::Call);
        assert_eq!(timer.bound(S, false), Bound::Call);
        assert!(matches!(timer.bound(S, true), Bound::Set { again: false, .. }));
    }

    #[test]
    fn short_wait_that_the_timer_ends_needs_no_time() {
        let mut timer = Timer::default();
        expect(&mut timer, 0, 60, set(60, false));
        let short = |timer: &mut Timer, early| timer.bound_at(nanos(S * 60 - early), nanos(SHORT), true);
        assert_eq!(short(&mut timer, SHORT), Bound::Timer);
        assert_eq!(short(&mut timer, SHORT / 2), Bound::Timer);
        assert_eq!(short(&mut timer, SHORT + SLACK), Bound::Timer);
        assert_eq!(
            short(&mut timer, SHORT + SLACK + Duration::from_nanos(1)),
            Bound::Call,
            "it would end late"
        );
        let brief = |timer: &mut Timer, early| timer.bound_at(nanos(S * 60 - early), nanos(SLACK), true);
        assert_eq!(brief(&mut timer, SLACK + SLACK / 8), Bound::Timer);
        assert_eq!(brief(&mut timer, SLACK + SLACK / 4), Bound::Call);
        timer.went_off();
        assert_eq!(short(&mut timer, SHORT), Bound::Call);
    }

    #[test]
    fn clock_is_read_only_for_a_wait_that_may_end_before_the_timer() {
        let second = nanos(S);
        let mut timer = Timer { armed: Some(60 * second), read: second };
        assert_eq!((timer.bound(S * 60, true), timer.read), (Bound::Timer, second));
        assert_eq!((timer.bound(Duration::MAX, true), timer.read), (Bound::Timer, second));
        timer.bound(S * 58, true);
        assert!(timer.read > second, "{}", timer.read);
    }

    #[test]
    fn a_wait_without_end_is_far_away() {
        let mut timer = Timer::default();
        let Bound::Set { until, again: false } = timer.bound(Duration::MAX, true) else {
            panic!("it is not set: {:?}", timer.armed)
        };
        assert_eq!(until, Duration::from_nanos(timer.read) + LONG);
    }
}
