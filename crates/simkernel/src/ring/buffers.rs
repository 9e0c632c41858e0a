//! The buffer ring: provided buffers, the first of which is written to, classic or incremental.

use std::collections::VecDeque;

use ringserve_buf::KernelSide;
use ringserve_drivers::kernel::{BUFFER_SHIFT, F_BUF_MORE, F_BUFFER};

/// Provided buffers, in order.
#[derive(Debug)]
pub struct Buffers {
    ring: VecDeque<u16>,
    /// Bytes of the first of them that are used.
    used: usize,
    entries_max: usize,
    buffer_bytes: usize,
    incremental: bool,
}

impl Buffers {
    /// A ring of up to `entries_max` buffers of `buffer_bytes` each. If `incremental`, one buffer takes the bytes of several
    /// receives.
    pub fn new(entries_max: usize, buffer_bytes: usize, incremental: bool) -> Buffers {
        Buffers { ring: VecDeque::new(), used: 0, entries_max, buffer_bytes, incremental }
    }

    /// How many buffers it holds at most.
    pub fn entries_max(&self) -> usize {
        self.entries_max
    }

    /// True if one buffer takes the bytes of several receives.
    pub fn is_incremental(&self) -> bool {
        self.incremental
    }

    /// Puts a buffer behind the others.
    ///
    /// # Panics
    /// If it is not lent or is in the ring, or the ring is full.
    pub fn provide(&mut self, side: &KernelSide, buffer: u16) {
        assert!(side.is_lent(buffer), "buffer {buffer} is provided but not lent");
        assert!(!self.ring.contains(&buffer), "buffer {buffer} is provided twice");
        assert!(self.ring.len() < self.entries_max, "the buffer ring is overrun");
        self.ring.push_back(buffer);
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.ring.len()
    }

    /// True if there is none: a receive ends with `ENOBUFS`.
    pub fn is_empty(&self) -> bool {
        self.ring.is_empty()
    }

    /// How many bytes the first one takes.
    pub fn room(&self) -> usize {
        self.buffer_bytes - self.used
    }

    /// Selects the first one for up to [`room`](Buffers::room) bytes, and returns the flags of their completion.
    ///
    /// # Panics
    /// If there is none.
    pub fn select(&mut self, bytes: usize) -> u32 {
        self.used += bytes;
        self.take_first(self.incremental && self.used < self.buffer_bytes)
    }

    /// Selects the first one for no bytes, as an error may do, and returns the flags of the completion. The ring is done with
    /// it unless it `goes_on`.
    ///
    /// # Panics
    /// If there is none.
    pub fn select_for_nothing(&mut self, goes_on: bool) -> u32 {
        self.take_first(goes_on)
    }

    fn take_first(&mut self, goes_on: bool) -> u32 {
        let flags = F_BUFFER | u32::from(self.ring[0]) << BUFFER_SHIFT;
        if goes_on {
            return flags | F_BUF_MORE;
        }
        self.ring.pop_front();
        self.used = 0;
        flags
    }

    /// Takes all of them out.
    pub fn clear(&mut self) {
        self.ring.clear();
        self.used = 0;
    }
}
