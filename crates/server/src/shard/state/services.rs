//! The interface between a shard and its services.

use ringserve_base::peer::Peer;
use ringserve_core::{ConnId, EndedConn, Frames, Socket};

use super::shard_loop::Common;
use crate::log::LogObserver;
use crate::shard::Core;

/// The services of a shard. Where there is one its lane is all of it, and everything is compiled
/// for it.
///
/// None of this panics: what user code panics with is reported, and its connection ended.
pub(crate) trait Services: 'static {
    /// It keeps accounts of its connections, so the shard counts what they move.
    fn keeps_accounts(&self) -> bool;

    /// A peer wants to connect.
    fn accepted(&mut self, common: &mut Common, core: &mut Core, socket: Socket, peer: Peer);

    /// The PROXY header of a connection was read, whose peer is the client from now on.
    fn proxied(&mut self, common: &mut Common, core: &mut Core, id: ConnId);

    /// The handshake of a connection's transport is done.
    fn secured(&mut self, common: &mut Common, core: &mut Core, id: ConnId);

    /// Has a connection's frames called for.
    fn frames(&mut self, common: &mut Common, frames: &mut Frames<'_, LogObserver>);

    /// A call of a connection waited for too long: the connection is to be finished.
    fn timed_out(&mut self, common: &mut Common, core: &mut Core, id: ConnId);

    /// The shard drains.
    fn draining(&mut self, common: &mut Common, core: &mut Core, id: ConnId);

    /// A connection's peer is silent.
    fn heartbeat(&mut self, common: &mut Common, core: &mut Core, id: ConnId);

    /// A connection that is held open has no more input.
    fn input_ended(&mut self, common: &mut Common, core: &mut Core, id: ConnId);

    /// A connection is gone.
    fn ended(&mut self, common: &mut Common, ended: EndedConn);

    /// Polls a call, or an `open`, that was woken. Returns its connection, if that may have further
    /// frames.
    fn resume(&mut self, common: &mut Common, core: &mut Core, task: u32) -> Option<ConnId>;

    /// Drops what is kept for further calls.
    fn give_back(&mut self);
}
