//! Connections that are passed to other shards.

use std::net::SocketAddr;
use std::rc::Rc;

use ringserve_core::framing::Framing;
use ringserve_core::{Driver, Socket};

use super::calls::Job;
use super::inbox::Mail;
use super::state::Running;
use crate::service::Service;

/// A shard with so many connections more than another one gives away what it accepts from a Unix socket. Without it a burst
/// stayed with whoever was awake: 100 connections at once came to 64, 25, 11 and 0. Fewer are not worth the way.
const AHEAD: usize = 8;

impl<S, F, D, Make, Fut> Running<S, F, D, Make, Fut>
where
    S: Service,
    F: Framing,
    D: Driver,
    Make: Fn(Rc<S>, Rc<Job<S>>) -> Fut,
    Fut: Future<Output = ()>,
{
    /// Tells the other shards how much room there is here, and looks for room there if there is none.
    pub(super) fn meet_others(&mut self) {
        let Some(others) = &self.others else { return };
        let room = if self.core.has_stopped() { 0 } else { self.core.slots_left() };
        self.remote.set_room(room);
        self.core.set_room_elsewhere(room == 0 && others.remotes.iter().any(|remote| remote.room() > 0));
    }

    /// True if another shard has far fewer connections. All tables have the same size.
    pub(super) fn is_ahead(&self) -> bool {
        let Some(others) = &self.others else { return false };
        let room = self.core.slots_left() + AHEAD;
        others.remotes.iter().any(|remote| remote.room() > room)
    }

    /// Passes a connection on to the shard with the most room.
    #[cold]
    pub(super) fn pass_on(&mut self, socket: Socket, peer: Option<SocketAddr>, listener: u16) {
        let Some(others) = &self.others else { return };
        let Some(socket) = (others.hand_over)(&mut self.driver, socket) else { return };
        let mut mail = Mail::Socket { socket, peer, listener };
        let mut remotes: Vec<_> = others.remotes.iter().collect();
        remotes.sort_by_key(|remote| std::cmp::Reverse(remote.room()));
        for remote in remotes {
            remote.take_room();
            match remote.send(mail) {
                Ok(()) => return,
                Err(back) => mail = back,
            }
        }
    }
}
