//! Deadlines of connections, kept apart from them, by slot: few have one, and most of those only
//! until login.
//!
//! User code leaves what it sets here, and the state machine takes it in at the end of the turn.

use alloc::vec::Vec;
use core::cell::{Cell, RefCell};
use core::time::Duration;

use super::inbox::NoMemory;
use crate::ConnId;
use crate::tables::Chunked;
use crate::time::{FOR_EVER, NEVER, Stamp, steps_for};

/// The deadlines of a shard's connections.
#[derive(Default)]
pub(crate) struct Deadlines {
    all: RefCell<Chunked<Deadline>>,
    count: Cell<usize>,
    /// Deadlines that user code set since then, in its order, in steps of the wheel.
    changes: RefCell<Vec<(ConnId, u32)>>,
}

/// The time when it was set, and the number of steps after which it is over, which is never if
/// there is none.
#[derive(Clone, Copy)]
struct Deadline {
    since: Stamp,
    steps: u32,
}

impl Default for Deadline {
    fn default() -> Deadline {
        Deadline { since: Stamp::default(), steps: NEVER }
    }
}

impl Deadlines {
    /// Notes that user code sets the deadline of a connection, or takes it away. False if the
    /// system has no memory for the note.
    pub(crate) fn change(&self, id: ConnId, time: Option<Duration>) -> bool {
        let mut changes = self.changes.borrow_mut();
        let has_room = changes.try_reserve(1).is_ok();
        if has_room {
            changes.push((id, time.map_or(NEVER, steps_for)));
        }
        has_room
    }

    /// True if there are changes to take in.
    #[inline]
    pub(crate) fn has_changes(&self) -> bool {
        !self.changes.borrow().is_empty()
    }

    pub(crate) fn take_changes(&self) -> Vec<(ConnId, u32)> {
        self.changes.take()
    }

    /// Keeps a deadline that counts from `now`, or forgets it. True if there is one.
    ///
    /// # Errors
    /// If the system has no memory for it.
    pub(crate) fn keep(&self, id: ConnId, steps: u32, now: Stamp) -> Result<bool, NoMemory> {
        if steps == NEVER {
            self.forget(id);
            return Ok(false);
        }
        let mut all = self.all.borrow_mut();
        let kept = all.entry(id.slot()).ok_or(NoMemory)?;
        if kept.steps == NEVER {
            self.count.set(self.count.get() + 1);
        }
        *kept = Deadline { since: now, steps };
        Ok(true)
    }

    pub(crate) fn forget(&self, id: ConnId) {
        if let Some(kept) = self.all.borrow_mut().get_mut(id.slot()).filter(|kept| kept.steps != NEVER) {
            *kept = Deadline::default();
            self.count.set(self.count.get() - 1);
        }
    }

    /// Steps until it is over, negative if that was earlier.
    pub(crate) fn left(&self, id: ConnId, now: Stamp) -> i64 {
        self.all.borrow().get(id.slot()).map_or(FOR_EVER, |deadline| deadline.since.left(deadline.steps, now))
    }

    /// Connections that have one.
    pub(crate) fn len(&self) -> usize {
        self.count.get()
    }
}
