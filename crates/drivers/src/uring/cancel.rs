//! Cancels that missed: their operation lives, and was between two states when the kernel looked
//! for it.
//!
//! ```text
//!   stop ──▶ cancel ──▶ 0 ───────────────────▶ the operation's own end comes
//!              ▲        ENOENT, EALREADY ──▶ did it end? ── yes ──▶ nothing is left to do
//!              └──────────── 10 ms later ─────────┘ no
//! ```
//!
//! The end of an operation is reaped before the answer to a cancel that came too late for it. So an
//! operation that is still in flight when that answer is reaped was missed. The state that it was
//! in lasts no longer than an enter.
//!
//! A receive may be in neither case: it ended without a completion. After [`MISSES_MAX`] misses in
//! a row the driver assumes so for the connection, but not for its slot: see `clear` in `close`.

use std::collections::VecDeque;
use std::time::Duration;

use ringserve_core::ConnId;

use super::Uring;
use super::kernel::{Kernel, RawCqe, RawOp};
use super::table::{ReceiveState, Stop};

/// Pause after a cancel that missed: short compared with the limits of a connection, and no load.
const PAUSE: Duration = Duration::from_millis(10);

/// Cancels in a row that do not find a receive, after which it is assumed to have ended without a
/// completion.
pub(super) const MISSES_MAX: u8 = 5;

/// Cancels to be made later, with their times: the earliest comes first.
pub(super) type Later = VecDeque<(Duration, RawOp)>;

impl<K: Kernel> Uring<K> {
    /// Makes this cancel again after a pause, unless it is pointless by then.
    #[cold]
    pub(super) fn cancel_again(&mut self, op: RawOp) {
        self.stats.cancels_missed += 1;
        self.cancel_later(op);
    }

    fn cancel_later(&mut self, op: RawOp) {
        let at = self.kernel.now() + PAUSE;
        self.later.push_back((at, op));
    }

    /// Gives the receive a pause to end, or to report what a probe found, by itself.
    #[cold]
    pub(super) fn cancel_receive_later(&mut self, id: ConnId) {
        let Some(port) = self.ports.find(id) else { return };
        port.receive_cancels = port.receive_cancels.saturating_add(1);
        self.cancel_later(RawOp::CancelReceive { id });
    }

    /// Time until the next of the postponed cancels is due.
    pub(super) fn cancels_due_in(&mut self) -> Option<Duration> {
        let (at, _) = self.later.front()?;
        Some(at.saturating_sub(self.kernel.now()))
    }

    /// Queues the cancels whose pause is over.
    #[inline]
    pub(super) fn repeat_cancels(&mut self) {
        if self.later.is_empty() {
            return;
        }
        let now = self.kernel.now();
        let due = self.later.partition_point(|(at, _)| *at <= now);
        self.queue.extend(self.later.drain(..due).map(|(_, op)| op));
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

    /// Prepares the cancel of a receive. It is pointless once the receive ended, or reported what a
    /// probe had found, and wrong once there is a new one.
    pub(super) fn prepare_cancel_receive(&mut self, id: ConnId) -> Option<RawOp> {
        let port = self.ports.find(id)?;
        let armed = port.receiving == ReceiveState::Armed;
        if armed && port.receive_stop == Stop::No && port.is_doubted() {
            port.receive_stop = Stop::Restarts;
        }
        let stops = armed && port.receive_stop != Stop::No;
        if stops || port.is_clearing() {
            return Some(RawOp::CancelReceive { id });
        }
        port.receive_cancels = port.receive_cancels.saturating_sub(1);
        None
    }
}
