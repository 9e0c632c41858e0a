//! Where a frame ends, and how a reply is written.
//!
//! | framing | a frame is | a reply gets |
//! |---|---|---|
//! | [`Raw`] | whatever arrived | nothing |
//! | [`Lines`] | bytes up to `\n`, without it and without a `\r` before it | `\n`, or `\r\n` |
//! | [`LengthPrefix`] | as many bytes as the number before it says | the same number |
//!
//! Writing one's own is one small trait: [`Framing`].

mod length;
mod lines;
mod raw;

use alloc::rc::Rc;
use core::fmt;

use crate::Frame;
use crate::outbox::Outbox;

pub use length::{ByteOrder, LengthPrefix};
pub use lines::Lines;
pub use raw::Raw;

/// What [`Framing::decode`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decode {
    /// No whole frame yet: at least this many bytes more are needed (1 if unknown, never 0). The larger the
    /// number, the fewer times `decode` is called again.
    More(usize),
    /// A frame.
    Frame {
        /// Bytes before the payload.
        skip: usize,
        /// Bytes of payload.
        len: usize,
        /// Bytes of the whole frame: `skip`, the payload, and what follows it. At least 1.
        consumed: usize,
    },
}

/// Why bytes are not a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameError {
    /// The frame is, or claims to be, larger than [`Limits::frame_bytes_max`](crate::Limits::frame_bytes_max).
    TooLarge {
        /// Bytes it has at least, or claims.
        bytes: usize,
        /// The limit.
        max: usize,
    },
    /// The bytes break the rules of the framing, which says how.
    Malformed(&'static str),
}

impl fmt::Display for FrameError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FrameError::TooLarge { bytes, max } => {
                write!(f, "a frame of at least {bytes} bytes is larger than frame_bytes_max, {max}")
            }
            FrameError::Malformed(what) => write!(f, "malformed frame: {what}"),
        }
    }
}

impl core::error::Error for FrameError {}

/// Why a payload cannot be written as a frame. It closes the connection: a reply that was left out would
/// shift every later one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EncodeError(
    /// What is wrong with the payload.
    pub &'static str,
);

impl fmt::Display for EncodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "payload cannot be framed: {}", self.0)
    }
}

impl core::error::Error for EncodeError {}

/// Finds frames in a stream of bytes, and writes them.
///
/// A framing keeps no state of a connection: `decode` sees all bytes of the frame from its start. A value is
/// shared by all connections of a shard.
///
/// ```
/// use ringserve_core::framing::{Decode, EncodeError, FrameError, Framing};
/// use ringserve_core::{Outbox, Payload};
///
/// /// A byte that tells the length, then as many bytes.
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
    /// Looks for a frame at the start of `bytes`. The first `scanned` bytes were seen by an earlier call that
    /// answered [`Decode::More`], so a search for a delimiter can go on behind them.
    ///
    /// It never sees more than [`Limits::frame_bytes_max`](crate::Limits::frame_bytes_max) bytes: what has not
    /// become a frame by then is too large, and a length that leads beyond is refused before anything is
    /// allocated for it.
    ///
    /// # Errors
    /// If the bytes can never become a frame. The service hears of it and the connection is closed.
    fn decode(&self, bytes: &[u8], scanned: usize) -> Result<Decode, FrameError>;

    /// Writes one frame with this payload.
    ///
    /// # Errors
    /// If the payload has no frame. The connection is closed; nothing of the frame may be written then.
    fn encode(&self, payload: Payload<'_>, out: &mut Outbox<'_>) -> Result<(), EncodeError>;

    /// How the shard encodes replies. The framings of this crate answer with themselves, so that a reply costs
    /// no indirect call; others are called through a pointer, which is what this default does.
    #[doc(hidden)]
    fn encoding(self: &Rc<Self>) -> Encoding
    where
        Self: Sized,
    {
        Encoding::Custom(self.clone())
    }
}

/// A framing's writing half, known to everything a shard shares. See [`Framing::encoding`].
#[doc(hidden)]
#[derive(Clone)]
pub enum Encoding {
    /// [`Raw`].
    Raw,
    /// [`Lines`].
    Lines(Lines),
    /// [`LengthPrefix`].
    Length(LengthPrefix),
    /// Any other.
    Custom(Rc<dyn Framing>),
}

impl Encoding {
    #[inline]
    pub(crate) fn encode(&self, payload: Payload<'_>, out: &mut Outbox<'_>) -> Result<(), EncodeError> {
        match self {
            Encoding::Raw => Raw.encode(payload, out),
            Encoding::Lines(lines) => lines.encode(payload, out),
            Encoding::Length(length) => length.encode(payload, out),
            Encoding::Custom(framing) => framing.encode(payload, out),
        }
    }
}

impl fmt::Debug for Encoding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Encoding::Raw => "Raw",
            Encoding::Lines(_) => "Lines",
            Encoding::Length(_) => "Length",
            Encoding::Custom(_) => "Custom",
        })
    }
}

/// What a reply says: bytes to copy, or a frame that may be lent.
#[derive(Debug)]
pub enum Payload<'a> {
    /// Bytes that are copied.
    Bytes(&'a [u8]),
    /// A received frame. Its payload is copied when small and lent when large.
    Frame(Frame),
}

impl Payload<'_> {
    /// Bytes of payload.
    #[inline]
    pub fn len(&self) -> usize {
        self.bytes().len()
    }

    /// True if there are none.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The payload.
    #[inline]
    pub fn bytes(&self) -> &[u8] {
        match self {
            Payload::Bytes(bytes) => bytes,
            Payload::Frame(frame) => frame,
        }
    }
}

impl From<Frame> for Payload<'_> {
    #[inline]
    fn from(frame: Frame) -> Self {
        Payload::Frame(frame)
    }
}

impl<'a, T: AsRef<[u8]> + ?Sized> From<&'a T> for Payload<'a> {
    #[inline]
    fn from(bytes: &'a T) -> Self {
        Payload::Bytes(bytes.as_ref())
    }
}

#[cfg(test)]
mod tests;
