//! The loads of the shards as the watchdog knows them, for all who ask.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::overload::Load;
use crate::overload::stages::{Cause, Change, Stages};

/// The loads as they are known, for all who ask.
#[derive(Debug, Default)]
pub(crate) struct LoadBoard {
    shards: OnceLock<Box<[Posted]>>,
    /// By stage and cause.
    changes: [[AtomicU64; Cause::ALL.len()]; Load::ALL.len()],
}

/// Of one shard: the number of the cause, and the share in thousandths.
#[derive(Debug, Default)]
struct Posted {
    cause: AtomicU64,
    share: AtomicU64,
}

impl LoadBoard {
    pub(crate) fn begin(&self, shards: usize) {
        let _ = self.shards.set((0..shards).map(|_| Posted::default()).collect());
    }

    pub(crate) fn post(&self, shard: usize, stages: &Stages) {
        let Some(posted) = self.shards.get().and_then(|shards| shards.get(shard)) else { return };
        let cause = stages.cause().map_or(0, |cause| cause as u64);
        posted.cause.store(cause, Ordering::Relaxed);
        posted.share.store((stages.share() * 1000.0) as u64, Ordering::Relaxed);
    }

    pub(crate) fn count(&self, change: Change) {
        self.changes[change.to as usize][change.cause as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// The cause and the share of a shard.
    pub(crate) fn of(&self, shard: usize) -> (Option<&'static str>, f64) {
        let Some(posted) = self.shards.get().and_then(|shards| shards.get(shard)) else { return (None, 0.0) };
        let cause = Cause::ALL.get(posted.cause.load(Ordering::Relaxed) as usize);
        let cause = cause.filter(|cause| **cause != Cause::Calm).map(|cause| cause.as_str());
        (cause, posted.share.load(Ordering::Relaxed) as f64 / 1000.0)
    }

    /// The number of times that a stage was entered for a cause.
    #[cfg(feature = "metrics")]
    pub(crate) fn changes(&self) -> impl Iterator<Item = (Load, Cause, u64)> {
        Load::ALL.into_iter().flat_map(move |to| {
            Cause::ALL.into_iter().map(move |cause| {
                (to, cause, self.changes[to as usize][cause as usize].load(Ordering::Relaxed))
            })
        })
    }
}
