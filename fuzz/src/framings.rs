//! The framings under test, and the same written naively to compare them with.

use std::rc::Rc;

use ringserve_core::framing::{
    ByteOrder, Decode, EncodeError, Encoding, FrameError, Framing, LengthPrefix, Lines, Raw,
};
use ringserve_core::{Outbox, Payload};

/// A framing that ships, with its options.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Whatever arrives together.
    Raw,
    /// Lines; true for replies that end in `\r\n`.
    Lines(bool),
    /// A length of so many bytes; true if the least significant comes first.
    Length(u8, bool),
}

/// All of them.
pub const KINDS: [Kind; 11] = [
    Kind::Raw,
    Kind::Lines(false),
    Kind::Lines(true),
    Kind::Length(1, false),
    Kind::Length(1, true),
    Kind::Length(2, false),
    Kind::Length(2, true),
    Kind::Length(4, false),
    Kind::Length(4, true),
    Kind::Length(8, false),
    Kind::Length(8, true),
];

/// Up to so many bytes are shown to a framing in a block of their own.
const EXACT_MAX: usize = 100;

/// What bytes begin with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start<'a> {
    /// A frame with this payload, of so many bytes.
    Frame(&'a [u8], usize),
    /// Part of a frame, or nothing.
    Part,
    /// A frame that is larger than the limit, whatever follows.
    TooLarge,
}

impl Kind {
    /// What the first of `bytes` are, by the definition of the framing. [`Kind::Raw`] has no frames to find.
    pub fn start(self, bytes: &[u8], frame_bytes_max: usize) -> Start<'_> {
        let (payload, consumed) = match self {
            Kind::Raw => (bytes, bytes.len()),
            Kind::Lines(_) => {
                let Some(end) = bytes.iter().position(|byte| *byte == b'\n') else {
                    return if bytes.len() >= frame_bytes_max { Start::TooLarge } else { Start::Part };
                };
                let line = &bytes[..end];
                (line.strip_suffix(b"\r").unwrap_or(line), end + 1)
            }
            Kind::Length(width, little) => {
                let width = usize::from(width);
                if bytes.is_empty() {
                    return Start::Part;
                }
                if bytes.len() < width {
                    return if width > frame_bytes_max { Start::TooLarge } else { Start::Part };
                }
                let mut digits = bytes[..width].to_vec();
                if little {
                    digits.reverse();
                }
                let len = digits.iter().fold(0u128, |sum, digit| sum << 8 | u128::from(*digit));
                let consumed = width as u128 + len;
                if consumed > frame_bytes_max as u128 {
                    return Start::TooLarge;
                }
                let consumed = consumed as usize;
                if consumed > bytes.len() {
                    return Start::Part;
                }
                (&bytes[width..consumed], consumed)
            }
        };
        if consumed > frame_bytes_max { Start::TooLarge } else { Start::Frame(payload, consumed) }
    }

    /// A payload's frame, if it has one.
    pub fn frame(self, payload: &[u8]) -> Option<Vec<u8>> {
        let mut wire = Vec::new();
        if let Kind::Length(width, little) = self {
            if width < 8 && payload.len() as u64 >= 1 << (8 * width) {
                return None;
            }
            for place in 0..width {
                let shift = 8 * u32::from(if little { place } else { width - 1 - place });
                wire.push((payload.len() as u64 >> shift) as u8);
            }
        }
        wire.extend_from_slice(payload);
        match self {
            Kind::Lines(false) => wire.extend_from_slice(b"\n"),
            Kind::Lines(true) => wire.extend_from_slice(b"\r\n"),
            _ => {}
        }
        Some(wire)
    }

    fn lines(crlf: bool) -> Lines {
        if crlf { Lines::crlf() } else { Lines::default() }
    }

    fn length(width: u8, little: bool) -> LengthPrefix {
        LengthPrefix::bytes(width).order(if little { ByteOrder::Little } else { ByteOrder::Big })
    }
}

/// A framing that holds itself and its caller to the contract of [`Framing`].
#[derive(Clone, Copy, Debug)]
pub struct Checked {
    /// Which one.
    pub kind: Kind,
    /// The limit its caller was given.
    pub frame_bytes_max: usize,
}

impl Framing for Checked {
    fn decode(&self, bytes: &[u8], scanned: usize) -> Result<Decode, FrameError> {
        assert!(bytes.len() <= self.frame_bytes_max, "decode was shown more than the limit");
        assert!(scanned <= bytes.len() && !bytes.is_empty(), "decode was shown nothing");
        // In a block of its own, so that AddressSanitizer sees a byte read beyond the end. What is longer is a lease
        // often enough, and copying it for each of its frames would take most of the time.
        let exact: Box<[u8]> = bytes[..bytes.len().min(EXACT_MAX)].into();
        let shown = if bytes.len() <= EXACT_MAX { &exact } else { bytes };
        let decode = |scanned| match self.kind {
            Kind::Raw => Raw.decode(shown, scanned),
            Kind::Lines(crlf) => Kind::lines(crlf).decode(shown, scanned),
            Kind::Length(width, little) => Kind::length(width, little).decode(shown, scanned),
        };
        let found = decode(scanned);
        assert_eq!(found, decode(0), "what was seen before changes the answer");
        match (found, self.kind.start(bytes, usize::MAX)) {
            (Ok(Decode::More(more)), Start::Part) => assert!(more > 0, "no byte is missing"),
            (Ok(Decode::More(more)), Start::TooLarge) => assert!(more > 1 << 60, "beyond the address space"),
            (Ok(Decode::Frame { skip, len, consumed }), Start::Frame(payload, bytes_of_frame)) => {
                assert_eq!((&shown[skip..skip + len], consumed), (payload, bytes_of_frame));
            }
            (found, start) => panic!("{found:?} where {start:?} is right"),
        }
        found
    }

    fn encode(&self, payload: Payload<'_>, out: &mut Outbox<'_>) -> Result<(), EncodeError> {
        match self.kind {
            Kind::Raw => Raw.encode(payload, out),
            Kind::Lines(crlf) => Kind::lines(crlf).encode(payload, out),
            Kind::Length(width, little) => Kind::length(width, little).encode(payload, out),
        }
    }

    fn encoding(self: &Rc<Self>) -> Encoding {
        match self.kind {
            Kind::Raw => Encoding::Raw,
            Kind::Lines(crlf) => Encoding::Lines(Kind::lines(crlf)),
            Kind::Length(width, little) => Encoding::Length(Kind::length(width, little)),
        }
    }
}
