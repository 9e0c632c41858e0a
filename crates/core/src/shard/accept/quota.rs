//! Needs of new connections in addition to a slot of this shard: a part of what all shards may hold
//! together, and a token of the server's rate. Peers that an operator names need no token, and have
//! places beyond those of the others.

use alloc::boxed::Box;
use alloc::sync::Arc;
use core::net::SocketAddr;
use core::sync::atomic::{AtomicUsize, Ordering};

use crate::shard::Shard;
use crate::{AcceptRate, Observer, Time};

/// Connections that all shards of a server may hold together.
#[derive(Debug)]
pub struct Quota {
    used: AtomicUsize,
    max: usize,
}

impl Quota {
    /// A quota of which nothing is used yet.
    pub fn new(max: usize) -> Quota {
        Quota { used: AtomicUsize::new(0), max }
    }
}

/// This shard's view of what all shards may hold together.
#[derive(Default)]
pub(super) struct Places {
    quota: Option<Arc<Quota>>,
    /// Whether another shard has room for sockets beyond this one's table.
    has_room_elsewhere: bool,
}

impl Places {
    /// True if the shards share a limit.
    pub(super) fn are_shared(&self) -> bool {
        self.quota.is_some()
    }

    /// Connections of all shards, if they share a limit.
    pub(super) fn used(&self) -> Option<usize> {
        self.quota.as_ref().map(|quota| quota.used.load(Ordering::Relaxed))
    }

    #[inline]
    pub(super) fn are_left(&self) -> bool {
        self.quota.as_ref().is_none_or(|quota| quota.used.load(Ordering::Relaxed) < quota.max)
    }

    /// Takes one of the server's connections, if fewer than the limit and `beyond` more are used.
    pub(super) fn take(&self, beyond: usize) -> bool {
        let Some(quota) = &self.quota else { return true };
        let more = |used: usize| (used < quota.max + beyond).then_some(used + 1);
        quota.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    /// Returns the place of a connection or a socket that is gone.
    pub(super) fn give_back(&self) {
        if let Some(quota) = &self.quota {
            quota.used.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// The rate of the server, which all of its shards share.
#[derive(Default)]
pub(super) struct Tokens {
    rate: Option<Arc<AcceptRate>>,
    /// The time until which there is no token, as far as this shard knows.
    awaited_until: Option<Time>,
    /// Whether a listener is held back by it.
    is_holding: bool,
}

impl Tokens {
    pub(super) fn awaited_until(&self) -> Option<Time> {
        self.awaited_until
    }

    pub(super) fn are_awaited(&self) -> bool {
        self.awaited_until.is_some()
    }

    /// Notes that this shard begins to accept.
    pub(super) fn begin(&self, now: Time) {
        if let Some(rate) = &self.rate {
            rate.begin(now);
        }
    }

    /// Takes a token; false if there is none.
    fn take(&mut self, now: Time) -> bool {
        let Some(rate) = &self.rate else { return true };
        let taken = rate.take(now);
        self.awaited_until = taken.map_or_else(Some, |()| rate.held_until(now));
        taken.is_ok()
    }

    fn give_back(&mut self, now: Time) {
        if let Some(rate) = &self.rate {
            rate.give_back();
            self.awaited_until = rate.held_until(now);
        }
    }

    /// Ends the wait for a token, if the time has come.
    pub(super) fn go_on(&mut self, now: Time) {
        self.awaited_until.take_if(|at| *at <= now);
    }

    /// Ends the need for tokens.
    pub(super) fn stop(&mut self) {
        self.awaited_until = None;
    }

    /// Notes whether it holds a listener back. True if that is new.
    pub(super) fn hold(&mut self, holds: bool) -> bool {
        let before = core::mem::replace(&mut self.is_holding, holds);
        holds && !before
    }
}

/// Sockets of all listeners that may wait while a search is made for one that may have a reserved
/// slot. Each holds a descriptor.
const LOOKS_AHEAD: usize = 64;

/// Slots in addition to those of all, and the peers that may have them, by listener and address.
pub(super) struct Reserve {
    slots: usize,
    admits: Box<dyn Fn(u16, SocketAddr) -> bool>,
}

impl super::Accepting {
    /// The number of reserved slots, for a peer that may have one.
    pub(super) fn reserved_for(&self, listener: u16, peer: Option<SocketAddr>) -> Option<usize> {
        let Reserve { slots, admits } = self.reserve.as_ref()?;
        admits(listener, peer?).then_some(*slots)
    }

    /// The most sockets of a listener that are accepted although none has room, to see whether one
    /// may have a reserved slot.
    pub(super) fn looks_ahead(&self) -> usize {
        match self.reserve {
            Some(_) => (LOOKS_AHEAD / self.listeners.len().max(1)).max(1),
            None => 0,
        }
    }
}

impl<O: Observer> Shard<O> {
    /// Counts this shard's connections together with those of others. Before the first turn.
    pub fn share_quota(&mut self, quota: Arc<Quota>) {
        self.accepting.places.quota = Some(quota);
    }

    /// Takes connections at a rate that all shards of the server share. Further ones wait. Before
    /// the first turn.
    pub fn share_rate(&mut self, rate: Arc<AcceptRate>) {
        self.accepting.tokens.rate = Some(rate);
    }

    /// Keeps `slots` beyond the limit of accepted connections for the peers that `admits` accepts
    /// by listener and address. They need no token of a rate either. If others wait, the shard
    /// accepts further ones to find such peers. Before the first turn.
    pub fn reserve(&mut self, slots: usize, admits: impl Fn(u16, SocketAddr) -> bool + 'static) {
        self.lanes.reserve(slots);
        self.accepting.reserve = Some(Reserve { slots, admits: Box::new(admits) });
    }

    /// Sets whether another shard has room for sockets beyond this one's table. Accepting goes on
    /// from the next turn.
    pub fn set_others_have_room(&mut self, room: bool) {
        self.accepting.places.has_room_elsewhere = room;
    }

    /// Takes a token of the server's rate; false if there is none. A drain lets waiting sockets in.
    pub(super) fn take_token(&mut self) -> bool {
        if self.has_stopped() {
            return true;
        }
        let taken = self.accepting.tokens.take(self.now);
        self.accepting.is_timed |= self.accepting.tokens.are_awaited();
        taken
    }

    /// Gives back the token of a socket that does not need it.
    pub(super) fn give_token_back(&mut self) {
        if !self.has_stopped() {
            self.accepting.tokens.give_back(self.now);
            self.accepting.is_timed |= self.accepting.tokens.are_awaited();
        }
    }

    /// Accepted connections for which this shard has room.
    pub fn slots_left(&self) -> usize {
        self.lanes.inbound_left(self.accepting.asked)
    }

    pub(super) fn has_slot(&self) -> bool {
        self.slots_left() > 0
    }

    pub(super) fn has_room(&self) -> bool {
        self.has_slot() && self.accepting.places.are_left()
    }

    /// True if newly accepted sockets go to another shard.
    pub(super) fn hands_off(&self) -> bool {
        !self.has_stopped()
            && !self.has_slot()
            && self.accepting.places.has_room_elsewhere
            && self.accepting.places.are_left()
    }
}
