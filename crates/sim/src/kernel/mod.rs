//! A simulated kernel, which keeps the promises of io_uring and no others.
//!
//! Its queues, buffers, file table and operations in flight are [`ringserve_simkernel::ring`]'s;
//! sockets, faults, schedule and oracles are here. All state of a run that is not the server's lies
//! in [`State`], peers included, since time passes for them while the server blocks in
//! [`Kernel::enter`]. The order of things follows Linux with `DEFER_TASKRUN`: operations are
//! carried out when they are submitted, completions appear only within an enter, those of one
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
use ringserve_simkernel::ring::{Descriptors, PostedCompletion, Ring, Sizes};

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

/// The note that is kept with a completion until it is reaped.
#[derive(Debug)]
pub(crate) struct Note {
    /// The bytes that it brings: their connection, and their range.
    bytes: Option<(usize, Range<usize>)>,
    /// The completion that the driver is about to reap.
    arm: Arm,
}

/// A listening socket.
#[derive(Debug, Default)]
pub struct Listener {
    /// Connections that wait to be accepted.
    pub backlog: VecDeque<usize>,
    /// Connections that found the backlog full, and retry when it is not.
    pub refused: VecDeque<usize>,
    /// New connections can no longer enter the queue.
    pub closed: bool,
    /// Set while the server turns new connections away; until then, connections in transit may
    /// arrive.
    closing: Option<u64>,
    /// The last attempt on the queue found no descriptor for its connections.
    starved: bool,
    /// The socket is closed. An adopted one keeps listening, for its other owners.
    pub gone: bool,
    /// For an adopted listener: the accept in flight, or the last one, was woken for a connection
    /// that it did not take, and for which no other owner is woken.
    owes: bool,
    /// For an adopted listener: since the last accept began, a connection was taken without one.
    took_one: bool,
    /// Time since which, and number of times that, the server blocked although it could have
    /// accepted from here.
    neglected: Option<(u64, u32)>,
}

/// The simulated kernel: its ring, its sockets, its clock and its peers.
pub struct State {
    /// The random numbers.
    pub rng: Rng,
    /// Nanoseconds since the start.
    pub now: u64,
    /// The draws of the seed.
    pub plan: Plan,
    /// Counts of all events.
    pub cover: Coverage,
    /// Depends on everything that was reaped.
    pub hash: u64,
    /// The last lines, if a trace is requested.
    pub trace: Option<VecDeque<String>>,
    /// All connections of the run.
    pub socks: Vec<Sock>,
    /// Connections whose peers still act.
    pub active: Vec<usize>,
    /// Time at which the next of those acts.
    pub peers_at: u64,
    /// Listening sockets.
    pub listeners: Vec<Listener>,
    /// Time at which the shard wants to be woken.
    pub alarm: u64,
    /// The longest wait of this turn.
    pub may_wait: Wait,
    /// Nothing more happens until the shard is stopped.
    pub quiet_world: bool,
    /// The shard was ordered to drain, and the time at which it aborts the rest.
    pub drain_deadline: Option<u64>,
    /// The shard was ordered to stop at once.
    pub aborted: bool,
    /// Number of the shard's turn.
    pub turn: u64,
    /// An accepted connection has a place now, here or elsewhere.
    pub has_room: bool,
    /// ENOBUFS since a buffer was last provided.
    pub dry_in_a_row: usize,
    /// An intentional fault, so that the oracles can be seen to notice it.
    pub canary: Option<Canary>,
    /// True if the last enter was cut short by a fault.
    pub cut_short: bool,
    /// The driver arms no receive until those that were stopped have ended.
    pub rests: bool,
    /// Start of the last turn that began without a buffer to receive into: peers may have sent
    /// unread bytes.
    pub starved_at: u64,
    /// Time until which limits may be postponed, since the shard reached its timers late.
    pub catches_up_until: u64,
    /// Start of the last turn.
    turn_began: u64,
    /// Time until which rates may be postponed, since the shard slept for long.
    pub slept_until: u64,

    pool: Pool,
    /// Connections that have no slot.
    descriptors: Descriptors<usize>,
    ring: Ring<usize, Note, Hearing, Answer>,
    /// Late completions, with their times.
    late: Vec<(u64, PostedCompletion<Note>)>,
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

/// The lower half of the driver under test.
pub struct SimKernel {
    state: Rc<RefCell<State>>,
}

impl SimKernel {
    /// Creates a kernel over this state.
    pub fn new(state: Rc<RefCell<State>>) -> SimKernel {
        SimKernel { state }
    }
}

/// The address that identifies a connection.
pub fn address_of(tag: usize) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::new(10, 0, (tag >> 8) as u8, tag as u8), 1024 + tag as u16))
}

impl State {
    /// Creates the state in which nothing has happened yet.
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

    /// Notes an event, if a trace is requested.
    #[inline]
    pub fn log(&mut self, line: impl FnOnce() -> String) {
        if let Some(trace) = &mut self.trace {
            if trace.len() == TRACE_LINES {
                trace.pop_front();
            }
            trace.push_back(format!("{:>10.3} ms  {}", self.now as f64 / 1e6, line()));
        }
    }

    /// True if this fault occurs now.
    #[inline]
    fn strikes(&mut self, fault: Fault) -> bool {
        let rate = self.plan.rates.of(fault);
        if rate == 0 || !self.rng.chance(rate) {
            return false;
        }
        self.cover.fault(fault);
        true
    }

    /// Lets time pass, in which the peers act.
    pub fn pass(&mut self, time: u64) {
        self.now += time;
        self.act_peers();
    }

    /// Does the same as `pass`, for the time that a turn takes.
    pub fn pass_turn(&mut self) {
        let time =
            if self.strikes(Fault::Stall) { self.rng.below(STALL_MAX) } else { self.rng.below(200_000) };
        self.pass(time);
        if time > LATE {
            self.catches_up_until = self.now + CATCH_UP_MAX;
        }
    }

    /// True if a completion belongs to this connection.
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
