//! Futures that belong to a shard and to no call.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use ringserve_base::guard::{Panicked, guard, wake};
use ringserve_base::lines::LineLimit;
use ringserve_base::peer::Peer;
use ringserve_core::{ConnHead, ConnId};

use super::records::{DeferredWork, NONE, Outcome, Records};
use super::task::Boxed;
use crate::log;
use crate::shard::wakes::inbox::{ShardRemote, TaskWaker};
use crate::shard::wakes::timers::Timers;

/// Set in the number of a woken task if it is one of these.
pub(crate) const SPAWNED: u32 = 1 << 31;

/// Free slots that keep their waker for the next task. Beyond, the memory of a burst is given back.
const SPARE_MAX: usize = 1024;

/// Clones are handles on the same tasks.
#[derive(Clone)]
pub(crate) struct LocalTasks {
    inner: Rc<Shared>,
}

struct Shared {
    state: RefCell<Inner>,
    shard: usize,
    remote: Arc<ShardRemote>,
    timers: Timers,
}

/// Names a task, for as long as it lives and no longer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TaskId {
    index: u32,
    generation: u32,
}

/// A task, with the state that is kept for its handle.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Recorded {
    pub(crate) task: TaskId,
    pub(crate) record: u32,
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
    records: Records,
    /// The tasks of a connection, by its slot. A connection without one has no entry.
    owned: BTreeMap<u32, Vec<TaskId>>,
    /// The shard ended: no task begins.
    ended: bool,
    panics: LineLimit,
    /// The connection of the task that panics.
    panicking: Option<(ConnId, Peer)>,
}

struct Slot {
    /// The number of earlier tasks in this slot.
    generation: u32,
    /// The record of the task, or [`NONE`].
    record: u32,
    /// `None` while it is polled, so that it may spawn, and in a free slot.
    future: Option<Boxed>,
    wake: Option<(Arc<TaskWaker>, Waker)>,
}

impl LocalTasks {
    pub(crate) fn new(shard: usize, remote: Arc<ShardRemote>, timers: Timers) -> LocalTasks {
        LocalTasks { inner: Rc::new(Shared { state: RefCell::default(), shard, remote, timers }) }
    }

    /// Takes a future in. It is polled at the end of the turn for the first time.
    pub(crate) fn spawn(&self, future: Boxed) -> TaskId {
        self.begin(future, NONE)
    }

    /// The same for one with a handle. On a shard that ended it is dropped, and its handle says so.
    pub(crate) fn spawn_recorded(&self, future: Boxed) -> Recorded {
        let record = self.inner.state.borrow_mut().records.begin(None);
        Recorded { task: self.begin(future, record), record }
    }

    /// The same for one that ends with its connection. `None` if that has `tasks_max` already: then
    /// the future is dropped.
    pub(crate) fn spawn_owned(&self, owner: ConnId, tasks_max: usize, future: Boxed) -> Option<Recorded> {
        let mut inner = self.inner.state.borrow_mut();
        if inner.owned.get(&owner.slot()).is_some_and(|tasks| tasks.len() >= tasks_max) {
            drop(inner);
            let _ = guard(move || drop(future));
            return None;
        }
        let record = inner.records.begin(Some(owner));
        drop(inner);
        let task = self.begin(future, record);
        let mut inner = self.inner.state.borrow_mut();
        if !inner.ended {
            inner.owned.entry(owner.slot()).or_default().push(task);
        }
        Some(Recorded { task, record })
    }

    fn begin(&self, future: Boxed, record: u32) -> TaskId {
        let mut inner = self.inner.state.borrow_mut();
        if inner.ended {
            let left = inner.records.end(record, Outcome::ShardEnded);
            drop(inner);
            self.finish(Some(future), left);
            return TaskId { index: NONE, generation: 0 };
        }
        let index = inner.free.pop().unwrap_or_else(|| {
            inner.slots.push(Slot { generation: 0, record: NONE, future: None, wake: None });
            inner.slots.len() as u32 - 1
        });
        let slot = &mut inner.slots[index as usize];
        (slot.future, slot.record) = (Some(future), record);
        slot.wake.get_or_insert_with(|| {
            let wake = TaskWaker::new(&self.inner.remote, index | SPAWNED);
            let waker = wake.waker();
            (wake, waker)
        });
        let task = TaskId { index, generation: slot.generation };
        inner.new.push(task);
        self.inner.remote.announce_task();
        task
    }

    /// Polls tasks spawned since the last call; tasks that they spawn are left for the next one.
    pub(crate) fn run_new(&self) {
        let mut new = std::mem::take(&mut self.inner.state.borrow_mut().new);
        for task in new.drain(..) {
            self.poll(task);
        }
        let mut inner = self.inner.state.borrow_mut();
        if inner.new.is_empty() {
            // Kept for its room.
            inner.new = new;
        }
    }

    /// The shard ended: drops all of them, and takes none from now on.
    pub(crate) fn clear(&self) {
        let mut inner = self.inner.state.borrow_mut();
        inner.ended = true;
        let slots = std::mem::take(&mut inner.slots);
        inner.owned.clear();
        drop(inner);
        for slot in slots {
            let _ = guard(move || drop(slot));
        }
        let waiters = self.inner.state.borrow_mut().records.end_all();
        for waiter in waiters {
            let _ = wake(waiter);
        }
    }

    /// Polls a task that was woken, by its number.
    pub(crate) fn resume(&self, index: u32) {
        let generation = self.inner.state.borrow().slots.get(index as usize).map(|slot| slot.generation);
        if let Some(generation) = generation {
            self.poll(TaskId { index, generation });
        }
    }

    /// Polls a task here and now, if it lives and is not being polled.
    pub(crate) fn poll(&self, task: TaskId) {
        let taken = {
            let mut inner = self.inner.state.borrow_mut();
            let Some(slot) = inner.slot(task) else { return };
            let Some((wake, waker)) = &slot.wake else { return };
            wake.taken();
            let taken = slot.future.take().map(|future| (future, waker.clone()));
            // A task that is polled may have another one polled, by its own waker.
            taken.map(|(future, waker)| (future, waker, inner.current.replace(task)))
        };
        let Some((mut future, waker, before)) = taken else { return };
        let polled = guard(|| future.as_mut().run(&mut Context::from_waker(&waker)));
        self.inner.state.borrow_mut().current = before;
        match polled {
            Ok(Poll::Pending) => {
                if let Some(slot) = self.inner.state.borrow_mut().slot(task) {
                    slot.future = Some(future);
                    return;
                }
                // It aborted itself.
                let _ = guard(move || drop(future));
            }
            Ok(Poll::Ready(())) => self.end(task, Outcome::Done(future)),
            Err(panicked) => {
                self.report_panic(future.name(), &panicked);
                let _ = guard(move || drop(future));
                self.end(task, Outcome::Panicked(panicked.to_string().into()));
            }
        }
    }

    /// The task that is being polled panics, and is a connection's.
    pub(crate) fn set_panicking(&self, id: ConnId, peer: Peer) {
        self.inner.state.borrow_mut().panicking = Some((id, peer));
    }

    #[cold]
    fn report_panic(&self, name: Option<&str>, panicked: &Panicked) {
        let mut inner = self.inner.state.borrow_mut();
        let connection = inner.panicking.take();
        let allowed = inner.panics.allows(self.inner.timers.now());
        drop(inner);
        if allowed {
            log::task_panicked(self.inner.shard, name, connection, panicked);
        }
    }

    /// A transport panicked, for a connection that it does not know.
    #[cold]
    pub(crate) fn transport_panicked(&self, panicked: &Panicked) {
        if self.inner.state.borrow_mut().panics.allows(self.inner.timers.now()) {
            log::panicked(self.inner.shard, None, "transport", None, panicked);
        }
    }

    /// Drops a task's future, or lets it be dropped once its poll is over. Nothing happens if it is
    /// done.
    pub(crate) fn abort(&self, task: TaskId) {
        self.end(task, Outcome::Aborted);
    }

    /// A connection ended: so do its tasks.
    pub(crate) fn end_of(&self, connection: ConnId) {
        let tasks = self.inner.state.borrow_mut().owned.remove(&connection.slot());
        for task in tasks.into_iter().flatten() {
            self.end(task, Outcome::ConnectionEnded);
        }
    }

    /// The task being polled, if this waker is its own and not that of something in between.
    pub(crate) fn current(&self, waker: &Waker) -> Option<TaskId> {
        let inner = self.inner.state.borrow();
        let task = inner.current?;
        let (_, own) = inner.slots.get(task.index as usize)?.wake.as_ref()?;
        own.will_wake(waker).then_some(task)
    }

    /// For a handle: true once its task ended, however it did.
    pub(crate) fn has_ended(&self, record: u32) -> bool {
        self.inner.state.borrow().records.has_ended(record)
    }

    /// For a handle: how its task ended.
    pub(crate) fn poll_outcome(&self, record: u32, waker: &Waker) -> Poll<Outcome> {
        let mut inner = self.inner.state.borrow_mut();
        if let Some(outcome) = inner.records.take(record) {
            return Poll::Ready(outcome);
        }
        if inner.records.is_awaited_by(record, waker) {
            return Poll::Pending;
        }
        drop(inner);
        // Cloning and dropping a waker is user code: nothing is borrowed meanwhile.
        let waker = waker.clone();
        let old = self.inner.state.borrow_mut().records.wake_at_end(record, waker);
        drop(old);
        Poll::Pending
    }

    /// The handle is dropped: its task goes on, and its outcome is dropped.
    pub(crate) fn detach(&self, Recorded { task, record }: Recorded) {
        let mut inner = self.inner.state.borrow_mut();
        let (is_free, left) = inner.records.drop_handle(record);
        if is_free && let Some(slot) = inner.slot(task) {
            slot.record = NONE;
        }
        drop(inner);
        drop(left);
    }

    /// Ends a task that lives. One that is being polled is dropped when that is over.
    fn end(&self, task: TaskId, outcome: Outcome) {
        let (future, left) = self.inner.state.borrow_mut().end(task, outcome);
        self.finish(future, left);
    }

    /// The rest of the work for a task that ended: all of it is user code.
    fn finish(&self, future: Option<Boxed>, left: DeferredWork) {
        let DeferredWork { waiter, outcome } = left;
        let _ = guard(move || drop(future));
        let _ = guard(move || drop(outcome));
        if let Some(waiter) = waiter {
            // If it panics, the waiter of the handle is not woken.
            let _ = wake(waiter);
        }
    }
}

impl Inner {
    fn slot(&mut self, task: TaskId) -> Option<&mut Slot> {
        self.slots.get_mut(task.index as usize).filter(|slot| slot.generation == task.generation)
    }

    /// Frees the slot of a task that lives.
    fn end(&mut self, task: TaskId, outcome: Outcome) -> (Option<Boxed>, DeferredWork) {
        let keeps_waker = self.free.len() < SPARE_MAX;
        let Some(slot) = self.slot(task) else {
            return (None, DeferredWork { outcome: Some(outcome), ..DeferredWork::default() });
        };
        slot.generation = slot.generation.wrapping_add(1);
        let (future, record) = (slot.future.take(), std::mem::replace(&mut slot.record, NONE));
        if !keeps_waker {
            slot.wake = None;
        }
        self.free.push(task.index);
        if let Some(owner) = self.records.owner(record) {
            self.disown(owner, task);
        }
        (future, self.records.end(record, outcome))
    }

    /// Takes a task off its connection's.
    fn disown(&mut self, owner: ConnId, task: TaskId) {
        let Some(tasks) = self.owned.get_mut(&owner.slot()) else { return };
        tasks.retain(|other| *other != task);
        if tasks.is_empty() {
            self.owned.remove(&owner.slot());
        }
    }
}

/// Resets a connection if the future that holds this one panics.
pub(crate) struct ResetsOnPanic {
    shared: ConnHead,
    tasks: LocalTasks,
}

impl ResetsOnPanic {
    pub(crate) fn new(shared: ConnHead, tasks: LocalTasks) -> ResetsOnPanic {
        ResetsOnPanic { shared, tasks }
    }
}

impl Drop for ResetsOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let outlet = &*self.shared;
            self.tasks.set_panicking(outlet.id(), Peer::of(outlet));
            outlet.panicked();
        }
    }
}

#[cfg(test)]
mod tests {
    use ringserve_base::clock::Clock;

    use super::*;
    use crate::shard::tasks::task::boxed;
    use std::cell::Cell;
    use std::future::{pending, poll_fn};

    fn tasks() -> LocalTasks {
        LocalTasks::new(0, ShardRemote::new(), Timers::new(Clock::start()))
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
    fn aborted_task_is_dropped_at_once_and_its_slot_used_again() {
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
    fn task_aborted_before_its_first_poll_is_never_polled() {
        let (tasks, dropped) = (tasks(), Rc::new(Cell::new(0)));
        let counts = Counts(dropped.clone());
        let task = tasks.spawn(Box::pin(async move {
            let _counts = counts;
            panic!("polled");
        }));
        tasks.abort(task);
        assert_eq!(dropped.get(), 1);
        tasks.run_new();
        assert_eq!(tasks.inner.state.borrow().free.len(), 1);
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
        assert_eq!((dropped.get(), tasks.inner.state.borrow().slots.len()), (1, 1));
        tasks.clear();
        assert_eq!(dropped.get(), 2);
    }

    #[test]
    fn slots_are_found_without_looking_at_those_in_use() {
        let tasks = tasks();
        let all: Vec<TaskId> = (0..3000).map(|_| tasks.spawn(Box::pin(pending()))).collect();
        tasks.run_new();
        all.iter().for_each(|task| tasks.abort(*task));
        assert_eq!(tasks.inner.state.borrow().free.len(), 3000);
        let kept = tasks.inner.state.borrow().slots.iter().filter(|slot| slot.wake.is_some()).count();
        assert_eq!(kept, SPARE_MAX);
        (0..3000).for_each(|_| _ = tasks.spawn(Box::pin(pending())));
        assert_eq!(tasks.inner.state.borrow().slots.len(), 3000);
    }

    #[test]
    fn a_task_that_is_done_keeps_its_record_for_its_handle_alone() {
        let tasks = tasks();
        let ended = |task: &Recorded| tasks.has_ended(task.record);
        let owner = ConnId::new(7, 1);
        let task = tasks.spawn_recorded(boxed(None, async { "output" }));
        let owned = tasks.spawn_owned(owner, 1, boxed(None, pending::<()>())).unwrap();
        assert!(tasks.spawn_owned(owner, 1, boxed(None, pending::<()>())).is_none(), "it has its one");
        tasks.run_new();
        assert_eq!((ended(&task), ended(&owned), tasks.inner.state.borrow().records.len()), (true, false, 2));
        tasks.detach(task);
        tasks.detach(owned);
        assert_eq!(tasks.inner.state.borrow().records.len(), 1, "its connection has it still");
        tasks.end_of(ConnId::new(8, 1));
        assert_eq!(tasks.inner.state.borrow().free.len(), 1);
        tasks.end_of(owner);
        let inner = tasks.inner.state.borrow();
        assert_eq!((inner.records.len(), inner.free.len(), inner.owned.len()), (0, 2, 0));
    }

    #[test]
    fn a_connection_whose_tasks_are_done_has_no_entry() {
        let tasks = tasks();
        for _ in 0..10 {
            let task = tasks.spawn_owned(ConnId::new(7, 1), 1, boxed(None, async {})).unwrap();
            tasks.detach(task);
            tasks.run_new();
            assert!(tasks.inner.state.borrow().owned.is_empty());
        }
        assert_eq!(tasks.inner.state.borrow().slots.len(), 1);
    }

    #[test]
    fn a_shard_that_ended_takes_no_task_and_its_handles_say_so() {
        let (tasks, dropped) = (tasks(), Rc::new(Cell::new(0)));
        let before = tasks.spawn_recorded(boxed(None, waits(Counts(dropped.clone()))));
        tasks.run_new();
        tasks.clear();
        let after = tasks.spawn_recorded(boxed(None, waits(Counts(dropped.clone()))));
        let owned = tasks.spawn_owned(ConnId::new(7, 1), 1, boxed(None, waits(Counts(dropped.clone()))));
        assert_eq!(dropped.get(), 3);
        for task in [before, after, owned.unwrap()] {
            let outcome = tasks.poll_outcome(task.record, Waker::noop());
            assert!(matches!(outcome, Poll::Ready(Outcome::ShardEnded)));
            tasks.detach(task);
        }
        assert_eq!(tasks.inner.state.borrow().records.len(), 0);
    }
}
