//! The channel's interface to a connection of rustls, of whichever version.
//!
//! rustls keeps no incomplete bytes: they stay with the caller, who shows them again together with
//! those that follow.

use std::ops::Range;

use crate::TlsInfo;

/// One end of a connection.
pub(crate) trait Connection: 'static {
    /// The verifier of clients.
    type Clients: ?Sized;

    /// The most bytes of plaintext that it puts into one record.
    const PLAIN_MAX: usize;

    fn is_handshaking(&self) -> bool;

    /// Shows `bytes` to rustls, which decrypts them in place, up to the first plaintext. Bytes to
    /// be sent go to `out`. The first figure is how many bytes were processed; the rest must be
    /// shown again.
    fn process(&mut self, bytes: &mut [u8], out: &mut Vec<u8>) -> (usize, Result<Found, Refusal>);

    /// Appends `plain`, of [`PLAIN_MAX`](Connection::PLAIN_MAX) bytes at most, as a record. `kept`
    /// are the bytes that rustls needs to see again. False if it can seal nothing more.
    fn seal(&mut self, plain: &[u8], kept: &mut [u8], out: &mut Vec<u8>) -> bool;

    /// Appends `close_notify`, unless the handshake is incomplete.
    fn close_notify(&mut self, kept: &mut [u8], out: &mut Vec<u8>);

    /// Appends the final alerts of rustls. The connection cannot be used afterwards.
    fn last_words(&mut self, out: &mut Vec<u8>);

    /// Verifies a client that resumed a session: rustls takes its certificates from the ticket as
    /// they are.
    fn verify_again(&self, clients: &Self::Clients) -> Result<(), Refusal>;

    /// The results of the handshake, once it is complete. Without the name that the client asked
    /// for, if rustls does not report it.
    fn info(&self) -> Option<TlsInfo>;
}

/// The result of showing bytes to rustls.
pub(crate) enum Found {
    /// Plaintext at this range of the bytes. Earlier bytes were processed.
    Plain(Range<usize>),
    /// All whole records were processed, and yielded nothing.
    Nothing,
    /// The peer sends nothing more.
    Closed,
}

/// The reason why rustls cannot continue.
pub(crate) enum Refusal {
    /// The peer sent this alert.
    Heard(u8),
    /// The peer's bytes are refused, with this alert.
    Said(u8),
}
