//! Another shard of the same server: takes what this one passes on, passes some of it back, shares the quota.
//!
//! It is a real state machine over nothing: its connections are opened, kept for a while, and aborted. A socket is
//! under way in a letter, as between threads.

use std::sync::Arc;

use ringserve_buf::Pool;
use ringserve_core::{
    CloseReason, Completion, ConnId, Event, Limits, Op, Quota, ReceiveEnd, Shard, Socket, Time,
};

use super::Core;
use crate::bytes::AnyFraming;
use crate::faults::Fault;
use crate::kernel::{State, address_of};
use crate::plan;
use crate::plan::NEVER;

/// Turns of the other shard in which its connections, which nobody uses, are closed.
const TURNS_TO_DRAIN: u32 = 8;

/// A socket under way.
struct Letter {
    due: u64,
    /// To the shard that is tested, not from it.
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

/// See the module.
pub struct Elsewhere {
    plan: plan::Elsewhere,
    core: Shard<usize, AnyFraming, ()>,
    quota: Arc<Quota>,
    letters: Vec<Letter>,
    kept: Vec<Kept>,
    draining: bool,
    /// What the shards know of each other's room.
    told: (bool, bool),
}

impl Elsewhere {
    /// The other shard, and the quota for both.
    pub fn new(plan: plan::Elsewhere, framing: AnyFraming, pool: Pool) -> (Elsewhere, Arc<Quota>) {
        let quota = Arc::new(Quota::new(plan.quota));
        let limits = Limits { idle: None, first_frame: None, ..Limits::default() };
        let mut core = Shard::new(limits, plan.connections_max, 0, framing, pool, ());
        core.share_quota(quota.clone());
        let other = Elsewhere {
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

    /// The shard that is tested has no room for this socket.
    pub fn take(&mut self, state: &mut State, socket: Socket, listener: u16) {
        state.cover.fault(Fault::PassedOn);
        if state.rng.one_in(12) {
            state.cover.fault(Fault::PassedAway);
            return state.close_passed(socket);
        }
        self.post(state, false, socket, listener);
    }

    fn post(&mut self, state: &mut State, back: bool, socket: Socket, listener: u16) {
        let due = state.now + state.rng.spread(10_000, self.plan.mail_max.max(10_001));
        self.letters.push(Letter { due, back, socket, listener });
    }

    /// Sockets that come back by now.
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

    /// A turn of the other shard, whose clock is ahead by `ahead` nanoseconds.
    pub fn turn(&mut self, state: &mut State, now: Time, ahead: u64) {
        self.core.begin_turn(Time::from_nanos(now.as_nanos() + ahead), 0);
        if state.drain_deadline.is_some() && !self.draining {
            self.draining = true;
            self.core.drain();
            // What did not reach it in time goes on to the next shard, which is this one.
            for letter in &mut self.letters {
                letter.back |= !state.rng.one_in(4);
            }
        }
        let now = now.as_nanos();
        let mut index = 0;
        while index < self.letters.len() {
            if self.letters[index].back || self.letters[index].due > now {
                index += 1;
                continue;
            }
            let Letter { socket, listener, .. } = self.letters.remove(index);
            let tag = state.descriptor(socket.0 as i32);
            self.core.accepted_elsewhere(listener, socket, Some(address_of(tag)));
            self.work_off(state);
        }
        for kept in &self.kept {
            if kept.until <= now || self.draining {
                self.core.abort(kept.id, CloseReason::Aborted);
            }
        }
        loop {
            self.work_off(state);
            self.core.end_turn();
            let ops: Vec<Op> = self.core.take_ops().collect();
            if ops.is_empty() && !self.core.has_events() {
                break;
            }
            for op in ops {
                self.carry_out(state, op);
            }
        }
        self.core.check();
    }

    fn work_off(&mut self, state: &mut State) {
        while let Some(event) = self.core.next_event() {
            match event {
                Event::Accepted { socket, peer, listener } => {
                    let tag = state.descriptor(socket.0 as i32);
                    assert_eq!(peer, Some(address_of(tag)), "a socket with another's address");
                    assert_eq!(listener, state.socks[tag].listener, "a socket with another's listener");
                    if state.rng.one_in(8) {
                        state.cover.fault(Fault::PassedRefused);
                        self.core.refuse(socket);
                        continue;
                    }
                    let id = self.core.admit(socket, peer, listener, tag).expect("there is memory");
                    state.cover.fault(Fault::PassedTaken);
                    let until = state.now + state.rng.spread(10_000, self.plan.keeps_max);
                    self.kept.push(Kept { id, tag, until });
                    self.core.opened(id);
                }
                Event::Elsewhere { socket, listener, .. } => self.post(state, true, socket, listener),
                Event::Ended { .. } => {}
                other => panic!("the other shard has nothing to do with {other:?}"),
            }
        }
    }

    fn carry_out(&mut self, state: &mut State, op: Op) {
        match op {
            // Its own file table has it from now on.
            Op::Adopt { id, socket } => {
                let tag = state.take_passed(socket);
                assert!(self.kept.iter().any(|kept| kept.id == id && kept.tag == tag), "{id} is not {tag}");
            }
            Op::Refuse { socket } => state.close_passed(socket),
            Op::Receive { .. } => {}
            Op::ReceiveStop { id } | Op::ShutdownInput { id } => {
                self.core.complete(Completion::ReceiveEnded { id, end: ReceiveEnd::Stopped });
            }
            Op::Close { id, .. } => {
                let place = self.kept.iter().position(|kept| kept.id == id).expect("it was adopted");
                state.drop_passed(self.kept.swap_remove(place).tag);
                self.core.complete(Completion::Closed { id });
            }
            other => panic!("the other shard asks for {other:?}"),
        }
    }

    /// Each shard tells whether it has room.
    pub fn offer_room(&mut self, state: &mut State, core: &mut Core) {
        if core.slots_left() == 0 && self.used() >= self.plan.quota {
            return;
        }
        // What one knows of the other is a little old at times.
        if state.rng.one_in(4) {
            return;
        }
        let serves = !self.draining;
        let (here, there) = (core.slots_left(), self.core.slots_left());
        let hopes = state.rng.one_in(2);
        self.told = (here == 0 && there > 0 && serves, there == 0 && (here > 0 || hopes) && serves);
        core.set_room_elsewhere(self.told.0);
        self.core.set_room_elsewhere(self.told.1);
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

    /// When something is due here.
    pub fn next_due(&self) -> u64 {
        let letters = self.letters.iter().map(|letter| letter.due);
        letters.chain(self.kept.iter().map(|kept| kept.until)).min().unwrap_or(NEVER)
    }

    /// Panics unless every connection of both shards is counted, once.
    pub fn check(&self, here: usize) {
        let used = self.used();
        assert!(used <= self.plan.quota, "{used} connections, and the server may have {}", self.plan.quota);
        assert_eq!(used, here + self.core.connections(), "the quota counts others than there are");
        assert!(self.core.connections() <= self.plan.connections_max, "the other shard's table overflows");
    }

    /// The tested shard is done: so is this one, and what is under way goes nowhere.
    pub fn end(&mut self, state: &mut State, now: Time, ahead: u64) {
        // The tested one may be done in the turn in which both were told to drain.
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
