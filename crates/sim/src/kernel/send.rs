//! Sending: what fits at once, or all of it.

use ringserve_core::{Batch, ConnId};
use ringserve_drivers::kernel::{Kind, RawCqe, SendMode, SentQuietly};

use super::State;
use crate::faults::{Arm, Fault};
use crate::sock::excuse;

/// A send that waits for room.
#[derive(Debug)]
pub(crate) struct Sending {
    pub(super) id: ConnId,
    pub(super) sock: usize,
    batch: Box<Batch>,
    /// Bytes of the batch that left.
    left: usize,
    /// A cancel told EALREADY: it ends by itself, after this number of looks.
    pub(super) dying: u8,
    /// Cancels that did not find it.
    missed: u8,
}

impl State {
    pub(super) fn start_send(&mut self, id: ConnId, batch: Box<Batch>, mode: SendMode) {
        assert!(!batch.is_empty(), "an empty send on {id}");
        assert!(!self.sends.iter().any(|send| send.id == id), "two sends in flight on {id}");
        let Some(sock) = self.file(id) else {
            return self.end_send(id, None, batch, -libc::EBADF, Arm::SendError);
        };
        let mut send = Sending { id, sock, batch, left: 0, dying: 0, missed: 0 };
        if let Some((errno, arm)) = self.send_fault(sock) {
            return self.end_send(id, Some(sock), send.batch, -errno, arm);
        }
        if mode == SendMode::All {
            self.sends.push(send);
            return self.work_send(self.sends.len() - 1);
        }
        self.push_bytes(&mut send);
        let (left, len) = (send.left, send.batch.len());
        match (left, mode) {
            (0, _) => self.end_send(id, Some(sock), send.batch, -libc::EAGAIN, Arm::SendFull),
            _ if left < len => self.end_send(id, Some(sock), send.batch, left as i32, Arm::SentPart),
            (_, SendMode::TryQuietly) => {
                self.unannounced.push_back(SentQuietly { id, bytes: left as i32, batch: send.batch });
            }
            _ => self.end_send(id, Some(sock), send.batch, left as i32, Arm::SentAll),
        }
    }

    /// An error that a send meets before its first byte.
    fn send_fault(&mut self, tag: usize) -> Option<(i32, Arm)> {
        let sock = &mut self.socks[tag];
        if sock.reset {
            let errno = match std::mem::take(&mut sock.error) {
                0 => libc::EPIPE,
                errno => errno,
            };
            return Some((errno, Arm::SendError));
        }
        let faults = [
            (Fault::SendInterrupted, libc::EINTR, Arm::SendInterrupted),
            (Fault::SendNoBuffers, libc::ENOBUFS, Arm::SendNoBuffers),
            (Fault::SendAgain, libc::EAGAIN, Arm::SendFull),
            (Fault::SendBroken, libc::EIO, Arm::SendError),
        ];
        let (fault, errno, arm) = faults.into_iter().find(|(fault, ..)| self.strikes(*fault))?;
        if fault == Fault::SendBroken {
            self.socks[tag].excuses |= excuse::SYSTEM;
        }
        Some((errno, arm))
    }

    fn end_send(&mut self, id: ConnId, sock: Option<usize>, batch: Box<Batch>, res: i32, arm: Arm) {
        self.log(|| format!("  send of {} on {sock:?} ends: {res}", batch.len()));
        let mut cqe = RawCqe::new(Kind::Send.with(id.bits()), res, 0);
        cqe.batch = Some(batch);
        self.post(cqe, arm);
    }

    /// Moves bytes into the socket buffer as far as there is room, or less.
    fn push_bytes(&mut self, send: &mut Sending) {
        let room = self.plan.socket_bytes.1.saturating_sub(self.socks[send.sock].undelivered());
        let mut len = room.min(send.batch.len() - send.left);
        if len > 1 && self.strikes(Fault::SendShort) {
            len = self.rng.range(1, len as u64) as usize;
        }
        if len == 0 {
            return;
        }
        let (mut skip, mut wanted) = (send.left, len);
        let sock = &mut self.socks[send.sock];
        for piece in send.batch.pieces() {
            let from = skip.min(piece.len());
            skip -= from;
            let part = &piece[from..];
            let part = &part[..part.len().min(wanted)];
            wanted -= part.len();
            if !part.is_empty() {
                sock.take(part, self.now);
            }
        }
        send.left += len;
        if self.plan.rates.of(Fault::Delay) == 0 || self.rng.one_in(2) {
            self.kick(send.sock);
        } else {
            // It arrives a little later.
            self.socks[send.sock].peer.kicked = false;
            self.kick(send.sock);
        }
    }

    pub(super) fn can_send(&self, send: &Sending) -> bool {
        let sock = &self.socks[send.sock];
        sock.reset || send.dying > 0 || sock.undelivered() < self.plan.socket_bytes.1
    }

    pub(super) fn work_sends(&mut self, all: bool) {
        let mut index = self.sends.len();
        while index > 0 {
            index -= 1;
            if self.can_send(&self.sends[index]) && (all || !self.strikes(Fault::Delay)) {
                self.work_send(index);
            }
        }
    }

    /// Goes on with a send that waits for room.
    fn work_send(&mut self, index: usize) {
        let mut send = self.sends.swap_remove(index);
        let (id, tag, total) = (send.id, send.sock, send.batch.len());
        if send.dying > 0 {
            send.dying -= 1;
            if send.dying == 0 {
                let error = if self.rng.one_in(2) { -libc::ECANCELED } else { -libc::EINTR };
                return self.end_stopped(send, error);
            }
        }
        if self.socks[tag].reset {
            let errno = std::mem::take(&mut self.socks[tag].error).max(libc::EPIPE);
            let (res, arm) = match send.left {
                0 => (-errno, Arm::SendError),
                left => (left as i32, Arm::SentRestPart),
            };
            return self.end_send(id, Some(tag), send.batch, res, arm);
        }
        self.push_bytes(&mut send);
        if send.left == total {
            return self.end_send(id, Some(tag), send.batch, total as i32, Arm::SentRest);
        }
        // An error in the middle shows only as a short result.
        if send.left > 0 && send.dying == 0 && self.strikes(Fault::SendInterrupted) {
            return self.end_send(id, Some(tag), send.batch, send.left as i32, Arm::SentRestPart);
        }
        self.sends.push(send);
    }

    fn end_stopped(&mut self, send: Sending, error: i32) {
        let (res, arm) = match send.left {
            0 => (error, Arm::SendStoppedNone),
            left if left == send.batch.len() => (left as i32, Arm::SendStoppedAll),
            left => (left as i32, Arm::SendStoppedPart),
        };
        self.end_send(send.id, Some(send.sock), send.batch, res, arm);
    }

    pub(super) fn cancel_send(&mut self, id: ConnId) {
        let cancel = |res| RawCqe::new(Kind::CancelSend.with(id.bits()), res, 0);
        let Some(index) = self.sends.iter().position(|send| send.id == id) else {
            return self.post_or_late(cancel(-libc::ENOENT), Arm::CancelSendNone, Fault::CancelLate);
        };
        let missed = self.sends[index].missed;
        if self.misses(Fault::SendMissed, missed) {
            self.sends[index].missed += 1;
            return self.post_or_late(cancel(-libc::ENOENT), Arm::CancelSendNone, Fault::CancelLate);
        }
        if self.strikes(Fault::CancelAlready) {
            self.sends[index].dying = self.rng.range(1, 3) as u8;
            return self.post_or_late(cancel(-libc::EALREADY), Arm::CancelSendAlready, Fault::CancelLate);
        }
        let mut send = self.sends.swap_remove(index);
        if self.strikes(Fault::CancelRace) && !self.socks[send.sock].reset {
            // The kernel finds more room at the last moment.
            let room = self.plan.socket_bytes.1;
            self.plan.socket_bytes.1 += self.rng.below(4 * send.batch.len() as u64) as usize;
            self.push_bytes(&mut send);
            self.plan.socket_bytes.1 = room;
        }
        let before = self.rng.one_in(2);
        if before {
            self.post(cancel(0), Arm::CancelSendDone);
        }
        self.end_stopped(send, -libc::ECANCELED);
        if !before {
            self.post_or_late(cancel(0), Arm::CancelSendDone, Fault::CancelLate);
        }
    }

    pub(super) fn reap_unannounced(&mut self) -> Option<SentQuietly> {
        if !self.completions.is_empty() || !self.overflow.is_empty() {
            return None;
        }
        let sent = self.unannounced.pop_front()?;
        self.cover.arm(Arm::SentQuietly);
        Some(sent)
    }

    /// True if a send of this connection waits for room.
    pub(super) fn is_sending(&self, tag: usize) -> bool {
        self.sends.iter().any(|send| send.sock == tag)
    }
}
