//! Connections that are passed to other shards.

use std::cmp::Reverse;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use ringserve_core::{Driver, Socket};

use super::Core;
use super::inbox::{Letter, RemoteShard};
use super::services::Services;
use super::state::ShardLane;
use crate::peer::Peer;

/// A shard that is ahead of another one by this many connections gives away what it accepts from a queue that all share. Without it a burst
/// at a Unix socket stayed with the shard that was awake: 100 connections at once came to 64, 25, 11 and 0. Fewer are not worth the way.
const HAND_OFF_LEAD: usize = 8;

impl<D: Driver<Descriptor = OwnedFd>, V: Services> ShardLane<D, V> {
    /// Tells the other shards how much room there is here, and looks for room there if there is none.
    pub(super) fn share_room(&self, core: &mut Core) {
        let Some(others) = &self.others else { return };
        let room = if core.has_stopped() { 0 } else { core.slots_left() };
        self.remote.set_room(room);
        core.set_others_have_room(room == 0 && others.iter().any(|remote| remote.room() > 0));
    }

    /// True if the connection may be one of a Unix socket: in a simulation each may.
    pub(super) fn may_be_unix(&self, peer: &Peer) -> bool {
        self.one_queue.get(peer.listener()).is_none_or(|one_queue| *one_queue)
    }

    /// True if any shard might have accepted the connection. An address that is missing does not say so: servers may leave it out.
    pub(super) fn comes_from_a_shared_queue(&self, peer: &Peer) -> bool {
        self.one_queue.get(peer.listener()).is_some_and(|one_queue| *one_queue)
    }

    /// True if another shard has far fewer connections. All tables have the same size.
    pub(super) fn is_ahead(&self, core: &Core) -> bool {
        let Some(others) = &self.others else { return false };
        let room = core.slots_left() + HAND_OFF_LEAD;
        others.iter().any(|remote| remote.room() > room)
    }

    /// Passes a connection on to the shard with the most room.
    #[cold]
    pub(super) fn hand_off_to_another(&mut self, socket: Socket, peer: Option<SocketAddr>, listener: u16) {
        let Some(others) = &self.others else { return };
        let Some(socket) = self.driver.hand_over(socket) else { return };
        send_where_room_is(others, Letter::Socket { socket, peer, listener });
    }
}

/// Sends to the shard with the most room that is there.
fn send_where_room_is(others: &[Arc<RemoteShard>], mut letter: Letter) {
    let mut remotes: Vec<_> = others.iter().collect();
    remotes.sort_by_key(|remote| Reverse(remote.room()));
    for remote in remotes {
        remote.take_room();
        match remote.send(letter) {
            Ok(()) => return,
            Err(back) => letter = back,
        }
    }
}
