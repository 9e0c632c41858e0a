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
    pub(super) fn new(entries_max: usize, buffer_bytes: usize, incremental: bool) -> Buffers {
        Buffers { ring: VecDeque::new(), used: 0, entries_max, buffer_bytes, incremental }
    }

    /// Puts a buffer behind the others.
    pub fn provide(&mut self, side: &KernelSide, buffer: u16) {
        assert!(side.is_lent(buffer), "buffer {buffer} is provided but not lent");
        assert!(!self.ring.contains(&buffer), "buffer {buffer} is provided twice");
        assert!(self.ring.len() < self.entries_max, "the buffer ring is overrun");
        self.ring.push_back(buffer);
    }

    /// The number of buffers.
    pub fn len(&self) -> usize {
        self.ring.len()
    }

    /// True if there is none: a receive ends with `ENOBUFS`.
    pub fn is_empty(&self) -> bool {
        self.ring.is_empty()
    }

    /// The number of bytes that the first one takes.
    pub fn room(&self) -> usize {
        self.buffer_bytes - self.used
    }

    /// Selects the first one for up to [`room`](Buffers::room) bytes, and returns the flags of their completion.
    pub fn select(&mut self, bytes: usize) -> u32 {
        self.used += bytes;
        self.take_first(self.incremental && self.used < self.buffer_bytes)
    }

    /// Selects the first one for no bytes, as an error may do, and returns the flags of the completion. The ring is done with
    /// it unless it `goes_on`.
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
