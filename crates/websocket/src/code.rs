//! Codes of close frames, and what breaks a rule, which has one.

use core::fmt;

use ringserve_core::framing::FrameError;
use ringserve_core::{CloseReason, Fault};

/// All was said.
pub const NORMAL: u16 = 1000;
/// The server stops, or the browser leaves the page.
pub const GOING_AWAY: u16 = 1001;
/// The peer broke the rules of the protocol.
pub const PROTOCOL_ERROR: u16 = 1002;
/// The peer sent a kind of message that is not taken.
pub const UNSUPPORTED: u16 = 1003;
/// A text was no UTF-8, or a message contradicts its kind.
pub const INVALID_DATA: u16 = 1007;
/// The peer did what is not allowed, and no other code says what.
pub const POLICY: u16 = 1008;
/// A message is too large.
pub const TOO_LARGE: u16 = 1009;
/// The server cannot go on.
pub const INTERNAL_ERROR: u16 = 1011;

/// True if a close frame may carry `code`: one that RFC 6455 or the registry names, but for those that stand for the lack of one;
/// or one of libraries and applications, 3000 to 4999.
pub const fn is_valid(code: u16) -> bool {
    matches!(code, 1000..=1003 | 1007..=1014 | 3000..=4999)
}

/// What the peer did that ends the connection: the code of the close frame that tells it so, and what was wrong.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Violation {
    /// One of those that [may be sent](is_valid).
    pub code: u16,
    /// What was wrong.
    pub what: &'static str,
}

impl Violation {
    /// The bytes break the rules of the protocol.
    pub const fn protocol(what: &'static str) -> Violation {
        Violation { code: PROTOCOL_ERROR, what }
    }

    /// As a connection ends by it.
    pub fn reason(self) -> CloseReason {
        CloseReason::BadFrame(FrameError::coded(self.code.into(), self.what))
    }
}

impl From<Violation> for Fault {
    fn from(violation: Violation) -> Fault {
        Fault(violation.reason())
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (code {})", self.what, self.code)
    }
}

ringserve_buf::debug_is_display!(Violation);

impl std::error::Error for Violation {}
