//! Where many begin with a header or a handshake at a listener, or the table is full: some of them make room for others.

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
    /// Up to when was looked at what they sent.
    looked: LookBound,
    /// The next time at which one of them may have to go.
    next_end: Option<Time>,
    /// Whether one of them goes, and its place is taken.
    is_making_room: bool,
    /// The one that goes since the table is full, until its place is free.
    leaves: Option<ConnId>,
}

impl Crowd {
    /// The next time at which one of them may have to go.
    pub(super) fn next_end(&self) -> Option<Time> {
        self.next_end
    }

    /// None has to go any more, as far as is known.
    pub(super) fn forget_ends(&mut self) {
        self.next_end = None;
    }

    /// True while a place becomes free that is taken.
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

    /// A turn begins that brings `completions`, behind one that was looked at.
    pub(in crate::shard) fn looked_at_starts(&mut self, now: Time, completions: usize) {
        self.crowd.looked.turn_begins(now, completions);
    }
}

impl<O: Observer> Shard<O> {
    /// Counts a connection at its listener, since its header or the end of its handshake is awaited.
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
        // Those of which the service is asked already are no starts yet, but will be.
        let begins = at.header.is_some() || self.channels.transport(listener).is_some();
        at.starts.count() + if begins { at.queue.asked() } else { 0 } >= self.limits.handshakes_max
    }

    /// True if the header or the handshake of a connection is awaited, and its peer brought no byte of it.
    pub(in crate::shard) fn is_silent_start(&self, id: ConnId) -> bool {
        let conn = self.conns.get(id);
        conn.is_some_and(|conn| conn.is_starting() && brought_nothing(conn, &self.channels, id))
    }

    /// The connection that goes for a newcomer of a listener at which as many begin as may.
    #[cold]
    pub(super) fn first_to_go(&mut self, listener: u16) -> Option<ConnId> {
        let (then, conns, channels) = (self.accepting.crowd.looked.until(), &self.conns, &self.channels);
        self.accepting.at(listener)?.starts.first_to_go(then, |begun| stage(conns, channels, begun))
    }

    /// Ends a connection whose header or handshake was awaited for as long as can be at its listener. Without a goodbye: one that
    /// lingers would keep its place in the table.
    pub(super) fn make_room(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get(id) else { return };
        let reason = match conn.opened {
            OpenState::Header => CloseReason::ProxyTimeout,
            _ => CloseReason::HandshakeTimeout,
        };
        // The place is its successor's.
        self.accepting.crowd.is_making_room = true;
        self.abort(id, reason);
        self.accepting.crowd.is_making_room = false;
    }

    /// The table is full: one that began makes room as at the limit of its listener; of the listener that has most of them, among those
    /// where one may go. Otherwise those that say nothing to one listener would keep others from accepting.
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

    /// Ends those that had their time, where there is a crowd.
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

    /// Sees to it that those of a crowd end in time. `one_waits` if a newcomer may, and nothing could go for it.
    pub(super) fn note_crowd(&mut self, listener: u16, one_waits: bool) {
        let (now, max) = (self.now, self.limits.handshakes_max);
        let whole = self.lanes[self.accepting.lane_of(listener)].limits.handshake_timeout;
        let Some(at) = self.accepting.at(listener) else { return };
        let Some(next) = at.starts.next(max, whole, one_waits) else { return };
        // One that cannot go now is looked at once more in a moment.
        let next = next.max(now + STEP);
        let crowd = &mut self.accepting.crowd;
        crowd.next_end = Some(crowd.next_end.map_or(next, |before| before.min(next)));
        self.accepting.is_timed = true;
    }

    /// A connection's header, or the end of its handshake, is not awaited any more.
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

    /// Panics if anything contradicts itself, or other than `starting` connections are counted.
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

/// How far a connection is that was begun.
fn stage(conns: &Slots<Conn>, channels: &Channels, begun: &Begun) -> Stage {
    let is_there = |conn: &&Conn| conn.is_starting() && (conn.opened == OpenState::Header) == begun.is_header;
    let Some(conn) = conns.get(begun.id).filter(is_there) else { return Stage::Over };
    if conn.queued.is_in(QueueFlags::WORKING) {
        return Stage::Works;
    }
    if brought_nothing(conn, channels, begun.id) { Stage::Silent } else { Stage::Heard }
}

/// True if the peer of a connection brought no byte of the header or the handshake that is awaited.
fn brought_nothing(conn: &Conn, channels: &Channels, id: ConnId) -> bool {
    match conn.opened {
        OpenState::Header => conn.inbox.is_none(),
        _ => channels.came(id) == 0,
    }
}
