use alloc::rc::Rc;

use super::{
    Decode, EncodeError, Encoding, FrameError, Framing, InPlace, Payload, not_above_frame_bytes_max,
};
use crate::bytes::Outbox;
use crate::{LimitError, Limits};

/// Frames of one size. A reply of another size closes the connection
/// ([`CloseReason::ReplyNotFramed`](crate::CloseReason::ReplyNotFramed)).
///
/// ```
/// use ringserve::framing::{Decode, Fixed, Framing};
///
/// let framing = Fixed::bytes(8);
/// assert_eq!(framing.decode(b"price", 0), Ok(Decode::More(3)));
/// assert_eq!(framing.decode(b"price 42price", 0), Ok(Decode::Frame { skip: 0, len: 8, consumed: 8 }));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fixed {
    bytes: usize,
}

impl Fixed {
    /// Makes the framing for frames of `bytes` bytes, at most [`Limits::frame_bytes_max`].
    ///
    /// # Panics
    /// If `bytes` is 0: such frames would never end.
    pub const fn bytes(bytes: usize) -> Fixed {
        assert!(bytes > 0, "a frame of a fixed size has at least 1 byte");
        Fixed { bytes }
    }

    #[inline]
    fn check_size(&self, len: usize) -> Result<(), EncodeError> {
        if len == self.bytes { Ok(()) } else { Err(EncodeError("not of the size that all frames have")) }
    }
}

impl Framing for Fixed {
    #[inline]
    fn decode(&self, bytes: &[u8], _scanned: usize) -> Result<Decode, FrameError> {
        Ok(match self.bytes.checked_sub(bytes.len()) {
            None | Some(0) => Decode::Frame { skip: 0, len: self.bytes, consumed: self.bytes },
            Some(missing) => Decode::More(missing),
        })
    }

    #[inline]
    fn encode(&self, payload: Payload<'_>, out: &mut Outbox<'_>) -> Result<(), EncodeError> {
        self.check_size(payload.len())?;
        out.payload(payload);
        Ok(())
    }

    fn encode_written(&self, written: &mut InPlace<'_>) -> Result<(), EncodeError> {
        self.check_size(written.payload_len())
    }

    fn check(&self, limits: &Limits) -> Result<(), LimitError> {
        not_above_frame_bytes_max("Fixed::bytes", self.bytes, limits)
    }

    fn encoding(self: &Rc<Self>) -> Encoding {
        Encoding::Fixed(**self)
    }
}
