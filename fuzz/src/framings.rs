//! The framings under test, and naive versions to compare them with.

mod field;

use std::rc::Rc;

use ringserve_core::framing::{
    ByteOrder, Decode, Delimiter, EncodeError, Encoding, Fixed, FrameError, Framing, LengthPrefix, Lines, Raw,
};
use ringserve_core::{Limits, Outbox, Payload};

use crate::input::Input;
pub use field::Field;

/// A framing that ships, with its options.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Bytes that arrive together.
    Raw,
    /// Lines; true for replies that end in `\r\n`.
    Lines(bool),
    /// The width of a length in bytes; true for little-endian.
    Length(u8, bool),
    /// Frames of one size.
    Fixed(usize),
    /// Bytes up to a delimiter.
    Delimiter(&'static [u8]),
    /// A length with another encoding, position or count.
    Field(Field),
}

/// The first kinds, whose numbers kept inputs name.
const KINDS: [Kind; 11] = [
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

/// The other kinds.
const MORE_KINDS: [Kind; 17] = [
    Kind::Fixed(1),
    Kind::Fixed(7),
    Kind::Fixed(64),
    Kind::Delimiter(b"\0"),
    Kind::Delimiter(b"\r\n.\r\n"),
    Kind::Delimiter(b"aa"),
    Kind::Delimiter(b"abcabcab"),
    Kind::Length(3, false),
    Kind::Length(3, true),
    Kind::Field(Field { width: 0, ..Field::PLAIN }),
    Kind::Field(Field { width: 0, keep: true, ..Field::PLAIN }),
    Kind::Field(Field { width: 0, adjust: -1, ..Field::PLAIN }),
    Kind::Field(Field { width: 2, adjust: -2, ..Field::PLAIN }),
    Kind::Field(Field { width: 3, little: true, adjust: 5, ..Field::PLAIN }),
    Kind::Field(Field { width: 8, adjust: i32::MAX, ..Field::PLAIN }),
    Kind::Field(Field { width: 2, offset: 3, keep: true, ..Field::PLAIN }),
    Kind::Field(Field { width: 0, offset: 1, keep: true, adjust: -4, ..Field::PLAIN }),
];

/// Bytes up to this number are shown to a framing in a separate block.
const EXACT_MAX: usize = 100;

/// The start of some bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start<'a> {
    /// A frame with this payload, and its number of bytes.
    Frame(&'a [u8], usize),
    /// Part of a frame, or nothing.
    Part,
    /// A frame that is larger than the limit, whatever follows.
    TooLarge,
    /// Nothing that could become a frame.
    Bad,
}

impl Kind {
    /// Draws a kind by the next byte. The values below 220 name the same kinds as when there were
    /// eleven.
    pub fn draw(input: &mut Input<'_>) -> Kind {
        let byte = usize::from(input.byte());
        match byte.checked_sub(20 * KINDS.len()) {
            None => KINDS[byte % KINDS.len()],
            Some(more) => MORE_KINDS[more % MORE_KINDS.len()],
        }
    }

    /// False if a server with these limits does not start.
    pub fn works_with(self, limits: &Limits) -> bool {
        match self {
            Kind::Raw | Kind::Lines(_) | Kind::Length(..) => true,
            Kind::Fixed(bytes) => Fixed::bytes(bytes).check(limits).is_ok(),
            Kind::Delimiter(bytes) => Delimiter::new(bytes).check(limits).is_ok(),
            Kind::Field(field) => field.framing().check(limits).is_ok(),
        }
    }

    /// Reads the start of `bytes`, by the definition of the framing. [`Kind::Raw`] has no frames to
    /// find.
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
            Kind::Fixed(size) => match bytes.get(..size) {
                Some(frame) => (frame, size),
                None => return Start::Part,
            },
            Kind::Delimiter(delimiter) => {
                let Some(end) = bytes.windows(delimiter.len()).position(|window| window == delimiter) else {
                    return if bytes.len() >= frame_bytes_max { Start::TooLarge } else { Start::Part };
                };
                (&bytes[..end], end + delimiter.len())
            }
            Kind::Field(field) => return field.start(bytes, frame_bytes_max),
        };
        if consumed > frame_bytes_max { Start::TooLarge } else { Start::Frame(payload, consumed) }
    }

    /// A payload's frame, if it has one.
    pub fn frame(self, payload: &[u8]) -> Option<Vec<u8>> {
        let mut wire = Vec::new();
        match self {
            Kind::Field(field) => return field.frame(payload),
            Kind::Fixed(size) if payload.len() != size => return None,
            Kind::Delimiter(delimiter) => {
                let wire = [payload, delimiter].concat();
                let only = self.start(&wire, usize::MAX) == Start::Frame(payload, wire.len());
                return only.then_some(wire);
            }
            _ => {}
        }
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

/// A framing that checks its own and its caller's side of the contract of [`Framing`].
#[derive(Clone, Copy, Debug)]
pub struct Checked {
    /// The kind of the framing.
    pub kind: Kind,
    /// The limit that its caller was given.
    pub frame_bytes_max: usize,
}

impl Framing for Checked {
    fn decode(&self, bytes: &[u8], scanned: usize) -> Result<Decode, FrameError> {
        assert!(bytes.len() <= self.frame_bytes_max, "decode was shown more than the limit");
        assert!(scanned <= bytes.len() && !bytes.is_empty(), "decode was shown nothing");
        // In a separate block, so that AddressSanitizer sees a byte read beyond the end. Longer
        // bytes are in a lease often enough, and copying them for each of their frames would take
        // most of the time.
        let exact: Box<[u8]> = bytes[..bytes.len().min(EXACT_MAX)].into();
        let shown = if bytes.len() <= EXACT_MAX { &exact } else { bytes };
        let decode = |scanned| match self.kind {
            Kind::Raw => Raw.decode(shown, scanned),
            Kind::Lines(crlf) => Kind::lines(crlf).decode(shown, scanned),
            Kind::Length(width, little) => Kind::length(width, little).decode(shown, scanned),
            Kind::Fixed(size) => Fixed::bytes(size).decode(shown, scanned),
            Kind::Delimiter(bytes) => Delimiter::new(bytes).decode(shown, scanned),
            Kind::Field(field) => field.framing().decode(shown, scanned),
        };
        let found = decode(scanned);
        assert_eq!(found, decode(0), "what was seen before changes the answer");
        match (found, self.kind.start(bytes, usize::MAX)) {
            (Ok(Decode::More(more)), Start::Part) => assert!(more > 0, "no byte is missing"),
            (Ok(Decode::More(more)), Start::TooLarge) => assert!(more > 1 << 60, "beyond the address space"),
            (Ok(Decode::Frame { skip, len, consumed }), Start::Frame(payload, bytes_of_frame)) => {
                assert_eq!((&shown[skip..skip + len], consumed), (payload, bytes_of_frame));
            }
            (Err(_), Start::Bad) => {}
            (found, start) => panic!("{found:?} where {start:?} is right"),
        }
        found
    }

    fn encode(&self, payload: Payload<'_>, out: &mut Outbox<'_>) -> Result<(), EncodeError> {
        match self.kind {
            Kind::Raw => Raw.encode(payload, out),
            Kind::Lines(crlf) => Kind::lines(crlf).encode(payload, out),
            Kind::Length(width, little) => Kind::length(width, little).encode(payload, out),
            Kind::Fixed(size) => Fixed::bytes(size).encode(payload, out),
            Kind::Delimiter(bytes) => Delimiter::new(bytes).encode(payload, out),
            Kind::Field(field) => field.framing().encode(payload, out),
        }
    }

    fn encoding(self: &Rc<Self>) -> Encoding {
        match self.kind {
            Kind::Raw => Encoding::Raw,
            Kind::Lines(crlf) => Encoding::Lines(Kind::lines(crlf)),
            Kind::Length(width, little) => Encoding::Length(Kind::length(width, little)),
            Kind::Fixed(size) => Rc::new(Fixed::bytes(size)).encoding(),
            Kind::Delimiter(bytes) => Rc::new(Delimiter::new(bytes)).encoding(),
            Kind::Field(field) => Rc::new(field.framing()).encoding(),
        }
    }
}
