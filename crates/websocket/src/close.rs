//! The reason for which a connection is closed, as its close frames state it.

use ringserve_core::CloseReason;
use ringserve_core::framing::FrameError;

use crate::code::Violation;
pub use crate::code::{
    GOING_AWAY, INTERNAL_ERROR, INVALID_DATA, NORMAL, POLICY, PROTOCOL_ERROR, TOO_LARGE, UNSUPPORTED,
    is_valid,
};
use crate::frame::{CONTROL_BYTES_MAX, Opcode, put};
use crate::utf8;

/// The longest reason: a close frame holds 125 bytes, of which two are the code.
pub const REASON_BYTES_MAX: usize = CONTROL_BYTES_MAX - 2;

/// Parses the payload of a close frame; `None` if it has no code.
///
/// # Errors
/// A payload of one byte, a code that is not [valid](is_valid), a reason that is not UTF-8.
pub fn parse(payload: &[u8]) -> Result<Option<(u16, &str)>, Violation> {
    let (code, reason) = match payload {
        [] => return Ok(None),
        [_] => return Err(Violation::protocol("half a code of a close frame")),
        &[high, low, ref reason @ ..] => (u16::from_be_bytes([high, low]), reason),
    };
    if !is_valid(code) {
        return Err(Violation::protocol("a code that no close frame may carry"));
    }
    match simdutf8::basic::from_utf8(reason) {
        Ok(reason) => Ok(Some((code, reason))),
        Err(_) => Err(Violation { code: INVALID_DATA, what: "a reason that is no text" }),
    }
}

/// Appends a close frame to `out`: without a payload if there is no code. A reason that is too long
/// is cut between two characters.
pub fn write(code: Option<u16>, reason: &str, out: &mut Vec<u8>) {
    let Some(code) = code else { return put(Opcode::Close, &[], out) };
    debug_assert!(is_valid(code), "no close frame carries {code}");
    let mut payload = [0; CONTROL_BYTES_MAX];
    let reason = &reason.as_bytes()[..reason.floor(REASON_BYTES_MAX)];
    payload[..2].copy_from_slice(&code.to_be_bytes());
    payload[2..2 + reason.len()].copy_from_slice(reason);
    put(Opcode::Close, &payload[..2 + reason.len()], out);
}

trait Floor {
    /// The end of the last character that ends within `most` bytes.
    fn floor(&self, most: usize) -> usize;
}

impl Floor for str {
    fn floor(&self, most: usize) -> usize {
        (0..=most.min(self.len())).rev().find(|end| self.is_char_boundary(*end)).unwrap_or(0)
    }
}

/// The code sent to a peer whose connection ends for `reason`, where the service named none.
pub fn code_of(reason: CloseReason) -> u16 {
    use CloseReason as Why;
    match reason {
        Why::BadFrame(error) => match error {
            FrameError::TooLarge { .. } | FrameError::OverBytesMax { .. } => TOO_LARGE,
            error => match error.code().map(u16::try_from) {
                Some(Ok(code)) if is_valid(code) => code,
                _ => POLICY,
            },
        },
        Why::PeerClosed | Why::Closed | Why::Aborted => NORMAL,
        Why::PeerClosedMidFrame => PROTOCOL_ERROR,
        Why::Shutdown | Why::DrainTimeout | Why::ServerAborted | Why::IdleTimeout => GOING_AWAY,
        Why::FirstFrameTimeout
        | Why::ReadTooSlow
        | Why::ReadTooFast
        | Why::HeartbeatLost
        | Why::Refused
        | Why::DeadlinePassed => POLICY,
        _ => INTERNAL_ERROR,
    }
}

/// True if bytes can be the reason in a close frame.
pub(crate) fn is_reason(bytes: &[u8]) -> bool {
    bytes.len() <= REASON_BYTES_MAX && utf8::is_text(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_that_stand_for_none_or_are_not_given_out_are_refused() {
        for code in [1000, 1001, 1002, 1003, 1007, 1008, 1009, 1010, 1011, 1012, 1013, 1014, 3000, 4999] {
            assert_eq!(parse(&u16::to_be_bytes(code)), Ok(Some((code, ""))));
        }
        for code in [0, 1, 999, 1004, 1005, 1006, 1015, 1016, 1100, 2000, 2999, 5000, u16::MAX] {
            assert_eq!(parse(&code.to_be_bytes()).unwrap_err().code, PROTOCOL_ERROR, "{code}");
        }
        assert_eq!(parse(&[]), Ok(None));
        assert_eq!(parse(&[3]).unwrap_err().code, PROTOCOL_ERROR);
        assert_eq!(parse(b"\x03\xe8\xff").unwrap_err().code, INVALID_DATA);
        assert_eq!(parse(b"\x03\xe8bye"), Ok(Some((1000, "bye"))));
    }

    #[test]
    fn close_frame_is_read_as_written_and_cut_between_characters() {
        let mut out = Vec::new();
        write(Some(4000), "why", &mut out);
        assert_eq!(out, b"\x88\x05\x0f\xa0why");
        out.clear();
        write(None, "", &mut out);
        assert_eq!(out, b"\x88\x00");
        out.clear();
        write(Some(NORMAL), &"é".repeat(100), &mut out);
        assert_eq!((out.len(), out[1]), (2 + 2 + 122, 124));
        assert_eq!(parse(&out[2..]), Ok(Some((NORMAL, &*"é".repeat(61)))));
    }

    #[test]
    fn each_reason_has_a_code_that_may_be_sent() {
        for (reason, code) in [
            (CloseReason::PeerClosed, NORMAL),
            (CloseReason::Shutdown, GOING_AWAY),
            (CloseReason::HandlerError, INTERNAL_ERROR),
            (CloseReason::BadFrame(FrameError::TooLarge { bytes: 2, max: 1 }), TOO_LARGE),
            (CloseReason::BadFrame(FrameError::coded(1003, "no text here")), UNSUPPORTED),
            (CloseReason::BadFrame(FrameError::coded(1006, "not to be sent")), POLICY),
            (CloseReason::BadFrame(FrameError::VarintOverflow), POLICY),
            (CloseReason::ReadTooSlow, POLICY),
            (CloseReason::ReadTooFast, POLICY),
            (CloseReason::DeadlinePassed, POLICY),
        ] {
            assert_eq!(code_of(reason), code, "{reason}");
            assert!(is_valid(code_of(reason)));
        }
    }
}
