//! Waking a shard from another thread, by its eventfd.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::event::{EventfdFlags, eventfd};

/// Makes a turn return, from any thread. Clones wake the same shard.
///
/// What was done before [`wake`](Waker::wake) is seen by the shard after the turn that it ended.
#[derive(Clone, Debug)]
pub struct Waker {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    eventfd: OwnedFd,
    /// True exactly from a wake until the shard saw it: further ones cost no system call.
    pending: AtomicBool,
}

impl Waker {
    /// For the kernel half of a driver.
    ///
    /// # Errors
    /// If there is no descriptor left.
    pub fn new() -> io::Result<Waker> {
        // Not NONBLOCK: on such a descriptor the ring's read would end at once instead of waiting.
        let eventfd = eventfd(0, EventfdFlags::CLOEXEC)?;
        Ok(Waker { inner: Arc::new(Inner { eventfd, pending: AtomicBool::new(false) }) })
    }

    /// Wakes the shard: its turn returns, or the next one does not wait.
    pub fn wake(&self) {
        if !self.inner.pending.swap(true, Ordering::AcqRel) {
            // It cannot block: the counter is far from its end, since each wake that was seen empties it or adds one.
            let _ = rustix::io::write(&self.inner.eventfd, &1u64.to_ne_bytes());
        }
    }

    /// For the kernel half of a driver: the shard saw the wake, and its eventfd was read. What the waking threads did
    /// before is visible from here on.
    pub fn seen(&self) {
        self.inner.pending.swap(false, Ordering::AcqRel);
    }

    pub(crate) fn raw(&self) -> RawFd {
        self.inner.eventfd.as_raw_fd()
    }
}

/// The eventfd, which is readable from a wake until it is read.
impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inner.eventfd.as_fd()
    }
}
