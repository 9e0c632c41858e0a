//! Measurements of a shard's turns for those who watch it, and the times at which it publishes its
//! figures.

use std::sync::Arc;
use std::time::Duration;

use ringserve_base::lines::LineLimit;
use ringserve_base::lines::warn;
use ringserve_core::{Address, Time};
use ringserve_drivers::guarded;

use crate::shard::wakes::timers::Timers;
use crate::snapshot::Snapshot;
use crate::watch::accept_queue::AcceptQueues;

/// The shortest time between publications of figures, which happen at the end of a turn: a
/// publication is a hundred stores and more, and readers look each few seconds.
const PUBLISHED_EVERY: Duration = Duration::from_millis(100);

/// One of this many turns that end in a wait is timed and stands for all of them: only that takes a
/// clock read in addition to the one with which each turn begins.
const TIMED_ONE_IN: u32 = 64;

/// The meter of one shard.
pub(crate) struct Meter {
    pub(crate) snapshot: Arc<Snapshot>,
    publish_at: Time,
    put_off_at: Time,
    timing: Timing,
}

/// Measurement of the lengths of turns; empty where nothing reads them.
struct Timing {
    /// The next turn follows the last one without a wait.
    #[cfg(feature = "metrics")]
    goes_on: bool,
    #[cfg(feature = "metrics")]
    until_timed: u32,
}

#[cfg(feature = "metrics")]
impl Timing {
    const START: Timing = Timing { goes_on: false, until_timed: TIMED_ONE_IN };

    /// True if this turn follows the last one without a wait, which the call forgets.
    #[inline]
    fn took_no_wait(&mut self) -> bool {
        let goes_on = self.goes_on;
        if goes_on {
            self.goes_on = false;
        }
        goes_on
    }

    #[inline]
    fn goes_on(&mut self, goes_on: bool) {
        self.goes_on = goes_on;
    }

    /// True if the turn that ends now is timed.
    #[inline]
    fn is_timed(&mut self) -> bool {
        self.until_timed -= 1;
        if self.until_timed > 0 {
            return false;
        }
        self.until_timed = TIMED_ONE_IN;
        true
    }
}

#[cfg(not(feature = "metrics"))]
impl Timing {
    const START: Timing = Timing {};

    #[inline]
    fn took_no_wait(&mut self) -> bool {
        false
    }

    #[inline]
    fn goes_on(&mut self, _goes_on: bool) {}

    #[inline]
    fn is_timed(&mut self) -> bool {
        false
    }
}

impl Meter {
    pub(crate) fn new(snapshot: Arc<Snapshot>) -> Meter {
        Meter { snapshot, publish_at: Time::ZERO, put_off_at: Time::ZERO, timing: Timing::START }
    }

    /// Begins a turn, after one that was so much of a whole one.
    #[inline]
    pub(crate) fn begin_turn(&mut self, now: Time, last: u32) {
        if self.timing.took_no_wait() {
            self.count_turn(now, 1);
        }
        self.snapshot.begin_turn(now, last);
    }

    /// The time from which on a turn that begins postpones the watchdog's next check.
    #[inline]
    pub(crate) fn put_off_at(&self) -> Time {
        self.put_off_at
    }

    /// Notes that the check was postponed. A turn from `again` on postpones it once more.
    pub(crate) fn put_off(&mut self, again: Time) {
        self.put_off_at = again;
    }

    /// The time since the turn before began; zero if there was none.
    pub(crate) fn since_turn(&self, now: Time) -> Duration {
        self.snapshot.last_turn().map_or(Duration::ZERO, |began| now - began)
    }

    /// Ends a turn.
    #[inline]
    pub(crate) fn end_turn(&mut self) {
        self.snapshot.end_turn();
    }

    /// Notes that figures were published in the turn that began at `now`.
    pub(crate) fn published(&mut self, now: Time) {
        self.publish_at = now + PUBLISHED_EVERY;
    }

    /// The time at which figures are to be published again, if something happens. If nothing else
    /// does, a shard wakes for it: one that slept for longer would leave out its last ones.
    pub(crate) fn publish_at(&self) -> Time {
        self.publish_at
    }

    /// Notes that the next turn begins as soon as this one is over.
    #[inline]
    pub(crate) fn goes_on(&mut self) {
        self.timing.goes_on(true);
    }

    /// Excludes the time between this turn and the next one from the length of this one.
    #[cfg(feature = "runtime-tokio")]
    pub(crate) fn pauses(&mut self) {
        self.timing.goes_on(false);
    }

    /// Notes that the shard waits now.
    #[inline]
    pub(crate) fn waits(&mut self, clock: &Timers) {
        if self.timing.is_timed() {
            self.time_turn(clock);
        }
    }

    #[cold]
    fn time_turn(&mut self, clock: &Timers) {
        self.count_turn(clock.now(), TIMED_ONE_IN.into());
    }

    /// Counts a turn that was over at `over`, as `count` turns.
    fn count_turn(&self, over: Time, count: u64) {
        if let Some(began) = self.snapshot.last_turn() {
            self.snapshot.durations.add_turn(began, over, count);
        }
    }
}

/// Lost packets of a shard's listeners that its log has reported.
#[derive(Default)]
pub(crate) struct LossLog {
    /// Packets, by listener.
    lost: Vec<u64>,
    lines: LineLimit,
}

impl LossLog {
    /// Writes a line for each listener of the shard that lost packets since the last look: as far
    /// as the shard knows it, which waits for no thread that looks at the same time.
    pub(crate) fn look(&mut self, shard: usize, queues: &AcceptQueues, listeners: &[Address], now: Time) {
        for queue in queues.glance_at_those_of(shard) {
            let (Some(lost), Some(listener)) = (queue.lost, listeners.get(queue.listener)) else { continue };
            if self.lost.len() <= queue.listener {
                self.lost.resize(queue.listener + 1, 0);
            }
            let before = self.lost[queue.listener];
            self.lost[queue.listener] = before.max(lost);
            if lost > before && self.lines.allows(now) {
                let (lost, waiting, capacity) = (lost - before, queue.waiting, queue.capacity);
                guarded(|| {
                    warn!(
                        shard,
                        %listener,
                        lost,
                        waiting,
                        capacity,
                        "the accept queue was full, and packets of newcomers were dropped: they try again a second later; a handler \
                         blocked the shard, or they came faster than it accepts"
                    );
                });
            }
        }
    }
}
