//! Writing a reply in place, in the memory from which it is sent.

use alloc::vec::Vec;
use core::fmt;

use bytes::buf::UninitSlice;
use bytes::{Buf, BufMut, Bytes};

use crate::lease::Lease;

/// The end of the bytes to be sent to a peer, to which a [`ReplyWriter`] appends.
pub struct Tail<'a> {
    /// Copied bytes.
    pub copied: &'a mut Vec<u8>,
    /// Leases, each of which is sent right before the copied byte at its position.
    pub lent: &'a mut Vec<(usize, Lease)>,
    /// Set if the system has no memory for a part, which is then missing.
    pub refused: &'a mut bool,
    /// The most leases: later bytes are copied.
    pub lent_max: usize,
    /// Makes a lease of owned bytes, `None` if there is no memory for one; or returns the bytes, to
    /// be copied.
    pub lend: &'a dyn Fn(Bytes) -> Result<Option<Lease>, Bytes>,
}

/// Writes one reply in place: it is a [`BufMut`], a [`fmt::Write`] and, in programs, an
/// `std::io::Write` over the bytes that are sent next. Numbers, formatted text, and output of serde
/// or prost need no separate buffer.
///
/// `write!` works without an import. Written bytes cannot be read again, only
/// [patched](ReplyWriter::patch).
///
/// It fails only for lack of memory: `fmt::Write` and `io::Write` then return an error, and the
/// connection is reset, as for any reply without memory.
pub struct ReplyWriter<'a> {
    tail: Tail<'a>,
    /// The start of the reply among the copied bytes and among the leases.
    copied_from: usize,
    lent_from: usize,
}

/// The least room in a chunk: the first size of a `Vec`.
const CHUNK_BYTES_MIN: usize = 64;

impl<'a> ReplyWriter<'a> {
    /// Creates a writer of a reply after the bytes that are there.
    pub fn new(tail: Tail<'a>) -> ReplyWriter<'a> {
        let (copied_from, lent_from) = (tail.copied.len(), tail.lent.len());
        ReplyWriter { tail, copied_from, lent_from }
    }

    /// Bytes of the reply so far.
    pub fn len(&self) -> usize {
        let lent: usize = self.tail.lent[self.lent_from..].iter().map(|(_, lease)| lease.len()).sum();
        self.tail.copied.len() - self.copied_from + lent
    }

    /// True if nothing was written yet.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Appends owned bytes. From 32 KiB on they are sent without a copy, and kept until then.
    pub fn put_owned(&mut self, bytes: impl Into<Bytes>) {
        match (self.tail.lend)(bytes.into()) {
            Ok(Some(lease)) => self.lend(lease),
            Ok(None) => *self.tail.refused = true,
            Err(bytes) => self.put_slice(&bytes),
        }
    }

    /// Appends a lease, which stays pinned until it is sent.
    pub fn lend(&mut self, lease: Lease) {
        if self.tail.lent.len() >= self.tail.lent_max {
            self.put_slice(&lease);
        } else if self.tail.lent.try_reserve(1).is_err() {
            *self.tail.refused = true;
        } else if !lease.is_empty() {
            self.tail.lent.push((self.tail.copied.len(), lease));
        }
    }

    /// Overwrites written bytes, such as a length that is now known, from byte `at` of the reply
    /// on.
    ///
    /// # Panics
    /// If the bytes lie beyond the written ones, or in bytes that are sent without a copy.
    pub fn patch(&mut self, at: usize, bytes: &[u8]) {
        let mut from = self.copied_from + at;
        for (position, lease) in &self.tail.lent[self.lent_from..] {
            if from + bytes.len() <= *position {
                break;
            }
            from = from.checked_sub(lease.len()).filter(|from| from >= position).unwrap_or_else(|| {
                panic!("{} bytes patched at {at}, where bytes leave without a copy", bytes.len())
            });
        }
        let written = self.tail.copied.len();
        let Some(place) = self.tail.copied.get_mut(from..from + bytes.len()) else {
            panic!(
                "{} bytes patched at {at} of {} that were written",
                bytes.len(),
                written - self.copied_from
            )
        };
        place.copy_from_slice(bytes);
    }

    /// Formats text, for `write!`.
    ///
    /// # Errors
    /// If the system has no memory, or a value's own formatting fails.
    pub fn write_fmt(&mut self, text: fmt::Arguments<'_>) -> fmt::Result {
        fmt::Write::write_fmt(self, text)
    }

    /// True if there is room for `bytes` more. If not, the reply is incomplete and is not sent.
    #[inline]
    fn reserve(&mut self, bytes: usize) -> bool {
        if bytes > self.tail.copied.capacity() - self.tail.copied.len()
            && self.tail.copied.try_reserve(bytes).is_err()
        {
            *self.tail.refused = true;
        }
        !*self.tail.refused
    }
}

// SAFETY: `chunk_mut` gives out the room behind the bytes of the `Vec`, which `advance_mut` counts
// as written only as far as it goes, as the implementation of `BufMut` for `Vec<u8>` does.
unsafe impl BufMut for ReplyWriter<'_> {
    #[inline]
    fn remaining_mut(&self) -> usize {
        self.tail.copied.remaining_mut()
    }

    #[inline]
    unsafe fn advance_mut(&mut self, bytes: usize) {
        // SAFETY: the caller wrote that many bytes to the chunk that the same `Vec` gave out.
        unsafe { self.tail.copied.advance_mut(bytes) };
    }

    /// # Panics
    /// If the system has no memory.
    #[inline]
    fn chunk_mut(&mut self) -> &mut UninitSlice {
        assert!(self.reserve(CHUNK_BYTES_MIN), "no memory for a reply");
        self.tail.copied.chunk_mut()
    }

    fn put<T: Buf>(&mut self, mut from: T) {
        while from.has_remaining() {
            let bytes = from.chunk();
            let len = bytes.len();
            self.put_slice(bytes);
            from.advance(len);
        }
    }

    #[inline]
    fn put_slice(&mut self, bytes: &[u8]) {
        if self.reserve(bytes.len()) {
            self.tail.copied.extend_from_slice(bytes);
        }
    }

    fn put_bytes(&mut self, byte: u8, count: usize) {
        if self.reserve(count) {
            self.tail.copied.resize(self.tail.copied.len() + count, byte);
        }
    }
}

impl fmt::Write for ReplyWriter<'_> {
    #[inline]
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.put_slice(text.as_bytes());
        if *self.tail.refused { Err(fmt::Error) } else { Ok(()) }
    }
}

#[cfg(feature = "std")]
impl std::io::Write for ReplyWriter<'_> {
    #[inline]
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.put_slice(bytes);
        if *self.tail.refused { Err(std::io::ErrorKind::OutOfMemory.into()) } else { Ok(bytes.len()) }
    }

    #[inline]
    fn write_all(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.write(bytes).map(|_| ())
    }

    /// Does nothing: the bytes are sent at the end of the turn.
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl fmt::Debug for ReplyWriter<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ReplyWriter({} bytes)", self.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bytes that `write` appends to `before`, as they are sent.
    fn written(before: &[u8], write: impl FnOnce(&mut ReplyWriter<'_>)) -> Vec<u8> {
        let (mut copied, mut lent, mut refused) = (before.to_vec(), Vec::new(), false);
        let lend = |bytes: Bytes| if bytes.len() < 4 { Err(bytes) } else { Ok(Some(Lease::copy_of(&bytes))) };
        let tail =
            Tail { copied: &mut copied, lent: &mut lent, refused: &mut refused, lent_max: 2, lend: &lend };
        write(&mut ReplyWriter::new(tail));
        assert!(!refused);
        let (mut all, mut from) = (Vec::new(), 0);
        for (position, lease) in &lent {
            all.extend_from_slice(&copied[from..*position]);
            all.extend_from_slice(lease);
            from = *position;
        }
        all.extend_from_slice(&copied[from..]);
        all
    }

    #[test]
    fn numbers_text_and_chunks_land_behind_one_another() {
        let reply = written(b"before ", |out| {
            write!(out, "a-{:02}", 7).unwrap();
            out.put_u16(0x4142);
            out.put(&b" c"[..]);
            out.put_bytes(b'!', 3);
            out.chunk_mut()[..2].copy_from_slice(b"xy");
            // SAFETY: two bytes of the chunk were written.
            unsafe { out.advance_mut(2) };
            assert_eq!(out.len(), 13);
        });
        assert_eq!(reply, b"before a-07AB c!!!xy");
    }

    #[test]
    fn patched_bytes_are_found_between_owned_ones() {
        let reply = written(b"before", |out| {
            out.put_slice(b"ab");
            out.put_owned(&b"owned"[..]);
            out.put_slice(b"cd");
            out.put_owned(&b"owned"[..]);
            out.put_owned(&b"ef"[..]);
            out.put_owned(&b"third"[..]);
            out.patch(1, b"B");
            out.patch(7, b"CD");
            out.patch(15, b"F");
        });
        assert_eq!(reply, b"beforeaBownedCDownedeFthird");
    }

    #[test]
    #[should_panic(expected = "leave without a copy")]
    fn owned_bytes_are_not_patched() {
        written(b"", |out| {
            out.put_owned(&b"owned"[..]);
            out.patch(4, b"x");
        });
    }

    #[test]
    #[should_panic(expected = "2 bytes patched at 2 of 3 that were written")]
    fn bytes_beyond_the_reply_are_not_patched() {
        written(b"before", |out| {
            out.put_slice(b"abc");
            out.patch(2, b"xy");
        });
    }
}
