//! What is known of the listeners of a shard: which accept, what came there and waits for a place.

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::net::SocketAddr;
use core::sync::atomic::{AtomicUsize, Ordering};
use core::time::Duration;

use super::starts::{Looked, Starts};
use crate::proxy::Expected;
use crate::{AcceptRate, ConnId, LaneId, Socket, Time};

/// How long accepting rests after the kernel refused it: ten attempts a second find a freed descriptor soon
/// and cost nothing.
pub(super) const RETRY: Duration = Duration::from_millis(100);

/// Sockets that wait while it is looked whether one behind them may have a reserved slot, of all listeners. Each holds a descriptor.
const LOOKS_AHEAD: usize = 64;

/// Slots beside those of all, and which peers may have them, by listener and address.
pub(in crate::shard) struct Reserve {
    pub slots: usize,
    pub admits: Box<dyn Fn(u16, SocketAddr) -> bool>,
}

/// Connections that all shards of a server may hold together.
#[derive(Debug)]
pub struct Quota {
    used: AtomicUsize,
    max: usize,
}

impl Quota {
    /// None is used yet.
    pub fn new(max: usize) -> Quota {
        Quota { used: AtomicUsize::new(0), max }
    }
}

/// Accepting, over all listeners of the shard.
pub(in crate::shard) struct Accepting {
    pub listeners: Vec<Listener>,
    /// What all shards of the server may hold together.
    pub quota: Option<Arc<Quota>>,
    /// True if another shard has room.
    pub others_have_room: bool,
    /// Connections handed out as [`Event::Accepted`](crate::shard::turn::Event::Accepted) and not answered yet, of all listeners.
    pub pending: usize,
    pub retry_at: Option<Time>,
    /// The rate of the server, which all of its shards share.
    pub rate: Option<Arc<AcceptRate>>,
    /// There is no token of it until then.
    pub held_by_rate: Option<Time>,
    pub reserve: Option<Reserve>,
    /// There is no room.
    pub is_full: bool,
    /// The rate holds a listener.
    pub is_held: bool,
    /// That a limit holds all listeners was told.
    pub told_paused: bool,
    /// How often.
    pub pauses: u64,
    /// Listeners were armed once.
    pub started: bool,
    /// None is armed yet, whatever there is room for.
    pub withheld: bool,
    /// A listener has something that waits.
    pub unsettled: bool,
    /// There may be a [time](Accepting::retry_at) to check again, or something to check at each turn.
    pub is_timed: bool,
    /// Connections whose PROXY header or handshake is awaited, and up to when was looked at what they sent.
    pub starting: usize,
    pub looked: Looked,
    /// The next time at which a connection may have to go whose PROXY header or handshake is awaited.
    pub starts_at: Option<Time>,
    /// One of them goes, and its place is taken.
    pub makes_room: bool,
    /// The one that goes since the table is full, until its place is free.
    pub leaves: Option<ConnId>,
    /// The listener whose waiting sockets are the first to have places.
    pub next_listener: usize,
    /// Connections that are there for last words alone.
    pub parting: usize,
}

/// One listener: what one of them waits for holds no other.
pub(in crate::shard) struct Listener {
    /// The lane of accepted connections.
    pub lane: LaneId,
    pub armed: bool,
    pub stopping: bool,
    /// Its socket is closed, for good.
    pub closed: bool,
    /// The header that its connections begin with, if there is one.
    pub header: Option<Expected>,
    /// Connections whose PROXY header or handshake is awaited.
    pub starts: Starts,
    /// Sockets that were on their way when a limit was reached, first in, first out.
    pub waiting: VecDeque<(Socket, Option<SocketAddr>)>,
    /// Connections handed out as [`Event::Accepted`](crate::shard::turn::Event::Accepted) and not answered yet.
    pub pending: usize,
    /// Those of them that waited before, and are counted; some may be answered while others are pending.
    pub waited: Vec<Socket>,
    /// Its accept failed, and rests.
    pub retry_at: Option<Time>,
    /// Nothing is accepted until then, by order of the services.
    pub postponed: Option<Time>,
    /// How many were put back into the queue for that time: at its front, in their order.
    pub put_back: usize,
    /// One was postponed: services are asked for one after the other, until one is let in or refused.
    pub one_by_one: bool,
    /// That it alone is paused was told.
    pub told_paused: bool,
}

impl Listener {
    fn new(lane: LaneId) -> Listener {
        Listener {
            lane,
            armed: false,
            stopping: false,
            closed: false,
            header: None,
            starts: Starts::default(),
            waiting: VecDeque::new(),
            pending: 0,
            waited: Vec::new(),
            retry_at: None,
            postponed: None,
            put_back: 0,
            one_by_one: false,
            told_paused: false,
        }
    }

    /// True while the services are to be asked for no other newcomer.
    pub(super) fn awaits_answer(&self) -> bool {
        self.one_by_one && self.pending > 0
    }

    /// True while newcomers are put off, or the one that was is asked for again.
    pub(super) fn is_put_off(&self) -> bool {
        self.postponed.is_some() || self.awaits_answer()
    }

    /// Newcomers are put off no longer, if their time is over.
    pub(super) fn go_on(&mut self, now: Time) {
        if self.postponed.take_if(|until| *until <= now).is_some() {
            self.put_back = 0;
        }
    }
}

impl Accepting {
    pub(in crate::shard) fn new(listeners: u16) -> Accepting {
        Accepting {
            listeners: (0..listeners).map(|_| Listener::new(LaneId::FIRST)).collect(),
            quota: None,
            others_have_room: false,
            pending: 0,
            retry_at: None,
            rate: None,
            held_by_rate: None,
            reserve: None,
            is_full: false,
            is_held: false,
            told_paused: false,
            pauses: 0,
            started: false,
            withheld: false,
            unsettled: false,
            is_timed: true,
            starting: 0,
            looked: Looked::default(),
            starts_at: None,
            makes_room: false,
            leaves: None,
            next_listener: 0,
            parting: 0,
        }
    }

    /// Adds listeners behind those that are there.
    pub(in crate::shard) fn add_listeners(&mut self, listeners: u16, lane: LaneId) {
        self.listeners.extend((0..listeners).map(|_| Listener::new(lane)));
    }

    /// Has a place for what waits of a listener: another shard may pass on what it accepted at one that this one has not.
    pub(super) fn know(&mut self, listener: u16) {
        while self.listeners.len() <= usize::from(listener) {
            self.listeners.push(Listener { closed: true, ..Listener::new(LaneId::FIRST) });
        }
    }

    pub(super) fn at(&mut self, listener: u16) -> Option<&mut Listener> {
        self.listeners.get_mut(usize::from(listener))
    }

    pub(super) fn lane_of(&self, listener: u16) -> LaneId {
        self.listeners.get(usize::from(listener)).map_or(LaneId::FIRST, |listener| listener.lane)
    }

    /// The header that connections of a listener begin with, if there is one.
    pub(super) fn expected(&self, listener: u16) -> Option<Expected> {
        self.listeners.get(usize::from(listener))?.header
    }

    /// Expects this header on connections of a listener.
    pub(super) fn expect(&mut self, listener: u16, header: Expected) {
        if let Some(listener) = self.at(listener) {
            listener.header = Some(header);
        }
    }

    /// True if there is no [time](Accepting::retry_at) to check again, and nothing to check at each turn.
    pub(in crate::shard) fn is_settled(&self) -> bool {
        self.started
            && self.retry_at.is_none()
            && self.held_by_rate.is_none()
            && !self.unsettled
            && self.starts_at.is_none()
            && !(self.is_full && self.quota.is_some())
    }

    /// True if something is checked at each turn, or the time has come to end one that begins.
    #[cold]
    pub(super) fn rests(&self, now: Time) -> bool {
        !self.started
            || self.retry_at.is_some()
            || self.held_by_rate.is_some()
            || self.unsettled
            || self.starts_at.is_some_and(|at| at <= now)
    }

    /// The rate of the server has no token until then, or has one.
    pub(super) fn hold_by_rate(&mut self, until: Option<Time>) {
        self.held_by_rate = until;
        self.is_timed |= until.is_some();
    }

    /// The time to check again: accepting rests after an error, the rate has a token then, services put newcomers off, one that begins
    /// has to go, and no other shard reports that it has room.
    pub(in crate::shard) fn retry_at(&self, now: Time) -> Option<Time> {
        let held_by_others = (self.is_full || self.waits()) && self.quota.is_some();
        let all = [self.held_by_rate, self.retry_at, self.starts_at, held_by_others.then(|| now + RETRY)];
        let each = self.listeners.iter().flat_map(|listener| [listener.postponed, listener.retry_at]);
        all.into_iter().chain(each).flatten().min()
    }

    /// Sockets that wait for a place.
    pub(super) fn waiting(&self) -> usize {
        self.listeners.iter().map(|listener| listener.waiting.len()).sum()
    }

    fn waits(&self) -> bool {
        self.listeners.iter().any(|listener| !listener.waiting.is_empty())
    }

    /// Notes whether anything waits.
    pub(super) fn settle(&mut self) {
        self.unsettled = self.listeners.iter().any(|listener| {
            !listener.waiting.is_empty() || listener.postponed.is_some() || listener.retry_at.is_some()
        });
    }

    /// True for a peer that may have a reserved slot.
    pub(super) fn is_reserved(&self, listener: u16, peer: Option<SocketAddr>) -> bool {
        let Some(Reserve { admits, .. }) = &self.reserve else { return false };
        peer.is_some_and(|peer| admits(listener, peer))
    }

    /// Sockets of a listener at most that are accepted though none has room, to see whether one may have a reserved slot.
    pub(super) fn looks_ahead(&self) -> usize {
        match self.reserve {
            Some(_) => (LOOKS_AHEAD / self.listeners.len().max(1)).max(1),
            None => 0,
        }
    }

    /// The services answered at `now` for a newcomer that was not postponed.
    pub(super) fn answered(&mut self, listener: u16, now: Time) {
        self.one_answered(listener);
        let Some(listener) = self.at(listener) else { return };
        // Those behind it are asked for in the next turn: this one may begin a handshake before, and those have a limit.
        if core::mem::take(&mut listener.one_by_one) && !listener.waiting.is_empty() {
            listener.postponed = listener.postponed.or(Some(now));
        }
    }

    pub(super) fn one_answered(&mut self, listener: u16) {
        self.pending -= 1;
        let Some(listener) = self.at(listener) else { return };
        listener.pending -= 1;
        if listener.pending == 0 {
            listener.waited.clear();
        }
    }

    /// Returns the place of a connection or a socket that is gone.
    pub(in crate::shard) fn give_back(&self) {
        if let Some(quota) = &self.quota {
            quota.used.fetch_sub(1, Ordering::Relaxed);
        }
    }

    pub(super) fn quota_left(&self) -> bool {
        self.quota.as_ref().is_none_or(|quota| quota.used.load(Ordering::Relaxed) < quota.max)
    }

    /// Connections of all shards of the server, if they share a limit.
    pub(in crate::shard) fn used_by_all(&self) -> Option<usize> {
        self.quota.as_ref().map(|quota| quota.used.load(Ordering::Relaxed))
    }

    /// Takes one of the server's connections, if it has one left, or not as many as `beyond` more.
    pub(super) fn take_quota(&self, beyond: usize) -> bool {
        let Some(quota) = &self.quota else { return true };
        let more = |used: usize| (used < quota.max + beyond).then_some(used + 1);
        quota.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    pub(in crate::shard) fn is_stopped(&self) -> bool {
        !self.waits() && self.listeners_left() == 0
    }

    /// True if a listener of a lane is open, or something that came there was not answered.
    pub(in crate::shard) fn is_open(&self, lane: LaneId) -> bool {
        let of_lane = |listener: &&Listener| listener.lane == lane;
        let mut all = self.listeners.iter().filter(of_lane);
        all.any(|listener| !listener.closed || !listener.waiting.is_empty() || listener.pending > 0)
    }

    /// Listeners whose sockets are open.
    pub(in crate::shard) fn listeners_left(&self) -> usize {
        self.listeners.iter().filter(|listener| !listener.closed).count()
    }
}
