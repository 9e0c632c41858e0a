use alloc::rc::Rc;

use super::{
    Decode, EncodeError, Encoding, FrameError, Framing, InPlace, Payload, bytes_max_in_range, unended,
};
use crate::bytes::Outbox;
use crate::{LimitError, Limits};

/// Lines that end in `\n`. A `\r` before it is not part of the payload. Replies end in `\n`, or in
/// `\r\n` after [`crlf`](Lines::crlf).
///
/// A reply is not searched: the peer reads a reply with `\n` in it as several lines, which is how
/// an answer of several lines is written. Remove `\n` from untrusted text before replying with it.
/// [`Delimiter`](super::Delimiter) refuses such replies.
///
/// ```
/// use ringserve::framing::{Decode, FrameError, Framing, Lines};
///
/// let found = Lines::default().decode(b"hello\r\nworld", 0);
/// assert_eq!(found, Ok(Decode::Frame { skip: 0, len: 5, consumed: 7 }));
///
/// // SMTP: 512 bytes with the line's end.
/// let smtp = Lines::crlf().bytes_max(512);
/// let endless = smtp.decode(&[b'x'; 600], 0);
/// assert_eq!(endless, Err(FrameError::OverBytesMax { max: 512 }));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lines {
    crlf: bool,
    bytes_max: usize,
}

impl Default for Lines {
    /// Lines whose replies end in `\n`, bounded only by [`Limits::frame_bytes_max`].
    fn default() -> Lines {
        Lines::lf()
    }
}

impl Lines {
    /// Lines whose replies end in `\n`: the default.
    pub const fn lf() -> Lines {
        Lines { crlf: false, bytes_max: usize::MAX }
    }

    /// Lines whose replies end in `\r\n`, as in SMTP or Redis. Both line ends are read either way.
    pub const fn crlf() -> Lines {
        Lines { crlf: true, ..Lines::lf() }
    }

    /// Sets the longest received line with its end, 1 to [`Limits::frame_bytes_max`], which bounds
    /// it otherwise. A longer line closes the connection ([`FrameError::OverBytesMax`]). With a
    /// value out of range the server does not start. Replies are not bounded.
    pub const fn bytes_max(self, bytes_max: usize) -> Lines {
        Lines { bytes_max, ..self }
    }
}

impl Lines {
    /// Encodes bytes that are copied.
    #[inline(always)]
    pub(super) fn put(&self, bytes: &[u8], out: &mut Outbox<'_>) {
        // Two calls, so that each copies an end of a length that the compiler knows.
        if self.crlf {
            out.put_two(bytes, b"\r\n");
        } else {
            out.put_two(bytes, b"\n");
        }
    }
}

impl Framing for Lines {
    #[inline]
    fn decode(&self, bytes: &[u8], scanned: usize) -> Result<Decode, FrameError> {
        let seen = bytes.len().min(self.bytes_max);
        let Some(found) = find_end(&bytes[scanned..seen]) else {
            return unended(bytes.len(), self.bytes_max);
        };
        let end = scanned + found;
        let len = if end > 0 && bytes[end - 1] == b'\r' { end - 1 } else { end };
        Ok(Decode::Frame { skip: 0, len, consumed: end + 1 })
    }

    #[inline]
    fn encode(&self, payload: Payload<'_>, out: &mut Outbox<'_>) -> Result<(), EncodeError> {
        // Two calls, so that each copies an end of a length that the compiler knows.
        if self.crlf {
            out.payload_and(payload, b"\r\n");
        } else {
            out.payload_and(payload, b"\n");
        }
        Ok(())
    }

    fn encode_written(&self, written: &mut InPlace<'_>) -> Result<(), EncodeError> {
        written.put_end(if self.crlf { b"\r\n" } else { b"\n" });
        Ok(())
    }

    fn check(&self, limits: &Limits) -> Result<(), LimitError> {
        bytes_max_in_range("Lines::bytes_max", self.bytes_max, 1, limits)
    }

    fn encoding(self: &Rc<Self>) -> Encoding {
        Encoding::Lines(**self)
    }
}

/// Finds a line end with the instructions that every processor of the architecture has, so that the
/// search is inlined. `memchr` calls the variant that suits the processor through a pointer, if it
/// detects the processor at all (its feature `std`).
#[cfg(target_arch = "x86_64")]
#[inline]
fn find_end(bytes: &[u8]) -> Option<usize> {
    memchr::arch::x86_64::sse2::memchr::One::new(b'\n')?.find(bytes)
}

/// Finds a line end: on other architectures `memchr` is inlined as it is.
#[cfg(not(target_arch = "x86_64"))]
#[inline]
fn find_end(bytes: &[u8]) -> Option<usize> {
    memchr::memchr(b'\n', bytes)
}
