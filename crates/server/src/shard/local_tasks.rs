//! Futures that belong to a shard and to no connection.

use std::cell::RefCell;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use tracing::error;

use crate::guard::guard;
use crate::remote::{Remote, TaskWaker};

/// Set in the number of a woken task if it is one of these.
pub(crate) const SPAWNED: u32 = 1 << 31;

type Boxed = Pin<Box<dyn Future<Output = ()>>>;

/// Clones are handles on the same tasks.
#[derive(Clone)]
pub(crate) struct LocalTasks {
    inner: Rc<RefCell<Inner>>,
    remote: Arc<Remote>,
}

#[derive(Default)]
struct Inner {
    /// Spawned and not polled yet.
    new: Vec<Boxed>,
    slots: Vec<Option<Task>>,
}

struct Task {
    /// Taken out while it is polled, so that it may spawn.
    future: Option<Boxed>,
    wake: Arc<TaskWaker>,
    waker: Waker,
}

impl LocalTasks {
    pub(crate) fn new(remote: Arc<Remote>) -> LocalTasks {
        LocalTasks { inner: Rc::default(), remote }
    }

    pub(crate) fn spawn(&self, future: Boxed) {
        self.inner.borrow_mut().new.push(future);
    }

    pub(crate) fn has_new(&self) -> bool {
        !self.inner.borrow().new.is_empty()
    }

    /// Polls what was spawned since the last call; what that spawns is left for the next one.
    pub(crate) fn run_new(&self) {
        let new = std::mem::take(&mut self.inner.borrow_mut().new);
        for future in new {
            let index = self.place(future);
            self.resume(index);
        }
    }

    /// Drops all of them.
    pub(crate) fn clear(&self) {
        let Inner { new, slots } = std::mem::take(&mut *self.inner.borrow_mut());
        let _ = guard(move || drop(new));
        for slot in slots {
            let _ = guard(move || drop(slot));
        }
    }

    fn place(&self, future: Boxed) -> u32 {
        let mut inner = self.inner.borrow_mut();
        let index = inner.slots.iter().position(Option::is_none).unwrap_or(inner.slots.len());
        let wake = TaskWaker::new(&self.remote, index as u32 | SPAWNED);
        let task = Task { future: Some(future), waker: wake.waker(), wake };
        if index == inner.slots.len() {
            inner.slots.push(Some(task));
        } else {
            inner.slots[index] = Some(task);
        }
        index as u32
    }

    /// Polls a task that was woken.
    pub(crate) fn resume(&self, index: u32) {
        let taken = {
            let mut inner = self.inner.borrow_mut();
            let Some(Some(task)) = inner.slots.get_mut(index as usize) else { return };
            task.wake.taken();
            task.future.take().map(|future| (future, task.waker.clone()))
        };
        let Some((mut future, waker)) = taken else { return };
        let polled = guard(|| future.as_mut().poll(&mut Context::from_waker(&waker)));
        if polled.is_none() {
            error!("a task spawned on a shard panicked and is dropped");
        }
        if let Some(Poll::Pending) = polled {
            if let Some(Some(task)) = self.inner.borrow_mut().slots.get_mut(index as usize) {
                task.future = Some(future);
            }
        } else {
            if let Some(slot) = self.inner.borrow_mut().slots.get_mut(index as usize) {
                *slot = None;
            }
            let _ = guard(move || drop(future));
        }
    }
}
