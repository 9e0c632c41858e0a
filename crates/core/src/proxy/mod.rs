//! The header of the PROXY protocol, in which a proxy names its client: the line of version 1 and
//! the block of version 2.
//!
//! ```text
//!   PROXY TCP4 192.0.2.1 198.51.100.7 56324 443\r\n
//!
//!   ├─ signature, 12 ─┼─ 0x21 ─┼─ 0x11 ─┼─ length, 2 ─┼─ addresses, 12, 36 or 216 ─┼─ type, length, value ─┼─ .. ─┤
//!                     version   family                 └───────────────── length ───────────────────────────────┘
//!                     command   transport
//! ```
//!
//! Nothing is guessed: bytes that deviate from a header are refused as soon as a byte shows it.
// May use: driver, tables.
// Begin with: `read`.

mod kept;
mod tlvs;
mod v1;
mod v2;
mod write;

#[cfg(test)]
mod tests;

use core::fmt;
use core::net::SocketAddr;
use core::ops::Range;

pub(crate) use kept::Headers;
pub use kept::ProxyFacts;
pub use tlvs::{ProxiedSsl, Tlvs};
pub use write::{CommandV2, write_v1, write_v2};

/// The longest line of version 1, with its end.
const LINE_MAX: usize = 107;

/// The start of all lines of version 1.
const LINE_BEGIN: &[u8] = b"PROXY ";

/// The start of all blocks of version 2.
const SIGNATURE: &[u8; 12] = b"\r\n\r\n\0\r\nQUIT\n";

/// Both ends of the connection that a proxy accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ends {
    /// The client.
    pub source: SocketAddr,
    /// The address that the client connected to.
    pub destination: SocketAddr,
}

/// A header that was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Bytes of the header. Bytes after them belong to the connection.
    pub len: usize,
    /// `None` if the proxy speaks for itself, as in a health check, or for a client without an IP
    /// address.
    pub ends: Option<Ends>,
    /// The place of the further fields of version 2.
    pub tlvs: Range<usize>,
}

/// The reason why bytes are not a PROXY header. The connection is closed with
/// [`CloseReason::ProxyBadHeader`](crate::CloseReason::ProxyBadHeader), which carries it.
#[derive(Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum HeaderError {
    /// The connection does not begin with a header: its peer is not a proxy, or is one that is not
    /// set to send it.
    NotProxy,
    /// The header is, or claims to be, larger than allowed: 107 bytes in version 1, in version 2
    /// [`ProxyProtocol::header_bytes_max`].
    ///
    /// [`ProxyProtocol::header_bytes_max`]: https://docs.rs/ringserve/latest/ringserve/listen/struct.ProxyProtocol.html
    TooLarge {
        /// Bytes of the header so far, or the number that it claims.
        bytes: u32,
        /// The limit.
        max: u32,
    },
    /// The header breaks this rule of the protocol. Held as a reference to the text, since each
    /// connection keeps room for a reason.
    Malformed(&'static &'static str),
    /// The header does not match its checksum.
    Checksum,
    /// The proxy sent FIN in the middle of the header.
    Unfinished,
}

impl HeaderError {
    fn too_large(bytes: usize, max: usize) -> HeaderError {
        let bounded = |bytes| u32::try_from(bytes).unwrap_or(u32::MAX);
        HeaderError::TooLarge { bytes: bounded(bytes), max: bounded(max) }
    }
}

impl fmt::Display for HeaderError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            HeaderError::NotProxy => f.write_str("the first bytes are no PROXY header"),
            HeaderError::TooLarge { bytes, max } => {
                write!(f, "a PROXY header of {bytes} bytes or more; at most {max} are allowed")
            }
            HeaderError::Malformed(what) => f.write_str(what),
            HeaderError::Checksum => f.write_str("the checksum of the PROXY header is wrong"),
            HeaderError::Unfinished => f.write_str("the connection ended in the middle of the PROXY header"),
        }
    }
}

ringserve_buf::debug_is_display!(HeaderError);

impl core::error::Error for HeaderError {}

/// Reads the header at the start of a connection, from all bytes received so far. `None` if it is
/// not whole yet. `bytes_max` bounds a header of version 2.
///
/// # Errors
/// If no further byte can make it a header.
pub fn read(bytes: &[u8], bytes_max: usize) -> Result<Option<Header>, HeaderError> {
    match bytes.first() {
        None => Ok(None),
        Some(b'P') => v1::read(bytes),
        Some(_) => v2::read(bytes, bytes_max),
    }
}

/// The header with which connections of a listener begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeaderRules {
    /// The most bytes of a header of version 2.
    pub bytes_max: usize,
    /// True if its further fields are kept.
    pub keeps_tlvs: bool,
}

/// True if `bytes` and `begin` agree as far as both go.
fn agree(bytes: &[u8], begin: &[u8]) -> bool {
    bytes.iter().zip(begin).all(|(byte, wanted)| byte == wanted)
}
