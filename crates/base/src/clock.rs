//! The one place that reads the time and waits for it. `clippy.toml` refuses both everywhere else.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, MutexGuard, PoisonError};
use std::thread;
use std::time::SystemTime;
use std::time::{Duration, Instant};

use ringserve_core::Time;
use ringserve_drivers::monotonic_nanos;
use rustix::time::{ClockId, clock_gettime};

/// The age of the clocks of new servers, in nanoseconds. For tests.
static AGE: AtomicU64 = AtomicU64::new(0);

/// From now on the shards of new servers find their clocks at `age`, as if they had run that long.
/// For tests of what happens after months.
#[doc(hidden)]
pub fn age_new_shards(age: Duration) {
    AGE.store(nanos(age), Ordering::SeqCst);
}

/// The clock of a server's shards: nanoseconds since it was started. Clones are the same clock.
#[derive(Clone, Debug)]
pub enum Clock {
    /// The system's monotonic clock.
    Real {
        /// When this one was at zero, by the system's clock; before that clock's own start, as a
        /// number that wrapped.
        zero: u64,
        /// The same moment by the calendar as it was then; `None` if that has no such time.
        started: Option<SystemTime>,
    },
    /// A simulation's.
    #[cfg(feature = "testing")]
    Simulated {
        time: VirtualTime,
        /// The value of this clock when that one is at zero.
        age: Duration,
    },
}

/// The time of a simulation, which passes when it is set. Clones are the same time.
#[cfg(feature = "testing")]
#[derive(Clone, Debug)]
pub struct VirtualTime {
    nanos: std::sync::Arc<AtomicU64>,
    /// For how long the shard was on a CPU whose round it is.
    ran: std::sync::Arc<AtomicU64>,
    /// The instant that stands for its zero, for the standard library's instants.
    zero: Instant,
}

#[cfg(feature = "testing")]
impl VirtualTime {
    #[allow(clippy::disallowed_methods, reason = "instants begin somewhere; only their differences are seen")]
    pub fn start() -> VirtualTime {
        VirtualTime { nanos: std::sync::Arc::default(), ran: std::sync::Arc::default(), zero: Instant::now() }
    }

    pub fn now(&self) -> Duration {
        Duration::from_nanos(self.nanos.load(Ordering::Relaxed))
    }

    pub fn set(&self, now: Duration) {
        self.nanos.store(nanos(now), Ordering::Relaxed);
    }

    /// A shard has its round that was on a CPU for this long.
    pub fn set_ran(&self, ran: Duration) {
        self.ran.store(nanos(ran), Ordering::Relaxed);
    }
}

#[expect(clippy::disallowed_methods, reason = "it is the clock")]
impl Clock {
    /// A clock that starts now.
    pub fn start() -> Clock {
        Clock::of_age(Duration::from_nanos(AGE.load(Ordering::SeqCst)))
    }

    /// A clock that started this long ago.
    pub fn of_age(age: Duration) -> Clock {
        Clock::Real {
            zero: monotonic_nanos().wrapping_sub(nanos(age)),
            started: SystemTime::now().checked_sub(age),
        }
    }

    #[inline]
    pub fn now(&self) -> Time {
        match self {
            Clock::Real { zero, .. } => Time::from_nanos(monotonic_nanos().wrapping_sub(*zero)),
            #[cfg(feature = "testing")]
            Clock::Simulated { time, age } => Time::from_nanos(nanos(time.now() + *age)),
        }
    }

    /// The time that the calling thread was on a CPU. In a simulation, that of the shard whose
    /// round it is.
    pub fn ran(&self) -> Duration {
        match self {
            Clock::Real { .. } => {
                let ran = clock_gettime(ClockId::ThreadCPUTime);
                let nanos = u32::try_from(ran.tv_nsec).unwrap_or_default();
                Duration::new(u64::try_from(ran.tv_sec).unwrap_or_default(), nanos)
            }
            #[cfg(feature = "testing")]
            Clock::Simulated { time, .. } => Duration::from_nanos(time.ran.load(Ordering::Relaxed)),
        }
    }

    /// True for the time of a simulation: what shows the system's there is not decided by the seed.
    pub fn is_simulated(&self) -> bool {
        !matches!(self, Clock::Real { .. })
    }

    /// When it was at zero, by the calendar; `None` in a simulation.
    pub fn started(&self) -> Option<SystemTime> {
        match self {
            Clock::Real { started, .. } => *started,
            #[cfg(feature = "testing")]
            Clock::Simulated { .. } => None,
        }
    }

    /// The same moment for code that counts in instants of the standard library.
    pub fn instant(&self) -> Instant {
        match self {
            Clock::Real { .. } => Instant::now(),
            #[cfg(feature = "testing")]
            Clock::Simulated { time, .. } => time.zero + time.now(),
        }
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// The calendar's time, in seconds since the beginning of 1970.
#[expect(clippy::disallowed_methods, reason = "what is kept over a restart goes by the calendar")]
pub fn seconds_since_1970() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// A point in time by which a thread that is no shard's waits no longer: one that starts a server,
/// or asks how it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Deadline(Instant);

#[expect(clippy::disallowed_methods, reason = "such a thread waits in real time")]
impl Deadline {
    /// In `time` from now, or in a hundred years.
    pub fn within(time: Duration) -> Deadline {
        const CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 3600);
        Deadline(Instant::now() + time.min(CENTURY))
    }

    pub fn is_over(self) -> bool {
        Instant::now() >= self.0
    }

    /// Sleeps for `time`. False at once if the deadline is over.
    pub fn pauses(self, time: Duration) -> bool {
        let waits = Instant::now() < self.0;
        if waits {
            thread::sleep(time);
        }
        waits
    }

    /// Waits while `waits` says so, which is asked at each notification, until the deadline is
    /// over.
    pub fn wait_while<'a, T>(
        self,
        notified: &Condvar,
        guard: MutexGuard<'a, T>,
        waits: impl FnMut(&mut T) -> bool,
    ) -> MutexGuard<'a, T> {
        let left = self.0.saturating_duration_since(Instant::now());
        notified.wait_timeout_while(guard, left, waits).unwrap_or_else(PoisonError::into_inner).0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn start_is_one_moment() {
        let clock = Clock::of_age(Duration::from_secs(3600));
        let started = clock.started();
        for _ in 0..100 {
            let now = clock.now();
            while clock.now() == now {}
            assert_eq!(clock.started(), started);
        }
    }
}
