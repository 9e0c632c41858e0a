//! One end of a connection of the toy transport.

use std::any::Any;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ringserve_buf::LeaseMut;
use ringserve_core::{Batch, CloseReason, Transport, TransportConn, TransportError, TransportEvent};

use super::records::{BODY_BYTES_MAX, HEADER_BYTES, Header, Keys, Kind};

/// The steps of a server's handshake that need a permit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Permits {
    /// None.
    None,
    /// The answer to the first flight.
    Hello,
    /// The answer to the second one.
    Proof,
    /// Each.
    Both,
}

impl Permits {
    /// All of them.
    pub const ALL: &[Permits] = &[Permits::None, Permits::Hello, Permits::Proof, Permits::Both];
}

/// Channels that exist, of all shards.
#[derive(Clone, Debug, Default)]
pub struct Alive(Arc<AtomicUsize>);

impl Alive {
    /// Their number.
    pub fn count(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

/// One end's transport.
#[derive(Clone, Debug)]
pub struct Toy {
    /// The client's name, which it sends to the server.
    name: Option<Box<[u8]>>,
    permits: Permits,
    record_bytes: usize,
    updates_every: u64,
    nonce: u64,
    alive: Alive,
}

impl Toy {
    /// Creates the transport of a server.
    pub fn server() -> Toy {
        Toy {
            name: None,
            permits: Permits::Both,
            record_bytes: BODY_BYTES_MAX,
            updates_every: 0,
            nonce: 1,
            alive: Alive::default(),
        }
    }

    /// Creates the transport of a client with this name.
    pub fn client(name: impl AsRef<[u8]>, nonce: u64) -> Toy {
        Toy { name: Some(name.as_ref().into()), nonce, ..Toy::server() }
    }

    /// Sets the steps that need a permit.
    #[must_use]
    pub fn permits(self, permits: Permits) -> Toy {
        Toy { permits, ..self }
    }

    /// Sets the most bytes of a record.
    #[must_use]
    pub fn record_bytes(self, bytes: usize) -> Toy {
        Toy { record_bytes: bytes.clamp(1, BODY_BYTES_MAX), ..self }
    }

    /// Sets the number of records after which it takes other keys, and requests the same; 0 for
    /// never.
    #[must_use]
    pub fn updates_every(self, records: u64) -> Toy {
        Toy { updates_every: records, ..self }
    }

    /// Counts its channels together with those of others.
    #[must_use]
    pub fn counted(self, alive: &Alive) -> Toy {
        Toy { alive: alive.clone(), ..self }
    }
}

impl Transport for Toy {
    fn begin(&self, out: &mut Vec<u8>) -> Option<Box<dyn TransportConn>> {
        self.alive.0.fetch_add(1, Ordering::Relaxed);
        let mut channel = ToyChannel {
            toy: self.clone(),
            stage: Stage::Hello,
            waits: None,
            reads: Keys::default(),
            writes: Keys::default(),
            kept: Vec::new(),
            records: 0,
            client: 0,
            name: Rc::default(),
            finished: false,
            has_asked: false,
            is_welcome: false,
        };
        if let Some(name) = &self.name {
            (channel.client, channel.stage) = (self.nonce, Stage::Reply);
            channel.writes.seal(Kind::Hello, &[&self.nonce.to_be_bytes(), &name[..]].concat(), out);
        }
        Some(Box::new(channel))
    }
}

/// The facts that the server learned in the handshake. The client, which learns nothing, has them
/// once the server is ready.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// The client's name.
    pub name: Vec<u8>,
}

/// The number of each alert.
const ALERT: u8 = 0;

/// The awaited record, or the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Hello,
    Reply,
    Proof,
    Ready,
    /// The other end sends no more.
    Closed,
    Broken,
}

struct ToyChannel {
    toy: Toy,
    stage: Stage,
    /// A received record that waits for a permit.
    waits: Option<(Kind, Vec<u8>)>,
    reads: Keys,
    writes: Keys,
    /// The start of a record; while a step waits, all received bytes.
    kept: Vec<u8>,
    /// Records sealed with these keys.
    records: u64,
    /// The client's nonce.
    client: u64,
    name: Rc<Facts>,
    finished: bool,
    /// It requested new keys from the peer, and got no answer yet. It makes one request at a time:
    /// a peer that sends much before it reads would be held back by the answers.
    has_asked: bool,
    /// The server is ready too.
    is_welcome: bool,
}

/// The result of a record; `None` if the next one has to be read.
type Step = Result<Option<TransportEvent>, TransportError>;

/// The fault of a peer whose bytes are invalid.
fn broken() -> TransportError {
    TransportError(CloseReason::TlsBadRecord)
}

fn number(bytes: &[u8]) -> Result<u64, TransportError> {
    bytes.get(..8).and_then(|bytes| bytes.try_into().ok()).map(u64::from_be_bytes).ok_or_else(broken)
}

impl ToyChannel {
    fn is_client(&self) -> bool {
        self.toy.name.is_some()
    }

    /// The next record in the clear, if it is complete. An incomplete one is kept.
    fn record(&mut self, wire: &mut LeaseMut) -> Result<Option<(Kind, LeaseMut)>, TransportError> {
        let take = |kept: &mut Vec<u8>, wire: &mut LeaseMut, until: usize| {
            let more = until.saturating_sub(kept.len()).min(wire.len());
            kept.extend_from_slice(&wire.split_to(more));
            kept.len() >= until
        };
        let is_in_wire = self.kept.is_empty();
        let head = match is_in_wire {
            true => wire.first_chunk().copied(),
            false if take(&mut self.kept, wire, HEADER_BYTES) => self.kept.first_chunk().copied(),
            false => None,
        };
        let Some(head) = head else {
            take(&mut self.kept, wire, usize::MAX);
            return Ok(None);
        };
        let header = Header::read(head).ok_or_else(broken)?;
        let end = HEADER_BYTES + header.len;
        let mut body = if is_in_wire && wire.len() >= end {
            wire.split_to(end)
        } else {
            if !take(&mut self.kept, wire, end) {
                return Ok(None);
            }
            let rest = self.kept.split_off(end);
            let record = std::mem::replace(&mut self.kept, rest);
            LeaseMut::try_from_vec(record).ok_or(TransportError(CloseReason::MemoryLimit))?
        };
        body.advance(HEADER_BYTES);
        match self.reads.open(header, &mut body) {
            true => Ok(Some((header.kind, body))),
            false => Err(broken()),
        }
    }

    fn take(&mut self, kind: Kind, body: LeaseMut, out: &mut Vec<u8>) -> Step {
        let needs_permit = match (self.stage, kind) {
            (Stage::Hello, Kind::Hello) => matches!(self.toy.permits, Permits::Hello | Permits::Both),
            (Stage::Proof, Kind::Proof) => matches!(self.toy.permits, Permits::Proof | Permits::Both),
            _ => false,
        };
        if needs_permit {
            self.waits = Some((kind, body.to_vec()));
            return Ok(Some(TransportEvent::Work));
        }
        match kind {
            Kind::Data if self.stage == Stage::Ready && body.is_empty() => Ok(None),
            Kind::Data if self.stage == Stage::Ready => Ok(Some(TransportEvent::Plain(body))),
            kind => self.turn(kind, &body, out),
        }
    }

    /// Handles a record that is not data.
    fn turn(&mut self, kind: Kind, body: &[u8], out: &mut Vec<u8>) -> Step {
        match (self.stage, kind) {
            (Stage::Hello, Kind::Hello) => {
                (self.client, self.name) = (number(body)?, Rc::new(Facts { name: body[8..].to_vec() }));
                self.writes.seal(Kind::Reply, &self.toy.nonce.to_be_bytes(), out);
                self.set_keys(self.toy.nonce);
                self.stage = Stage::Proof;
                Ok(None)
            }
            (Stage::Reply, Kind::Reply) => {
                self.set_keys(number(body)?);
                self.writes.seal(Kind::Proof, &self.client.to_be_bytes(), out);
                self.stage = Stage::Ready;
                Ok(Some(TransportEvent::Ready))
            }
            (Stage::Proof, Kind::Proof) if number(body)? == self.client => {
                self.writes.seal(Kind::Welcome, &[0; 32], out);
                self.stage = Stage::Ready;
                Ok(Some(TransportEvent::Ready))
            }
            (Stage::Ready, Kind::Welcome) if self.is_client() => {
                self.is_welcome = true;
                Ok(None)
            }
            (Stage::Ready, Kind::Update) => {
                (self.reads, self.has_asked) = (self.reads.renewed(), false);
                if body != [0] && !self.finished {
                    self.update(0, out);
                }
                Ok(None)
            }
            (_, Kind::Close) => {
                self.stage = Stage::Closed;
                Ok(Some(TransportEvent::Closed))
            }
            _ => Err(broken()),
        }
    }

    fn set_keys(&mut self, server: u64) {
        let [from_client, from_server] = [true, false].map(|is| Keys::of(self.client, server, is));
        (self.reads, self.writes) = match self.is_client() {
            true => (from_server, from_client),
            false => (from_client, from_server),
        };
    }

    fn update(&mut self, asks: u8, out: &mut Vec<u8>) {
        self.writes.seal(Kind::Update, &[asks], out);
        (self.writes, self.records) = (self.writes.renewed(), 0);
    }

    fn fault(&mut self, fault: TransportError, out: &mut Vec<u8>) -> TransportEvent {
        let is_ready = matches!(self.stage, Stage::Ready | Stage::Closed);
        self.stage = Stage::Broken;
        self.writes.seal(Kind::Alert, &[], out);
        match fault {
            TransportError(CloseReason::TlsBadRecord) if !is_ready => {
                TransportEvent::Fault(TransportError(CloseReason::TlsHandshakeFailed(ALERT)))
            }
            fault => TransportEvent::Fault(fault),
        }
    }
}

impl TransportConn for ToyChannel {
    fn decode(&mut self, wire: &mut LeaseMut, out: &mut Vec<u8>) -> TransportEvent {
        if self.waits.is_some() {
            self.kept.extend_from_slice(&wire.split_to(wire.len()));
            return TransportEvent::Work;
        }
        if matches!(self.stage, Stage::Closed | Stage::Broken) {
            *wire = LeaseMut::empty();
            return TransportEvent::More;
        }
        loop {
            let step = match self.record(wire) {
                // A report of a fault is no reason to report one.
                Ok(Some((Kind::Alert, _))) => {
                    self.stage = Stage::Broken;
                    return TransportEvent::Fault(TransportError(CloseReason::TlsAlertReceived(ALERT)));
                }
                Ok(Some((kind, body))) => self.take(kind, body, out),
                Ok(None) => return TransportEvent::More,
                Err(fault) => Err(fault),
            };
            match step {
                Ok(None) => {}
                Ok(Some(TransportEvent::Work)) => {
                    self.kept.extend_from_slice(&wire.split_to(wire.len()));
                    return TransportEvent::Work;
                }
                Ok(Some(unsealed)) => return unsealed,
                Err(fault) => return self.fault(fault, out),
            }
        }
    }

    fn work(&mut self, out: &mut Vec<u8>) -> TransportEvent {
        let (kind, body) = self.waits.take().expect("a permit that was asked for");
        match self.turn(kind, &body, out) {
            Ok(unsealed) => unsealed.unwrap_or(TransportEvent::More),
            Err(fault) => self.fault(fault, out),
        }
    }

    fn encode(&mut self, plain: &Batch, out: &mut Vec<u8>) -> Result<(), TransportError> {
        assert!(matches!(self.stage, Stage::Ready | Stage::Closed), "data while {:?}", self.stage);
        assert!(!self.finished, "data behind the mark of the end");
        assert!(!plain.is_empty(), "nothing is sealed");
        let bytes: Vec<u8> = plain.pieces().flatten().copied().collect();
        for body in bytes.chunks(self.toy.record_bytes) {
            self.writes.seal(Kind::Data, body, out);
            self.records += 1;
            if self.toy.updates_every > 0 && self.records >= self.toy.updates_every {
                let asks = !std::mem::replace(&mut self.has_asked, true);
                self.update(asks.into(), out);
            }
        }
        Ok(())
    }

    fn finish(&mut self, out: &mut Vec<u8>) {
        assert!(!self.finished, "the end is marked twice");
        assert!(
            matches!(self.stage, Stage::Ready | Stage::Closed),
            "the end is marked while {:?}",
            self.stage
        );
        self.finished = true;
        self.writes.seal(Kind::Close, &[], out);
    }

    fn held_bytes(&self) -> usize {
        self.kept.capacity() + self.waits.as_ref().map_or(0, |(_, body)| body.capacity())
    }

    fn kept_bytes(&self) -> usize {
        self.name.name.len()
    }

    fn is_mid_record(&self) -> bool {
        !self.kept.is_empty()
    }

    fn wants_more(&self) -> bool {
        self.stage == Stage::Ready && self.held_bytes() == 0
    }

    fn info(&self) -> Option<Rc<dyn Any>> {
        let is_known = match self.is_client() {
            true => self.is_welcome,
            false => matches!(self.stage, Stage::Ready | Stage::Closed),
        };
        is_known.then(|| self.name.clone() as Rc<dyn Any>)
    }
}

impl Drop for ToyChannel {
    fn drop(&mut self) {
        self.toy.alive.0.fetch_sub(1, Ordering::Relaxed);
    }
}
