//! The rate at which the watchdog writes lines.

use std::time::Duration;

use ringserve_core::Time;

/// Lines about the stalls of a shard: five a minute at most.
#[derive(Default)]
pub(crate) struct Lines {
    minute: u64,
    written: u32,
    left_out: u32,
}

impl Lines {
    const PER_MINUTE: u32 = 5;

    /// `Some` if there may be a line: with the number of those that were left out since the last
    /// one.
    pub(crate) fn allow(&mut self, now: Time) -> Option<u32> {
        let minute = now.as_millis() / 60_000;
        if minute != self.minute {
            (self.minute, self.written) = (minute, 0);
        }
        if self.written == Lines::PER_MINUTE {
            self.left_out += 1;
            return None;
        }
        self.written += 1;
        Some(std::mem::take(&mut self.left_out))
    }
}

/// From this length on the end of a stall is reported, too: an operator may have begun to look for
/// its cause.
pub(super) const END_TOLD_FROM: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Time {
        Time::from_nanos(seconds * 1_000_000_000)
    }

    #[test]
    fn five_lines_a_minute_and_the_next_one_counts_the_rest() {
        let mut lines = Lines::default();
        let allowed: Vec<_> = (0..10).filter_map(|second| lines.allow(at(second))).collect();
        assert_eq!(allowed, [0; 5]);
        assert_eq!((lines.allow(at(60)), lines.allow(at(61))), (Some(5), Some(0)));
    }
}
