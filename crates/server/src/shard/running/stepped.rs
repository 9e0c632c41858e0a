//! A shard's loop as a simulation takes it: one round at a time, on a simulated kernel.
//!
//! ```text
//!   a real shard     round ──▶ driver waits ──────────────────────────▶ round ──▶ ..
//!   a stepped one    round ──▶ driver says until when it would wait     round ──▶ ..
//!                                      └──▶ scheduler, others run ──▶ brings ──┘
//! ```

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;

use ringserve_core::{Completion, Driver as _, Wait};
use ringserve_drivers::Uring;
use ringserve_simkernel::{RingId, SimKernel};

use super::beginning::StartingShard;
use crate::shard::Core;
use crate::shard::state::services::Services;
use crate::shard::state::shard_loop::{Common, ShardLoop};
use crate::shard::wakes::inbox::{ShardRemote, enter_shard, leave_shard};
use crate::stats::ShardStats;

/// A shard of a simulated server, whatever its service.
pub(crate) trait Stepped {
    /// One round of its loop, and the end of the shard if that was the last one: what it did, or
    /// its driver's `errno`. `Err` if its loop panicked.
    fn step(&mut self) -> Option<thread::Result<Result<ShardStats, i32>>>;

    /// The ring below it.
    fn ring(&self) -> RingId;

    /// Its figures: totals, and its present state.
    fn stats(&self) -> ShardStats;

    /// Receive buffers that something still held after its end, when all of it was dropped.
    fn leased_at_end(&self) -> usize;

    /// Bytes that connections were counted to hold at its end, when none was left.
    fn held_at_end(&self) -> usize;

    /// Looks at everything that must hold between two rounds, which panics if it does not.
    fn check(&self);
}

/// A shard's loop between its rounds.
pub(crate) struct SteppedShard<V: Services> {
    stage: StepStage<V>,
    completions: Vec<Completion>,
    ring: RingId,
    last: ShardStats,
    /// Receive buffers that something still held when all was dropped.
    leased: usize,
    /// Bytes that were counted as held when the last connection was gone.
    held: usize,
}

type Driver = Uring<SimKernel>;

/// The progress of a shard.
pub(crate) enum StepStage<V: Services> {
    /// Its services are not there yet, or those of others.
    Begins(StartingShard<Driver, V>),
    Serves(ShardLoop<Driver, V>),
    Over,
}

impl<V: Services> StepStage<V> {
    /// The parts below its services.
    fn below(&self) -> Option<(&Common, &Arc<ShardRemote>, &Driver)> {
        match self {
            StepStage::Begins(StartingShard { shard: ShardLoop { lane, .. }, .. }) => {
                Some((&lane.common, &lane.parts.remote, &lane.parts.driver))
            }
            StepStage::Serves(ShardLoop { lane, .. }) => {
                Some((&lane.common, &lane.parts.remote, &lane.parts.driver))
            }
            StepStage::Over => None,
        }
    }

    fn core(&self) -> Option<&Core> {
        match self {
            StepStage::Begins(beginning) => Some(&beginning.shard.core),
            StepStage::Serves(shard) => Some(&shard.core),
            StepStage::Over => None,
        }
    }

    fn stats(&self) -> Option<ShardStats> {
        match self {
            StepStage::Begins(beginning) => Some(beginning.shard.report()),
            StepStage::Serves(shard) => Some(shard.report()),
            StepStage::Over => None,
        }
    }
}

impl<V: Services> SteppedShard<V> {
    pub(crate) fn new(ring: RingId, stage: StepStage<V>) -> Self {
        SteppedShard { stage, completions: Vec::new(), ring, last: ShardStats::default(), leased: 0, held: 0 }
    }

    /// Its services are there, and those of all others.
    fn serve_if_all_can(&mut self) {
        if let StepStage::Begins(beginning) = &self.stage
            && beginning.serves()
            && let StepStage::Begins(beginning) = std::mem::replace(&mut self.stage, StepStage::Over)
            && let Some(shard) = beginning.serve()
        {
            self.stage = StepStage::Serves(shard);
        }
    }

    fn round(&mut self) -> Option<Result<ShardStats, i32>> {
        self.serve_if_all_can();
        let completions = &mut self.completions;
        match &mut self.stage {
            StepStage::Begins(beginning) => {
                if completions.is_empty()
                    && let Err(errno) = beginning.shard.drive(Wait::No, completions)
                {
                    return Some(Err(errno));
                }
                beginning.round(completions)
            }
            StepStage::Serves(shard) => {
                if completions.is_empty()
                    && let Err(errno) = shard.drive(Wait::No, completions)
                {
                    return Some(Err(errno));
                }
                shard.round(completions)
            }
            StepStage::Over => None,
        }
    }
}

impl<V: Services> Stepped for SteppedShard<V> {
    fn step(&mut self) -> Option<thread::Result<Result<ShardStats, i32>>> {
        if let Some((common, remote, _)) = self.stage.below() {
            enter_shard(common.shard.index(), remote);
        }
        let stepped = catch_unwind(AssertUnwindSafe(|| {
            let end = self.round();
            if end.is_some() {
                // As at the end of its thread: service, sessions and driver are dropped.
                self.last = self.stats();
                self.held = self.stage.core().map_or(0, |core| core.held_bytes());
                let pool = self.stage.below().map(|(_, _, driver)| driver.pool().clone());
                self.stage = StepStage::Over;
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

    fn held_at_end(&self) -> usize {
        self.held
    }

    fn check(&self) {
        if let Some(core) = self.stage.core() {
            core.check();
        }
    }

    fn stats(&self) -> ShardStats {
        self.stage.stats().unwrap_or_else(|| self.last.clone())
    }
}
