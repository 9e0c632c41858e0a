use alloc::rc::Rc;

use super::{Decode, EncodeError, Encoding, FrameError, Framing, Payload};
use crate::outbox::Outbox;

/// Lines that end in `\n`. A `\r` before it is not part of the payload. Replies end in `\n`, or in `\r\n`
/// after [`crlf`](Lines::crlf).
///
/// ```
/// use ringserve_core::framing::{Decode, Framing, Lines};
///
/// let found = Lines::default().decode(b"hello\r\nworld", 0);
/// assert_eq!(found, Ok(Decode::Frame { skip: 0, len: 5, consumed: 7 }));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lines {
    crlf: bool,
}

impl Lines {
    /// Lines whose replies end in `\r\n`, as in SMTP or Redis. Both endings are read either way.
    pub const fn crlf() -> Lines {
        Lines { crlf: true }
    }
}

impl Framing for Lines {
    #[inline]
    fn decode(&self, bytes: &[u8], scanned: usize) -> Result<Decode, FrameError> {
        let Some(found) = memchr::memchr(b'\n', &bytes[scanned..]) else { return Ok(Decode::More(1)) };
        let end = scanned + found;
        let len = if end > 0 && bytes[end - 1] == b'\r' { end - 1 } else { end };
        Ok(Decode::Frame { skip: 0, len, consumed: end + 1 })
    }

    #[inline]
    fn encode(&self, payload: Payload<'_>, out: &mut Outbox<'_>) -> Result<(), EncodeError> {
        out.payload(payload);
        // Two calls, so that each copies a length the compiler knows.
        if self.crlf {
            out.put(b"\r\n");
        } else {
            out.put(b"\n");
        }
        Ok(())
    }

    fn encoding(self: &Rc<Self>) -> Encoding {
        Encoding::Lines(**self)
    }
}
