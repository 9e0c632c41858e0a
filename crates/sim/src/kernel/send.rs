//! Sending: as much as fits at once, or all of it.

use ringserve_core::{Batch, ConnId};
use ringserve_drivers::kernel::{Kind, RawCqe, SendMode, SentQuietly};
use ringserve_simkernel::ring::{Operation, SendProgress, find};

use super::State;
use crate::faults::{Arm, Fault};
use crate::sock::excuse;

/// A send that waits for room, or is tried.
type Send = Operation<usize, SendProgress>;

impl State {
    pub(super) fn start_send(&mut self, id: ConnId, batch: Box<Batch>, mode: SendMode) {
        let Some(sock) = self.ring.begin_send(id, &batch) else {
            return self.end_send(id, None, batch, -libc::EBADF, Arm::SendError);
        };
        if let Some((errno, arm)) = self.send_fault(sock) {
            return self.end_send(id, Some(sock), batch, -errno, arm);
        }
        let mut send = SendProgress { batch, sent: 0 };
        if mode == SendMode::All {
            self.ring.sends.push(Operation::new(id, sock, send));
            return self.work_send(self.ring.sends.len() - 1);
        }
        self.push_bytes(sock, &mut send);
        let SendProgress { batch, sent } = send;
        match mode {
            _ if sent == 0 => self.end_send(id, Some(sock), batch, -libc::EAGAIN, Arm::SendFull),
            _ if sent < batch.len() => self.end_send(id, Some(sock), batch, sent as i32, Arm::SentPart),
            SendMode::TryQuietly => {
                self.ring.completions.quiet.push_back(SentQuietly { id, bytes: sent as i32, batch });
            }
            _ => self.end_send(id, Some(sock), batch, sent as i32, Arm::SentAll),
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
    fn push_bytes(&mut self, tag: usize, send: &mut SendProgress) {
        let room = self.plan.socket_bytes.1.saturating_sub(self.socks[tag].undelivered());
        let mut len = room.min(send.batch.len() - send.sent);
        if len > 1 && self.strikes(Fault::SendShort) {
            len = self.rng.range(1, len as u64) as usize;
        }
        if len == 0 {
            return;
        }
        let sock = &mut self.socks[tag];
        for piece in send.next_pieces(len).filter(|piece| !piece.is_empty()) {
            sock.take(piece, self.now);
        }
        send.sent += len;
        if self.plan.rates.of(Fault::Delay) == 0 || self.rng.one_in(2) {
            self.kick(tag);
        } else {
            // The bytes arrive a little later.
            self.socks[tag].peer.kicked = false;
            self.kick(tag);
        }
    }

    pub(super) fn can_send(&self, send: &Send) -> bool {
        let sock = &self.socks[send.file];
        sock.reset || send.cancels.is_ending() || sock.undelivered() < self.plan.socket_bytes.1
    }

    pub(super) fn work_sends(&mut self, all: bool) {
        let mut index = self.ring.sends.len();
        while index > 0 {
            index -= 1;
            if self.can_send(&self.ring.sends[index]) && (all || !self.strikes(Fault::Delay)) {
                self.work_send(index);
            }
        }
    }

    /// Continues a send that waits for room.
    fn work_send(&mut self, index: usize) {
        let mut send = self.ring.sends.swap_remove(index);
        let (id, tag, total) = (send.id, send.file, send.of.batch.len());
        if send.cancels.check() {
            let errno = if self.rng.one_in(2) { libc::ECANCELED } else { libc::EINTR };
            return self.end_stopped(send, errno);
        }
        if self.socks[tag].reset {
            let errno = std::mem::take(&mut self.socks[tag].error).max(libc::EPIPE);
            let (res, arm) = match send.of.sent {
                0 => (-errno, Arm::SendError),
                sent => (sent as i32, Arm::SentRestPart),
            };
            return self.end_send(id, Some(tag), send.of.batch, res, arm);
        }
        self.push_bytes(tag, &mut send.of);
        let SendProgress { batch, sent } = send.of;
        if sent == total {
            return self.end_send(id, Some(tag), batch, total as i32, Arm::SentRest);
        }
        // An error in the middle shows only as a short result.
        if sent > 0 && !send.cancels.is_ending() && self.strikes(Fault::SendInterrupted) {
            return self.end_send(id, Some(tag), batch, sent as i32, Arm::SentRestPart);
        }
        self.ring.sends.push(Send { of: SendProgress { batch, sent }, ..send });
    }

    pub(super) fn end_stopped(&mut self, send: Send, errno: i32) {
        let Operation { id, file, of: SendProgress { batch, sent }, .. } = send;
        let (res, arm) = match sent {
            0 => (-errno, Arm::SendStoppedNone),
            sent if sent == batch.len() => (sent as i32, Arm::SendStoppedAll),
            sent => (sent as i32, Arm::SendStoppedPart),
        };
        self.end_send(id, Some(file), batch, res, arm);
    }

    /// Gives a send that a cancel found its last chance.
    pub(super) fn take_for_cancel(&mut self, id: ConnId) -> Send {
        let index = find(&self.ring.sends, id).expect("a cancel found it");
        let mut send = self.ring.sends.swap_remove(index);
        if self.strikes(Fault::CancelRace) && !self.socks[send.file].reset {
            // The kernel finds more room at the last moment.
            let room = self.plan.socket_bytes.1;
            self.plan.socket_bytes.1 += self.rng.below(4 * send.of.batch.len() as u64) as usize;
            self.push_bytes(send.file, &mut send.of);
            self.plan.socket_bytes.1 = room;
        }
        send
    }

    pub(super) fn reap_unannounced(&mut self) -> Option<SentQuietly> {
        let sent = self.ring.completions.pop_quiet()?;
        self.cover.arm(Arm::SentQuietly);
        Some(sent)
    }

    /// True if a send of this connection waits for room.
    pub(super) fn is_sending(&self, tag: usize) -> bool {
        self.ring.sends.iter().any(|send| send.file == tag)
    }
}
