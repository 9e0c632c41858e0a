//! Where compression hooks in.

use core::fmt;

use crate::close;
use crate::frame::Violation;

/// What changes the payloads of messages for connections that negotiated it, as permessage-deflate (RFC 7692) does. One value a
/// shard, which keeps nothing of a connection: each message is compressed by itself.
pub trait Extension: 'static {
    /// Looks at what a client offers: the list in its `Sec-WebSocket-Extensions`, with commas between the offers, the preferred
    /// one first. The answer is the value of that header in the response; `None` if the connection goes without.
    fn negotiate(&self, offers: &str) -> Option<String>;

    /// Appends to `out` what the payload of a compressed message says, at most `bytes_max` bytes. What it appends before it fails
    /// is thrown away.
    ///
    /// # Errors
    /// A payload that is none, or says more than `bytes_max` bytes; and where the system has no memory.
    fn inflate(&mut self, payload: &[u8], bytes_max: usize, out: &mut Vec<u8>) -> Result<(), InflateError>;

    /// A payload compressed, without what RFC 7692 has left out at its end. `None` if it is to leave as it is, since it is small
    /// or gains nothing.
    fn compress(&mut self, payload: &[u8]) -> Option<&[u8]>;
}

/// Why a compressed message cannot be read.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum InflateError {
    /// The payload is no compressed one.
    Malformed,
    /// It says more than a message may.
    TooLarge,
    /// The system has no memory.
    NoMemory,
}

impl InflateError {
    /// What the peer did, if it did that.
    pub fn violation(self) -> Option<Violation> {
        match self {
            InflateError::Malformed => Some(Violation {
                code: close::INVALID_DATA,
                what: "a message that is not compressed as it says",
            }),
            InflateError::TooLarge => Some(TOO_LARGE),
            InflateError::NoMemory => None,
        }
    }
}

/// The longest compressed form of a message of at most `bytes` bytes: a compressor that finds nothing, and writes each byte by the
/// fixed codes of deflate, makes an eighth more of them, and a little for its blocks. A longer one wastes on purpose.
pub(crate) fn compressed_max(bytes: usize) -> usize {
    bytes + bytes / 8 + bytes / 128 + 64
}

/// What a message is that says more than `message_bytes_max`.
pub(crate) const TOO_LARGE: Violation =
    Violation { code: close::TOO_LARGE, what: "a message of more than message_bytes_max" };

impl fmt::Display for InflateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            InflateError::Malformed => "it is not compressed as it says",
            InflateError::TooLarge => "it says more than a message may",
            InflateError::NoMemory => "the system has no memory for it",
        })
    }
}

ringserve_buf::debug_is_display!(InflateError);

impl std::error::Error for InflateError {}
