//! Entering the kernel: for how long, and what it brought.

use std::time::Duration;

use io_uring::EnterFlags;
use io_uring::types::{SubmitArgs, Timespec};
use ringserve_core::ConnId;

use super::{SystemKernel, encode};
use crate::shared::wait::Bound;
use crate::uring::kernel::{F_MORE, Kind, RawCqe, SentQuietly};

/// A send that posts a completion only if it did not fit.
pub(super) struct Quiet {
    pub(super) id: ConnId,
    pub(super) bytes: usize,
    /// The value of `pushed` right after its entry.
    pub(super) after: u32,
}

impl SystemKernel {
    pub(super) fn enter_kernel(&mut self, wait_for: u32, timeout: Option<Duration>) -> Result<(), i32> {
        // The timer is one completion, which does not end a wait for more.
        let timespec = timeout.filter(|time| wait_for > 1 || !self.is_bound(*time)).map(Timespec::from);
        let args = timespec.as_ref().map(|timespec| SubmitArgs::new().timespec(timespec));
        let mut flags = self.enter_flags();
        flags.set(EnterFlags::EXT_ARG, args.is_some());
        let queued = self.ring.submission().len() as u32;
        // SAFETY: the argument, if there is one, is a getevents argument, as EXT_ARG says, and
        // lives, like the time it points to, until the call returns. What the submitted entries
        // point to is valid by the invariants of `system`.
        let entered = unsafe { self.ring.submitter().enter(queued, wait_for, flags.bits(), args.as_ref()) };
        let left = self.ring.submission().len() as u32;
        self.consumed = self.pushed.wrapping_sub(left);
        if left == 0 {
            self.staging.consumed();
        }
        entered.map(drop).map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))
    }

    /// True if a timer that is with the kernel, or will be, ends a wait of this length.
    pub(super) fn is_bound(&mut self, wait: Duration) -> bool {
        let room = self.room() > 0;
        match self.timer.bound(wait, room) {
            Bound::Timer => true,
            Bound::Set { until, again } => {
                *self.timeout = Timespec::new().sec(until.as_secs()).nsec(until.subsec_nanos());
                if again {
                    // Fails if the timer goes off just now: then that completion ends the wait.
                    self.push(encode::set_timeout(&self.timeout, Kind::Timer.with(0)), Kind::Ignored.with(0));
                } else {
                    self.push_awaited(encode::timeout(&self.timeout), Kind::Timer.with(0));
                }
                true
            }
            Bound::Call => false,
        }
    }

    fn enter_flags(&self) -> EnterFlags {
        // Without GETEVENTS the kernel does no deferred work, and nothing is ever reaped.
        let mut flags = EnterFlags::GETEVENTS;
        if self.mode.no_iowait {
            flags |= EnterFlags::NO_IOWAIT;
        }
        flags
    }

    // Always inlined, here and where it goes, so that it stays in registers.
    #[inline(always)]
    pub(super) fn next_completion(&mut self) -> Option<RawCqe> {
        let entry = self.ring.completion().next()?;
        let mut cqe = RawCqe::new(entry.user_data(), entry.result(), entry.flags());
        self.account(&mut cqe);
        Some(cqe)
    }

    /// Applies the effect of a completion to this half.
    #[inline(always)]
    fn account(&mut self, cqe: &mut RawCqe) {
        let Some(kind) = Kind::of(cqe.user_data) else { return };
        let ended = match kind {
            Kind::Ignored | Kind::Install => false,
            Kind::Accept => cqe.res < 0 || cqe.flags & F_MORE == 0,
            Kind::Receive => cqe.res <= 0 || cqe.flags & F_MORE == 0,
            _ => true,
        };
        self.in_flight = self.in_flight.saturating_sub(usize::from(ended));
        match kind {
            Kind::Send => {
                let id = cqe.id();
                cqe.batch = self.sends.get_mut(id.slot()).and_then(Option::take);
                if !self.quiet.is_empty() {
                    self.quiet.retain(|quiet| quiet.id != id);
                }
            }
            Kind::ReceiveInto => {
                let id = cqe.id();
                self.block = self.blocks.remove(&id.bits()).map(|(block, most)| (id, block, most));
            }
            Kind::Accept if cqe.res >= 0 => self.owned.insert(cqe.res),
            Kind::Wake => self.waker.seen(),
            Kind::Timer => self.timer.went_off(),
            _ => {}
        }
    }

    #[inline]
    pub(super) fn next_quiet(&mut self) -> Option<SentQuietly> {
        if !self.quiet_is_done() {
            return None;
        }
        let Quiet { id, bytes, .. } = self.quiet.pop_front()?;
        self.in_flight -= 1;
        let batch = self.sends.get_mut(id.slot()).and_then(Option::take)?;
        // Bounded by the iovec and byte limits of one send, so it fits.
        Some(SentQuietly { id, bytes: bytes.min(i32::MAX as usize) as i32, batch })
    }

    /// True if a quiet send's entry was consumed and no completion of it can come: the kernel tries
    /// it within the enter, so a failed one has posted its completion by now, and all posted
    /// completions were reaped.
    pub(super) fn quiet_is_done(&mut self) -> bool {
        let consumed = self.consumed;
        let first_is = self.quiet.front().is_some_and(|quiet| consumed.wrapping_sub(quiet.after) as i32 >= 0);
        first_is && self.ring.completion().is_empty() && !self.ring.submission().cq_overflow()
    }
}
