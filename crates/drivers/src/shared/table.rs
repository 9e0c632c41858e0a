//! A table by slot number that grows in chunks, so that growing never copies what is there.

/// Entries allocated at once: a few KiB.
const CHUNK: usize = 256;

/// A table of `T`, each `T::default()` until it is written.
pub(crate) struct Chunked<T> {
    chunks: Vec<Option<Box<[T]>>>,
}

impl<T: Default> Chunked<T> {
    pub(crate) fn new() -> Chunked<T> {
        Chunked { chunks: Vec::new() }
    }

    /// The entry, if its chunk is there.
    #[inline]
    pub(crate) fn get(&self, slot: u32) -> Option<&T> {
        let chunk = self.chunks.get(slot as usize / CHUNK)?.as_ref()?;
        Some(&chunk[slot as usize % CHUNK])
    }

    /// The entry, if its chunk is there.
    #[inline]
    pub(crate) fn get_mut(&mut self, slot: u32) -> Option<&mut T> {
        let chunk = self.chunks.get_mut(slot as usize / CHUNK)?.as_mut()?;
        Some(&mut chunk[slot as usize % CHUNK])
    }

    /// The entry, made if need be.
    #[inline]
    pub(crate) fn entry(&mut self, slot: u32) -> &mut T {
        let index = slot as usize / CHUNK;
        if self.chunks.get(index).is_none_or(Option::is_none) {
            self.grow(index);
        }
        self.get_mut(slot).expect("the chunk was just made")
    }

    /// Everything that was ever made.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.chunks.iter().flatten().flat_map(|chunk| chunk.iter())
    }

    /// Everything that was ever made.
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.chunks.iter_mut().flatten().flat_map(|chunk| chunk.iter_mut())
    }

    #[cold]
    fn grow(&mut self, index: usize) {
        if self.chunks.len() <= index {
            self.chunks.resize_with(index + 1, || None);
        }
        self.chunks[index] = Some((0..CHUNK).map(|_| T::default()).collect());
    }
}
