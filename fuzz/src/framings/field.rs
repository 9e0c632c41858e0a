//! [`LengthField`], and a naive version of it.

use ringserve_core::framing::{ByteOrder, LengthField, LengthPrefix};

use super::Start;

/// Its options.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// Bytes of the length; 0 for a varint.
    pub width: u8,
    /// Whether the length is little-endian.
    pub little: bool,
    /// Bytes before the length.
    pub offset: u8,
    /// Whether the payload begins with the header.
    pub keep: bool,
    /// Bytes that follow beyond the value of the length.
    pub adjust: i32,
}

impl Field {
    /// No option.
    pub const PLAIN: Field = Field { width: 1, little: false, offset: 0, keep: false, adjust: 0 };

    /// The framing that ships.
    pub fn framing(self) -> LengthField {
        let field = match self.width {
            0 => LengthField::varint().adjust(self.adjust),
            width => {
                let order = if self.little { ByteOrder::Little } else { ByteOrder::Big };
                LengthPrefix::bytes(width).order(order).adjust(self.adjust)
            }
        };
        field.offset(self.offset).keep_header(self.keep)
    }

    /// Reads the start of `bytes`, by the definition of the framing.
    pub fn start(self, bytes: &[u8], frame_bytes_max: usize) -> Start<'_> {
        if bytes.is_empty() {
            return Start::Part;
        }
        // No check reads more.
        let seen = &bytes[..bytes.len().min(frame_bytes_max)];
        let ends = |bytes: usize| if bytes > frame_bytes_max { Start::TooLarge } else { Start::Part };
        let offset = usize::from(self.offset);
        let (length, width) = match usize::from(self.width) {
            0 => {
                let (mut length, mut place) = (0u128, 0);
                loop {
                    let Some(byte) = seen.get(offset + place) else { return ends(offset + place + 1) };
                    length |= u128::from(byte & 0x7F) << (7 * place);
                    place += 1;
                    if length > u128::from(u64::MAX) || (place == 10 && *byte >= 0x80) {
                        return Start::Bad;
                    }
                    match byte {
                        0 if place > 1 => return Start::Bad,
                        0..0x80 => break (length, place),
                        _ => {}
                    }
                }
            }
            width => {
                let Some(digits) = seen.get(offset..offset + width) else { return ends(offset + width) };
                let more = |sum: u128, digit: &u8| sum << 8 | u128::from(*digit);
                let length =
                    if self.little { digits.iter().rev().fold(0, more) } else { digits.iter().fold(0, more) };
                (length, width)
            }
        };
        let Some(follows) = length.checked_add_signed(self.adjust.into()) else { return Start::Bad };
        let header = offset + width;
        let consumed = header as u128 + follows;
        if consumed > frame_bytes_max as u128 {
            return Start::TooLarge;
        }
        match bytes.get(..consumed as usize) {
            Some(frame) if self.keep => Start::Frame(frame, frame.len()),
            Some(frame) => Start::Frame(&frame[header..], frame.len()),
            None => Start::Part,
        }
    }

    /// A payload's frame, if it has one.
    pub fn frame(self, payload: &[u8]) -> Option<Vec<u8>> {
        if self.keep {
            let whole = self.start(payload, usize::MAX) == Start::Frame(payload, payload.len());
            return whole.then(|| payload.to_vec());
        }
        let mut length = (payload.len() as u64).checked_add_signed(-i64::from(self.adjust))?;
        let mut wire = Vec::new();
        match usize::from(self.width) {
            0 => {
                while length >= 0x80 {
                    wire.push(length as u8 | 0x80);
                    length >>= 7;
                }
                wire.push(length as u8);
            }
            width => {
                let digits = length.to_le_bytes();
                if digits[width..].iter().any(|digit| *digit > 0) {
                    return None;
                }
                wire.extend_from_slice(&digits[..width]);
                if !self.little {
                    wire.reverse();
                }
            }
        }
        wire.extend_from_slice(payload);
        Some(wire)
    }
}
