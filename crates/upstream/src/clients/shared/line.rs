//! A connection that several calls use at once, and the task that reads it.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use ringserve_server::framing::Framing;
use ringserve_server::net::{Framed, FramedError, FramedReader, FramedWriter, is_local_failure};
use ringserve_server::time::Sleep;
use ringserve_server::{Frame, Shard};

use super::slots::{End, Fate, Matcher, Slots};
use crate::backend::BackendState;

/// The time between two checks of a connection that is idle, old, or owes answers.
const LOOKS_EACH: Duration = Duration::from_secs(1);

/// Questions that were given up and have no answer, until the connection is given up too: each
/// holds a place, and a backend that answers none of 64 does not answer.
pub(crate) const ABANDONED_MAX: usize = 64;

/// Finds the id of an answer.
pub(crate) type Id = Rc<dyn Fn(&Frame) -> Option<u64>>;

/// The ages at which a connection is closed.
#[derive(Clone, Copy)]
pub(crate) struct Ages {
    /// Nanoseconds for the answer to a question that was given up.
    pub(crate) answer: u64,
    pub(crate) idle: u64,
    /// When it is too old for another question.
    pub(crate) old_at: u64,
}

pub(crate) struct Line<F: Framing> {
    shard: Shard,
    backend: Arc<BackendState>,
    writer: FramedWriter<F>,
    slots: RefCell<Slots<Frame>>,
    ages: Ages,
    /// Bytes of all questions, as they count in
    /// [`Stream::unsent_bytes`](ringserve_server::Stream::unsent_bytes).
    queued: Cell<u64>,
    heard_at: Cell<u64>,
    used_at: Cell<u64>,
    is_used: Cell<bool>,
    /// It was idle, and nothing was heard since: the backend may have ended it before it received a
    /// question.
    is_unproven: Cell<bool>,
    /// Its end counted against the backend. It is one failure, whatever was under way.
    is_blamed: Cell<bool>,
    /// It takes no further question, and ends with those that it has.
    is_retired: Cell<bool>,
    is_over: Cell<bool>,
    /// Wakes the task that reads.
    reader: RefCell<Option<Waker>>,
}

/// The end of a connection, for the client that made it.
pub(crate) struct Over {
    /// Nanoseconds for which it was idle, if the backend ended it so.
    pub(crate) idle: Option<u64>,
    /// Something came that was no answer to a question.
    pub(crate) is_stray: bool,
}

impl<F: Framing> Line<F> {
    /// Takes a connection. `over` is called when it has ended.
    pub(crate) fn begin(
        shard: &Shard,
        backend: &Arc<BackendState>,
        framed: Framed<F>,
        matching: Matcher,
        id: Id,
        ages: Ages,
        over: impl FnOnce(&Rc<Line<F>>, Over) + 'static,
    ) -> Rc<Line<F>> {
        let (reader, writer) = framed.split();
        let now = shard.now().as_nanos();
        let line = Rc::new(Line {
            shard: shard.clone(),
            backend: backend.clone(),
            writer,
            slots: RefCell::new(Slots::new(matching)),
            ages,
            queued: Cell::new(0),
            heard_at: Cell::new(now),
            used_at: Cell::new(now),
            is_used: Cell::new(false),
            is_unproven: Cell::new(false),
            is_blamed: Cell::new(false),
            is_retired: Cell::new(false),
            is_over: Cell::new(false),
            reader: RefCell::default(),
        });
        let ending = EndGuard { line: line.clone(), over: Some(over) };
        let mut reading = Reading { line: line.clone(), reader, id, tick: shard.sleep(LOOKS_EACH) };
        shard.spawn_named("answers of an upstream", async move {
            let ended = poll_fn(|task| reading.poll(task)).await;
            ending.end(ended);
        });
        line
    }

    /// Questions that wait for an answer, with those that were given up.
    pub(crate) fn in_flight(&self) -> usize {
        let slots = self.slots.borrow();
        slots.awaited() + slots.abandoned()
    }

    /// True if it takes another question.
    pub(crate) fn has_room(&self, in_flight_max: usize) -> bool {
        !self.is_retired.get() && !self.is_over.get() && self.slots.borrow().has_room(in_flight_max)
    }

    /// Nanoseconds since it was used, if nothing is under way.
    pub(crate) fn idle(&self, now: u64) -> Option<u64> {
        self.slots.borrow().is_empty().then(|| now.saturating_sub(self.used_at.get()))
    }

    pub(crate) fn is_over(&self) -> bool {
        self.is_over.get()
    }

    /// True if its end may have crossed the questions that ended with it.
    pub(crate) fn is_unproven(&self) -> bool {
        self.is_unproven.get()
    }

    /// True for the first question that ended with it.
    pub(crate) fn is_first_blamed(&self) -> bool {
        !self.is_blamed.replace(true)
    }

    /// Takes no further question, and closes behind the answers to those that it has.
    pub(crate) fn retire(&self) {
        if !self.is_retired.replace(true) {
            self.wake();
        }
    }

    fn wake(&self) {
        let waker = self.reader.borrow_mut().take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Queues a question, and returns its place. `write` makes it of its id.
    ///
    /// # Errors
    /// If it has no frame.
    pub(crate) fn ask(&self, write: impl FnOnce(u64) -> Vec<u8>) -> io::Result<u32> {
        let now = self.shard.now().as_nanos();
        let was_idle = self.slots.borrow().is_empty();
        let (place, id) = self.slots.borrow_mut().add(now);
        let unasked = PlaceGuard { slots: &self.slots, place };
        let question = write(id);
        let stream = self.writer.stream();
        let before = stream.unsent_bytes();
        self.writer.queue(&question).map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
        std::mem::forget(unasked);
        if self.is_used.replace(true) && was_idle {
            self.is_unproven.set(true);
        }
        let bytes = stream.unsent_bytes().saturating_sub(before);
        // Below a transport that keeps what it seals, nothing is known.
        if bytes > 0 {
            self.slots.borrow_mut().begins_at(place, self.queued.get());
            self.queued.set(self.queued.get() + bytes as u64);
        }
        self.used_at.set(now);
        Ok(place)
    }

    pub(crate) fn poll(&self, place: u32, task: &mut Context<'_>) -> Poll<Fate<Frame>> {
        let fate = self.slots.borrow_mut().poll(place, task.waker());
        fate.map_or(Poll::Pending, Poll::Ready)
    }

    /// Gives a question up. Where its time was over and nothing was heard meanwhile the connection
    /// is not trusted with another one.
    pub(crate) fn abandon(&self, place: u32, asked_at: u64, until: u64) {
        let mut slots = self.slots.borrow_mut();
        slots.abandon(place);
        let is_mute = self.shard.now().as_nanos() >= until && self.heard_at.get() <= asked_at;
        let is_retired = is_mute || slots.abandoned() >= ABANDONED_MAX;
        drop(slots);
        if is_retired {
            self.is_retired.set(true);
        }
        self.wake();
    }

    /// The bytes that have left, of all that were queued.
    fn left(&self) -> u64 {
        self.queued.get().saturating_sub(self.writer.stream().unsent_bytes() as u64)
    }

    /// Ends all that has no answer.
    fn end(&self, otherwise: End) {
        self.is_over.set(true);
        let left = self.left();
        // Of what the kernel was not given nothing left, and with the reset nothing will.
        if self.writer.stream().unsent_bytes() > 0 {
            self.writer.stream().abort();
        }
        let wakers = self.slots.borrow_mut().end(otherwise, left);
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Retires a connection that is idle for too long, too old, or owes an answer for too long, or
    /// whose backend left.
    fn look(&self) {
        let now = self.shard.now().as_nanos();
        let owes = self.slots.borrow().oldest_abandoned();
        let is_late = owes.is_some_and(|asked_at| now.saturating_sub(asked_at) >= self.ages.answer);
        let is_idle = self.idle(now).is_some_and(|idle| idle >= self.ages.idle);
        let is_out = self.backend.is_gone.load(Relaxed) || self.backend.is_drained.load(Relaxed);
        if is_late || is_idle || is_out || now >= self.ages.old_at {
            self.is_retired.set(true);
        }
    }
}

/// The place of a question that is being made, which is user code. Its drop gives the place back.
struct PlaceGuard<'a> {
    slots: &'a RefCell<Slots<Frame>>,
    place: u32,
}

impl Drop for PlaceGuard<'_> {
    fn drop(&mut self) {
        self.slots.borrow_mut().cancel(self.place);
    }
}

/// The end of a connection that is to come. Its drop ends the connection: what reads an answer is
/// user code, and may panic.
struct EndGuard<F: Framing, O: FnOnce(&Rc<Line<F>>, Over)> {
    line: Rc<Line<F>>,
    over: Option<O>,
}

impl<F: Framing, O: FnOnce(&Rc<Line<F>>, Over)> EndGuard<F, O> {
    fn end(mut self, ended: Over) {
        if let Some(over) = self.over.take() {
            over(&self.line, ended);
        }
    }
}

impl<F: Framing, O: FnOnce(&Rc<Line<F>>, Over)> Drop for EndGuard<F, O> {
    fn drop(&mut self) {
        // With the shard all ends.
        if let Some(over) = self.over.take()
            && std::thread::panicking()
        {
            self.line.end(End::Malformed);
            self.line.writer.stream().abort();
            over(&self.line, Over { idle: None, is_stray: false });
        }
    }
}

/// The reading half, in its task.
struct Reading<F: Framing> {
    line: Rc<Line<F>>,
    reader: FramedReader<F>,
    id: Id,
    tick: Sleep,
}

impl<F: Framing> Reading<F> {
    fn poll(&mut self, task: &mut Context<'_>) -> Poll<Over> {
        let line = self.line.clone();
        loop {
            match self.reader.poll_next(task) {
                Poll::Ready(Some(Ok(frame))) => {
                    let now = line.shard.now().as_nanos();
                    line.heard_at.set(now);
                    line.is_unproven.set(false);
                    line.used_at.set(now);
                    let id = (self.id)(&frame);
                    let left = line.left();
                    let answered = line.slots.borrow_mut().answer(id, frame, left);
                    match answered {
                        Ok(Some(waker)) => waker.wake(),
                        Ok(None) => {}
                        Err(_stray) => {
                            line.end(End::Malformed);
                            return Poll::Ready(Over { idle: None, is_stray: true });
                        }
                    }
                }
                Poll::Ready(ended) => {
                    let idle = line.idle(line.shard.now().as_nanos());
                    line.end(match ended {
                        Some(Err(FramedError::Connection(error))) if is_local_failure(&error) => End::Aborted,
                        Some(Err(FramedError::Malformed(_))) => End::Malformed,
                        _ => End::Lost,
                    });
                    return Poll::Ready(Over { idle, is_stray: false });
                }
                Poll::Pending => break,
            }
        }
        while Pin::new(&mut self.tick).poll(task).is_ready() {
            self.tick = line.shard.sleep(LOOKS_EACH);
            line.look();
        }
        let slots = line.slots.borrow();
        // One that is retired waits for answers only as long as a call does.
        if line.is_retired.get() && slots.awaited() == 0 {
            drop(slots);
            line.end(End::Lost);
            return Poll::Ready(Over { idle: None, is_stray: false });
        }
        drop(slots);
        let waker = task.waker().clone();
        let old = line.reader.borrow_mut().replace(waker);
        drop(old);
        Poll::Pending
    }
}
