//! The interface of compression.

use core::fmt;

use crate::close;
use crate::frame::Violation;

/// Transforms the payloads of messages on connections that negotiated it, as permessage-deflate
/// (RFC 7692) does. One value per shard, which keeps no state of a connection: each message is
/// compressed by itself.
pub trait Extension: 'static {
    /// Reads a client's offers: the list in its `Sec-WebSocket-Extensions`, with commas between the
    /// offers, the preferred one first. Returns the value of that header in the response; `None` if
    /// the connection does without.
    fn negotiate(&self, offers: &str) -> Option<String>;

    /// Appends the inflated payload of a compressed message to `out`, at most `bytes_max` bytes.
    /// After a failure the appended bytes are discarded.
    ///
    /// # Errors
    /// A payload that is not compressed data, or inflates to more than `bytes_max` bytes; and lack
    /// of memory.
    fn inflate(&mut self, payload: &[u8], bytes_max: usize, out: &mut Vec<u8>) -> Result<(), InflateError>;

    /// Compresses a payload, without the end that RFC 7692 leaves out. `None` to send it
    /// uncompressed, since it is small or does not shrink.
    fn compress(&mut self, payload: &[u8]) -> Option<&[u8]>;
}

/// The reason why a compressed message cannot be read.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum InflateError {
    /// The payload is not compressed data.
    Malformed,
    /// The message is larger than allowed.
    TooLarge,
    /// The system has no memory.
    NoMemory,
}

impl InflateError {
    /// The peer's violation, if it is one.
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

/// The longest compressed form of a message of at most `bytes` bytes: a compressor that finds no
/// repetition, and writes each byte by the fixed codes of deflate, adds an eighth, and a little for
/// its blocks. A longer form wastes bytes on purpose.
pub(crate) fn compressed_max(bytes: usize) -> usize {
    bytes + bytes / 8 + bytes / 128 + 64
}

/// The violation of a message that inflates to more than `message_bytes_max`.
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
