//! A table that grows in chunks.

use alloc::boxed::Box;
use alloc::vec::Vec;

/// Entries in a chunk: at about 100 bytes each 25 KiB at once, and a million entries need 4000 chunks.
const CHUNK: usize = 256;

/// A table of entries that never move. Growing allocates one chunk and copies nothing but the list of chunks,
/// so that a table of a million entries never exists twice.
#[derive(Debug)]
pub(crate) struct Chunked<T> {
    chunks: Vec<Box<[T; CHUNK]>>,
}

impl<T: Default> Chunked<T> {
    pub(crate) const fn new() -> Chunked<T> {
        Chunked { chunks: Vec::new() }
    }

    /// How many entries there is memory for.
    pub(crate) fn len(&self) -> usize {
        self.chunks.len() * CHUNK
    }

    #[inline]
    pub(crate) fn get(&self, index: u32) -> Option<&T> {
        let index = index as usize;
        Some(&self.chunks.get(index / CHUNK)?[index % CHUNK])
    }

    #[inline]
    pub(crate) fn get_mut(&mut self, index: u32) -> Option<&mut T> {
        let index = index as usize;
        Some(&mut self.chunks.get_mut(index / CHUNK)?[index % CHUNK])
    }

    /// The entry, after growing the table so that it has one. False if the system has no memory.
    pub(crate) fn grow_to(&mut self, index: u32) -> bool {
        while index as usize >= self.len() {
            let mut chunk = Vec::new();
            if chunk.try_reserve_exact(CHUNK).is_err() || self.chunks.try_reserve(1).is_err() {
                return false;
            }
            chunk.resize_with(CHUNK, T::default);
            // Its length is what was asked for, so that an index needs no second check.
            let Ok(chunk) = chunk.into_boxed_slice().try_into() else { return false };
            self.chunks.push(chunk);
        }
        true
    }
}
