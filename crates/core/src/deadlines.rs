//! Deadlines of connections, kept apart from them: few have one, and most of those only until they logged in.
//!
//! User code leaves what it sets here, and the state machine takes it in at the end of the turn.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::cell::RefCell;
use core::time::Duration;

use crate::ConnId;
use crate::stamp::{FOR_EVER, NEVER, Stamp};
use crate::wheel::steps_for;

/// The deadlines of a shard's connections.
#[derive(Default)]
pub(crate) struct Deadlines {
    all: RefCell<BTreeMap<ConnId, Deadline>>,
    /// What user code set since, in its order, in steps of the wheel.
    changes: RefCell<Vec<(ConnId, u32)>>,
}

/// When it was set, and how many steps later it is over.
#[derive(Clone, Copy)]
struct Deadline {
    since: Stamp,
    steps: u32,
}

impl Deadlines {
    /// User code sets the deadline of a connection, or takes it away.
    pub(crate) fn change(&self, id: ConnId, time: Option<Duration>) {
        self.changes.borrow_mut().push((id, time.map_or(NEVER, steps_for)));
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
    pub(crate) fn keep(&self, id: ConnId, steps: u32, now: Stamp) -> bool {
        if steps == NEVER {
            self.forget(id);
            return false;
        }
        self.all.borrow_mut().insert(id, Deadline { since: now, steps });
        true
    }

    pub(crate) fn forget(&self, id: ConnId) {
        self.all.borrow_mut().remove(&id);
    }

    /// Steps until it is over, negative once it has been for longer.
    pub(crate) fn left(&self, id: ConnId, now: Stamp) -> i64 {
        self.all.borrow().get(&id).map_or(FOR_EVER, |deadline| deadline.since.left(deadline.steps, now))
    }

    /// Connections that have one.
    pub(crate) fn len(&self) -> usize {
        self.all.borrow().len()
    }
}
