//! Sockets that were accepted: for each the services are asked at once, or it waits until there is
//! a place.

use core::net::SocketAddr;

use super::RETRY;
use super::queue::{WaitCounts, Waiting, Why};
use crate::shard::Shard;
use crate::shard::lanes::Wave;
use crate::shard::turn::Event;
use crate::{Observer, Op, RefusedBy, Socket};

impl<O: Observer> Shard<O> {
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
        let is_next = self.accepting.at(listener).is_some_and(|at| at.queue.is_free())
            || self.accepting.reserved_for(listener, peer).is_some();
        let is_over = self.lanes[self.accepting.lane_of(listener)].wave == Wave::Over;
        let asked = match is_next && !is_over && self.takes_newcomers() {
            true => self.ask(listener, socket, peer),
            false => Err(Why::Others),
        };
        let Err(why) = asked else { return };
        if self.has_stopped() {
            // It would wait for a place that never comes.
            self.counters_at(listener).refuse(RefusedBy::Stopping);
            self.ops.push(Op::Refuse { socket });
            return;
        }
        if self.hand_off(listener, socket, peer) {
            return;
        }
        self.counters_at(listener).waited += 1;
        if let Some(at) = self.accepting.at(listener) {
            at.queue.push(Waiting { socket, peer, why });
        }
        self.sync_accept();
    }

    /// Asks the services for a new connection, if there is a place for it.
    fn ask(&mut self, listener: u16, socket: Socket, peer: Option<SocketAddr>) -> Result<(), Why> {
        // A drain lets waiting sockets in, and soon cuts those whose header does not come.
        let is_held = self.is_full_of_starts(listener) && !self.has_stopped();
        let goes = if is_held { self.first_to_go(listener) } else { None };
        let is_free = (!is_held || goes.is_some()) && self.has_slot();
        // The peer matters if there is a rate, and if there is no room: other shards may have taken
        // that.
        let reserved = self.accepting.reserved_for(listener, peer);
        let reserved = reserved.filter(|_| self.lanes.reserved_left() > self.accepting.asked);
        let has_place = is_free || reserved.is_some();
        if !has_place || !self.accepting.places.take(reserved.unwrap_or(0)) {
            return Err(Why::Limit);
        }
        if reserved.is_none() && !self.take_token() {
            self.accepting.places.give_back();
            return Err(Why::Rate);
        }
        if let Some(id) = goes {
            self.make_room(id);
        }
        self.accepting.asked += 1;
        if let Some(at) = self.accepting.at(listener) {
            at.queue.ask();
        }
        self.events.push_back(Event::Accepted { socket, peer, listener });
        if self.accepting.tokens.are_awaited() {
            self.sync_accept();
        }
        Ok(())
    }

    /// Hands a socket off. False if it stays here, because no other shard has room, or this one
    /// has.
    fn hand_off(&mut self, listener: u16, socket: Socket, peer: Option<SocketAddr>) -> bool {
        let hands_off = self.hands_off();
        if hands_off {
            self.counters_at(listener).handed_off += 1;
            self.events.push_back(Event::HandOff { socket, peer, listener });
        }
        hands_off
    }

    /// Connections that were accepted and wait for a place: a burst brings some before accepting
    /// stops.
    pub fn newcomers(&self) -> usize {
        self.accepting.waiting()
    }

    /// The same, by the reason why they wait. It looks at each of them.
    pub fn newcomers_by_reason(&self) -> WaitCounts {
        let mut counts = WaitCounts::default();
        self.accepting.listeners.iter().for_each(|listener| listener.queue.count(&mut counts));
        counts
    }

    /// Notes that a slot is free, or perhaps a descriptor.
    pub(in crate::shard) fn slot_freed(&mut self) {
        if let Some(retry_at) = &mut self.accepting.retry_at {
            *retry_at = (*retry_at).min(self.now + RETRY / 10);
        }
        self.retry_accepts();
    }

    /// Checks, at the start of a turn, everything that may have changed since the last one, on
    /// other shards too.
    #[inline]
    pub(in crate::shard) fn check_accepting(&mut self) {
        let has_room = self.has_room() || self.hands_off();
        if has_room == self.accepting.pauses.is_full
            || (self.accepting.is_timed && self.accepting.rests(self.now))
        {
            self.retry_accepts();
        }
    }

    #[inline(never)]
    pub(in crate::shard) fn retry_accepts(&mut self) {
        if self.accepting.crowd.is_making_room() {
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
            // Waiting sockets find no room, and will not get the time.
            self.refuse_waiting();
        }
        self.sync_accept();
    }

    fn retry_at_listener(&mut self, listener: u16) {
        let now = self.now;
        if let Some(at) = self.accepting.at(listener) {
            at.queue.go_on(now);
        }
        while let Some(at) = self.accepting.at(listener).filter(|at| !at.queue.is_put_off())
            && let Some(Waiting { socket, peer, .. }) = at.queue.pop()
        {
            let asked = self.ask(listener, socket, peer);
            if asked.is_err() && self.hand_off(listener, socket, peer) {
                continue;
            }
            let Some(at) = self.accepting.at(listener) else { return };
            match asked {
                Ok(()) => at.queue.note_waited(socket),
                Err(why) => return at.queue.unpop(Waiting { socket, peer, why }),
            }
        }
    }

    /// Refuses waiting sockets: from now on none becomes a connection.
    pub(in crate::shard) fn refuse_waiting(&mut self) {
        for listener in 0..self.accepting.listeners.len() as u16 {
            while let Some(waiting) = self.accepting.at(listener).and_then(|at| at.queue.pop()) {
                self.counters_at(listener).refuse(RefusedBy::Stopping);
                self.ops.push(Op::Refuse { socket: waiting.socket });
            }
        }
    }
}
