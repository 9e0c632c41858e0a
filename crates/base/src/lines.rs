//! The macros of `tracing`, each guarded: a subscriber that panics is not the end of a shard. And a
//! limit of lines a second.

use ringserve_core::Time;

#[doc(hidden)]
pub use ringserve_drivers::guarded;
#[doc(hidden)]
pub use tracing;

/// A line at this level.
#[doc(hidden)]
#[macro_export]
macro_rules! error_line {
    ($($line:tt)*) => { $crate::lines::guarded(|| $crate::lines::tracing::error!($($line)*)) };
}

/// A line at this level.
#[doc(hidden)]
#[macro_export]
macro_rules! warn_line {
    ($($line:tt)*) => { $crate::lines::guarded(|| $crate::lines::tracing::warn!($($line)*)) };
}

/// A line at this level.
#[doc(hidden)]
#[macro_export]
macro_rules! info_line {
    ($($line:tt)*) => { $crate::lines::guarded(|| $crate::lines::tracing::info!($($line)*)) };
}

/// A line at this level.
#[doc(hidden)]
#[macro_export]
macro_rules! debug_line {
    ($($line:tt)*) => { $crate::lines::guarded(|| $crate::lines::tracing::debug!($($line)*)) };
}

/// A line at this level.
#[doc(hidden)]
#[macro_export]
macro_rules! trace_line {
    ($($line:tt)*) => { $crate::lines::guarded(|| $crate::lines::tracing::trace!($($line)*)) };
}

// Named apart from the levels, since `warn` is an attribute too.
pub use crate::{
    debug_line as debug, error_line as error, info_line as info, trace_line as trace, warn_line as warn,
};

/// Lines a second for each kind of message. A server under attack must not be busy with its log;
/// the counters stay exact.
pub const LINES_PER_SECOND: u32 = 10;

/// The number of lines that were left out before a line, if any were.
pub type LeftOut = Option<u32>;

/// Lets a bounded number of lines through in each second.
#[derive(Default)]
pub struct LineLimit {
    second: u64,
    lines: u32,
    left_out: u32,
}

impl LineLimit {
    pub fn allows(&mut self, now: Time) -> bool {
        self.sample(now).is_some()
    }

    /// `Some` if there may be a line: with the number of those that were left out since the last
    /// one, for a field of it that is not written where there were none.
    pub fn sample(&mut self, now: Time) -> Option<LeftOut> {
        let second = now.as_millis() / 1000;
        if second != self.second {
            (self.second, self.lines) = (second, 0);
        }
        if self.lines == LINES_PER_SECOND {
            self.left_out = self.left_out.saturating_add(1);
            return None;
        }
        self.lines += 1;
        let left_out = std::mem::take(&mut self.left_out);
        Some((left_out > 0).then_some(left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ten_lines_a_second_and_ten_more_in_the_next() {
        let mut limit = LineLimit::default();
        let mut in_second = |second: u64| {
            (0..100).filter(|_| limit.allows(Time::from_nanos(second * 1_000_000_000 + 5))).count()
        };
        assert_eq!((in_second(0), in_second(1), in_second(1)), (10, 10, 0));
        let next = Time::from_nanos(2_000_000_000);
        assert_eq!([limit.sample(next), limit.sample(next)], [Some(Some(190)), Some(None)]);
    }
}
