//! Sources of work that no peer asks for, such as messages for many members: they wait here for
//! their pages.
//!
//! User code asks for a page, and the state machine has it done at the end of a turn, with what the
//! turn has left.

use alloc::collections::VecDeque;
use alloc::vec::Vec;
use core::cell::RefCell;

/// The queue of a shard's sources.
#[derive(Default)]
pub(crate) struct Pages(RefCell<Queue>);

#[derive(Default)]
struct Queue {
    /// Sources that wait, in the order of their pages.
    waiting: VecDeque<u32>,
    /// By source: whether it is among them.
    is_waiting: Vec<bool>,
}

impl Pages {
    /// Registers a source, which asks for nothing yet. Returns its number.
    pub(crate) fn add(&self) -> u32 {
        let all = &mut self.0.borrow_mut().is_waiting;
        all.push(false);
        all.len() as u32 - 1
    }

    /// Puts a source at the end of the queue, unless it waits already. True if it is the only one
    /// there.
    pub(crate) fn ask(&self, source: u32) -> bool {
        let Queue { waiting, is_waiting } = &mut *self.0.borrow_mut();
        let Some(is_waiting) = is_waiting.get_mut(source as usize).filter(|is_waiting| !**is_waiting) else {
            return false;
        };
        *is_waiting = true;
        waiting.push_back(source);
        waiting.len() == 1
    }

    /// Takes the source that waits for the longest time.
    pub(crate) fn take(&self) -> Option<u32> {
        let Queue { waiting, is_waiting } = &mut *self.0.borrow_mut();
        let source = waiting.pop_front()?;
        is_waiting[source as usize] = false;
        Some(source)
    }

    /// The number of sources that wait.
    pub(crate) fn len(&self) -> usize {
        self.0.borrow().waiting.len()
    }

    /// True if none waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The room that a source of work has in a turn, in steps.
#[derive(Debug)]
pub struct Page {
    left: u32,
    taken: u32,
}

/// Bytes that count as one step more: a copy of them takes as long as the smallest delivery.
const STEP_BYTES: usize = 2048;

impl Page {
    /// A page with room for `steps`.
    pub fn new(steps: u32) -> Page {
        Page { left: steps, taken: 0 }
    }

    /// True if there is room for another step, such as a delivery of `bytes`, which then counts: 1,
    /// and 1 more for each 2 KiB.
    #[inline]
    pub fn take(&mut self, bytes: usize) -> bool {
        if self.left == 0 {
            return false;
        }
        let steps = u32::try_from(1 + bytes / STEP_BYTES).unwrap_or(u32::MAX).min(self.left);
        self.left -= steps;
        self.taken += steps;
        true
    }

    /// True if it has no room for another step.
    #[inline]
    pub fn is_full(&self) -> bool {
        self.left == 0
    }

    /// Steps that were taken.
    pub fn taken(&self) -> u32 {
        self.taken
    }
}
