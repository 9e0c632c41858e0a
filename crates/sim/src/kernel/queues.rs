//! Submission and completion queue, overflow included.

use ringserve_buf::KernelSide;
use ringserve_core::CloseHow;
use ringserve_drivers::kernel::{F_BUF_MORE, Kind, RawCqe, RawOp};

use super::{Posted, State};
use crate::faults::Canary;
use crate::faults::{Arm, Fault};

impl State {
    pub(super) fn entries_of(op: &RawOp) -> usize {
        match op {
            RawOp::Install { .. } | RawOp::Close { how: CloseHow::Abort, .. } => 2,
            _ => 1,
        }
    }

    pub(super) fn post(&mut self, cqe: RawCqe, arm: Arm) {
        self.post_with(Posted { cqe, bytes: None, arm });
    }

    /// Puts a completion into the queue, or where it waits for room.
    pub(super) fn post_with(&mut self, posted: Posted) {
        if self.is_full() {
            self.cover.fault(Fault::Overflow);
            self.overflow.push_back(posted);
        } else {
            self.completions.push_back(posted);
        }
    }

    pub(super) fn is_full(&self) -> bool {
        self.completions.len() >= self.plan.completions || !self.overflow.is_empty()
    }

    /// A completion that comes now, or some time later if `fault` strikes.
    pub(super) fn post_or_late(&mut self, cqe: RawCqe, arm: Arm, fault: Fault) {
        if self.strikes(fault) {
            let due = self.now
                + self
                    .rng
                    .spread(10_000, if fault == Fault::CancelLate { 10 } else { 1 } * self.plan.late_max);
            self.late.push((due, Posted { cqe, bytes: None, arm }));
        } else {
            self.post(cqe, arm);
        }
    }

    pub(super) fn flush_overflow(&mut self) {
        while self.completions.len() < self.plan.completions {
            let Some(posted) = self.overflow.pop_front() else { break };
            self.completions.push_back(posted);
        }
    }

    /// Carries out what was submitted; false if something is left.
    pub(super) fn submit_all(&mut self) -> bool {
        let mut count = self.submissions.len();
        if count > 1 && self.strikes(Fault::EnterPartial) {
            count = self.rng.below(count as u64) as usize;
        }
        for _ in 0..count {
            let Some(op) = self.submissions.pop_front() else { break };
            self.submissions_used -= Self::entries_of(&op);
            self.carry_out(op);
        }
        self.submissions.is_empty()
    }

    pub(super) fn carry_out(&mut self, op: RawOp) {
        self.log(|| format!("  kernel: {op:?}"));
        match op {
            RawOp::Accept { listener } => self.arm_accept(listener),
            RawOp::CancelAccept { listener } => self.cancel_accept(listener),
            RawOp::Install { id, fd } => self.install(id, fd),
            RawOp::CloseFd { fd } => self.close_descriptor(fd),
            RawOp::Connect { id, address } => self.connect_to(id, &address),
            RawOp::CancelConnect { id } => self.cancel_connect(id),
            RawOp::Receive { id } => self.arm_receive(id),
            RawOp::CancelReceive { id } => self.cancel_receive(id),
            RawOp::Probe { id } => self.probe(id),
            RawOp::Send { id, batch, mode } => self.start_send(id, batch, mode),
            RawOp::CancelSend { id } => self.cancel_send(id),
            RawOp::Shutdown { id } => self.shutdown(id),
            RawOp::ShutdownInput { id } => self.shut_input_down(id),
            RawOp::Close { id, how } => self.close(id, how),
            RawOp::ReadWake => {
                assert!(!self.wake_armed, "the wake-up is read twice");
                self.wake_armed = true;
            }
        }
    }

    pub(super) fn reap(&mut self, side: &mut KernelSide) -> Option<RawCqe> {
        let Posted { cqe, bytes, arm } = self.completions.pop_front()?;
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
            && self.table[cqe.id().slot() as usize].is_none_or(|file| file.id != cqe.id())
        {
            self.cover.arm(Arm::CancelReceiveStale);
        }
        Some(cqe)
    }

    /// The canary: one wrong byte.
    pub(super) fn sing(&mut self, bytes: &mut [u8]) {
        if self.canary == Some(Canary::Byte) && self.rng.one_in(20) {
            self.canary = None;
            bytes[0] ^= 1;
        }
    }

    /// Buffers the kernel has, as far as the driver can know: in the ring, or used up in a completion that was
    /// not reaped.
    pub fn buffers_held(&self) -> usize {
        let waiting =
            self.completions.iter().chain(&self.overflow).chain(self.late.iter().map(|late| &late.1));
        let used_up = waiting
            .filter(|posted| posted.cqe.buffer().is_some() && posted.cqe.flags & F_BUF_MORE == 0)
            .count();
        self.ring.len() + used_up
    }
}
