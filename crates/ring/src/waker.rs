//! Waking a shard from another thread.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
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
    pub(crate) fn new() -> io::Result<Waker> {
        // Not NONBLOCK: on such a descriptor the ring's read would end at once instead of waiting.
        let eventfd = eventfd(0, EventfdFlags::CLOEXEC)?;
        Ok(Waker { inner: Arc::new(Inner { eventfd, pending: AtomicBool::new(false) }) })
    }

    /// Wakes the shard: its turn returns, or the next one does not wait.
    pub fn wake(&self) {
        if !self.inner.pending.swap(true, Ordering::AcqRel) {
            // It cannot fail or block: the counter is at most 1 before, since only this line adds to it.
            let _ = rustix::io::write(&self.inner.eventfd, &1u64.to_ne_bytes());
        }
    }

    /// The shard saw the wake; what the waking threads did before is visible from here on.
    pub(crate) fn seen(&self) {
        self.inner.pending.swap(false, Ordering::AcqRel);
    }

    pub(crate) fn raw(&self) -> RawFd {
        self.inner.eventfd.as_raw_fd()
    }
}
