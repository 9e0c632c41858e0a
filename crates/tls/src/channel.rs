//! One connection of TLS: ciphertext in, plaintext out, and back.
//!
//! ```text
//!   Handshake ── work: rustls is done ──▶ Open ── close_notify ──▶ Closed
//!       └───────────────────────┴── what rustls refuses ─────────▶ Failed
//! ```

use std::any::Any;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use ringserve_buf::LeaseMut;
use ringserve_core::{Batch, Channel, CloseReason, Fault, Unsealed};
use rustls::pki_types::UnixTime;
use rustls::server::danger::ClientCertVerifier;
use rustls::{AlertDescription, CommonState, Error, HandshakeKind};

use crate::TlsInfo;
use crate::connection::{self, Connection, Found};
use crate::records::{self, Extent, Scan};

/// The most bytes of an unfinished handshake. rustls takes messages of at most 64 KiB.
const HANDSHAKE_BYTES_MAX: usize = 64 * 1024;

/// The most bytes of unfinished messages behind the handshake: tickets and new keys, which take one record.
const KEPT_BYTES_MAX: usize = 32 * 1024;

/// State that the channels of a shard share.
pub(crate) struct Common {
    /// The buffer in which the pieces of a record are gathered.
    gathered: RefCell<Vec<u8>>,
    /// Treats a connection that ends without `close_notify` as cut off.
    pub(crate) require_close_notify: bool,
    /// Verifies certificates of clients, again when they resume a session.
    clients: Option<Arc<dyn ClientCertVerifier>>,
}

impl Common {
    pub(crate) fn new(require_close_notify: bool, clients: Option<Arc<dyn ClientCertVerifier>>) -> Common {
        Common { gathered: RefCell::default(), require_close_notify, clients }
    }

    /// Verifies a client that resumed a session: rustls takes its certificates from the ticket as they are.
    fn verify_again(&self, state: &CommonState) -> Result<(), Error> {
        if let Some(clients) = &self.clients
            && state.handshake_kind() == Some(HandshakeKind::Resumed)
            && let Some([first, others @ ..]) = state.peer_certificates()
        {
            clients.verify_client_cert(first, others, UnixTime::now())?;
        }
        Ok(())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// `encrypted` once bytes that look like a message may be encrypted.
    Handshake {
        encrypted: bool,
    },
    Open,
    /// The peer announced its end.
    Closed,
    Failed,
}

/// A connection of TLS, of either end.
pub(crate) struct TlsChannel<C> {
    connection: C,
    common: Rc<Common>,
    phase: Phase,
    /// Received bytes that are not done: `kept` bytes that rustls has seen and wants to see again, then unseen ones. It has no
    /// memory if all records arrived whole.
    held: Vec<u8>,
    kept: usize,
    /// The progress through a handshake message, behind the `kept` bytes.
    scan: Scan,
    /// Plaintext that arrived with the last step of the handshake.
    early: Vec<u8>,
    /// The name that the client asked for, which rustls does not return for an unbuffered connection.
    server_name: Option<Rc<str>>,
    /// The last message sent was an alert or `close_notify`.
    finished: bool,
}

impl<C: Connection> TlsChannel<C> {
    /// Makes a channel. `out` gets the first bytes of a client.
    pub(crate) fn new(connection: C, common: Rc<Common>, out: &mut Vec<u8>) -> TlsChannel<C> {
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
        };
        // A server sends nothing yet, and a client cannot fail before the next step.
        let _ = connection::process(&mut channel.connection, &mut [], out);
        channel
    }

    /// Keeps all of `wire`, and says whether there is a step to do.
    fn gather(&mut self, wire: &mut LeaseMut, encrypted: bool, out: &mut Vec<u8>) -> Unsealed {
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
            // The peer may send bytes right behind its last flight. The shard stops receiving if many bytes wait for the step.
            return Unsealed::Work;
        }
        if self.held.len() > HANDSHAKE_BYTES_MAX {
            return self.fail(CloseReason::TlsHandshakeFailed(AlertDescription::InternalError.into()), out);
        }
        Unsealed::More
    }

    /// Shows all held bytes to rustls.
    fn step(&mut self, out: &mut Vec<u8>) -> Unsealed {
        let Phase::Handshake { encrypted } = self.phase else {
            return self.open(&mut LeaseMut::default(), out);
        };
        if self.server_name.is_none() && !encrypted {
            self.server_name = records::server_name(&self.held).map(Into::into);
        }
        let encrypted = encrypted || records::changes_cipher(&self.held[self.kept..]);
        self.phase = Phase::Handshake { encrypted };
        let seen = self.kept + records::whole_bytes(&self.held[self.kept..]);
        let (done, found) = connection::process(&mut self.connection, &mut self.held, out);
        self.discard(done, seen);
        let is_closed = matches!(found, Ok(Found::Closed));
        match found {
            Ok(Found::Plain) => {
                // Behind the handshake only one record was looked at, and rustls wants to see the kept bytes again as a whole.
                self.kept = 0;
                let early = &mut self.early;
                connection::take_plain(&mut self.connection, |plain| early.extend_from_slice(plain));
            }
            Ok(Found::Nothing | Found::Closed) => {}
            Err(error) => return self.refused(error, out),
        }
        if self.connection.state().is_handshaking() {
            return if is_closed { self.closed() } else { Unsealed::More };
        }
        if let Err(error) = self.common.verify_again(self.connection.state()) {
            // The unbuffered connections of rustls send no alert for their user.
            self.finish(out);
            return self.refused(error, out);
        }
        self.phase = Phase::Open;
        if is_closed {
            // The service is told of the end after its beginning: by the next `open`.
            self.closed();
        }
        Unsealed::Ready
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
    fn open_record(&mut self, wire: &mut LeaseMut, out: &mut Vec<u8>) -> Unsealed {
        loop {
            if self.held.is_empty() {
                let record = match records::extent(wire) {
                    Extent::Record(size) if size <= wire.len() => wire.split_to(size),
                    Extent::Broken => std::mem::take(wire),
                    _ if wire.is_empty() => return Unsealed::More,
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
                return Unsealed::More;
            }
            if !self.hold(wire) {
                return self.fail(CloseReason::MemoryLimit, out);
            }
        }
    }

    /// Moves bytes of `wire` to the held ones, up to the end of the first record. Memory follows the bytes: it doubles, up to
    /// the size of the record. False if the system has none.
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

    /// Decrypts `record` in place. `None` if it gave nothing.
    fn decrypt(&mut self, mut record: LeaseMut, out: &mut Vec<u8>) -> Option<Unsealed> {
        let (done, found) = connection::process(&mut self.connection, &mut record, out);
        match found {
            Ok(Found::Plain) => Some(self.plain_in(record)),
            Ok(Found::Nothing) => {
                // The start of a message, to be shown again in front of its other records.
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
            Err(error) => Some(self.refused(error, out)),
        }
    }

    /// The plaintext of rustls, in the place of its record.
    fn plain_in(&mut self, mut record: LeaseMut) -> Unsealed {
        let mut size = 0;
        connection::take_plain(&mut self.connection, |plain| {
            size = plain.len();
            record[..size].copy_from_slice(plain);
        });
        record.truncate(size);
        Unsealed::Plain(record)
    }

    /// Decrypts the first held record that was not seen.
    fn decrypt_held(&mut self, out: &mut Vec<u8>) -> Option<Unsealed> {
        let first = match records::extent(&self.held[self.kept..]) {
            Extent::Record(size) => self.kept + size,
            _ => self.held.len(),
        };
        let (done, found) = connection::process(&mut self.connection, &mut self.held[..first], out);
        match found {
            Ok(Found::Plain) if first == self.held.len() => {
                self.kept = 0;
                let block = std::mem::take(&mut self.held);
                match LeaseMut::try_from_vec(block) {
                    Some(record) => Some(self.plain_in(record)),
                    None => Some(self.fail(CloseReason::MemoryLimit, out)),
                }
            }
            // Only behind a handshake whose bytes arrived with more than one record.
            Ok(Found::Plain) => {
                let record = LeaseMut::try_copy_of(&self.held[..first]);
                self.discard(first, first);
                match record {
                    Some(record) => Some(self.plain_in(record)),
                    None => Some(self.fail(CloseReason::MemoryLimit, out)),
                }
            }
            Ok(Found::Nothing) => {
                self.discard(done, first);
                self.kept_too_much(out)
            }
            Ok(Found::Closed) => Some(self.closed()),
            Err(error) => Some(self.refused(error, out)),
        }
    }

    /// A fault, if a message has more records than any useful one.
    fn kept_too_much(&mut self, out: &mut Vec<u8>) -> Option<Unsealed> {
        (self.kept > KEPT_BYTES_MAX).then(|| self.fail(CloseReason::TlsBadRecord, out))
    }

    fn closed(&mut self) -> Unsealed {
        self.phase = Phase::Closed;
        self.forget();
        Unsealed::Closed
    }

    fn refused(&mut self, error: Error, out: &mut Vec<u8>) -> Unsealed {
        let handshaking = matches!(self.phase, Phase::Handshake { .. });
        connection::last_words(&mut self.connection, out);
        let reason = match &error {
            Error::AlertReceived(alert) => CloseReason::TlsAlertReceived((*alert).into()),
            _ if !handshaking => CloseReason::TlsBadRecord,
            error => CloseReason::TlsHandshakeFailed(
                records::plain_alert(out).unwrap_or_else(|| alert_of(error).into()),
            ),
        };
        self.fail(reason, out)
    }

    /// Ends the channel: nothing more comes of this connection. Alerts were sent before.
    fn fail(&mut self, reason: CloseReason, out: &mut Vec<u8>) -> Unsealed {
        if !self.finished {
            connection::last_words(&mut self.connection, out);
        }
        self.phase = Phase::Failed;
        self.finished = true;
        self.forget();
        Unsealed::Fault(Fault(reason))
    }

    fn forget(&mut self) {
        (self.held, self.kept, self.early) = (Vec::new(), 0, Vec::new());
    }

    /// Seals `plain`, in records of at most 16 KiB.
    fn seal_piece(&mut self, plain: &[u8], out: &mut Vec<u8>) -> bool {
        let kept = &mut self.held[..self.kept];
        plain.chunks(records::PLAIN_MAX).all(|part| connection::seal(&mut self.connection, part, kept, out))
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
                // Whole records of a large piece are sealed without gathering.
                if gathered.is_empty() && piece.len() >= records::PLAIN_MAX {
                    let (whole, rest) = piece.split_at(piece.len() - piece.len() % records::PLAIN_MAX);
                    piece = rest;
                    if !self.seal_piece(whole, out) {
                        return false;
                    }
                    continue;
                }
                let (taken, rest) = piece.split_at(piece.len().min(records::PLAIN_MAX - gathered.len()));
                gathered.extend_from_slice(taken);
                piece = rest;
                if gathered.len() == records::PLAIN_MAX {
                    if !self.seal_piece(gathered, out) {
                        return false;
                    }
                    gathered.clear();
                }
            }
        }
        gathered.is_empty() || self.seal_piece(gathered, out)
    }
}

impl<C: Connection> Channel for TlsChannel<C> {
    fn open(&mut self, wire: &mut LeaseMut, out: &mut Vec<u8>) -> Unsealed {
        match self.phase {
            Phase::Handshake { encrypted } => self.gather(wire, encrypted, out),
            Phase::Open if !self.early.is_empty() => {
                match LeaseMut::try_from_vec(std::mem::take(&mut self.early)) {
                    Some(plain) => Unsealed::Plain(plain),
                    None => self.fail(CloseReason::MemoryLimit, out),
                }
            }
            Phase::Open => self.open_record(wire, out),
            Phase::Closed => Unsealed::Closed,
            Phase::Failed => {
                wire.advance(wire.len());
                Unsealed::More
            }
        }
    }

    fn work(&mut self, out: &mut Vec<u8>) -> Unsealed {
        self.step(out)
    }

    fn seal(&mut self, plain: &Batch, out: &mut Vec<u8>) -> Result<(), Fault> {
        // A record is at most 128 bytes larger than its plaintext.
        let records = plain.len().div_ceil(records::PLAIN_MAX);
        if out.try_reserve(plain.len() + 128 * records).is_err() {
            return Err(Fault(CloseReason::MemoryLimit));
        }
        match plain.is_empty() || (self.phase != Phase::Failed && self.seal_all(plain, out)) {
            true => Ok(()),
            false => {
                connection::last_words(&mut self.connection, out);
                Err(Fault(CloseReason::TlsBadRecord))
            }
        }
    }

    fn finish(&mut self, out: &mut Vec<u8>) {
        if !self.finished {
            self.finished = true;
            connection::close_notify(&mut self.connection, &mut self.held[..self.kept], out);
        }
    }

    fn held_bytes(&self) -> usize {
        self.held.capacity() + self.early.capacity()
    }

    fn is_mid_record(&self) -> bool {
        !self.held.is_empty()
    }

    fn cut_off(&self) -> Option<CloseReason> {
        (self.common.require_close_notify && self.phase == Phase::Open).then_some(CloseReason::TlsTruncated)
    }

    fn facts(&self) -> Option<Rc<dyn Any>> {
        TlsInfo::of(self.connection.state(), self.server_name.clone())
            .map(|info| Rc::new(info) as Rc<dyn Any>)
    }
}

/// The alert that rustls sends for an error, if it was encrypted.
fn alert_of(error: &Error) -> AlertDescription {
    match error {
        Error::InvalidCertificate(error) => error.clone().into(),
        Error::InvalidMessage(error) => (*error).into(),
        Error::NoCertificatesPresented => AlertDescription::CertificateRequired,
        Error::DecryptError => AlertDescription::BadRecordMac,
        Error::PeerSentOversizedRecord => AlertDescription::RecordOverflow,
        Error::NoApplicationProtocol => AlertDescription::NoApplicationProtocol,
        Error::InappropriateMessage { .. } | Error::InappropriateHandshakeMessage { .. } => {
            AlertDescription::UnexpectedMessage
        }
        Error::PeerIncompatible(_) => AlertDescription::HandshakeFailure,
        Error::PeerMisbehaved(_) => AlertDescription::IllegalParameter,
        _ => AlertDescription::InternalError,
    }
}
