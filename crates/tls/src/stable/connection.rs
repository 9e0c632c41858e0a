//! The unbuffered connections of rustls. They hold decrypted bytes in their own block until
//! those are taken.

use rustls::client::{ClientConnectionData, UnbufferedClientConnection};
use rustls::pki_types::UnixTime;
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{ServerConnectionData, UnbufferedServerConnection};
use rustls::unbuffered::{
    ConnectionState, EncodeError, EncodeTlsData, EncryptError, InsufficientSizeError, UnbufferedStatus,
    WriteTraffic,
};
use rustls::{AlertDescription, CommonState, Error, HandshakeKind};

use crate::TlsInfo;
use crate::connection::{Connection, Found, Refusal};
use crate::info::Identity;
use crate::records;

/// The common interface of both ends.
pub(crate) trait UnbufferedConn: 'static {
    type Data;

    /// The state that rustls reports.
    fn state(&self) -> &CommonState;

    fn process_tls_records<'c, 'i>(
        &'c mut self,
        incoming: &'i mut [u8],
    ) -> UnbufferedStatus<'c, 'i, Self::Data>;
}

impl UnbufferedConn for UnbufferedServerConnection {
    type Data = ServerConnectionData;

    fn state(&self) -> &CommonState {
        self
    }

    fn process_tls_records<'c, 'i>(
        &'c mut self,
        incoming: &'i mut [u8],
    ) -> UnbufferedStatus<'c, 'i, ServerConnectionData> {
        (**self).process_tls_records(incoming)
    }
}

impl UnbufferedConn for UnbufferedClientConnection {
    type Data = ClientConnectionData;

    fn state(&self) -> &CommonState {
        self
    }

    fn process_tls_records<'c, 'i>(
        &'c mut self,
        incoming: &'i mut [u8],
    ) -> UnbufferedStatus<'c, 'i, ClientConnectionData> {
        (**self).process_tls_records(incoming)
    }
}

impl<U: UnbufferedConn> Connection for U {
    type Clients = dyn ClientCertVerifier;

    const PLAIN_MAX: usize = records::PLAIN_MAX;

    fn is_handshaking(&self) -> bool {
        self.state().is_handshaking()
    }

    fn process(&mut self, bytes: &mut [u8], out: &mut Vec<u8>) -> (usize, Result<Found, Refusal>) {
        let mut done = 0;
        loop {
            let UnbufferedStatus { discard, state } = self.process_tls_records(&mut bytes[done..]);
            let found = match state {
                Ok(ConnectionState::EncodeTlsData(message)) => {
                    encode(message, out);
                    None
                }
                Ok(ConnectionState::TransmitTlsData(sent)) => {
                    sent.done();
                    None
                }
                Ok(ConnectionState::ReadTraffic(_)) => Some(Ok(Found::Plain(0..0))),
                Ok(ConnectionState::PeerClosed | ConnectionState::Closed) => Some(Ok(Found::Closed)),
                Ok(ConnectionState::BlockedHandshake | ConnectionState::WriteTraffic(_)) => {
                    Some(Ok(Found::Nothing))
                }
                // Early data is never offered.
                Ok(_) => Some(Err(Refusal::Said(AlertDescription::InternalError.into()))),
                Err(error) => Some(Err(refusal(error))),
            };
            done += discard;
            match found {
                Some(Ok(Found::Plain(_))) => return (done, Ok(Found::Plain(take_plain(self, bytes)))),
                Some(found) => return (done, found),
                None => {}
            }
        }
    }

    fn seal(&mut self, plain: &[u8], kept: &mut [u8], out: &mut Vec<u8>) -> bool {
        write(self, kept, out, plain.len(), |traffic, room| traffic.encrypt(plain, room))
    }

    fn close_notify(&mut self, kept: &mut [u8], out: &mut Vec<u8>) {
        write(self, kept, out, 0, |traffic, room| traffic.queue_close_notify(room));
    }

    fn last_words(&mut self, out: &mut Vec<u8>) {
        while self.state().wants_write() {
            // Messages come before received bytes are read, and there are none here.
            match self.process_tls_records(&mut []).state {
                Ok(ConnectionState::EncodeTlsData(message)) => encode(message, out),
                _ => return,
            }
        }
    }

    fn verify_again(&self, clients: &dyn ClientCertVerifier) -> Result<(), Refusal> {
        let state = self.state();
        if state.handshake_kind() == Some(HandshakeKind::Resumed)
            && let Some([first, others @ ..]) = state.peer_certificates()
        {
            clients.verify_client_cert(first, others, UnixTime::now()).map_err(refusal)?;
        }
        Ok(())
    }

    fn info(&self) -> Option<TlsInfo> {
        let state = self.state();
        Some(TlsInfo {
            version: state.protocol_version()?,
            cipher_suite: state.negotiated_cipher_suite()?.suite(),
            alpn: state.alpn_protocol().map(Into::into),
            server_name: None,
            resumed: state.handshake_kind() == Some(HandshakeKind::Resumed),
            identity: state.peer_certificates().map(|chain| Identity(chain.into())),
        })
    }
}

/// Moves the plaintext of one record, which rustls holds, to the front of `bytes`, from which it
/// came.
fn take_plain<U: UnbufferedConn>(connection: &mut U, bytes: &mut [u8]) -> std::ops::Range<usize> {
    if let Ok(ConnectionState::ReadTraffic(mut traffic)) = connection.process_tls_records(&mut []).state
        && let Some(Ok(record)) = traffic.next_record()
    {
        bytes[..record.payload.len()].copy_from_slice(record.payload);
        return 0..record.payload.len();
    }
    0..0
}

/// Bytes that a record may have in addition to its plaintext, and a message of rustls' before it.
const ROOM: usize = 128;

/// Appends the output of `put`, which needs `size` bytes and some more. Pending messages of rustls
/// come first.
fn write<U: UnbufferedConn>(
    connection: &mut U,
    kept: &mut [u8],
    out: &mut Vec<u8>,
    size: usize,
    mut put: impl FnMut(&mut WriteTraffic<'_, U::Data>, &mut [u8]) -> Result<usize, EncryptError>,
) -> bool {
    loop {
        match connection.process_tls_records(kept).state {
            Ok(ConnectionState::WriteTraffic(mut traffic)) => {
                let start = out.len();
                out.resize(start + size + ROOM, 0);
                let mut written = put(&mut traffic, &mut out[start..]);
                if let Err(EncryptError::InsufficientSize(InsufficientSizeError { required_size })) = written
                {
                    out.resize(start + required_size, 0);
                    written = put(&mut traffic, &mut out[start..]);
                }
                out.truncate(start + *written.as_ref().unwrap_or(&0));
                return written.is_ok();
            }
            Ok(ConnectionState::EncodeTlsData(message)) => encode(message, out),
            Ok(ConnectionState::TransmitTlsData(sent)) => sent.done(),
            _ => return false,
        }
    }
}

/// Appends a message, which is lost unless it is encoded.
fn encode<Data>(mut message: EncodeTlsData<'_, Data>, out: &mut Vec<u8>) {
    if let Err(EncodeError::InsufficientSize(InsufficientSizeError { required_size })) =
        message.encode(&mut [])
    {
        let start = out.len();
        out.resize(start + required_size, 0);
        // The message has the room that it asked for.
        let _ = message.encode(&mut out[start..]);
    }
}

/// The refusal with the alert that rustls sends because of an error.
fn refusal(error: Error) -> Refusal {
    let alert = match &error {
        Error::AlertReceived(alert) => return Refusal::Heard((*alert).into()),
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
    };
    Refusal::Said(alert.into())
}
