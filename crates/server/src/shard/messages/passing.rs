//! Connections that are passed to other shards.

use std::cmp::Reverse;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use ringserve_base::peer::Peer;
use ringserve_core::{Driver, Socket, Time};

use crate::shard::Core;
use crate::shard::state::services::Services;
use crate::shard::state::shard_loop::ShardLane;
use crate::shard::wakes::inbox::{ShardRemote, ShardRequest};

/// A shard that is ahead of another one by this many connections gives away what it accepts from a
/// queue that all share. Without it a burst at a Unix socket stayed with the shard that was awake:
/// 100 connections at once came to 64, 25, 11 and 0. Fewer are not worth the way.
const HAND_OFF_LEAD: usize = 8;

/// A shard whose turn lasts for longer gets no connection of others: what blocks it may do so for
/// long. A turn of one that is busy takes a few milliseconds.
const BLOCKED: Duration = Duration::from_millis(50);

impl<D: Driver<Descriptor = OwnedFd>, V: Services> ShardLane<D, V> {
    /// Tells the other shards how much room there is here, and looks for room there if there is
    /// none.
    pub(crate) fn share_room(&self, core: &mut Core) {
        let Some(others) = &self.parts.others else { return };
        let room = if core.has_stopped() { 0 } else { core.slots_left() };
        self.parts.remote.set_room(room);
        core.set_others_have_room(room == 0 && others.iter().any(|remote| remote.room() > 0));
    }

    /// True if the connection may be one of a Unix socket: in a simulation each may.
    pub(crate) fn may_be_unix(&self, peer: &Peer) -> bool {
        self.parts.shared_queue.get(peer.listener()).is_none_or(|one_queue| *one_queue)
    }

    /// True if any shard might have accepted the connection. An address that is missing does not
    /// say so: servers may leave it out.
    pub(crate) fn comes_from_a_shared_queue(&self, peer: &Peer) -> bool {
        self.parts.shared_queue.get(peer.listener()).is_some_and(|one_queue| *one_queue)
    }

    /// True if another shard has far fewer connections, and is not blocked. All tables have the
    /// same size.
    pub(crate) fn is_ahead(&self, core: &Core) -> bool {
        let Some(others) = &self.parts.others else { return false };
        let (room, now) = (core.slots_left() + HAND_OFF_LEAD, self.common.now);
        others.iter().any(|remote| remote.room() > room && !remote.is_in_turn_for(BLOCKED, now))
    }

    /// Passes a connection on to the shard with the most room.
    #[cold]
    pub(crate) fn hand_off_to_another(&mut self, socket: Socket, peer: Option<SocketAddr>, listener: u16) {
        let Some(others) = &self.parts.others else { return };
        let Some(socket) = self.parts.driver.hand_over(socket) else { return };
        send_where_room_is(others, ShardRequest::Socket { socket, peer, listener }, self.common.now);
    }
}

/// Sends to the shard with the most room that is there, to one that is blocked only if all are.
fn send_where_room_is(others: &[Arc<ShardRemote>], mut letter: ShardRequest, now: Time) {
    let mut remotes: Vec<_> = others.iter().collect();
    remotes.sort_by_cached_key(|remote| (remote.is_in_turn_for(BLOCKED, now), Reverse(remote.room())));
    for remote in remotes {
        remote.take_room();
        match remote.send(letter) {
            Ok(()) => return,
            Err(back) => letter = back,
        }
    }
}

#[cfg(test)]
mod tests {
    use ringserve_core::ConnId;

    use super::*;
    use crate::stats::ServiceNames;

    #[test]
    fn shard_that_is_blocked_gets_nothing_while_another_has_room() {
        let remotes = [ShardRemote::new(), ShardRemote::new()];
        let names = ServiceNames::new([("it".into(), 1)]);
        let began = Time::from_nanos(1_000_000_000);
        remotes[0].publishes(&names).begin_turn(began, 1);
        remotes[0].set_room(100);
        remotes[1].set_room(10);
        let letters = |shard: usize| {
            let mut letters = Vec::new();
            remotes[shard].take_letters(&mut letters);
            letters.len()
        };
        for (later, wanted) in [(Duration::from_millis(5), [1, 0]), (BLOCKED, [0, 1])] {
            send_where_room_is(&remotes, ShardRequest::Close { id: ConnId::from_bits(1) }, began + later);
            assert_eq!([letters(0), letters(1)], wanted, "{later:?}");
        }
    }
}
