//! The end of a ring: the kernel can still read or write some memory, which must not be freed.

use std::mem;
use std::time::Duration;

use ringserve_buf::KernelSide;

use super::{SystemKernel, encode};
use crate::shared::report::log;
use crate::shared::wait::now;
use crate::uring::kernel::{Kernel, Kind};

/// Bound of the rounds in which the kernel is asked to end everything. Each round cancels all
/// operations; two are enough unless operations fork others off, as a close with much to flush may.
const FINISH_TIME: Duration = Duration::from_secs(1);
const FINISH_ROUNDS: usize = 1000;

impl SystemKernel {
    /// Cancels everything, waits for it within the bound, and gives the buffers back. False if
    /// something is left.
    pub(super) fn finish_all(&mut self, side: &mut KernelSide) -> bool {
        let deadline = now() + FINISH_TIME;
        for _ in 0..FINISH_ROUNDS {
            self.drain(side);
            let left = deadline.saturating_sub(now());
            if self.in_flight == 0 && self.queued() == 0 || left.is_zero() {
                break;
            }
            if self.room() > 0 {
                self.push(encode::cancel_everything(), Kind::Ignored.with(0));
            }
            // Short waits: cancelled operations end at once, and one that escaped is cancelled
            // again.
            match self.enter(1, Some(left.min(Duration::from_millis(10)))) {
                Ok(()) | Err(libc::ETIME | libc::EINTR | libc::EAGAIN | libc::EBUSY | libc::ENOMEM) => {}
                Err(errno) => {
                    log::warn!(errno, "the ring could not be finished");
                    break;
                }
            }
        }
        self.drain(side);
        self.owned.close_all();
        self.close_plain();
        if self.in_flight > 0 {
            log::warn!(
                left = self.in_flight,
                "the kernel did not end every operation; their memory is leaked"
            );
            return false;
        }
        // From here on nothing selects a buffer, and so nothing knows their addresses.
        if let Err(error) = self.ring.submitter().unregister_buf_ring(self.group) {
            log::warn!(%error, "the buffer ring could not be removed; the receive memory is leaked");
            return false;
        }
        for buffer in 0..side.pool().buffers_max() as u16 {
            if side.is_lent(buffer) {
                side.take_back(buffer);
            }
        }
        if self.plain.is_none() {
            // Closes the connections now rather than when the kernel frees the ring.
            let _ = self.ring.submitter().unregister_files();
        }
        true
    }

    /// Reaps everything; batches are freed, buffers stay lent until the end.
    fn drain(&mut self, side: &mut KernelSide) {
        while self.reap(side).is_some() || self.reap_quiet().is_some() {}
    }

    fn close_plain(&mut self) {
        if let Some(plain) = &mut self.plain {
            for fd in plain.iter_mut().map(mem::take).filter(|fd| *fd > 0) {
                self.owned.insert(fd - 1);
            }
            self.owned.close_all();
        }
    }
}

impl Drop for SystemKernel {
    fn drop(&mut self) {
        if self.in_flight > 0 {
            // Not finished: the kernel may still read the bytes to send, write received bytes, and
            // write the wake-up count.
            mem::forget(mem::take(&mut self.blocks));
            self.sends.iter_mut().for_each(|batch| mem::forget(batch.take()));
            mem::forget(mem::take(&mut self.wake_count));
            mem::forget(mem::take(&mut self.peeked));
        }
    }
}
