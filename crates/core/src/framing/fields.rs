//! The parts of a frame: numbers, and bytes after their length, one after the other.

use core::fmt;

use super::{Decode, Framing};

/// The fields of a frame, read from its start: numbers with the most significant byte first, and
/// whatever a [`Framing`] cuts off, such as a text after its length. Nothing is copied.
///
/// ```
/// use ringserve::framing::{Fields, LengthPrefix};
///
/// let mut fields = Fields::new(b"\x00\x04MQTT\x05\x00\x3C rest");
/// assert_eq!(fields.text(&LengthPrefix::bytes(2)), Ok("MQTT"));
/// assert_eq!((fields.u8(), fields.u16()), (Ok(5), Ok(60)));
/// assert_eq!(fields.left(), b" rest");
/// assert!(fields.clone().u64().is_err(), "the frame ends within it");
/// ```
#[derive(Clone, Debug)]
pub struct Fields<'a> {
    left: &'a [u8],
}

/// A frame has no such field: the frame ends within it, or the bytes there are not such a field.
#[derive(Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct FieldError;

impl fmt::Display for FieldError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a field is not whole, or not what it has to be")
    }
}

ringserve_buf::debug_is_display!(FieldError);

impl core::error::Error for FieldError {}

impl<'a> Fields<'a> {
    /// The fields in these bytes.
    pub fn new(bytes: &'a [u8]) -> Fields<'a> {
        Fields { left: bytes }
    }

    /// The bytes after the fields that were read.
    pub fn left(&self) -> &'a [u8] {
        self.left
    }

    /// True if every byte was read.
    pub fn is_empty(&self) -> bool {
        self.left.is_empty()
    }

    /// Checks that there are no further fields.
    ///
    /// # Errors
    /// If bytes are left.
    pub fn end(&self) -> Result<(), FieldError> {
        if self.is_empty() { Ok(()) } else { Err(FieldError) }
    }

    /// The next `N` bytes.
    ///
    /// # Errors
    /// If fewer are left. Then, as with all fields, nothing is read.
    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], FieldError> {
        let (array, left) = self.left.split_first_chunk::<N>().ok_or(FieldError)?;
        self.left = left;
        Ok(*array)
    }

    /// A number of one byte.
    ///
    /// # Errors
    /// If no byte is left.
    pub fn u8(&mut self) -> Result<u8, FieldError> {
        self.array().map(u8::from_be_bytes)
    }

    /// A number of two bytes.
    ///
    /// # Errors
    /// If fewer are left.
    pub fn u16(&mut self) -> Result<u16, FieldError> {
        self.array().map(u16::from_be_bytes)
    }

    /// A number of four bytes.
    ///
    /// # Errors
    /// If fewer are left.
    pub fn u32(&mut self) -> Result<u32, FieldError> {
        self.array().map(u32::from_be_bytes)
    }

    /// A number of eight bytes.
    ///
    /// # Errors
    /// If fewer are left.
    pub fn u64(&mut self) -> Result<u64, FieldError> {
        self.array().map(u64::from_be_bytes)
    }

    /// The payload of a frame inside this one.
    ///
    /// # Errors
    /// If `framing` finds no whole frame.
    pub fn framed(&mut self, framing: &impl Framing) -> Result<&'a [u8], FieldError> {
        let Ok(Decode::Frame { skip, len, consumed }) = framing.decode(self.left, 0) else {
            return Err(FieldError);
        };
        let found = &self.left[skip..skip + len];
        self.left = &self.left[consumed..];
        Ok(found)
    }

    /// The payload of a frame inside this one, as text.
    ///
    /// # Errors
    /// Also if it is not UTF-8.
    pub fn text(&mut self, framing: &impl Framing) -> Result<&'a str, FieldError> {
        let before = self.left;
        let found = str::from_utf8(self.framed(framing)?);
        found.map_err(|_| {
            self.left = before;
            FieldError
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::framing::{LengthField, LengthPrefix, Lines};

    #[test]
    fn fields_are_read_one_behind_the_other() {
        let mut fields = Fields::new(b"\x01\0\x02\0\0\0\x03\0\0\0\0\0\0\0\x04\x02hi\x83\0a line\nxyz");
        assert_eq!(fields.u8(), Ok(1));
        assert_eq!(fields.u16(), Ok(2));
        assert_eq!(fields.u32(), Ok(3));
        assert_eq!(fields.u64(), Ok(4));
        assert_eq!(fields.framed(&LengthField::varint()), Ok(&b"hi"[..]));
        assert!(fields.framed(&LengthField::varint()).is_err(), "a varint that is too long");
        assert_eq!(fields.array(), Ok([0x83, 0]));
        assert_eq!(fields.text(&Lines::default()), Ok("a line"));
        assert_eq!((fields.end(), fields.left()), (Err(FieldError), &b"xyz"[..]));
        assert_eq!(fields.array(), Ok(*b"xyz"));
        assert_eq!((fields.end(), fields.u8()), (Ok(()), Err(FieldError)));
    }

    #[test]
    fn what_is_no_field_is_left_where_it_is() {
        let bytes = b"\x00\x03\xFFab";
        let mut fields = Fields::new(bytes);
        assert_eq!(fields.u64(), Err(FieldError));
        assert_eq!(fields.text(&LengthPrefix::bytes(2)), Err(FieldError), "not UTF-8");
        assert_eq!(fields.framed(&LengthPrefix::bytes(4)), Err(FieldError), "not whole");
        assert_eq!(fields.left(), bytes);
        assert_eq!(fields.framed(&LengthPrefix::bytes(2)), Ok(&b"\xFFab"[..]));
    }
}
