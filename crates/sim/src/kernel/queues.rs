//! Submission and completion queue, including overflow.

use ringserve_buf::KernelSide;
use ringserve_drivers::kernel::{Kind, RawCqe, RawOp};
use ringserve_simkernel::ring::PostedCompletion;

use super::{Note, State};
use crate::faults::Canary;
use crate::faults::{Arm, Fault};

impl State {
    pub(super) fn post(&mut self, cqe: RawCqe, arm: Arm) {
        self.post_with(cqe, Note { bytes: None, arm });
    }

    /// Puts a completion into the queue, or into the overflow where it waits for room.
    pub(super) fn post_with(&mut self, cqe: RawCqe, note: Note) {
        if !self.ring.completions.post(cqe, note) {
            self.cover.fault(Fault::Overflow);
        }
    }

    /// Posts a completion now, or later if `fault` occurs.
    pub(super) fn post_or_late(&mut self, cqe: RawCqe, arm: Arm, fault: Fault) {
        if self.strikes(fault) {
            let due = self.now
                + self
                    .rng
                    .spread(10_000, if fault == Fault::CancelLate { 10 } else { 1 } * self.plan.late_max);
            self.late.push((due, PostedCompletion { cqe, note: Note { bytes: None, arm } }));
        } else {
            self.post(cqe, arm);
        }
    }

    /// Carries out the submitted operations; false if some are left.
    pub(super) fn submit_all(&mut self) -> bool {
        let mut count = self.ring.submissions.len();
        if count > 1 && self.strikes(Fault::EnterPartial) {
            count = self.rng.below(count as u64) as usize;
        }
        for _ in 0..count {
            let Some(op) = self.ring.submissions.pop() else { break };
            self.carry_out(op);
        }
        self.ring.submissions.is_empty()
    }

    pub(super) fn carry_out(&mut self, op: RawOp) {
        self.log(|| format!("  kernel: {op:?}"));
        match op {
            RawOp::Accept { listener } => self.arm_accept(listener),
            RawOp::Install { id, fd } => self.install(id, fd),
            RawOp::CloseFd { fd } => self.close_descriptor(fd),
            RawOp::Connect { id, address } => self.connect_to(id, &address),
            RawOp::Receive { id } => self.arm_receive(id),
            RawOp::ReceiveOnce { id } => self.arm_single(id, None),
            RawOp::ReceiveInto { id, block, most } => self.arm_single(id, Some((block, most as usize))),
            RawOp::Probe { id } => self.probe(id),
            RawOp::Send { id, batch, mode } => self.start_send(id, batch, mode),
            RawOp::Shutdown { id } => self.shutdown(id),
            RawOp::ShutdownInput { id } => self.shut_input_down(id),
            RawOp::Close { id, how } => self.close(id, how),
            RawOp::CancelAccept { .. }
            | RawOp::CancelConnect { .. }
            | RawOp::CancelReceive { .. }
            | RawOp::CancelSend { .. } => self.cancel(&op),
            RawOp::ReadWake => self.ring.arm_wake(),
        }
    }

    pub(super) fn reap(&mut self, side: &mut KernelSide) -> Option<RawCqe> {
        let PostedCompletion { cqe, note: Note { bytes, arm } } = self.ring.completions.ready.pop_front()?;
        self.cover.arm(arm);
        self.hash = (self.hash ^ cqe.user_data ^ (cqe.res as u64) << 32 ^ self.now)
            .wrapping_mul(0x9E37_79B9_7F4A_7C15)
            .rotate_left(23);
        self.log(|| format!("  reaped {:?} {} {:?}: {}", cqe.id(), cqe.res, arm, Arm::NAMES[arm as usize]));
        if let (Some((tag, range)), Some(buffer)) = (bytes, cqe.buffer()) {
            let spare = side.spare(buffer);
            spare[..range.len()].copy_from_slice(&self.socks[tag].wire[range]);
            self.sing(&mut spare[..cqe.res as usize]);
        }
        if Kind::of(cqe.user_data) == Some(Kind::CancelReceive)
            && self.ring.files.at(cqe.id().slot()).is_none_or(|(id, _)| id != cqe.id())
        {
            self.cover.arm(Arm::CancelReceiveStale);
        }
        Some(cqe)
    }

    /// Plants the canary: one wrong byte.
    pub(super) fn sing(&mut self, bytes: &mut [u8]) {
        if self.canary == Some(Canary::Byte) && self.rng.one_in(20) {
            self.canary = None;
            bytes[0] ^= 1;
        }
    }

    /// Buffers that the kernel has, as far as the driver can know: in the ring, or used up in a
    /// completion that was not reaped.
    pub fn buffers_held(&self) -> usize {
        let waiting = self.ring.completions.iter();
        let used_up = waiting.filter(|posted| posted.cqe.buffer().is_some()).count();
        self.ring.buffers.len() + used_up
    }
}
