//! What a channel asks of a connection of rustls, of whichever version.
//!
//! rustls keeps no bytes that are not whole: they stay with the caller, who shows them again with those that follow.

use std::ops::Range;

use crate::TlsInfo;

/// One end of a connection.
pub(crate) trait Connection: 'static {
    /// What decides about clients.
    type Clients: ?Sized;

    /// The most bytes of plaintext that it puts into one record.
    const PLAIN_MAX: usize;

    fn is_handshaking(&self) -> bool;

    /// Shows `bytes` to rustls, which decrypts them where they lie, up to the first plaintext. What is to be sent goes to `out`. The
    /// first figure is how many bytes are done with; the rest must be shown again.
    fn process(&mut self, bytes: &mut [u8], out: &mut Vec<u8>) -> (usize, Result<Found, Refusal>);

    /// Appends `plain`, of [`PLAIN_MAX`](Connection::PLAIN_MAX) bytes at most, as a record. `kept` is what rustls wants to see again. False if it can seal nothing more.
    fn seal(&mut self, plain: &[u8], kept: &mut [u8], out: &mut Vec<u8>) -> bool;

    /// Appends `close_notify`. Nothing, where the handshake is not through.
    fn close_notify(&mut self, kept: &mut [u8], out: &mut Vec<u8>);

    /// Appends the alerts that rustls has to say last. Nothing can be done with the connection then.
    fn last_words(&mut self, out: &mut Vec<u8>);

    /// Verifies a client that resumed a session: rustls takes its certificates from the ticket as they are.
    fn verify_again(&self, clients: &Self::Clients) -> Result<(), Refusal>;

    /// What the handshake found out, once it is through. Without the name that the client asked for, where rustls does not tell it.
    fn info(&self) -> Option<TlsInfo>;
}

/// The result of showing bytes to rustls.
pub(crate) enum Found {
    /// Plaintext, which lies there in the bytes. What comes before is done with.
    Plain(Range<usize>),
    /// All that is whole was taken, and nothing came of it.
    Nothing,
    /// The peer will send nothing more.
    Closed,
}

/// Why rustls goes no further.
pub(crate) enum Refusal {
    /// The peer sent this alert.
    Heard(u8),
    /// What the peer sent is refused, by this alert.
    Said(u8),
}
