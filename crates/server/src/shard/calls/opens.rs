//! Futures of [`Service::open`], in recycled slots, as those of
//! [calls](crate::shard::calls::running_calls): one that does not wait allocates nothing. They have
//! a separate table, so that a call knows nothing of them.

use std::cell::Cell;
use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use ringserve_base::guard::{Panicked, guard};
use ringserve_buf::{has_room_for, try_box};
use ringserve_core::{ConnHead, ConnId};

use super::running_calls::grow;
use crate::shard::face::handle::Shard;
use crate::shard::face::opening::{OpenCx, Refusal};
use crate::shard::face::service::Service;
use crate::shard::state::many::TaskNumbers;
use crate::shard::wakes::inbox::TaskWaker;

/// Set in the number of a woken task if it is an `open` that waits. The rest is its slot.
pub(crate) const OPENING: u32 = 1 << 29;

/// Free slots that are kept: connections come in bursts, but an `open` rarely waits.
const SPARE_MAX: usize = 64;

/// The result of `open`, unless it panicked.
pub(crate) type Answer<S, H> = Result<<S as Service<H>>::Session, Refusal>;

/// The input and output of a slot's future.
struct Job<S: Service<H>, H> {
    head: Cell<Option<ConnHead>>,
    answer: Cell<Option<Answer<S, H>>>,
}

/// Opens one connection after the other.
async fn opens<S: Service<H>, H>(service: Rc<S>, shard: Shard, job: Rc<Job<S, H>>) {
    loop {
        let head = poll_fn(|_| job.head.take().map_or(Poll::Pending, Poll::Ready)).await;
        let answer = service.open(&OpenCx::new(&head, &shard)).await;
        job.answer.set(Some(answer));
    }
}

/// The slots.
pub(crate) struct Opens<S: Service<H>, H> {
    service: Rc<S>,
    shard: Shard,
    numbers: TaskNumbers,
    slots: Vec<Option<Slot<S, H>>>,
    /// Slots of which no `open` waits, last in, first out.
    free: Vec<u32>,
}

/// An `open`, or room for one.
struct Slot<S: Service<H>, H> {
    future: Pin<Box<dyn Future<Output = ()>>>,
    job: Rc<Job<S, H>>,
    wake: Arc<TaskWaker>,
    waker: Waker,
    /// The connection whose `open` waits here.
    id: Option<ConnId>,
    /// Bytes that the state machine counts for it.
    bytes: usize,
}

/// The outcome of an `open` that began.
pub(crate) enum OpenOutcome<S: Service<H>, H> {
    /// It is done.
    Done(Result<Answer<S, H>, Panicked>),
    /// It waits, with this number, and holds this many bytes.
    Waits(u32, usize),
    /// The system has no memory for it.
    NoMemory,
}

/// An `open` that was woken and no longer waits.
pub(crate) struct OpenEnd<S: Service<H>, H> {
    pub id: ConnId,
    pub answer: Result<Answer<S, H>, Panicked>,
    /// Bytes that the state machine counted for it.
    pub bytes: usize,
}

impl<S: Service<H>, H: 'static> Opens<S, H> {
    pub(crate) fn new(service: Rc<S>, shard: Shard, numbers: TaskNumbers) -> Opens<S, H> {
        Opens { service, shard, numbers, slots: Vec::new(), free: Vec::new() }
    }

    /// Opens a connection.
    pub(crate) fn begin(&mut self, head: ConnHead) -> OpenOutcome<S, H> {
        let id = head.id();
        let free = self.free.last().copied();
        let task = free.or_else(|| grow(&mut self.slots, &mut self.free, self.numbers));
        let Some(task) = task else { return OpenOutcome::NoMemory };
        let slot = match &mut self.slots[task as usize] {
            Some(slot) => slot,
            empty => match Slot::new(&self.service, &self.shard, task | self.numbers.mark) {
                Some(slot) => empty.insert(slot),
                None => return OpenOutcome::NoMemory,
            },
        };
        slot.job.head.set(Some(head));
        match guard(|| slot.poll()) {
            Ok(Some(answer)) => OpenOutcome::Done(Ok(answer)),
            Ok(None) => {
                slot.id = Some(id);
                self.free.pop();
                OpenOutcome::Waits(task, size_of_val(&*slot.future) + size_of::<Slot<S, H>>())
            }
            Err(panicked) => {
                self.discard(task);
                OpenOutcome::Done(Err(panicked))
            }
        }
    }

    /// The state machine counts `bytes` for an `open` that waits.
    pub(crate) fn counted(&mut self, task: u32, bytes: usize) {
        if let Some(Some(slot)) = self.slots.get_mut(task as usize) {
            slot.bytes = bytes;
        }
    }

    /// The connection whose `open` waits there.
    pub(crate) fn connection(&self, task: u32) -> Option<ConnId> {
        self.slots.get(task as usize)?.as_ref()?.id
    }

    /// Polls an `open` that was woken. `None` if it still waits, or if there is none: then the wake
    /// came late.
    pub(crate) fn resume(&mut self, task: u32) -> Option<OpenEnd<S, H>> {
        let slot = self.slots.get_mut(task as usize)?.as_mut()?;
        // Also when there is none: the next one here must be woken again.
        slot.wake.taken();
        let (id, bytes) = (slot.id?, slot.bytes);
        let polled = guard(|| slot.poll());
        if let Ok(None) = polled {
            return None;
        }
        let answer = polled.transpose()?;
        slot.id = None;
        if answer.is_err() || self.free.len() >= SPARE_MAX {
            self.discard(task);
        }
        self.free.push(task);
        Some(OpenEnd { id, answer, bytes })
    }

    /// Drops the `open` of a connection that ended.
    pub(crate) fn cancel(&mut self, task: u32) {
        self.discard(task);
        self.free.push(task);
    }

    /// Drops what is kept for further ones.
    pub(crate) fn give_back(&mut self) {
        for at in 0..self.free.len() {
            self.discard(self.free[at]);
        }
    }

    fn discard(&mut self, task: u32) {
        let slot = self.slots[task as usize].take();
        let _ = guard(move || drop(slot));
    }
}

impl<S: Service<H>, H: 'static> Slot<S, H> {
    /// `None` if the system has no memory for it.
    #[cold]
    fn new(service: &Rc<S>, shard: &Shard, task: u32) -> Option<Slot<S, H>> {
        if !has_room_for::<Job<S, H>>() || !has_room_for::<TaskWaker>() {
            return None;
        }
        let job = Rc::new(Job { head: Cell::default(), answer: Cell::default() });
        let wake = TaskWaker::new(shard.remote(), task | OPENING);
        let waker = wake.waker();
        let future = Box::into_pin(try_box(opens(service.clone(), shard.clone(), job.clone()))?);
        Some(Slot { future, job, wake, waker, id: None, bytes: 0 })
    }

    /// The result of `open`, if it is done.
    fn poll(&mut self) -> Option<Answer<S, H>> {
        let _never_ready = self.future.as_mut().poll(&mut Context::from_waker(&self.waker));
        self.job.answer.take()
    }
}
