//! Connections that begin with a PROXY header.
//!
//! ```text
//!   admit ──▶ await_header ──▶ read_header .. ──▶ Lane::proxied ──▶ opened, open_parked, refused
//!   socket's address                              client's address
//! ```
//!
//! At a listener with a transport the handshake follows (`channels/`). Bytes are kept together
//! until the header is complete, which is read from its start with each piece. A header that comes
//! in one piece is read where it lies, and the bytes after it go on from there.

use ringserve_buf::{LeaseMut, try_box};

use crate::connection::{Inbox, OpenState};
use crate::proxy::{self, Header, HeaderError, HeaderRules, Tlvs};
use crate::shard::Shard;
use crate::shard::turn::Lane;
use crate::{CloseReason, ConnId, Observer};

impl<O: Observer> Shard<O> {
    /// Makes the connections of a listener begin with a PROXY header. Before the first turn.
    pub fn expect_header(&mut self, listener: u16, header: HeaderRules) {
        if let Some(at) = self.accepting.at(listener) {
            at.header = Some(header);
        }
    }

    /// Reads the PROXY header of a connection that was [admitted](Shard::admit) at a listener that
    /// [expects](Shard::expect_header) one. [`Lane::proxied`] reports that it was read,
    /// [`Lane::ended`] that it will not be.
    pub fn await_header(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get_mut(id).filter(|conn| conn.is_open()) else { return };
        let Some(listener) = conn.outlet().map(|outlet| outlet.listener()) else { return };
        conn.opened = OpenState::Header;
        self.start_begins(id, listener, true);
        self.sync_receive(id);
        self.arm(id);
    }

    /// Handles bytes of a connection whose header is awaited.
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
        // The drain's message comes before the first frame.
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

    /// Reads a header with the next piece of it. Returns the bytes after it, once it is complete.
    fn read_header(&mut self, id: ConnId, mut lease: LeaseMut) -> Option<LeaseMut> {
        let conn = self.conns.get_mut(id)?;
        let expected = self.accepting.at(conn.outlet()?.listener())?.header?;
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

    /// Handles a complete header. False if the system has no memory for its facts.
    fn keep_header(&mut self, id: ConnId, bytes: &[u8], header: Header, expected: HeaderRules) -> bool {
        let Some(conn) = self.conns.get_mut(id) else { return true };
        let Some(shared) = conn.shared.clone() else { return true };
        let tlvs = (expected.keeps_tlvs && !header.tlvs.is_empty()).then(|| Tlvs::of(&bytes[header.tlvs]));
        conn.opened = OpenState::No;
        if self.channels.transport(shared.listener()).is_none() {
            conn.since = self.stamp;
        }
        let lane = conn.lane;
        self.start_over(lane, shared.listener());
        let is_kept = shared.keep_header(header.ends, tlvs);
        self.observer.proxied(self.now, lane, id, shared.peer(), shared.proxied().via);
        is_kept
    }

    /// Keeps the start of a header: `kept`, or the first piece.
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

    /// Handles the end of the input before the header is complete.
    #[cold]
    pub(in crate::shard) fn header_cut_short(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get(id) else { return };
        let reason = match conn.inbox {
            None => CloseReason::ProxyNoHeader,
            Some(_) => CloseReason::ProxyBadHeader(HeaderError::Unfinished),
        };
        self.finish(id, reason);
    }
}
