//! A shard's loop as a simulation takes it: one round at a time, on a simulated kernel.
//!
//! ```text
//!   a real shard     round ──▶ driver waits ──────────────────────────▶ round ──▶ ..
//!   a stepped one    round ──▶ driver says until when it would wait     round ──▶ ..
//!                                      └──▶ scheduler, others run ──▶ brings ──┘
//! ```

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;

use ringserve_core::{Completion, Driver as _, Wait};
use ringserve_drivers::Uring;
use ringserve_simkernel::{RingId, SimKernel};

use super::inbox::{enter_shard, leave_shard};
use super::services::Services;
use super::state::ShardLoop;
use crate::stats::ShardStats;

/// A shard of a simulated server, whatever its service.
pub(crate) trait Stepped {
    /// One round of its loop, and the end of the shard if that was the last one: what it did, or its driver's `errno`. `Err`
    /// if its loop panicked.
    fn step(&mut self) -> Option<thread::Result<Result<ShardStats, i32>>>;

    /// The ring below it.
    fn ring(&self) -> RingId;

    /// What it did so far and what it holds.
    fn stats(&self) -> ShardStats;

    /// Receive buffers that something still held after its end, when all of it was dropped.
    fn leased_at_end(&self) -> usize;
}

/// A shard's loop between its rounds.
pub(crate) struct SteppedShard<V: Services> {
    /// Until it ended.
    shard: Option<ShardLoop<Uring<SimKernel>, V>>,
    completions: Vec<Completion>,
    ring: RingId,
    last: ShardStats,
    /// Receive buffers that something still held when all was dropped.
    leased: usize,
}

impl<V: Services> SteppedShard<V> {
    pub(crate) fn new(shard: ShardLoop<Uring<SimKernel>, V>) -> Self {
        let ring = shard.lane.driver.kernel().ring();
        SteppedShard {
            shard: Some(shard),
            completions: Vec::new(),
            ring,
            last: ShardStats::default(),
            leased: 0,
        }
    }

    fn round(&mut self) -> Option<Result<ShardStats, i32>> {
        let shard = self.shard.as_mut()?;
        if self.completions.is_empty()
            && let Err(errno) = shard.drive(Wait::No, &mut self.completions)
        {
            return Some(Err(errno));
        }
        shard.round(&mut self.completions)
    }
}

impl<V: Services> Stepped for SteppedShard<V> {
    fn step(&mut self) -> Option<thread::Result<Result<ShardStats, i32>>> {
        if let Some(ShardLoop { lane, .. }) = &self.shard {
            enter_shard(lane.common.shard.index(), &lane.remote);
        }
        let stepped = catch_unwind(AssertUnwindSafe(|| {
            let end = self.round();
            if end.is_some() {
                // As at the end of its thread: service, sessions and driver are dropped.
                self.last = self.stats();
                let pool = self.shard.as_ref().map(|shard| shard.lane.driver.pool().clone());
                self.shard = None;
                self.leased = pool.map_or(0, |pool| pool.counts().leased);
            }
            end
        }));
        leave_shard();
        match stepped {
            Ok(end) => end.map(Ok),
            Err(panic) => Some(Err(panic)),
        }
    }

    fn ring(&self) -> RingId {
        self.ring
    }

    fn leased_at_end(&self) -> usize {
        self.leased
    }

    fn stats(&self) -> ShardStats {
        self.shard.as_ref().map_or_else(|| self.last.clone(), |shard| shard.report())
    }
}
