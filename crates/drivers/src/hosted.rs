//! Drivers that do not block: somebody else waits, and calls when there is something to do.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use ringserve_core::{Driver, Wait};
use rustix::event::{EventfdFlags, eventfd};

use crate::epoll::Epoll;
use crate::shared::wait::SET_FROM;
use crate::uring::SystemKernel;
use crate::uring::Uring;
use crate::uring::kernel::Kernel;

/// A driver whose shard runs inside an event loop of another kind.
///
/// The order in which nothing is missed: the loop forgets that [`readiness`](Hosted::readiness) was readable, then takes a
/// [`turn`](Driver::turn), then goes to sleep once [`begin`](Hosted::begin) says that nothing is left.
pub trait Hosted: Driver {
    /// A descriptor that becomes readable, as an edge, whenever something happened that a turn would bring. It is not to be
    /// read, and may become readable for nothing. To be called once.
    ///
    /// # Errors
    /// If there is no descriptor left, or the kernel refuses.
    fn readiness(&mut self) -> io::Result<OwnedFd>;

    /// Submits what is queued. If a receive waits for a buffer, the next one that is freed wakes what
    /// [`Pool::wake_when_freed`](ringserve_buf::Pool::wake_when_freed) was given. True if a turn would bring something now. After [`defer_sent`](Driver::defer_sent) the ends of
    /// sends that fitted at once do not count, those of earlier turns neither.
    ///
    /// # Errors
    /// Those of [`turn`](Driver::turn).
    fn begin(&mut self) -> Result<bool, i32>;
}

impl Hosted for Uring<SystemKernel> {
    /// An eventfd of the ring's: polling the ring itself does not tell of work that is deferred (`DEFER_TASKRUN`).
    fn readiness(&mut self) -> io::Result<OwnedFd> {
        let told = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        self.kernel_mut().tell(&told)?;
        Ok(told)
    }

    fn begin(&mut self) -> Result<bool, i32> {
        let quiet = self.is_quiet();
        if let Some(due) = self.due_in() {
            // The shard sleeps elsewhere: the timer wakes it.
            self.kernel_mut().is_bound(due.max(SET_FROM));
        }
        self.submit_queued(Wait::No)?;
        self.wait_for_buffer();
        // Sends of earlier turns that fitted may be awaited now.
        let kernel = self.kernel_mut();
        let posted = if quiet { kernel.has_posted() } else { kernel.has_completions() };
        Ok(posted || self.has_to_do())
    }
}

impl Hosted for Epoll {
    /// The epoll instance itself.
    fn readiness(&mut self) -> io::Result<OwnedFd> {
        // SAFETY: the instance is open, and stays so while the driver is borrowed.
        unsafe { BorrowedFd::borrow_raw(self.instance()) }.try_clone_to_owned()
    }

    fn begin(&mut self) -> Result<bool, i32> {
        if let Some(due) = self.due_in() {
            self.is_bound(due.max(SET_FROM));
        }
        let has_to_do = self.has_to_do();
        self.wait_for_buffer();
        Ok(has_to_do)
    }
}
