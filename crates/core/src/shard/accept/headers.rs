//! Connections that begin with a PROXY header.
//!
//! ```text
//!   admit ──▶ await_header ──▶ read_header .. ──▶ Lane::proxied ──▶ opened, open_parked, refused
//!   socket's address                              client's address
//! ```
//!
//! At a listener with a transport the handshake follows (`channels/`). What comes until the header is whole is kept together, and
//! the header is read from its start with each piece. One that comes at once is read where it lies, and what is behind it goes on
//! from there.

use ringserve_buf::{LeaseMut, try_box};

use super::starts::{Begun, Stage};
use crate::connection::{Conn, Inbox, Opened, Queued};
use crate::proxy::{self, Expected, Header, HeaderError, Tlvs};
use crate::shard::Shard;
use crate::shard::channels::Channels;
use crate::shard::turn::Lane;
use crate::tables::Slots;
use crate::time::STEP;
use crate::{CloseReason, ConnId, LaneId, Observer};

impl<O: Observer> Shard<O> {
    /// Has the connections of a listener begin with a PROXY header. Before the first turn.
    pub fn expect_header(&mut self, listener: u16, header: Expected) {
        self.accepting.expect(listener, header);
    }

    /// Reads the PROXY header of a connection that was [admitted](Shard::admit) at a listener that
    /// [expects](Shard::expect_header) one. [`Lane::proxied`] says that it is there, [`Lane::ended`] that it will not be.
    pub fn await_header(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get_mut(id).filter(|conn| conn.is_open()) else { return };
        let Some(listener) = conn.outlet().map(|outlet| outlet.listener()) else { return };
        conn.opened = Opened::Header;
        self.start_begins(id, listener, true);
        self.sync_receive(id);
        self.arm(id);
    }

    /// Counts a connection at its listener, since its header or the end of its handshake is awaited.
    pub(in crate::shard) fn start_begins(&mut self, id: ConnId, listener: u16, is_header: bool) {
        let (now, max) = (self.now, self.limits.handshakes_max);
        let (conns, channels) = (&self.conns, &self.channels);
        self.accepting.starting += 1;
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
        at.starts.count() + if begins { at.pending } else { 0 } >= self.limits.handshakes_max
    }

    /// True if the header or the handshake of a connection is awaited, and its peer brought no byte of it.
    pub(in crate::shard) fn is_silent_start(&self, id: ConnId) -> bool {
        let conn = self.conns.get(id);
        conn.is_some_and(|conn| conn.is_starting() && brought_nothing(conn, &self.channels, id))
    }

    /// The connection that goes for a newcomer of a listener at which as many begin as may.
    #[cold]
    pub(super) fn first_to_go(&mut self, listener: u16) -> Option<ConnId> {
        let (then, conns, channels) = (self.accepting.looked.until(), &self.conns, &self.channels);
        self.accepting.at(listener)?.starts.first_to_go(then, |begun| stage(conns, channels, begun))
    }

    /// Ends a connection whose header or handshake was awaited for as long as can be at its listener. Without a goodbye: one that
    /// lingers would keep its place in the table.
    pub(super) fn make_room(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get(id) else { return };
        let reason = match conn.opened {
            Opened::Header => CloseReason::ProxyTimeout,
            _ => CloseReason::HandshakeTimeout,
        };
        // The place is its successor's.
        self.accepting.makes_room = true;
        self.abort(id, reason);
        self.accepting.makes_room = false;
    }

    /// The table is full: one that began makes room as at the limit of its listener; of the listener that has most of them, among those
    /// where one may go. Otherwise those that say nothing to one listener would keep others from accepting.
    #[cold]
    pub(super) fn make_room_for_all(&mut self) {
        if self.accepting.leaves.is_some_and(|id| self.conns.get(id).is_some()) {
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
        self.accepting.leaves = most.map(|(_, id)| id);
        match self.accepting.leaves {
            Some(id) => self.make_room(id),
            None => listeners.for_each(|listener| self.note_crowd(listener, true)),
        }
    }

    /// Ends those that had their time, where there is a crowd.
    pub(super) fn end_starts(&mut self) {
        let now = self.now;
        let is_due = self.accepting.starts_at.take_if(|at| *at <= now).is_some();
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
        let (then, max) = (self.accepting.looked.until(), self.limits.handshakes_max);
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
        self.accepting.starts_at = Some(self.accepting.starts_at.map_or(next, |before| before.min(next)));
        self.accepting.is_timed = true;
    }

    /// Bytes came of a connection whose header is awaited.
    #[cold]
    #[inline(never)]
    pub(in crate::shard) fn start(
        &mut self,
        id: ConnId,
        lease: LeaseMut,
        lane: &mut (impl Lane<O> + ?Sized),
    ) {
        let Some(rest) = self.read_header(id, lease) else { return };
        lane.proxied(self, id);
        // The goodbye of a drain comes before the first frame.
        self.dispatch(lane);
        let Some(conn) = self.conns.get(id).filter(|conn| conn.is_open() && !rest.is_empty()) else {
            return;
        };
        if conn.has_channel() {
            self.unseal(id, rest, lane);
        } else if conn.takes_frames() {
            self.begin_batch();
            self.hand_out_aside(id, rest.freeze(), false, lane);
        } else {
            self.hold(id, rest.freeze(), false);
        }
    }

    /// Reads a header with the next piece of it. Returns what is behind it, once it is whole.
    fn read_header(&mut self, id: ConnId, mut lease: LeaseMut) -> Option<LeaseMut> {
        let conn = self.conns.get_mut(id)?;
        let expected = self.accepting.expected(conn.outlet()?.listener())?;
        let mut kept = conn.inbox.take();
        if let Some(inbox) = &kept {
            self.shared.release(inbox.held_bytes());
        }
        let bytes = match &mut kept {
            None => Ok(&lease[..]),
            Some(inbox) => inbox.append(&lease),
        };
        let Ok(bytes) = bytes else {
            self.abort(id, CloseReason::MemoryLimit);
            return None;
        };
        match proxy::read(bytes, expected.bytes_max) {
            Ok(Some(header)) => {
                let behind = bytes.len() - header.len;
                if !self.keep_header(id, bytes, header, expected) {
                    self.abort(id, CloseReason::MemoryLimit);
                    return None;
                }
                lease.advance(lease.len() - behind);
                return Some(lease);
            }
            Ok(None) => self.keep_start(id, kept, &lease),
            Err(error) => self.finish(id, CloseReason::ProxyBadHeader(error)),
        }
        None
    }

    /// The header is whole. False if the system has no memory for what it says.
    fn keep_header(&mut self, id: ConnId, bytes: &[u8], header: Header, expected: Expected) -> bool {
        let Some(conn) = self.conns.get_mut(id) else { return true };
        let Some(shared) = conn.shared.clone() else { return true };
        let tlvs = (expected.keeps_tlvs && !header.tlvs.is_empty()).then(|| Tlvs::of(&bytes[header.tlvs]));
        conn.opened = Opened::No;
        if self.channels.transport(shared.listener()).is_none() {
            conn.since = self.stamp;
        }
        let lane = conn.lane;
        self.start_over(lane, shared.listener());
        let is_kept = shared.keep_header(header.ends, tlvs);
        self.observer.proxied(self.now, lane, id, shared.peer(), shared.proxied().via);
        is_kept
    }

    /// Keeps the start of a header: `kept`, or what came first.
    fn keep_start(&mut self, id: ConnId, kept: Option<alloc::boxed::Box<Inbox>>, first: &[u8]) {
        let inbox = kept.or_else(|| {
            let mut inbox = try_box(Inbox::default())?;
            inbox.append(first).ok()?;
            Some(inbox)
        });
        let Some(inbox) = inbox else { return self.abort(id, CloseReason::MemoryLimit) };
        self.shared.hold(inbox.held_bytes());
        if let Some(conn) = self.conns.get_mut(id) {
            conn.inbox = Some(inbox);
        }
        self.check_held(id);
    }

    /// The peer sent its last byte, and the header is not whole.
    #[cold]
    pub(in crate::shard) fn header_cut_short(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get(id) else { return };
        let reason = match conn.inbox {
            None => CloseReason::ProxyNoHeader,
            Some(_) => CloseReason::ProxyBadHeader(HeaderError::Unfinished),
        };
        self.finish(id, reason);
    }

    /// A connection's header, or the end of its handshake, is not awaited any more.
    #[cold]
    pub(in crate::shard) fn start_over(&mut self, lane: LaneId, listener: u16) {
        if self.lanes[lane].is_outbound {
            return;
        }
        let was_full = self.is_full_of_starts(listener);
        self.accepting.starting -= 1;
        if let Some(at) = self.accepting.at(listener) {
            at.starts.end();
        }
        if was_full {
            self.retry_accepts();
        }
    }

    /// Panics unless `starting` connections are counted.
    pub(in crate::shard) fn check_starting(&self, starting: usize) {
        let counted: usize = self.accepting.listeners.iter().map(|at| at.starts.count()).sum();
        assert_eq!(
            [starting; 2],
            [counted, self.accepting.starting],
            "connections whose header or handshake is awaited"
        );
        let pending: usize = self.accepting.listeners.iter().map(|at| at.pending).sum();
        assert_eq!(pending, self.accepting.pending, "newcomers of which the services are asked");
    }
}

/// How far a connection is that was begun.
fn stage(conns: &Slots<Conn>, channels: &Channels, begun: &Begun) -> Stage {
    let is_there = |conn: &&Conn| conn.is_starting() && (conn.opened == Opened::Header) == begun.is_header;
    let Some(conn) = conns.get(begun.id).filter(is_there) else { return Stage::Over };
    if conn.queued.is_in(Queued::WORKING) {
        return Stage::Works;
    }
    if brought_nothing(conn, channels, begun.id) { Stage::Silent } else { Stage::Heard }
}

/// True if the peer of a connection brought no byte of the header or the handshake that is awaited.
fn brought_nothing(conn: &Conn, channels: &Channels, id: ConnId) -> bool {
    match conn.opened {
        Opened::Header => conn.inbox.is_none(),
        _ => channels.came(id) == 0,
    }
}
