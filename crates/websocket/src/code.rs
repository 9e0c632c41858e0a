//! Codes of close frames, and violations of the protocol, each of which has one.

use core::fmt;

use ringserve_core::framing::FrameError;
use ringserve_core::{CloseReason, TransportError};

/// The purpose of the connection is fulfilled.
pub const NORMAL: u16 = 1000;
/// The server stops, or the browser leaves the page.
pub const GOING_AWAY: u16 = 1001;
/// The peer broke the rules of the protocol.
pub const PROTOCOL_ERROR: u16 = 1002;
/// The peer sent a kind of message that is not accepted.
pub const UNSUPPORTED: u16 = 1003;
/// A text is not UTF-8, or a message contradicts its kind.
pub const INVALID_DATA: u16 = 1007;
/// The peer did something that is not allowed, and no other code fits.
pub const POLICY: u16 = 1008;
/// A message is too large.
pub const TOO_LARGE: u16 = 1009;
/// The server cannot go on.
pub const INTERNAL_ERROR: u16 = 1011;

/// True if a close frame may carry `code`: a code that RFC 6455 or the registry names, except those
/// that stand for the lack of one; or a code of libraries and applications, 3000 to 4999.
pub const fn is_valid(code: u16) -> bool {
    matches!(code, 1000..=1003 | 1007..=1014 | 3000..=4999)
}

/// A violation that ends the connection: the code of the close frame that reports it to the peer,
/// and a description.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Violation {
    /// A code that [may be sent](is_valid).
    pub code: u16,
    /// Description of the violation.
    pub what: &'static str,
}

impl Violation {
    /// A violation of the protocol.
    pub const fn protocol(what: &'static str) -> Violation {
        Violation { code: PROTOCOL_ERROR, what }
    }

    /// The reason with which the connection ends.
    pub fn reason(self) -> CloseReason {
        CloseReason::BadFrame(FrameError::coded(self.code.into(), self.what))
    }
}

impl From<Violation> for TransportError {
    fn from(violation: Violation) -> TransportError {
        TransportError(violation.reason())
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (code {})", self.what, self.code)
    }
}

ringserve_buf::debug_is_display!(Violation);

impl std::error::Error for Violation {}
