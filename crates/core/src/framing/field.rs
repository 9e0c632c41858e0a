use alloc::rc::Rc;
use alloc::vec::Vec;

use super::varint::{VARINT_BYTES_MAX, read_varint, varint_bytes, with_varint, write_varint};
use super::{
    ByteOrder, Decode, EncodeError, Encoding, FrameError, Framing, InPlace, LengthPrefix, Payload,
    frame_or_more, not_above_frame_bytes_max,
};
use crate::bytes::Outbox;
use crate::{LimitError, Limits};

/// Room for a varint before a payload that is written in place: it fits most payloads from 128
/// bytes on. A shorter payload is moved by one byte, which costs next to nothing.
const VARINT_ROOM: usize = 2;

/// A length that is written, placed or counted differently from a [`LengthPrefix`]. It is made from
/// one.
///
/// ```text
///   offset     1, 2, 3, 4, 8, or a varint        length + adjust
///   ├────────┼───────────────────────────┼──────────────────────────┤
///   bytes      length                      what follows
///   ├──────────── header ────────────────┤
///                                        ├─ payload, header stripped ─┤
///   ├─────────────────────── payload, header kept ────────────────────┤
/// ```
///
/// ```
/// use ringserve::framing::{Decode, Framing, LengthPrefix};
///
/// // A length that counts itself.
/// let inclusive = LengthPrefix::bytes(2).adjust(-2);
/// assert_eq!(inclusive.decode(b"\0\x04hi", 0), Ok(Decode::Frame { skip: 2, len: 2, consumed: 4 }));
///
/// // A type, a length, and what it counts; the service sees all of it.
/// let typed = LengthPrefix::bytes(2).offset(1);
/// assert_eq!(typed.decode(b"T\0\x02hi", 0), Ok(Decode::Frame { skip: 0, len: 5, consumed: 5 }));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LengthField {
    /// `None` for a varint.
    width: Option<LengthPrefix>,
    /// The most bytes of a varint.
    varint_bytes_max: u8,
    /// Bytes before the length; above 0 only if the header is kept.
    offset: u8,
    keep_header: bool,
    adjust: i32,
}

impl LengthPrefix {
    /// A length in the form of Protocol Buffers: see [`LengthField::varint`].
    pub const fn varint() -> LengthField {
        LengthField::varint()
    }

    /// A length that follows `bytes` bytes: see [`LengthField::offset`].
    pub const fn offset(self, bytes: u8) -> LengthField {
        LengthField::of(self).offset(bytes)
    }

    /// A length that counts more or less than what follows it: see [`LengthField::adjust`].
    pub const fn adjust(self, adjust: i32) -> LengthField {
        LengthField::of(self).adjust(adjust)
    }

    /// A payload that begins with the length: see [`LengthField::keep_header`].
    pub const fn keep_header(self, keep_header: bool) -> LengthField {
        LengthField::of(self).keep_header(keep_header)
    }
}

impl LengthField {
    const fn of(prefix: LengthPrefix) -> LengthField {
        LengthField { width: Some(prefix), ..LengthField::varint() }
    }

    /// A length in the form of Protocol Buffers (LEB128): 7 bits in each byte, least significant
    /// first, the top bit set in all but the last; 1 to 10 bytes. Superfluous bytes and values
    /// beyond 64 bits are refused ([`FrameError::VarintOverlong`], [`FrameError::VarintOverflow`]).
    ///
    /// ```
    /// use ringserve::framing::{Decode, Framing, LengthField};
    ///
    /// let found = LengthField::varint().decode(&[0xAC, 0x02], 0);
    /// assert_eq!(found, Ok(Decode::More(300)));
    /// ```
    pub const fn varint() -> LengthField {
        LengthField::varint_max(VARINT_BYTES_MAX as u8)
    }

    /// A [`varint`](LengthField::varint) of at most `bytes` bytes, such as the four of MQTT: one
    /// with further bytes is refused ([`FrameError::VarintOverflow`]), and so is a reply that needs
    /// more.
    ///
    /// ```
    /// use ringserve::framing::{Decode, FrameError, Framing, LengthField};
    ///
    /// // A packet of MQTT: type and flags, the length, and what it counts.
    /// let packets = LengthField::varint_max(4).offset(1);
    /// assert_eq!(packets.decode(&[0xC0, 0], 0), Ok(Decode::Frame { skip: 0, len: 2, consumed: 2 }));
    /// assert_eq!(packets.decode(&[0x30, 0xFF, 0xFF, 0xFF, 0xFF], 0), Err(FrameError::VarintOverflow));
    /// ```
    ///
    /// # Panics
    /// If `bytes` is not 1 to 10.
    pub const fn varint_max(bytes: u8) -> LengthField {
        assert!(1 <= bytes && bytes as usize <= VARINT_BYTES_MAX, "a varint has 1 to 10 bytes");
        LengthField { width: None, varint_bytes_max: bytes, offset: 0, keep_header: false, adjust: 0 }
    }

    /// Sets the byte order.
    ///
    /// # Panics
    /// For a varint, which has one order.
    pub const fn order(self, order: ByteOrder) -> LengthField {
        let Some(prefix) = self.width else { panic!("a varint has one byte order") };
        LengthField { width: Some(prefix.order(order)), ..self }
    }

    /// Places the length after `bytes` bytes, which it does not count. If there are any, the header
    /// is kept as by [`keep_header`](LengthField::keep_header): they carry information, and only
    /// the service knows what to write there in a reply.
    pub const fn offset(self, bytes: u8) -> LengthField {
        LengthField { offset: bytes, keep_header: self.keep_header || bytes > 0, ..self }
    }

    /// Adds `adjust` to each length: above 0 if more of a header follows that the length does not
    /// count, below 0 if the length counts itself or bytes before it. A received length that falls
    /// below 0 closes the connection ([`FrameError::NegativeLength`]), and so does a reply shorter
    /// than `adjust`.
    pub const fn adjust(self, adjust: i32) -> LengthField {
        LengthField { adjust, ..self }
    }

    /// Leaves the header in the payload of a frame: the bytes before the length, and the length.
    /// The payload of a reply must then begin with it, with the right length; otherwise it closes
    /// the connection ([`CloseReason::ReplyNotFramed`](crate::CloseReason::ReplyNotFramed)).
    ///
    /// # Panics
    /// If it is switched off while there is an [`offset`](LengthField::offset).
    pub const fn keep_header(self, keep_header: bool) -> LengthField {
        assert!(keep_header || self.offset == 0, "with an offset the header is kept");
        LengthField { keep_header, ..self }
    }

    /// The whole frame of a payload in `parts`, after `before`: the bytes before the length, as
    /// many as the [`offset`](LengthField::offset), or bytes that have nothing to do with it. For
    /// frames that are shared, or inside others.
    ///
    /// ```
    /// use ringserve::framing::LengthField;
    ///
    /// let packets = LengthField::varint_max(4).offset(1);
    /// assert_eq!(packets.frame(&[0x30], &[b"\0\x01t", b"on"]), Ok(b"\x30\x05\0\x01ton".to_vec()));
    /// ```
    ///
    /// # Errors
    /// If the length cannot express the size of the payload.
    pub fn frame(self, before: &[u8], parts: &[&[u8]]) -> Result<Vec<u8>, EncodeError> {
        let bytes = parts.iter().map(|part| part.len()).sum();
        let length = self.length_of(bytes)?;
        let mut frame = Vec::with_capacity(before.len() + VARINT_BYTES_MAX + bytes);
        frame.extend_from_slice(before);
        match self.width {
            Some(prefix) => prefix.append(length, &mut frame)?,
            None => with_varint(length, |header| frame.extend_from_slice(header)),
        }
        parts.iter().for_each(|part| frame.extend_from_slice(part));
        Ok(frame)
    }

    /// Bytes of the shortest header.
    fn header_min(self) -> usize {
        usize::from(self.offset) + self.width.map_or(1, LengthPrefix::width)
    }

    /// The length before a payload of `bytes` bytes.
    fn length_of(self, bytes: usize) -> Result<u64, EncodeError> {
        let length = u64::try_from(bytes as i128 - i128::from(self.adjust))
            .map_err(|_| EncodeError("shorter than the bytes added to each length"))?;
        if self.width.is_none() && varint_bytes(length) > self.varint_bytes_max.into() {
            return Err(EncodeError("longer than a varint of this length can say"));
        }
        Ok(length)
    }

    /// Checks a payload that begins with its header.
    fn check_whole(self, payload: &[u8]) -> Result<(), EncodeError> {
        match self.decode(payload, 0) {
            Ok(Decode::Frame { consumed, .. }) if consumed == payload.len() => Ok(()),
            _ => Err(EncodeError("not one whole frame, as the kept header must make it")),
        }
    }
}

impl Framing for LengthField {
    #[inline]
    fn decode(&self, bytes: &[u8], _scanned: usize) -> Result<Decode, FrameError> {
        let missing = self.header_min().saturating_sub(bytes.len());
        if missing > 0 {
            return Ok(Decode::More(missing));
        }
        let field = &bytes[self.offset.into()..];
        let found = match self.width {
            Some(prefix) => prefix.read(field).map(|length| (length, prefix.width())),
            None => read_varint(field, self.varint_bytes_max.into())?,
        };
        let Some((length, width)) = found else { return Ok(Decode::More(1)) };
        let follows = i128::from(length) + i128::from(self.adjust);
        if follows < 0 {
            return Err(FrameError::NegativeLength { length, adjust: self.adjust.into() });
        }
        let header = usize::from(self.offset) + width;
        let skip = if self.keep_header { 0 } else { header };
        Ok(frame_or_more(skip, header, usize::try_from(follows).unwrap_or(usize::MAX), bytes.len()))
    }

    fn encode(&self, payload: Payload<'_>, out: &mut Outbox<'_>) -> Result<(), EncodeError> {
        if self.keep_header {
            self.check_whole(payload.bytes())?;
        } else {
            let length = self.length_of(payload.len())?;
            match self.width {
                Some(prefix) => prefix.write(length, out)?,
                None => write_varint(length, out),
            }
        }
        out.payload(payload);
        Ok(())
    }

    fn header_room(&self) -> usize {
        if self.keep_header { 0 } else { self.width.map_or(VARINT_ROOM, LengthPrefix::width) }
    }

    fn encode_written(&self, written: &mut InPlace<'_>) -> Result<(), EncodeError> {
        if self.keep_header {
            return self.check_whole(&written.payload());
        }
        let length = self.length_of(written.payload_len())?;
        match self.width {
            Some(prefix) => prefix.write_before(length, written),
            None => {
                with_varint(length, |header| written.set_header(header));
                Ok(())
            }
        }
    }

    fn check(&self, limits: &Limits) -> Result<(), LimitError> {
        let smallest = self.header_min().saturating_add(usize::try_from(self.adjust).unwrap_or(0));
        not_above_frame_bytes_max("the smallest frame of LengthField", smallest, limits)
    }

    fn encoding(self: &Rc<Self>) -> Encoding {
        Encoding::Field(**self)
    }
}
