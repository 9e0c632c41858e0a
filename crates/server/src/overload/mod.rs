//! What a server does when more comes than it can serve.
//!
//! ```text
//!   watchdog   signals of each shard ─▶ Stages ─▶ stage, and the share of frames to shed     each 35 ms
//!   shard      reads both once a turn; asks `Service::shed` for that share of its frames
//! ```

pub(crate) mod board;
pub(crate) mod share;
pub(crate) mod stages;
pub(crate) mod watch;

use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

pub use board::ShardLoad;

/// How much a shard is asked for beside what it can do, from [`Cx::load`](crate::Cx::load).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Load {
    /// It keeps up.
    #[default]
    Calm,
    /// It has not waited for 100 ms, its accept queue is half full, or 70 % of what connections may hold is held. A
    /// service may leave out what is expensive and not needed.
    Busy,
    /// It has not waited for [`Overload::shed_after`] and each of its turns is long, or 80 % of what connections may hold
    /// is held. [`Service::shed`](crate::Service::shed) is asked for a share of the frames.
    Shedding,
    /// Connections are about to be lost: the accept queue is 80 % full or lost some, the table is 98 % full, or 90 % of what
    /// connections may hold is held. Newcomers are refused where there are words for that
    /// ([`Admission::shed_reply`](crate::admission::Admission::shed_reply)), and wait else.
    Refusing,
    /// Accepting is paused, or was within the last seconds: the table is full, or descriptors are missing. Left once the table is
    /// below 98 % too.
    Full,
}

impl Load {
    pub(crate) const ALL: [Load; 5] = [Load::Calm, Load::Busy, Load::Shedding, Load::Refusing, Load::Full];

    /// The name in metrics and log lines.
    pub fn as_str(self) -> &'static str {
        match self {
            Load::Calm => "calm",
            Load::Busy => "busy",
            Load::Shedding => "shedding",
            Load::Refusing => "refusing",
            Load::Full => "full",
        }
    }

    fn from_number(number: u32) -> Load {
        Load::ALL.get(number as usize).copied().unwrap_or_default()
    }

    fn below(self) -> Load {
        Load::from_number((self as u32).saturating_sub(1))
    }
}

impl fmt::Display for Load {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// What [`Service::shed`](crate::Service::shed) did with a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Shed {
    /// Nothing: the frame is handed to [`Service::call`](crate::Service::call).
    Serve,
    /// It answered the frame, or drops it without an answer. The frame is counted in
    /// [`ConnStats::frames_shed`](crate::stats::ConnStats::frames_shed).
    Answered,
}

/// When a server sheds, given to [`Server::overload`](crate::Server::overload). The thresholds that are shares are those of
/// [`Load`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Overload {
    pub(crate) shed_after: Duration,
    pub(crate) turn_max: Duration,
    pub(crate) calm_after: Duration,
}

impl Default for Overload {
    fn default() -> Overload {
        Overload {
            shed_after: Duration::from_millis(500),
            turn_max: Duration::from_millis(4),
            calm_after: Duration::from_secs(2),
        }
    }
}

impl Overload {
    /// How long a shard may go on without a wait, in long turns, before it sheds. 500 ms by default.
    pub fn shed_after(self, time: Duration) -> Overload {
        Overload { shed_after: time, ..self }
    }

    /// From which length on a turn is long: about a third of what a request may wait while the server sheds. 4 ms by default.
    pub fn turn_max(self, time: Duration) -> Overload {
        Overload { turn_max: time, ..self }
    }

    /// How long a shard stays below 80 % of a stage's thresholds before it leaves the stage for the one below. 2 s by default.
    pub fn calm_after(self, time: Duration) -> Overload {
        Overload { calm_after: time, ..self }
    }
}

/// A shard's stage and share, where the shard reads them.
#[derive(Debug, Default)]
pub(crate) struct SharedLoad(AtomicU32);

/// Bits of the share.
const SHARE_BITS: u32 = 24;

/// Newcomers are refused.
const REFUSES: u32 = 1 << 31;

/// What a shard knows of its load in a turn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LoadNow(u32);

impl SharedLoad {
    /// `share` is a part of one. `refuses` is true if newcomers are to be refused, by a service that has words for that.
    pub(crate) fn set(&self, load: Load, share: f64, refuses: bool) {
        let share = (share.clamp(0.0, 1.0) * f64::from((1u32 << SHARE_BITS) - 1)) as u32;
        let share = if load >= Load::Shedding { share } else { 0 };
        let refuses = if refuses { REFUSES } else { 0 };
        self.0.store(refuses | (load as u32) << SHARE_BITS | share, Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn get(&self) -> LoadNow {
        LoadNow(self.0.load(Ordering::Relaxed))
    }
}

impl LoadNow {
    pub(crate) fn load(self) -> Load {
        Load::from_number((self.0 & !REFUSES) >> SHARE_BITS)
    }

    /// True if newcomers are refused, by a service that has words for that.
    #[inline]
    pub(crate) fn refuses(self) -> bool {
        self.0 & REFUSES != 0
    }

    /// True if some frames are shed.
    #[inline]
    pub(crate) fn sheds(self) -> bool {
        self.0 & ((1 << SHARE_BITS) - 1) != 0
    }

    /// True for the share of all random numbers for which a frame is shed.
    pub(crate) fn takes(self, random: u64) -> bool {
        (random as u32 >> (32 - SHARE_BITS)) < self.0 & ((1 << SHARE_BITS) - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shard_reads_the_load_that_was_set() {
        let shared = SharedLoad::default();
        assert_eq!((shared.get().load(), shared.get().sheds()), (Load::Calm, false));
        for load in Load::ALL {
            for refuses in [true, false] {
                shared.set(load, 0.5, refuses);
                let now = shared.get();
                assert_eq!((now.load(), now.sheds(), now.refuses()), (load, load >= Load::Shedding, refuses));
            }
        }
        shared.set(Load::Full, 0.0, true);
        assert!(!shared.get().sheds());
    }

    #[test]
    fn frames_are_taken_in_the_share_that_was_set() {
        let shared = SharedLoad::default();
        for (share, least, most) in [(0.0, 0, 0), (0.25, 240, 272), (1.0, 1022, 1024), (7.0, 1022, 1024)] {
            shared.set(Load::Shedding, share, false);
            let now = shared.get();
            // Evenly spread over all that are drawn.
            let taken = (0..1024u64).filter(|n| now.takes(n << 22)).count();
            assert!((least..=most).contains(&taken), "{share}: {taken}");
        }
    }
}
