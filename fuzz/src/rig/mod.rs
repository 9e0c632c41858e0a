//! A shard between a driver that keeps the contract and a service that does anything, with a model
//! of both.
//!
//! Checks, in addition to the shard's own invariants after every turn:
//!
//! * frames: each one is the next in the bytes of its peer, and within the limit; none is offered
//!   for a connection that is gone;
//! * replies: each send carries exactly the service's next bytes, and an orderly end left none
//!   unsent;
//! * the driver's contract: one receive, one send, one shutdown in flight; a stop once, for an
//!   operation in flight; a close for an idle connection; nothing for a name that is not adopted;
//! * the caller's contract: one end for each connection, with the calls that it left waiting, and
//!   none while the peer's end or a drain had to wait for them;
//! * the pool: no buffer lost or in two places; none leased at the end;
//! * progress: no reply waits without a send, no frame without a reason, no handler for room that
//!   is there; a drain ends.

mod check;
mod driver;
pub mod service;
mod user;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use ringserve_buf::{KernelSide, Pool, PoolConfig};
use ringserve_core::framing::Framing;
use ringserve_core::{
    CloseReason, ConnId, ConnShared, ConnStats, Frame, Frames, LaneId, Limits, Quota, RemoteGate,
    ServerLimits, Shard, Time, Wait,
};

use crate::framings::{Checked, Kind};
use crate::wire::{Flight, Talk, Wire};
use service::{End, Flag, Task};

pub use driver::ECANCELED;

/// Turns in a row, without a completion and without time passing, for which a shard may refuse to
/// sleep. Each takes 1024 frames off every connection, and inputs are shorter than that.
const BUSY_TURNS_MAX: u32 = 50;

/// Turns within which a drain passes on a frame, sends a byte or is over. Each lets the shard sleep
/// until its next time limit.
const DRAIN_TURNS_MAX: u32 = 500;

/// Longer than any time limit in use; a shard that waits only for its driver sleeps without limit.
const NAP_MAX: Duration = Duration::from_secs(60);

/// The most by which time limits expire late: two steps of the shard's wheel.
const LATE_MAX: Duration = Duration::from_millis(34);

/// Time after which limits that a shard cannot judge, since it was late, are checked again at the
/// latest: five of the same steps.
const PUT_OFF_MAX: Duration = Duration::from_millis(85);

/// The most connections of this shard and those with which it shares the quota: fewer than it may
/// hold at most.
const QUOTA: usize = 3;

/// The set-up of a run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The framing.
    pub kind: Kind,
    /// The limits; they pass their check.
    pub limits: Limits,
    /// The limits of the shard, which has room for everything that a connection may hold.
    pub server_limits: ServerLimits,
    /// Buffers in the pool.
    pub buffers: usize,
    /// Frames of 64 bytes and more are received straight into their blocks.
    pub large: bool,
    /// Frames are copied out of their buffers.
    pub copy_frames: bool,
    /// The most connections.
    pub connections_max: usize,
    /// Listeners.
    pub listeners: u16,
    /// Handlers only echo.
    pub echo_only: bool,
    /// The service holds connections open after the peer's end.
    pub hold_open: bool,
    /// There are other shards, with which connections are shared.
    pub others: bool,
}

/// The user's state of a connection.
#[derive(Debug, Default)]
pub struct Session {
    /// The number of its peer.
    pub peer: usize,
    /// Frames that are kept.
    pub kept: RefCell<Vec<Frame>>,
    /// Set when the outbox has room again, for all calls that wait for that.
    pub room: RefCell<Option<Arc<Flag>>>,
    /// The service ended its side of the stream.
    pub writing_ended: Cell<bool>,
    /// The service reads on while its outbox is full.
    pub reads_on: Cell<bool>,
    /// The state of it that other threads have, if any.
    pub gate: RefCell<Option<Arc<RemoteGate>>>,
}

/// A connection from the service's side.
pub type Conn = ConnShared<Session>;

/// A connection's frames.
type Batch<'a> = Frames<'a, ()>;

/// The shard under test.
type Core = Shard;

/// A shard, one turn after another, and its surroundings.
pub struct Rig {
    /// The shard under test.
    pub shard: Core,
    /// Its driver and its service.
    pub model: Model,
}

/// The driver below a shard and the service above it, with the bytes that peers and service
/// exchanged.
pub struct Model {
    /// The set-up of the run.
    pub plan: Plan,
    framing: Rc<Checked>,
    /// The lane of upstreams.
    lane: LaneId,
    /// Receive memory.
    pub pool: Pool,
    /// Connections that are adopted and not closed, in that order.
    pub wires: Vec<Wire>,
    /// Every peer that was ever accepted, by its socket's number.
    pub talks: Vec<Talk>,
    /// Connections that did not end.
    pub live: BTreeMap<ConnId, Conn>,
    /// Every name so far.
    names: BTreeSet<ConnId>,
    /// Connections that ended and that the service still names.
    pub old: Vec<Conn>,
    /// Parked handlers, by the shard's numbers for them.
    pub tasks: Vec<Option<Task>>,
    /// The service's answer to the next connections.
    pub opening: u8,
    /// Frames passed to the service, and those of them from upstreams.
    pub frames: u64,
    upstream_frames: u64,
    /// Ends of connections, in order.
    pub ends: Vec<(usize, CloseReason)>,
    accepts: Vec<Flight>,
    /// The listening sockets.
    listening: Vec<driver::Listening>,
    /// Accepted sockets that were neither adopted nor refused.
    sockets: Vec<u64>,
    /// Numbers of sockets that came from other shards, and that went there.
    came: u64,
    went: u64,
    /// Connections that the service opened, or tried to, with the number of each among all peers.
    upstreams: BTreeMap<ConnId, usize>,
    quota: Arc<Quota>,
    side: KernelSide,
    turn: u64,
    now: Time,
    order: Command,
    /// Completions delivered.
    completions: u64,
    /// Bytes that arrived for connections that the drain had cut.
    thrown_away: usize,
}

/// The order to the shard at the start of the next turn.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Command {
    /// Nothing.
    Serve,
    /// To drain.
    Drain,
    /// To stop at once.
    Abort,
}

impl Rig {
    /// Creates a shard in its first turn, which accepts.
    pub fn new(plan: Plan) -> Rig {
        assert_eq!(plan.server_limits.check(), Ok(()));
        assert_eq!(plan.server_limits.check_service(&plan.limits), Ok(()));
        let config = PoolConfig {
            buffer_bytes: plan.server_limits.receive_buffer_bytes,
            buffers_max: plan.buffers,
            poison: true,
        };
        let (pool, side) = Pool::new(config).expect("sizes are within their ranges");
        let framing = Rc::new(Checked { kind: plan.kind, frame_bytes_max: plan.limits.frame_bytes_max });
        let (limits, max) = (plan.limits.clone(), plan.connections_max);
        let mut shard = Shard::new(
            plan.server_limits.clone(),
            limits.clone(),
            max,
            plan.listeners,
            framing.encoding(),
            pool.clone(),
            (),
        );
        let lane = shard.add_outbound(limits, max, framing.encoding());
        if plan.large {
            shard.large_from(64);
        }
        if plan.copy_frames {
            shard.copy_frames();
        }
        let quota = Arc::new(Quota::new(QUOTA));
        if plan.others {
            shard.share_quota(quota.clone());
        }
        let mut model = Model {
            accepts: (0..plan.listeners).map(|_| Flight::default()).collect(),
            listening: (0..plan.listeners).map(|_| driver::Listening::Open).collect(),
            plan,
            framing,
            lane,
            pool,
            wires: Vec::new(),
            talks: Vec::new(),
            live: BTreeMap::new(),
            names: BTreeSet::new(),
            old: Vec::new(),
            tasks: Vec::new(),
            opening: 0,
            frames: 0,
            upstream_frames: 0,
            ends: Vec::new(),
            sockets: Vec::new(),
            came: 0,
            went: 0,
            upstreams: BTreeMap::new(),
            quota,
            side,
            turn: 1,
            now: Time::ZERO,
            order: Command::Serve,
            completions: 0,
            thrown_away: 0,
        };
        shard.begin(Time::ZERO, 0, &mut model);
        Rig { shard, model }
    }

    /// Ends the turn, checks, and begins the next one after `pause`.
    pub fn next_turn(&mut self, pause: Duration) {
        self.end_turn();
        let Rig { shard, model } = self;
        model.turn += 1;
        model.now = model.now + pause;
        // The others have room for a while, and then none for as long.
        shard.set_others_have_room(model.plan.others && model.turn % 16 < 8);
        shard.begin(model.now, 0, model);
    }

    /// Ends the turn, and checks.
    fn end_turn(&mut self) {
        self.shard.end(&mut self.model);
        self.hand_over();
    }

    /// Sleeps as long as the shard allows if nothing happens, at most [`NAP_MAX`], and begins the
    /// next turn.
    pub fn sleep(&mut self) {
        let mut busy = 0;
        loop {
            self.next_turn(Duration::ZERO);
            match self.shard.wait() {
                Wait::For(pause) => {
                    assert!(!pause.is_zero(), "a sleep of no time");
                    return self.next_turn(pause.min(NAP_MAX));
                }
                Wait::Forever => return,
                Wait::No => busy += 1,
            }
            assert!(busy <= BUSY_TURNS_MAX, "the shard does not sleep, and does nothing");
        }
    }

    /// Sets the order for the next turn.
    pub fn order(&mut self, order: Command) {
        self.model.order = self.model.order.max(order);
    }

    /// Drains, and checks that nothing is left. Peers and handlers that cooperate finish what they
    /// began.
    pub fn finish(mut self, cooperative: bool) {
        self.order(Command::Drain);
        let (mut turns, mut before) = (0, self.progress());
        // The script may have slept until the shard gave up; late completions are still taken.
        while !self.shard.is_done() || self.shard.left_behind() > 0 {
            let progress = self.progress();
            turns = if progress > before { 0 } else { turns + 1 };
            before = progress;
            assert!(turns <= DRAIN_TURNS_MAX, "the drain does not end: {:?}", self.model.wires);
            self.next_turn(Duration::ZERO);
            if !self.answer_all(cooperative) {
                self.sleep();
            }
            if cooperative {
                for task in 0..self.model.tasks.len() {
                    self.resume(task, End::Done);
                }
            }
        }
        self.end_turn();
        let counters = self.shard.counters(LaneId::FIRST);
        let of_upstreams = self.shard.counters(self.model.lane);
        drop(self.shard);
        self.model.finish(&counters, &of_upstreams);
    }

    /// Frames passed on and bytes taken. Peers and the service have a bounded number of them.
    fn progress(&self) -> u64 {
        self.model.frames + self.model.talks.iter().map(|talk| talk.taken as u64).sum::<u64>()
    }
}

impl Model {
    /// Checks that a shard that is gone left nothing, and counted the events of each lane.
    fn finish(mut self, counters: &ConnStats, of_upstreams: &ConnStats) {
        assert!(self.wires.is_empty() && self.sockets.is_empty() && self.live.is_empty());
        assert!(self.accepts.iter().all(|accept| !accept.armed), "an accept did not end");
        assert!(self.tasks.iter().all(Option::is_none), "a parked handler is forgotten");
        let upstreams: BTreeSet<usize> = self.upstreams.values().copied().collect();
        let of_lane = |is_upstream: bool, frames, thrown_away| {
            let is_of = |peer: &usize| upstreams.contains(peer) == is_upstream;
            let ends = self.ends.iter().filter(|(peer, _)| is_of(peer)).count() as u64;
            let peers = self.talks.iter().enumerate().filter(|(peer, _)| is_of(peer));
            let (received, taken) = peers.fold((thrown_away, 0), |(received, taken), (_, talk)| {
                (received + talk.received.len(), taken + talk.taken)
            });
            (ends, ends, frames, received as u64, taken as u64)
        };
        let counted = |of: &ConnStats, taken: u64| {
            assert_eq!(of.closed, of.reasons().map(|(_, count)| count).sum::<u64>());
            assert!(of.bytes_sent <= taken, "more was sent of a lane than its peers took");
            (of.opened, of.closed, of.frames, of.bytes_received, taken)
        };
        let accepted = of_lane(false, self.frames - self.upstream_frames, self.thrown_away);
        assert_eq!(counted(counters, accepted.4), accepted, "accepted connections");
        let made = of_lane(true, self.upstream_frames, 0);
        assert_eq!(counted(of_upstreams, made.4), made, "upstreams");
        let peers = counters.accepted + self.came + self.upstreams.len() as u64;
        assert_eq!((peers, counters.handed_off), (self.talks.len() as u64, self.went));
        let quota = format!("{:?}", self.quota);
        assert!(quota.contains("used: 0,"), "some is not given back: {quota}");
        self.old.clear();
        self.pool.invariants();
        let counts = self.pool.counts();
        assert_eq!((counts.leased, counts.with_kernel), (0, 0), "a buffer is not given back");
    }
}
