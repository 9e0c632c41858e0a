//! A simulated kernel: what io_uring promises, and not a bit more.
//!
//! Its queues, buffers, file table and operations in flight are [`ringserve_simkernel::ring`]'s; sockets, faults, schedule
//! and oracles are here. All state of a run that is not the server's lies in [`State`], peers included, since time passes
//! for them while the server blocks in [`Kernel::enter`]. The order of things follows Linux with `DEFER_TASKRUN`:
//! operations are carried out when they are submitted, completions appear only within an enter, those of one
//! operation in order, those of different ones in any.

mod accept;
mod cancel;
mod close;
mod connect;
mod enter;
mod oracle;
pub mod peers;
mod queues;
mod receive;
mod send;
mod times;

use std::cell::RefCell;
use std::collections::VecDeque;
use std::net::{Ipv4Addr, SocketAddr};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Wake, Waker};
use std::time::Duration;

use ringserve_buf::{Block, KernelSide, Pool};
use ringserve_core::{Address, ConnId, Socket, Wait};
use ringserve_drivers::kernel::{Kernel, Kind, RawCqe, RawOp, SentQuietly};
use ringserve_simkernel::ring::{Descriptors, Posted, Ring, Sizes};

use crate::clocks::{CATCH_UP_MAX, LATE};
use crate::faults::Canary;
use crate::faults::{Arm, Coverage, Fault};
use crate::plan::{NEVER, Plan};
use crate::rng::Rng;
use crate::sock::{Place, Sock};

use connect::Answer;
use receive::Hearing;

/// The longest stop of the process.
pub(super) const STALL_MAX: u64 = 1_500_000_000;

/// Lines of the trace that are kept.
const TRACE_LINES: usize = 80;

/// What is kept with a completion until it is reaped.
#[derive(Debug)]
pub(crate) struct Note {
    /// The bytes it brings: whose they are, and which.
    bytes: Option<(usize, Range<usize>)>,
    /// What the driver is about to see.
    arm: Arm,
}

/// A listening socket.
#[derive(Debug, Default)]
pub struct Listener {
    /// Connections that wait to be accepted.
    pub backlog: VecDeque<usize>,
    /// Connections that found it full, and try again when it is not.
    pub refused: VecDeque<usize>,
    /// No connection begins to queue any more.
    pub closed: bool,
    /// The server turns newcomers away; until then, those may come that were on their way.
    closing: Option<u64>,
    /// The last look at the queue found no descriptor for what is in it.
    starved: bool,
    /// The socket is closed. One that was adopted goes on listening, for its other owners.
    pub gone: bool,
    /// Of one that was adopted: the accept in flight, or the last one, was woken for a connection that it did not take, and for
    /// which no other owner is woken.
    owes: bool,
    /// Of one that was adopted: since the last accept began a connection was taken without one.
    took_one: bool,
    /// Since when, and how often, the server blocked although it could have accepted from here.
    neglected: Option<(u64, u32)>,
}

/// The simulated kernel: its ring, its sockets, its clock and its peers.
pub struct State {
    /// Chance.
    pub rng: Rng,
    /// Nanoseconds since the start.
    pub now: u64,
    /// What was drawn.
    pub plan: Plan,
    /// What happened.
    pub cover: Coverage,
    /// Depends on everything that was reaped.
    pub hash: u64,
    /// The last lines, if a reader wants them.
    pub trace: Option<VecDeque<String>>,
    /// Every connection there ever is.
    pub socks: Vec<Sock>,
    /// Those whose peers still do something.
    pub active: Vec<usize>,
    /// When the next of those acts.
    pub peers_at: u64,
    /// Listening sockets.
    pub listeners: Vec<Listener>,
    /// When the shard wants to be woken.
    pub alarm: u64,
    /// How long it may wait in this turn.
    pub may_wait: Wait,
    /// Nothing happens any more until the shard is told to stop.
    pub quiet_world: bool,
    /// The shard was told to drain, and when it aborts what is left.
    pub drain_deadline: Option<u64>,
    /// The shard was told to stop at once.
    pub aborted: bool,
    /// The shard's turn.
    pub turn: u64,
    /// What is accepted now has a place, here or elsewhere.
    pub has_room: bool,
    /// ENOBUFS since a buffer was last provided.
    pub dry_in_a_row: usize,
    /// Something went wrong on purpose, so that the oracles can be seen to notice.
    pub canary: Option<Canary>,
    /// True if the last enter was cut short by a fault.
    pub cut_short: bool,
    /// The driver arms no receive until those that were told to stop have ended.
    pub rests: bool,
    /// When a turn last began without a buffer to receive into: peers may have sent what is not read.
    pub starved_at: u64,
    /// Until when limits may be put off, since the shard came late to its timers.
    pub catches_up_until: u64,
    /// When the last turn began.
    turn_began: u64,
    /// The same of rates alone, since it slept for long.
    pub slept_until: u64,

    pool: Pool,
    /// Connections that have no slot.
    descriptors: Descriptors<usize>,
    ring: Ring<usize, Note, Hearing, Answer>,
    /// Completions that come later, with the time.
    late: Vec<(u64, Posted<Note>)>,
    wake_due: bool,
    /// Wakes of other threads.
    woken: Arc<Woken>,
}

/// True from a wake until the kernel saw it.
#[derive(Default)]
struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Release);
    }
}

/// The lower half of the driver that is tested.
pub struct SimKernel {
    state: Rc<RefCell<State>>,
}

impl SimKernel {
    /// A kernel over this state.
    pub fn new(state: Rc<RefCell<State>>) -> SimKernel {
        SimKernel { state }
    }
}

/// The address by which a connection is known.
pub fn address_of(tag: usize) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::new(10, 0, (tag >> 8) as u8, tag as u8), 1024 + tag as u16))
}

impl State {
    /// Nothing has happened yet.
    pub fn new(rng: Rng, plan: Plan, pool: Pool) -> State {
        let ring = Ring::new(Sizes {
            submissions: plan.submissions,
            completions: plan.completions,
            buffers: plan.ring_entries,
            buffer_bytes: plan.server_limits.receive_buffer_bytes,
            slots: plan.slots(),
            listeners: plan.listeners.into(),
        });
        State {
            rng,
            now: 0,
            cover: Coverage::default(),
            hash: 0,
            trace: None,
            socks: Vec::new(),
            active: Vec::new(),
            peers_at: 0,
            listeners: (0..plan.listeners).map(|_| Listener::default()).collect(),
            alarm: NEVER,
            may_wait: Wait::No,
            quiet_world: false,
            drain_deadline: None,
            aborted: false,
            turn: 0,
            has_room: true,
            dry_in_a_row: 0,
            canary: None,
            cut_short: false,
            rests: false,
            starved_at: 0,
            catches_up_until: 0,
            turn_began: 0,
            slept_until: 0,
            pool,
            descriptors: Descriptors::default(),
            ring,
            late: Vec::new(),
            wake_due: false,
            woken: Arc::default(),
            plan,
        }
    }

    /// Notes an event, if a reader wants it.
    #[inline]
    pub fn log(&mut self, line: impl FnOnce() -> String) {
        if let Some(trace) = &mut self.trace {
            if trace.len() == TRACE_LINES {
                trace.pop_front();
            }
            trace.push_back(format!("{:>10.3} ms  {}", self.now as f64 / 1e6, line()));
        }
    }

    /// True if this fault strikes now.
    #[inline]
    fn strikes(&mut self, fault: Fault) -> bool {
        let rate = self.plan.rates.of(fault);
        if rate == 0 || !self.rng.chance(rate) {
            return false;
        }
        self.cover.fault(fault);
        true
    }

    /// Time passes, and the peers act.
    pub fn pass(&mut self, time: u64) {
        self.now += time;
        self.act_peers();
    }

    /// As `pass`, for the time that a turn takes.
    pub fn pass_turn(&mut self) {
        let time =
            if self.strikes(Fault::Stall) { self.rng.below(STALL_MAX) } else { self.rng.below(200_000) };
        self.pass(time);
        if time > LATE {
            self.catches_up_until = self.now + CATCH_UP_MAX;
        }
    }

    /// True if a completion is this connection's.
    fn is_of(&self, cqe: &RawCqe, tag: usize) -> bool {
        let kind = Kind::of(cqe.user_data);
        let names = !matches!(kind, Some(Kind::Accept | Kind::CancelAccept | Kind::Wake));
        names && self.is_at(cqe.id(), tag)
    }

    fn is_at(&self, id: ConnId, tag: usize) -> bool {
        self.ring.files.at(id.slot()) == Some((id, tag))
    }
}

impl Kernel for SimKernel {
    /// The number of a connection.
    type Descriptor = usize;

    fn submit(&mut self, op: RawOp) -> Result<(), RawOp> {
        let state = &mut *self.state.borrow_mut();
        state.ring.submissions.push(op).inspect_err(|_| state.cover.fault(Fault::QueueFull))
    }

    fn queued(&mut self) -> usize {
        self.state.borrow().ring.submissions.entries()
    }

    fn provide(&mut self, side: &mut KernelSide, buffer: u16) {
        let state = &mut *self.state.borrow_mut();
        state.dry_in_a_row = 0;
        if state.canary == Some(Canary::Buffer) && state.rng.one_in(20) {
            state.canary = None;
            return;
        }
        state.ring.buffers.provide(side, buffer);
    }

    fn renew_buffer_ring(&mut self) -> bool {
        self.state.borrow_mut().renew_buffer_ring()
    }

    fn buffer_ring_entries(&self) -> usize {
        self.state.borrow().ring.sizes().buffers
    }

    fn enter(&mut self, wait_for: u32, timeout: Option<Duration>) -> Result<(), i32> {
        self.state.borrow_mut().enter(wait_for, timeout)
    }

    fn reap(&mut self, side: &mut KernelSide) -> Option<RawCqe> {
        self.state.borrow_mut().reap(side)
    }

    fn take_block(&mut self, id: ConnId) -> Option<(Box<Block>, usize)> {
        self.state.borrow_mut().ring.take_block(id)
    }

    fn reap_quiet(&mut self) -> Option<SentQuietly> {
        self.state.borrow_mut().reap_unannounced()
    }

    fn has_completions(&mut self) -> bool {
        !self.state.borrow().ring.completions.ready.is_empty()
    }

    fn has_quiet(&mut self) -> bool {
        let completions = &self.state.borrow().ring.completions;
        !completions.quiet.is_empty() && completions.overflow.is_empty()
    }

    fn has_task_work(&mut self) -> bool {
        self.state.borrow().has_work()
    }

    fn is_overflowing(&mut self) -> bool {
        !self.state.borrow().ring.completions.overflow.is_empty()
    }

    fn peer_of(&mut self, fd: i32) -> Option<SocketAddr> {
        let state = &mut *self.state.borrow_mut();
        let tag = state.descriptor(fd);
        if state.socks[tag].reset && state.rng.one_in(2) {
            state.cover.fault(Fault::PeerUnknown);
            return None;
        }
        Some(address_of(tag))
    }

    fn is_adopted(&self, listener: u16) -> bool {
        self.state.borrow_mut().begin_to_leave(listener);
        self.state.borrow().plan.adopted
    }

    fn turn_newcomers_away(&mut self, listener: u16) -> Duration {
        self.state.borrow_mut().turn_newcomers_away(listener)
    }

    fn take_queued(&mut self, listener: u16) -> Result<i32, i32> {
        self.state.borrow_mut().take_queued(listener)
    }

    fn close_listener(&mut self, listener: u16) {
        self.state.borrow_mut().close_listener(listener);
    }

    fn now(&mut self) -> Duration {
        Duration::from_nanos(self.state.borrow().now)
    }

    fn open_socket(&mut self, address: &Address) -> Result<i32, i32> {
        self.state.borrow_mut().open_socket(address)
    }

    fn waker(&self) -> Waker {
        Waker::from(self.state.borrow().woken.clone())
    }

    fn hand_over(&mut self, fd: i32) -> Option<usize> {
        Some(self.state.borrow_mut().take_passed(Socket(fd as u64)))
    }

    fn take_over(&mut self, tag: usize) -> i32 {
        self.state.borrow_mut().open_descriptor(tag)
    }

    fn finish(&mut self, side: &mut KernelSide) -> bool {
        // Also while a violation unwinds.
        let Ok(mut state) = self.state.try_borrow_mut() else { return false };
        state.ring.finish(side);
        state.late.clear();
        state.descriptors = Descriptors::default();
        true
    }
}

impl State {
    fn renew_buffer_ring(&mut self) -> bool {
        self.ring.check_renewable();
        if self.turn.is_multiple_of(5) {
            self.cover.fault(Fault::RenewRefused);
            return false;
        }
        self.cover.fault(Fault::RingRenewed);
        self.ring.buffers.clear();
        true
    }

    /// Panics unless the kernel is at rest: nothing but the wake-up in flight, nothing open.
    pub fn check_rest(&self) {
        assert_eq!(self.ring.held(), [""; 0], "something is left");
        assert_eq!(self.ring.completions.quiet.len(), 0, "the completion of a send is left");
        assert!(self.ring.submissions.is_empty(), "operations are left: {:?}", self.ring.submissions);
        assert_eq!(self.descriptors.count(), 0, "a descriptor leaked");
        let placed = self.socks.iter().find(|sock| matches!(sock.place, Place::Descriptor | Place::Table));
        assert!(placed.is_none(), "connection {:?} is open", placed.map(|sock| sock.tag));
    }
}
