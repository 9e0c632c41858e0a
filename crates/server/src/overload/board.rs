//! What the watchdog knows of the shards' loads, for all who ask.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use super::Load;
use super::stages::{Cause, Change, Stages};

/// What a shard is asked for, for those who look at it.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct ShardLoad {
    /// The number of the shard.
    pub shard: usize,
    /// Its stage.
    pub load: Load,
    /// Why it is there, as in `ringserve_overload_stage_changes_total`; `None` while it is calm.
    pub cause: Option<&'static str>,
    /// The part of the frames for which [`Service::shed`](crate::Service::shed) is asked, from 0 to 1.
    pub shed_share: f64,
}

/// What is known of the loads, for all who ask.
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
    pub(super) fn begin(&self, shards: usize) {
        let _ = self.shards.set((0..shards).map(|_| Posted::default()).collect());
    }

    pub(super) fn post(&self, shard: usize, stages: &Stages) {
        let Some(posted) = self.shards.get().and_then(|shards| shards.get(shard)) else { return };
        let cause = stages.cause().map_or(0, |cause| cause as u64);
        posted.cause.store(cause, Ordering::Relaxed);
        posted.share.store((stages.share() * 1000.0) as u64, Ordering::Relaxed);
    }

    pub(super) fn count(&self, change: Change) {
        self.changes[change.to as usize][change.cause as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// The cause and the share of a shard.
    pub(crate) fn of(&self, shard: usize) -> (Option<&'static str>, f64) {
        let Some(posted) = self.shards.get().and_then(|shards| shards.get(shard)) else { return (None, 0.0) };
        let cause = Cause::ALL.get(posted.cause.load(Ordering::Relaxed) as usize);
        let cause = cause.filter(|cause| **cause != Cause::Calm).map(|cause| cause.as_str());
        (cause, posted.share.load(Ordering::Relaxed) as f64 / 1000.0)
    }

    /// How often a stage was entered for a cause.
    #[cfg(feature = "metrics")]
    pub(crate) fn changes(&self) -> impl Iterator<Item = (Load, Cause, u64)> {
        Load::ALL.into_iter().flat_map(move |to| {
            Cause::ALL.into_iter().map(move |cause| {
                (to, cause, self.changes[to as usize][cause as usize].load(Ordering::Relaxed))
            })
        })
    }
}
