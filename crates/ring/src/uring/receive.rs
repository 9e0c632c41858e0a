//! Receiving: arm, park, stop.
//!
//! ```text
//!            ┌───── ended by itself ─────┐
//!            ▼                           │
//!   No ──▶ Armed ──▶ EOF, error, stopped │──▶ No
//!            │ ▲                         │
//!    ENOBUFS ▼ │ a buffer is back        │
//!          Parked ──▶ stopped ───────────┘──▶ No
//! ```

use ringserve_core::{Completion, ConnId, ReceiveEnd};

use super::table::Receiving;
use super::{Sink, Uring};
use crate::seam::{F_MORE, Kernel, RawCqe, RawOp};

/// What a completion says of the operation's life.
enum After {
    GoesOn,
    Again,
    Park,
    End(ReceiveEnd),
}

impl<K: Kernel> Uring<K> {
    pub(super) fn receive(&mut self, id: ConnId) {
        match self.ports.find(id) {
            Some(port) if port.receiving == Receiving::No => {
                port.receiving = Receiving::Armed;
                self.queue.push_back(RawOp::Receive { id });
            }
            _ => Self::unknown(id, "receive"),
        }
    }

    pub(super) fn receive_stop(&mut self, id: ConnId) {
        let Some(port) = self.ports.find(id) else { return Self::unknown(id, "stop of a receive") };
        match port.receiving {
            Receiving::No => {}
            Receiving::Armed => {
                if !port.receive_stop {
                    port.receive_stop = true;
                    port.receive_cancels = port.receive_cancels.saturating_add(1);
                    self.queue.push_back(RawOp::CancelReceive { id });
                }
            }
            Receiving::Parked => {
                self.ports.unpark(id);
                self.ready.push_back(Completion::ReceiveEnded { id, end: ReceiveEnd::Stopped });
            }
        }
    }

    /// Fills the buffer ring and arms as many parked receives as it has buffers: each can use at least one,
    /// so that none of them finds the ring empty again unless data moved.
    pub(super) fn arm_parked(&mut self) {
        self.buffers.top_up(&mut self.kernel, &mut self.side);
        if self.ports.parked() == 0 {
            return;
        }
        for _ in 0..self.buffers.in_ring() {
            let Some(id) = self.ports.unpark_first() else { break };
            self.receive(id);
        }
    }

    #[inline(always)]
    pub(super) fn on_receive(&mut self, cqe: RawCqe, sink: &mut Sink<'_>) {
        let id = cqe.id();
        let Some(port) = self.ports.find(id).filter(|port| port.receiving == Receiving::Armed) else {
            return self.stale(cqe);
        };
        let stop = port.receive_stop;
        port.fed |= cqe.res > 0;
        let lease = self.buffers.arrived(&mut self.side, &cqe);
        let after = match -cqe.res {
            _ if cqe.res > 0 && lease.is_none() => After::End(ReceiveEnd::Error(libc::EIO)),
            _ if cqe.res > 0 && cqe.flags & F_MORE != 0 => After::GoesOn,
            0 => After::End(ReceiveEnd::Eof),
            _ if cqe.res > 0 => After::Again,
            libc::ENOBUFS => After::Park,
            libc::ECANCELED | libc::EINTR | libc::EAGAIN => After::Again,
            errno => After::End(ReceiveEnd::Error(errno)),
        };
        if let Some(lease) = lease {
            sink.push(Completion::Received { id, lease });
        }
        match after {
            After::GoesOn => return,
            After::Again | After::Park if stop => self.receive_ended(id, ReceiveEnd::Stopped, sink),
            After::Again => self.queue.push_back(RawOp::Receive { id }),
            After::Park => {
                self.ports.park(id);
                self.buffers.starved();
                self.stats.receives_parked += 1;
            }
            After::End(end) => self.receive_ended(id, end, sink),
        }
        // Whatever its flag says, it does not go on.
        self.anomalies.more_flag += u64::from(cqe.flags & F_MORE != 0);
    }

    fn receive_ended(&mut self, id: ConnId, end: ReceiveEnd, sink: &mut Sink<'_>) {
        if let Some(port) = self.ports.find(id) {
            port.receiving = Receiving::No;
            port.receive_stop = false;
        }
        sink.push(Completion::ReceiveEnded { id, end });
    }

    pub(super) fn on_cancel_receive(&mut self, cqe: RawCqe, sink: &mut Sink<'_>) {
        let id = cqe.id();
        let Some(port) = self.ports.find(id) else { return };
        port.receive_cancels = port.receive_cancels.saturating_sub(1);
        // Completions of one operation come in order, so one that was not found and did not end before this
        // ended without saying so.
        let waits = port.receiving == Receiving::Armed && port.receive_stop && port.receive_cancels == 0;
        if waits && cqe.res == -libc::ENOENT {
            self.anomalies.silent_ends += 1;
            self.receive_ended(id, ReceiveEnd::Stopped, sink);
        }
    }
}
