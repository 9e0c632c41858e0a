//! One seed: a shard, its driver and its service over the simulated kernel, from the first connection to the
//! last buffer.
//!
//! The loop is that of the real shard: completions in, events worked off, handlers resumed, one flush,
//! operations out, one driver turn.

mod check;

use std::cell::RefCell;
use std::rc::Rc;

use ringserve_buf::{Pool, PoolConfig};
use ringserve_core::{
    Block, CloseReason, Completion, ConnId, Driver, Event, Next, Op, Shard, Socket, Time, Wait,
};
use ringserve_ring::Uring;

use crate::bytes::AnyFraming;
use crate::faults::{Coverage, Fault};
use crate::kernel::{SimKernel, State, address_of};
use crate::peer::{self, NEVER};
use crate::plan::Plan;
use crate::protocol::Protocol;
use crate::rng::Rng;
use crate::run::Canary;
use crate::service::{self, Called, Parked, Session};

type Core = Shard<Session, AnyFraming, ()>;

/// See the module.
pub struct World {
    state: Rc<RefCell<State>>,
    driver: Uring<SimKernel>,
    core: Core,
    pool: Pool,
    protocol: Protocol,
    tasks: Vec<Option<Parked>>,
    live: Vec<(ConnId, Rc<Block<Session>>)>,
    /// Names of connections that are gone.
    old: Vec<ConnId>,
    now: Time,
    turn: u64,
    drained_at: Option<u64>,
    force_at: u64,
    idle_turns: u32,
    /// Something came out of this turn.
    moved: bool,
}

/// What a seed leaves.
pub struct Outcome {
    /// What happened, and how often.
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
            buffer_bytes: plan.limits.receive_buffer_bytes,
            buffers_max: plan.buffers,
            poison: true,
        };
        let (pool, side) = Pool::new(config).expect("sizes are drawn within their ranges");
        let mut state = State::new(rng, plan.clone(), pool.clone());
        state.canary = canary;
        state.trace = trace.then(Default::default);
        state.log(|| format!("{plan:#?}"));
        for tag in 0..plan.peers {
            let mut cover = std::mem::take(&mut state.cover);
            let sock = peer::draw(&mut state.rng, &plan, tag, &mut |fault| cover.fault(fault));
            state.cover = cover;
            state.socks.push(sock);
            state.active.push(tag);
        }
        let state = Rc::new(RefCell::new(state));
        let kernel = SimKernel::new(state.clone());
        let driver = Uring::with_kernel(kernel, side, plan.connections_max as u32);
        let core = Shard::new(
            plan.limits.clone(),
            plan.connections_max,
            plan.listeners,
            plan.framing,
            pool.clone(),
            (),
        );
        World {
            state,
            driver,
            core,
            pool,
            protocol: Protocol::default(),
            tasks: Vec::new(),
            live: Vec::new(),
            old: Vec::new(),
            now: Time::ZERO,
            turn: 0,
            drained_at: None,
            force_at: NEVER,
            idle_turns: 0,
            moved: false,
        }
    }

    /// What happens, for printing it after a violation.
    pub fn state(&self) -> Rc<RefCell<State>> {
        self.state.clone()
    }

    /// Runs until the shard is done.
    pub fn run(mut self) -> Outcome {
        let mut completions = Vec::new();
        let budget = self.state.borrow().plan.budget;
        loop {
            self.turn += 1;
            self.state.borrow_mut().turn = self.turn;
            self.state.borrow_mut().pass_turn();
            self.now = Time::from_nanos(self.state.borrow().now);
            self.moved = !completions.is_empty();
            self.take_turn(&mut completions);
            self.check();
            if self.core.is_done() {
                break;
            }
            let wait = self.wait();
            self.state.borrow_mut().connections = self.core.connections();
            let before = self.state.borrow().now;
            let turned = self.driver.turn(wait, budget, &mut completions);
            assert_eq!(turned, Ok(()), "the driver gave up");
            self.check_busy(before, !completions.is_empty());
        }
        self.end(completions)
    }

    fn take_turn(&mut self, completions: &mut Vec<Completion>) {
        self.protocol.begin_turn(self.turn);
        self.core.begin_turn(self.now);
        self.obey();
        self.work_off();
        for completion in completions.drain(..) {
            self.note(&completion);
            self.core.complete(completion);
            if let Some(id) = self.core.take_frames() {
                self.moved = true;
                self.run_frames(id);
            }
            self.work_off();
        }
        self.run_tasks();
        self.user_code();
        self.core.end_turn();
        self.work_off();
        let defers = !self.core.take_send_awaited() && self.state.borrow().plan.defers;
        if defers {
            self.state.borrow_mut().cover.fault(Fault::SendDeferred);
            self.driver.defer_sent();
        }
        for op in self.core.take_ops() {
            self.protocol.submitted(&op);
            self.moved = true;
            let mut state = self.state.borrow_mut();
            state.log(|| format!("core: {op:?}"));
            if let Op::Send { id, .. } = &op
                && let Some((_, block)) = self.live.iter().find(|(known, _)| known == id)
            {
                let sock = &mut state.socks[block.session.tag];
                (sock.untold, sock.sent_turn, sock.sent_at) = (true, self.turn, self.now.as_nanos());
            }
            drop(state);
            self.driver.submit(op);
        }
    }

    fn core_block(&self, id: ConnId) -> Option<usize> {
        self.live.iter().find(|(known, _)| *known == id).map(|(_, block)| block.session.tag)
    }

    /// Tells the shard to stop when it is time.
    fn obey(&mut self) {
        let mut state = self.state.borrow_mut();
        let now = state.now;
        if self.drained_at.is_none() {
            let idle = state.active.is_empty() || state.quiet_world;
            if !idle && self.turn < state.plan.turns {
                return;
            }
            if !self.live.is_empty() {
                state.cover.fault(Fault::Drained);
            }
            state.log(|| "drain".into());
            self.drained_at = Some(self.turn);
            state.drain_deadline = Some(now + state.plan.limits.drain.as_nanos() as u64);
            if let Some(after) = state.plan.force_after {
                self.force_at = now + after;
                state.alarm = state.alarm.min(self.force_at);
            }
            drop(state);
            return self.core.drain();
        }
        if now >= self.force_at {
            self.force_at = NEVER;
            if !self.live.is_empty() {
                state.cover.fault(Fault::Forced);
            }
            state.forced = true;
            drop(state);
            self.core.force();
        }
    }

    /// A completion reaches the core.
    fn note(&mut self, completion: &Completion) {
        self.protocol.completed(completion);
        let (id, bytes) = match completion {
            Completion::Received { id, lease } => (*id, lease.len()),
            Completion::Sent { id, .. } => (*id, 0),
            _ => return,
        };
        if let Some(tag) = self.core_block(id) {
            let sock = &mut self.state.borrow_mut().socks[tag];
            sock.arrived += bytes;
            sock.untold &= bytes > 0;
            sock.touch(self.now.as_nanos());
        }
    }

    fn work_off(&mut self) {
        while let Some(event) = self.core.next_event() {
            self.moved = true;
            match event {
                Event::Frames(id) => self.run_frames(id),
                Event::Accepted { socket, peer, .. } => {
                    let tag = self.state.borrow().descriptor(socket.0 as i32);
                    assert!(
                        peer.is_none_or(|peer| peer == address_of(tag)),
                        "a socket with another's address"
                    );
                    self.accept(socket, peer.map(|_| tag).unwrap_or(tag));
                }
                Event::Heartbeat(_) | Event::InputEnded(_) | Event::Elsewhere { .. } => {
                    panic!("nobody asked for this")
                }
                Event::Ended { id, block, reason, opened, handler } => {
                    let state = &mut *self.state.borrow_mut();
                    if let Some(task) = handler {
                        let parked = self.tasks[task as usize].take();
                        assert!(parked.is_some_and(|parked| parked.id == id), "another's handler");
                    }
                    let sock = &state.socks[block.session.tag];
                    assert_eq!(handler.is_some(), sock.parked, "a parked handler is forgotten");
                    assert_eq!(opened, sock.opened, "opened, or not");
                    service::close(state, &block, reason, self.now.as_nanos());
                    self.live.retain(|(known, _)| *known != id);
                    self.old.push(id);
                }
            }
        }
    }

    fn accept(&mut self, socket: Socket, tag: usize) {
        let state = self.state.clone();
        let mut state = state.borrow_mut();
        let unusual = state.plan.unusual;
        if state.rng.chance(unusual / 8) {
            state.cover.fault(Fault::AdmitRefuses);
            return self.core.refuse(socket);
        }
        let listener = state.socks[tag].listener;
        let session = Session { tag, ..Session::default() };
        let id = self.core.admit(socket, Some(address_of(tag)), listener, session);
        let Some(id) = id else { panic!("there is memory") };
        assert!(self.core.connections() <= state.plan.connections_max, "more connections than there may be");
        let Some(block) = self.core.block(id).cloned() else { panic!("an admitted connection has a block") };
        let sock = &mut state.socks[tag];
        sock.opened_at = self.now.as_nanos();
        sock.active_at = self.now.as_nanos();
        sock.taken_at = self.now.as_nanos();
        self.live.push((id, block.clone()));
        if service::open(&mut state, &block) {
            state.socks[tag].opened = true;
            self.core.opened(id);
        } else {
            self.core.refused(id);
        }
    }

    fn run_frames(&mut self, id: ConnId) {
        loop {
            match self.core.next_frame(id) {
                Next::Frame(frame, block) => {
                    let mut state = self.state.borrow_mut();
                    state.log(|| {
                        format!("frame of {} for {id}, connection {}", frame.len(), block.session.tag)
                    });
                    assert!(
                        !block.link.is_full(),
                        "{id}: a frame is handed out, and {} bytes are not taken",
                        block.link.outbox_bytes()
                    );
                    let called = service::call(&mut state, id, &block, frame);
                    drop(state);
                    if !self.settle(id, called) {
                        return;
                    }
                }
                Next::Nothing => return,
                Next::Bad(error, block) => {
                    service::malformed(&mut self.state.borrow_mut(), &block);
                    return self.core.finish(id, CloseReason::BadFrame(error));
                }
            }
        }
    }

    /// True if the next frame may follow.
    fn settle(&mut self, id: ConnId, called: Called) -> bool {
        match called {
            Called::Done => return true,
            Called::Failed => self.core.finish(id, CloseReason::HandlerError),
            Called::Panicked => self.core.abort(id, CloseReason::HandlerPanicked),
            Called::Parked(parked) => {
                let tag = self.core_block(id).expect("who is called is alive");
                let sock = &mut self.state.borrow_mut().socks[tag];
                (sock.parked, sock.wants_room) = (true, parked.wants_room.is_some());
                let free = self.tasks.iter().position(Option::is_none).unwrap_or(self.tasks.len());
                if free == self.tasks.len() {
                    self.tasks.push(None);
                }
                self.tasks[free] = Some(parked);
                self.core.handler_parked(id, free as u32);
                return true;
            }
        }
        false
    }

    /// Resumes the handlers whose time has come.
    fn run_tasks(&mut self) {
        for index in 0..self.tasks.len() {
            let due = match &self.tasks[index] {
                None => false,
                Some(Parked { wants_room: Some(flag), .. }) => flag.is_set(),
                Some(parked) => parked.due <= self.now.as_nanos(),
            };
            if !due {
                continue;
            }
            let Some(mut parked) = self.tasks[index].take() else { continue };
            parked.wants_room = None;
            self.moved = true;
            let id = parked.id;
            let called = service::resume(&mut self.state.borrow_mut(), parked);
            if let Called::Parked(parked) = called {
                self.tasks[index] = Some(parked);
                continue;
            }
            if let Some(tag) = self.core_block(id) {
                let sock = &mut self.state.borrow_mut().socks[tag];
                (sock.parked, sock.wants_room) = (false, false);
                sock.touch(self.now.as_nanos());
            }
            self.core.handler_done(id, index as u32, None);
            if self.settle(id, called) {
                self.run_frames(id);
                self.work_off();
            }
        }
    }

    /// What tasks of the service do beside its calls: give back frames, push, use names that are old.
    fn user_code(&mut self) {
        let state = &mut *self.state.borrow_mut();
        let now = self.now.as_nanos();
        for (_, block) in &self.live {
            let mut kept = block.session.kept.borrow_mut();
            if !kept.is_empty() {
                kept.retain(|(until, _)| *until > now);
            }
        }
        if state.plan.unusual == 0 || !state.rng.one_in(32) {
            return;
        }
        if let Some(last) = self.live.len().checked_sub(1) {
            let (_, block) = &self.live[state.rng.range(0, last as u64) as usize];
            if !block.link.is_full() && state.socks[block.session.tag].opened {
                state.cover.fault(Fault::PushElsewhere);
                service::say(state, block, 9.min(state.plan.payload_max));
                self.moved = true;
            }
        }
        if !self.old.is_empty() {
            state.cover.fault(Fault::OldName);
            let id = state.rng.pick(&self.old);
            assert!(self.core.block(id).is_none(), "{id} is gone, and is found");
            self.core.finish(id, CloseReason::Closed);
            self.core.handler_parked(id, 7);
            self.core.handler_done(id, 7, None);
            assert!(matches!(self.core.next_frame(id), Next::Nothing), "{id} is gone, and has a frame");
        }
    }

    /// How long the driver may wait, and when it has to be woken.
    fn wait(&mut self) -> Wait {
        let wait = self.core.wait();
        let mut state = self.state.borrow_mut();
        let mut alarm = self.force_at;
        let mut woken = state.now >= self.force_at;
        for parked in self.tasks.iter().flatten() {
            match &parked.wants_room {
                Some(flag) => woken |= flag.is_set(),
                None => alarm = alarm.min(parked.due),
            }
        }
        for (_, block) in &self.live {
            alarm = block.session.kept.borrow().iter().map(|(until, _)| *until).fold(alarm, u64::min);
        }
        if self.drained_at.is_none() && (state.active.is_empty() || self.turn + 1 >= state.plan.turns) {
            woken = true;
        }
        woken |= alarm <= state.now;
        state.alarm = alarm;
        if woken { Wait::No } else { wait }
    }
}
