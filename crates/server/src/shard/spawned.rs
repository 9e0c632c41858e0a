//! Futures that belong to a shard and to no call.

use std::cell::RefCell;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use ringserve_core::ConnId;

use super::inbox::{RemoteShard, TaskWaker};
use super::timers::Timers;
use crate::guard::{Panicked, guard};
use crate::log::{self, LineLimit};
use crate::peer::Peer;

/// Set in the number of a woken task if it is one of these.
pub(crate) const SPAWNED: u32 = 1 << 31;

/// Free slots that keep their waker for the next task. Beyond, the memory of a burst is given back.
const SPARE_MAX: usize = 1024;

type Boxed = Pin<Box<dyn Future<Output = ()>>>;

/// Clones are handles on the same tasks.
#[derive(Clone)]
pub(crate) struct LocalTasks {
    inner: Rc<RefCell<Inner>>,
    shard: usize,
    remote: Arc<RemoteShard>,
    timers: Timers,
}

/// Names a task, for as long as it lives and no longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TaskId {
    index: u32,
    generation: u32,
}

#[derive(Default)]
struct Inner {
    /// Spawned and not polled yet.
    new: Vec<TaskId>,
    /// The one being polled.
    current: Option<TaskId>,
    slots: Vec<Slot>,
    /// Slots without a task, last in, first out.
    free: Vec<u32>,
    panics: LineLimit,
    /// The connection of the task that panics.
    panicking: Option<(ConnId, Peer)>,
}

#[derive(Default)]
struct Slot {
    /// How many tasks were here before.
    generation: u32,
    /// `None` while it is polled, so that it may spawn, and in a free slot.
    future: Option<Boxed>,
    wake: Option<(Arc<TaskWaker>, Waker)>,
}

impl LocalTasks {
    pub(crate) fn new(shard: usize, remote: Arc<RemoteShard>, timers: Timers) -> LocalTasks {
        LocalTasks { inner: Rc::default(), shard, remote, timers }
    }

    /// Takes a future in. It is polled at the end of the turn for the first time.
    pub(crate) fn spawn(&self, future: Boxed) -> TaskId {
        let mut inner = self.inner.borrow_mut();
        let index = inner.free.pop().unwrap_or_else(|| {
            inner.slots.push(Slot::default());
            inner.slots.len() as u32 - 1
        });
        let slot = &mut inner.slots[index as usize];
        slot.future = Some(future);
        slot.wake.get_or_insert_with(|| {
            let wake = TaskWaker::new(&self.remote, index | SPAWNED);
            let waker = wake.waker();
            (wake, waker)
        });
        let task = TaskId { index, generation: slot.generation };
        inner.new.push(task);
        self.remote.announce_task();
        task
    }

    /// Polls what was spawned since the last call; what that spawns is left for the next one.
    pub(crate) fn run_new(&self) {
        let mut new = std::mem::take(&mut self.inner.borrow_mut().new);
        for task in new.drain(..) {
            self.poll(task);
        }
        let mut inner = self.inner.borrow_mut();
        if inner.new.is_empty() {
            // Kept for its room.
            inner.new = new;
        }
    }

    /// Drops all of them.
    pub(crate) fn clear(&self) {
        let slots = std::mem::take(&mut *self.inner.borrow_mut()).slots;
        for slot in slots {
            let _ = guard(move || drop(slot));
        }
    }

    /// Polls a task that was woken, by its number.
    pub(crate) fn resume(&self, index: u32) {
        let generation = self.inner.borrow().slots.get(index as usize).map(|slot| slot.generation);
        if let Some(generation) = generation {
            self.poll(TaskId { index, generation });
        }
    }

    /// Polls a task here and now, if it lives and is not being polled.
    pub(crate) fn poll(&self, task: TaskId) {
        let taken = {
            let mut inner = self.inner.borrow_mut();
            let Some(slot) = inner.slot(task) else { return };
            let Some((wake, waker)) = &slot.wake else { return };
            wake.taken();
            let taken = slot.future.take().map(|future| (future, waker.clone()));
            // A task that is polled may have another one polled, by a waker of its own.
            taken.map(|(future, waker)| (future, waker, inner.current.replace(task)))
        };
        let Some((mut future, waker, before)) = taken else { return };
        let polled = guard(|| future.as_mut().poll(&mut Context::from_waker(&waker)));
        self.inner.borrow_mut().current = before;
        if let Err(panicked) = &polled {
            self.report_panic(panicked);
        }
        if let Ok(Poll::Pending) = polled {
            let mut inner = self.inner.borrow_mut();
            // Unless it aborted itself.
            if let Some(slot) = inner.slot(task) {
                slot.future = Some(future);
                return;
            }
        }
        self.abort(task);
        let _ = guard(move || drop(future));
    }

    /// The task that is being polled panics, and is a connection's.
    pub(crate) fn set_panicking(&self, id: ConnId, peer: Peer) {
        self.inner.borrow_mut().panicking = Some((id, peer));
    }

    #[cold]
    fn report_panic(&self, panicked: &Panicked) {
        let mut inner = self.inner.borrow_mut();
        let connection = inner.panicking.take();
        let allowed = inner.panics.allows(self.timers.now());
        drop(inner);
        if allowed {
            log::panicked(self.shard, None, "task", connection, panicked);
        }
    }

    /// Drops a task's future, or lets it be dropped once its poll is over. Nothing happens if it is done.
    pub(crate) fn abort(&self, task: TaskId) {
        let future = self.inner.borrow_mut().free(task);
        let _ = guard(move || drop(future));
    }

    /// The task being polled, if this waker is its own and not that of something in between.
    pub(crate) fn current(&self, waker: &Waker) -> Option<TaskId> {
        let inner = self.inner.borrow();
        let task = inner.current?;
        let (_, own) = inner.slots.get(task.index as usize)?.wake.as_ref()?;
        own.will_wake(waker).then_some(task)
    }
}

impl Inner {
    fn slot(&mut self, task: TaskId) -> Option<&mut Slot> {
        self.slots.get_mut(task.index as usize).filter(|slot| slot.generation == task.generation)
    }

    fn free(&mut self, task: TaskId) -> Option<Boxed> {
        let keeps_waker = self.free.len() < SPARE_MAX;
        let slot = self.slot(task)?;
        slot.generation = slot.generation.wrapping_add(1);
        let future = slot.future.take();
        if !keeps_waker {
            slot.wake = None;
        }
        self.free.push(task.index);
        future
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shard::clock::Clock;
    use std::cell::Cell;
    use std::future::{pending, poll_fn};

    fn tasks() -> LocalTasks {
        LocalTasks::new(0, RemoteShard::new(), Timers::new(Clock::start()))
    }

    /// Counts its drops.
    struct Counts(Rc<Cell<u32>>);

    impl Drop for Counts {
        fn drop(&mut self) {
            self.0.set(self.0.get() + 1);
        }
    }

    async fn waits(counts: Counts) {
        let _counts = counts;
        pending().await
    }

    #[test]
    fn an_aborted_task_is_dropped_at_once_and_its_slot_serves_the_next_one() {
        let (tasks, dropped) = (tasks(), Rc::new(Cell::new(0)));
        let first = tasks.spawn(Box::pin(waits(Counts(dropped.clone()))));
        tasks.run_new();
        tasks.abort(first);
        assert_eq!(dropped.get(), 1);
        let second = tasks.spawn(Box::pin(waits(Counts(dropped.clone()))));
        assert_eq!((second.index, second == first), (first.index, false));
        // The old name names no task.
        tasks.abort(first);
        tasks.run_new();
        assert_eq!(dropped.get(), 1);
        tasks.clear();
        assert_eq!(dropped.get(), 2);
    }

    #[test]
    fn a_task_that_was_aborted_before_its_first_poll_is_never_polled() {
        let (tasks, dropped) = (tasks(), Rc::new(Cell::new(0)));
        let counts = Counts(dropped.clone());
        let task = tasks.spawn(Box::pin(async move {
            let _counts = counts;
            panic!("polled");
        }));
        tasks.abort(task);
        assert_eq!(dropped.get(), 1);
        tasks.run_new();
        assert_eq!(tasks.inner.borrow().free.len(), 1);
    }

    #[test]
    fn a_task_may_abort_itself_and_spawn_another_into_its_slot() {
        let (tasks, dropped) = (tasks(), Rc::new(Cell::new(0)));
        let own = Rc::new(Cell::new(None::<TaskId>));
        let (inside, id, counts) = (tasks.clone(), own.clone(), Counts(dropped.clone()));
        let next = Counts(dropped.clone());
        let mut next = Some(next);
        own.set(Some(tasks.spawn(Box::pin(async move {
            let _counts = counts;
            poll_fn(|_| {
                inside.abort(id.get().unwrap());
                inside.spawn(Box::pin(waits(next.take().unwrap())));
                Poll::<()>::Pending
            })
            .await;
        }))));
        tasks.run_new();
        assert_eq!(dropped.get(), 1);
        tasks.run_new();
        assert_eq!((dropped.get(), tasks.inner.borrow().slots.len()), (1, 1));
        tasks.clear();
        assert_eq!(dropped.get(), 2);
    }

    #[test]
    fn slots_are_found_without_looking_at_those_in_use() {
        let tasks = tasks();
        let all: Vec<TaskId> = (0..3000).map(|_| tasks.spawn(Box::pin(pending()))).collect();
        tasks.run_new();
        all.iter().for_each(|task| tasks.abort(*task));
        assert_eq!(tasks.inner.borrow().free.len(), 3000);
        let kept = tasks.inner.borrow().slots.iter().filter(|slot| slot.wake.is_some()).count();
        assert_eq!(kept, SPARE_MAX);
        (0..3000).for_each(|_| _ = tasks.spawn(Box::pin(pending())));
        assert_eq!(tasks.inner.borrow().slots.len(), 3000);
    }
}
