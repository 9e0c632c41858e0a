//! Tasks of a simulation's clients, and what wakes them.

use std::cell::Cell;
use std::fmt;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Wake;
use std::thread::{self, ThreadId};
use std::time::Duration;

/// A task of a client: it ends with why it gave up, or with nothing.
pub(crate) type Code = Pin<Box<dyn Future<Output = Result<(), String>>>>;

/// One task.
pub(super) struct Task {
    pub(super) name: Rc<str>,
    /// `None` while it is polled, and once it is done.
    pub(super) code: Option<Code>,
    pub(super) waker: Arc<TaskWaker>,
    /// The run does not end before it.
    pub(super) counts: bool,
    /// It is a client of the test, and no task of one.
    pub(super) is_client: bool,
    pub(super) is_done: bool,
    pub(super) failed: bool,
    pub(super) waits_for: Rc<Cell<WaitsFor>>,
}

/// The name of a client's wait, for failures.
#[derive(Clone, Copy)]
pub(crate) enum WaitsFor {
    /// It did not say.
    Something,
    /// Something of a connection, which is named by its client.
    Of(&'static str, Option<SocketAddr>),
    /// A time.
    Until(Duration),
}

impl fmt::Display for WaitsFor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WaitsFor::Something => f.write_str("something"),
            WaitsFor::Of(what, Some(connection)) => write!(f, "{what} {connection}"),
            WaitsFor::Of(what, None) => f.write_str(what),
            WaitsFor::Until(at) => write!(f, "{at:?} of virtual time"),
        }
    }
}

/// Tasks that were woken, and who did something that no simulation can repeat.
pub(super) struct Woken {
    pub(super) tasks: Mutex<Vec<u32>>,
    pub(super) thread: ThreadId,
    /// Another thread woke something of this world.
    pub(super) from_outside: AtomicBool,
}

pub(super) struct TaskWaker {
    pub(super) woken: Arc<Woken>,
    pub(super) task: u32,
    pub(super) is_listed: AtomicBool,
}

impl Woken {
    pub(super) fn seen(&self) {
        if thread::current().id() != self.thread {
            self.from_outside.store(true, Ordering::Relaxed);
        }
    }
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.woken.seen();
        if !self.is_listed.swap(true, Ordering::Relaxed) {
            self.woken.tasks.lock().unwrap_or_else(PoisonError::into_inner).push(self.task);
        }
    }
}
