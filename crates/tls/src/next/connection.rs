//! The connections of rustls 0.24, which decrypt records where they lie and write into the caller's bytes.

use rustls::pki_types::UnixTime;
use rustls_next::crypto::Identity;
use rustls_next::crypto::cipher::{OutboundPlain, Payload};
use rustls_next::error::AlertDescription;
use rustls_next::{Connection as OfRustls, Error, HandshakeKind, ServerSide, SliceInput, Tcp};

use super::server::Believing;
use crate::TlsInfo;
use crate::connection::{Connection, Found, Refusal};
use crate::records;

impl Connection for OfRustls<ServerSide, Tcp> {
    type Clients = Believing;

    /// It counts what a cipher adds: 24 bytes at most, with AES-GCM in TLS 1.2.
    const PLAIN_MAX: usize = records::PLAIN_MAX - 24;

    fn is_handshaking(&self) -> bool {
        (**self).is_handshaking()
    }

    fn process(&mut self, bytes: &mut [u8], out: &mut Vec<u8>) -> (usize, Result<Found, Refusal>) {
        let start = bytes.as_ptr().addr();
        let mut elsewhere = None;
        let mut input = SliceInput::new(bytes);
        let mut messages = self.read_tls(&mut input, out);
        let found = match messages.next_payload() {
            Some(Ok(Payload::Borrowed(plain))) => {
                let at = plain.as_ptr().addr() - start;
                Ok(Found::Plain(at..at + plain.len()))
            }
            Some(Ok(plain)) => {
                elsewhere = Some(plain.bytes().to_vec());
                Ok(Found::Plain(0..plain.bytes().len()))
            }
            None => Ok(Found::Nothing),
            Some(Err(error)) => Err(refusal(&error)),
        };
        let closed = messages.state().peer_has_closed();
        let done = input.into_used();
        if let Some(plain) = elsewhere {
            bytes[..plain.len()].copy_from_slice(&plain);
        }
        match found {
            Ok(Found::Nothing) if closed => (done, Ok(Found::Closed)),
            found => (done, found),
        }
    }

    fn seal(&mut self, plain: &[u8], _kept: &mut [u8], out: &mut Vec<u8>) -> bool {
        self.write(OutboundPlain::Single(plain), out).is_ok()
    }

    fn close_notify(&mut self, _kept: &mut [u8], out: &mut Vec<u8>) {
        if !Connection::is_handshaking(self) {
            // Where nothing more can be sealed, nothing is said.
            let _ = self.send_close_notify(out);
        }
    }

    /// They were said with the refusal.
    fn last_words(&mut self, _out: &mut Vec<u8>) {}

    fn verify_again(&self, clients: &Believing) -> Result<(), Refusal> {
        if is_resumed(self)
            && let Some(identity) = self.peer_identity()
            && let Identity::X509(chain) = identity.identity()
        {
            clients.verify_again(chain, UnixTime::now()).map_err(|alert| Refusal::Said(alert.into()))?;
        }
        Ok(())
    }

    fn info(&self) -> Option<TlsInfo> {
        let identity = self.peer_identity().and_then(|identity| match identity.identity() {
            Identity::X509(chain) => {
                Some([&chain.end_entity].into_iter().chain(&chain.intermediates).cloned().collect())
            }
            _ => None,
        });
        Some(TlsInfo {
            version: u16::from(self.protocol_version()?).into(),
            cipher_suite: u16::from(self.negotiated_cipher_suite()?.suite()).into(),
            alpn: self.alpn_protocol().map(|name| name.as_ref().into()),
            server_name: None,
            resumed: is_resumed(self),
            identity: identity.map(crate::info::Identity),
        })
    }
}

fn is_resumed(connection: &OfRustls<ServerSide, Tcp>) -> bool {
    use HandshakeKind::{Resumed, ResumedWithHelloRetryRequest};
    matches!(connection.handshake_kind(), Some(Resumed | ResumedWithHelloRetryRequest))
}

fn refusal(error: &Error) -> Refusal {
    match error {
        Error::AlertReceived(alert) => Refusal::Heard((*alert).into()),
        error => {
            Refusal::Said(AlertDescription::try_from(error).unwrap_or(AlertDescription::InternalError).into())
        }
    }
}
