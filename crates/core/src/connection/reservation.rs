//! Memory that a call reserves before it builds a large answer: first come, first served.
//!
//! ```text
//!   poll ──▶ fits, and no call waits ─────────────────────────▶ reserved: counts as what the service holds for the connection
//!     └────▶ Wanted, in the line ──▶ end of a turn: it fits ──▶ granted, and woken
//! ```

use alloc::rc::Rc;
use core::cell::Cell;
use core::fmt;
use core::task::{Poll, Waker};

use super::line::CallRequest;
use super::outlet::ConnHead;
use crate::ShardShared;

/// Why memory was not reserved.
#[derive(Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum NoMemoryLeft {
    /// More was asked for than three quarters of
    /// [`ServerLimits::held_bytes_max`](crate::limits::ServerLimits::held_bytes_max).
    TooLarge,
    /// All of it was used up for 5 s.
    UsedUp,
    /// The connection takes no more bytes.
    Gone,
}

impl fmt::Display for NoMemoryLeft {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            NoMemoryLeft::TooLarge => "more than three quarters of held_bytes_max",
            NoMemoryLeft::UsedUp => "memory is used up",
            NoMemoryLeft::Gone => "the connection takes no more bytes",
        })
    }
}

ringserve_buf::debug_is_display!(NoMemoryLeft);

impl core::error::Error for NoMemoryLeft {}

/// Memory that is reserved for a connection, or waited for. Its drop gives it back.
pub struct Reservation {
    head: ConnHead,
    wanted: Option<Rc<CallRequest>>,
    bytes: usize,
}

impl Reservation {
    /// An empty reservation, for a connection.
    pub fn new(head: &ConnHead) -> Reservation {
        Reservation { head: head.clone(), wanted: None, bytes: 0 }
    }

    /// Counts `bytes` from now on, whether they fit or not: for memory that is allocated already.
    /// For a connection that is gone the count does not grow.
    pub fn hold(&mut self, bytes: usize) {
        let bytes = if self.head.is_gone() { bytes.min(self.bytes) } else { bytes };
        self.head.unreserve(self.bytes.saturating_sub(bytes));
        let more = bytes.saturating_sub(self.bytes);
        if more > 0 {
            self.head.reserve(more);
        }
        self.bytes = bytes;
    }

    /// The bytes that are reserved, or held.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    fn shard(&self) -> &ShardShared {
        self.head.lane().shard()
    }

    /// Reserves `bytes`, the same in each call, or wakes `waker` once they are.
    ///
    /// # Errors
    /// If they never will be.
    pub fn poll(&mut self, bytes: usize, waker: &Waker) -> Poll<Result<(), NoMemoryLeft>> {
        if self.head.is_gone() {
            return Poll::Ready(Err(NoMemoryLeft::Gone));
        }
        if self.wanted.as_ref().is_some_and(|wanted| wanted.is_granted.get()) {
            (self.wanted, self.bytes) = (None, bytes);
            return Poll::Ready(Ok(()));
        }
        if bytes > self.shard().reservable_bytes() {
            return Poll::Ready(Err(NoMemoryLeft::TooLarge));
        }
        if let Some(wanted) = &self.wanted {
            wanted.waker.set(Some(waker.clone()));
            return Poll::Pending;
        }
        if self.shard().has_room(bytes) {
            self.head.reserve(bytes);
            self.bytes = bytes;
            return Poll::Ready(Ok(()));
        }
        let wanted = Rc::new(CallRequest {
            id: self.head.id(),
            bytes,
            is_granted: Cell::default(),
            waker: Cell::new(Some(waker.clone())),
        });
        self.shard().line_up(&wanted);
        self.wanted = Some(wanted);
        Poll::Pending
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let granted = self.wanted.take().filter(|wanted| wanted.is_granted.get());
        self.head.unreserve(self.bytes + granted.map_or(0, |wanted| wanted.bytes));
    }
}

impl fmt::Debug for Reservation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reservation").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}
