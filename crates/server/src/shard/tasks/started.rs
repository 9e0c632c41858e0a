//! Waiting for the end of the server's start.

use std::cell::Cell;
use std::error::Error;
use std::fmt;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use ringserve_base::guard::Panicked;

use crate::shard::wakes::flag::{Flag, FlagWait};

/// The start of the server as one of its shards sees it.
#[derive(Default)]
pub(crate) struct Start {
    over: Flag,
    is_there: Rc<Cell<bool>>,
}

impl Start {
    /// It is over: all services of all shards are there, or the server ends without them. Only the
    /// first word counts. Wakes the tasks that waited, of which a waker may panic.
    pub(crate) fn end(&self, is_there: bool) -> Result<(), Panicked> {
        if self.over.has_begun() {
            return Ok(());
        }
        self.is_there.set(is_there);
        self.over.begin()
    }

    pub(crate) fn wait(&self) -> Started {
        Started { over: self.over.wait(), is_there: self.is_there.clone() }
    }
}

/// Waits until all shards of the server are there. See [`Shard::started`](crate::Shard::started).
#[must_use = "a future does nothing until it is awaited"]
pub struct Started {
    over: FlagWait,
    is_there: Rc<Cell<bool>>,
}

impl Future for Started {
    type Output = Result<(), NotStarted>;

    fn poll(mut self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<Self::Output> {
        ready!(Pin::new(&mut self.over).poll(task));
        Poll::Ready(if self.is_there.get() { Ok(()) } else { Err(NotStarted(())) })
    }
}

impl fmt::Debug for Started {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Started({})", self.over.is_over())
    }
}

/// The error of a start that was given up: a factory failed, or the server was stopped first. The
/// result of [start](crate::Server::start) has the reason.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct NotStarted(());

impl fmt::Display for NotStarted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the server ended before all its shards were there")
    }
}

ringserve_buf::debug_is_display!(NotStarted);

impl Error for NotStarted {}
