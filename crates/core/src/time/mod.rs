//! Points in time, for callers and in the short form that connections keep, the wheel of time
//! limits, and rates.
// May use: tables.
// Begin with: `wheel.rs`.

mod rate;
mod stamp;
mod wheel;

use core::ops::{Add, Sub};
use core::time::Duration;

pub use rate::{AcceptRate, Gcra, SharedGcra, UnitRate};
pub(crate) use rate::{SECOND, time_of};
pub use stamp::Stamp;
pub(crate) use stamp::{FOR_EVER, NEVER, Timer};
pub(crate) use wheel::{STEP, steps_for};
pub use wheel::{Wheel, step_at};

/// A point in time on a shard's clock, which never goes back: nanoseconds since the start of its
/// server. Subtract two of them, or add a [`Duration`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Time(u64);

impl Time {
    /// The server's start.
    pub const ZERO: Time = Time(0);

    /// A time that never comes: later than all others.
    pub const NEVER: Time = Time(u64::MAX);

    /// `nanos` after the start.
    pub const fn from_nanos(nanos: u64) -> Time {
        Time(nanos)
    }

    /// Nanoseconds after the start.
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// Milliseconds after the start, rounded down.
    pub const fn as_millis(self) -> u64 {
        self.0 / 1_000_000
    }
}

impl Add<Duration> for Time {
    type Output = Time;

    /// Saturates after 584 years.
    fn add(self, duration: Duration) -> Time {
        Time(self.0.saturating_add(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)))
    }
}

impl Sub for Time {
    type Output = Duration;

    /// Zero if `earlier` is later.
    fn sub(self, earlier: Time) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}
