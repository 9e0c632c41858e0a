//! Cancels that missed: what they were for lives, and was between two states when the kernel looked for it.
//!
//! ```text
//!   stop ──▶ cancel ──▶ 0 ───────────────────▶ the operation's own end comes
//!              ▲        ENOENT, EALREADY ──▶ did it end? ── yes ──▶ nothing is left to do
//!              └──────────── 10 ms later ─────────┘ no
//! ```
//!
//! The end of an operation is reaped before the answer to a cancel that came too late for it, so an operation that is
//! still in flight when that answer is reaped was missed. The state that it was in lasts no longer than an enter.
//!
//! A receive may be neither: it ended without a completion. After [`MISSES_MAX`] misses in a row that is taken for granted
//! as far as the connection goes, but not as far as its slot goes: see `clear` in `close`.

use std::time::Duration;

use ringserve_core::ConnId;

use super::Uring;
use super::table::{Life, Receiving};
use crate::seam::{Kernel, RawCqe, RawOp};

/// How long a cancel that missed rests: no time beside the limits of a connection, and no load.
const PAUSE: Duration = Duration::from_millis(10);

/// Cancels in a row that do not find a receive, after which it is held to have ended without a completion.
pub(super) const MISSES_MAX: u8 = 5;

/// Cancels to be made again.
#[derive(Default)]
pub(super) struct Missed {
    ops: Vec<RawOp>,
    /// When they are made.
    at: Duration,
}

impl<K: Kernel> Uring<K> {
    /// This cancel is made again after a pause, unless it is pointless by then.
    #[cold]
    pub(super) fn cancel_again(&mut self, op: RawOp) {
        self.stats.cancels_missed += 1;
        if self.missed.ops.is_empty() {
            self.missed.at = self.kernel.now() + PAUSE;
        }
        self.missed.ops.push(op);
    }

    /// How long the cancels that missed rest still.
    pub(super) fn cancels_due_in(&mut self) -> Option<Duration> {
        if self.missed.ops.is_empty() {
            return None;
        }
        Some(self.missed.at.saturating_sub(self.kernel.now()))
    }

    /// Queues the cancels whose pause is over.
    #[inline]
    pub(super) fn repeat_cancels(&mut self) {
        if !self.missed.ops.is_empty() && self.kernel.now() >= self.missed.at {
            self.queue.extend(self.missed.ops.drain(..));
        }
    }

    pub(super) fn on_cancel_send(&mut self, cqe: RawCqe) {
        let id = cqe.id();
        if cqe.res < 0 && self.prepare_cancel_send(id).is_some() {
            self.cancel_again(RawOp::CancelSend { id });
        }
    }

    pub(super) fn on_cancel_accept(&mut self, cqe: RawCqe) {
        let listener = cqe.user_data as u16;
        if cqe.res < 0 && self.prepare_cancel_accept(listener).is_some() {
            self.cancel_again(RawOp::CancelAccept { listener });
        }
    }

    pub(super) fn on_cancel_connect(&mut self, cqe: RawCqe) {
        let id = cqe.id();
        if cqe.res < 0 && self.prepare_cancel_connect(id).is_some() {
            self.cancel_again(RawOp::CancelConnect { id });
        }
    }

    /// A cancel of a receive is pointless once the receive ended, and wrong once there is a new one.
    pub(super) fn prepare_cancel_receive(&mut self, id: ConnId) -> Option<RawOp> {
        let port = self.ports.find(id)?;
        let stops = port.receiving == Receiving::Armed && port.receive_stop;
        if stops || matches!(port.life, Life::Clears(_)) {
            return Some(RawOp::CancelReceive { id });
        }
        port.receive_cancels = port.receive_cancels.saturating_sub(1);
        None
    }
}
