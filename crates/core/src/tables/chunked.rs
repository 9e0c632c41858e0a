//! A table that grows in chunks.

use alloc::boxed::Box;
use alloc::vec::Vec;

/// Entries in a chunk: at about 100 bytes each 25 KiB at once, and a million entries need 4000
/// chunks.
const CHUNK: usize = 256;

/// A table of entries that never move, each `T::default()` until it is written. Growing allocates
/// one chunk and copies nothing but the list of chunks, so that a table of a million entries never
/// exists twice. There may be gaps: chunks without memory between others.
#[derive(Debug)]
pub struct Chunked<T> {
    /// `None` is a gap.
    chunks: Vec<Option<Box<[T; CHUNK]>>>,
}

impl<T> Default for Chunked<T> {
    fn default() -> Chunked<T> {
        Chunked::new()
    }
}

impl<T> Chunked<T> {
    /// An empty table, which holds no memory.
    pub const fn new() -> Chunked<T> {
        Chunked { chunks: Vec::new() }
    }

    /// A bound above all indexes that have an entry.
    pub fn len(&self) -> usize {
        self.chunks.len() * CHUNK
    }

    /// True if no entry was ever made.
    pub fn is_empty(&self) -> bool {
        self.chunks.is_empty()
    }

    /// The entry, if its chunk exists.
    #[inline]
    pub fn get(&self, index: u32) -> Option<&T> {
        let index = index as usize;
        let Some(Some(chunk)) = self.chunks.get(index / CHUNK) else { return None };
        Some(&chunk[index % CHUNK])
    }

    /// The entry, if its chunk exists.
    #[inline]
    pub fn get_mut(&mut self, index: u32) -> Option<&mut T> {
        let index = index as usize;
        let Some(Some(chunk)) = self.chunks.get_mut(index / CHUNK) else { return None };
        Some(&mut chunk[index % CHUNK])
    }

    /// Every entry that was ever made.
    pub fn iter(&self) -> impl Iterator<Item = &T> {
        self.chunks.iter().flatten().flat_map(|chunk| chunk.iter())
    }

    /// Every entry that was ever made.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.chunks.iter_mut().flatten().flat_map(|chunk| chunk.iter_mut())
    }
}

impl<T: Default> Chunked<T> {
    /// Makes the entry, if its chunk does not exist. False if the system has no memory.
    #[inline]
    pub fn grow_to(&mut self, index: u32) -> bool {
        self.get(index).is_some() || self.grow(index as usize / CHUNK)
    }

    /// The entry, made if necessary. `None` if the system has no memory.
    #[inline]
    pub fn entry(&mut self, index: u32) -> Option<&mut T> {
        if self.grow_to(index) { self.get_mut(index) } else { None }
    }

    #[cold]
    fn grow(&mut self, at: usize) -> bool {
        let mut chunk = Vec::new();
        let more = (at + 1).saturating_sub(self.chunks.len());
        if chunk.try_reserve_exact(CHUNK).is_err() || self.chunks.try_reserve(more).is_err() {
            return false;
        }
        if more > 0 {
            self.chunks.resize_with(at + 1, || None);
        }
        chunk.resize_with(CHUNK, T::default);
        self.chunks[at] = chunk.into_boxed_slice().try_into().ok();
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gap_costs_no_entries_and_is_filled_later() {
        let mut table = Chunked::<u32>::new();
        *table.entry(3 * CHUNK as u32).unwrap() = 7;
        assert_eq!(
            (table.iter().count(), table.get(0), table.get(2 * CHUNK as u32 + 255)),
            (CHUNK, None, None)
        );
        *table.entry(CHUNK as u32).unwrap() = 5;
        assert_eq!((table.iter().count(), table.iter().sum::<u32>()), (2 * CHUNK, 12));
        assert_eq!((table.get(3 * CHUNK as u32), table.get(CHUNK as u32)), (Some(&7), Some(&5)));
        assert_eq!((table.get(0), table.get(4 * CHUNK as u32)), (None, None));
    }
}
