//! Another shard of the same server: it takes sockets that this one passes on, passes some of them
//! back, shares the quota.
//!
//! It is a real state machine without a kernel: its connections are opened, kept for a while, and
//! aborted. A socket in transit is in a letter, as between threads.

use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Waker;

use ringserve_buf::Pool;
use ringserve_core::framing::Framing;
use ringserve_core::{
    CloseReason, Completion, ConnId, EndedConn, Frames, Lane, Limits, Op, Quota, ReceiveEnd, RefusedBy,
    ServerLimits, Shard, Socket, Time,
};

use super::Core;
use crate::bytes::AnyFraming;
use crate::faults::Fault;
use crate::kernel::{State, address_of};
use crate::plan;
use crate::plan::NEVER;

/// Turns of the other shard in which its connections, which are unused, are closed.
const TURNS_TO_DRAIN: u32 = 8;

/// A socket in transit.
struct Letter {
    due: u64,
    /// True if it goes to the shard under test, not from it.
    back: bool,
    socket: Socket,
    listener: u16,
}

/// A connection of the other shard.
struct Kept {
    id: ConnId,
    tag: usize,
    until: u64,
}

type OtherCore = Shard;

/// The other shard of the server, with the sockets in transit to it and back.
pub struct OtherShard {
    plan: plan::OtherShard,
    core: OtherCore,
    quota: Arc<Quota>,
    letters: Vec<Letter>,
    kept: Vec<Kept>,
    draining: bool,
    /// The shards' knowledge of each other's room.
    told: (bool, bool),
}

impl OtherShard {
    /// Creates the other shard, and the quota for both.
    pub fn new(plan: plan::OtherShard, framing: AnyFraming, pool: Pool) -> (OtherShard, Arc<Quota>) {
        let quota = Arc::new(Quota::new(plan.quota));
        let limits = Limits::default().idle_timeout(None).first_frame_timeout(None);
        let mut core = Shard::new(
            ServerLimits::default(),
            limits,
            plan.connections_max,
            0,
            Rc::new(framing).encoding(),
            pool,
            (),
        );
        core.share_quota(quota.clone());
        let other = OtherShard {
            plan,
            core,
            quota: quota.clone(),
            letters: Vec::new(),
            kept: Vec::new(),
            draining: false,
            told: (false, false),
        };
        (other, quota)
    }

    /// Takes a socket for which the shard under test has no room.
    pub fn take(&mut self, state: &mut State, socket: Socket, listener: u16) {
        state.cover.fault(Fault::PassedOn);
        if state.rng.one_in(12) {
            state.cover.fault(Fault::PassedAway);
            return state.close_passed(socket);
        }
        post(&mut self.letters, self.plan.letter_max, state, false, socket, listener);
    }

    /// Sockets that have come back by now.
    pub fn returned(&mut self, state: &mut State, now: u64) -> Vec<(Socket, u16)> {
        let (due, rest) = std::mem::take(&mut self.letters)
            .into_iter()
            .partition(|letter| letter.back && letter.due <= now);
        self.letters = rest;
        let due: Vec<Letter> = due;
        for _ in &due {
            let drains = state.drain_deadline.is_some();
            state.cover.fault(if drains { Fault::PassedAtTheEnd } else { Fault::PassedBack });
        }
        due.into_iter().map(|letter| (letter.socket, letter.listener)).collect()
    }

    /// Takes a turn of the other shard, whose clock leads by `ahead` nanoseconds.
    pub fn turn(&mut self, state: &mut State, now: Time, ahead: u64) {
        let now = Time::from_nanos(now.as_nanos() + ahead);
        let mut completions = Vec::new();
        // Its driver answers at once; turns are taken until there is nothing more to do.
        loop {
            let mut lane = Other {
                plan: &self.plan,
                state,
                letters: &mut self.letters,
                kept: &mut self.kept,
                draining: &mut self.draining,
            };
            self.core.turn(now, &mut completions, &mut lane);
            let ops: Vec<Op> = self.core.take_ops().collect();
            if ops.is_empty() {
                break;
            }
            for op in ops {
                completions.extend(self.carry_out(state, op));
            }
        }
        self.core.check();
    }

    fn carry_out(&mut self, state: &mut State, op: Op) -> Option<Completion> {
        match op {
            // It is in the shard's own file table from now on.
            Op::Adopt { id, socket } => {
                let tag = state.take_passed(socket);
                assert!(self.kept.iter().any(|kept| kept.id == id && kept.tag == tag), "{id} is not {tag}");
                None
            }
            Op::Refuse { socket } => {
                state.close_passed(socket);
                None
            }
            Op::Receive { .. } | Op::ReceiveOnce { .. } => None,
            Op::ReceiveStop { id } | Op::ShutdownInput { id } => {
                Some(Completion::ReceiveEnded { id, end: ReceiveEnd::Stopped })
            }
            Op::Close { id, .. } => {
                let place = self.kept.iter().position(|kept| kept.id == id).expect("it was adopted");
                state.drop_passed(self.kept.swap_remove(place).tag);
                Some(Completion::Closed { id })
            }
            other => panic!("the other shard asks for {other:?}"),
        }
    }

    /// Makes each shard report whether it has room.
    pub fn offer_room(&mut self, state: &mut State, core: &mut Core) {
        if core.slots_left() == 0 && self.used() >= self.plan.quota {
            return;
        }
        // The shards' knowledge of each other is a little old at times.
        if state.rng.one_in(4) {
            return;
        }
        let serves = !self.draining;
        let (here, there) = (core.slots_left(), self.core.slots_left());
        let hopes = state.rng.one_in(2);
        self.told = (here == 0 && there > 0 && serves, there == 0 && (here > 0 || hopes) && serves);
        core.set_others_have_room(self.told.0);
        self.core.set_others_have_room(self.told.1);
    }

    /// Connections of the server, as its quota counts them.
    pub fn used(&self) -> usize {
        // It has no accessor, since a server needs none.
        let text = format!("{:?}", self.quota);
        let digits = text.split("used: ").nth(1).and_then(|rest| rest.split(',').next());
        digits.and_then(|digits| digits.parse().ok()).unwrap_or_else(|| panic!("no number in {text}"))
    }

    /// True if the server may have one more connection.
    pub fn quota_left(&self) -> bool {
        self.used() < self.plan.quota
    }

    /// True if the tested shard knows that there is room here.
    pub fn is_known_to_have_room(&self) -> bool {
        self.told.0
    }

    /// Time at which something is due here.
    pub fn next_due(&self) -> u64 {
        let letters = self.letters.iter().map(|letter| letter.due);
        letters.chain(self.kept.iter().map(|kept| kept.until)).min().unwrap_or(NEVER)
    }

    /// Panics unless every connection of both shards is counted, once.
    pub fn check(&self, here: usize) {
        let used = self.used();
        assert!(used <= self.plan.quota, "{used} connections, and the server may have {}", self.plan.quota);
        assert_eq!(used, here + self.core.all_connections(), "the quota counts others than there are");
        assert!(
            self.core.all_connections() <= self.plan.connections_max,
            "the other shard's table overflows"
        );
    }

    /// Ends this shard with the tested one; sockets in transit go nowhere.
    pub fn end(&mut self, state: &mut State, now: Time, ahead: u64) {
        // The tested one may be done in the turn in which both were ordered to drain.
        for _ in 0..TURNS_TO_DRAIN {
            self.turn(state, now, ahead);
        }
        for letter in std::mem::take(&mut self.letters) {
            state.close_passed(letter.socket);
        }
        assert!(self.core.is_done(), "the other shard has connections left");
        assert_eq!(self.used(), 0, "a connection was not given back");
    }
}

/// Puts a socket in transit.
fn post(
    letters: &mut Vec<Letter>,
    letter_max: u64,
    state: &mut State,
    back: bool,
    socket: Socket,
    listener: u16,
) {
    let due = state.now + state.rng.spread(10_000, letter_max.max(10_001));
    letters.push(Letter { due, back, socket, listener });
}

/// The layer above the other shard.
struct Other<'a> {
    plan: &'a plan::OtherShard,
    state: &'a mut State,
    letters: &'a mut Vec<Letter>,
    kept: &'a mut Vec<Kept>,
    draining: &'a mut bool,
}

impl Lane for Other<'_> {
    fn begin(&mut self, core: &mut OtherCore) {
        let state = &mut *self.state;
        if state.drain_deadline.is_some() && !*self.draining {
            *self.draining = true;
            core.drain();
            // Sockets that did not reach it in time go on to the next shard, which is the tested
            // one.
            for letter in &mut *self.letters {
                letter.back |= !state.rng.one_in(4);
            }
        }
        let mut index = 0;
        while index < self.letters.len() {
            if self.letters[index].back || self.letters[index].due > self.state.now {
                index += 1;
                continue;
            }
            let Letter { socket, listener, .. } = self.letters.remove(index);
            let tag = self.state.descriptor(socket.0 as i32);
            core.take_handed_off(listener, socket, Some(address_of(tag)));
            core.dispatch(self);
        }
    }

    fn accepted(&mut self, core: &mut OtherCore, socket: Socket, peer: Option<SocketAddr>, listener: u16) {
        let state = &mut *self.state;
        let tag = state.descriptor(socket.0 as i32);
        assert_eq!(peer, Some(address_of(tag)), "a socket with another's address");
        assert_eq!(listener, state.socks[tag].listener, "a socket with another's listener");
        if state.rng.one_in(8) {
            state.cover.fault(Fault::PassedRefused);
            return core.refuse(socket, listener, RefusedBy::Admit);
        }
        let id = core.admit::<()>(socket, peer, listener).expect("there is memory");
        state.cover.fault(Fault::PassedTaken);
        let until = state.now + state.rng.spread(10_000, self.plan.keeps_max);
        self.kept.push(Kept { id, tag, until });
        core.opened(id);
    }

    fn hand_off(&mut self, _: &mut OtherCore, socket: Socket, _: Option<SocketAddr>, listener: u16) {
        post(self.letters, self.plan.letter_max, self.state, true, socket, listener);
    }

    fn ended(&mut self, _: &mut OtherCore, _: EndedConn) {}

    fn connected(&mut self, _: &mut OtherCore, id: ConnId) {
        panic!("the other shard connected {id}");
    }

    fn frames(&mut self, frames: &mut Frames<'_, ()>) {
        panic!("the other shard has frames of {}", frames.id());
    }

    fn heartbeat(&mut self, _: &mut OtherCore, id: ConnId) {
        panic!("the other shard asks {id} for a sign of life");
    }

    fn input_ended(&mut self, _: &mut OtherCore, id: ConnId) {
        panic!("the other shard holds {id} open");
    }

    fn attend(&mut self, core: &mut OtherCore) {
        for kept in &*self.kept {
            if kept.until <= self.state.now || *self.draining {
                core.abort(kept.id, CloseReason::Aborted);
            }
        }
    }

    fn wake(&mut self, _: &mut OtherCore, id: ConnId, _: Waker) {
        panic!("a task waits for {id} of the other shard");
    }
}
