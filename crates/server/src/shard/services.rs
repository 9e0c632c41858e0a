//! What a shard asks of the services that stand on it.

use std::sync::Arc;

use ringserve_core::{ConnId, Ended, Frames, LaneId, Socket};

use super::Core;
use super::state::Common;
use crate::log::LogObserver;
use crate::peer::Peer;

/// The services of a shard. Where there is one its lane is all of it, and everything is compiled for it.
///
/// None of this panics: what user code panics with is reported, and its connection ended.
pub(crate) trait Services: 'static {
    /// A peer wants to connect.
    fn accepted(&mut self, common: &mut Common, core: &mut Core, socket: Socket, peer: Peer);

    /// Has a connection's frames called for.
    fn frames(&mut self, common: &mut Common, frames: &mut Frames<'_, LogObserver>);

    /// A connection's peer is silent.
    fn heartbeat(&mut self, common: &mut Common, core: &mut Core, id: ConnId);

    /// A connection that is held open has no more input.
    fn input_ended(&mut self, common: &mut Common, core: &mut Core, id: ConnId);

    /// A connection is gone.
    fn ended(&mut self, common: &mut Common, ended: Ended);

    /// Polls a call that was woken. Returns its connection, if that may have further frames.
    fn resume(&mut self, common: &mut Common, core: &mut Core, task: u32) -> Option<ConnId>;

    /// Drops what is kept for further calls.
    fn give_back(&mut self);
}

/// The services of a server by name, in the order of their lanes.
#[derive(Clone)]
pub(crate) struct ServiceNames(Arc<[Named]>);

struct Named {
    name: Arc<str>,
    /// The number behind those of its listeners.
    listeners_end: u16,
}

impl ServiceNames {
    /// Each name with the number of listeners that lead to that service.
    pub(crate) fn new(services: impl IntoIterator<Item = (Arc<str>, u16)>) -> ServiceNames {
        let mut end = 0;
        let named = services.into_iter().map(|(name, listeners)| {
            end += listeners;
            Named { name, listeners_end: end }
        });
        ServiceNames(named.collect())
    }

    /// The lanes with their names.
    pub(crate) fn lanes(&self) -> impl Iterator<Item = (LaneId, &Arc<str>)> {
        (0..).map(LaneId::nth).zip(self.0.iter().map(|named| &named.name))
    }

    /// True for connections that the server makes: no service is theirs.
    pub(crate) fn is_upstream(&self, lane: LaneId) -> bool {
        lane.index() >= self.0.len()
    }

    /// The service of a lane, if there are several.
    pub(crate) fn of(&self, lane: LaneId) -> Option<&str> {
        let named = self.0.get(lane.index()).filter(|_| self.0.len() > 1)?;
        Some(&named.name)
    }

    /// The service to which a listener leads, if there are several.
    pub(crate) fn at(&self, listener: u16) -> Option<&str> {
        let service = self.0.iter().position(|named| listener < named.listeners_end)?;
        self.of(LaneId::nth(service as u8))
    }
}
