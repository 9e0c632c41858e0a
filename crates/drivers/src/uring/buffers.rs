//! The number of buffers with the kernel.
//!
//! The buffer ring is first in, first out, so the kernel walks through all buffers in it: few stay
//! warm in the cache, many do not (measured: 4-6 % at 64 B, 10-15 % at 16 KiB between 256 and
//! 4096). So the ring is kept at a target that starts low, doubles when a receive finds the ring
//! empty or nearly so, and is halved when a quarter of it was enough for a long time.

use ringserve_buf::KernelSide;

use super::kernel::Kernel;

/// Half a chunk of the pool, so that a quiet shard's buffers, lent and leased, fit in its first
/// chunk.
const TARGET_START: usize = 32;

/// Turns between two reviews of the target: under load about a second.
const REVIEW_TURNS: u32 = 1 << 14;

pub(super) struct Buffers {
    entries: usize,
    /// Lent buffers that are in the ring as far as completions tell: exactly those the pool counts
    /// as with the kernel.
    pub(super) in_ring: usize,
    /// The target at the start of a turn.
    target: usize,
    /// True from a receive that found the ring empty until the next review of the target.
    starved: bool,
    /// The fewest buffers that were left at the start of a turn since the last review.
    lowest: usize,
    turns: u32,
}

impl Buffers {
    pub(super) fn new(entries: usize) -> Buffers {
        let target = TARGET_START.min(entries);
        Buffers { entries, in_ring: 0, target, starved: false, lowest: target, turns: 0 }
    }

    /// A receive found the ring empty.
    pub(super) fn starved(&mut self) {
        self.starved = true;
    }

    /// Fills the ring up to the target, as far as the pool has buffers.
    pub(super) fn top_up(&mut self, kernel: &mut impl Kernel, side: &mut KernelSide) {
        if self.in_ring < self.target {
            self.review_low();
            while self.in_ring < self.target
                && let Some(buffer) = side.lend()
            {
                kernel.provide(side, buffer);
                self.in_ring += 1;
            }
        }
        self.turns += 1;
        if self.turns == REVIEW_TURNS {
            if self.lowest >= self.target / 4 * 3 {
                self.target = (self.target / 2).max(TARGET_START.min(self.entries));
            }
            (self.turns, self.lowest) = (0, self.target);
        }
    }

    #[inline]
    fn review_low(&mut self) {
        // Nothing was in the ring before the first turn, which means nothing.
        let nearly_empty = self.turns > 0 && self.in_ring < self.target / 8;
        if self.starved || nearly_empty {
            self.target = (self.target * 2).min(self.entries);
            self.starved = false;
        }
        self.lowest = self.lowest.min(self.in_ring);
    }

    /// Takes every buffer back: the kernel's ring is empty. Those of the first chunk come last, so
    /// that they are lent next.
    pub(super) fn take_back(&mut self, side: &mut KernelSide) {
        for buffer in (0..side.pool().buffers_max() as u16).rev() {
            if side.is_lent(buffer) {
                side.take_back(buffer);
            }
        }
        *self = Buffers::new(self.entries);
    }
}
