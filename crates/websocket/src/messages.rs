//! Messages as frames of a service: the transport puts a mark before each, and the framing cuts
//! there.
//!
//! ```text
//!   ├──────┼─────────────────┼─────────┤
//!   │ kind │ length, 4 bytes │ payload │
//! ```
//!
//! Used inside the server only. The header of a client's frame is longer by a byte at least, so the
//! mark is written in its place.

use ringserve_core::Outbox;
use ringserve_core::framing::{Cut, EncodeError, FrameError, InPlace, Payload, TypedFraming};

use crate::frame::{Header, HeaderBytes, Opcode};

/// Bytes of a mark.
pub const MARK_BYTES: usize = 5;

/// The kind of a message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Kind {
    /// UTF-8. Received text was checked.
    Text,
    /// Bytes.
    #[default]
    Binary,
}

impl Kind {
    /// The opcode of the frame in which the message begins.
    pub fn opcode(self) -> Opcode {
        match self {
            Kind::Text => Opcode::Text,
            Kind::Binary => Opcode::Binary,
        }
    }

    /// The header before a message of `len` bytes that a server sends.
    #[inline]
    pub fn header(self, len: usize) -> HeaderBytes {
        Header::whole(self.opcode(), len as u64).encode()
    }
}

/// The mark before a message of `len` bytes, at most 1 GiB.
#[inline]
pub(crate) fn mark(kind: Kind, len: usize) -> [u8; MARK_BYTES] {
    let [a, b, c, d] = (len as u32).to_be_bytes();
    [kind as u8, a, b, c, d]
}

/// A framing in which each WebSocket message is a frame, with its [`Kind`] as the head: only for
/// listeners that speak WebSocket. A message is at most as long as
/// [`Limits::frame_bytes_max`](ringserve_core::Limits::frame_bytes_max), less five bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Messages {
    replies: Kind,
}

impl Messages {
    /// Sends replies as messages of bytes.
    pub const fn binary() -> Messages {
        Messages { replies: Kind::Binary }
    }

    /// Sends replies as messages of text, which they have to be.
    pub const fn text() -> Messages {
        Messages { replies: Kind::Text }
    }
}

impl TypedFraming for Messages {
    type State = ();
    type Head = Kind;

    #[inline]
    fn cut(&self, _none: &mut (), bytes: &[u8], _scanned: usize) -> Result<Cut<Kind>, FrameError> {
        let Some(&[kind, ref len @ ..]) = bytes.first_chunk::<MARK_BYTES>() else {
            return Ok(Cut::More(MARK_BYTES - bytes.len()));
        };
        let len = u32::from_be_bytes(*len) as usize;
        let head = if kind == Kind::Text as u8 { Kind::Text } else { Kind::Binary };
        match (MARK_BYTES + len).checked_sub(bytes.len()) {
            None | Some(0) => Ok(Cut::Frame { skip: MARK_BYTES, len, consumed: MARK_BYTES + len, head }),
            Some(missing) => Ok(Cut::More(missing)),
        }
    }

    fn write(&self, payload: Payload<'_>, out: &mut Outbox<'_>) -> Result<(), EncodeError> {
        out.put(&self.replies.header(payload.len()));
        out.payload(payload);
        Ok(())
    }

    fn room_before(&self) -> usize {
        // The header for 126 to 65535 bytes.
        4
    }

    fn write_around(&self, written: &mut InPlace<'_>) -> Result<(), EncodeError> {
        written.set_header(&self.replies.header(written.payload_len()));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringserve_core::framing::encode_to_vec;

    #[test]
    fn a_frame_is_cut_at_each_mark() {
        let mut bytes = mark(Kind::Text, 3).to_vec();
        bytes.extend(b"abc");
        let whole = bytes.len();
        bytes.extend(mark(Kind::Binary, 0));
        let cut = |bytes: &[u8]| Messages::default().cut(&mut (), bytes, 0);
        let frame = |len, head| Ok(Cut::Frame { skip: MARK_BYTES, len, consumed: MARK_BYTES + len, head });
        assert_eq!(cut(&bytes), frame(3, Kind::Text));
        assert_eq!(cut(&bytes[whole..]), frame(0, Kind::Binary));
        for have in 0..whole {
            let missing = if have < MARK_BYTES { MARK_BYTES - have } else { whole - have };
            assert_eq!(cut(&bytes[..have]), Ok(Cut::More(missing)));
        }
    }

    #[test]
    fn a_reply_is_a_message_of_its_kind() {
        assert_eq!(encode_to_vec(&Messages::binary(), b"hi"), Ok(b"\x82\x02hi".to_vec()));
        assert_eq!(encode_to_vec(&Messages::text(), b""), Ok(b"\x81\x00".to_vec()));
        let long = encode_to_vec(&Messages::text(), &[b'x'; 300]).unwrap();
        assert_eq!((&long[..4], long.len()), (&b"\x81\x7e\x01\x2c"[..], 304));
    }
}
