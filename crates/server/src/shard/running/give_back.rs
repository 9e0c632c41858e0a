//! Memory that a shard gives back when it needs it no more.

use ringserve_core::{Driver, LaneId};
use ringserve_drivers::trim_heap;

use crate::shard::Core;
use crate::shard::state::services::Services;
use crate::shard::state::shard_loop::ShardLane;
use crate::shard::state::spare::{InUse, Step};
use crate::shard::wakes::inbox::Command;

/// Chunks that are given back in one turn: half a millisecond.
const TRIMMED_MAX: usize = 8;

impl<D: Driver, V: Services> ShardLane<D, V> {
    /// The present needs, and the bytes that were moved since the start.
    #[cold]
    fn in_use(&self, core: &Core) -> (InUse, u64) {
        let pool = self.parts.driver.pool().counts();
        let moved = |lane: LaneId| {
            let counters = core.counters(lane);
            counters.bytes_received + counters.bytes_sent
        };
        let needs = InUse {
            connections: core.all_connections(),
            held_bytes: core.held_bytes(),
            buffers: pool.total,
            idle_buffers: pool.total - pool.leased,
        };
        let of_services: u64 = self.common.names.lanes().map(|(lane, _)| moved(lane)).sum();
        (needs, of_services + moved(self.parts.upstreams.lane()))
    }

    /// Takes note of what is needed, and gives memory back, step by step.
    #[cold]
    pub(crate) fn check_spare(&mut self, core: &mut Core) {
        let (needs, moved) = self.in_use(core);
        self.parts.spare.note(self.common.now, needs, moved);
        match self.parts.spare.step() {
            Step::None if !self.parts.spare.is_due(self.common.now) => {}
            // A shard that ends gives all of it back. A look that stayed due would keep the shard
            // from waiting.
            Step::None if self.parts.command != Command::Serve => {
                self.parts.spare.check_later(self.common.now, moved)
            }
            Step::None if !self.parts.spare.begins(self.common.now, needs, moved) => {}
            // Receives that are stopped in this turn are found so in the next.
            Step::None => {
                self.services.give_back();
                core.give_back();
            }
            Step::Ring => self.parts.spare.ring(self.parts.driver.give_back()),
            Step::Chunks if self.parts.driver.pool().trim(1, TRIMMED_MAX) > 0 => {}
            Step::Chunks => {
                trim_heap();
                let (needs, moved) = self.in_use(core);
                self.parts.spare.done(self.common.now, needs, moved);
            }
        }
    }
}
