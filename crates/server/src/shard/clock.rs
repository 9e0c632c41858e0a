//! The clock of a shard.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ringserve_core::Time;
use ringserve_drivers::monotonic_nanos;

/// How long ago the clocks of new shards started, in nanoseconds. For tests.
static AGE: AtomicU64 = AtomicU64::new(0);

/// From now on new shards find their clocks at `age`, as if they had run that long. For tests of what happens after
/// months.
#[doc(hidden)]
pub fn age_new_shards(age: Duration) {
    AGE.store(nanos(age), Ordering::SeqCst);
}

/// Counts the nanoseconds since it was started, on the system's monotonic clock.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    /// When it was at zero, by the system's clock; before that clock's own start, as a number that wrapped.
    zero: u64,
}

impl Clock {
    /// A clock that starts now.
    pub(crate) fn start() -> Clock {
        Clock::of_age(Duration::from_nanos(AGE.load(Ordering::SeqCst)))
    }

    /// A clock that started this long ago.
    pub(crate) fn of_age(age: Duration) -> Clock {
        Clock { zero: monotonic_nanos().wrapping_sub(nanos(age)) }
    }

    #[inline]
    pub(crate) fn now(self) -> Time {
        Time::from_nanos(monotonic_nanos().wrapping_sub(self.zero))
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
