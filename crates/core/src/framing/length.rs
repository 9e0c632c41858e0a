use alloc::rc::Rc;
use alloc::vec::Vec;

use super::{
    Decode, EncodeError, Encoding, FrameError, Framing, InPlace, Payload, frame_or_more,
    not_above_frame_bytes_max,
};
use crate::bytes::Outbox;
use crate::{LimitError, Limits};

/// The order of the bytes of a length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ByteOrder {
    /// Most significant first, as on the network.
    #[default]
    Big,
    /// Least significant first.
    Little,
}

/// A length of 1, 2, 3, 4 or 8 bytes, then that many bytes of payload. The length does not count
/// itself.
///
/// [`varint`](LengthPrefix::varint), [`offset`](LengthPrefix::offset),
/// [`adjust`](LengthPrefix::adjust) and [`keep_header`](LengthPrefix::keep_header) turn it into a
/// [`LengthField`](super::LengthField), for lengths that are written or counted differently.
///
/// ```
/// use ringserve::framing::{Decode, Framing, LengthPrefix};
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
    /// Makes the framing with a length of `width` bytes, most significant first.
    ///
    /// # Panics
    /// If `width` is not 1, 2, 3, 4 or 8.
    pub const fn bytes(width: u8) -> LengthPrefix {
        assert!(matches!(width, 1 | 2 | 3 | 4 | 8), "a length has 1, 2, 3, 4 or 8 bytes");
        LengthPrefix { width, order: ByteOrder::Big }
    }

    /// Sets the byte order.
    pub const fn order(self, order: ByteOrder) -> LengthPrefix {
        LengthPrefix { order, ..self }
    }

    /// Bytes of the length.
    pub(super) const fn width(self) -> usize {
        self.width as usize
    }

    /// The length at the start of `bytes`, if it is there.
    #[inline(always)]
    pub(super) fn read(self, bytes: &[u8]) -> Option<u64> {
        // A branch for each width, so that the compiler knows how much it reads.
        match self.width {
            1 => self.read_wide::<1>(bytes),
            2 => self.read_wide::<2>(bytes),
            3 => self.read_wide::<3>(bytes),
            4 => self.read_wide::<4>(bytes),
            _ => self.read_wide::<8>(bytes),
        }
    }

    #[inline(always)]
    fn read_wide<const WIDTH: usize>(self, bytes: &[u8]) -> Option<u64> {
        let (length, mut wide) = (bytes.first_chunk::<WIDTH>()?, [0; 8]);
        Some(match self.order {
            ByteOrder::Big => {
                wide[8 - WIDTH..].copy_from_slice(length);
                u64::from_be_bytes(wide)
            }
            ByteOrder::Little => {
                wide[..WIDTH].copy_from_slice(length);
                u64::from_le_bytes(wide)
            }
        })
    }

    /// Writes a length. Nothing is written if it does not fit.
    #[inline(always)]
    pub(super) fn write(self, length: u64, out: &mut Outbox<'_>) -> Result<(), EncodeError> {
        self.fits(length)?;
        self.with_bytes(length, |bytes| out.put(bytes));
        Ok(())
    }

    /// Appends a length to bytes.
    pub(super) fn append(self, length: u64, out: &mut Vec<u8>) -> Result<(), EncodeError> {
        self.fits(length)?;
        self.with_bytes(length, |bytes| out.extend_from_slice(bytes));
        Ok(())
    }

    /// Writes a length before a payload that is there already.
    #[inline]
    pub(super) fn write_before(self, length: u64, written: &mut InPlace<'_>) -> Result<(), EncodeError> {
        self.fits(length)?;
        self.with_bytes(length, |bytes| written.set_header(bytes));
        Ok(())
    }

    #[inline(always)]
    fn with_bytes(self, length: u64, put: impl FnOnce(&[u8])) {
        match (self.order, self.width) {
            // A branch for the usual width, so that the compiler knows how much it copies.
            (ByteOrder::Big, 4) => put(&(length as u32).to_be_bytes()),
            (ByteOrder::Big, _) => put(&length.to_be_bytes()[8 - self.width()..]),
            (ByteOrder::Little, _) => put(&length.to_le_bytes()[..self.width()]),
        }
    }

    #[inline(always)]
    fn fits(self, length: u64) -> Result<(), EncodeError> {
        if self.width() < 8 && length >> (8 * self.width()) != 0 {
            return Err(EncodeError("longer than the length prefix can say"));
        }
        Ok(())
    }
}

impl Framing for LengthPrefix {
    #[inline]
    fn decode(&self, bytes: &[u8], _scanned: usize) -> Result<Decode, FrameError> {
        let header = self.width();
        let Some(length) = self.read(bytes) else { return Ok(Decode::More(header - bytes.len())) };
        Ok(frame_or_more(header, header, usize::try_from(length).unwrap_or(usize::MAX), bytes.len()))
    }

    #[inline]
    fn encode(&self, payload: Payload<'_>, out: &mut Outbox<'_>) -> Result<(), EncodeError> {
        self.write(payload.len() as u64, out)?;
        out.payload(payload);
        Ok(())
    }

    fn header_room(&self) -> usize {
        self.width()
    }

    fn encode_written(&self, written: &mut InPlace<'_>) -> Result<(), EncodeError> {
        self.write_before(written.payload_len() as u64, written)
    }

    fn check(&self, limits: &Limits) -> Result<(), LimitError> {
        not_above_frame_bytes_max("the smallest frame of LengthPrefix", self.width(), limits)
    }

    fn encoding(self: &Rc<Self>) -> Encoding {
        Encoding::Length(**self)
    }
}
