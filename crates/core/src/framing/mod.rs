//! Framings: the ends of frames, and the form of replies.
//!
//! | framing | a frame is | a reply gets |
//! |---|---|---|
//! | [`Raw`] | a piece of received bytes | nothing |
//! | [`Lines`] | bytes up to `\n`, without it and without a `\r` before it | `\n`, or `\r\n` |
//! | [`Delimiter`] | bytes up to a delimiter of 1 to 255 bytes, without it | the delimiter |
//! | [`Fixed`] | a fixed number of bytes | nothing, and must have the size |
//! | [`LengthPrefix`] | as many bytes as the number before it gives | the same number |
//! | [`LengthField`] | the same, with the number written, placed or counted differently | the same number, or nothing |
//! | [`DotStuffed`] | a line, and a text up to a line with a dot alone, in pieces | the end of its lines |
//!
//! A frame inside one receive buffer is never copied; a frame that spans buffers is copied once, to
//! put it together. [`FrameError`] has the faults of received bytes, [`EncodeError`] those of
//! replies.
//!
//! To write your own, implement one small trait: [`Framing`]. If calls switch its rule, if it hands
//! over facts that it found, or if its frames come in pieces, implement [`TypedFraming`].
// May use: bytes, limits.
// Begin with: `Framing`, then `lines.rs`.

mod delimiter;
mod dot_stuffed;
mod error;
mod field;
mod fields;
mod fixed;
mod length;
mod lines;
mod raw;
mod typed;
mod varint;

use alloc::rc::Rc;
use alloc::vec::Vec;
use core::fmt;

use crate::bytes::Outbox;
use crate::{Batch, LimitError, Limits};

pub use delimiter::Delimiter;
pub use dot_stuffed::{DotPart, DotState, DotStuffed};
pub use error::{EncodeError, FrameError};
pub use field::LengthField;
pub use fields::{FieldError, Fields};
pub use fixed::Fixed;
pub use length::{ByteOrder, LengthPrefix};
pub use lines::Lines;
pub use raw::Raw;
pub use typed::{AsFramingState, Cut, DynWriter, FramingState, TypedFraming};

pub use crate::bytes::{InPlace, Payload, WriteResult};

/// The result of [`Framing::decode`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decode {
    /// No whole frame yet: at least this many bytes are missing (1 if unknown, never 0). A larger
    /// number saves further calls of `decode`.
    More(usize),
    /// A frame.
    Frame {
        /// Bytes before the payload.
        skip: usize,
        /// Bytes of payload.
        len: usize,
        /// Bytes of the whole frame: `skip`, the payload, and bytes after it. At least 1.
        consumed: usize,
    },
}

/// Finds frames in a stream of bytes, and writes them.
///
/// A framing keeps no state of a connection: `decode` sees all bytes of the frame from its start.
/// All connections of a shard share one value. A protocol that needs more implements
/// [`TypedFraming`].
///
/// ```
/// use ringserve::framing::{Decode, EncodeError, FrameError, Framing};
/// use ringserve::framing::{Outbox, Payload};
///
/// /// A byte with the length, then as many bytes.
/// struct Short;
///
/// impl Framing for Short {
///     fn decode(&self, bytes: &[u8], _scanned: usize) -> Result<Decode, FrameError> {
///         let Some(&len) = bytes.first() else { return Ok(Decode::More(1)) };
///         let consumed = 1 + usize::from(len);
///         match consumed.checked_sub(bytes.len()) {
///             None | Some(0) => Ok(Decode::Frame { skip: 1, len: consumed - 1, consumed }),
///             Some(missing) => Ok(Decode::More(missing)),
///         }
///     }
///
///     fn encode(&self, payload: Payload<'_>, out: &mut Outbox<'_>) -> Result<(), EncodeError> {
///         let len = u8::try_from(payload.len()).map_err(|_| EncodeError("more than 255 bytes"))?;
///         out.put(&[len]);
///         out.payload(payload);
///         Ok(())
///     }
/// }
///
/// assert_eq!(Short.decode(b"\x02hi!", 0), Ok(Decode::Frame { skip: 1, len: 2, consumed: 3 }));
/// ```
pub trait Framing: 'static {
    /// Looks for a frame at the start of `bytes`. An earlier call that answered [`Decode::More`]
    /// has seen the first `scanned` bytes, so a search for a delimiter can go on after them.
    ///
    /// It never sees more than [`Limits::frame_bytes_max`](crate::Limits::frame_bytes_max) bytes:
    /// longer frames are too large, and a length that leads beyond is refused before anything is
    /// allocated for it.
    ///
    /// # Errors
    /// If the bytes can never become a frame. The service is informed, and the connection is
    /// closed.
    fn decode(&self, bytes: &[u8], scanned: usize) -> Result<Decode, FrameError>;

    /// Writes one frame with this payload.
    ///
    /// # Errors
    /// If the payload has no frame. The connection is closed; nothing of the frame may be written
    /// then.
    fn encode(&self, payload: Payload<'_>, out: &mut Outbox<'_>) -> Result<(), EncodeError>;

    /// Bytes, up to 32, left free before a payload that is written in place
    /// ([`Cx::reply_with`](https://docs.rs/ringserve/latest/ringserve/struct.Cx.html#method.reply_with)),
    /// since the header there may hold its length. A header of another size moves the payload.
    fn header_room(&self) -> usize {
        0
    }

    /// Makes a frame of a payload that was written in place, as [`encode`](Framing::encode) does
    /// for a payload elsewhere. By default the payload is copied out and given to `encode`.
    ///
    /// # Errors
    /// If the payload has no frame. The connection is closed, and nothing of the frame is sent.
    fn encode_written(&self, written: &mut InPlace<'_>) -> Result<(), EncodeError> {
        let (payload, mut out) = written.take();
        self.encode(Payload::Bytes(&payload), &mut out)
    }

    /// Refuses limits with which this framing cannot work, naming both sides. Called at the start
    /// of the server, which then fails.
    ///
    /// # Errors
    /// The first fault found. By default there is none.
    fn check(&self, limits: &Limits) -> Result<(), LimitError> {
        let _ = limits;
        Ok(())
    }

    /// The encoding of replies. The framings of this crate return themselves, so that a reply costs
    /// no indirect call; others are called through a pointer, which is the default. A framing that
    /// writes exactly as one of this crate returns [`Encoding::of`] that one, and costs no more.
    ///
    /// ```
    /// use std::rc::Rc;
    ///
    /// use ringserve::framing::{Decode, EncodeError, Encoding, FrameError, Framing, Lines, Outbox, Payload};
    /// use ringserve::limits::LimitError;
    /// use ringserve::Limits;
    ///
    /// /// Lines of ASCII.
    /// #[derive(Clone)]
    /// struct Ascii(Lines);
    ///
    /// impl Framing for Ascii {
    ///     fn decode(&self, bytes: &[u8], scanned: usize) -> Result<Decode, FrameError> {
    ///         match self.0.decode(bytes, scanned)? {
    ///             Decode::Frame { len, .. } if !bytes[..len].is_ascii() => {
    ///                 Err(FrameError::coded(8, "a byte above 127"))
    ///             }
    ///             found => Ok(found),
    ///         }
    ///     }
    ///
    ///     fn encode(&self, payload: Payload<'_>, out: &mut Outbox<'_>) -> Result<(), EncodeError> {
    ///         self.0.encode(payload, out)
    ///     }
    ///
    ///     fn check(&self, limits: &Limits) -> Result<(), LimitError> {
    ///         self.0.check(limits)
    ///     }
    ///
    ///     fn encoding(self: &Rc<Self>) -> Encoding {
    ///         Encoding::of(&self.0)
    ///     }
    /// }
    ///
    /// let refused = Ascii(Lines::crlf()).decode("grüße\r\n".as_bytes(), 0).unwrap_err();
    /// assert_eq!(refused.code(), Some(8));
    /// ```
    fn encoding(self: &Rc<Self>) -> Encoding
    where
        Self: Sized,
    {
        Encoding::Custom(self.clone())
    }
}

/// Encodes one payload as a server sends it, in a copy and without a connection: for tests of a
/// framing.
///
/// ```
/// use ringserve::framing::{LengthPrefix, encode_to_vec};
///
/// assert_eq!(encode_to_vec(&LengthPrefix::bytes(2), b"hi"), Ok(b"\0\x02hi".to_vec()));
/// assert!(encode_to_vec(&LengthPrefix::bytes(1), &[0; 256]).is_err());
/// ```
///
/// # Errors
/// The framing's.
///
/// # Panics
/// If the framing returns an error after it wrote something, which it must not.
pub fn encode_to_vec(framing: &impl TypedFraming, payload: &[u8]) -> Result<Vec<u8>, EncodeError> {
    let mut batch = Batch::new();
    let encoded = framing.write(Payload::Bytes(payload), &mut Outbox::new(&mut batch, false));
    assert!(encoded.is_ok() || batch.is_empty(), "a payload was refused after a part of it was written");
    encoded.map(|()| batch.into_bytes())
}

/// The writing half of a framing, in a form that all parts of a shard know. See
/// [`Framing::encoding`].
#[derive(Clone)]
pub enum Encoding {
    /// [`Raw`].
    #[doc(hidden)]
    Raw,
    /// [`Lines`].
    #[doc(hidden)]
    Lines(Lines),
    /// [`LengthPrefix`].
    #[doc(hidden)]
    Length(LengthPrefix),
    /// [`LengthField`].
    #[doc(hidden)]
    Field(LengthField),
    /// [`Fixed`].
    #[doc(hidden)]
    Fixed(Fixed),
    /// [`Delimiter`].
    #[doc(hidden)]
    Delimiter(Rc<Delimiter>),
    /// Any other framing.
    #[doc(hidden)]
    Custom(Rc<dyn DynWriter>),
}

impl Encoding {
    /// The encoding of a framing.
    pub fn of<F: TypedFraming + Clone>(framing: &F) -> Encoding {
        Rc::new(framing.clone()).reply_encoding()
    }

    /// As [`encode`](Encoding::encode), for bytes that are copied.
    #[inline(always)]
    pub(crate) fn encode_bytes(&self, bytes: &[u8], out: &mut Outbox<'_>) -> Result<(), EncodeError> {
        match self {
            Encoding::Raw => {
                out.put(bytes);
                Ok(())
            }
            Encoding::Lines(lines) => {
                lines.put(bytes, out);
                Ok(())
            }
            other => other.encode(Payload::Bytes(bytes), out),
        }
    }

    /// A function apart, so that the two above stay small where they are inlined.
    #[inline(never)]
    pub(crate) fn encode(&self, payload: Payload<'_>, out: &mut Outbox<'_>) -> Result<(), EncodeError> {
        match self {
            Encoding::Raw => Raw.encode(payload, out),
            Encoding::Lines(lines) => lines.encode(payload, out),
            Encoding::Length(length) => length.encode(payload, out),
            Encoding::Field(field) => field.encode(payload, out),
            Encoding::Fixed(fixed) => fixed.encode(payload, out),
            Encoding::Delimiter(delimiter) => delimiter.encode(payload, out),
            Encoding::Custom(framing) => framing.dyn_write(payload, out),
        }
    }
}

impl Encoding {
    /// As [`Framing::header_room`].
    pub(crate) fn header_room(&self) -> usize {
        match self {
            Encoding::Raw | Encoding::Lines(_) | Encoding::Fixed(_) | Encoding::Delimiter(_) => 0,
            Encoding::Length(length) => length.header_room(),
            Encoding::Field(field) => field.header_room(),
            Encoding::Custom(framing) => framing.dyn_room_before(),
        }
    }

    /// As [`Framing::encode_written`].
    pub(crate) fn encode_written(&self, written: &mut InPlace<'_>) -> Result<(), EncodeError> {
        match self {
            Encoding::Raw => Raw.encode_written(written),
            Encoding::Lines(lines) => lines.encode_written(written),
            Encoding::Length(length) => length.encode_written(written),
            Encoding::Field(field) => field.encode_written(written),
            Encoding::Fixed(fixed) => fixed.encode_written(written),
            Encoding::Delimiter(delimiter) => delimiter.encode_written(written),
            Encoding::Custom(framing) => framing.dyn_write_around(written),
        }
    }
}

impl fmt::Debug for Encoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Encoding::Raw => "Raw",
            Encoding::Lines(_) => "Lines",
            Encoding::Length(_) => "Length",
            Encoding::Field(_) => "Field",
            Encoding::Fixed(_) => "Fixed",
            Encoding::Delimiter(_) => "Delimiter",
            Encoding::Custom(_) => "Custom",
        })
    }
}

/// The answer for a frame of which `have` bytes have arrived, with `follows` bytes after its
/// header.
#[inline(always)]
fn frame_or_more(skip: usize, header: usize, follows: usize, have: usize) -> Decode {
    // A length beyond the address space saturates; the limit on frames refuses it.
    let consumed = follows.saturating_add(header);
    match consumed.checked_sub(have) {
        None | Some(0) => Decode::Frame { skip, len: consumed - skip, consumed },
        Some(missing) => Decode::More(missing),
    }
}

/// The answer of a searching framing that found no end in `bytes` bytes, or in the first
/// `bytes_max` of them.
#[inline]
fn unended(bytes: usize, bytes_max: usize) -> Result<Decode, FrameError> {
    if bytes < bytes_max { Ok(Decode::More(1)) } else { Err(FrameError::OverBytesMax { max: bytes_max }) }
}

/// Checks the `bytes_max` of a searching framing; `usize::MAX` means none.
fn bytes_max_in_range(
    name: &'static str,
    bytes_max: usize,
    min: usize,
    limits: &Limits,
) -> Result<(), LimitError> {
    if bytes_max < min {
        let (value, min, max) = (bytes_max as u64, min as u64, limits.frame_bytes_max as u64);
        return Err(LimitError::Range { name, value, min, max });
    }
    if bytes_max == usize::MAX { Ok(()) } else { not_above_frame_bytes_max(name, bytes_max, limits) }
}

fn not_above_frame_bytes_max(small: &'static str, value: usize, limits: &Limits) -> Result<(), LimitError> {
    let (small_value, large_value) = (value as u64, limits.frame_bytes_max as u64);
    if small_value <= large_value {
        return Ok(());
    }
    Err(LimitError::Order { small, small_value, large: "Limits::frame_bytes_max", large_value })
}

#[cfg(test)]
mod tests;
