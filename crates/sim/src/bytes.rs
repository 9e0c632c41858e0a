//! The bytes that peers and services send, and their framings.
//!
//! Each connection has a tag; bytes of connections whose tags differ in the lower four bits come
//! from disjoint sets, so that a single byte of another connection is noticed. The bytes of a frame
//! depend on the tag and the frame's number, so that a frame out of order is noticed too.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::rc::Rc;
use std::sync::LazyLock;

use ringserve_core::framing::{
    ByteOrder, Decode, EncodeError, Encoding, FrameError, Framing, LengthPrefix, Lines, Raw,
};
use ringserve_core::{Outbox, Payload};

use crate::rng::Rng;

/// Tags that have their own bytes.
const CLASSES: usize = 16;
/// Bytes of each class; 16 of these lie above the control characters.
const LETTERS: u64 = 13;
/// Possible start positions of a frame's bytes.
const STARTS: usize = 4096;
/// The longest payload.
pub const PAYLOAD_MAX: usize = 20 * 1024;

static TABLE: LazyLock<Vec<Vec<u8>>> = LazyLock::new(|| {
    let mut rng = Rng::new(7);
    let line = |class: usize, rng: &mut Rng| {
        let first = 0x20 + class as u64 * LETTERS;
        (0..STARTS + PAYLOAD_MAX).map(|_| (first + rng.below(LETTERS)) as u8).collect()
    };
    (0..CLASSES).map(|class| line(class, &mut rng)).collect()
});

/// Returns the `len` bytes of payload number `index` of connection `tag`.
pub fn payload(tag: usize, index: usize, len: usize) -> &'static [u8] {
    let start = (tag * 277 + index * 61) % STARTS;
    &TABLE[tag % CLASSES][start..start + len]
}

/// Whether two connections' bytes can be distinguished one by one.
pub fn differ(tag: usize, other: usize) -> bool {
    tag % CLASSES != other % CLASSES
}

/// One of the framings that ship, chosen at run time.
#[derive(Clone, Copy, Debug)]
pub enum AnyFraming {
    /// Bytes that arrive together.
    Raw,
    /// Lines; true for `\r\n`.
    Lines(bool),
    /// The width of a length in bytes, and whether the most significant comes first.
    Length(u8, bool),
}

impl AnyFraming {
    /// Draws one.
    pub fn draw(rng: &mut Rng) -> AnyFraming {
        match rng.below(10) {
            0 => AnyFraming::Raw,
            1..=3 => AnyFraming::Lines(rng.one_in(2)),
            _ => AnyFraming::Length(rng.pick(&[1, 2, 4, 8]), rng.one_in(2)),
        }
    }

    /// The longest payload it can frame.
    pub fn payload_max(self) -> usize {
        match self {
            AnyFraming::Length(1, _) => 255,
            _ => PAYLOAD_MAX,
        }
    }

    /// Appends one frame in its wire form; written independently of the code under test.
    pub fn write(self, to: &mut Vec<u8>, payload: &[u8]) {
        self.write_length(to, payload.len() as u64);
        to.extend_from_slice(payload);
        match self {
            AnyFraming::Lines(true) => to.extend_from_slice(b"\r\n"),
            AnyFraming::Lines(false) => to.push(b'\n'),
            _ => {}
        }
    }

    /// Appends the length prefix, if the framing has one.
    pub fn write_length(self, to: &mut Vec<u8>, len: u64) {
        if let AnyFraming::Length(width, big) = self {
            for place in 0..width {
                let byte = if big { width - 1 - place } else { place };
                to.push((len >> (8 * u32::from(byte))) as u8);
            }
        }
    }

    /// Bytes before the payload.
    pub fn head(self) -> usize {
        if let AnyFraming::Length(width, _) = self { usize::from(width) } else { 0 }
    }

    fn length(width: u8, big: bool) -> LengthPrefix {
        LengthPrefix::bytes(width).order(if big { ByteOrder::Big } else { ByteOrder::Little })
    }

    fn lines(crlf: bool) -> Lines {
        if crlf { Lines::crlf() } else { Lines::default() }
    }
}

impl Framing for AnyFraming {
    fn decode(&self, bytes: &[u8], scanned: usize) -> Result<Decode, FrameError> {
        match *self {
            AnyFraming::Raw => Raw.decode(bytes, scanned),
            AnyFraming::Lines(crlf) => Self::lines(crlf).decode(bytes, scanned),
            AnyFraming::Length(width, big) => Self::length(width, big).decode(bytes, scanned),
        }
    }

    fn encode(&self, payload: Payload<'_>, out: &mut Outbox<'_>) -> Result<(), EncodeError> {
        match *self {
            AnyFraming::Raw => Raw.encode(payload, out),
            AnyFraming::Lines(crlf) => Self::lines(crlf).encode(payload, out),
            AnyFraming::Length(width, big) => Self::length(width, big).encode(payload, out),
        }
    }

    fn encoding(self: &Rc<Self>) -> Encoding {
        match **self {
            AnyFraming::Raw => Encoding::Raw,
            AnyFraming::Lines(crlf) => Encoding::Lines(Self::lines(crlf)),
            AnyFraming::Length(width, big) => Encoding::Length(Self::length(width, big)),
        }
    }
}

thread_local! {
    /// Bytes after which the next frame that is encoded makes the framing panic.
    static FUSE: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Encodes a frame for a connection with a framing that panics after it wrote `bytes` bytes itself,
/// which are not owed: they must neither be sent nor counted.
pub fn panic_in_encode(bytes: usize, reply: impl FnOnce()) {
    FUSE.set(Some(bytes));
    let panicked = catch_unwind(AssertUnwindSafe(reply)).is_err();
    assert!(FUSE.take().is_none() && panicked, "a frame was not encoded, or a panic was swallowed");
}

/// One of the framings that ship, or, if it is `touchy`, a user's own that panics on demand.
#[derive(Clone, Copy, Debug)]
pub struct TestFraming {
    /// The rule for its frames, touchy or not.
    pub framing: AnyFraming,
    /// True if it panics on demand.
    pub touchy: bool,
}

impl Framing for TestFraming {
    fn decode(&self, bytes: &[u8], scanned: usize) -> Result<Decode, FrameError> {
        self.framing.decode(bytes, scanned)
    }

    fn encode(&self, payload: Payload<'_>, out: &mut Outbox<'_>) -> Result<(), EncodeError> {
        if let Some(bytes) = FUSE.take() {
            out.put(&vec![b'!'; bytes]);
            // Not a violation, so nothing is printed.
            resume_unwind(Box::new("a planted panic"));
        }
        self.framing.encode(payload, out)
    }

    fn encoding(self: &Rc<Self>) -> Encoding {
        if self.touchy { Encoding::Custom(self.clone()) } else { Rc::new(self.framing).encoding() }
    }
}
