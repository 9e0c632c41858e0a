//! Attempts to connect to upstreams: what a shard's code asked for, and how far each came.

use std::cell::{Cell, RefCell};
use std::io;
use std::rc::Rc;
use std::task::Waker;
use std::time::Duration;

use ringserve_base::guard::{discard, wake};
use ringserve_core::{Address, ConnId, ConnShared, Transport};

use super::session::StreamSession;

/// Requests of a shard's code to upstreams, until the shard carries them out at the end of the
/// turn.
#[derive(Default)]
pub(crate) struct Requests {
    asked: RefCell<Vec<Rc<Attempt>>>,
    given_up: RefCell<Vec<ConnId>>,
    connect_timeout: Cell<Option<Duration>>,
}

impl Requests {
    pub(crate) fn ask(&self, attempt: Rc<Attempt>) {
        self.asked.borrow_mut().push(attempt);
    }

    pub(crate) fn give_up(&self, id: ConnId) {
        self.given_up.borrow_mut().push(id);
    }

    /// The time that resolving a name and connecting to its addresses may take together.
    pub(crate) fn connect_timeout(&self) -> Option<Duration> {
        self.connect_timeout.get()
    }

    pub(crate) fn set_connect_timeout(&self, time: Option<Duration>) {
        self.connect_timeout.set(time);
    }

    pub(crate) fn take(&self) -> (Vec<Rc<Attempt>>, Vec<ConnId>) {
        (self.asked.take(), self.given_up.take())
    }
}

/// State that a future and its shard share for one connect.
pub(crate) struct Attempt {
    pub(crate) progress: Cell<Progress>,
    pub(crate) waker: Cell<Option<Waker>>,
    /// The layer between the socket and the stream, if there is one.
    transport: Option<Rc<dyn Transport>>,
}

/// The progress of an attempt.
#[derive(Default)]
pub(crate) enum Progress {
    Asked(Address),
    Connecting(ConnId),
    Done(io::Result<ConnShared<StreamSession>>),
    /// The future has it, or is gone.
    #[default]
    Over,
}

impl Attempt {
    pub(crate) fn new(address: Address, transport: Option<Rc<dyn Transport>>) -> Attempt {
        let progress = Cell::new(Progress::Asked(address));
        Attempt { progress, waker: Cell::default(), transport }
    }

    pub(crate) fn transport(&self) -> Option<Rc<dyn Transport>> {
        self.transport.clone()
    }

    /// Takes the address as the shard begins the attempt. `None` if no future waits for it.
    pub(crate) fn address(&self) -> Option<Address> {
        match self.progress.take() {
            Progress::Asked(address) => Some(address),
            other => {
                self.progress.set(other);
                None
            }
        }
    }

    pub(crate) fn begun(&self, id: ConnId) {
        self.progress.set(Progress::Connecting(id));
    }

    pub(crate) fn done(&self, result: io::Result<ConnShared<StreamSession>>) {
        self.progress.set(Progress::Done(result));
        if let Some(waker) = self.waker.take() {
            // If it panics, the task that waits is not woken; its stream is closed when it is
            // dropped.
            let _ = wake(waker);
        }
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        discard(self.waker.take());
    }
}
