//! The answers that services may give for a new connection: it is admitted, refused, postponed, or
//! goes to another shard.
//!
//! Each [`Lane::accepted`](crate::Lane::accepted) has one of these answers:
//! [`admit`](Shard::admit), [`refuse`](Shard::refuse), [`refuse_with`](Shard::refuse_with),
//! [`postpone`](Shard::postpone) or [`handed_off`](Shard::handed_off). With all but the first,
//! whatever the connection was charged comes back.

use core::net::SocketAddr;

use crate::connection::{ConnShared, OpenState};
use crate::shard::Shard;
use crate::{CloseReason, ConnId, Observer, Op, RefusedBy, Socket, Time};

/// Connections that exist only for a rejection message, at once: as many as one turn takes
/// completions of. The next constant is the part of the table that they may have.
const PARTING_MAX: usize = 256;
const PARTING_PART: usize = 16;

impl<O: Observer> Shard<O> {
    /// Notes that the services answered for a connection that is not postponed.
    fn answered(&mut self, listener: u16) {
        self.accepting.asked -= 1;
        let now = self.now;
        if let Some(at) = self.accepting.at(listener) {
            at.queue.answered(now);
        }
    }

    /// Makes an accepted socket a connection. `None` if there is no memory for it, or every
    /// connection was aborted; the socket is closed then. Its block has room for a session of type
    /// `S`, which must be [filled](ringserve_buf::CountedHead::fill) before
    /// [`opened`](Shard::opened). The next call for it is `opened`,
    /// [`open_parked`](Shard::open_parked), [`await_header`](Shard::await_header),
    /// [`begin_handshake`](Shard::begin_handshake), [`refused`](Shard::refused) or
    /// [`abort`](Shard::abort).
    pub fn admit<S: 'static>(
        &mut self,
        socket: Socket,
        peer: Option<SocketAddr>,
        listener: u16,
    ) -> Option<ConnId> {
        self.answered(listener);
        let lane = self.lane_of_listener(listener);
        let made = match self.takes_newcomers() {
            true => self.insert(lane, peer, listener, ConnShared::<S>::try_new_unfilled),
            false => None,
        };
        let Some(id) = made else {
            self.accepting.places.give_back();
            let by = if self.takes_newcomers() { RefusedBy::Memory } else { RefusedBy::Stopping };
            self.lanes[lane].counters.refuse(by);
            self.ops.push(Op::Refuse { socket });
            return None;
        };
        self.observer.opened(self.now, lane, id, peer);
        self.ops.push(Op::Adopt { id, socket });
        if self.drain.is_some() {
            self.note_newcomer(id);
        }
        if !self.has_room() {
            self.sync_accept();
        }
        Some(id)
    }

    /// Closes a socket that `listener` accepted and that is not admitted. A socket that is refused
    /// for its address takes no part in the server's rate.
    pub fn refuse(&mut self, socket: Socket, listener: u16, by: RefusedBy) {
        self.answered(listener);
        self.accepting.places.give_back();
        if by.is_by_admission() {
            self.give_token_back();
        }
        self.counters_at(listener).refuse(by);
        self.ops.push(Op::Refuse { socket });
        self.retry_accepts();
    }

    /// True if one more connection may exist only for a rejection message. Such connections have a
    /// part of the table and, so that a peer that does not close does not keep it, little time.
    pub fn may_part(&self) -> bool {
        let most = (self.lanes.inbound_max() / PARTING_PART).clamp(1, PARTING_MAX);
        self.accepting.parting < most && self.takes_newcomers()
    }

    /// Refuses a socket as [`refuse`](Shard::refuse) does, after a rejection message that is sent
    /// as it is. In one small send: the message is dropped if it takes more. Only if one more [may
    /// part](Shard::may_part).
    pub fn refuse_with(
        &mut self,
        socket: Socket,
        peer: Option<SocketAddr>,
        listener: u16,
        by: RefusedBy,
        words: &[u8],
    ) {
        if by.is_by_admission() {
            self.give_token_back();
        }
        let Some(id) = self.admit::<()>(socket, peer, listener) else { return };
        self.refused_with(id, by, words);
    }

    /// Closes a connection whose service was not called as [`refused`](Shard::refused) does, after
    /// a rejection message that is sent as it is. Only if one more [may part](Shard::may_part).
    pub fn refused_with(&mut self, id: ConnId, by: RefusedBy, words: &[u8]) {
        if let Some(conn) =
            self.conns.get_mut(id).filter(|conn| conn.is_open() && conn.opened == OpenState::No)
        {
            conn.opened = OpenState::LastWords;
            self.accepting.parting += 1;
            if let Some(outlet) = conn.outlet() {
                outlet.write(words);
            }
        }
        self.refused(id, by);
    }

    /// Puts a socket that `listener` accepted back, to be accepted once more at `until`; nothing
    /// else of that listener is accepted before then. Sockets that were on their way wait after it,
    /// and the rest in the kernel's queue.
    pub fn postpone(&mut self, socket: Socket, peer: Option<SocketAddr>, listener: u16, until: Time) {
        if self.has_stopped() {
            return self.refuse(socket, listener, RefusedBy::Stopping);
        }
        self.give_token_back();
        self.accepting.places.give_back();
        self.accepting.asked -= 1;
        if let Some(at) = self.accepting.at(listener)
            && at.queue.postpone(socket, peer, until)
        {
            self.counters_at(listener).waited += 1;
        }
        self.sync_accept();
    }

    /// Counts a socket that `listener` accepted and that goes to a shard with fewer connections,
    /// instead of being admitted or refused here.
    pub fn handed_off(&mut self, listener: u16, peer: Option<SocketAddr>) {
        self.answered(listener);
        self.accepting.places.give_back();
        if self.accepting.reserved_for(listener, peer).is_none() {
            self.give_token_back();
        }
        self.counters_at(listener).handed_off += 1;
        self.retry_accepts();
    }

    /// Notes that the service accepted an admitted connection: bytes are received from now on.
    pub fn opened(&mut self, id: ConnId) {
        if let Some(conn) = self.conns.get_mut(id) {
            conn.opened = OpenState::Yes;
        }
        self.notify_opened(id);
        self.sync_receive(id);
        self.arm(id);
    }

    /// Closes a connection that was refused after it was admitted, usually by its `open`. Its
    /// queued replies are sent first. A connection that ends already, as by a time limit, ends for
    /// that reason alone.
    pub fn refused(&mut self, id: ConnId, by: RefusedBy) {
        if let Some(conn) = self.conns.get(id).filter(|conn| conn.is_open()) {
            self.lanes[conn.lane].counters.refuse(by);
        }
        self.finish(id, CloseReason::Refused);
    }
}
