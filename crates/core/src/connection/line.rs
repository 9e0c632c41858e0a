//! Calls that wait for memory, first come, first served.

use alloc::collections::VecDeque;
use alloc::rc::{Rc, Weak};
use core::cell::{Cell, RefCell};
use core::task::Waker;

use crate::ConnId;
use crate::time::Stamp;

/// The room for reservations: up to three quarters of what a shard may hold. So reservations never
/// make memory tight for calls that need little.
pub(crate) fn reservable_bytes(held_bytes_max: usize) -> usize {
    held_bytes_max - held_bytes_max / 4
}

/// A call in the line.
pub(crate) struct CallRequest {
    pub(crate) id: ConnId,
    pub(crate) bytes: usize,
    pub(crate) is_granted: Cell<bool>,
    pub(crate) waker: Cell<Option<Waker>>,
}

/// The line of a shard.
#[derive(Default)]
pub(crate) struct Line {
    wanted: RefCell<VecDeque<Weak<CallRequest>>>,
    /// The time since when a call waits, or when others were last searched for memory on its
    /// behalf.
    pub(crate) since: Cell<Option<Stamp>>,
    /// Bytes that the whole line wanted at that look.
    pub(crate) looked_for: Cell<usize>,
}

impl Line {
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.wanted.borrow().is_empty()
    }

    /// The first one that still waits.
    pub(crate) fn first(&self) -> Option<Rc<CallRequest>> {
        let mut wanted = self.wanted.borrow_mut();
        loop {
            match wanted.front()?.upgrade() {
                Some(first) => return Some(first),
                None => drop(wanted.pop_front()),
            }
        }
    }

    /// Bytes that all waiting calls want, or `most` if that is less.
    pub(crate) fn wanted_bytes(&self, most: usize) -> usize {
        let wanted = self.wanted.borrow();
        let each = wanted.iter().filter_map(Weak::upgrade).map(|of| of.bytes);
        each.fold(0, |sum, bytes| most.min(sum + bytes))
    }

    pub(crate) fn pop(&self) {
        self.wanted.borrow_mut().pop_front();
    }

    pub(crate) fn push(&self, last: &Rc<CallRequest>) {
        let mut wanted = self.wanted.borrow_mut();
        if wanted.len() == wanted.capacity() {
            // Calls that were given up make room before the line grows.
            wanted.retain(|of| of.strong_count() > 0);
        }
        wanted.push_back(Rc::downgrade(last));
    }
}
