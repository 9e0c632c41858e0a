//! What a shard notes of its turns for those who watch it, and when it publishes its figures.

use std::sync::Arc;
use std::time::Duration;

use ringserve_base::lines::LineLimit;
use ringserve_base::lines::warn;
use ringserve_core::{Address, Time};
use ringserve_drivers::guarded;

#[cfg(feature = "metrics")]
use crate::histogram::add;
#[cfg(feature = "metrics")]
use crate::shard::wakes::timers::Timers;
use crate::snapshot::Snapshot;
use crate::watch::accept_queue::AcceptQueues;

/// Figures are published at the end of a turn, and no more often than this: a publication is a hundred stores and more, and
/// readers look each few seconds.
const PUBLISHED_EVERY: Duration = Duration::from_millis(100);

/// One of this many turns that end in a wait is timed and stands for all of them: only that takes a look at the clock beside the one
/// with which each turn begins.
#[cfg(feature = "metrics")]
const TIMED_ONE_IN: u32 = 64;

/// A shard's own.
pub(crate) struct Meter {
    pub(crate) snapshot: Arc<Snapshot>,
    publish_at: Time,
    put_off_at: Time,
    #[cfg(feature = "metrics")]
    timing: Timing,
}

/// How the lengths of turns come to be known.
#[cfg(feature = "metrics")]
struct Timing {
    /// The next turn follows the last one without a wait.
    goes_on: bool,
    until_timed: u32,
}

impl Meter {
    pub(crate) fn new(snapshot: Arc<Snapshot>) -> Meter {
        Meter {
            snapshot,
            publish_at: Time::ZERO,
            put_off_at: Time::ZERO,
            #[cfg(feature = "metrics")]
            timing: Timing { goes_on: false, until_timed: TIMED_ONE_IN },
        }
    }

    /// A turn begins, behind one that was so much of a whole one.
    #[inline]
    pub(crate) fn begin_turn(&mut self, now: Time, last: u32) {
        #[cfg(feature = "metrics")]
        if self.timing.goes_on {
            self.timing.goes_on = false;
            self.count_turn(now, 1);
        }
        self.snapshot.begin_turn(now, last);
    }

    /// From when on a turn that begins puts the watchdog's next look off.
    #[inline]
    pub(crate) fn put_off_at(&self) -> Time {
        self.put_off_at
    }

    /// The look is put off, and then again.
    pub(crate) fn put_off(&mut self, again: Time) {
        self.put_off_at = again;
    }

    /// How long ago the turn before began; nothing if there was none.
    pub(crate) fn since_turn(&self, now: Time) -> Duration {
        self.snapshot.last_turn().map_or(Duration::ZERO, |began| now - began)
    }

    /// The turn is over.
    #[inline]
    pub(crate) fn end_turn(&mut self) {
        self.snapshot.end_turn();
    }

    /// Figures were published in the turn that began then.
    pub(crate) fn published(&mut self, now: Time) {
        self.publish_at = now + PUBLISHED_EVERY;
    }

    /// When figures are to be published again, if something happens. If nothing else does, a shard wakes for it: one that slept for
    /// longer would leave out its last ones.
    pub(crate) fn publish_at(&self) -> Time {
        self.publish_at
    }
}

/// The lengths of turns and calls, for those who read them.
#[cfg(feature = "metrics")]
impl Meter {
    /// A call of this service waits.
    pub(crate) fn call_waits(&self, service: usize) {
        if let Some(calls) = self.snapshot.calls.get(service) {
            calls.begins();
        }
    }

    /// A call that waited is over, which began in a turn then.
    pub(crate) fn call_ended(&self, service: usize, now: Time, began: Time) {
        let Some(calls) = self.snapshot.calls.get(service) else { return };
        calls.waited.add(nanos(began, now), 1);
        calls.end(1);
    }

    /// Calls that waited are dropped, since their connection ended.
    pub(crate) fn calls_dropped(&self, service: usize, count: usize) {
        if let Some(calls) = self.snapshot.calls.get(service) {
            calls.end(count as u64);
        }
    }

    /// A call returned an error.
    pub(crate) fn call_failed(&self, service: usize) {
        if let Some(calls) = self.snapshot.calls.get(service) {
            add(&calls.failed, 1);
        }
    }

    /// A call panicked.
    pub(crate) fn call_panicked(&self, service: usize) {
        if let Some(calls) = self.snapshot.calls.get(service) {
            add(&calls.panicked, 1);
        }
    }

    /// The next turn begins as soon as this one is over.
    #[inline]
    pub(crate) fn goes_on(&mut self) {
        self.timing.goes_on = true;
    }

    /// What comes between this turn and the next one is no part of it.
    #[cfg(feature = "runtime-tokio")]
    pub(crate) fn pauses(&mut self) {
        self.timing.goes_on = false;
    }

    /// The shard waits now.
    #[inline]
    pub(crate) fn waits(&mut self, clock: &Timers) {
        self.timing.until_timed -= 1;
        if self.timing.until_timed == 0 {
            self.time_turn(clock);
        }
    }

    #[cold]
    fn time_turn(&mut self, clock: &Timers) {
        self.timing.until_timed = TIMED_ONE_IN;
        self.count_turn(clock.now(), TIMED_ONE_IN.into());
    }

    /// The turn was over then, and stands for `count`.
    fn count_turn(&self, over: Time, count: u64) {
        if let Some(began) = self.snapshot.last_turn() {
            self.snapshot.turns.add(nanos(began, over), count);
        }
    }
}

#[cfg(feature = "metrics")]
#[inline]
fn nanos(from: Time, to: Time) -> u64 {
    to.as_nanos() - from.as_nanos()
}

/// What a shard's log knows of packets that its listeners lost.
#[derive(Default)]
pub(crate) struct LossLog {
    /// By listener.
    lost: Vec<u64>,
    lines: LineLimit,
}

impl LossLog {
    /// Writes a line for each listener of the shard that lost packets since the last look: as far as the shard knows it, which
    /// waits for no thread that looks at the same time.
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
