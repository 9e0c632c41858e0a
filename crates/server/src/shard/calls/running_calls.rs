//! Handlers' futures, in recycled slots.
//!
//! A slot holds one future that never ends: it takes a frame, calls the service, leaves the result,
//! and waits for the next frame ([`calls`]). So a call that is done at once, as most are, costs a
//! poll and nothing else: no allocation, and no future is built again and moved. A call that waits
//! keeps its slot until it is woken and done, and the next frame goes to another slot.

use std::cell::Cell;
use std::future::poll_fn;
use std::mem;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use ringserve_base::guard::{Panicked, guard};
use ringserve_buf::{has_room_for, try_box};
use ringserve_core::{ConnId, ConnShared, Frame, ParkOutcome, Stamp, Time};

use crate::shard::face::cx::Cx;
use crate::shard::face::handle::Shard;
use crate::shard::face::service::Service;
use crate::shard::state::many::TaskNumbers;
use crate::shard::wakes::inbox::TaskWaker;
use crate::snapshot::durations::CallStart;

/// Free slots that are kept. Beyond, the memory of a burst of parked handlers is given back.
const SPARE_MAX: usize = 1024;

/// No slot has this number.
const NO_TASK: u32 = u32::MAX;

/// The two counts of an `Rc` or an `Arc`.
const COUNTS: usize = 2 * size_of::<usize>();

/// Bytes that the allocator takes for a block: its own word, in steps of 16, 32 at least (glibc's).
const fn allocated(bytes: usize) -> usize {
    let shared = (bytes + size_of::<usize>()).next_multiple_of(16);
    match bytes {
        0 => 0,
        _ if shared < 32 => 32,
        _ => shared,
    }
}

/// Input and output of a slot's future. Frame and connection lie apart, since each is moved the way
/// it was written: a processor waits when it reads in one piece what it just wrote in several.
pub(crate) struct Job<S: Service<H>, H> {
    shared: Cell<Option<ConnShared<S::Session>>>,
    frame: Cell<Frame<H>>,
    result: Cell<Option<Result<(), S::Error>>>,
    shard: Shard,
}

/// Calls the service for one frame after the other. A function, so that its future has a name as a
/// type parameter.
pub(crate) async fn calls<S: Service<H>, H: Default>(service: Rc<S>, job: Rc<Job<S, H>>) {
    loop {
        let shared = poll_fn(|_| match job.shared.take() {
            Some(shared) => Poll::Ready(shared),
            None => Poll::Pending,
        })
        .await;
        let result = service.call(&Cx::new(&shared, &job.shard), job.frame.take()).await;
        job.result.set(Some(result));
    }
}

/// The slots. `Make` makes a slot's future.
pub(crate) struct Tasks<S: Service<H>, H, Make, Fut> {
    service: Rc<S>,
    make: Make,
    slots: Vec<Option<Slot<S, H, Fut>>>,
    /// Slots without a call, last in, first out.
    free: Vec<u32>,
    shard: Shard,
    numbers: TaskNumbers,
}

/// A call, or room for one.
pub(crate) struct Slot<S: Service<H>, H, Fut> {
    future: Pin<Box<Fut>>,
    job: Rc<Job<S, H>>,
    wake: Arc<TaskWaker>,
    waker: Waker,
    /// The connection of the call that waits here.
    id: Option<ConnId>,
    /// Bytes that the state machine counts for that call.
    bytes: usize,
    /// The connection's other waiting calls, in a list, the newest first. [`NO_TASK`] is before the
    /// first.
    prev: u32,
    /// When the call began to wait, in steps of the time limits' wheel.
    since: Stamp,
    /// The same, as the shard's clock has it.
    start: CallStart,
    next: Option<u32>,
}

impl<S, H, Make, Fut> Tasks<S, H, Make, Fut>
where
    S: Service<H>,
    H: Default,
    Make: Fn(Rc<S>, Rc<Job<S, H>>) -> Fut,
    Fut: Future<Output = ()>,
{
    pub(crate) fn new(
        service: Rc<S>,
        make: Make,
        shard: Shard,
        numbers: TaskNumbers,
    ) -> Tasks<S, H, Make, Fut> {
        Tasks { service, make, slots: Vec::new(), free: Vec::new(), shard, numbers }
    }

    /// A slot without a call, and its number. `None` if the system has no memory for one.
    #[inline(always)]
    pub(crate) fn idle(&mut self) -> Option<(u32, &mut Slot<S, H, Fut>)> {
        let task = match self.free.last() {
            Some(task) => *task,
            None => grow(&mut self.slots, &mut self.free, self.numbers)?,
        };
        let slot = match &mut self.slots[task as usize] {
            Some(slot) => slot,
            empty => {
                empty.insert(Slot::new(&self.service, &self.make, &self.shard, task | self.numbers.mark)?)
            }
        };
        Some((task, slot))
    }

    /// The call that began in the [idle](Tasks::idle) slot waits.
    /// It began in the turn of `now`.
    pub(crate) fn waits(&mut self, task: u32, id: ConnId, now: Time) {
        debug_assert_eq!(self.free.last(), Some(&task), "another slot is used next");
        self.free.pop();
        if let Some(slot) = self.slot(task) {
            slot.id = Some(id);
            slot.start = CallStart::at(now);
        }
    }

    /// Bytes of memory that a call holds while it waits, in addition to its frame.
    pub(crate) const fn call_bytes(&self) -> usize {
        allocated(size_of::<Fut>())
            + allocated(size_of::<Job<S, H>>() + COUNTS)
            + allocated(size_of::<TaskWaker>() + COUNTS)
            + size_of::<Option<Slot<S, H, Fut>>>()
            + size_of::<u32>()
    }

    /// Lists a call that waits before its connection's others, of which `parked.next` is the first.
    pub(crate) fn list(&mut self, task: u32, parked: ParkOutcome) {
        let ParkOutcome { next, bytes, since } = parked;
        if let Some(slot) = self.slot(task) {
            (slot.next, slot.bytes, slot.since) = (next, bytes, since);
        }
        if let Some(slot) = next.and_then(|next| self.slot(next)) {
            slot.prev = task;
        }
    }

    fn slot(&mut self, task: u32) -> Option<&mut Slot<S, H, Fut>> {
        self.slots.get_mut(task as usize)?.as_mut()
    }

    /// Takes a call off its connection's list. Returns the one after it, and since when the one
    /// before it waits.
    fn unlist(&mut self, task: u32) -> (Option<u32>, Option<Stamp>) {
        let Some(slot) = self.slot(task) else { return (None, None) };
        let (prev, next) = (std::mem::replace(&mut slot.prev, NO_TASK), slot.next.take());
        let before = self.slot(prev).map(|slot| {
            slot.next = next;
            slot.since
        });
        if let Some(slot) = next.and_then(|next| self.slot(next)) {
            slot.prev = prev;
        }
        (next, before)
    }

    /// The connection of the call that waits there.
    #[inline]
    pub(crate) fn connection(&self, task: u32) -> Option<ConnId> {
        self.slots.get(task as usize)?.as_ref()?.id
    }

    /// Polls a call that was woken. `None` if it still waits, or if there is none: then the wake
    /// came late.
    pub(crate) fn resume(&mut self, task: u32) -> Option<WokenCall<S::Error>> {
        let slot = self.slots.get_mut(task as usize)?.as_mut()?;
        // Also when there is no call: the next one here must be woken again.
        slot.wake.taken();
        let (id, bytes, since, start) = (slot.id?, slot.bytes, slot.since, slot.start);
        let polled = guard(|| slot.poll());
        if let Ok(None) = polled {
            return None;
        }
        let (next, before) = self.unlist(task);
        let result = match polled.transpose()? {
            Ok(result) => {
                self.release(task);
                Resumed::Done(result)
            }
            Err(panicked) => {
                self.discard(task);
                self.free.push(task);
                Resumed::Panicked(panicked)
            }
        };
        Some(WokenCall { id, result, parked: ParkOutcome { next, bytes, since }, before, start })
    }

    /// Drops a connection's calls that wait, `first` and those listed after it. Returns how many
    /// there were.
    pub(crate) fn cancel(&mut self, first: u32) -> usize {
        let (mut task, mut count) = (Some(first), 0);
        while let Some(number) = task {
            let Some(slot) = self.slot(number).filter(|slot| slot.id.is_some()) else { break };
            task = slot.next;
            self.discard(number);
            self.free.push(number);
            count += 1;
        }
        count
    }

    /// After a panic in [`Slot::call`]: drops the call that was under way.
    pub(crate) fn recover(&mut self) {
        if let Some(task) = self.free.last() {
            self.discard(*task);
        }
    }

    /// Drops what is kept for further calls.
    pub(crate) fn give_back(&mut self) {
        for task in std::mem::take(&mut self.free) {
            self.discard(task);
            self.free.push(task);
        }
    }

    fn discard(&mut self, task: u32) {
        let slot = self.slots[task as usize].take();
        let _ = guard(move || drop(slot));
    }

    fn release(&mut self, task: u32) {
        if let Some(slot) = &mut self.slots[task as usize] {
            slot.id = None;
        }
        if self.free.len() >= SPARE_MAX {
            self.slots[task as usize] = None;
        }
        self.free.push(task);
    }
}

/// One slot more, which is free. `None` if the system has no memory for it, or there is no number
/// for it.
#[cold]
pub(crate) fn grow<T>(slots: &mut Vec<Option<T>>, free: &mut Vec<u32>, numbers: TaskNumbers) -> Option<u32> {
    if slots.len() >= numbers.max as usize {
        return None;
    }
    slots.try_reserve(1).ok()?;
    // Every slot may be free at once.
    free.try_reserve(slots.len() + 1 - free.len()).ok()?;
    let task = slots.len() as u32;
    slots.push(None);
    free.push(task);
    Some(task)
}

/// A call that was woken and no longer waits.
pub(crate) struct WokenCall<E> {
    pub id: ConnId,
    pub result: Resumed<E>,
    /// Bytes that the state machine counted for it, with the next call in the connection's list.
    pub parked: ParkOutcome,
    /// Since when the one listed before it waits, if there is one.
    pub before: Option<Stamp>,
    /// When it began.
    pub start: CallStart,
}

/// The outcome of a call.
pub(crate) enum Resumed<E> {
    Done(Result<(), E>),
    Panicked(Panicked),
}

impl<S: Service<H>, H: Default, Fut: Future<Output = ()>> Slot<S, H, Fut> {
    /// `task` is what its waker names it. `None` if the system has no memory for it.
    #[cold]
    fn new<Make>(service: &Rc<S>, make: &Make, shard: &Shard, task: u32) -> Option<Slot<S, H, Fut>>
    where
        Make: Fn(Rc<S>, Rc<Job<S, H>>) -> Fut,
    {
        if !has_room_for::<Job<S, H>>() || !has_room_for::<TaskWaker>() {
            return None;
        }
        let job = Rc::new(Job {
            shared: Cell::default(),
            frame: Cell::default(),
            result: Cell::default(),
            shard: shard.clone(),
        });
        let wake = TaskWaker::new(shard.remote(), task);
        let waker = wake.waker();
        let future = Box::into_pin(try_box(make(service.clone(), job.clone()))?);
        Some(Slot {
            future,
            job,
            wake,
            waker,
            id: None,
            bytes: 0,
            prev: NO_TASK,
            since: Stamp::default(),
            start: CallStart::at(Time::ZERO),
            next: None,
        })
    }

    /// Calls the service. `None` if the call waits.
    ///
    /// # Panics
    /// If the call does; [`recover`](Tasks::recover) must be called then.
    #[inline(always)]
    pub(crate) fn call(
        &mut self,
        shared: &ConnShared<S::Session>,
        frame: Frame<H>,
    ) -> Option<Result<(), S::Error>> {
        // The future of a free slot took both, so nothing is lost. `set` would look for what it has
        // to drop, at each frame.
        mem::forget(self.job.frame.replace(frame));
        let none = self.job.shared.replace(Some(shared.clone()));
        debug_assert!(none.is_none(), "the slot is free");
        mem::forget(none);
        self.poll()
    }

    /// The result, if the call is done.
    #[inline]
    fn poll(&mut self) -> Option<Result<(), S::Error>> {
        let _never_ready = self.future.as_mut().poll(&mut Context::from_waker(&self.waker));
        self.job.result.take()
    }
}
