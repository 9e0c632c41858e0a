//! Blocks on the heap in which large frames are put together, and spare blocks for later ones.

use alloc::rc::Rc;
use alloc::vec::Vec;
use core::cell::{Cell, RefCell};
use core::fmt;
use core::mem;
use core::ops::Deref;

use crate::fallible::try_zeroed;
use crate::lease::Lease;

/// The least size of a block that is kept. The system provides smaller ones without a page fault
/// for each 4 KiB.
const KEPT_FROM: usize = 64 * 1024;

/// Bytes of a frame that must be there, or arrive at once, before it takes a kept block: the size
/// of a receive buffer. So only these bytes are copied, and all later ones are received in place.
const TAKES_FROM: usize = 16 * 1024;

/// Bytes that arrive piece by piece, in one block that grows with them.
///
/// It at most doubles: memory follows the arrived bytes, not the announced number. All of it is
/// initialised, including the part after the bytes, so that others may write there:
/// [`spare`](Block::spare) lends that part, [`advance`](Block::advance) counts the written bytes.
/// When it or the last lease on it is dropped, a large block returns to the spare ones
/// ([`Blocks`]).
#[derive(Default)]
pub struct Block {
    /// As long as the block is large.
    memory: Vec<u8>,
    len: usize,
    home: Option<Rc<KeptBlock>>,
}

impl Block {
    /// Bytes of memory it holds.
    #[inline]
    pub fn held_bytes(&self) -> usize {
        self.memory.len()
    }

    /// Bytes of room after those that are there.
    #[inline]
    pub fn room(&self) -> usize {
        self.memory.len() - self.len
    }

    /// Makes room for `more` bytes, and for a part of the `expected` ones: up to the number of
    /// bytes that are there. False if the system has no memory for that; then nothing has changed.
    #[must_use]
    pub fn make_room(&mut self, more: usize, expected: usize) -> bool {
        if more <= self.room() {
            return true;
        }
        let size = self.memory.len();
        // Exactly the expected size if that is near, but an eighth at least, so that growing stays
        // rare.
        let near = self.len.saturating_add(expected).max(size + size / 8);
        let size = size.saturating_mul(2).min(near).max(self.len.saturating_add(more));
        let takes = size >= TAKES_FROM && near >= KEPT_FROM;
        let kept = self.home.as_ref().filter(|_| takes).and_then(|home| home.take(size, near));
        let Some(mut memory) = kept.or_else(|| try_zeroed(size)) else { return false };
        memory[..self.len].copy_from_slice(&self.memory[..self.len]);
        let old = mem::replace(&mut self.memory, memory);
        if let Some(home) = &self.home {
            home.keep(old);
        }
        true
    }

    /// Appends a copy of `bytes`; at least `expected` arrive together. False if the system has no
    /// memory for them.
    #[must_use]
    pub fn put(&mut self, bytes: &[u8], expected: usize) -> bool {
        if !self.make_room(bytes.len(), expected) {
            return false;
        }
        self.memory[self.len..][..bytes.len()].copy_from_slice(bytes);
        self.len += bytes.len();
        true
    }

    /// The room after the bytes, at most `most` of it.
    pub fn spare(&mut self, most: usize) -> &mut [u8] {
        let most = most.min(self.room());
        &mut self.memory[self.len..][..most]
    }

    /// Counts `count` bytes that were written after the others.
    ///
    /// # Panics
    /// If there is no room for them.
    pub fn advance(&mut self, count: usize) {
        assert!(count <= self.room(), "block with room for {} bytes advanced by {count}", self.room());
        self.len += count;
    }

    /// Forgets all but the first `len` bytes.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Takes the block out, and leaves an empty one with the same home.
    pub fn take(&mut self) -> Block {
        let home = self.home.clone();
        mem::replace(self, Block { memory: Vec::new(), len: 0, home })
    }

    /// A lease on the bytes. `None` if the system has no memory for the lease.
    ///
    /// # Panics
    /// If there are 4 GiB or more.
    pub fn into_lease(self) -> Option<Lease> {
        let pinned = self.held_bytes();
        Lease::of_owner(self, pinned)
    }
}

impl Deref for Block {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.memory[..self.len]
    }
}

impl AsRef<[u8]> for Block {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if let Some(home) = &self.home {
            home.keep(mem::take(&mut self.memory));
        }
    }
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Block({} of {} bytes)", self.len, self.memory.len())
    }
}

/// Spare blocks of 64 KiB and more of one core, within a bound. A new block costs a page fault for
/// each 4 KiB.
///
/// ```
/// use ringserve_buf::Blocks;
///
/// let blocks = Blocks::new(1 << 20);
/// let mut block = blocks.block();
/// assert!(block.put(&[7; 100_000], 100_000));
/// let lease = block.into_lease().unwrap();
/// assert_eq!(blocks.kept_bytes(), 0);
/// drop(lease);
/// assert_eq!(blocks.kept_bytes(), 100_000);
/// ```
#[derive(Clone, Debug)]
pub struct Blocks {
    kept: Rc<KeptBlock>,
}

impl Blocks {
    /// Creates a store of at most `bytes_max` bytes.
    pub fn new(bytes_max: usize) -> Blocks {
        Blocks { kept: Rc::new(KeptBlock { bytes_max: Cell::new(bytes_max), ..KeptBlock::default() }) }
    }

    /// Creates an empty block, which holds no memory yet.
    pub fn block(&self) -> Block {
        Block { memory: Vec::new(), len: 0, home: Some(self.kept.clone()) }
    }

    /// Bytes of spare blocks.
    pub fn kept_bytes(&self) -> usize {
        self.kept.bytes.get()
    }

    /// Limits the spare blocks to `bytes_max` bytes from now on. Frees kept blocks if they are
    /// more.
    pub fn bound(&self, bytes_max: usize) {
        self.kept.bytes_max.set(bytes_max);
        if self.kept_bytes() > bytes_max {
            self.drop_kept();
        }
    }

    /// Frees the spare blocks.
    pub fn drop_kept(&self) {
        self.kept.bytes.set(0);
        drop(self.kept.blocks.take());
    }
}

#[derive(Debug, Default)]
struct KeptBlock {
    blocks: RefCell<Vec<Vec<u8>>>,
    bytes: Cell<usize>,
    bytes_max: Cell<usize>,
}

impl KeptBlock {
    /// The most recent block of `wanted` bytes and at most an eighth more. A larger one would be
    /// too large for a holder that keeps it with its bytes, and would come back for the next.
    /// Otherwise, from 64 KiB on, the largest of `size` bytes or more.
    #[cold]
    fn take(&self, size: usize, wanted: usize) -> Option<Vec<u8>> {
        let mut blocks = self.blocks.borrow_mut();
        let most = wanted.saturating_add(wanted / 8);
        let fits = blocks.iter().rposition(|block| block.len() >= wanted && block.len() <= most);
        let index = fits.or_else(|| {
            let sizes = if size < KEPT_FROM { 0..0 } else { size..wanted };
            let fewer = (0..blocks.len()).filter(|index| sizes.contains(&blocks[*index].len()));
            fewer.max_by_key(|index| blocks[*index].len())
        })?;
        let block = blocks.remove(index);
        self.bytes.set(self.bytes.get() - block.len());
        Some(block)
    }

    #[inline]
    fn keep(&self, memory: Vec<u8>) {
        if memory.len() >= KEPT_FROM {
            self.keep_large(memory);
        }
    }

    /// Keeps a block, in place of those that have not been used for longest.
    #[cold]
    fn keep_large(&self, memory: Vec<u8>) {
        let mut blocks = self.blocks.borrow_mut();
        if memory.len() > self.bytes_max.get() || blocks.try_reserve(1).is_err() {
            return;
        }
        let mut bytes = self.bytes.get() + memory.len();
        let mut gone = 0;
        while bytes > self.bytes_max.get() {
            bytes -= blocks[gone].len();
            gone += 1;
        }
        blocks.drain(..gone);
        blocks.push(memory);
        self.bytes.set(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn block_grows_with_its_bytes_and_not_with_what_is_announced() {
        let mut block = Block::default();
        for step in 1..100 {
            assert!(block.put(&[step; 1000], 1 << 29));
            assert!(block.held_bytes() <= 2 * block.len(), "{block:?}");
        }
        assert_eq!((block.len(), block[0], block[98_999]), (99_000, 1, 99));
    }

    #[test]
    fn block_takes_what_is_near_and_no_more() {
        let mut block = Block::default();
        assert!(block.put(&[1; 16_000], 100_000) && block.put(&[2; 16_000], 84_000));
        assert!(block.put(&[3; 1], 68_000));
        assert_eq!(block.held_bytes(), 64_000);
        assert!(block.put(&[4; 60_000], 67_999));
        assert_eq!(block.held_bytes(), 100_000);
    }

    #[test]
    fn growing_by_small_steps_that_are_always_near_stays_rare() {
        let mut block = Block::default();
        let mut moved = 0;
        for _ in 0..1000 {
            let before = block.held_bytes();
            assert!(block.put(&[0; 1024], 1024));
            moved += usize::from(before != block.held_bytes());
        }
        assert!(moved < 80, "{moved} times");
    }

    #[test]
    fn large_blocks_are_kept_and_the_oldest_go_at_the_bound() {
        let blocks = Blocks::new(200_000);
        let of = |bytes: usize| {
            let mut block = blocks.block();
            assert!(block.put(&vec_of(bytes), bytes));
            block.into_lease().unwrap()
        };
        let (first, second, third, small) = (of(110_000), of(90_000), of(80_000), of(60_000));
        let at = second.as_ptr();
        drop((first, second));
        assert_eq!(blocks.kept_bytes(), 200_000);
        drop((third, small));
        assert_eq!(blocks.kept_bytes(), 170_000);
        // The last block that is large enough.
        let again = of(85_000);
        assert_eq!((again.as_ptr(), blocks.kept_bytes()), (at, 80_000));
        drop((again, of(200_001)));
        assert_eq!(blocks.kept_bytes(), 170_000);
        blocks.drop_kept();
        assert_eq!(blocks.kept_bytes(), 0);
    }

    #[test]
    fn a_kept_block_is_at_most_an_eighth_more_than_what_is_wanted() {
        for (kept, taken) in [(112_500, 112_500), (112_501, 100_000)] {
            let blocks = Blocks::new(1 << 20);
            let mut block = blocks.block();
            assert!(block.put(&vec_of(kept), kept));
            drop(block);
            let mut block = blocks.block();
            assert!(block.put(&vec_of(16_384), 100_000) && block.put(&vec_of(83_616), 83_616));
            assert_eq!((block.held_bytes(), block.len()), (taken, 100_000));
        }
    }

    #[test]
    fn a_kept_block_is_not_given_for_an_announcement() {
        let blocks = Blocks::new(1 << 20);
        let mut block = blocks.block();
        assert!(block.put(&vec_of(1 << 20), 1 << 20));
        drop(block);
        let mut block = blocks.block();
        assert!(block.put(&vec_of(16_383), 1 << 20));
        assert_eq!((block.held_bytes(), blocks.kept_bytes()), (16_383, 1 << 20));
        assert!(block.put(&[1; 1], (1 << 20) - 16_383));
        assert_eq!((block.held_bytes(), blocks.kept_bytes()), (1 << 20, 0));
        assert_eq!((block[0], block[16_383], block.len()), (7, 1, 16_384));
        // Bytes that came at once count like those that are there.
        drop(block);
        let mut block = blocks.block();
        assert!(block.put(&vec_of(16_384), 1 << 20));
        assert_eq!((block.held_bytes(), blocks.kept_bytes()), (1 << 20, 0));
        // Nor is a smaller one for a part of the announced bytes, before that many arrived.
        drop(block);
        let mut block = blocks.block();
        assert!(block.put(&vec_of(16_384), 1 << 29));
        assert_eq!((block.held_bytes(), blocks.kept_bytes()), (16_384, 1 << 20));
        assert!(block.put(&vec_of(50_000), 1 << 29));
        assert_eq!((block.held_bytes(), blocks.kept_bytes()), (1 << 20, 0));
    }

    #[test]
    fn spare_room_is_written_and_counted() {
        let mut block = Block::default();
        assert!(block.put(b"ab", 2) && block.make_room(6, 6));
        assert_eq!(block.spare(100).len(), block.room());
        block.spare(3).copy_from_slice(b"cde");
        block.advance(3);
        let taken = block.take();
        assert_eq!((&*taken, block.len(), block.held_bytes()), (&b"abcde"[..], 0, 0));
        assert_eq!(&*taken.into_lease().unwrap(), b"abcde");
    }

    #[test]
    #[should_panic(expected = "advanced by 9")]
    fn a_count_beyond_the_room_is_noticed() {
        let mut block = Block::default();
        assert!(block.make_room(8, 8));
        block.advance(9);
    }

    fn vec_of(bytes: usize) -> Vec<u8> {
        core::iter::repeat_n(7, bytes).collect()
    }
}
