use alloc::rc::Rc;

use super::{Decode, EncodeError, Encoding, FrameError, Framing, InPlace, Payload};
use crate::bytes::Outbox;

/// No framing: each frame is a piece of received bytes, at most one receive buffer, and replies are
/// written as they are. Frame boundaries have no meaning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Raw;

impl Framing for Raw {
    #[inline]
    fn decode(&self, bytes: &[u8], _scanned: usize) -> Result<Decode, FrameError> {
        Ok(match bytes.len() {
            0 => Decode::More(1),
            len => Decode::Frame { skip: 0, len, consumed: len },
        })
    }

    #[inline]
    fn encode(&self, payload: Payload<'_>, out: &mut Outbox<'_>) -> Result<(), EncodeError> {
        out.payload(payload);
        Ok(())
    }

    fn encode_written(&self, _written: &mut InPlace<'_>) -> Result<(), EncodeError> {
        Ok(())
    }

    fn encoding(self: &Rc<Self>) -> Encoding {
        Encoding::Raw
    }
}
