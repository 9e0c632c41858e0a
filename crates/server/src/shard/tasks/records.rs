//! Records of tasks for their handles and connections, apart from the slots in which the tasks run.

use std::task::Waker;

use ringserve_core::ConnId;

use super::task::Boxed;

/// No record.
pub(crate) const NONE: u32 = u32::MAX;

/// The end of a task.
pub(crate) enum Outcome {
    /// Its output is in it.
    Done(Boxed),
    /// It panicked, with these words.
    Panicked(Box<str>),
    Aborted,
    /// Its connection ended.
    ConnectionEnded,
    /// Its shard ended.
    ShardEnded,
    /// The handle has it.
    Taken,
}

/// One task with a handle, or of a connection.
#[derive(Default)]
struct Record {
    /// A handle may ask for the outcome.
    has_handle: bool,
    /// `None` while it runs.
    outcome: Option<Outcome>,
    /// The waiter of the handle.
    waiter: Option<Waker>,
    /// The connection with which it ends, while it runs.
    owner: Option<ConnId>,
}

/// Records of tasks, by number. A number is used again once the task ended and its handle was
/// dropped.
#[derive(Default)]
pub(crate) struct Records {
    all: Vec<Record>,
    free: Vec<u32>,
}

/// Work that is left until nothing is borrowed: all of it may be user code.
#[must_use]
#[derive(Default)]
pub(crate) struct DeferredWork {
    /// Woken.
    pub(crate) waiter: Option<Waker>,
    /// Dropped.
    pub(crate) outcome: Option<Outcome>,
}

impl Records {
    /// A record of a task that begins, with a handle.
    pub(crate) fn begin(&mut self, owner: Option<ConnId>) -> u32 {
        let record = Record { has_handle: true, owner, ..Record::default() };
        match self.free.pop() {
            Some(number) => {
                self.all[number as usize] = record;
                number
            }
            None => {
                self.all.push(record);
                self.all.len() as u32 - 1
            }
        }
    }

    /// The connection with which a task ends.
    pub(crate) fn owner(&self, number: u32) -> Option<ConnId> {
        self.all.get(number as usize)?.owner
    }

    /// A task ended. What awaits its handle is to be woken; an outcome that no handle asks for
    /// comes back.
    pub(crate) fn end(&mut self, number: u32, outcome: Outcome) -> DeferredWork {
        let Some(record) = self.all.get_mut(number as usize) else {
            return DeferredWork { outcome: Some(outcome), ..DeferredWork::default() };
        };
        record.owner = None;
        if !record.has_handle {
            self.free.push(number);
            return DeferredWork { outcome: Some(outcome), ..DeferredWork::default() };
        }
        record.outcome = Some(outcome);
        DeferredWork { waiter: record.waiter.take(), ..DeferredWork::default() }
    }

    /// Ends each running task with its shard. Returns the waiters of their handles.
    pub(crate) fn end_all(&mut self) -> Vec<Waker> {
        let mut waiters = Vec::new();
        for record in &mut self.all {
            record.outcome.get_or_insert(Outcome::ShardEnded);
            record.owner = None;
            waiters.extend(record.waiter.take());
        }
        waiters
    }

    pub(crate) fn has_ended(&self, number: u32) -> bool {
        self.all[number as usize].outcome.is_some()
    }

    /// Takes the end of a task, for its handle. `None` while it runs.
    pub(crate) fn take(&mut self, number: u32) -> Option<Outcome> {
        let outcome = &mut self.all[number as usize].outcome;
        outcome.is_some().then(|| outcome.replace(Outcome::Taken)).flatten()
    }

    /// True if `waker` is the waiter of the handle.
    pub(crate) fn is_awaited_by(&self, number: u32, waker: &Waker) -> bool {
        self.all[number as usize].waiter.as_ref().is_some_and(|known| known.will_wake(waker))
    }

    /// Has `waiter` woken at the end. Returns the one before.
    pub(crate) fn wake_at_end(&mut self, number: u32, waiter: Waker) -> Option<Waker> {
        self.all[number as usize].waiter.replace(waiter)
    }

    /// The handle is dropped. True if nothing else needs the record: then it is free.
    pub(crate) fn drop_handle(&mut self, number: u32) -> (bool, DeferredWork) {
        let record = &mut self.all[number as usize];
        record.has_handle = false;
        let left = DeferredWork { waiter: record.waiter.take(), outcome: record.outcome.take() };
        let is_free = record.owner.is_none();
        if is_free {
            self.free.push(number);
        }
        (is_free, left)
    }

    /// Records in use.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.all.len() - self.free.len()
    }
}
