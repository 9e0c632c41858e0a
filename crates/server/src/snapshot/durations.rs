//! The durations that a shard counts. Without the feature `metrics` nothing reads them, and nothing
//! is counted: the types have no field, and their methods do nothing.

#[cfg(feature = "metrics")]
use std::sync::atomic::{AtomicU64, Ordering};

use ringserve_core::Time;

#[cfg(feature = "metrics")]
use crate::histogram::{Histogram, add};
use crate::stats::ServiceNames;

/// The counts of a shard for the calls of one service. None is touched by a call that ends at once
/// and well: those are the frames that are in no other count.
#[cfg(feature = "metrics")]
pub(crate) struct CallFigures {
    /// The durations of calls that waited.
    pub(crate) waited: Histogram,
    /// Calls that began to wait, and those of them that ended: done, failed, or dropped with their
    /// connection.
    begun: AtomicU64,
    ended: AtomicU64,
    /// Calls that returned an error, and those that panicked, at once or later.
    pub(crate) failed: AtomicU64,
    pub(crate) panicked: AtomicU64,
}

#[cfg(feature = "metrics")]
impl CallFigures {
    fn new() -> CallFigures {
        let zero = || AtomicU64::new(0);
        CallFigures {
            waited: Histogram::new(),
            begun: zero(),
            ended: zero(),
            failed: zero(),
            panicked: zero(),
        }
    }

    /// On the shard: a call waits.
    pub(crate) fn begins(&self) {
        add(&self.begun, 1);
    }

    /// On the shard: this number of calls that waited are over.
    pub(crate) fn end(&self, calls: u64) {
        add(&self.ended, calls);
    }

    /// Calls that wait now. Ends are read first, so that none seems to end that did not begin.
    pub(crate) fn in_flight(&self) -> u64 {
        let ended = self.ended.load(Ordering::Acquire);
        self.begun.load(Ordering::Acquire).saturating_sub(ended)
    }
}

/// The durations that a shard counts.
pub(crate) struct Durations {
    /// Those of turns.
    #[cfg(feature = "metrics")]
    pub(crate) turns: Histogram,
    /// The calls of each service.
    #[cfg(feature = "metrics")]
    pub(crate) calls: Box<[CallFigures]>,
    /// The times that connections take to send their first frame.
    #[cfg(feature = "metrics")]
    pub(crate) first_frames: Histogram,
    /// Those of sends that something waits for.
    #[cfg(feature = "metrics")]
    pub(crate) send_stalls: Histogram,
}

/// The time at which a call began.
#[derive(Clone, Copy)]
pub(crate) struct CallStart {
    #[cfg(feature = "metrics")]
    at: Time,
}

#[cfg(feature = "metrics")]
impl CallStart {
    #[inline]
    pub(crate) fn at(now: Time) -> CallStart {
        CallStart { at: now }
    }
}

#[cfg(not(feature = "metrics"))]
impl CallStart {
    #[inline]
    pub(crate) fn at(_now: Time) -> CallStart {
        CallStart {}
    }
}

/// On the shard; a service is named by its number.
#[cfg(feature = "metrics")]
impl Durations {
    pub(crate) fn of(names: &ServiceNames) -> Durations {
        Durations {
            turns: Histogram::new(),
            calls: names.lanes().map(|_| CallFigures::new()).collect(),
            first_frames: Histogram::new(),
            send_stalls: Histogram::new(),
        }
    }

    /// Counts a turn, as `count` turns.
    #[inline]
    pub(crate) fn add_turn(&self, began: Time, over: Time, count: u64) {
        self.turns.add(nanos(began, over), count);
    }

    /// Counts a call of this service that waits.
    pub(crate) fn call_waits(&self, service: usize) {
        if let Some(calls) = self.calls.get(service) {
            calls.begins();
        }
    }

    /// Counts the end of a call that waited.
    pub(crate) fn call_ended(&self, service: usize, now: Time, start: CallStart) {
        let Some(calls) = self.calls.get(service) else { return };
        calls.waited.add(nanos(start.at, now), 1);
        calls.end(1);
    }

    /// Counts calls that waited and were dropped, since their connection ended.
    pub(crate) fn calls_dropped(&self, service: usize, count: usize) {
        if let Some(calls) = self.calls.get(service) {
            calls.end(count as u64);
        }
    }

    /// Counts a call that returned an error.
    pub(crate) fn call_failed(&self, service: usize) {
        if let Some(calls) = self.calls.get(service) {
            add(&calls.failed, 1);
        }
    }

    /// Counts a call that panicked.
    pub(crate) fn call_panicked(&self, service: usize) {
        if let Some(calls) = self.calls.get(service) {
            add(&calls.panicked, 1);
        }
    }
}

#[cfg(not(feature = "metrics"))]
impl Durations {
    pub(crate) fn of(_names: &ServiceNames) -> Durations {
        Durations {}
    }

    #[inline]
    pub(crate) fn add_turn(&self, _began: Time, _over: Time, _count: u64) {}

    pub(crate) fn call_waits(&self, _service: usize) {}

    pub(crate) fn call_ended(&self, _service: usize, _now: Time, _start: CallStart) {}

    pub(crate) fn calls_dropped(&self, _service: usize, _count: usize) {}

    pub(crate) fn call_failed(&self, _service: usize) {}

    pub(crate) fn call_panicked(&self, _service: usize) {}
}

#[cfg(feature = "metrics")]
#[inline]
fn nanos(from: Time, to: Time) -> u64 {
    to.as_nanos() - from.as_nanos()
}
