//! The connections of rustls, behind a small interface.
//!
//! rustls keeps no incomplete bytes: they stay with the caller, who shows them again with later ones. It holds decrypted bytes
//! in its own block until they are taken.

use rustls::client::{ClientConnectionData, UnbufferedClientConnection};
use rustls::server::{ServerConnectionData, UnbufferedServerConnection};
use rustls::unbuffered::{
    ConnectionState, EncodeError, EncodeTlsData, EncryptError, InsufficientSizeError, UnbufferedStatus,
    WriteTraffic,
};
use rustls::{CommonState, Error};

/// One end of a connection.
pub(crate) trait Connection: 'static {
    type Data;

    /// The state of the connection.
    fn state(&self) -> &CommonState;

    fn process_tls_records<'c, 'i>(
        &'c mut self,
        incoming: &'i mut [u8],
    ) -> UnbufferedStatus<'c, 'i, Self::Data>;
}

impl Connection for UnbufferedServerConnection {
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

impl Connection for UnbufferedClientConnection {
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

/// The result of showing bytes to rustls.
pub(crate) enum Found {
    /// Plaintext, which [`take_plain`] fetches.
    Plain,
    /// Whole records were taken, without plaintext.
    Nothing,
    /// The peer will send nothing more.
    Closed,
}

/// Shows `bytes` to rustls, which decrypts them in place, up to the first plaintext. Bytes to be sent go to `out`. The first
/// figure is the number of bytes that are done; the rest must be shown again.
pub(crate) fn process<C: Connection>(
    connection: &mut C,
    bytes: &mut [u8],
    out: &mut Vec<u8>,
) -> (usize, Result<Found, Error>) {
    let mut done = 0;
    loop {
        let UnbufferedStatus { discard, state } = connection.process_tls_records(&mut bytes[done..]);
        let found = match state {
            Ok(ConnectionState::EncodeTlsData(message)) => {
                encode(message, out);
                None
            }
            Ok(ConnectionState::TransmitTlsData(sent)) => {
                sent.done();
                None
            }
            Ok(ConnectionState::ReadTraffic(_)) => Some(Ok(Found::Plain)),
            Ok(ConnectionState::PeerClosed | ConnectionState::Closed) => Some(Ok(Found::Closed)),
            Ok(ConnectionState::BlockedHandshake | ConnectionState::WriteTraffic(_)) => {
                Some(Ok(Found::Nothing))
            }
            // Early data is never offered.
            Ok(_) => Some(Err(Error::General("a state of rustls that is not known".into()))),
            Err(error) => Some(Err(error)),
        };
        done += discard;
        if let Some(found) = found {
            return (done, found);
        }
    }
}

/// Calls `take` with the plaintext of one record.
pub(crate) fn take_plain<C: Connection>(connection: &mut C, take: impl FnOnce(&[u8])) {
    if let Ok(ConnectionState::ReadTraffic(mut traffic)) = connection.process_tls_records(&mut []).state
        && let Some(Ok(record)) = traffic.next_record()
    {
        take(record.payload);
    }
}

/// Appends the last messages of rustls: alerts. The connection cannot be used afterwards.
pub(crate) fn last_words<C: Connection>(connection: &mut C, out: &mut Vec<u8>) {
    while connection.state().wants_write() {
        // Messages come before bytes are looked at, and there are none here.
        match connection.process_tls_records(&mut []).state {
            Ok(ConnectionState::EncodeTlsData(message)) => encode(message, out),
            _ => return,
        }
    }
}

/// The most bytes that a record has more than its plaintext, with a message of rustls before it.
const ROOM: usize = 128;

/// Appends `plain`, of at most 16 KiB, as a record. rustls wants to see `kept` again. False if it can seal nothing more.
pub(crate) fn seal<C: Connection>(
    connection: &mut C,
    plain: &[u8],
    kept: &mut [u8],
    out: &mut Vec<u8>,
) -> bool {
    write(connection, kept, out, plain.len(), |traffic, room| traffic.encrypt(plain, room))
}

/// Appends `close_notify`. Does nothing before the end of the handshake.
pub(crate) fn close_notify<C: Connection>(connection: &mut C, kept: &mut [u8], out: &mut Vec<u8>) {
    write(connection, kept, out, 0, |traffic, room| traffic.queue_close_notify(room));
}

/// Appends bytes that `put` writes, with room for `size` and some more. Earlier messages of rustls come first.
fn write<C: Connection>(
    connection: &mut C,
    kept: &mut [u8],
    out: &mut Vec<u8>,
    size: usize,
    mut put: impl FnMut(&mut WriteTraffic<'_, C::Data>, &mut [u8]) -> Result<usize, EncryptError>,
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

/// Appends a message. It is lost if it is not encoded.
fn encode<Data>(mut message: EncodeTlsData<'_, Data>, out: &mut Vec<u8>) {
    if let Err(EncodeError::InsufficientSize(InsufficientSizeError { required_size })) =
        message.encode(&mut [])
    {
        let start = out.len();
        out.resize(start + required_size, 0);
        // It has the room that it asked for.
        let _ = message.encode(&mut out[start..]);
    }
}
