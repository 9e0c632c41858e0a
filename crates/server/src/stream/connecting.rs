//! From a wish to be connected to an upstream to its stream.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use ringserve_core::{Address, Block, ConnId};

use super::Stream;
use super::session::Session;
use crate::guard::{discard, wake};
use crate::shard::handle::Shard;

/// What a shard's code wants of upstreams, until the shard looks at the end of the turn.
#[derive(Default)]
pub(crate) struct Requests {
    asked: RefCell<Vec<Rc<Attempt>>>,
    given_up: RefCell<Vec<ConnId>>,
    /// There is something in either.
    some: Cell<bool>,
}

impl Requests {
    pub(crate) fn is_empty(&self) -> bool {
        !self.some.get()
    }

    fn ask(&self, attempt: Rc<Attempt>) {
        self.asked.borrow_mut().push(attempt);
        self.some.set(true);
    }

    fn give_up(&self, id: ConnId) {
        self.given_up.borrow_mut().push(id);
        self.some.set(true);
    }

    pub(super) fn take(&self) -> (Vec<Rc<Attempt>>, Vec<ConnId>) {
        self.some.set(false);
        (self.asked.take(), self.given_up.take())
    }
}

/// What a future and its shard share of one connect.
pub(super) struct Attempt {
    progress: Cell<Progress>,
    waker: Cell<Option<Waker>>,
}

#[derive(Default)]
enum Progress {
    Asked(Address),
    Connecting(ConnId),
    Done(io::Result<Rc<Block<Session>>>),
    /// The future has it, or is gone.
    #[default]
    Over,
}

impl Attempt {
    /// The shard begins: where to, unless nobody waits any more.
    pub(super) fn address(&self) -> Option<Address> {
        match self.progress.take() {
            Progress::Asked(address) => Some(address),
            other => {
                self.progress.set(other);
                None
            }
        }
    }

    pub(super) fn begun(&self, id: ConnId) {
        self.progress.set(Progress::Connecting(id));
    }

    pub(super) fn done(&self, result: io::Result<Rc<Block<Session>>>) {
        self.progress.set(Progress::Done(result));
        if let Some(waker) = self.waker.take() {
            // If it panics, the task that waits is not woken; its stream is closed when it is dropped.
            let _ = wake(waker);
        }
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        discard(self.waker.take());
    }
}

/// Waits for a connection to an upstream. See [`Shard::connect`]. Dropping it gives the attempt up.
#[must_use = "a future does nothing until it is awaited"]
pub struct Connecting {
    attempt: Rc<Attempt>,
    shard: Shard,
}

impl Connecting {
    pub(crate) fn new(address: Address, shard: &Shard) -> Connecting {
        let attempt =
            Rc::new(Attempt { progress: Cell::new(Progress::Asked(address)), waker: Cell::default() });
        shard.upstream_requests().ask(attempt.clone());
        shard.remote().wake_if_asleep();
        Connecting { attempt, shard: shard.clone() }
    }
}

impl Future for Connecting {
    type Output = io::Result<Stream>;

    fn poll(self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<io::Result<Stream>> {
        match self.attempt.progress.take() {
            Progress::Done(result) => Poll::Ready(result.map(|block| Stream::new(block, self.shard.clone()))),
            other => {
                self.attempt.progress.set(other);
                self.attempt.waker.set(Some(task.waker().clone()));
                Poll::Pending
            }
        }
    }
}

impl Drop for Connecting {
    fn drop(&mut self) {
        match self.attempt.progress.take() {
            Progress::Connecting(id) => {
                self.shard.upstream_requests().give_up(id);
                self.shard.remote().wake_if_asleep();
            }
            // Nobody will ever read or write it.
            Progress::Done(Ok(block)) => block.link.close(),
            _ => {}
        }
    }
}

impl fmt::Debug for Connecting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Connecting")
    }
}
