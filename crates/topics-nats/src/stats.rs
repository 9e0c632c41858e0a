//! Figures of a bridge.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

/// Figures of a bridge, since the server started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct BridgeStats {
    /// There is a connection, and for [`stream`](crate::NatsBridge::stream) the stream.
    pub is_up: bool,
    /// Messages sent to NATS.
    pub sent: u64,
    /// Messages of NATS that were delivered here.
    pub received: u64,
    /// Messages that had no room on their way to NATS, so that other nodes miss them.
    pub dropped: u64,
    /// Gaps reported to all members of a topic.
    pub gaps: u64,
    /// Times a topic was compared with the stream: at its first member, after a loss, and now and
    /// then.
    pub catch_ups: u64,
    /// Messages of NATS that were none of a topic. One with a malformed key is delivered without.
    pub malformed: u64,
}

#[derive(Default)]
pub(crate) struct Counters {
    pub(crate) is_up: AtomicBool,
    pub(crate) sent: AtomicU64,
    pub(crate) received: AtomicU64,
    pub(crate) dropped: AtomicU64,
    pub(crate) gaps: AtomicU64,
    pub(crate) catch_ups: AtomicU64,
    pub(crate) malformed: AtomicU64,
}

pub(crate) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Relaxed);
}

/// Reads the figures of a bridge, from any thread. Made by
/// [`NatsBridge::monitor`](crate::NatsBridge::monitor).
#[derive(Clone)]
pub struct BridgeMonitor {
    pub(crate) counters: Arc<Counters>,
}

impl BridgeMonitor {
    /// The figures.
    pub fn stats(&self) -> BridgeStats {
        let Counters { is_up, sent, received, dropped, gaps, catch_ups, malformed } = &*self.counters;
        BridgeStats {
            is_up: is_up.load(Relaxed),
            sent: sent.load(Relaxed),
            received: received.load(Relaxed),
            dropped: dropped.load(Relaxed),
            gaps: gaps.load(Relaxed),
            catch_ups: catch_ups.load(Relaxed),
            malformed: malformed.load(Relaxed),
        }
    }
}

impl std::fmt::Debug for BridgeMonitor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.stats().fmt(f)
    }
}
