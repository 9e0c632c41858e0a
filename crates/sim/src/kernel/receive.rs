//! Receiving: multishot into provided buffers, once into one of them, or into a block.

use ringserve_buf::Block;
use ringserve_core::ConnId;
use ringserve_drivers::kernel::{F_MORE, Kind, RawCqe};
use ringserve_simkernel::ring::{Cancels, Operation, PostedCompletion, find};

use super::{Note, State};
use crate::faults::{Arm, Canary, Fault};
use crate::sock::excuse;

/// Completions of one receive in a row; Linux stops at 32.
const IN_A_ROW: usize = 8;

/// Whether a receive notices input.
#[derive(Debug, Default)]
pub(crate) struct Hearing {
    /// Something came together with the bytes that it last brought, and it does not check again.
    deaf: bool,
}

/// A receive that is armed.
type Receive = Operation<usize, Hearing>;

impl State {
    pub(super) fn arm_receive(&mut self, id: ConnId) {
        let armed = self.ring.arm_receive(id, Hearing::default());
        self.begin_receive(id, armed, Kind::Receive);
    }

    pub(super) fn arm_single(&mut self, id: ConnId, into: Option<(Box<Block>, usize)>) {
        let kind = if into.is_some() { Kind::ReceiveInto } else { Kind::Receive };
        let armed = self.ring.arm_single(id, Hearing::default(), into);
        self.begin_receive(id, armed, kind);
    }

    fn begin_receive(&mut self, id: ConnId, armed: bool, kind: Kind) {
        if !armed {
            let cqe = RawCqe::new(kind.with(id.bits()), -libc::EBADF, 0);
            return self.post(cqe, Arm::ReceiveNoSocket);
        }
        if kind == Kind::Receive && self.ring.buffers.is_empty() && self.strikes(Fault::NoBufferEarly) {
            self.end_receive(self.ring.receives.len() - 1, libc::ENOBUFS);
        }
    }

    /// Posts a late answer to a cancel of a receive in this slot; false if there is none. Answers
    /// for one connection come in order.
    pub(super) fn answer_late_cancels(&mut self, id: ConnId) -> bool {
        let is_one = |late: &PostedCompletion<Note>| {
            let kind = Kind::of(late.cqe.user_data);
            kind == Some(Kind::CancelReceive) && late.cqe.id().slot() == id.slot()
        };
        let Some(index) = self.late.iter().position(|(_, late)| is_one(late)) else { return false };
        let (_, PostedCompletion { cqe, note }) = self.late.swap_remove(index);
        self.post_with(cqe, note);
        self.cover.fault(Fault::CancelsMeet);
        true
    }

    /// Changes a receive right before it is cancelled. True if it is still armed.
    pub(super) fn race_cancel(&mut self, id: ConnId) -> bool {
        let Some(index) = find(&self.ring.receives, id) else { return false };
        let tag = self.ring.receives[index].file;
        let into = self.ring.block_of(id).is_some();
        match self.rng.below(12) {
            0..=3 if self.socks[tag].unread() > 0 && (into || !self.ring.buffers.is_empty()) => {
                self.receive_bytes(index, true);
                false
            }
            4 | 5 if !into => {
                self.end_receive(index, libc::ENOBUFS);
                false
            }
            6 | 7 => {
                self.socks[tag].excuses |= excuse::SYSTEM;
                self.end_receive(index, libc::ENOMEM);
                false
            }
            8..=10 if self.socks[tag].has_sent_all() => {
                // The peer closes at this moment.
                (self.socks[tag].peer_fin, self.socks[tag].fin_read) = (true, true);
                self.end_receive(index, 0);
                false
            }
            _ => self.receive_some(index),
        }
    }

    /// Ends a receive that a cancel found.
    pub(super) fn stop_receive(&mut self, id: ConnId) {
        if let Some(index) = find(&self.ring.receives, id) {
            self.end_receive(index, libc::ECANCELED);
        }
    }

    /// Receives available bytes after the shutdown of the connection's input, then the end.
    pub(super) fn end_receive_of(&mut self, id: ConnId) {
        let Some(index) = find(&self.ring.receives, id) else { return };
        if !self.strikes(Fault::InputEndUnheard) && self.receive_some(index) {
            self.end_receive(index, 0);
        }
    }

    /// Probes what a receive would find.
    pub(super) fn probe(&mut self, id: ConnId) {
        let (res, arm) = match self.ring.files.get(id) {
            None => (-libc::EBADF, Arm::ProbedError),
            Some(_) if self.strikes(Fault::ProbeFails) => {
                let errno = [libc::EINTR, libc::ENOMEM, libc::ENOBUFS][self.rng.below(3) as usize];
                (-errno, Arm::ProbeFailed)
            }
            Some(tag) => {
                if self.strikes(Fault::ProbeRace) {
                    self.peer_goes(tag);
                }
                let sock = &mut self.socks[tag];
                match sock.unread() {
                    0 if sock.error != 0 => {
                        sock.error_probed = true;
                        (-std::mem::take(&mut sock.error), Arm::ProbedError)
                    }
                    0 if sock.is_readable() => (0, Arm::ProbedEnd),
                    0 => (-libc::EAGAIN, Arm::ProbedNothing),
                    _ => (1, Arm::ProbedBytes),
                }
            }
        };
        self.post(RawCqe::new(Kind::Probe.with(id.bits()), res, 0), arm);
    }

    /// Posts the last completion of a receive, without bytes.
    fn end_receive(&mut self, index: usize, errno: i32) {
        let Receive { id, cancels: Cancels { found: cancelled, .. }, .. } = self.ring.receives[index];
        if self.ring.end_receive(index) == Kind::ReceiveInto {
            let arm = if cancelled { Arm::FillEndedStopped } else { Arm::FillEnded };
            return self.post(RawCqe::new(Kind::ReceiveInto.with(id.bits()), -errno, 0), arm);
        }
        let lie = if cancelled { Fault::CancelLies } else { Fault::ReceiveLies };
        let lies = errno == libc::ECANCELED && self.strikes(lie);
        let mut flags = if lies { F_MORE } else { 0 };
        let arm = match (errno, cancelled) {
            (0, false) => Arm::ReceiveEof,
            (0, true) => Arm::ReceiveEofStopped,
            (libc::ENOBUFS, false) => Arm::ReceiveDry,
            (libc::ENOBUFS, true) => Arm::ReceiveDryStopped,
            (libc::ECANCELED, false) if lies => Arm::ReceiveCanceledMore,
            (libc::ECANCELED, false) => Arm::ReceiveCanceled,
            (libc::ECANCELED, true) if lies => Arm::ReceiveCanceledMoreStopped,
            (libc::ECANCELED, true) => Arm::ReceiveCanceledStopped,
            (libc::EINTR, false) => Arm::ReceiveInterrupted,
            (libc::EINTR, true) => Arm::ReceiveInterruptedStopped,
            (libc::ECONNRESET | libc::ETIMEDOUT | libc::EHOSTUNREACH, false) => Arm::ReceiveReset,
            (_, false) => Arm::ReceiveError,
            (_, true) => Arm::ReceiveErrorStopped,
        };
        if errno != libc::ENOBUFS && !self.ring.buffers.is_empty() && self.strikes(Fault::BufferInError) {
            flags |= self.ring.buffers.select();
            self.cover.arm(Arm::BufferInError);
        }
        self.post(RawCqe::new(Kind::Receive.with(id.bits()), -errno, flags), arm);
    }

    pub(super) fn work_receives(&mut self, all: bool) {
        let count = self.ring.receives.len();
        if count == 0 {
            return;
        }
        // Backwards from a random start, so that one that ends does not hide another.
        let start = self.rng.below(count as u64) as usize;
        for step in 0..count {
            let index = (start + count - step) % count;
            let Some(receive) = self.ring.receives.get_mut(index) else { continue };
            if receive.cancels.check() {
                let errno = if self.rng.one_in(2) { libc::ECANCELED } else { libc::EINTR };
                self.end_receive(index, errno);
                continue;
            }
            if !self.finds_something(&self.ring.receives[index]) {
                let id = self.ring.receives[index].id;
                let into = self.ring.block_of(id).is_some();
                if !into && self.ring.buffers.is_empty() && self.strikes(Fault::NoBufferEarly) {
                    self.end_receive(index, libc::ENOBUFS);
                }
                continue;
            }
            if !all && self.strikes(Fault::Delay) {
                continue;
            }
            self.receive_some(index);
        }
    }

    /// Receives available bytes, as far as possible. True if the receive is still armed.
    fn receive_some(&mut self, index: usize) -> bool {
        for _ in 0..IN_A_ROW {
            let tag = self.ring.receives[index].file;
            if !self.finds_something(&self.ring.receives[index]) {
                return true;
            }
            if let Some(errno) = self.receive_fault(tag) {
                self.end_receive(index, errno);
                return false;
            }
            let id = self.ring.receives[index].id;
            let into = self.ring.block_of(id).is_some();
            if !into && (self.ring.buffers.is_empty() || self.strikes(Fault::NoBufferLie)) {
                self.dry();
                self.end_receive(index, libc::ENOBUFS);
                return false;
            }
            let sock = &mut self.socks[tag];
            if sock.unread() == 0 {
                let errno = std::mem::take(&mut sock.error);
                sock.fin_read |= errno == 0 && !sock.error_probed;
                self.end_receive(index, errno);
                return false;
            }
            if !self.receive_bytes(index, false) {
                return false;
            }
        }
        true
    }

    fn receive_fault(&mut self, tag: usize) -> Option<i32> {
        let faults = [
            (Fault::ReceiveInterrupted, libc::EINTR),
            (Fault::ReceiveCanceled, libc::ECANCELED),
            (Fault::ReceiveBroken, libc::ENOMEM),
        ];
        let (fault, errno) = faults.into_iter().find(|(fault, _)| self.strikes(*fault))?;
        if fault == Fault::ReceiveBroken {
            self.socks[tag].excuses |= excuse::SYSTEM;
            self.log(|| format!("connection {tag}: receive breaks"));
        }
        Some(errno)
    }

    /// Closes the peer at this moment if it has sent everything; otherwise it resets.
    fn peer_goes(&mut self, tag: usize) {
        let sock = &mut self.socks[tag];
        if sock.has_sent_all() {
            sock.peer_fin = true;
        } else if !sock.reset && !sock.peer_fin {
            self.peer_resets(tag);
            self.socks[tag].peer.saw_end = true;
        }
    }

    /// Notes that the ring is empty, or reported to be.
    fn dry(&mut self) {
        if !self.ring.buffers.is_empty() {
            return;
        }
        if self.pool.available() == 0 {
            self.cover.fault(Fault::Dry);
        }
        self.dry_in_a_row += 1;
        let bound = 4 * self.plan.slots() + 16;
        assert!(self.dry_in_a_row < bound, "receives are armed again and again on an empty buffer ring");
    }

    /// Posts one completion with bytes. True if the receive is still armed.
    fn receive_bytes(&mut self, index: usize, ends: bool) -> bool {
        let Receive { id, file: tag, cancels: Cancels { found: cancelled, .. }, .. } =
            self.ring.receives[index];
        if self.ring.block_of(id).is_some() {
            self.fill(index);
            return false;
        }
        let mut len = self.socks[tag].unread().min(self.ring.buffers.room());
        if self.strikes(Fault::ReceiveShort) {
            len = self.rng.range(1, len as u64) as usize;
        }
        let mut flags = self.ring.buffers.select();
        let once = self.ring.is_single(id);
        let last = ends || once || self.ring.completions.is_full() || self.strikes(Fault::ReceiveEnds);
        let arm = match (last, cancelled) {
            _ if once => Arm::ReceivedOnce,
            (false, _) => Arm::ReceivedMore,
            (true, false) => Arm::ReceivedLast,
            (true, true) => Arm::ReceivedLastStopped,
        };
        if !last {
            flags |= F_MORE;
        }
        let read = self.socks[tag].read;
        self.socks[tag].read = read + len;
        let cqe = RawCqe::new(Kind::Receive.with(id.bits()), len as i32, flags);
        self.post_with(cqe, Note { bytes: Some((tag, read..read + len)), arm });
        self.kick(tag);
        if last {
            self.ring.end_receive(index);
            return false;
        }
        if !cancelled && self.strikes(Fault::ReceiveSilent) {
            self.log(|| format!("connection {tag}: receive ends in silence"));
            self.socks[tag].excuses |= excuse::SILENT | excuse::SYSTEM;
            self.ring.end_receive(index);
            return false;
        }
        let sock = &self.socks[tag];
        let unheard = match sock.unread() {
            _ if cancelled => None,
            0 => sock.reset.then_some(Fault::ResetUnheard),
            _ => Some(Fault::BytesUnheard),
        };
        if unheard.is_some_and(|fault| self.strikes(fault)) {
            self.log(|| format!("connection {tag}: receive does not hear of what comes behind"));
            self.ring.receives[index].of.deaf = true;
        }
        true
    }

    /// Posts the completion of a receive into a block, whose bytes are there from now on.
    fn fill(&mut self, index: usize) {
        let Receive { id, file: tag, cancels: Cancels { found: cancelled, .. }, .. } =
            self.ring.receives[index];
        let (unread, short) = (self.socks[tag].unread(), self.strikes(Fault::ReceiveShort));
        let Some((block, most)) = self.ring.block_of(id) else { return };
        let full = unread.min(*most);
        let len = if short { self.rng.range(1, full as u64) as usize } else { full };
        let arm = match len == *most {
            _ if cancelled => Arm::FilledStopped,
            true => Arm::Filled,
            false => Arm::FilledPart,
        };
        let sock = &mut self.socks[tag];
        let range = sock.read..sock.read + len;
        block.spare(len).copy_from_slice(&sock.wire[range.clone()]);
        sock.read = range.end;
        if self.canary == Some(Canary::Byte) && self.rng.one_in(20) {
            self.canary = None;
            block.spare(1)[0] ^= 1;
        }
        self.ring.end_receive(index);
        self.post(RawCqe::new(Kind::ReceiveInto.with(id.bits()), len as i32, 0), arm);
        self.kick(tag);
    }

    /// True if this receive would complete now.
    pub(super) fn finds_something(&self, receive: &Receive) -> bool {
        !receive.of.deaf && self.socks[receive.file].is_readable()
    }

    /// True if this connection's receive has not noticed a reset.
    pub(super) fn is_deaf(&self, tag: usize) -> bool {
        self.ring.receives.iter().any(|receive| receive.file == tag && receive.of.deaf)
    }

    /// True if a receive of any connection has not noticed a reset.
    pub fn a_reset_is_unheard(&self) -> bool {
        self.ring.receives.iter().any(|receive| receive.of.deaf)
    }

    /// True if this connection's receive has not noticed a reset, and the shard has not stopped the
    /// receive to check.
    pub(super) fn is_unsought(&self, tag: usize) -> bool {
        let unsought =
            |receive: &Receive| receive.of.deaf && receive.cancels.missed == 0 && !receive.cancels.found;
        self.ring.receives.iter().any(|receive| receive.file == tag && unsought(receive))
    }

    /// True if a receive of this connection is armed.
    pub(super) fn is_receiving(&self, tag: usize) -> bool {
        self.ring.receives.iter().any(|receive| receive.file == tag)
    }

    /// True if the shard has stopped this connection's receive, and it has not ended.
    pub(super) fn is_cancelled(&self, tag: usize) -> bool {
        let told = |receive: &Receive| receive.cancels.missed > 0 || receive.cancels.found;
        self.ring.receives.iter().any(|receive| receive.file == tag && told(receive))
    }

    /// True if an operation of this connection is about to end, or a completion of it is late.
    pub(super) fn is_stopping(&self, tag: usize) -> bool {
        self.ring.receives.iter().any(|receive| receive.file == tag && receive.cancels.is_ending())
            || self.ring.sends.iter().any(|send| send.file == tag && send.cancels.is_ending())
            // The answer to its cancel is the only completion of a receive that ended in silence,
            // and of a send that had already been sent quietly. One that was missed is cancelled
            // again after that answer.
            || self.late.iter().any(|(_, late)| {
                let missed = self.ring.receives.iter().any(|receive| receive.file == tag && receive.cancels.missed > 0)
                    || self.ring.connects.iter().any(|connect| connect.file == tag && connect.cancels.missed > 0);
                let kind = Kind::of(late.cqe.user_data);
                let ends = matches!(kind, Some(Kind::Close | Kind::Shutdown | Kind::CancelSend));
                let told = ends || missed || self.socks[tag].may(excuse::SILENT);
                told && self.is_of(&late.cqe, tag)
            })
    }
}
