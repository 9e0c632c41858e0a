//! One seed: a shard, its driver and its service over the simulated kernel, from the first
//! connection to the last buffer.
//!
//! Its turns are those of every shard ([`Shard::turn`]); this one's lane is a service that the seed
//! draws.

mod calls;
mod check;
mod deadlines;
mod events;
mod other_shard;
mod relieved;
mod user;
mod watched;

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use ringserve_buf::{Pool, PoolConfig};
use ringserve_core::framing::Framing;
use ringserve_core::{
    Completion, ConnId, ConnShared, Driver, Frames, GivesBack, IdleActivity, LaneId, Op, ReceiveEnd, Shard,
    Time, Wait,
};
use ringserve_drivers::Uring;

use crate::bytes::TestFraming;
use crate::faults::Canary;
use crate::faults::{Coverage, Fault};
use crate::kernel::peers;
use crate::kernel::{SimKernel, State};
use crate::plan::{NEVER, Plan};
use crate::protocol::Protocol;
use crate::pushes::Pushes;
use crate::rng::Rng;
use crate::service::Session;
use crate::tasks::Tasks;
use other_shard::OtherShard;
use watched::{Tally, Watched};

/// The most turns in which a draining shard receives bytes that had arrived: 16, and one for every
/// eight of its connections.
const LOOKS_MAX: u64 = 16 + 40 / 8 + 2;

/// Time for which it waits for a connection that was queued at a listener, and, once it has
/// received the rest, for one without a frame: at most half of the drain's time.
const FIRST_FRAME: Duration = Duration::from_millis(500);

/// The most time over which connections leave if the seed drew none: the other shard has some, too.
const SPREAD: Duration = Duration::from_millis(100);

/// Nanoseconds in an hour.
const HOUR: u64 = 3_600_000_000_000;

/// From this time on, 26 days after its start, a shard's clock is late.
const CLOCK_NEW: u64 = 1 << 51;

type Core = Shard<Watched>;

/// A connection's frames.
type Batch<'a> = Frames<'a, Watched>;

/// A seed's shard, with its driver, its service and its kernel.
pub struct World {
    core: Core,
    above: Above,
}

/// An `open` that waits.
struct Opening {
    id: ConnId,
    tag: usize,
    /// Time at which it is done.
    due: u64,
    accepts: bool,
    /// The shard's count of its bytes.
    bytes: usize,
}

/// The layers above the shard and below it.
struct Above {
    state: Rc<RefCell<State>>,
    framing: Rc<TestFraming>,
    /// The lane of upstreams.
    lane: LaneId,
    driver: Uring<SimKernel>,
    pool: Pool,
    protocol: Protocol,
    tasks: Tasks,
    openings: Vec<Opening>,
    pushes: Pushes,
    /// Sources of work, and the steps of their pages in this turn.
    sources: Vec<user::Source>,
    page_steps: u32,
    other_shard: Option<OtherShard>,
    /// Times at which the service closes connections that it held open.
    closings: Vec<(u64, ConnId)>,
    live: Vec<(ConnId, ConnShared<Session>)>,
    /// Upstreams to which the service has not connected yet, and those to which it is connecting.
    upstreams: Vec<usize>,
    connecting: Vec<ConnId>,
    /// Events of accepted connections and of upstreams.
    tallies: [Tally; 2],
    /// Names of connections that are gone.
    old: Vec<ConnId>,
    kept: relieved::Kept,
    now: Time,
    /// Lead of the shard's clock over the kernel's.
    ahead: u64,
    turn: u64,
    drained_at: Option<u64>,
    /// Time at which its listeners are closed, and the turn in which they were.
    stops_at: Time,
    stopped_turn: u64,
    /// Time at which every connection that is left is reset.
    resets_at: Time,
    listeners_closed: u16,
    /// Time at which it has received everything that had arrived by then, at the latest.
    looked_at: u64,
    /// A completion that the core never receives, once it was aborted.
    lost: Option<ConnId>,
    /// The turn in which a slot last became free.
    freed_turn: u64,
    abort_at: u64,
    idle_turns: u32,
    /// A call was left to the next turn.
    held_off: bool,
    /// Turns after which memory is given back again; 0 is never.
    gives_back: u64,
    gives_back_now: bool,
    /// This turn had an effect.
    moved: bool,
    /// The oracles have not checked since the turn began.
    looks: bool,
    /// The send of the last completion.
    sent: Option<ConnId>,
    /// A name of a closed connection, whose frames are requested.
    gone: Option<ConnId>,
}

/// The result of a seed.
pub struct Outcome {
    /// Counts of all events.
    pub cover: Coverage,
    /// Depends on everything that happened.
    pub hash: u64,
}

impl World {
    /// Draws the seed's plan and sets everything up.
    pub fn new(seed: u64, turns: u64, canary: Option<Canary>, trace: bool) -> World {
        let mut rng = Rng::new(seed);
        let plan = Plan::draw(&mut rng, turns);
        let config = PoolConfig {
            buffer_bytes: plan.server_limits.receive_buffer_bytes,
            buffers_max: plan.buffers,
            poison: true,
        };
        let (pool, side) = Pool::new(config).expect("sizes are drawn within their ranges");
        let mut state = State::new(rng, plan.clone(), pool.clone());
        state.canary = canary;
        state.trace = trace.then(Default::default);
        state.log(|| format!("{plan:#?}"));
        let mut upstreams = Vec::new();
        for tag in 0..plan.peers {
            let mut cover = std::mem::take(&mut state.cover);
            let mut sock = peers::draw(&mut state.rng, &plan, tag, &mut |fault| cover.fault(fault));
            state.cover = cover;
            if tag < plan.upstreams {
                (sock.upstream, sock.connected) = (true, false);
                upstreams.push(tag);
            } else {
                state.active.push(tag);
            }
            state.socks.push(sock);
        }
        if plan.clock_start > CLOCK_NEW {
            state.cover.fault(Fault::ClockLate);
        }
        let state = Rc::new(RefCell::new(state));
        let kernel = SimKernel::new(state.clone());
        let driver = Uring::with_kernel(kernel, side, plan.slots() as u32).coalescing(plan.coalesce);
        let framing = Rc::new(TestFraming { framing: plan.framing, touchy: plan.encode_panics > 0 });
        let mut core = Shard::new(
            plan.server_limits.clone(),
            plan.limits.clone(),
            plan.connections_max,
            plan.listeners,
            framing.encoding(),
            pool.clone(),
            Watched::default(),
        );
        let lane = core.add_outbound(plan.upstream_limits.clone(), plan.upstreams_max(), framing.encoding());
        if let Some((calls, batch)) = plan.calls {
            core.bound_turn(calls, batch);
        }
        if let Some(bytes) = plan.large_from {
            core.large_from(bytes);
        }
        if plan.copies_frames {
            core.copy_frames();
        }
        let other_shard = plan.other_shard.map(|other| {
            let (other, quota) = OtherShard::new(other, plan.framing, pool.clone());
            core.share_quota(quota);
            other
        });
        let sources = (0..plan.page_sources).map(|_| user::Source::new(core.all_share().add_page_source()));
        let sources = sources.collect();
        let above = Above {
            state,
            framing,
            lane,
            driver,
            pool,
            protocol: Protocol::default(),
            tasks: Tasks::default(),
            openings: Vec::new(),
            pushes: Pushes::default(),
            sources,
            page_steps: 0,
            other_shard,
            closings: Vec::new(),
            live: Vec::new(),
            upstreams,
            connecting: Vec::new(),
            tallies: Default::default(),
            old: Vec::new(),
            kept: Vec::new(),
            now: Time::ZERO,
            ahead: plan.clock_start,
            turn: 0,
            drained_at: None,
            stops_at: Time::from_nanos(u64::MAX),
            stopped_turn: u64::MAX,
            resets_at: Time::from_nanos(u64::MAX),
            listeners_closed: 0,
            looked_at: 0,
            lost: None,
            freed_turn: u64::MAX,
            abort_at: NEVER,
            idle_turns: 0,
            held_off: false,
            // By its number, so that other draws stay as they are.
            gives_back: [0, 0, 50, 9][seed as usize % 4],
            gives_back_now: false,
            moved: false,
            looks: false,
            sent: None,
            gone: None,
        };
        World { core, above }
    }

    /// The state of the run, for printing it after a violation.
    pub fn state(&self) -> Rc<RefCell<State>> {
        self.above.state.clone()
    }

    /// Runs until the shard is done.
    pub fn run(self) -> Outcome {
        let World { mut core, mut above } = self;
        let mut completions = Vec::new();
        let budget = above.state.borrow().plan.budget;
        loop {
            above.turn += 1;
            above.state.borrow_mut().turn = above.turn;
            above.state.borrow_mut().pass_turn();
            above.now = Time::from_nanos(above.state.borrow().now);
            above.moved = !completions.is_empty();
            above.let_time_pass(&core);
            above.take_turn(&mut core, &mut completions);
            above.check(&core);
            if core.is_done() {
                break;
            }
            let wait = above.wait(&core);
            above.other_shard(&mut core);
            let before = above.state.borrow().now;
            let turned = above.driver.turn(wait, budget, &mut completions);
            assert_eq!(turned, Ok(()), "the driver gave up");
            above.check_busy(before, !completions.is_empty());
        }
        above.end(core, completions)
    }
}

impl Above {
    fn take_turn(&mut self, core: &mut Core, completions: &mut Vec<Completion>) {
        self.protocol.begin_turn(self.turn);
        // Holders of buffers may release them before the next check.
        if self.pool.available() == 0 {
            self.look();
        }
        completions.retain(|completion| !self.loses(completion));
        self.state.borrow_mut().begin_turn();
        core.turn(self.shard_time(), completions, self);
        self.check_relieved(core);
        self.note_kept(core);
        let (held, most) = (core.held_bytes(), self.state.borrow().plan.server_limits.held_bytes_max);
        assert!(held <= most, "{held} bytes are held after a turn, of {most}");
        let defers = !core.take_send_awaited() && self.state.borrow().plan.defers;
        if defers {
            self.state.borrow_mut().cover.fault(Fault::SendDeferred);
            self.driver.defer_sent();
        }
        self.look();
        for op in core.take_ops() {
            if let Op::StopListening { .. } = op {
                assert!(self.now >= self.stops_at, "a listener is closed before it is time");
                if self.stopped_turn == u64::MAX {
                    self.stopped_turn = self.turn;
                    self.resets_at = self.now + self.state.borrow().plan.server_limits.drain_timeout;
                }
            }
            self.protocol.submitted(&op);
            self.moved = true;
            let mut state = self.state.borrow_mut();
            state.log(|| format!("core: {op:?}"));
            if let Op::Send { id, batch } = &op
                && let Some((_, shared)) = self.live.iter().find(|(known, _)| known == id)
            {
                let least = state.plan.limits.write_bytes_per_second_min;
                let late = (state.catches_up_until, state.slept_until);
                let sock = &mut state.socks[shared.body().tag];
                (sock.untold, sock.sent_turn, sock.sent_at) = (true, self.turn, self.now.as_nanos());
                sock.rate.sent(batch.len(), sock.taken, least, late, self.now.as_nanos());
            }
            drop(state);
            self.driver.submit(op);
        }
        if std::mem::take(&mut self.gives_back_now) || self.state.borrow().rests {
            let came_to = self.driver.give_back();
            self.state.borrow_mut().rests = came_to == GivesBack::Waits;
        }
        let late = self.now >= self.stops_at && self.stopped_turn == u64::MAX;
        assert!(!late, "a shard that drains goes on listening");
    }

    /// Checks which connections the drain has cut. Soon it must have cut all that the service does
    /// not hold open.
    fn look_for_cuts(&mut self, core: &Core) {
        if self.drained_at.is_none() {
            return;
        }
        let state = &mut *self.state.borrow_mut();
        let limits = &state.plan.server_limits;
        let leaves = FIRST_FRAME.min(limits.drain_timeout / 2) + limits.drain_spread.unwrap_or(SPREAD);
        let leaves = leaves.as_nanos() as u64;
        let looked = self.turn.saturating_sub(self.stopped_turn) > LOOKS_MAX;
        if looked && self.looked_at == 0 {
            self.looked_at = self.now.as_nanos();
        }
        for (id, shared) in &self.live {
            let sock = &mut state.socks[shared.body().tag];
            let cut = core.is_cut(*id);
            assert!(!cut || !sock.upstream, "{id} is an upstream, and takes no bytes");
            assert!(!sock.cut || cut || shared.is_gone(), "{id} takes bytes again");
            if cut && !sock.cut {
                assert!(self.now >= self.stops_at, "{id} is cut before it is time");
                state.cover.fault(Fault::DrainCuts);
            }
            sock.cut = cut;
            let now = self.now.as_nanos();
            // Its time begins with the turn after the one that admitted it.
            if now > sock.opened_at && sock.looked_at_from == 0 {
                sock.looked_at_from = now;
            }
            let settled = sock.looked_at_from > 0 && now > sock.looked_at_from.max(self.looked_at) + leaves;
            // An outgoing connection outlives them all.
            let stays = sock.held || shared.is_gone() || !sock.opened || sock.upstream;
            assert!(cut || stays || !looked || !settled, "{id} takes frames in a drain for ever");
        }
    }

    /// The shard's clock, in a turn.
    fn shard_time(&self) -> Time {
        Time::from_nanos(self.now.as_nanos() + self.ahead)
    }

    /// While there is no connection, the shard's clock may jump.
    fn let_time_pass(&mut self, core: &Core) {
        let state = &mut *self.state.borrow_mut();
        let quiet = core.all_connections() == 0 && self.drained_at.is_none();
        if quiet && state.rng.chance(state.plan.quiet_times) {
            state.cover.fault(Fault::QuietTime);
            self.ahead += state.rng.spread(HOUR, 24 * 40 * HOUR);
            let ahead = self.ahead;
            state.log(|| format!("a quiet time: the clock is ahead by {ahead} ns"));
        }
    }

    /// Makes the oracles of time limits check every connection.
    fn look(&mut self) {
        let state = &mut *self.state.borrow_mut();
        for (_, shared) in &self.live {
            state.look(shared.body().tag, shared.outbox_bytes(), shared.is_gone(), self.now.as_nanos());
        }
    }

    /// True if the core must not receive a completion: the kernel never ended the close.
    fn loses(&mut self, completion: &Completion) -> bool {
        let state = &mut *self.state.borrow_mut();
        let Completion::Closed { id } = completion else { return false };
        if !state.aborted || !state.plan.loses_completion || self.lost.is_some() || self.other_shard.is_some()
        {
            return false;
        }
        state.cover.fault(Fault::LeftBehind);
        self.lost = Some(*id);
        self.protocol.completed(completion);
        true
    }

    /// Handles the end of a send: bytes that were held back may no longer be.
    fn look_after(&mut self, sent: ConnId) {
        let Some((_, shared)) = self.live.iter().find(|(known, _)| *known == sent) else { return };
        let state = &mut *self.state.borrow_mut();
        if shared.outbox_bytes() <= state.plan.limits.outbox_bytes_low {
            state.socks[shared.body().tag].clocks.release(self.now.as_nanos());
        }
    }

    fn block_of(&self, id: ConnId) -> Option<usize> {
        self.live.iter().find(|(known, _)| *known == id).map(|(_, shared)| shared.body().tag)
    }

    /// Gives the shard the order to drain, and later to abort, when it is time.
    fn apply_orders(&mut self, core: &mut Core) {
        let mut state = self.state.borrow_mut();
        let now = state.now;
        if self.drained_at.is_none() {
            let idle = state.active.is_empty() && self.upstreams.is_empty() && self.connecting.is_empty();
            // The driver probes for a missed reset after a minute.
            let idle = idle && !state.a_reset_is_unheard() || state.quiet_world;
            if !idle && self.turn < state.plan.turns {
                return;
            }
            if !self.live.is_empty() {
                state.cover.fault(Fault::Drained);
            }
            state.log(|| "drain".into());
            self.drained_at = Some(self.turn);
            let delay = state.plan.server_limits.drain_delay;
            if !delay.is_zero() {
                state.cover.fault(Fault::DrainDelayed);
            }
            self.stops_at = self.now + delay;
            let deadline = self.stops_at + state.plan.server_limits.drain_timeout;
            state.drain_deadline = Some(deadline.as_nanos());
            if let Some(after) = state.plan.abort_after {
                self.abort_at = now + after;
                state.alarm = state.alarm.min(self.abort_at);
            }
            drop(state);
            return core.drain();
        }
        if now >= self.abort_at {
            self.abort_at = NEVER;
            if !self.live.is_empty() {
                state.cover.fault(Fault::AbortedAll);
            }
            state.aborted = true;
            drop(state);
            self.stops_at = self.stops_at.min(self.now);
            core.abort_all();
        }
    }

    /// Notes a completion that reaches the core.
    fn note(&mut self, completion: &Completion) {
        self.protocol.completed(completion);
        let (id, bytes) = match completion {
            Completion::ReceiveEnded { id, end: ReceiveEnd::Eof }
            | Completion::Filled { id, end: ReceiveEnd::Eof, .. } => {
                if let Some(tag) = self.block_of(*id) {
                    self.state.borrow_mut().socks[tag].fin_heard = true;
                }
                return;
            }
            Completion::Received { id, lease } => (*id, lease.len()),
            Completion::Filled { id, bytes, .. } if *bytes > 0 => (*id, *bytes),
            Completion::Sent { id, .. } => (*id, 0),
            _ => return,
        };
        if let Some((_, shared)) = self.live.iter().find(|(known, _)| *known == id) {
            let state = &mut *self.state.borrow_mut();
            let sock = &state.socks[shared.body().tag];
            let held_back = shared.is_full() && !state.calls_are_full(sock);
            let sock = &mut state.socks[shared.body().tag];
            sock.arrived += if sock.cut { 0 } else { bytes };
            sock.untold &= bytes > 0;
            // Bytes received into the block of a frame continue until the frame is whole: a full
            // outbox does not stop them.
            let goes_on = matches!(completion, Completion::Filled { .. })
                && !state.has_frame(&state.socks[shared.body().tag]);
            let held_back = held_back && !goes_on;
            let sock = &mut state.socks[shared.body().tag];
            match state.plan.limits.idle_counts {
                IdleActivity::Received if bytes == 0 => {}
                IdleActivity::Sent if bytes > 0 => sock.active_at = self.now.as_nanos(),
                _ => sock.touch(self.now.as_nanos()),
            }
            if bytes > 0 {
                sock.clocks.hear(self.now.as_nanos(), bytes, held_back);
            }
        }
    }

    /// The longest wait of the driver, and the time at which it has to be woken.
    fn wait(&mut self, core: &Core) -> Wait {
        let wait = core.wait();
        let mut state = self.state.borrow_mut();
        let mut alarm = self.abort_at;
        let mut woken = state.now >= self.abort_at;
        for parked in self.tasks.iter() {
            match &parked.wants_room {
                Some(flag) => woken |= flag.is_set(),
                None => alarm = alarm.min(parked.due),
            }
        }
        alarm = self.openings.iter().map(|opening| opening.due).fold(alarm, u64::min);
        alarm = alarm.min(self.pushes.next_due());
        alarm = self.other_shard.as_ref().map_or(alarm, |other| alarm.min(other.next_due()));
        alarm = self.closings.iter().map(|(at, _)| *at).fold(alarm, u64::min);
        for (_, shared) in &self.live {
            alarm = shared.body().kept.borrow().iter().map(|(until, _)| *until).fold(alarm, u64::min);
        }
        let no_peer = state.active.is_empty() && self.connecting.is_empty() && !state.a_reset_is_unheard();
        if self.drained_at.is_none() && (no_peer || self.turn + 1 >= state.plan.turns) {
            woken = true;
        }
        woken |= alarm <= state.now;
        state.alarm = alarm;
        let wait = if woken { Wait::No } else { wait };
        state.may_wait = wait;
        wait
    }
}
