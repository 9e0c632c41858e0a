//! The response of a server to more work than it can do.
//!
//! ```text
//!   watchdog   signals of each shard ─▶ Stages ─▶ stage, and how long turns may be          each 100 ms, and each 35 ms unless all is calm
//!   shard      reads both once a turn ─▶ Pace ─▶ asks `Service::shed` for a share of its frames
//! ```

pub(crate) mod pace;
pub(crate) mod share;
pub(crate) mod stages;

use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// The degree to which a shard is asked for more than it can do, from
/// [`Cx::load`](crate::Cx::load).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Load {
    /// It keeps up.
    #[default]
    Calm,
    /// It has not waited for 100 ms, its accept queue is half full, or 70 % of what connections may
    /// hold is held. A service may leave out what is expensive and not needed.
    Busy,
    /// It has not waited for [`Overload::shed_after`] and each of its turns is long, or 80 % of
    /// what connections may hold is held. [`Service::shed`](crate::Service::shed) is asked for the
    /// share of the frames that keeps turns below [`Overload::turn_max`].
    Shedding,
    /// Connections are about to be lost: the accept queue is 80 % full or lost eight packets within
    /// a second, the table is 98 % full, or 90 % of what connections may hold is held. New
    /// connections are refused where there is a message for that
    /// ([`Admission::shed_reply`](crate::admission::Admission::shed_reply)), and wait else.
    Refusing,
    /// Accepting is paused, or was within the last seconds: the table is full, or descriptors are
    /// missing. Left once the table is below 98 % too.
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

/// The decision of [`Service::shed`](crate::Service::shed) about a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Shed {
    /// Nothing: the frame is handed to [`Service::call`](crate::Service::call).
    Serve,
    /// It answered the frame, or drops it without an answer. The frame is counted in
    /// [`ConnStats::frames_shed`](crate::stats::ConnStats::frames_shed).
    Answered,
}

/// When a server sheds, given to [`Server::overload`](crate::Server::overload). The thresholds that
/// are shares are those of [`Load`].
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
    /// The time for which a shard may go on without a wait, in long turns, before it sheds. 500 ms
    /// by default.
    pub fn shed_after(self, time: Duration) -> Overload {
        Overload { shed_after: time, ..self }
    }

    /// From which length on a turn is long: about a third of what a request may wait while the
    /// server sheds. 4 ms by default.
    ///
    /// A shard that sheds since its turns were long keeps them at three quarters of this. What came
    /// in during one turn is the work of the next, so a request waits for two of them, and some.
    /// Shorter ones answer sooner, and serve fewer: the cost of a turn itself, and of a read and a
    /// write for each connection, is shared by fewer frames.
    pub fn turn_max(self, time: Duration) -> Overload {
        Overload { turn_max: time, ..self }
    }

    /// The time for which a shard stays below 80 % of a stage's thresholds before it leaves the
    /// stage for the one below. 2 s by default.
    pub fn calm_after(self, time: Duration) -> Overload {
        Overload { calm_after: time, ..self }
    }
}

/// A shard's stage and share, where the shard reads them.
#[derive(Debug, Default)]
pub(crate) struct SharedLoad {
    word: AtomicU32,
    /// The length that turns are to have, in microseconds. Set before the word that has them be
    /// paced.
    turn_micros: AtomicU32,
}

/// Bits of the share.
const SHARE_BITS: u32 = 24;

/// The largest share.
const SHARE_MAX: u32 = (1 << SHARE_BITS) - 1;

/// New connections are refused.
const REFUSES: u32 = 1 << 31;

/// The shard sheds what makes its turns long.
const PACES: u32 = 1 << 30;

/// The load of a shard in a turn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LoadNow(u32);

/// The orders to a shard that has a [`Load`].
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LoadReport {
    /// A part of one: the least for which a service is asked.
    pub share: f64,
    /// The length that turns are to have, by shedding what makes them longer.
    pub turn: Option<Duration>,
    /// New connections are to be refused, by a service that has a message for that.
    pub refuses: bool,
}

impl SharedLoad {
    pub(crate) fn set(&self, load: Load, told: LoadReport) {
        let (mut share, mut paces) = (0, 0);
        if load >= Load::Shedding {
            share = LoadNow::share_of(told.share);
            if let Some(turn) = told.turn {
                let micros = u32::try_from(turn.as_micros()).unwrap_or(u32::MAX).max(1);
                self.turn_micros.store(micros, Ordering::Relaxed);
                paces = PACES;
            }
        }
        let refuses = if told.refuses { REFUSES } else { 0 };
        self.word.store(refuses | paces | (load as u32) << SHARE_BITS | share, Ordering::Relaxed);
    }

    #[inline]
    pub(crate) fn get(&self) -> LoadNow {
        LoadNow(self.word.load(Ordering::Relaxed))
    }

    /// The length that turns are to have, while that is of interest.
    pub(crate) fn turn(&self) -> Option<Duration> {
        // One that is not set yet is so for a turn at most.
        let micros = self.turn_micros.load(Ordering::Relaxed);
        let paces = self.get().0 & PACES != 0 && micros > 0;
        paces.then(|| Duration::from_micros(micros.into()))
    }
}

impl LoadNow {
    /// A part of one, as it is drawn for.
    fn share_of(part: f64) -> u32 {
        (part.clamp(0.0, 1.0) * f64::from(SHARE_MAX)) as u32
    }

    pub(crate) fn load(self) -> Load {
        Load::from_number((self.0 & !(REFUSES | PACES)) >> SHARE_BITS)
    }

    /// True if new connections are refused, by a service that has a message for that.
    #[inline]
    pub(crate) fn refuses(self) -> bool {
        self.0 & REFUSES != 0
    }

    /// True if some frames may be shed.
    #[inline]
    pub(crate) fn sheds(self) -> bool {
        self.0 & (PACES | SHARE_MAX) != 0
    }

    /// True for the share of all random numbers for which a frame is shed, which is no smaller than
    /// `least`.
    fn takes(self, random: u64, least: u32) -> bool {
        (random as u32 >> (32 - SHARE_BITS)) < (self.0 & SHARE_MAX).max(least)
    }
}

/// The load of a shard, for those who look at it.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct ShardLoad {
    /// The number of the shard.
    pub shard: usize,
    /// Its stage.
    pub load: Load,
    /// Why it is there, as in `ringserve_overload_stage_changes_total`; `None` while it is calm.
    pub cause: Option<&'static str>,
    /// The part of the frames for which [`Service::shed`](crate::Service::shed) is asked, from 0 to
    /// 1.
    pub shed_share: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shard_reads_the_load_that_was_set() {
        let shared = SharedLoad::default();
        assert_eq!((shared.get().load(), shared.get().sheds()), (Load::Calm, false));
        let turn = Duration::from_millis(4);
        for load in Load::ALL {
            for (refuses, paces) in [(true, false), (false, true), (true, true), (false, false)] {
                let turn = paces.then_some(turn);
                shared.set(load, LoadReport { share: 0.5, turn, refuses });
                let (now, sheds) = (shared.get(), load >= Load::Shedding);
                assert_eq!((now.load(), now.sheds(), now.refuses()), (load, sheds, refuses));
                assert_eq!(shared.turn(), turn.filter(|_| sheds));
            }
        }
        shared.set(Load::Full, LoadReport { refuses: true, ..LoadReport::default() });
        assert!(!shared.get().sheds());
    }

    #[test]
    fn frames_are_taken_in_the_share_that_was_set() {
        let shared = SharedLoad::default();
        for (share, least, most) in [(0.0, 0, 0), (0.25, 240, 272), (1.0, 1022, 1024), (7.0, 1022, 1024)] {
            shared.set(Load::Shedding, LoadReport { share, ..LoadReport::default() });
            let now = shared.get();
            // Evenly spread over all that are drawn.
            let taken = (0..1024u64).filter(|n| now.takes(n << 22, 0)).count();
            assert!((least..=most).contains(&taken), "{share}: {taken}");
        }
    }
}
