//! The bookkeeping half of the io_uring driver: operations in flight, and owners of buffers.
//!
//! ```text
//!   submit(Op) ──▶ queue ──▶ Kernel::submit ─┐
//!                    ▲                       ├─ Kernel::enter, at most once a turn
//!   parked ──────────┘ (buffers are back)    │
//!                    ▲                       ▼
//!   turn(..) ◀── completion ◀───────── Kernel::reap
//! ```
//!
//! There is no `unsafe` here, and no pointer or descriptor is interpreted. Each completion is
//! checked against the id in its slot, generation included.

mod accept;
mod buffers;
mod cancel;
mod close;
mod config;
mod connect;
mod give_back;
pub mod kernel;
mod receive;
mod send;
mod system;
mod table;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::task::Waker;
use std::time::Duration;

use ringserve_buf::{Block, KernelSide, Pool};
use ringserve_core::internals::canonical;
use ringserve_core::{
    Budget, Completion, ConnId, Driver, DriverStats, GivesBack, Op, PeerCredentials, Socket, Wait,
};

use crate::shared::coalesce::Coalesce;
use crate::shared::report::log;
use crate::shared::wait::SET_FROM;
use accept::UringListener;
use buffers::Buffers;
use cancel::Later;
use give_back::Rest;
use kernel::{Kernel, Kind, RawCqe, RawOp, SendMode};
use table::{Ports, SendState};

pub use config::UringConfig;
pub use system::SystemKernel;
pub use system::probe::{Found, probe, probe_accept, probe_ring, try_apart};

/// Completions that end a wait for more before its time: as many as a turn takes.
const COALESCED_MAX: u32 = 256;

/// The io_uring driver over a [`Kernel`].
///
/// It belongs to the thread that created it. Its drop ends every operation within a bound and
/// closes every connection; memory that the kernel does not release in time is leaked.
pub struct Uring<K: Kernel> {
    kernel: K,
    side: KernelSide,
    pool: Pool,
    buffers: Buffers,
    ports: Ports,
    listeners: Vec<UringListener>,
    /// Number of listeners that are being emptied before they are closed.
    emptying: usize,
    /// Cancels that missed their operation, and those of receives that may end by themselves.
    later: Later,
    /// Receives to be probed.
    probes: VecDeque<ConnId>,
    /// Blocks of receives that are held back from the kernel while buffers rest, with the most
    /// bytes of each.
    blocks: HashMap<ConnId, (Box<Block>, usize)>,
    /// Errors of sockets that a probe took and no receive will report, as the `errno`.
    failed: HashMap<ConnId, i32>,
    rest: Rest,
    /// Operations not yet passed to the kernel half, in order.
    queue: Vec<RawOp>,
    /// Earlier operations for which the submission queue had no room, in order.
    delayed: VecDeque<RawOp>,
    /// True if sends may have been stopped.
    stops_sends: bool,
    /// Completions made here, or beyond the last turn's budget, in order.
    ready: VecDeque<Completion>,
    /// True until the next turn if no caller waits for its sends.
    quiet: bool,
    /// True while the completion queue overflows, so that each time counts once.
    overflowing: bool,
    connections_max: u32,
    /// Whether to ask for the peer's address of each accepted connection.
    peer_addresses: bool,
    coalesce: Coalesce,
    stats: DriverStats,
    anomalies: Anomalies,
}

/// Completions that should not have come. Each is a bug, of the driver or of the kernel, and
/// harmless to other connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Anomalies {
    /// Completions for a connection or an operation that does not exist; their buffers went back.
    pub stale: u64,
    /// Completions that are terminal by every sign but their `F_MORE` flag.
    pub more_flag: u64,
    /// Receives that ended without a completion, as far as can be known; found when they were
    /// cancelled.
    pub silent_ends: u64,
    /// Completions of such receives, which had not ended; their bytes and their connections are
    /// lost.
    pub late_ends: u64,
    /// Descriptors that could not be made a connection.
    pub installs_failed: u64,
}

/// The completions of a turn, and what is left of its budget.
struct Sink<'a> {
    out: &'a mut Vec<Completion>,
    /// Length of `out` at which the budget ends.
    end: usize,
    /// Received bytes that are left of the budget.
    bytes: usize,
}

impl Sink<'_> {
    fn has_room(&self) -> bool {
        self.out.len() < self.end && self.bytes > 0
    }

    /// Adds the first completion after there was room.
    // Always inlined, so that a completion is built where it stays instead of being moved there.
    #[inline(always)]
    fn push_first(&mut self, completion: Completion) {
        debug_assert!(self.has_room());
        if let Completion::Received { lease, .. } = &completion {
            self.bytes = self.bytes.saturating_sub(lease.len());
        }
        self.out.push(completion);
    }
}

impl<K: Kernel> Uring<K> {
    /// Creates a driver over `kernel`, which receives into the pool of `side` and holds at most
    /// `connections_max` connections, at slots below that number.
    pub fn with_kernel(kernel: K, side: KernelSide, connections_max: u32) -> Uring<K> {
        let buffers = Buffers::new(kernel.buffer_ring_entries());
        Uring {
            pool: side.pool(),
            kernel,
            side,
            buffers,
            ports: Ports::new(),
            listeners: Vec::new(),
            emptying: 0,
            later: Later::new(),
            probes: VecDeque::new(),
            blocks: HashMap::new(),
            failed: HashMap::new(),
            rest: Rest::No,
            queue: vec![RawOp::ReadWake],
            delayed: VecDeque::new(),
            stops_sends: false,
            ready: VecDeque::new(),
            quiet: false,
            overflowing: false,
            connections_max,
            peer_addresses: true,
            coalesce: Coalesce::default(),
            stats: DriverStats::default(),
            anomalies: Anomalies::default(),
        }
    }

    /// Sets [`UringConfig::coalesce`].
    #[must_use]
    pub fn coalescing(mut self, wait: Duration) -> Uring<K> {
        self.coalesce = Coalesce::new(wait);
        self
    }

    /// Anomalies since the start.
    pub fn anomalies(&self) -> Anomalies {
        self.anomalies
    }

    /// The lower half.
    pub fn kernel(&self) -> &K {
        &self.kernel
    }

    /// Moves queued operations into the submission queue until it is full.
    fn flush(&mut self) {
        if !self.delayed.is_empty() {
            return self.flush_delayed();
        }
        let mut queue = std::mem::take(&mut self.queue);
        let mut ops = queue.drain(..);
        for op in ops.by_ref() {
            if let Err(op) = self.hand_down(op) {
                self.delayed.push_back(op);
                break;
            }
        }
        if ops.len() > 0 {
            self.delayed.extend(ops);
        } else {
            // As in `Shard::turn`.
            std::mem::forget(ops);
        }
        std::mem::swap(&mut self.queue, &mut queue);
        if !queue.is_empty() || !self.delayed.is_empty() {
            // Operations that these led to come last.
            self.queue.append(&mut queue);
            return self.flush_delayed();
        }
        self.stops_sends = false;
    }

    #[cold]
    fn flush_delayed(&mut self) {
        loop {
            self.delayed.extend(self.queue.drain(..));
            let Some(op) = self.delayed.pop_front() else { break };
            if let Err(op) = self.hand_down(op) {
                self.delayed.push_front(op);
                self.stats.submissions_delayed += self.delayed.len() as u64;
                return;
            }
        }
        self.stops_sends = false;
    }

    /// Passes an operation to the kernel half; it comes back if the submission queue is full.
    #[inline(always)]
    fn hand_down(&mut self, mut op: RawOp) -> Result<(), RawOp> {
        match &mut op {
            // There are as many of these as replies: they are not moved.
            RawOp::Send { mode, .. } if *mode != SendMode::All && !self.stops_sends => {
                *mode = self.first_mode();
            }
            _ => match self.prepare(op) {
                Some(prepared) => op = prepared,
                None => return Ok(()),
            },
        }
        self.kernel.submit(op).inspect_err(|op| self.unprepare(op))
    }

    /// True if there are operations not yet passed to the kernel half.
    fn has_queued(&self) -> bool {
        !self.queue.is_empty() || !self.delayed.is_empty() || !self.probes.is_empty()
    }

    /// Completes an operation with the state when it reaches the kernel; `None` if it has become
    /// pointless.
    fn prepare(&mut self, op: RawOp) -> Option<RawOp> {
        let cancel = match op {
            RawOp::Send { id, batch, mode } => return self.prepare_send(id, batch, mode),
            RawOp::Receive { .. } | RawOp::ReceiveOnce { .. } | RawOp::ReceiveInto { .. } => {
                self.stats.receives_armed += 1;
                return Some(op);
            }
            RawOp::Probe { id } => {
                let probe = self.prepare_probe(id)?;
                self.stats.probes += 1;
                return Some(probe);
            }
            RawOp::ShutdownInput { id } => return self.prepare_shutdown_input(id),
            RawOp::CancelSend { id } => self.prepare_cancel_send(id)?,
            RawOp::CancelReceive { id } => self.prepare_cancel_receive(id)?,
            RawOp::CancelAccept { listener } => self.prepare_cancel_accept(listener)?,
            RawOp::CancelConnect { id } => self.prepare_cancel_connect(id)?,
            op => return Some(op),
        };
        self.stats.cancels += 1;
        Some(cancel)
    }

    #[cold]
    fn unprepare(&mut self, op: &RawOp) {
        match op {
            RawOp::Receive { .. } | RawOp::ReceiveOnce { .. } | RawOp::ReceiveInto { .. } => {
                self.stats.receives_armed -= 1;
            }
            RawOp::Probe { .. } => self.stats.probes -= 1,
            RawOp::CancelSend { .. }
            | RawOp::CancelReceive { .. }
            | RawOp::CancelAccept { .. }
            | RawOp::CancelConnect { .. } => self.stats.cancels -= 1,
            RawOp::Send { id, mode: SendMode::All, .. } => {
                if let Some(port) = self.ports.find(*id) {
                    port.sending = SendState::Rests;
                }
            }
            _ => {}
        }
    }

    /// Submits any operation but a send, of which there are as many as replies.
    #[inline(never)]
    fn submit_seldom(&mut self, op: Op) {
        match op {
            Op::Accept { listener } => self.accept(listener),
            Op::AcceptStop { listener } => self.accept_stop(listener),
            Op::StopListening { listener } => self.stop_listening(listener),
            Op::Adopt { id, socket } => self.adopt(id, socket),
            Op::Refuse { socket } => self.queue.push(RawOp::CloseFd { fd: socket.0 as i32 }),
            Op::Connect { id, address } => self.connect(id, address),
            Op::ConnectStop { id } => self.connect_stop(id),
            Op::Receive { id } => self.begin_receive(id, false, None),
            Op::ReceiveOnce { id, .. } => self.begin_receive(id, true, None),
            Op::ReceiveInto { id, block, most } => {
                self.begin_receive(id, true, Some((block, most as usize)));
            }
            Op::ReceiveStop { id } => self.receive_stop(id),
            Op::ShutdownInput { id } => self.shutdown_input(id),
            Op::Probe { id } => self.probe(id),
            Op::Send { id, batch } => self.send(id, batch),
            Op::SendStop { id } => self.send_stop(id),
            Op::Shutdown { id } => self.shutdown(id),
            Op::Close { id, how } => self.close(id, how),
        }
    }

    /// Submits, and waits as `wait` says.
    #[inline]
    fn submit_queued(&mut self, wait: Wait) -> Result<(), i32> {
        self.arm_parked();
        self.repeat_cancels();
        self.queue_probes();
        self.flush();
        let quiet = std::mem::take(&mut self.quiet);
        self.enter(wait, quiet)
    }

    /// True if there is something to do without the kernel, or the kernel holds something back
    /// until it is entered.
    fn has_to_do(&mut self) -> bool {
        let due = self.due_in() == Some(Duration::ZERO);
        let here = !self.ready.is_empty() || self.has_queued() || self.can_arm_parked() || due;
        here || self.kernel.has_task_work() || self.kernel.is_overflowing()
    }

    /// Time until the driver has something to do by itself, whatever the kernel brings.
    #[inline]
    pub(crate) fn due_in(&mut self) -> Option<Duration> {
        let cancels = self.cancels_due_in();
        if self.emptying == 0 && matches!(self.rest, Rest::No) {
            return cancels;
        }
        let queue = if self.emptying == 0 { None } else { self.queue_due_in() };
        queue.into_iter().chain(cancels).chain(self.rest_due_in()).min()
    }

    /// Enters the kernel if there is a reason to, and blocks if `wait` allows it. The ends of this
    /// turn's sends end the wait, as any first completion does, unless they may come later
    /// (`quiet`).
    fn enter(&mut self, wait: Wait, quiet: bool) -> Result<(), i32> {
        let overflowing = self.kernel.is_overflowing();
        self.stats.overflows += u64::from(overflowing && !self.overflowing);
        self.overflowing = overflowing;
        let something = !self.ready.is_empty() || self.kernel.has_completions() || self.kernel.has_quiet();
        // Parked receives are armed a few at a time; the next few must not wait for a completion.
        let more_to_do = self.has_queued() || self.can_arm_parked();
        let due = self.due_in();
        let timeout = match wait {
            _ if something || more_to_do || due == Some(Duration::ZERO) => None,
            Wait::No | Wait::For(Duration::ZERO) => None,
            Wait::For(time) => Some(Some(due.map_or(time, |due| due.min(time)))),
            Wait::Forever => Some(due),
        };
        let held_back = !something && (overflowing || self.kernel.has_task_work());
        if self.kernel.queued() == 0 && timeout.is_none() && !held_back {
            return Ok(());
        }
        self.stats.enters += 1;
        let entered = match timeout {
            None => self.kernel.enter(0, None),
            Some(longest) => match if quiet { self.coalesce.begin_wait(longest) } else { Duration::ZERO } {
                Duration::ZERO => self.kernel.enter(1, longest),
                // If nothing came by then, the next turn waits for the first completion.
                wait => self.kernel.enter(COALESCED_MAX, Some(wait)),
            },
        };
        match entered {
            // If memory is short now, there may be some in the next turn.
            Err(libc::EINTR | libc::ETIME | libc::EBUSY | libc::EAGAIN | libc::ENOMEM) => Ok(()),
            entered => entered,
        }
    }

    /// Delivers a completion in this turn, or in the next where the budget is used up.
    fn emit(&mut self, completion: Completion, sink: &mut Sink<'_>) {
        if sink.has_room() { sink.push_first(completion) } else { self.ready.push_back(completion) }
    }

    #[inline(always)]
    fn complete(&mut self, cqe: RawCqe, sink: &mut Sink<'_>) {
        match Kind::of(cqe.user_data) {
            Some(Kind::Receive) => self.on_receive(cqe, sink),
            Some(Kind::Send) => self.on_send(cqe, sink),
            kind => self.complete_seldom(kind, cqe, sink),
        }
    }

    /// Handles all completions but those of frames and replies.
    #[inline(never)]
    fn complete_seldom(&mut self, kind: Option<Kind>, cqe: RawCqe, sink: &mut Sink<'_>) {
        match kind {
            Some(Kind::Accept) => self.on_accept(cqe, sink),
            Some(Kind::Shutdown) => self.on_shutdown(cqe, sink),
            Some(Kind::Close) => self.on_close(cqe, sink),
            Some(Kind::CancelReceive) => self.on_cancel_receive(cqe, sink),
            Some(Kind::Probe) => self.on_probe(cqe),
            Some(Kind::ReceiveInto) => self.on_filled(cqe, sink),
            Some(Kind::Connect) => self.on_connect(cqe, sink),
            Some(Kind::CancelSend) => self.on_cancel_send(cqe),
            Some(Kind::CancelAccept) => self.on_cancel_accept(cqe),
            Some(Kind::CancelConnect) => self.on_cancel_connect(cqe),
            Some(Kind::Timer) => {}
            Some(Kind::Wake) => self.queue.push(RawOp::ReadWake),
            Some(Kind::Install) => self.on_install_failed(cqe),
            Some(Kind::Ignored) => log::debug!(errno = -cqe.res, "an operation without a completion failed"),
            Some(Kind::Receive | Kind::Send) | None => self.stale(cqe),
        }
    }

    /// The error that a probe took from a connection's socket.
    fn take_failed(&mut self, id: ConnId) -> Option<i32> {
        if self.failed.is_empty() { None } else { self.failed.remove(&id) }
    }

    /// Counts a completion that nothing waits for, and gives its buffer back.
    #[cold]
    fn stale(&mut self, cqe: RawCqe) {
        self.buffers.arrived(&mut self.side, &cqe);
        self.anomalies.stale += 1;
        log::error!(?cqe, "stale completion");
        #[cfg(all(debug_assertions, not(test)))]
        panic!("stale completion {cqe:?}");
    }

    /// Panics if the parts disagree. Linear in the number of parked connections, constant
    /// otherwise.
    pub fn invariants(&self) {
        let counts = self.pool.counts();
        assert_eq!(counts.with_kernel, self.buffers.in_ring, "buffers with the kernel are those in its ring");
        assert!(self.buffers.in_ring <= self.kernel.buffer_ring_entries());
        self.ports.invariants();
    }

    /// Panics in debug builds: the id must be adopted, so anything else is a bug of the submitting
    /// shard.
    #[cold]
    fn unknown(id: ConnId, what: &str) {
        log::error!(%id, what, "operation on a connection that is not there");
        debug_assert!(false, "{what} on {id}, which is not adopted or is busy with one already");
    }
}

impl<K: Kernel> Driver for Uring<K> {
    type Descriptor = K::Descriptor;

    #[inline]
    fn submit(&mut self, op: Op) {
        match op {
            Op::Send { id, batch } => self.send(id, batch),
            op => self.submit_seldom(op),
        }
    }

    fn turn(&mut self, wait: Wait, budget: Budget, completions: &mut Vec<Completion>) -> Result<(), i32> {
        self.stats.turns += 1;
        self.submit_queued(wait)?;
        let begin = completions.len();
        let end = begin + budget.completions.max(1);
        let mut sink = Sink { out: completions, end, bytes: budget.bytes.max(1) };
        // What the last turn left comes first.
        while sink.has_room()
            && let Some(completion) = self.ready.pop_front()
        {
            sink.push_first(completion);
        }
        if self.emptying > 0 {
            self.empty_queues(&mut sink);
        }
        while sink.has_room()
            && let Some(cqe) = self.kernel.reap(&mut self.side)
        {
            self.complete(cqe, &mut sink);
        }
        while sink.has_room()
            && let Some(sent) = self.kernel.reap_quiet()
        {
            self.sent(sent.id, sent.bytes, sent.batch, &mut sink);
        }
        self.coalesce.brought(&completions[begin..]);
        if cfg!(debug_assertions) {
            self.invariants();
        }
        Ok(())
    }

    fn defer_sent(&mut self) {
        self.quiet = true;
    }

    fn give_back(&mut self) -> GivesBack {
        self.take_buffers_back()
    }

    fn pool(&self) -> &Pool {
        &self.pool
    }

    fn stats(&self) -> DriverStats {
        self.stats
    }

    fn connections_max(&self) -> usize {
        self.connections_max as usize
    }

    fn waker(&self) -> Waker {
        self.kernel.waker()
    }

    fn local_of(&mut self, socket: Socket) -> Option<SocketAddr> {
        self.stats.calls += 1;
        self.kernel.local_of(socket.0 as i32).map(canonical)
    }

    fn credentials_of(&mut self, socket: Socket) -> Option<PeerCredentials> {
        self.stats.calls += 1;
        self.kernel.credentials_of(socket.0 as i32)
    }

    fn hand_over(&mut self, socket: Socket) -> Option<K::Descriptor> {
        self.kernel.hand_over(socket.0 as i32)
    }

    fn take_over(&mut self, descriptor: K::Descriptor) -> Socket {
        Socket(self.kernel.take_over(descriptor) as u64)
    }

    fn readiness(&mut self) -> Result<K::Descriptor, i32> {
        self.kernel.readiness()
    }

    fn begin(&mut self) -> Result<bool, i32> {
        let quiet = self.quiet;
        if let Some(due) = self.due_in() {
            // The shard sleeps elsewhere: the timer wakes it.
            self.kernel.rouse_in(due.max(SET_FROM));
        }
        self.submit_queued(Wait::No)?;
        self.wait_for_buffer();
        // Sends of earlier turns that fitted may be awaited now.
        let posted = self.kernel.has_completions() || !quiet && self.kernel.has_quiet();
        Ok(posted || self.has_to_do())
    }
}

impl<K: Kernel> Drop for Uring<K> {
    fn drop(&mut self) {
        if !self.kernel.finish(&mut self.side) {
            // The kernel may still write into lent buffers: leak the memory.
            std::mem::forget(self.pool.clone());
        }
    }
}
