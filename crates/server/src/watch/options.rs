//! Options of the watchdog: when a shard counts as stalled, and how often the watchdog looks at it.

use std::time::Duration;

/// A turn takes microseconds, so this is a thousand of them; and a peer notices it. As Seastar has
/// it.
const OVER: Duration = Duration::from_millis(25);

/// Below it, a busy machine alone would make reports.
const OVER_MIN: Duration = Duration::from_millis(2);

/// Looks are no further apart, so that a long stall is reported while it is fresh.
const LOOKS_EVERY_MAX: Duration = Duration::from_millis(250);

/// A turn that takes this part of the threshold, 2.5 ms by default, is followed from the look on
/// that finds it: most turns take microseconds, and a look that asks what a thread does reads four
/// files.
const LATE_PART: u32 = 10;

/// Looks at shards that go on are this far apart: what the stages of a load are made of.
pub(super) const LOOKS_LATE: Duration = Duration::from_millis(100);

/// The definition of a stalled shard, and the reports of it. By default one that is in the same
/// turn of its loop for 25 ms.
///
/// ```no_run
/// # use ringserve::Server;
/// use std::time::Duration;
/// use ringserve::limits::StallOptions;
///
/// let server = Server::bind("0.0.0.0:7000").stalls(StallOptions::default().over(Duration::from_millis(100)));
/// ```
///
/// A stall is reported in one line of the log at level `warn` while it lasts, then each time it has
/// become twice as long; in five lines a minute for each shard at most.
/// [`ServerControl::stalls`](crate::ServerControl::stalls) and the metrics have all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(alias = "Stalls")]
pub struct StallOptions {
    over: Option<Duration>,
}

impl StallOptions {
    /// No watchdog: no thread, no reports.
    pub fn off() -> StallOptions {
        StallOptions { over: None }
    }

    /// Reports turns that are longer than `time`, which is taken as 2 ms at least. They are found
    /// before they take twice that long.
    pub fn over(self, time: Duration) -> StallOptions {
        StallOptions { over: Some(time.max(OVER_MIN)) }
    }

    /// The length from which a turn is a stall; `None` if none is.
    pub(crate) fn threshold(self) -> Option<Duration> {
        self.over
    }

    /// The length from which a turn is not short.
    pub(crate) fn late(over: Duration) -> Duration {
        over / LATE_PART
    }

    /// The time between two looks at a shard that may be stalled.
    pub(crate) fn looks_every(over: Duration) -> Duration {
        (over / 2).min(LOOKS_EVERY_MAX)
    }

    /// The same while no shard is in a turn that is not short, if none of them begins another one.
    /// A stall that begins right after a look is found by the next one, and reported by that or by
    /// the one that follows it, since two looks are needed to know what a thread runs: at twice the
    /// threshold.
    pub(crate) fn looks_seldom(over: Duration) -> Duration {
        (over * 7 / 5).min(LOOKS_EVERY_MAX)
    }
}

impl Default for StallOptions {
    fn default() -> StallOptions {
        StallOptions { over: Some(OVER) }
    }
}
