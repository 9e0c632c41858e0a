use alloc::rc::Rc;

use super::{Decode, EncodeError, Encoding, FrameError, Framing, Payload};
use crate::outbox::Outbox;

/// In which order the bytes of a length stand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ByteOrder {
    /// Most significant first, as on the network.
    #[default]
    Big,
    /// Least significant first.
    Little,
}

/// A length of 1, 2, 4 or 8 bytes, then as many bytes of payload. The length does not count itself.
///
/// ```
/// use ringserve_core::framing::{Decode, Framing, LengthPrefix};
///
/// let framing = LengthPrefix::bytes(2);
/// assert_eq!(framing.decode(b"\0\x05hel", 0), Ok(Decode::More(2)));
/// assert_eq!(framing.decode(b"\0\x02hi", 0), Ok(Decode::Frame { skip: 2, len: 2, consumed: 4 }));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LengthPrefix {
    width: u8,
    order: ByteOrder,
}

impl Default for LengthPrefix {
    /// Four bytes, most significant first.
    fn default() -> LengthPrefix {
        LengthPrefix::bytes(4)
    }
}

impl LengthPrefix {
    /// A length of `width` bytes, most significant first.
    ///
    /// # Panics
    /// If `width` is not 1, 2, 4 or 8.
    pub const fn bytes(width: u8) -> LengthPrefix {
        assert!(matches!(width, 1 | 2 | 4 | 8), "a length has 1, 2, 4 or 8 bytes");
        LengthPrefix { width, order: ByteOrder::Big }
    }

    /// The same with another byte order.
    pub const fn order(self, order: ByteOrder) -> LengthPrefix {
        LengthPrefix { order, ..self }
    }

    fn read(self, prefix: &[u8]) -> u64 {
        let mut wide = [0; 8];
        match self.order {
            ByteOrder::Big => {
                wide[8 - prefix.len()..].copy_from_slice(prefix);
                u64::from_be_bytes(wide)
            }
            ByteOrder::Little => {
                wide[..prefix.len()].copy_from_slice(prefix);
                u64::from_le_bytes(wide)
            }
        }
    }
}

impl Framing for LengthPrefix {
    #[inline]
    fn decode(&self, bytes: &[u8], _scanned: usize) -> Result<Decode, FrameError> {
        let skip = usize::from(self.width);
        let Some(prefix) = bytes.get(..skip) else { return Ok(Decode::More(skip - bytes.len())) };
        // A length beyond the address space saturates; the limit on frames refuses it.
        let len = usize::try_from(self.read(prefix)).unwrap_or(usize::MAX);
        let consumed = len.saturating_add(skip);
        Ok(match consumed.checked_sub(bytes.len()) {
            None | Some(0) => Decode::Frame { skip, len, consumed },
            Some(missing) => Decode::More(missing),
        })
    }

    #[inline]
    fn encode(&self, payload: Payload<'_>, out: &mut Outbox<'_>) -> Result<(), EncodeError> {
        let (len, width) = (payload.len() as u64, usize::from(self.width));
        if width < 8 && len >> (8 * width) != 0 {
            return Err(EncodeError("longer than the length prefix can say"));
        }
        match self.order {
            ByteOrder::Big => out.put(&len.to_be_bytes()[8 - width..]),
            ByteOrder::Little => out.put(&len.to_le_bytes()[..width]),
        }
        out.payload(payload);
        Ok(())
    }

    fn encoding(self: &Rc<Self>) -> Encoding {
        Encoding::Length(**self)
    }
}
