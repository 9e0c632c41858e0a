//! Receiving: arm, park, stop, and check whether a silent receive lives.
//!
//! ```text
//!            ┌───── ended by itself ─────┐
//!            ▼                           │
//!   No ──▶ Armed ──▶ EOF, error, stopped │──▶ No
//!            │ ▲                         │
//!    ENOBUFS ▼ │ a buffer is back        │
//!          Parked ──▶ stopped ───────────┘──▶ No
//! ```
//!
//! ```text
//!   silent for long ──▶ probe ──▶ EAGAIN ───────────────────────▶ all is well
//!                         └─────▶ bytes, end, error: 10 ms ─────▶ the receive reported it ──▶ all is well
//!                                                       └───────▶ cancelled, and armed again
//! ```
//!
//! A receive that is stopped and cannot be found is `Doubtful` from then on: it ended for the core,
//! and may live in the kernel.

use ringserve_buf::{Block, KernelSide, LeaseMut};
use ringserve_core::{Completion, ConnId, ReceiveEnd};

use super::buffers::Buffers;
use super::cancel::MISSES_MAX;
use super::kernel::{F_MORE, Kernel, RawCqe, RawOp};
use super::table::{Life, Port, ReceiveState, Stop};
use super::{Sink, Uring};

/// The most probes made in one turn: with those of a ring full of connections, 0.8 µs each, 50 µs.
/// The core spreads probes over time, so more than these wait only after a stall of the shard.
const PROBES_IN_A_TURN: usize = 64;

/// The next step after a receive that ended.
enum After {
    Again,
    Park,
    End(ReceiveEnd),
}

/// Buffers with the kernel, as completions report them.
impl Buffers {
    /// Accounts for a buffer that brought bytes.
    #[inline(always)]
    pub(super) fn filled(&mut self, side: &mut KernelSide, buffer: u16, bytes: usize) -> LeaseMut {
        self.in_ring -= 1;
        side.received(buffer, bytes)
    }

    /// Accounts for the buffer of a completion, exactly once, whatever else the completion says.
    pub(super) fn arrived(&mut self, side: &mut KernelSide, cqe: &RawCqe) -> Option<LeaseMut> {
        let buffer = cqe.buffer()?;
        if cqe.res > 0 {
            return Some(self.filled(side, buffer, cqe.res as usize));
        }
        self.in_ring -= 1;
        side.take_back(buffer);
        None
    }
}

impl<K: Kernel> Uring<K> {
    /// Begins a receive: multishot, `once`, or into a block.
    pub(super) fn begin_receive(&mut self, id: ConnId, once: bool, into: Option<(Box<Block>, usize)>) {
        let is_into = into.is_some();
        match self.ports.find(id) {
            Some(port) if port.receiving == ReceiveState::No => {
                port.receives(once, is_into);
                if let Some(into) = into {
                    self.blocks.insert(id, into);
                }
                self.receive(id);
            }
            // If the first receive still lives, a second could not be distinguished from it.
            Some(port) if port.receiving == ReceiveState::Doubtful => {
                let end = ReceiveEnd::Error(libc::EIO);
                self.ready.push_back(match into {
                    Some((block, _)) => Completion::Filled { id, block, bytes: 0, end },
                    None => Completion::ReceiveEnded { id, end },
                });
            }
            _ => Self::unknown(id, "receive"),
        }
    }

    /// Arms the receive that was requested, or parks it while the buffer ring is being replaced.
    fn receive(&mut self, id: ConnId) {
        let rests = self.is_resting();
        match self.ports.find(id) {
            Some(port) if rests => {
                port.hears();
                self.ports.park(id);
            }
            Some(port) => {
                port.receiving = ReceiveState::Armed;
                self.queue_receive(id);
            }
            None => {}
        }
    }

    /// Queues what is armed for the kernel.
    fn queue_receive(&mut self, id: ConnId) {
        let Some(port) = self.ports.find(id) else { return };
        let op = match port.is_once() {
            false => RawOp::Receive { id },
            true if !port.is_into() => RawOp::ReceiveOnce { id },
            true => {
                let Some((block, most)) = self.blocks.remove(&id) else { return };
                RawOp::ReceiveInto { id, block, most: most as u32 }
            }
        };
        self.queue.push(op);
    }

    pub(super) fn receive_stop(&mut self, id: ConnId) {
        let Some(port) = self.ports.find(id) else { return Self::unknown(id, "stop of a receive") };
        match port.receiving {
            ReceiveState::No | ReceiveState::Doubtful => {}
            ReceiveState::Armed => {
                // A receive that is being restarted is already being cancelled.
                if std::mem::replace(&mut port.receive_stop, Stop::Stops) == Stop::No {
                    port.receive_cancels = port.receive_cancels.saturating_add(1);
                    self.queue.push(RawOp::CancelReceive { id });
                }
            }
            ReceiveState::Parked => {
                self.ports.unpark(id);
                let end = ReceiveEnd::Stopped;
                self.ready.push_back(match self.blocks.remove(&id) {
                    Some((block, _)) => Completion::Filled { id, block, bytes: 0, end },
                    None => Completion::ReceiveEnded { id, end },
                });
            }
        }
    }

    /// Ends the receive by shutting its input down: for a cancel the kernel would search all
    /// operations that the ring waits for.
    pub(super) fn shutdown_input(&mut self, id: ConnId) {
        match self.ports.find(id) {
            Some(port) if port.receiving == ReceiveState::Armed && port.life == Life::Open => {
                (port.receive_stop, port.life) = (Stop::Stops, Life::EndsInput);
                self.queue.push(RawOp::ShutdownInput { id });
            }
            // The driver could not tell two shutdowns apart.
            _ => self.receive_stop(id),
        }
    }

    pub(super) fn probe(&mut self, id: ConnId) {
        if self.ports.find(id).is_none() {
            return Self::unknown(id, "probe");
        }
        self.probes.push_back(id);
    }

    /// Queues some of the waiting probes, after everything else of the turn.
    #[inline]
    pub(super) fn queue_probes(&mut self) {
        if !self.probes.is_empty() {
            let count = self.probes.len().min(PROBES_IN_A_TURN);
            self.queue.extend(self.probes.drain(..count).map(|id| RawOp::Probe { id }));
        }
    }

    /// Prepares a probe, or none: the receive may be known not to be in the kernel, or be about to
    /// end.
    pub(super) fn prepare_probe(&mut self, id: ConnId) -> Option<RawOp> {
        let port = self.ports.find(id)?;
        let silent = port.receiving == ReceiveState::Armed && port.receive_stop == Stop::No;
        (silent && !port.is_doubted()).then_some(RawOp::Probe { id })
    }

    /// Handles the answer of a probe: what a receive would find. The receive in flight should have
    /// reported it, or is about to: the probe runs before the work that the kernel postponed until
    /// the end of the enter.
    pub(super) fn on_probe(&mut self, cqe: RawCqe) {
        let id = cqe.id();
        let Some(port) = self.ports.find(id) else { return };
        match -cqe.res {
            libc::EAGAIN => return,
            // Nothing is known.
            libc::EINTR | libc::ENOMEM | libc::ENOBUFS => {}
            errno if errno > 0 => {
                self.failed.insert(id, errno);
            }
            _ => {}
        }
        if port.receiving == ReceiveState::Armed && port.receive_stop == Stop::No && !port.is_doubted() {
            port.doubt();
            self.cancel_receive_later(id);
        }
    }

    /// Fills the buffer ring and arms as many parked receives as it has buffers. Each uses at least
    /// one, so none of them finds the ring empty again before bytes have arrived.
    pub(super) fn arm_parked(&mut self) {
        let rests = self.rests();
        self.buffers.top_up(&mut self.kernel, &mut self.side);
        if self.ports.parked() == 0 || rests {
            return;
        }
        for _ in 0..self.buffers.in_ring {
            let Some(id) = self.ports.unpark_first() else { break };
            self.receive(id);
        }
    }

    /// Makes the next buffer that is freed wake the shard, if a receive waits for one. Called
    /// before the shard sleeps where leases may be dropped meanwhile.
    pub(super) fn wait_for_buffer(&mut self) {
        if self.ports.parked() > 0 && self.buffers.in_ring == 0 {
            self.side.wait_for_buffer();
        }
    }

    #[inline(always)]
    pub(super) fn on_receive(&mut self, cqe: RawCqe, sink: &mut Sink<'_>) {
        let id = cqe.id();
        if let Some(port) = self.ports.find(id)
            && port.receiving == ReceiveState::Armed
            && cqe.res > 0
            && cqe.flags & F_MORE != 0
            && let Some(buffer) = cqe.buffer()
        {
            port.hears();
            let lease = self.buffers.filled(&mut self.side, buffer, cqe.res as usize);
            return sink.push_first(Completion::Received { id, lease });
        }
        self.on_receive_over(cqe, sink);
    }

    /// Handles any other completion of a receive: it does not go on, or was not in flight.
    #[inline(never)]
    fn on_receive_over(&mut self, cqe: RawCqe, sink: &mut Sink<'_>) {
        let id = cqe.id();
        let armed = |port: &&mut Port| port.receiving == ReceiveState::Armed && !port.is_into();
        let Some(port) = self.ports.find(id).filter(armed) else {
            return self.on_late_receive(cqe);
        };
        let (stop, once) = (port.receive_stop, port.is_once());
        if cqe.res > 0 {
            port.hears();
        }
        let lease = self.buffers.arrived(&mut self.side, &cqe);
        let after = match -cqe.res {
            _ if cqe.res > 0 && lease.is_none() => After::End(ReceiveEnd::Error(libc::EIO)),
            0 => After::End(ReceiveEnd::Eof),
            _ if cqe.res > 0 && once => After::End(ReceiveEnd::Stopped),
            _ if cqe.res > 0 => After::Again,
            libc::ENOBUFS => After::Park,
            libc::ECANCELED | libc::EINTR | libc::EAGAIN => After::Again,
            errno => After::End(ReceiveEnd::Error(errno)),
        };
        if let Some(lease) = lease {
            self.emit(Completion::Received { id, lease }, sink);
        }
        match after {
            After::Again | After::Park if stop == Stop::Stops => {
                self.receive_ended(id, ReceiveEnd::Stopped, sink)
            }
            After::Again if self.is_resting() => {
                self.believe(id);
                self.ports.park(id);
            }
            After::Again => {
                self.believe(id);
                self.queue_receive(id);
            }
            After::Park => {
                self.believe(id);
                self.ports.park(id);
                self.buffers.starved();
                self.stats.receives_parked += 1;
            }
            After::End(end) => self.receive_ended(id, end, sink),
        }
        // It does not go on, whatever its `F_MORE` flag says.
        self.anomalies.more_flag += u64::from(cqe.flags & F_MORE != 0);
    }

    /// Handles the end of a receive into a block.
    #[cold]
    pub(super) fn on_filled(&mut self, cqe: RawCqe, sink: &mut Sink<'_>) {
        let (id, block) = (cqe.id(), self.kernel.take_block(cqe.id()));
        let armed = |port: &&mut Port| port.receiving == ReceiveState::Armed && port.is_into();
        let Some(port) = self.ports.find(id).filter(armed) else {
            return self.on_late_receive(cqe);
        };
        let Some((mut block, most)) = block else {
            // The number of bytes that came is unknown.
            return self.receive_ended(id, ReceiveEnd::Error(libc::EIO), sink);
        };
        let stops = port.receive_stop == Stop::Stops;
        let bytes = usize::try_from(cqe.res).unwrap_or_default();
        let mut end = match -cqe.res {
            0 => ReceiveEnd::Eof,
            _ if bytes > 0 => ReceiveEnd::Stopped,
            libc::ECANCELED | libc::EINTR | libc::EAGAIN | libc::ENOBUFS if stops => ReceiveEnd::Stopped,
            libc::ECANCELED | libc::EINTR | libc::EAGAIN | libc::ENOBUFS => {
                self.believe(id);
                self.blocks.insert(id, (block, most));
                if self.is_resting() {
                    self.ports.park(id)
                } else {
                    self.queue_receive(id)
                }
                return;
            }
            errno => ReceiveEnd::Error(errno),
        };
        block.advance(bytes);
        port.believe();
        port.hears();
        (port.receiving, port.receive_stop) = (ReceiveState::No, Stop::No);
        if end == ReceiveEnd::Eof
            && let Some(errno) = self.take_failed(id)
        {
            end = ReceiveEnd::Error(errno);
        }
        self.emit(Completion::Filled { id, block, bytes, end }, sink);
        sink.bytes = sink.bytes.saturating_sub(bytes);
    }

    /// Notes that the receive ended, and will be armed again.
    fn believe(&mut self, id: ConnId) {
        if let Some(port) = self.ports.find(id) {
            port.believe();
        }
    }

    fn receive_ended(&mut self, id: ConnId, end: ReceiveEnd, sink: &mut Sink<'_>) {
        if let Some(port) = self.ports.find(id) {
            port.believe();
            (port.receiving, port.receive_stop) = (ReceiveState::No, Stop::No);
        }
        // A socket reports an error once, and reported it to a probe.
        let failed = if end == ReceiveEnd::Eof { self.take_failed(id) } else { None };
        let end = failed.map_or(end, ReceiveEnd::Error);
        self.emit(Completion::ReceiveEnded { id, end }, sink);
    }

    /// Handles a completion of a receive that was assumed to have ended: its bytes are lost, and
    /// the connection receives no more.
    #[cold]
    fn on_late_receive(&mut self, cqe: RawCqe) {
        let doubtful = |port: &&mut Port| port.receiving == ReceiveState::Doubtful;
        if self.ports.find(cqe.id()).filter(doubtful).is_none() {
            return self.stale(cqe);
        }
        drop(self.buffers.arrived(&mut self.side, &cqe));
        self.anomalies.late_ends += 1;
    }

    pub(super) fn on_cancel_receive(&mut self, cqe: RawCqe, sink: &mut Sink<'_>) {
        let id = cqe.id();
        let Some(port) = self.ports.find(id) else { return };
        port.receive_cancels = port.receive_cancels.saturating_sub(1);
        if port.is_clearing() {
            return self.on_cleared(id, cqe.res);
        }
        // Completions of one operation come in order, so a receive that was not found and did not
        // end before this was missed, or ended without a completion.
        let stops = port.receiving == ReceiveState::Armed && port.receive_stop != Stop::No;
        let waits = stops && port.receive_cancels == 0;
        if !waits || cqe.res >= 0 {
            return;
        }
        port.receive_misses += u8::from(cqe.res == -libc::ENOENT);
        if port.receive_misses < MISSES_MAX {
            port.receive_cancels += 1;
            return self.cancel_again(RawOp::CancelReceive { id });
        }
        self.anomalies.silent_ends += 1;
        // If the first receive still lives, a second could not be distinguished from it.
        let stopped = port.receive_stop == Stop::Stops;
        let end = if stopped { ReceiveEnd::Stopped } else { ReceiveEnd::Error(libc::EIO) };
        self.receive_ended(id, end, sink);
        if let Some(port) = self.ports.find(id) {
            port.receiving = ReceiveState::Doubtful;
        }
    }
}
