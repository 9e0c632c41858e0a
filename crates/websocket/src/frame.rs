//! The header of a frame.
//!
//! ```text
//!   byte 0                1             2 .. 10                  .. 14
//!   ├───┬───────┬────────┼───┬─────────┼──────────────────────┼─────────────┤
//!   │FIN│RSV 1-3│ opcode │ M │ length  │ the length, if it is │ the mask,   │ payload ..
//!   │   │       │        │   │ or form │ 126 and more         │ if M is set │
//! ```

pub use crate::code::Violation;

/// The longest header: two bytes, a length of eight, a mask.
pub const HEADER_BYTES_MAX: usize = 14;

/// The longest payload of a control frame.
pub const CONTROL_BYTES_MAX: usize = 125;

/// The opcode of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Opcode {
    /// Continues the message that began.
    Continuation = 0,
    /// Begins a message of UTF-8.
    Text = 1,
    /// Begins a message of bytes.
    Binary = 2,
    /// Announces the end of the sender's messages, and its reason.
    Close = 8,
    /// Asks for a [`Pong`](Opcode::Pong).
    Ping = 9,
    /// Answers a [`Ping`](Opcode::Ping), or shows that the peer is there.
    Pong = 10,
}

impl Opcode {
    fn of(bits: u8) -> Result<Opcode, Violation> {
        Ok(match bits {
            0 => Opcode::Continuation,
            1 => Opcode::Text,
            2 => Opcode::Binary,
            8 => Opcode::Close,
            9 => Opcode::Ping,
            10 => Opcode::Pong,
            _ => return Err(Violation::protocol("an opcode that is reserved")),
        })
    }

    /// True for frames that may stand between the frames of a message.
    pub const fn is_control(self) -> bool {
        self as u8 >= Opcode::Close as u8
    }
}

/// The header of a frame, of either side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Whether this is the last frame of its message.
    pub fin: bool,
    /// The three bits that extensions give a meaning: 4 for RSV1, 2, 1.
    pub rsv: u8,
    /// The kind of the frame.
    pub opcode: Opcode,
    /// Bytes of payload, below 2^63.
    pub len: u64,
    /// The mask of the payload, if it is masked.
    pub mask: Option<[u8; 4]>,
}

impl Header {
    /// Returns the header of a frame that a server sends: whole and unmasked.
    pub const fn whole(opcode: Opcode, len: u64) -> Header {
        Header { fin: true, rsv: 0, opcode, len, mask: None }
    }

    /// Returns the header at the start of `bytes` with its length or, if it is incomplete, the
    /// fewest bytes that it takes.
    ///
    /// # Errors
    /// If neither side may send it: an opcode that is reserved, a control frame that is fragmented
    /// or longer than 125 bytes, a length in more bytes than it needs, or of 2^63 and more. Errors
    /// that the first two bytes show are reported as soon as those are there.
    #[inline]
    pub fn decode(bytes: &[u8]) -> Result<DecodeOutcome, Violation> {
        let &[first, second, ref rest @ ..] = bytes else { return Ok(DecodeOutcome::Needs(2)) };
        let opcode = Opcode::of(first & 0x0f)?;
        let (fin, rsv) = (first & 0x80 != 0, first >> 4 & 7);
        let (is_masked, short) = (second & 0x80 != 0, second & 0x7f);
        if opcode.is_control() {
            if !fin {
                return Err(Violation::protocol("a control frame in pieces"));
            }
            if usize::from(short) > CONTROL_BYTES_MAX {
                return Err(Violation::protocol("a control frame of more than 125 bytes"));
            }
        }
        let (len, rest) = match short {
            126 => match rest.split_first_chunk() {
                Some((long, rest)) => (u64::from(u16::from_be_bytes(*long)), rest),
                None => return Ok(DecodeOutcome::Needs(2 + 2 + 4 * usize::from(is_masked))),
            },
            127 => match rest.split_first_chunk() {
                Some((long, rest)) => (u64::from_be_bytes(*long), rest),
                None => return Ok(DecodeOutcome::Needs(2 + 8 + 4 * usize::from(is_masked))),
            },
            short => (u64::from(short), rest),
        };
        if (short == 126 && len < 126) || (short == 127 && len <= u64::from(u16::MAX)) {
            return Err(Violation::protocol("a length of more bytes than it needs"));
        }
        if len >> 63 != 0 {
            return Err(Violation::protocol("a length of 2^63 or more"));
        }
        let size = bytes.len() - rest.len();
        let mask = match (is_masked, rest.first_chunk()) {
            (false, _) => None,
            (true, Some(mask)) => Some(*mask),
            (true, None) => return Ok(DecodeOutcome::Needs(size + 4)),
        };
        let size = size + 4 * usize::from(is_masked);
        Ok(DecodeOutcome::Header(Header { fin, rsv, opcode, len, mask }, size))
    }

    /// Refuses a header that no client may send.
    ///
    /// # Errors
    /// A payload that is not masked; an extension bit, except RSV1 at the start of a message where
    /// the connection `compresses`.
    #[inline]
    pub fn check_client(&self, compresses: bool) -> Result<[u8; 4], Violation> {
        let Some(mask) = self.mask else {
            return Err(Violation::protocol("a frame of a client that is not masked"));
        };
        let starts = matches!(self.opcode, Opcode::Text | Opcode::Binary);
        if self.rsv != 0 && !(self.rsv == 4 && compresses && starts) {
            return Err(Violation::protocol("a bit of an extension that was not negotiated"));
        }
        Ok(mask)
    }

    /// Refuses a header that no server may send to a client that has offered no extension.
    ///
    /// # Errors
    /// A payload that is masked; an extension bit.
    #[inline]
    pub fn check_server(&self) -> Result<(), Violation> {
        if self.mask.is_some() {
            return Err(Violation::protocol("a frame of a server that is masked"));
        }
        if self.rsv != 0 {
            return Err(Violation::protocol("a bit of an extension that was not negotiated"));
        }
        Ok(())
    }

    /// Encodes the header.
    #[inline]
    pub fn encode(&self) -> HeaderBytes {
        let mut bytes = [0; HEADER_BYTES_MAX];
        bytes[0] = u8::from(self.fin) << 7 | self.rsv << 4 | self.opcode as u8;
        let masked = u8::from(self.mask.is_some()) << 7;
        let mut size = match self.len {
            // At most 125.
            len @ ..126 => {
                bytes[1] = masked | len as u8;
                2
            }
            len => match u16::try_from(len) {
                Ok(len) => {
                    bytes[1] = masked | 126;
                    bytes[2..4].copy_from_slice(&len.to_be_bytes());
                    4
                }
                Err(_) => {
                    bytes[1] = masked | 127;
                    bytes[2..10].copy_from_slice(&len.to_be_bytes());
                    10
                }
            },
        };
        if let Some(mask) = self.mask {
            bytes[size..size + 4].copy_from_slice(&mask);
            size += 4;
        }
        HeaderBytes { bytes, size: size as u8 }
    }
}

/// The result of [`Header::decode`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecodeOutcome {
    /// A header, and its length in bytes.
    Header(Header, usize),
    /// The header is incomplete: it takes this many bytes at least, which is all of them unless one
    /// of the first two is missing.
    Needs(usize),
}

/// The bytes of a header. Dereferences to them.
#[derive(Clone, Copy, Debug)]
pub struct HeaderBytes {
    bytes: [u8; HEADER_BYTES_MAX],
    size: u8,
}

impl core::ops::Deref for HeaderBytes {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        &self.bytes[..usize::from(self.size)]
    }
}

/// Appends a client's frame to `out`.
pub fn put_masked(fin: bool, rsv: u8, opcode: Opcode, payload: &[u8], mask: [u8; 4], out: &mut Vec<u8>) {
    let header = Header { fin, rsv, opcode, len: payload.len() as u64, mask: Some(mask) };
    out.extend_from_slice(&header.encode());
    let begins = out.len();
    out.extend_from_slice(payload);
    crate::mask::apply(&mut out[begins..], mask);
}

/// Appends a server's whole frame to `out`.
pub(crate) fn put(opcode: Opcode, payload: &[u8], out: &mut Vec<u8>) {
    out.extend_from_slice(&Header::whole(opcode, payload.len() as u64).encode());
    out.extend_from_slice(payload);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_header() -> impl Strategy<Value = Header> {
        let opcode = prop::sample::select(vec![
            Opcode::Continuation,
            Opcode::Text,
            Opcode::Binary,
            Opcode::Close,
            Opcode::Ping,
            Opcode::Pong,
        ]);
        let len = prop_oneof![0..300u64, 65_000..70_000u64, 0..1u64 << 63];
        (any::<bool>(), 0..8u8, opcode, len, any::<Option<[u8; 4]>>()).prop_map(
            |(fin, rsv, opcode, len, mask)| match opcode.is_control() {
                true => Header { fin: true, rsv, opcode, len: len % 126, mask },
                false => Header { fin, rsv, opcode, len, mask },
            },
        )
    }

    proptest! {
        #[test]
        fn a_header_is_read_as_it_was_written(header in any_header(), more in any::<[u8; 3]>()) {
            let mut bytes = header.encode().to_vec();
            let size = bytes.len();
            bytes.extend(more);
            prop_assert_eq!(Header::decode(&bytes), Ok(DecodeOutcome::Header(header, size)));
            for end in 0..size {
                let needs = Header::decode(&bytes[..end]);
                prop_assert_eq!(needs, Ok(DecodeOutcome::Needs(if end < 2 { 2 } else { size })));
            }
        }

        #[test]
        fn any_bytes_are_a_header_that_is_written_as_it_was_read(bytes in prop::collection::vec(any::<u8>(), 0..20)) {
            if let Ok(DecodeOutcome::Header(header, size)) = Header::decode(&bytes) {
                prop_assert_eq!(&*header.encode(), &bytes[..size]);
            }
        }
    }

    #[test]
    fn headers_that_neither_side_may_send_are_refused() {
        let refused: [(&[u8], &str); 9] = [
            (&[0x83, 0x80], "reserved"),
            (&[0x8b, 0x80], "reserved"),
            (&[0x8f, 0x80], "reserved"),
            (&[0x09, 0x80], "in pieces"),
            (&[0x08, 0x80], "in pieces"),
            (&[0x89, 0xfe, 0, 126], "more than 125"),
            (&[0x82, 0xfe, 0, 125, 1, 2, 3, 4], "more bytes than it needs"),
            (&[0x82, 0xff, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 1, 2, 3, 4], "more bytes than it needs"),
            (&[0x82, 0xff, 0x80, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4], "2^63"),
        ];
        for (bytes, what) in refused {
            let violation = Header::decode(bytes).unwrap_err();
            assert_eq!(violation.code, 1002, "{bytes:x?}");
            assert!(violation.what.contains(what), "{bytes:x?}: {violation}");
        }
    }

    #[test]
    fn client_frames_are_masked_and_have_negotiated_bits_alone() {
        let header = |first: u8, second: u8| match Header::decode(&[first, second, 1, 2, 3, 4]) {
            Ok(DecodeOutcome::Header(header, _)) => header,
            other => panic!("{other:?}"),
        };
        assert_eq!(header(0x81, 0x80).check_client(false), Ok([1, 2, 3, 4]));
        assert!(header(0x81, 0x00).check_client(true).unwrap_err().what.contains("not masked"));
        for first in [0xc1, 0xa1, 0x91, 0xe1] {
            let refused = header(first, 0x80).check_client(false).unwrap_err();
            assert!(refused.what.contains("not negotiated"), "{refused}");
        }
        assert!(header(0xc1, 0x80).check_client(true).is_ok());
        for first in [0xa1, 0xf1, 0xc0, 0xc9, 0xc8] {
            assert!(header(first, 0x80).check_client(true).is_err(), "{first:x}");
        }
    }

    #[test]
    fn server_frames_are_in_the_clear_and_have_no_bits() {
        let check = |bytes: &[u8]| match Header::decode(bytes) {
            Ok(DecodeOutcome::Header(header, _)) => header.check_server(),
            other => panic!("{other:?}"),
        };
        assert_eq!(check(&[0x81, 0x02]), Ok(()));
        assert!(check(&[0x81, 0x82, 1, 2, 3, 4]).unwrap_err().what.contains("masked"));
        assert!(check(&[0xc1, 0x02]).unwrap_err().what.contains("not negotiated"));
    }
}
