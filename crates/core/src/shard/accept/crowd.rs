//! Making room: if many connections of a listener await a header or a handshake, or the table is
//! full, some of them end for others.

use super::starts::{Begun, LookBound, Stage};
use crate::connection::{Conn, OpenState, QueueFlags};
use crate::shard::Shard;
use crate::shard::channels::Channels;
use crate::tables::Slots;
use crate::time::STEP;
use crate::{CloseReason, ConnId, LaneId, Observer, Time};

/// Connections whose PROXY header or handshake is awaited, of all listeners.
#[derive(Default)]
pub(super) struct Crowd {
    count: usize,
    /// The time up to which their peers' bytes were looked at.
    looked: LookBound,
    /// The next time at which one of them may have to end.
    next_end: Option<Time>,
    /// Whether one of them ends, and its place is taken.
    is_making_room: bool,
    /// The one that ends because the table is full, until its place is free.
    leaves: Option<ConnId>,
}

impl Crowd {
    /// The next time at which one of them may have to end.
    pub(super) fn next_end(&self) -> Option<Time> {
        self.next_end
    }

    /// Notes that none has to end, as far as is known.
    pub(super) fn forget_ends(&mut self) {
        self.next_end = None;
    }

    /// True while a place becomes free that is promised to another connection.
    pub(super) fn is_making_room(&self) -> bool {
        self.is_making_room
    }

    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }
}

impl super::Accepting {
    /// True if the header or the handshake of a connection is awaited.
    pub(in crate::shard) fn has_starts(&self) -> bool {
        !self.crowd.is_empty()
    }

    /// Notes that a turn begins that brings `completions`, after one that was looked at.
    pub(in crate::shard) fn looked_at_starts(&mut self, now: Time, completions: usize) {
        self.crowd.looked.turn_begins(now, completions);
    }
}

impl<O: Observer> Shard<O> {
    /// Counts a connection at its listener, because its header or the end of its handshake is
    /// awaited.
    pub(in crate::shard) fn start_begins(&mut self, id: ConnId, listener: u16, is_header: bool) {
        let (now, max) = (self.now, self.limits.handshakes_max);
        let (conns, channels) = (&self.conns, &self.channels);
        self.accepting.crowd.count += 1;
        self.begins_aside = true;
        let Some(at) = self.accepting.at(listener) else { return };
        let begun = Begun::new(id, is_header, now);
        let is_noted = at.starts.begin(begun, |begun| stage(conns, channels, begun));
        let is_crowd = at.starts.is_crowd(max);
        if !is_noted {
            return self.abort(id, CloseReason::MemoryLimit);
        }
        if self.is_full_of_starts(listener) {
            self.sync_accept();
        } else if is_crowd {
            self.note_crowd(listener, false);
        }
    }

    /// True if no further connection may begin with a header or a handshake at a listener.
    pub(super) fn is_full_of_starts(&self, listener: u16) -> bool {
        let Some(at) = self.accepting.listeners.get(usize::from(listener)) else { return false };
        // Those for which the service is asked already are no starts yet, but will be.
        let begins = at.header.is_some() || self.channels.transport(listener).is_some();
        at.starts.count() + if begins { at.queue.asked() } else { 0 } >= self.limits.handshakes_max
    }

    /// True if the header or the handshake of a connection is awaited, and its peer brought no byte
    /// of it.
    pub(in crate::shard) fn is_silent_start(&self, id: ConnId) -> bool {
        let conn = self.conns.get(id);
        conn.is_some_and(|conn| conn.is_starting() && brought_nothing(conn, &self.channels, id))
    }

    /// The connection that ends for a new one at a listener with as many starts as allowed.
    #[cold]
    pub(super) fn first_to_go(&mut self, listener: u16) -> Option<ConnId> {
        let (then, conns, channels) = (self.accepting.crowd.looked.until(), &self.conns, &self.channels);
        self.accepting.at(listener)?.starts.first_to_go(then, |begun| stage(conns, channels, begun))
    }

    /// Ends a connection whose header or handshake was awaited for as long as possible at its
    /// listener. It sends no message: a connection that lingers would keep its place in the table.
    pub(super) fn make_room(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get(id) else { return };
        let reason = match conn.opened {
            OpenState::Header => CloseReason::ProxyTimeout,
            _ => CloseReason::HandshakeTimeout,
        };
        // The place belongs to its successor.
        self.accepting.crowd.is_making_room = true;
        self.abort(id, reason);
        self.accepting.crowd.is_making_room = false;
    }

    /// Makes room while the table is full: one start ends as at the limit of its listener. It is
    /// taken from the listener that has most of them, among those at which one may end. Otherwise
    /// connections that send nothing to one listener would keep others from accepting.
    #[cold]
    pub(super) fn make_room_for_all(&mut self) {
        if self.accepting.crowd.leaves.is_some_and(|id| self.conns.get(id).is_some()) {
            return;
        }
        let listeners = 0..self.accepting.listeners.len() as u16;
        let mut most = None;
        for listener in listeners.clone() {
            let count = self.accepting.listeners[usize::from(listener)].starts.count();
            if most.is_none_or(|(most, _)| count >= most)
                && let Some(id) = self.first_to_go(listener)
            {
                most = Some((count, id));
            }
        }
        self.accepting.crowd.leaves = most.map(|(_, id)| id);
        match self.accepting.crowd.leaves {
            Some(id) => self.make_room(id),
            None => listeners.for_each(|listener| self.note_crowd(listener, true)),
        }
    }

    /// Ends those that had their time, if there is a crowd.
    pub(super) fn end_starts(&mut self) {
        let now = self.now;
        let is_due = self.accepting.crowd.next_end.take_if(|at| *at <= now).is_some();
        if !is_due || self.has_stopped() {
            return;
        }
        for listener in 0..self.accepting.listeners.len() as u16 {
            while let Some(id) = self.out_of_time(listener) {
                self.make_room(id);
            }
        }
    }

    fn out_of_time(&mut self, listener: u16) -> Option<ConnId> {
        let (then, max) = (self.accepting.crowd.looked.until(), self.limits.handshakes_max);
        let whole = self.lanes[self.accepting.lane_of(listener)].limits.handshake_timeout;
        let (conns, channels) = (&self.conns, &self.channels);
        self.accepting
            .at(listener)?
            .starts
            .out_of_time(then, max, whole, |begun| stage(conns, channels, begun))
    }

    /// Ensures that those of a crowd end in time. `one_waits` if a new connection may wait for whom
    /// none could end.
    pub(super) fn note_crowd(&mut self, listener: u16, one_waits: bool) {
        let (now, max) = (self.now, self.limits.handshakes_max);
        let whole = self.lanes[self.accepting.lane_of(listener)].limits.handshake_timeout;
        let Some(at) = self.accepting.at(listener) else { return };
        let Some(next) = at.starts.next(max, whole, one_waits) else { return };
        // One that cannot end now is looked at once more in a moment.
        let next = next.max(now + STEP);
        let crowd = &mut self.accepting.crowd;
        crowd.next_end = Some(crowd.next_end.map_or(next, |before| before.min(next)));
        self.accepting.is_timed = true;
    }

    /// Notes that a connection's header, or the end of its handshake, is no longer awaited.
    #[cold]
    pub(in crate::shard) fn start_over(&mut self, lane: LaneId, listener: u16) {
        if self.lanes[lane].is_outbound {
            return;
        }
        let was_full = self.is_full_of_starts(listener);
        self.accepting.crowd.count -= 1;
        if let Some(at) = self.accepting.at(listener) {
            at.starts.end();
        }
        if was_full {
            self.retry_accepts();
        }
    }

    /// Panics if anything contradicts itself, or if the number of counted connections is not
    /// `starting`.
    pub(in crate::shard) fn check_newcomers(&self, starting: usize) {
        let counted: usize = self.accepting.listeners.iter().map(|at| at.starts.count()).sum();
        assert_eq!(
            [starting; 2],
            [counted, self.accepting.crowd.count],
            "connections whose header or handshake is awaited"
        );
        self.accepting.listeners.iter().for_each(|at| at.queue.invariants());
        let asked: usize = self.accepting.listeners.iter().map(|at| at.queue.asked()).sum();
        assert_eq!(asked, self.accepting.asked, "newcomers of which the services are asked");
    }
}

/// The stage of a connection that was begun.
fn stage(conns: &Slots<Conn>, channels: &Channels, begun: &Begun) -> Stage {
    let is_there = |conn: &&Conn| conn.is_starting() && (conn.opened == OpenState::Header) == begun.is_header;
    let Some(conn) = conns.get(begun.id).filter(is_there) else { return Stage::Over };
    if conn.queued.is_in(QueueFlags::WORKING) {
        return Stage::Works;
    }
    if brought_nothing(conn, channels, begun.id) { Stage::Silent } else { Stage::Heard }
}

/// True if the peer of a connection sent no byte of the awaited header or handshake.
fn brought_nothing(conn: &Conn, channels: &Channels, id: ConnId) -> bool {
    match conn.opened {
        OpenState::Header => conn.inbox.is_none(),
        _ => channels.came(id) == 0,
    }
}
