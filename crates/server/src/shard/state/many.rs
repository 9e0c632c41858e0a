//! Several services on one shard.
//!
//! Each is the lane of its number. A connection's batch of frames costs one indirect call; the
//! frames in it cost none. A waker has a task's number with that of its service above it:
//!
//! ```text
//!   31       30        29          28 .. 24   23 .. 0
//!   spawned  upstream  opening     service    task of the service
//! ```

use ringserve_base::peer::Peer;
use ringserve_core::{ConnId, EndedConn, Frames, LaneId, Socket};

use super::services::Services;
use super::shard_loop::Common;
use crate::log::LogObserver;
use crate::shard::Core;

/// Bits of a task's number: as many calls of a service may wait on a shard as it may have
/// connections.
const TASK_BITS: u32 = ConnId::SLOT_BITS;

/// The bits of a service's number.
const SERVICE: u32 = (SERVICES_MAX as u32 - 1) << TASK_BITS;

/// Services at most: five bits.
pub(crate) const SERVICES_MAX: usize = 32;

/// The services of a shard, by lane.
pub(crate) struct ServiceSet {
    services: Box<[Box<dyn Services>]>,
}

/// The numbers of one service's calls for wakers.
#[derive(Clone, Copy)]
pub(crate) struct TaskNumbers {
    /// Set in each.
    pub(crate) mark: u32,
    /// The most services.
    pub(crate) max: u32,
}

impl TaskNumbers {
    /// A call of a shard's only service.
    pub(crate) const ALONE: TaskNumbers = TaskNumbers { mark: 0, max: 1 << 29 };

    /// A call of the service with this number.
    pub(crate) fn of(service: usize) -> TaskNumbers {
        debug_assert!(service < SERVICES_MAX);
        TaskNumbers { mark: (service as u32) << TASK_BITS, max: 1 << TASK_BITS }
    }

    /// The number of the service.
    pub(crate) fn service(self) -> usize {
        (self.mark >> TASK_BITS) as usize
    }
}

impl ServiceSet {
    /// The first one is that of the first lane, and so on.
    pub(crate) fn new(services: Vec<Box<dyn Services>>) -> ServiceSet {
        ServiceSet { services: services.into() }
    }

    #[inline]
    fn of(&mut self, lane: LaneId) -> &mut dyn Services {
        &mut *self.services[lane.index()]
    }
}

impl Services for ServiceSet {
    fn accepted(&mut self, common: &mut Common, core: &mut Core, socket: Socket, peer: Peer) {
        self.of(core.lane_of_listener(peer.listener_id())).accepted(common, core, socket, peer);
    }

    fn proxied(&mut self, common: &mut Common, core: &mut Core, id: ConnId) {
        if let Some(lane) = core.lane_of(id) {
            self.of(lane).proxied(common, core, id);
        }
    }

    fn secured(&mut self, common: &mut Common, core: &mut Core, id: ConnId) {
        if let Some(lane) = core.lane_of(id) {
            self.of(lane).secured(common, core, id);
        }
    }

    #[inline]
    fn frames(&mut self, common: &mut Common, frames: &mut Frames<'_, LogObserver>) {
        self.of(frames.lane()).frames(common, frames);
    }

    fn keeps_accounts(&self) -> bool {
        self.services.iter().any(|service| service.keeps_accounts())
    }

    fn timed_out(&mut self, common: &mut Common, core: &mut Core, id: ConnId) {
        if let Some(lane) = core.lane_of(id) {
            self.of(lane).timed_out(common, core, id);
        }
    }

    fn draining(&mut self, common: &mut Common, core: &mut Core, id: ConnId) {
        if let Some(lane) = core.lane_of(id) {
            self.of(lane).draining(common, core, id);
        }
    }

    fn heartbeat(&mut self, common: &mut Common, core: &mut Core, id: ConnId) {
        if let Some(lane) = core.lane_of(id) {
            self.of(lane).heartbeat(common, core, id);
        }
    }

    fn input_ended(&mut self, common: &mut Common, core: &mut Core, id: ConnId) {
        if let Some(lane) = core.lane_of(id) {
            self.of(lane).input_ended(common, core, id);
        }
    }

    fn ended(&mut self, common: &mut Common, ended: EndedConn) {
        self.of(ended.lane).ended(common, ended);
    }

    #[inline]
    fn resume(&mut self, common: &mut Common, core: &mut Core, task: u32) -> Option<ConnId> {
        let service = &mut self.services[((task & SERVICE) >> TASK_BITS) as usize];
        service.resume(common, core, task & !SERVICE)
    }

    fn give_back(&mut self) {
        self.services.iter_mut().for_each(|service| service.give_back());
    }
}
