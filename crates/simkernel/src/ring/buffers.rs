//! The buffer ring: provided buffers, the first of which is filled next.

use std::collections::VecDeque;

use ringserve_buf::KernelSide;
use ringserve_drivers::kernel::{BUFFER_SHIFT, F_BUFFER};

/// Provided buffers, in order.
#[derive(Debug)]
pub struct Buffers {
    ring: VecDeque<u16>,
    entries_max: usize,
    buffer_bytes: usize,
}

impl Buffers {
    pub(super) fn new(entries_max: usize, buffer_bytes: usize) -> Buffers {
        Buffers { ring: VecDeque::new(), entries_max, buffer_bytes }
    }

    /// Adds a buffer after the others.
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

    /// The size in bytes of each.
    pub fn room(&self) -> usize {
        self.buffer_bytes
    }

    /// Takes the first one out, and returns the flags of the completion that names it.
    pub fn select(&mut self) -> u32 {
        let buffer = self.ring.pop_front().expect("a buffer is selected from a ring that has one");
        F_BUFFER | u32::from(buffer) << BUFFER_SHIFT
    }

    /// Takes all of them out.
    pub fn clear(&mut self) {
        self.ring.clear();
    }
}
