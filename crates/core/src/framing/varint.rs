//! LEB128 as in Protocol Buffers, in its shortest form only.

use super::FrameError;
use crate::bytes::Outbox;

/// 64 bits, 7 in each byte.
pub(super) const VARINT_BYTES_MAX: usize = 10;

/// The number at the start of `bytes`, with its length in bytes, which is `bytes_max` at most.
/// `None` if its last byte is not there yet.
pub(super) fn read_varint(bytes: &[u8], bytes_max: usize) -> Result<Option<(u64, usize)>, FrameError> {
    let mut value = 0;
    for (place, &byte) in bytes.iter().take(bytes_max).enumerate() {
        // The last byte has room for one bit, and nothing may follow it.
        if place == VARINT_BYTES_MAX - 1 && byte > 1 {
            return Err(FrameError::VarintOverflow);
        }
        value |= u64::from(byte & 0x7F) << (7 * place);
        if byte & 0x80 == 0 {
            if byte == 0 && place > 0 {
                return Err(FrameError::VarintOverlong { bytes: place + 1, needed: varint_bytes(value) });
            }
            return Ok(Some((value, place + 1)));
        }
    }
    if bytes.len() < bytes_max { Ok(None) } else { Err(FrameError::VarintOverflow) }
}

/// Appends a number.
pub(super) fn write_varint(value: u64, out: &mut Outbox<'_>) {
    with_varint(value, |bytes| out.put(bytes));
}

/// Gives the bytes of a number to `write`.
pub(super) fn with_varint(mut value: u64, write: impl FnOnce(&[u8])) {
    let (mut bytes, width) = ([0; VARINT_BYTES_MAX], varint_bytes(value));
    for byte in &mut bytes[..width] {
        *byte = value as u8 | 0x80;
        value >>= 7;
    }
    bytes[width - 1] &= 0x7F;
    write(&bytes[..width]);
}

/// The length of a number in its shortest form: 1 to 10 bytes.
pub(super) fn varint_bytes(value: u64) -> usize {
    (u64::BITS - (value | 1).leading_zeros()).div_ceil(7) as usize
}
