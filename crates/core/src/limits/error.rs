//! Wrong limits: how they are found, and the text of the error.

use core::fmt;
use core::time::Duration;

use crate::time::STEP;

/// A limit that is wrong, and why. The text names the limit with its type, its value, what is
/// allowed and what to do; `Debug` prints the same text.
#[derive(Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum LimitError {
    /// A value is out of its range.
    Range {
        /// The limit.
        name: &'static str,
        /// Its value.
        value: u64,
        /// The smallest allowed.
        min: u64,
        /// The largest allowed; `u64::MAX` if there is none.
        max: u64,
    },
    /// Two values contradict each other.
    Order {
        /// The limit that must be the smaller one.
        small: &'static str,
        /// The value of `small`.
        small_value: u64,
        /// The limit that must be the larger one.
        large: &'static str,
        /// The value of `large`.
        large_value: u64,
    },
    /// A time is out of its range.
    Time {
        /// The limit.
        name: &'static str,
        /// Its value.
        value: Duration,
        /// The shortest allowed.
        min: Duration,
        /// The longest allowed.
        max: Duration,
        /// `None` switches the limit off.
        may_be_off: bool,
    },
    /// Two times contradict each other.
    TimeOrder {
        /// The limit that must be the shorter one.
        small: &'static str,
        /// The value of `small`.
        small_value: Duration,
        /// The limit that must be the longer one.
        large: &'static str,
        /// The value of `large`.
        large_value: Duration,
    },
    /// [`ServerLimits::held_bytes_max`](super::ServerLimits::held_bytes_max) is too low for a
    /// service that sets no limits.
    HeldBytes {
        /// The value of `held_bytes_max`.
        value: u64,
        /// The smallest allowed.
        min: u64,
    },
}

/// A time in the form that errors show.
struct TimeText(Duration);

impl fmt::Display for TimeText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const DAY: u64 = 24 * 3600;
        match (self.0.as_secs(), self.0.subsec_nanos()) {
            (0, 0) => f.write_str("0 s"),
            (seconds, 0) if seconds % DAY == 0 => write!(f, "{} days", seconds / DAY),
            _ => write!(f, "{:?}", self.0),
        }
    }
}

impl fmt::Display for LimitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            LimitError::Range { name, value, min, max: u64::MAX } => {
                write!(f, "{name} is {value}; it must be {min} or more")
            }
            LimitError::Range { name, value, min, max } if min == max => {
                write!(f, "{name} is {value}; it must be {min}")
            }
            LimitError::Range { name, value, min, max } => {
                write!(f, "{name} is {value}; it must be {min} to {max}")
            }
            LimitError::Order { small, small_value, large, large_value } => write!(
                f,
                "{small} is {small_value} and {large} is {large_value}; {small} must not be larger: lower it, or raise {large}"
            ),
            LimitError::Time { name, value, min, max, may_be_off } => {
                let off = if may_be_off { ", or None, which switches it off" } else { "" };
                write!(
                    f,
                    "{name} is {}; it must be {} to {}{off}",
                    TimeText(value),
                    TimeText(min),
                    TimeText(max)
                )
            }
            LimitError::TimeOrder { small, small_value, large, large_value } => write!(
                f,
                "{small} is {} and {large} is {}; {small} must not be longer: lower it, or raise {large}",
                TimeText(small_value),
                TimeText(large_value)
            ),
            LimitError::HeldBytes { value, min } => write!(
                f,
                "ServerLimits::held_bytes_max is {value}; it must be {min} or more: it bounds the bytes of all unsent replies and \
                 unfinished frames of a shard, of which one connection may hold half. For less, set Limits that fit in"
            ),
        }
    }
}

ringserve_buf::debug_is_display!(LimitError);

impl core::error::Error for LimitError {}

/// The shortest time limit: the wheel of timers cannot measure shorter ones.
pub(super) const TIME_MIN: Duration = Duration::from_millis(STEP.as_millis() as u64 + 1);

const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);

pub(super) fn times_in_range<const N: usize>(
    times: [(&'static str, Option<Duration>); N],
) -> Result<(), LimitError> {
    let mut set = times.into_iter().filter_map(|(name, time)| Some((name, time?)));
    set.try_for_each(|(name, time)| time_in_range(name, time, TIME_MIN, true))
}

pub(super) fn time_in_range(
    name: &'static str,
    value: Duration,
    min: Duration,
    may_be_off: bool,
) -> Result<(), LimitError> {
    let max = YEAR;
    if (min..=max).contains(&value) {
        Ok(())
    } else {
        Err(LimitError::Time { name, value, min, max, may_be_off })
    }
}

pub(super) fn in_range(name: &'static str, value: u64, min: u64, max: u64) -> Result<(), LimitError> {
    if (min..=max).contains(&value) { Ok(()) } else { Err(LimitError::Range { name, value, min, max }) }
}

/// Refuses times that contradict each other, if both are set.
pub(super) fn in_order(
    small: &'static str,
    small_time: Option<Duration>,
    large: &'static str,
    large_time: Option<Duration>,
) -> Result<(), LimitError> {
    match (small_time, large_time) {
        (Some(small_value), Some(large_value)) if small_value > large_value => {
            Err(LimitError::TimeOrder { small, small_value, large, large_value })
        }
        _ => Ok(()),
    }
}

pub(crate) fn ordered(
    small: &'static str,
    small_value: usize,
    large: &'static str,
    large_value: usize,
) -> Result<(), LimitError> {
    if small_value <= large_value {
        return Ok(());
    }
    Err(LimitError::Order { small, small_value: small_value as u64, large, large_value: large_value as u64 })
}
