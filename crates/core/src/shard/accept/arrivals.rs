//! Accepting: pauses at limits, resumes when there is room.

use alloc::boxed::Box;
use alloc::sync::Arc;
use core::net::SocketAddr;

use super::listeners::{Quota, RETRY, Reserve};
use crate::connection::{ConnShared, Opened};
use crate::shard::Shard;
use crate::shard::lanes::Wave;
use crate::shard::turn::Event;
use crate::{
    AcceptEnd, AcceptRate, CloseReason, ConnId, ConnStats, LaneId, Observer, Op, RefusedBy, Socket, Time,
};

/// Connections that are there for last words alone, at once: as many as one turn takes completions of. And the part of the table
/// that they may have.
const PARTING_MAX: usize = 256;
const PARTING_PART: usize = 16;

impl<O: Observer> Shard<O> {
    /// The lane of connections that a listener accepts.
    pub fn lane_of_listener(&self, listener: u16) -> LaneId {
        self.accepting.lane_of(listener)
    }

    fn counters_at(&mut self, listener: u16) -> &mut ConnStats {
        &mut self.lanes[self.accepting.lane_of(listener)].counters
    }

    pub(in crate::shard) fn accepted(&mut self, listener: u16, socket: Socket, peer: Option<SocketAddr>) {
        self.counters_at(listener).accepted += 1;
        self.place(listener, socket, peer);
    }

    /// Takes a socket that another shard accepted and had no room for.
    pub fn take_handed_off(&mut self, listener: u16, socket: Socket, peer: Option<SocketAddr>) {
        self.place(listener, socket, peer);
    }

    fn place(&mut self, listener: u16, socket: Socket, peer: Option<SocketAddr>) {
        self.accepting.know(listener);
        let is_next = self.accepting.at(listener).is_some_and(|at| at.waiting.is_empty() && !at.is_put_off())
            || self.accepting.is_reserved(listener, peer);
        let is_over = self.lanes[self.accepting.lane_of(listener)].wave == Wave::Over;
        if is_next && !is_over && self.takes_newcomers() && self.ask(listener, socket, peer) {
            return;
        }
        if self.has_stopped() {
            // It would wait for a place that does not come.
            self.counters_at(listener).refuse(RefusedBy::Stopping);
            self.ops.push(Op::Refuse { socket });
            return;
        }
        if self.hand_off(listener, socket, peer) {
            return;
        }
        self.counters_at(listener).waited += 1;
        if let Some(at) = self.accepting.at(listener) {
            at.waiting.push_back((socket, peer));
        }
        self.sync_accept();
    }

    /// False if there is no room.
    fn ask(&mut self, listener: u16, socket: Socket, peer: Option<SocketAddr>) -> bool {
        // A drain lets in what waits, and soon cuts those whose header does not come.
        let is_held = self.is_full_of_starts(listener) && !self.has_stopped();
        let goes = if is_held { self.first_to_go(listener) } else { None };
        let is_free = (!is_held || goes.is_some()) && self.has_slot();
        // Which peer it is matters where there is a rate, and where there is no room: other shards may have taken that.
        let is_special = self.accepting.reserve.is_some();
        let reserved = match is_special && self.accepting.is_reserved(listener, peer) {
            true => self.lanes.reserved_left() > self.accepting.pending,
            false => false,
        };
        let beyond =
            if reserved { self.accepting.reserve.as_ref().map_or(0, |reserve| reserve.slots) } else { 0 };
        if !(is_free || reserved) || !self.accepting.take_quota(beyond) {
            return false;
        }
        if !reserved && !self.take_token() {
            self.accepting.give_back();
            return false;
        }
        if let Some(id) = goes {
            self.make_room(id);
        }
        self.accepting.pending += 1;
        if let Some(at) = self.accepting.at(listener) {
            at.pending += 1;
        }
        self.events.push_back(Event::Accepted { socket, peer, listener });
        if self.accepting.held_by_rate.is_some() {
            self.sync_accept();
        }
        true
    }

    /// Takes a token of the server's rate; false if there is none. A drain lets in what waits.
    fn take_token(&mut self) -> bool {
        let Some(rate) = self.accepting.rate.as_ref().filter(|_| !self.has_stopped()) else { return true };
        let taken = rate.take(self.now);
        let until = taken.map_or_else(Some, |()| rate.held_until(self.now));
        self.accepting.hold_by_rate(until);
        taken.is_ok()
    }

    /// A socket that had a token needs none.
    fn give_token_back(&mut self) {
        if let Some(rate) = self.accepting.rate.as_ref().filter(|_| !self.has_stopped()) {
            rate.give_back();
            let until = rate.held_until(self.now);
            self.accepting.hold_by_rate(until);
        }
    }

    /// False if it stays here, since no other shard has room, or this one has.
    fn hand_off(&mut self, listener: u16, socket: Socket, peer: Option<SocketAddr>) -> bool {
        let hands_off = self.hands_off();
        if hands_off {
            self.counters_at(listener).handed_off += 1;
            self.events.push_back(Event::HandOff { socket, peer, listener });
        }
        hands_off
    }

    /// Accepted connections this shard has room for.
    pub fn slots_left(&self) -> usize {
        self.lanes.inbound_left(self.accepting.pending)
    }

    pub(super) fn has_slot(&self) -> bool {
        self.slots_left() > 0
    }

    pub(super) fn has_room(&self) -> bool {
        self.has_slot() && self.accepting.quota_left()
    }

    /// True if newly accepted sockets go to another shard.
    fn hands_off(&self) -> bool {
        !self.has_stopped()
            && !self.has_slot()
            && self.accepting.others_have_room
            && self.accepting.quota_left()
    }

    /// Counts this shard's connections together with those of others. Before the first turn.
    pub fn share_quota(&mut self, quota: Arc<Quota>) {
        self.accepting.quota = Some(quota);
    }

    /// Takes connections at a rate that all shards of the server share. Further ones wait. Before the first turn.
    pub fn share_rate(&mut self, rate: Arc<AcceptRate>) {
        self.accepting.rate = Some(rate);
    }

    /// Keeps `slots` beyond the limit of accepted connections for the peers that `admits` names by listener and address. They
    /// need no token of a rate either. Where others wait, it accepts further ones to find such peers. Before the first turn.
    pub fn reserve(&mut self, slots: usize, admits: impl Fn(u16, SocketAddr) -> bool + 'static) {
        self.lanes.reserve(slots);
        self.accepting.reserve = Some(Reserve { slots, admits: Box::new(admits) });
    }

    /// Accepts nothing until [`begin_accepting`](Shard::begin_accepting): peers wait in the kernel's queue. Before the first turn.
    pub fn withhold_accepting(&mut self) {
        self.accepting.withheld = true;
    }

    /// Accepts from the next turn on.
    pub fn begin_accepting(&mut self) {
        self.accepting.withheld = false;
    }

    /// Sets whether another shard has room for sockets beyond this one's table. Accepting goes on from the next turn.
    pub fn set_others_have_room(&mut self, room: bool) {
        self.accepting.others_have_room = room;
    }

    /// Makes an accepted socket a connection. `None` if there is no memory for it, or every connection was aborted; the socket
    /// is closed then.
    /// Its block has room for a session of type `S`, which is to be [filled](ringserve_buf::CountedHead::fill) before
    /// [`opened`](Shard::opened).
    /// The next call for it is that, [`open_parked`](Shard::open_parked), [`await_header`](Shard::await_header),
    /// [`begin_handshake`](Shard::begin_handshake), [`refused`](Shard::refused) or [`abort`](Shard::abort).
    pub fn admit<S: 'static>(
        &mut self,
        socket: Socket,
        peer: Option<SocketAddr>,
        listener: u16,
    ) -> Option<ConnId> {
        self.accepting.answered(listener, self.now);
        let lane = self.lane_of_listener(listener);
        let made = match self.takes_newcomers() {
            true => self.insert(lane, peer, listener, ConnShared::<S>::try_new_unfilled),
            false => None,
        };
        let Some(id) = made else {
            self.accepting.give_back();
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

    /// Closes a socket that `listener` accepted and that is not admitted. One that is refused for its address takes no part in
    /// the server's rate.
    pub fn refuse(&mut self, socket: Socket, listener: u16, by: RefusedBy) {
        self.accepting.answered(listener, self.now);
        self.accepting.give_back();
        if by.is_by_admission() {
            self.give_token_back();
        }
        self.counters_at(listener).refuse(by);
        self.ops.push(Op::Refuse { socket });
        self.retry_accepts();
    }

    /// True if one more connection may be there for last words alone. They have a part of the table and, lest a peer that does not
    /// close keeps it, little time.
    pub fn may_part(&self) -> bool {
        let most = (self.lanes.inbound_max() / PARTING_PART).clamp(1, PARTING_MAX);
        self.accepting.parting < most && self.takes_newcomers()
    }

    /// Refuses a socket as [`refuse`](Shard::refuse), behind some last words as they are. One small send: they are dropped where it
    /// takes more. Only if one more [may part](Shard::may_part).
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

    /// Closes a connection whose service was not called as [`refused`](Shard::refused), behind some last words as they are.
    /// Only if one more [may part](Shard::may_part).
    pub fn refused_with(&mut self, id: ConnId, by: RefusedBy, words: &[u8]) {
        if let Some(conn) = self.conns.get_mut(id).filter(|conn| conn.is_open() && conn.opened == Opened::No)
        {
            conn.opened = Opened::LastWords;
            self.accepting.parting += 1;
            if let Some(outlet) = conn.outlet() {
                outlet.write(words);
            }
        }
        self.refused(id, by);
    }

    /// Puts a socket that `listener` accepted back, to be accepted once more at `until`; nothing else of that listener is accepted
    /// before then. What was on its way waits behind it, and the rest in the kernel's queue.
    pub fn postpone(&mut self, socket: Socket, peer: Option<SocketAddr>, listener: u16, until: Time) {
        if self.has_stopped() {
            return self.refuse(socket, listener, RefusedBy::Stopping);
        }
        self.give_token_back();
        self.accepting.give_back();
        let is_counted = self.accepting.at(listener).is_some_and(|at| at.waited.contains(&socket));
        self.accepting.one_answered(listener);
        self.counters_at(listener).waited += u64::from(!is_counted);
        if let Some(at) = self.accepting.at(listener) {
            let place = at.put_back.min(at.waiting.len());
            at.waiting.insert(place, (socket, peer));
            at.put_back = place + 1;
            at.postponed = Some(at.postponed.map_or(until, |before| before.max(until)));
            at.one_by_one = true;
        }
        self.sync_accept();
    }

    /// Counts a socket that `listener` accepted and that goes to a shard with fewer connections, instead of being admitted or
    /// refused here.
    pub fn handed_off(&mut self, listener: u16, peer: Option<SocketAddr>) {
        self.accepting.answered(listener, self.now);
        self.accepting.give_back();
        if !self.accepting.is_reserved(listener, peer) {
            self.give_token_back();
        }
        self.counters_at(listener).handed_off += 1;
        self.retry_accepts();
    }

    /// Connections that were accepted and wait for a place: a burst brings some before accepting stops.
    pub fn newcomers(&self) -> usize {
        self.accepting.waiting()
    }

    /// True while a limit holds accepting back at all listeners, or the kernel refused it. Not while the server's rate does, and not
    /// while one listener alone is paused, at which as many begin as may.
    pub fn is_accept_paused(&self) -> bool {
        self.accepting.told_paused
    }

    /// How often it [became so](Shard::is_accept_paused).
    pub fn accept_pauses(&self) -> u64 {
        self.accepting.pauses
    }

    /// The service accepted an admitted connection: bytes are received from now on.
    pub fn opened(&mut self, id: ConnId) {
        if let Some(conn) = self.conns.get_mut(id) {
            conn.opened = Opened::Yes;
        }
        self.notify_opened(id);
        self.sync_receive(id);
        self.arm(id);
    }

    pub(in crate::shard) fn accept_ended(&mut self, listener: u16, end: AcceptEnd) {
        let rests = (!self.has_stopped()).then(|| self.now + RETRY);
        if let Some(at) = self.accepting.at(listener) {
            (at.armed, at.stopping, at.closed) = (false, false, end == AcceptEnd::Closed);
            if let AcceptEnd::Error(_) = end {
                at.retry_at = rests;
            }
        }
        // What one listener found missing is missing for all.
        if matches!(end, AcceptEnd::Descriptors | AcceptEnd::SystemFiles) {
            self.accepting.retry_at = rests.or(self.accepting.retry_at);
        }
        self.sync_accept();
    }

    /// A slot is free, or perhaps a descriptor.
    pub(in crate::shard) fn slot_freed(&mut self) {
        if let Some(retry_at) = &mut self.accepting.retry_at {
            *retry_at = (*retry_at).min(self.now + RETRY / 10);
        }
        self.retry_accepts();
    }

    /// Checks, at the start of a turn, everything that may have changed since the last one, on other shards too.
    #[inline]
    pub(in crate::shard) fn check_accepting(&mut self) {
        let room = self.has_room() || self.hands_off();
        if room == self.accepting.is_full || (self.accepting.is_timed && self.accepting.rests(self.now)) {
            self.retry_accepts();
        }
    }

    #[inline(never)]
    pub(in crate::shard) fn retry_accepts(&mut self) {
        if self.accepting.makes_room {
            return;
        }
        self.end_starts();
        let count = self.accepting.listeners.len();
        let first = self.accepting.next_listener;
        self.accepting.next_listener = (first + 1) % count.max(1);
        for n in 0..count {
            self.retry_at_listener(((first + n) % count) as u16);
        }
        if self.has_stopped() {
            // Waiting sockets find no room, and will have no time.
            self.refuse_waiting();
        }
        self.sync_accept();
    }

    fn retry_at_listener(&mut self, listener: u16) {
        let now = self.now;
        if let Some(at) = self.accepting.at(listener) {
            at.go_on(now);
        }
        while let Some(at) = self.accepting.at(listener).filter(|at| !at.is_put_off())
            && let Some((socket, peer)) = at.waiting.pop_front()
        {
            let is_asked = self.ask(listener, socket, peer);
            if !is_asked && self.hand_off(listener, socket, peer) {
                continue;
            }
            let Some(at) = self.accepting.at(listener) else { return };
            match is_asked {
                true => at.waited.push(socket),
                false => return at.waiting.push_front((socket, peer)),
            }
        }
    }

    /// Arms or stops each listener as the limits say.
    pub(super) fn sync_accept(&mut self) {
        self.sync_listeners();
        self.accepting.is_timed = !self.accepting.is_settled();
    }

    fn sync_listeners(&mut self) {
        self.accepting.settle();
        if self.accepting.withheld {
            return;
        }
        let now = self.now;
        self.accepting.retry_at.take_if(|at| *at <= now);
        self.accepting.held_by_rate.take_if(|at| *at <= now);
        if !self.accepting.started
            && let Some(rate) = &self.accepting.rate
        {
            rate.begin(now);
        }
        self.accepting.started = true;
        if self.has_stopped() {
            return;
        }
        let room = self.has_room() || self.hands_off();
        self.accepting.is_full = !room;
        self.accepting.starts_at = None;
        let by_rate = self.accepting.held_by_rate.is_some();
        let (mut held, mut put_off) = (false, false);
        for listener in 0..self.accepting.listeners.len() as u16 {
            held |= self.sync_listener(listener, room && !by_rate);
            put_off |= self.accepting.at(listener).is_some_and(|at| at.is_put_off());
        }
        if !room && self.accepting.starting > 0 {
            self.make_room_for_all();
        }
        let by_limit = held && (!room || self.accepting.retry_at.is_some());
        // A rate holds many times in a second, and as it was asked to; and what is put off is refused soon, or let in. Told, either
        // would keep a server refusing that has room.
        let tells = by_limit && (self.accepting.told_paused || !(by_rate || put_off));
        if held && by_rate && !self.accepting.is_held {
            self.lanes[LaneId::FIRST].counters.accept_held += 1;
        }
        self.accepting.is_held = held && by_rate;
        if tells != self.accepting.told_paused {
            self.accepting.told_paused = tells;
            self.accepting.pauses += u64::from(tells);
            self.lanes[LaneId::FIRST].counters.accept_paused += u64::from(tells);
            self.observer.accept_paused(now, None, tells);
        }
    }

    /// The same for one, where there is `room` as far as all listeners go. True if it is held back.
    fn sync_listener(&mut self, listener: u16, room: bool) -> bool {
        let is_full = self.is_full_of_starts(listener) && self.first_to_go(listener).is_none();
        self.note_crowd(listener, is_full);
        let (now, rests) = (self.now, self.accepting.retry_at.is_some());
        let looks_ahead = self.accepting.looks_ahead();
        let Some(at) = self.accepting.at(listener) else { return false };
        at.retry_at.take_if(|at| *at <= now);
        let has_none = !room || is_full || !at.waiting.is_empty();
        let looks = at.waiting.len() < looks_ahead;
        let held = has_none && !looks || rests || at.retry_at.is_some() || at.is_put_off();
        if held && at.armed && !at.stopping {
            at.stopping = true;
            self.ops.push(Op::AcceptStop { listener });
        } else if !held && !at.armed && !at.closed {
            at.armed = true;
            self.ops.push(Op::Accept { listener });
        }
        let tells = held && (is_full || at.retry_at.is_some());
        if tells != at.told_paused {
            at.told_paused = tells;
            let lane = at.lane;
            self.lanes[lane].counters.accept_paused += u64::from(tells);
            self.observer.accept_paused(now, Some(listener), tells);
        }
        held
    }

    /// Takes in the queues of the listeners, and closes them.
    pub(in crate::shard) fn stop_listening(&mut self) {
        for (listener, _) in (0..).zip(&self.accepting.listeners).filter(|(_, at)| !at.closed) {
            self.ops.push(Op::StopListening { listener });
        }
        // Accepting does not rest any more, and is not held back.
        self.accepting.retry_at = None;
        self.accepting.held_by_rate = None;
        self.accepting.starts_at = None;
        self.accepting.is_full = false;
        for at in &mut self.accepting.listeners {
            (at.retry_at, at.postponed) = (None, None);
        }
    }

    /// Refuses waiting sockets: none becomes a connection any more.
    pub(in crate::shard) fn refuse_waiting(&mut self) {
        for listener in 0..self.accepting.listeners.len() as u16 {
            while let Some((socket, _)) = self.accepting.at(listener).and_then(|at| at.waiting.pop_front()) {
                self.counters_at(listener).refuse(RefusedBy::Stopping);
                self.ops.push(Op::Refuse { socket });
            }
        }
    }

    /// Closes a connection that was refused after it was admitted, by its `open` as a rule. Its queued replies are sent first.
    /// One that ends already, as by a time limit, ends for that reason alone.
    pub fn refused(&mut self, id: ConnId, by: RefusedBy) {
        if let Some(conn) = self.conns.get(id).filter(|conn| conn.is_open()) {
            self.lanes[conn.lane].counters.refuse(by);
        }
        self.finish(id, CloseReason::Refused);
    }
}
