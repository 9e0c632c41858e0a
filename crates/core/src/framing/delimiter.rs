use alloc::rc::Rc;
use core::fmt;

use memchr::memmem::Finder;

use super::{
    Decode, EncodeError, Encoding, FrameError, Framing, InPlace, Payload, bytes_max_in_range, unended,
};
use crate::bytes::Outbox;
use crate::{LimitError, Limits};

/// The longest delimiter: an arbitrary number, far above any in use. It bounds the bytes that are
/// searched again when a frame goes on.
const DELIMITER_BYTES_MAX: usize = 255;

const HOLDS_DELIMITER: EncodeError = EncodeError("the payload holds the delimiter");

/// Bytes up to a delimiter, which is not part of the payload. The first delimiter in the stream
/// ends the frame, even if the bytes could be read in two ways.
///
/// A reply that the peer would read as more than one frame closes the connection
/// ([`CloseReason::ReplyNotFramed`](crate::CloseReason::ReplyNotFramed)): the delimiter is in it,
/// or its end and the delimiter after it form another one.
///
/// ```
/// use ringserve::framing::{Decode, Delimiter, Framing};
///
/// let framing = Delimiter::new(b"\0");
/// assert_eq!(framing.decode(b"<a/>\0<b", 0), Ok(Decode::Frame { skip: 0, len: 4, consumed: 5 }));
///
/// let mail = Delimiter::new(b"\r\n.\r\n").bytes_max(1 << 20);
/// assert_eq!(mail.decode(b"hello\r\n.\r", 0), Ok(Decode::More(1)));
/// ```
#[derive(Clone)]
pub struct Delimiter {
    finder: Finder<'static>,
    bytes_max: usize,
    /// True if its end is also its beginning, as in `\r\n.\r\n`: the end of a payload may begin a
    /// delimiter.
    overlaps: bool,
}

impl Delimiter {
    /// Makes the framing for frames that end in these bytes.
    ///
    /// # Panics
    /// If there are none, or more than 255.
    pub fn new(delimiter: impl AsRef<[u8]>) -> Delimiter {
        let bytes = delimiter.as_ref();
        assert!((1..=DELIMITER_BYTES_MAX).contains(&bytes.len()), "a delimiter has 1 to 255 bytes");
        Delimiter {
            finder: Finder::new(bytes).into_owned(),
            bytes_max: usize::MAX,
            overlaps: (1..bytes.len()).any(|shift| is_shifted(bytes, shift)),
        }
    }

    /// Sets the largest received frame with its delimiter, from the delimiter's own length to
    /// [`Limits::frame_bytes_max`], which bounds it otherwise. A longer frame closes the connection
    /// ([`FrameError::OverBytesMax`]). With a value out of range the server does not start. Replies
    /// are not bounded.
    pub fn bytes_max(self, bytes_max: usize) -> Delimiter {
        Delimiter { bytes_max, ..self }
    }

    fn bytes(&self) -> &[u8] {
        self.finder.needle()
    }

    /// True if a delimiter begins in `payload` and ends in the one after it.
    fn ends_early(&self, payload: &[u8]) -> bool {
        if self.finder.find(payload).is_some() {
            return true;
        }
        let bytes = self.bytes();
        let begun_max = payload.len().min(bytes.len() - 1);
        self.overlaps
            && (1..=begun_max)
                .any(|begun| bytes.starts_with(&payload[payload.len() - begun..]) && is_shifted(bytes, begun))
    }
}

/// True if the bytes from `shift` on equal the first ones.
fn is_shifted(bytes: &[u8], shift: usize) -> bool {
    bytes.starts_with(&bytes[shift..])
}

impl Framing for Delimiter {
    #[inline]
    fn decode(&self, bytes: &[u8], scanned: usize) -> Result<Decode, FrameError> {
        let width = self.bytes().len();
        // A delimiter may begin in bytes that were seen before.
        let from = scanned.saturating_sub(width - 1);
        let seen = bytes.len().min(self.bytes_max);
        let Some(found) = self.finder.find(&bytes[from..seen]) else {
            return unended(bytes.len(), self.bytes_max);
        };
        Ok(Decode::Frame { skip: 0, len: from + found, consumed: from + found + width })
    }

    fn encode(&self, payload: Payload<'_>, out: &mut Outbox<'_>) -> Result<(), EncodeError> {
        if self.ends_early(payload.bytes()) {
            return Err(HOLDS_DELIMITER);
        }
        out.payload(payload);
        out.put(self.bytes());
        Ok(())
    }

    fn encode_written(&self, written: &mut InPlace<'_>) -> Result<(), EncodeError> {
        if self.ends_early(&written.payload()) {
            return Err(HOLDS_DELIMITER);
        }
        written.put_end(self.bytes());
        Ok(())
    }

    fn check(&self, limits: &Limits) -> Result<(), LimitError> {
        bytes_max_in_range("Delimiter::bytes_max", self.bytes_max, self.bytes().len(), limits)
    }

    fn encoding(self: &Rc<Self>) -> Encoding {
        Encoding::Delimiter(self.clone())
    }
}

impl fmt::Debug for Delimiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("Delimiter");
        debug.field("bytes", &format_args!("\"{}\"", self.bytes().escape_ascii()));
        debug.field("bytes_max", &self.bytes_max).finish()
    }
}
