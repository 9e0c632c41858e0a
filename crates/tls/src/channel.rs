//! One connection of TLS: ciphertext in, plaintext out, and back.
//!
//! ```text
//!   Handshake ── work: rustls is done ──▶ Open ── close_notify ──▶ Closed
//!       └───────────────────────┴── rustls refuses ──────────────▶ Failed
//! ```

use std::any::Any;
use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use ringserve_buf::LeaseMut;
use ringserve_core::{Batch, CloseReason, TransportConn, TransportError, TransportEvent};
use rustls::AlertDescription;

use crate::TlsError;
use crate::connection::{Connection, Found, Refusal};
use crate::records::{self, Extent, Scan};

/// The most bytes of an unfinished handshake. rustls takes messages of at most 64 KiB.
const HANDSHAKE_BYTES_MAX: usize = 64 * 1024;

/// The most bytes of unfinished messages after the handshake: tickets and new keys, which take one
/// record.
const KEPT_BYTES_MAX: usize = 32 * 1024;

/// The most bytes that are sent in small records at the start of an answer.
const ANSWER_START: usize = 16 * 1024;

/// Settings of channels, in addition to those of rustls.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    /// A connection that ends without `close_notify` was cut off.
    pub(crate) require_close_notify: bool,
    /// The most bytes of plaintext in a record at the start of an answer.
    pub(crate) record_bytes: usize,
}

impl Default for Rules {
    fn default() -> Rules {
        // Usually three TCP segments, of the ten that are sent at once.
        Rules { require_close_notify: false, record_bytes: 4096 }
    }
}

impl Rules {
    pub(crate) fn check(self) -> Result<(), TlsError> {
        match self.record_bytes {
            512..=ANSWER_START => Ok(()),
            bytes => Err(TlsError::new(format_args!(
                "Tls::record_bytes is {bytes}; it must be 512 to {ANSWER_START}"
            ))),
        }
    }
}

/// State shared by the channels of a shard. `V` verifies clients.
pub(crate) struct Common<V: ?Sized> {
    /// Buffer in which the pieces of a record are gathered.
    gathered: RefCell<Vec<u8>>,
    rules: Rules,
    /// The verifier of clients, which is also used when they resume a session.
    clients: Option<Arc<V>>,
}

impl<V: ?Sized> Common<V> {
    pub(crate) fn new(rules: Rules, clients: Option<Arc<V>>) -> Common<V> {
        Common { gathered: RefCell::default(), rules, clients }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// `encrypted` is true once bytes that look like a message may be encrypted.
    Handshake {
        encrypted: bool,
    },
    Open,
    /// The peer announced its end.
    Closed,
    Failed,
}

/// A TLS connection, of either end.
pub(crate) struct TlsChannel<C: Connection> {
    connection: C,
    common: Rc<Common<C::Clients>>,
    phase: Phase,
    /// Received bytes that are not processed: `kept` bytes that rustls has seen and needs to see
    /// again, then unseen ones. It has no memory if all records arrived whole.
    held: Vec<u8>,
    kept: usize,
    /// The progress through a handshake message, after the `kept` bytes.
    scan: Scan,
    /// Plaintext that arrived with the last step of the handshake.
    early: Vec<u8>,
    /// The name that the client asked for. rustls 0.23 does not report it for an unbuffered
    /// connection.
    server_name: Option<Arc<str>>,
    /// The last message sent was an alert or `close_notify`.
    finished: bool,
    /// Bytes of plaintext that are still sent in small records.
    small: u16,
}

impl<C: Connection> TlsChannel<C> {
    /// Creates a channel. A client's first message goes to `out`.
    pub(crate) fn new(connection: C, common: Rc<Common<C::Clients>>, out: &mut Vec<u8>) -> TlsChannel<C> {
        let mut channel = TlsChannel {
            connection,
            common,
            phase: Phase::Handshake { encrypted: false },
            held: Vec::new(),
            kept: 0,
            scan: Scan::default(),
            early: Vec::new(),
            server_name: None,
            finished: false,
            small: ANSWER_START as u16,
        };
        // A server has nothing to send yet, and a client can fail only at the next step.
        let _ = channel.connection.process(&mut [], out);
        channel
    }

    /// Keeps all of `wire`, and returns whether there is a step to do.
    fn gather(&mut self, wire: &mut LeaseMut, encrypted: bool, out: &mut Vec<u8>) -> TransportEvent {
        let count = wire.len();
        if self.held.try_reserve(count).is_err() {
            return self.fail(CloseReason::MemoryLimit, out);
        }
        self.held.extend_from_slice(wire);
        wire.advance(count);
        if records::extent(&self.held[self.kept..]) == Extent::Broken {
            // No cryptography: rustls judges the bytes at once.
            return self.step(out);
        }
        let encrypted = encrypted || self.kept > 0;
        if self.scan.calls_for_a_step(&self.held[self.kept..], encrypted) {
            // The peer may send bytes right after its last flight. The shard stops receiving if
            // many bytes wait for the step.
            return TransportEvent::Work;
        }
        if self.held.len() > HANDSHAKE_BYTES_MAX {
            return self.fail(CloseReason::TlsHandshakeFailed(AlertDescription::InternalError.into()), out);
        }
        TransportEvent::More
    }

    /// Shows all held bytes to rustls.
    fn step(&mut self, out: &mut Vec<u8>) -> TransportEvent {
        let Phase::Handshake { encrypted } = self.phase else {
            return self.decode(&mut LeaseMut::default(), out);
        };
        if self.server_name.is_none() && !encrypted {
            self.server_name = records::server_name(&self.held).map(Into::into);
        }
        let encrypted = encrypted || records::changes_cipher(&self.held[self.kept..]);
        self.phase = Phase::Handshake { encrypted };
        let seen = self.kept + records::whole_bytes(&self.held[self.kept..]);
        let (done, found) = self.connection.process(&mut self.held, out);
        if let Ok(Found::Plain(range)) = &found {
            self.early.extend_from_slice(&self.held[range.clone()]);
        }
        self.discard(done, seen);
        let is_closed = matches!(found, Ok(Found::Closed));
        match found {
            // Only one record was processed after the handshake, and rustls needs to see the rest
            // again as a whole.
            Ok(Found::Plain(_)) => self.kept = 0,
            Ok(Found::Nothing | Found::Closed) => {}
            Err(refusal) => return self.refused(refusal, out),
        }
        if self.connection.is_handshaking() {
            return if is_closed { self.closed() } else { TransportEvent::More };
        }
        if let Some(clients) = &self.common.clients
            && let Err(refusal) = self.connection.verify_again(clients)
        {
            // The connections of rustls send no alert on behalf of their user.
            self.finish(out);
            return self.refused(refusal, out);
        }
        self.phase = Phase::Open;
        if is_closed {
            // The next `decode` reports the end to the service, after the beginning.
            self.closed();
        }
        TransportEvent::Ready
    }

    /// Drops `done` bytes from the front of the held bytes, of which rustls has seen `seen`.
    fn discard(&mut self, done: usize, seen: usize) {
        self.held.drain(..done);
        self.kept = seen.saturating_sub(done);
        self.scan = Scan::default();
        if self.held.is_empty() {
            self.held = Vec::new();
        }
    }

    /// Opens one record of `wire`, or of the held bytes with the part of `wire` that they lack.
    fn open_record(&mut self, wire: &mut LeaseMut, out: &mut Vec<u8>) -> TransportEvent {
        loop {
            if self.held.is_empty() {
                let record = match records::extent(wire) {
                    Extent::Record(size) if size <= wire.len() => wire.split_to(size),
                    Extent::Broken => std::mem::take(wire),
                    _ if wire.is_empty() => return TransportEvent::More,
                    _ => match self.hold(wire) {
                        true => continue,
                        false => return self.fail(CloseReason::MemoryLimit, out),
                    },
                };
                match self.decrypt(record, out) {
                    Some(found) => return found,
                    None => continue,
                }
            }
            match records::extent(&self.held[self.kept..]) {
                Extent::Record(size) if self.kept + size > self.held.len() => {}
                Extent::Unknown => {}
                _ => match self.decrypt_held(out) {
                    Some(found) => return found,
                    None => continue,
                },
            }
            if wire.is_empty() {
                return TransportEvent::More;
            }
            if !self.hold(wire) {
                return self.fail(CloseReason::MemoryLimit, out);
            }
        }
    }

    /// Moves bytes of `wire` to the held ones, up to the end of the first record. Memory follows
    /// the bytes: it doubles, up to the size of the record. False if the system has none.
    fn hold(&mut self, wire: &mut LeaseMut) -> bool {
        let begun = self.held.len() - self.kept;
        let size = match records::extent(&self.held[self.kept..]) {
            Extent::Record(size) => size,
            _ => match records::extent(wire) {
                Extent::Record(size) if begun == 0 => size,
                _ => records::HEADER,
            },
        };
        let count = (size - begun).min(wire.len());
        if self.held.capacity() - self.held.len() < count {
            let needed = self.held.len() + count;
            let room = needed.max((2 * self.held.len()).min(self.kept + size));
            if self.held.try_reserve_exact(room - self.held.len()).is_err() {
                return false;
            }
        }
        self.held.extend_from_slice(&wire[..count]);
        wire.advance(count);
        true
    }

    /// Decrypts `record` in place. `None` if it yields nothing.
    fn decrypt(&mut self, mut record: LeaseMut, out: &mut Vec<u8>) -> Option<TransportEvent> {
        let (done, found) = self.connection.process(&mut record, out);
        match found {
            Ok(Found::Plain(range)) => Some(plain_in(record, range)),
            Ok(Found::Nothing) => {
                // The start of a message, to be shown to rustls again before its other records.
                if done < record.len() {
                    record.advance(done);
                    if self.held.try_reserve(record.len()).is_err() {
                        return Some(self.fail(CloseReason::MemoryLimit, out));
                    }
                    self.held.extend_from_slice(&record);
                    self.kept = record.len();
                }
                self.kept_too_much(out)
            }
            Ok(Found::Closed) => Some(self.closed()),
            Err(refusal) => Some(self.refused(refusal, out)),
        }
    }

    /// Decrypts the first held record that rustls has not seen.
    fn decrypt_held(&mut self, out: &mut Vec<u8>) -> Option<TransportEvent> {
        let first = match records::extent(&self.held[self.kept..]) {
            Extent::Record(size) => self.kept + size,
            _ => self.held.len(),
        };
        let (done, found) = self.connection.process(&mut self.held[..first], out);
        match found {
            Ok(Found::Plain(range)) if first == self.held.len() => {
                self.kept = 0;
                let block = std::mem::take(&mut self.held);
                match LeaseMut::try_from_vec(block) {
                    Some(record) => Some(plain_in(record, range)),
                    None => Some(self.fail(CloseReason::MemoryLimit, out)),
                }
            }
            // Only after a handshake, with which more than one record arrived.
            Ok(Found::Plain(range)) => {
                let plain = LeaseMut::try_copy_of(&self.held[range]);
                self.discard(first, first);
                match plain {
                    Some(plain) => Some(TransportEvent::Plain(plain)),
                    None => Some(self.fail(CloseReason::MemoryLimit, out)),
                }
            }
            Ok(Found::Nothing) => {
                self.discard(done, first);
                self.kept_too_much(out)
            }
            Ok(Found::Closed) => Some(self.closed()),
            Err(refusal) => Some(self.refused(refusal, out)),
        }
    }

    /// Returns a fault if a message has more records than any useful one.
    fn kept_too_much(&mut self, out: &mut Vec<u8>) -> Option<TransportEvent> {
        (self.kept > KEPT_BYTES_MAX).then(|| self.fail(CloseReason::TlsBadRecord, out))
    }

    fn closed(&mut self) -> TransportEvent {
        self.phase = Phase::Closed;
        self.forget();
        TransportEvent::Closed
    }

    fn refused(&mut self, refusal: Refusal, out: &mut Vec<u8>) -> TransportEvent {
        let handshaking = matches!(self.phase, Phase::Handshake { .. });
        self.connection.last_words(out);
        let reason = match refusal {
            Refusal::Heard(alert) => CloseReason::TlsAlertReceived(alert),
            Refusal::Said(_) if !handshaking => CloseReason::TlsBadRecord,
            Refusal::Said(alert) => {
                CloseReason::TlsHandshakeFailed(records::plain_alert(out).unwrap_or(alert))
            }
        };
        self.fail(reason, out)
    }

    /// Ends the channel: the connection yields nothing more. Alerts were sent before.
    fn fail(&mut self, reason: CloseReason, out: &mut Vec<u8>) -> TransportEvent {
        if !self.finished {
            self.connection.last_words(out);
        }
        self.phase = Phase::Failed;
        self.finished = true;
        self.forget();
        TransportEvent::Fault(TransportError(reason))
    }

    fn forget(&mut self) {
        (self.held, self.kept, self.early) = (Vec::new(), 0, Vec::new());
    }

    /// The most bytes of the next record.
    fn record_bytes(&self) -> usize {
        if self.small > 0 { self.common.rules.record_bytes.min(C::PLAIN_MAX) } else { C::PLAIN_MAX }
    }

    fn seal_record(&mut self, plain: &[u8], out: &mut Vec<u8>) -> bool {
        self.small = self.small.saturating_sub(plain.len() as u16);
        self.connection.seal(plain, &mut self.held[..self.kept], out)
    }

    fn seal_piece(&mut self, mut plain: &[u8], out: &mut Vec<u8>) -> bool {
        while !plain.is_empty() {
            let (record, rest) = plain.split_at(plain.len().min(self.record_bytes()));
            plain = rest;
            if !self.seal_record(record, out) {
                return false;
            }
        }
        true
    }

    fn seal_all(&mut self, plain: &Batch, out: &mut Vec<u8>) -> bool {
        if let Some(single) = plain.single() {
            return self.seal_piece(single, out);
        }
        let common = self.common.clone();
        let gathered = &mut *common.gathered.borrow_mut();
        gathered.clear();
        for mut piece in plain.pieces() {
            while !piece.is_empty() {
                let size = self.record_bytes();
                let (taken, rest) = piece.split_at(piece.len().min(size - gathered.len()));
                piece = rest;
                // A whole record of a large piece is sealed in place.
                let is_sealed = if taken.len() == size {
                    self.seal_record(taken, out)
                } else {
                    gathered.extend_from_slice(taken);
                    if gathered.len() < size {
                        continue;
                    }
                    let is_sealed = self.seal_record(gathered, out);
                    gathered.clear();
                    is_sealed
                };
                if !is_sealed {
                    return false;
                }
            }
        }
        gathered.is_empty() || self.seal_record(gathered, out)
    }
}

impl<C: Connection> TransportConn for TlsChannel<C> {
    fn decode(&mut self, wire: &mut LeaseMut, out: &mut Vec<u8>) -> TransportEvent {
        match self.phase {
            Phase::Handshake { encrypted } => self.gather(wire, encrypted, out),
            Phase::Open if !self.early.is_empty() => {
                match LeaseMut::try_from_vec(std::mem::take(&mut self.early)) {
                    Some(plain) => TransportEvent::Plain(plain),
                    None => self.fail(CloseReason::MemoryLimit, out),
                }
            }
            Phase::Open => self.open_record(wire, out),
            Phase::Closed => TransportEvent::Closed,
            Phase::Failed => {
                wire.advance(wire.len());
                TransportEvent::More
            }
        }
    }

    fn work(&mut self, out: &mut Vec<u8>) -> TransportEvent {
        self.step(out)
    }

    fn on_send_pause(&mut self) {
        self.small = ANSWER_START as u16;
    }

    fn encode(&mut self, plain: &Batch, out: &mut Vec<u8>) -> Result<(), TransportError> {
        // A record is at most 128 bytes larger than its plaintext.
        let small = plain.len().min(self.small.into()).div_ceil(self.common.rules.record_bytes);
        let records = plain.len().div_ceil(C::PLAIN_MAX) + small;
        if out.try_reserve(plain.len() + 128 * records).is_err() {
            return Err(TransportError(CloseReason::MemoryLimit));
        }
        match plain.is_empty() || (self.phase != Phase::Failed && self.seal_all(plain, out)) {
            true => Ok(()),
            false => {
                self.connection.last_words(out);
                Err(TransportError(CloseReason::TlsBadRecord))
            }
        }
    }

    fn finish(&mut self, out: &mut Vec<u8>) {
        if !self.finished {
            self.finished = true;
            self.connection.close_notify(&mut self.held[..self.kept], out);
        }
    }

    fn held_bytes(&self) -> usize {
        self.held.capacity() + self.early.capacity()
    }

    fn is_mid_record(&self) -> bool {
        !self.held.is_empty()
    }

    fn wants_more(&self) -> bool {
        self.phase == Phase::Open && self.held_bytes() == 0
    }

    fn eof_error(&self) -> Option<CloseReason> {
        (self.common.rules.require_close_notify && self.phase == Phase::Open)
            .then_some(CloseReason::TlsTruncated)
    }

    fn info(&self) -> Option<Rc<dyn Any>> {
        let mut info = self.connection.info()?;
        info.server_name = self.server_name.clone();
        Some(Rc::new(info))
    }
}

/// The plaintext of a record, which rustls left at `range`.
fn plain_in(mut record: LeaseMut, range: Range<usize>) -> TransportEvent {
    record.advance(range.start);
    record.truncate(range.len());
    TransportEvent::Plain(record)
}
