//! Receiving: multishot into provided buffers, classic and incremental.

use ringserve_core::ConnId;
use ringserve_drivers::kernel::{BUFFER_SHIFT, F_BUF_MORE, F_BUFFER, F_MORE, Kind, RawCqe};

use super::{Posted, State};
use crate::faults::{Arm, Fault};
use crate::sock::excuse;

/// Completions of one receive in one go; Linux stops at 32.
const IN_A_ROW: usize = 8;

/// A receive that is armed.
#[derive(Debug)]
pub(crate) struct Receive {
    id: ConnId,
    /// What it receives from; the file stays open as long as it is armed.
    pub(super) sock: usize,
    /// A cancel told EALREADY: it ends by itself, after this number of looks.
    pub(super) dying: u8,
    /// Cancels that did not find it.
    missed: u8,
    /// It is being cancelled.
    cancelled: bool,
    /// A reset came together with the bytes it brought last, and it does not look again.
    pub(super) deaf: bool,
}

impl State {
    pub(super) fn arm_receive(&mut self, id: ConnId) {
        assert!(!self.receives.iter().any(|receive| receive.id == id), "two receives on {id}");
        let Some(sock) = self.file(id) else {
            let cqe = RawCqe::new(Kind::Receive.with(id.bits()), -libc::EBADF, 0);
            return self.post(cqe, Arm::ReceiveNoSocket);
        };
        self.receives.push(Receive { id, sock, dying: 0, missed: 0, cancelled: false, deaf: false });
        if self.ring.is_empty() && self.strikes(Fault::NoBufferEarly) {
            self.end_receive(self.receives.len() - 1, libc::ENOBUFS);
        }
    }

    pub(super) fn cancel_receive(&mut self, id: ConnId) {
        let cancel = |res| RawCqe::new(Kind::CancelReceive.with(id.bits()), res, 0);
        // The answer to an earlier cancel, perhaps of the slot's former connection, may come just now.
        let met = self.answer_late_cancels(id);
        let Some(index) = self.receives.iter().position(|receive| receive.id == id) else {
            return self.post_or_late(cancel(-libc::ENOENT), Arm::CancelReceiveNone, Fault::CancelLate);
        };
        let missed = self.receives[index].missed;
        if self.misses(Fault::ReceiveMissed, missed) {
            self.receives[index].missed += 1;
            return self.post_or_late(cancel(-libc::ENOENT), Arm::CancelReceiveNone, Fault::CancelLate);
        }
        self.receives[index].cancelled = true;
        if met && self.rng.one_in(2) || self.strikes(Fault::CancelAlready) {
            self.receives[index].dying = self.rng.range(1, 3) as u8;
            return self.post_or_late(cancel(-libc::EALREADY), Arm::CancelReceiveAlready, Fault::CancelLate);
        }
        if self.strikes(Fault::CancelRace) && !self.race_cancel(index) {
            return self.post_or_late(cancel(-libc::ENOENT), Arm::CancelReceiveNone, Fault::CancelLate);
        }
        let before = self.rng.one_in(2);
        if before {
            self.post(cancel(0), Arm::CancelReceiveDone);
        }
        self.end_receive(index, libc::ECANCELED);
        if !before {
            self.post_or_late(cancel(0), Arm::CancelReceiveDone, Fault::CancelLate);
        }
    }

    /// Posts a late answer to a cancel of a receive in this slot; false if there is none. Answers for one connection
    /// come in order.
    fn answer_late_cancels(&mut self, id: ConnId) -> bool {
        let is_one = |late: &Posted| {
            let kind = Kind::of(late.cqe.user_data);
            kind == Some(Kind::CancelReceive) && late.cqe.id().slot() == id.slot()
        };
        let Some(index) = self.late.iter().position(|(_, late)| is_one(late)) else { return false };
        let (_, posted) = self.late.swap_remove(index);
        self.post_with(posted);
        self.cover.fault(Fault::CancelsMeet);
        true
    }

    /// Something happens to a receive right before it is cancelled. True if it is still armed.
    fn race_cancel(&mut self, index: usize) -> bool {
        let tag = self.receives[index].sock;
        match self.rng.below(12) {
            0..=3 if self.socks[tag].unread() > 0 && !self.ring.is_empty() => {
                self.receive_bytes(index, true);
                false
            }
            4 | 5 => {
                self.end_receive(index, libc::ENOBUFS);
                false
            }
            6 | 7 => {
                self.socks[tag].excuses |= excuse::SYSTEM;
                self.end_receive(index, libc::ENOMEM);
                false
            }
            8..=10 if self.socks[tag].has_sent_all() => {
                // The peer closes this moment.
                (self.socks[tag].peer_fin, self.socks[tag].fin_read) = (true, true);
                self.end_receive(index, 0);
                false
            }
            _ => self.receive_some(index),
        }
    }

    /// The connection's input is shut down: what is there is received, then the end.
    pub(super) fn end_receive_of(&mut self, id: ConnId) {
        let Some(index) = self.receives.iter().position(|receive| receive.id == id) else { return };
        if !self.strikes(Fault::InputEndUnheard) && self.receive_some(index) {
            self.end_receive(index, 0);
        }
    }

    /// Looks at what a receive would find.
    pub(super) fn probe(&mut self, id: ConnId) {
        let (res, arm) = match self.file(id) {
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
        let Receive { id, cancelled, .. } = self.receives.swap_remove(index);
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
        if errno != libc::ENOBUFS && !self.ring.is_empty() && self.strikes(Fault::BufferInError) {
            flags |= F_BUFFER | u32::from(self.ring[0]) << BUFFER_SHIFT;
            if self.plan.incremental && self.rng.one_in(2) {
                flags |= F_BUF_MORE;
            } else {
                self.ring.pop_front();
                self.head_filled = 0;
            }
            self.cover.arm(Arm::BufferInError);
        }
        self.post(RawCqe::new(Kind::Receive.with(id.bits()), -errno, flags), arm);
    }

    pub(super) fn work_receives(&mut self, all: bool) {
        let count = self.receives.len();
        if count == 0 {
            return;
        }
        // Backwards from anywhere, so that one that ends does not hide another.
        let start = self.rng.below(count as u64) as usize;
        for step in 0..count {
            let index = (start + count - step) % count;
            let Some(receive) = self.receives.get_mut(index) else { continue };
            if receive.dying > 0 {
                receive.dying -= 1;
                if receive.dying == 0 {
                    let errno = if self.rng.one_in(2) { libc::ECANCELED } else { libc::EINTR };
                    self.end_receive(index, errno);
                    continue;
                }
            }
            if !self.finds_something(&self.receives[index]) {
                if self.ring.is_empty() && self.strikes(Fault::NoBufferEarly) {
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

    /// Receives what is there, as far as it goes. True if the receive is still armed.
    fn receive_some(&mut self, index: usize) -> bool {
        for _ in 0..IN_A_ROW {
            let tag = self.receives[index].sock;
            if !self.finds_something(&self.receives[index]) {
                return true;
            }
            if let Some(errno) = self.receive_fault(tag) {
                self.end_receive(index, errno);
                return false;
            }
            if self.ring.is_empty() || self.strikes(Fault::NoBufferLie) {
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

    /// The peer closes this moment, if it has said all it has to say; else it resets.
    fn peer_goes(&mut self, tag: usize) {
        let sock = &mut self.socks[tag];
        if sock.has_sent_all() {
            sock.peer_fin = true;
        } else if !sock.reset && !sock.peer_fin {
            self.peer_resets(tag);
            self.socks[tag].peer.saw_end = true;
        }
    }

    /// The ring is empty, or is said to be.
    fn dry(&mut self) {
        if !self.ring.is_empty() {
            return;
        }
        if self.pool.available() == 0 {
            self.cover.fault(Fault::Dry);
        }
        self.dry_in_a_row += 1;
        let bound = 4 * self.plan.slots() + 16;
        assert!(self.dry_in_a_row < bound, "receives are armed again and again on an empty buffer ring");
    }

    /// One completion with bytes. True if the receive is still armed.
    fn receive_bytes(&mut self, index: usize, ends: bool) -> bool {
        let Receive { id, sock: tag, cancelled, .. } = self.receives[index];
        let room = self.plan.limits.receive_buffer_bytes - self.head_filled;
        let mut len = self.socks[tag].unread().min(room);
        if self.strikes(Fault::ReceiveShort) {
            len = self.rng.range(1, len as u64) as usize;
        }
        let buffer = self.ring[0];
        let mut flags = F_BUFFER | u32::from(buffer) << BUFFER_SHIFT;
        if self.plan.incremental && len < room {
            flags |= F_BUF_MORE;
            self.head_filled += len;
            self.cover.arm(Arm::BufferGoesOn);
        } else {
            self.ring.pop_front();
            self.head_filled = 0;
        }
        let last = ends || self.is_full() || self.strikes(Fault::ReceiveEnds);
        let arm = match (last, cancelled) {
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
        self.post_with(Posted { cqe, bytes: Some((tag, read..read + len)), arm });
        self.kick(tag);
        if last {
            self.receives.swap_remove(index);
            return false;
        }
        if !cancelled && self.strikes(Fault::ReceiveSilent) {
            self.log(|| format!("connection {tag}: receive ends in silence"));
            self.socks[tag].excuses |= excuse::SILENT | excuse::SYSTEM;
            self.receives.swap_remove(index);
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
            self.receives[index].deaf = true;
        }
        true
    }

    /// True if this receive would complete now.
    pub(super) fn finds_something(&self, receive: &Receive) -> bool {
        !receive.deaf && self.socks[receive.sock].is_readable()
    }

    /// True if this connection's receive does not know of a reset.
    pub(super) fn is_deaf(&self, tag: usize) -> bool {
        self.receives.iter().any(|receive| receive.sock == tag && receive.deaf)
    }

    /// True if a receive of any connection does not know of a reset.
    pub fn a_reset_is_unheard(&self) -> bool {
        self.receives.iter().any(|receive| receive.deaf)
    }

    /// True if this connection's receive does not know of a reset, and the shard has not stopped the receive to look.
    pub(super) fn is_unsought(&self, tag: usize) -> bool {
        let unsought = |receive: &Receive| receive.deaf && receive.missed == 0 && !receive.cancelled;
        self.receives.iter().any(|receive| receive.sock == tag && unsought(receive))
    }

    /// True if a receive of this connection is armed.
    pub(super) fn is_receiving(&self, tag: usize) -> bool {
        self.receives.iter().any(|receive| receive.sock == tag)
    }

    /// True if the shard has told this connection's receive to stop, and it has not.
    pub(super) fn is_cancelled(&self, tag: usize) -> bool {
        let told = |receive: &Receive| receive.missed > 0 || receive.cancelled;
        self.receives.iter().any(|receive| receive.sock == tag && told(receive))
    }

    /// True if an operation of this connection is about to end, or something else of it completes later.
    pub(super) fn is_stopping(&self, tag: usize) -> bool {
        self.receives.iter().any(|receive| receive.sock == tag && receive.dying > 0)
            || self.sends.iter().any(|send| send.sock == tag && send.dying > 0)
            // The answer to its cancel is all that is heard of a receive that ended in silence, and of a send that
            // had already left, quietly. One that was missed is looked for again after that answer.
            || self.late.iter().any(|(_, late)| {
                let missed = self.receives.iter().any(|receive| receive.sock == tag && receive.missed > 0)
                    || self.connects.iter().any(|connect| connect.is_of(tag) && connect.was_missed());
                let told = late.ends() || late.stops_a_send() || missed || self.socks[tag].may(excuse::SILENT);
                told && self.is_of(&late.cqe, tag)
            })
    }

    /// Panics if an operation holds the file of a connection that is about to be closed.
    pub(super) fn check_unused(&self, id: ConnId) {
        assert!(!self.receives.iter().any(|receive| receive.id == id), "{id} is closed under its receive");
        assert!(!self.sends.iter().any(|send| send.id == id), "{id} is closed under its send");
    }
}
