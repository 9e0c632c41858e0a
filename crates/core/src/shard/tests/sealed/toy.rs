//! A small channel and its peer.
//!
//! A record is its kind, the length of its bytes in four bytes, and these bytes, each changed by
//! the number of the record and its place. The handshake is two flights of the peer's, `HELLO` and
//! `FINISHED`, of which the second needs work.

use super::*;
use crate::{Transport, TransportConn, TransportError, TransportEvent};
use core::any::Any;
use core::cell::Cell;

pub const HELLO: u8 = 1;
pub const FINISHED: u8 = 2;
pub const DATA: u8 = 3;
pub const CLOSE: u8 = 4;
pub const ALERT: u8 = 5;
/// It is answered by one of its kind.
pub const REKEY: u8 = 6;
/// It begins a second piece of work, after the handshake.
pub const THINK: u8 = 7;
/// It is ignored before the handshake is done.
pub const PADDING: u8 = 8;
/// The server had sent nothing for a second. Sent if the transport is set to do so.
pub const REST: u8 = 9;

/// It decodes to a frame of [`GROWN_BYTES`].
pub const GROWS: u8 = 9;
pub const GROWN_BYTES: usize = 100_000;

/// It begins a message that a layer above has to end, and never does.
pub const BEGINS: u8 = 10;

/// Bytes that cannot be sealed.
pub const UNSEALABLE: &[u8] = b"one record too many";

const HEAD: usize = 5;
/// The most bytes of an unfinished record, which is refused beyond that.
pub const RECORD_BYTES_MAX: usize = 20_000;

fn change(bytes: &mut [u8], number: u8) {
    for (place, byte) in bytes.iter_mut().enumerate() {
        *byte ^= number.wrapping_mul(31).wrapping_add(place as u8) | 0x80;
    }
}

/// The side that sends, record by record.
#[derive(Default)]
struct Writer {
    number: u8,
}

impl Writer {
    fn record(&mut self, kind: u8, pieces: &mut dyn Iterator<Item = &[u8]>, out: &mut Vec<u8>) {
        let at = out.len();
        out.extend_from_slice(&[kind, 0, 0, 0, 0]);
        pieces.for_each(|piece| out.extend_from_slice(piece));
        let len = out.len() - at - HEAD;
        out[at + 1..at + HEAD].copy_from_slice(&(len as u32).to_be_bytes());
        change(&mut out[at + HEAD..], self.number);
        self.number = self.number.wrapping_add(1);
    }

    fn empty(&mut self, kind: u8, out: &mut Vec<u8>) {
        self.record(kind, &mut core::iter::empty(), out);
    }
}

/// The kind of the record that `bytes` begin with and its length with its head, if the head is
/// whole.
fn head(bytes: &[u8]) -> Option<(u8, usize)> {
    let len = bytes.get(1..HEAD)?;
    Some((bytes[0], HEAD + u32::from_be_bytes(len.try_into().unwrap()) as usize))
}

/// The transport.
pub struct Toy {
    /// FIN without `CLOSE` is a fault.
    pub needs_close: bool,
    /// The server speaks first.
    pub greets: bool,
    /// It reports when it rested.
    pub tells_rests: bool,
    /// Its facts are made only when a service asks for them.
    pub makes_facts: bool,
    /// Its handshakes occupy this much memory as long as their connections last.
    pub kept_bytes: usize,
}

impl Transport for Toy {
    fn begin(&self, out: &mut Vec<u8>) -> Option<Box<dyn TransportConn>> {
        let mut channel = ToyChannel {
            needs_close: self.needs_close,
            tells_rests: self.tells_rests,
            makes_facts: self.makes_facts,
            kept_bytes: self.kept_bytes,
            ..ToyChannel::default()
        };
        if self.greets {
            channel.writer.empty(HELLO, out);
        }
        Some(Box::new(channel))
    }
}

#[derive(Default)]
struct ToyChannel {
    needs_close: bool,
    tells_rests: bool,
    makes_facts: bool,
    kept_bytes: usize,
    /// The number of times that facts were made.
    made: Cell<u32>,
    has_rested: bool,
    writer: Writer,
    read: u8,
    kept: Vec<u8>,
    works: bool,
    hello: bool,
    ready: bool,
    finished: bool,
    closed: bool,
    begun: bool,
}

impl ToyChannel {
    /// The next whole record of the kept bytes and `wire`.
    fn next(&mut self, wire: &mut LeaseMut) -> Result<Option<(u8, LeaseMut)>, TransportError> {
        if self.kept.is_empty()
            && let Some((kind, whole)) = head(wire).filter(|(_, whole)| *whole <= wire.len())
        {
            let mut record = wire.split_to(whole);
            record.advance(HEAD);
            return Ok(Some((kind, record)));
        }
        self.kept.extend_from_slice(wire);
        *wire = LeaseMut::empty();
        match head(&self.kept) {
            Some((_, whole)) if whole > RECORD_BYTES_MAX => Err(TransportError(CloseReason::TlsBadRecord)),
            Some((kind, whole)) if whole <= self.kept.len() => {
                let record = self.kept.drain(..whole).skip(HEAD).collect();
                Ok(Some((kind, LeaseMut::try_from_vec(record).unwrap())))
            }
            _ => Ok(None),
        }
    }

    fn refuse(&mut self, reason: CloseReason, out: &mut Vec<u8>) -> TransportEvent {
        self.writer.empty(ALERT, out);
        TransportEvent::Fault(TransportError(reason))
    }
}

impl TransportConn for ToyChannel {
    fn decode(&mut self, wire: &mut LeaseMut, out: &mut Vec<u8>) -> TransportEvent {
        loop {
            if self.works {
                self.kept.extend_from_slice(wire);
                *wire = LeaseMut::empty();
                return TransportEvent::Work;
            }
            let (kind, mut record) = match self.next(wire) {
                Ok(Some(found)) => found,
                Ok(None) => return TransportEvent::More,
                Err(TransportError(reason)) => return self.refuse(reason, out),
            };
            change(&mut record, self.read);
            self.read = self.read.wrapping_add(1);
            match kind {
                HELLO if !self.hello => {
                    self.hello = true;
                    self.writer.record(HELLO, &mut core::iter::once(&b"certificate"[..]), out);
                }
                PADDING if !self.ready => {}
                FINISHED if self.hello && !self.ready => self.works = true,
                THINK if self.ready => self.works = true,
                DATA if self.ready => return TransportEvent::Plain(record),
                GROWS if self.ready => {
                    let grown = super::toy::wire(&[record[0]; GROWN_BYTES]);
                    return TransportEvent::Plain(LeaseMut::try_from_vec(grown).unwrap());
                }
                REKEY if self.ready => self.writer.empty(REKEY, out),
                BEGINS if self.ready => self.begun = true,
                CLOSE => {
                    self.closed = true;
                    return TransportEvent::Closed;
                }
                _ if self.ready => return self.refuse(CloseReason::TlsBadRecord, out),
                _ => return self.refuse(CloseReason::TlsHandshakeFailed(40), out),
            }
        }
    }

    fn work(&mut self, out: &mut Vec<u8>) -> TransportEvent {
        assert!(core::mem::take(&mut self.works), "work that nothing asked for");
        let is_first = !core::mem::replace(&mut self.ready, true);
        if is_first {
            self.writer.empty(FINISHED, out);
            TransportEvent::Ready
        } else {
            self.writer.empty(THINK, out);
            self.decode(&mut LeaseMut::empty(), out)
        }
    }

    fn on_send_pause(&mut self) {
        self.has_rested = self.tells_rests;
    }

    fn encode(&mut self, plain: &Batch, out: &mut Vec<u8>) -> Result<(), TransportError> {
        assert!(self.ready && !self.finished && !plain.is_empty());
        if plain.pieces().flatten().eq(UNSEALABLE) {
            self.writer.empty(ALERT, out);
            return Err(TransportError(CloseReason::TlsBadRecord));
        }
        if core::mem::take(&mut self.has_rested) {
            self.writer.empty(REST, out);
        }
        self.writer.record(DATA, &mut plain.pieces(), out);
        Ok(())
    }

    fn finish(&mut self, out: &mut Vec<u8>) {
        assert!(self.ready && !core::mem::replace(&mut self.finished, true), "a second last word");
        self.writer.empty(CLOSE, out);
    }

    fn held_bytes(&self) -> usize {
        self.kept.len()
    }

    fn wants_more(&self) -> bool {
        self.ready && !self.works && !self.closed && !self.begun && self.kept.is_empty()
    }

    fn kept_bytes(&self) -> usize {
        self.kept_bytes
    }

    fn is_mid_record(&self) -> bool {
        !self.kept.is_empty() && !self.works
    }

    fn eof_error(&self) -> Option<CloseReason> {
        match self.begun {
            true => Some(CloseReason::PeerClosedMidFrame),
            false => (self.needs_close && !self.closed).then_some(CloseReason::TlsTruncated),
        }
    }

    fn info(&self) -> Option<Rc<dyn Any>> {
        (!self.makes_facts).then(|| Rc::new("toy") as Rc<dyn Any>)
    }

    fn info_on_demand(&self) -> Option<Rc<dyn Any>> {
        self.made.set(self.made.get() + 1);
        (self.makes_facts && self.ready).then(|| Rc::new(self.made.get()) as Rc<dyn Any>)
    }
}

/// A record that the server sent.
#[derive(Debug, PartialEq, Eq)]
pub enum Said {
    Data(Vec<u8>),
    Other(u8),
}

/// The other end of a connection.
#[derive(Default)]
pub struct Peer {
    writer: Writer,
    read: u8,
    came: Vec<u8>,
}

impl Peer {
    pub fn record(&mut self, kind: u8, bytes: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        self.writer.record(kind, &mut core::iter::once(bytes), &mut out);
        out
    }

    /// Both flights of a handshake.
    pub fn flights(&mut self) -> Vec<u8> {
        [self.record(HELLO, b"hello"), self.record(FINISHED, b"")].concat()
    }

    /// A record with a frame.
    pub fn frame(&mut self, payload: &[u8]) -> Vec<u8> {
        self.record(DATA, &wire(payload))
    }

    /// The content of `bytes`, of which all records are whole.
    pub fn hear(&mut self, bytes: impl IntoIterator<Item = u8>) -> Vec<Said> {
        self.came.extend(bytes);
        let mut said = Vec::new();
        while let Some((kind, whole)) = head(&self.came).filter(|(_, whole)| *whole <= self.came.len()) {
            let mut record: Vec<u8> = self.came.drain(..whole).skip(HEAD).collect();
            change(&mut record, self.read);
            self.read = self.read.wrapping_add(1);
            said.push(if kind == DATA { Said::Data(record) } else { Said::Other(kind) });
        }
        said
    }
}

/// A frame as it is without a channel.
pub fn wire(payload: &[u8]) -> Vec<u8> {
    [&(payload.len() as u32).to_be_bytes()[..], payload].concat()
}
