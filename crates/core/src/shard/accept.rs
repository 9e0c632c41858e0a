//! Accepting: pauses at limits, resumes when there is room.

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::net::SocketAddr;
use core::sync::atomic::{AtomicUsize, Ordering};
use core::time::Duration;

use super::Shard;
use super::turn::Event;
use crate::conn::Opened;
use crate::outlet::ConnShared;
use crate::proxy::Expected;
use crate::{
    AcceptEnd, AcceptRate, CloseReason, ConnId, ConnStats, LaneId, Observer, Op, RefusedBy, Socket, Time,
};

/// How long accepting rests after the kernel refused it: ten attempts a second find a freed descriptor soon
/// and cost nothing.
const RETRY: Duration = Duration::from_millis(100);

/// Sockets that wait while it is looked whether one behind them may have a reserved slot. Each holds a descriptor.
const LOOKS_AHEAD: usize = 64;

/// Connections that are there for last words alone, at once: as many as one turn takes completions of. And the part of the table
/// that they may have.
const PARTING_MAX: usize = 256;
const PARTING_PART: usize = 16;

/// Slots beside those of all, and which peers may have them, by listener and address.
struct Reserve {
    slots: usize,
    admits: Box<dyn Fn(u16, SocketAddr) -> bool>,
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
pub(super) struct Accepting {
    listeners: Vec<Listener>,
    /// What all shards of the server may hold together.
    quota: Option<Arc<Quota>>,
    /// True if another shard has room.
    others_have_room: bool,
    /// Sockets that were on their way when the limit was reached, first in, first out.
    waiting: VecDeque<(u16, Socket, Option<SocketAddr>)>,
    /// Connections handed out as [`Event::Accepted`] and not answered yet.
    pending: usize,
    /// Those of them that waited before, and are counted; some may be answered while others are pending.
    waited: Vec<Socket>,
    retry_at: Option<Time>,
    /// The rate of the server, which all of its shards share.
    rate: Option<Arc<AcceptRate>>,
    /// There is no token of it until then.
    held_by_rate: Option<Time>,
    reserve: Option<Reserve>,
    /// A limit or the rate holds accepting back.
    paused: bool,
    /// That a limit does was told.
    told_paused: bool,
    /// Listeners were armed once.
    started: bool,
    /// None is armed yet, whatever there is room for.
    withheld: bool,
    /// Connections whose PROXY header or handshake is awaited.
    pub(super) starting: usize,
    /// Connections that are there for last words alone.
    pub(super) parting: usize,
    /// Nothing is accepted until then, by order of the services.
    postponed: Option<Time>,
    /// How many were put back into the queue for that time: at its front, in their order.
    put_back: usize,
    /// One was postponed: services are asked for one after the other, until one is let in or refused.
    one_by_one: bool,
}

#[derive(Clone, Copy)]
struct Listener {
    /// The lane of accepted connections.
    lane: LaneId,
    armed: bool,
    stopping: bool,
    /// Its socket is closed, for good.
    closed: bool,
    /// The header that its connections begin with, if there is one.
    header: Option<Expected>,
}

impl Listener {
    fn new(lane: LaneId) -> Listener {
        Listener { lane, armed: false, stopping: false, closed: false, header: None }
    }
}

impl Accepting {
    pub(super) fn new(listeners: u16) -> Accepting {
        Accepting {
            listeners: (0..listeners).map(|_| Listener::new(LaneId::FIRST)).collect(),
            quota: None,
            others_have_room: false,
            waiting: VecDeque::new(),
            pending: 0,
            waited: Vec::new(),
            retry_at: None,
            rate: None,
            held_by_rate: None,
            reserve: None,
            paused: false,
            told_paused: false,
            started: false,
            withheld: false,
            starting: 0,
            parting: 0,
            postponed: None,
            put_back: 0,
            one_by_one: false,
        }
    }

    /// Adds listeners behind those that are there.
    pub(super) fn add_listeners(&mut self, listeners: u16, lane: LaneId) {
        self.listeners.extend((0..listeners).map(|_| Listener::new(lane)));
    }

    fn lane_of(&self, listener: u16) -> LaneId {
        self.listeners.get(usize::from(listener)).map_or(LaneId::FIRST, |listener| listener.lane)
    }

    /// The header that connections of a listener begin with, if there is one.
    pub(super) fn expected(&self, listener: u16) -> Option<Expected> {
        self.listeners.get(usize::from(listener))?.header
    }

    /// Expects this header on connections of a listener.
    pub(super) fn expect(&mut self, listener: u16, header: Expected) {
        if let Some(listener) = self.listeners.get_mut(usize::from(listener)) {
            listener.header = Some(header);
        }
    }

    /// False if there is no [time](Accepting::retry_at) to check again.
    #[inline]
    pub(super) fn may_retry(&self) -> bool {
        self.retry_at.is_some()
            || self.held_by_rate.is_some()
            || self.postponed.is_some()
            || self.quota.is_some()
    }

    /// The time to check again: accepting rests after an error, the rate has a token then, and no other shard reports that it
    /// has room.
    pub(super) fn retry_at(&self, now: Time) -> Option<Time> {
        if self.held_by_rate.is_some() || self.postponed.is_some() {
            return self.held_until(now);
        }
        let held_by_others = (self.paused || !self.waiting.is_empty()) && self.quota.is_some();
        self.retry_at.or(held_by_others.then(|| now + RETRY))
    }

    /// The same where there was no token.
    #[cold]
    fn held_until(&self, now: Time) -> Option<Time> {
        let held_by_others = (self.paused || !self.waiting.is_empty()) && self.quota.is_some();
        let retry_at = self.retry_at.or(held_by_others.then(|| now + RETRY));
        [self.held_by_rate, self.postponed, retry_at].into_iter().flatten().min()
    }

    /// True for a peer that may have a reserved slot.
    fn is_reserved(&self, listener: u16, peer: Option<SocketAddr>) -> bool {
        let Some(Reserve { admits, .. }) = &self.reserve else { return false };
        peer.is_some_and(|peer| admits(listener, peer))
    }

    /// True if further sockets are accepted though none has room, to see whether one may have a reserved slot.
    fn looks_ahead(&self) -> bool {
        self.reserve.is_some() && self.waiting.len() < LOOKS_AHEAD
    }

    /// True while the services are to be asked for no other newcomer.
    fn awaits_answer(&self) -> bool {
        self.one_by_one && self.pending > 0
    }

    /// The services answered at `now` for a newcomer that was not postponed.
    fn answered(&mut self, now: Time) {
        self.one_answered();
        // Those behind it are asked for in the next turn: this one may begin a handshake before, and those have a limit.
        if core::mem::take(&mut self.one_by_one) && !self.waiting.is_empty() {
            self.postponed = self.postponed.or(Some(now));
        }
    }

    fn one_answered(&mut self) {
        self.pending -= 1;
        if self.pending == 0 {
            self.waited.clear();
        }
    }

    /// Returns the place of a connection or a socket that is gone.
    pub(super) fn give_back(&self) {
        if let Some(quota) = &self.quota {
            quota.used.fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn quota_left(&self) -> bool {
        self.quota.as_ref().is_none_or(|quota| quota.used.load(Ordering::Relaxed) < quota.max)
    }

    /// Connections of all shards of the server, if they share a limit.
    pub(super) fn used_by_all(&self) -> Option<usize> {
        self.quota.as_ref().map(|quota| quota.used.load(Ordering::Relaxed))
    }

    /// Takes one of the server's connections, if it has one left, or not as many as `beyond` more.
    fn take_quota(&self, beyond: usize) -> bool {
        let Some(quota) = &self.quota else { return true };
        let more = |used: usize| (used < quota.max + beyond).then_some(used + 1);
        quota.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok()
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.waiting.is_empty() && self.listeners_left() == 0
    }

    /// Listeners whose sockets are open.
    pub(super) fn listeners_left(&self) -> usize {
        self.listeners.iter().filter(|listener| !listener.closed).count()
    }
}

impl<O: Observer> Shard<O> {
    /// The lane of connections that a listener accepts.
    pub fn lane_of_listener(&self, listener: u16) -> LaneId {
        self.accepting.lane_of(listener)
    }

    fn counters_at(&mut self, listener: u16) -> &mut ConnStats {
        &mut self.lanes[self.accepting.lane_of(listener)].counters
    }

    pub(super) fn accepted(&mut self, listener: u16, socket: Socket, peer: Option<SocketAddr>) {
        self.counters_at(listener).accepted += 1;
        self.place(listener, socket, peer);
    }

    /// Takes a socket that another shard accepted and had no room for.
    pub fn take_handed_off(&mut self, listener: u16, socket: Socket, peer: Option<SocketAddr>) {
        self.place(listener, socket, peer);
    }

    fn place(&mut self, listener: u16, socket: Socket, peer: Option<SocketAddr>) {
        let is_held = self.accepting.postponed.is_some() || self.accepting.awaits_answer();
        let is_next =
            self.accepting.waiting.is_empty() && !is_held || self.accepting.is_reserved(listener, peer);
        if is_next && self.takes_newcomers() && self.ask(listener, socket, peer) {
            return;
        }
        if self.has_stopped() {
            // It would wait for a place that does not come.
            self.counters_at(listener).refuse(RefusedBy::Stopping);
            self.ops.push(Op::Refuse { socket });
            return;
        }
        if self.hand_off(listener, socket, peer) {
            return;
        }
        self.counters_at(listener).waited += 1;
        self.accepting.waiting.push_back((listener, socket, peer));
        self.sync_accept();
    }

    /// False if there is no room.
    fn ask(&mut self, listener: u16, socket: Socket, peer: Option<SocketAddr>) -> bool {
        // Those of which the service is asked already are no starts yet, but will be.
        let starts =
            self.accepting.expected(listener).is_some() || self.channels.transport(listener).is_some();
        let coming = if starts { self.accepting.pending } else { 0 };
        // A drain lets in what waits, and soon cuts those whose header does not come.
        let is_held = self.accepting.starting + coming >= self.limits.handshakes_max && !self.has_stopped();
        let is_free = !is_held && self.has_slot();
        // Which peer it is matters where there is a rate, and where there is no room: other shards may have taken that.
        let is_special = self.accepting.reserve.is_some();
        let reserved = match is_special && self.accepting.is_reserved(listener, peer) {
            true => self.lanes.reserved_left() > self.accepting.pending,
            false => false,
        };
        let beyond =
            if reserved { self.accepting.reserve.as_ref().map_or(0, |reserve| reserve.slots) } else { 0 };
        if !(is_free || reserved) || !self.accepting.take_quota(beyond) {
            return false;
        }
        if !reserved && !self.take_token() {
            self.accepting.give_back();
            return false;
        }
        self.accepting.pending += 1;
        self.events.push_back(Event::Accepted { socket, peer, listener });
        if self.accepting.held_by_rate.is_some() {
            self.sync_accept();
        }
        true
    }

    /// Takes a token of the server's rate; false if there is none. A drain lets in what waits.
    fn take_token(&mut self) -> bool {
        let Some(rate) = self.accepting.rate.as_ref().filter(|_| !self.has_stopped()) else { return true };
        let taken = rate.take(self.now);
        self.accepting.held_by_rate = taken.map_or_else(Some, |()| rate.held_until(self.now));
        taken.is_ok()
    }

    /// A socket that had a token needs none.
    fn give_token_back(&mut self) {
        if let Some(rate) = self.accepting.rate.as_ref().filter(|_| !self.has_stopped()) {
            rate.give_back();
            self.accepting.held_by_rate = rate.held_until(self.now);
        }
    }

    /// False if it stays here, since no other shard has room, or this one has.
    fn hand_off(&mut self, listener: u16, socket: Socket, peer: Option<SocketAddr>) -> bool {
        let hands_off = self.hands_off();
        if hands_off {
            self.counters_at(listener).handed_off += 1;
            self.events.push_back(Event::HandOff { socket, peer, listener });
        }
        hands_off
    }

    /// Accepted connections this shard has room for.
    pub fn slots_left(&self) -> usize {
        self.lanes.inbound_left(self.accepting.pending)
    }

    pub(super) fn has_slot(&self) -> bool {
        self.slots_left() > 0
    }

    pub(super) fn has_room(&self) -> bool {
        self.has_slot() && self.accepting.quota_left()
    }

    /// True if newly accepted sockets go to another shard.
    fn hands_off(&self) -> bool {
        !self.has_stopped()
            && !self.has_slot()
            && self.accepting.others_have_room
            && self.accepting.quota_left()
    }

    /// Counts this shard's connections together with those of others. Before the first turn.
    pub fn share_quota(&mut self, quota: Arc<Quota>) {
        self.accepting.quota = Some(quota);
    }

    /// Takes connections at a rate that all shards of the server share. Further ones wait. Before the first turn.
    pub fn share_rate(&mut self, rate: Arc<AcceptRate>) {
        self.accepting.rate = Some(rate);
    }

    /// Keeps `slots` beyond the limit of accepted connections for the peers that `admits` names by listener and address. They
    /// need no token of a rate either. Where others wait, it accepts further ones to find such peers. Before the first turn.
    pub fn reserve(&mut self, slots: usize, admits: impl Fn(u16, SocketAddr) -> bool + 'static) {
        self.lanes.reserve(slots);
        self.accepting.reserve = Some(Reserve { slots, admits: Box::new(admits) });
    }

    /// Accepts nothing until [`begin_accepting`](Shard::begin_accepting): peers wait in the kernel's queue. Before the first turn.
    pub fn withhold_accepting(&mut self) {
        self.accepting.withheld = true;
    }

    /// Accepts from the next turn on.
    pub fn begin_accepting(&mut self) {
        self.accepting.withheld = false;
    }

    /// Sets whether another shard has room for sockets beyond this one's table. Accepting goes on from the next turn.
    pub fn set_others_have_room(&mut self, room: bool) {
        self.accepting.others_have_room = room;
    }

    /// Makes an accepted socket a connection. `None` if there is no memory for it, or every connection was aborted; the socket
    /// is closed then.
    /// Its block has room for a session of type `S`, which is to be [filled](ringserve_buf::CountedHead::fill) before
    /// [`opened`](Shard::opened).
    /// The next call for it is that, [`open_parked`](Shard::open_parked), [`await_header`](Shard::await_header),
    /// [`begin_handshake`](Shard::begin_handshake), [`refused`](Shard::refused) or [`abort`](Shard::abort).
    pub fn admit<S: 'static>(
        &mut self,
        socket: Socket,
        peer: Option<SocketAddr>,
        listener: u16,
    ) -> Option<ConnId> {
        self.accepting.answered(self.now);
        let lane = self.lane_of_listener(listener);
        let made = match self.takes_newcomers() {
            true => self.insert(lane, peer, listener, ConnShared::<S>::try_new_unfilled),
            false => None,
        };
        let Some(id) = made else {
            self.accepting.give_back();
            let by = if self.takes_newcomers() { RefusedBy::Memory } else { RefusedBy::Stopping };
            self.lanes[lane].counters.refuse(by);
            self.ops.push(Op::Refuse { socket });
            return None;
        };
        self.observer.opened(self.now, lane, id, peer);
        self.ops.push(Op::Adopt { id, socket });
        if self.drain.is_some() {
            self.note_newcomer(id);
        }
        if !self.has_room() {
            self.sync_accept();
        }
        Some(id)
    }

    /// Closes a socket that `listener` accepted and that is not admitted. One that is refused for its address takes no part in
    /// the server's rate.
    pub fn refuse(&mut self, socket: Socket, listener: u16, by: RefusedBy) {
        self.accepting.answered(self.now);
        self.accepting.give_back();
        if by.is_by_admission() {
            self.give_token_back();
        }
        self.counters_at(listener).refuse(by);
        self.ops.push(Op::Refuse { socket });
        self.retry_accepts();
    }

    /// True if one more connection may be there for last words alone. They have a part of the table and, lest a peer that does not
    /// close keeps it, little time.
    pub fn may_part(&self) -> bool {
        let most = (self.lanes.inbound_max() / PARTING_PART).clamp(1, PARTING_MAX);
        self.accepting.parting < most && self.takes_newcomers()
    }

    /// Refuses a socket as [`refuse`](Shard::refuse), behind some last words as they are. One small send: they are dropped where it
    /// takes more. Only if one more [may part](Shard::may_part).
    pub fn refuse_with(
        &mut self,
        socket: Socket,
        peer: Option<SocketAddr>,
        listener: u16,
        by: RefusedBy,
        words: &[u8],
    ) {
        if by.is_by_admission() {
            self.give_token_back();
        }
        let Some(id) = self.admit::<()>(socket, peer, listener) else { return };
        self.refused_with(id, by, words);
    }

    /// Closes a connection whose service was not called as [`refused`](Shard::refused), behind some last words as they are.
    /// Only if one more [may part](Shard::may_part).
    pub fn refused_with(&mut self, id: ConnId, by: RefusedBy, words: &[u8]) {
        if let Some(conn) = self.conns.get_mut(id).filter(|conn| conn.is_open() && conn.opened == Opened::No)
        {
            conn.opened = Opened::LastWords;
            self.accepting.parting += 1;
            if let Some(outlet) = conn.outlet() {
                outlet.write(words);
            }
        }
        self.refused(id, by);
    }

    /// Puts a socket that `listener` accepted back, to be accepted once more at `until`; nothing else is accepted before then. What
    /// was on its way waits behind it, and the rest in the kernel's queue.
    pub fn postpone(&mut self, socket: Socket, peer: Option<SocketAddr>, listener: u16, until: Time) {
        if self.has_stopped() {
            return self.refuse(socket, listener, RefusedBy::Stopping);
        }
        let is_counted = self.accepting.waited.contains(&socket);
        self.accepting.one_answered();
        self.accepting.give_back();
        self.give_token_back();
        self.counters_at(listener).waited += u64::from(!is_counted);
        let place = self.accepting.put_back.min(self.accepting.waiting.len());
        self.accepting.waiting.insert(place, (listener, socket, peer));
        self.accepting.put_back = place + 1;
        self.accepting.postponed = Some(self.accepting.postponed.map_or(until, |before| before.max(until)));
        self.accepting.one_by_one = true;
        self.sync_accept();
    }

    /// Counts a socket that `listener` accepted and that goes to a shard with fewer connections, instead of being admitted or
    /// refused here.
    pub fn handed_off(&mut self, listener: u16, peer: Option<SocketAddr>) {
        self.accepting.answered(self.now);
        self.accepting.give_back();
        if !self.accepting.is_reserved(listener, peer) {
            self.give_token_back();
        }
        self.counters_at(listener).handed_off += 1;
        self.retry_accepts();
    }

    /// Connections that were accepted and wait for a place: a burst brings some before accepting stops.
    pub fn newcomers(&self) -> usize {
        self.accepting.waiting.len()
    }

    /// True while a limit holds accepting back, or the kernel refused it. Not while the server's rate does.
    pub fn is_accept_paused(&self) -> bool {
        self.accepting.told_paused
    }

    /// The service accepted an admitted connection: bytes are received from now on.
    pub fn opened(&mut self, id: ConnId) {
        if let Some(conn) = self.conns.get_mut(id) {
            conn.opened = Opened::Yes;
        }
        self.notify_opened(id);
        self.sync_receive(id);
        self.arm(id);
    }

    pub(super) fn accept_ended(&mut self, listener: u16, end: AcceptEnd) {
        if let Some(listener) = self.accepting.listeners.get_mut(usize::from(listener)) {
            let closed = end == AcceptEnd::Closed;
            *listener = Listener { closed, header: listener.header, ..Listener::new(listener.lane) };
        }
        if !matches!(end, AcceptEnd::Stopped | AcceptEnd::Closed) && !self.has_stopped() {
            self.accepting.retry_at = Some(self.now + RETRY);
        }
        self.sync_accept();
    }

    /// A slot is free, or perhaps a descriptor.
    pub(super) fn slot_freed(&mut self) {
        if let Some(retry_at) = &mut self.accepting.retry_at {
            *retry_at = (*retry_at).min(self.now + RETRY / 10);
        }
        self.retry_accepts();
    }

    /// Checks, at the start of a turn, everything that may have changed since the last one, on other shards too.
    #[inline]
    pub(super) fn check_accepting(&mut self) {
        let accepting = &self.accepting;
        let room = self.has_room() || self.hands_off();
        let rests = accepting.retry_at.is_some()
            || accepting.held_by_rate.is_some()
            || accepting.postponed.is_some()
            || !accepting.waiting.is_empty()
            || !accepting.started;
        if rests || room == accepting.paused {
            self.retry_accepts();
        }
    }

    #[inline(never)]
    pub(super) fn retry_accepts(&mut self) {
        if self.accepting.postponed.is_some_and(|until| until <= self.now) {
            self.accepting.postponed = None;
            self.accepting.put_back = 0;
        }
        while self.accepting.postponed.is_none()
            && !self.accepting.awaits_answer()
            && let Some((listener, socket, peer)) = self.accepting.waiting.pop_front()
        {
            if self.ask(listener, socket, peer) {
                self.accepting.waited.push(socket);
                continue;
            }
            if self.hand_off(listener, socket, peer) {
                continue;
            }
            self.accepting.waiting.push_front((listener, socket, peer));
            break;
        }
        if self.has_stopped() {
            // Waiting sockets find no room, and will have no time.
            self.refuse_waiting();
        }
        self.sync_accept();
    }

    /// Arms or stops each listener as the limits say.
    pub(super) fn sync_accept(&mut self) {
        if self.accepting.withheld {
            return;
        }
        if self.accepting.retry_at.is_some_and(|at| at <= self.now) {
            self.accepting.retry_at = None;
        }
        if self.accepting.held_by_rate.is_some_and(|at| at <= self.now) {
            self.accepting.held_by_rate = None;
        }
        let room = self.has_room() || self.hands_off();
        let by_rate = self.accepting.held_by_rate.is_some();
        let has_none = !room || by_rate || self.is_full_of_starts() || !self.accepting.waiting.is_empty();
        let is_put_off = self.accepting.postponed.is_some() || self.accepting.awaits_answer();
        let rests = self.accepting.retry_at.is_some() || is_put_off;
        let held = has_none && !self.accepting.looks_ahead() || rests;
        if !self.accepting.started
            && let Some(rate) = &self.accepting.rate
        {
            rate.begin(self.now);
        }
        self.accepting.started = true;
        if self.has_stopped() {
            return;
        }
        if held != self.accepting.paused {
            self.accepting.paused = held;
            self.lanes[LaneId::FIRST].counters.accept_held += u64::from(held && by_rate);
        }
        // A rate holds many times in a second, and as it was asked to; and what is put off is refused soon, or let in. Told, either
        // would keep a server refusing that has room.
        let by_limit = !room || self.is_full_of_starts() || self.accepting.retry_at.is_some();
        let tells = match by_rate || is_put_off {
            true => self.accepting.told_paused && held && by_limit,
            false => held,
        };
        if tells != self.accepting.told_paused {
            self.accepting.told_paused = tells;
            self.lanes[LaneId::FIRST].counters.accept_paused += u64::from(tells);
            self.observer.accept_paused(self.now, tells);
        }
        for (n, state) in self.accepting.listeners.iter_mut().enumerate() {
            let listener = n as u16;
            if held {
                if state.armed && !state.stopping {
                    state.stopping = true;
                    self.ops.push(Op::AcceptStop { listener });
                }
            } else if !state.armed {
                state.armed = true;
                self.ops.push(Op::Accept { listener });
            }
        }
    }

    /// Takes in the queues of the listeners, and closes them.
    pub(super) fn stop_listening(&mut self) {
        for listener in 0..self.accepting.listeners.len() as u16 {
            self.ops.push(Op::StopListening { listener });
        }
        // Accepting does not rest any more, and is not held back.
        self.accepting.retry_at = None;
        self.accepting.held_by_rate = None;
        self.accepting.postponed = None;
        self.accepting.paused = false;
    }

    /// Refuses waiting sockets: none becomes a connection any more.
    pub(super) fn refuse_waiting(&mut self) {
        while let Some((listener, socket, _)) = self.accepting.waiting.pop_front() {
            self.counters_at(listener).refuse(RefusedBy::Stopping);
            self.ops.push(Op::Refuse { socket });
        }
    }

    /// Closes a connection that was refused after it was admitted, by its `open` as a rule. Its queued replies are sent first.
    /// One that ends already, as by a time limit, ends for that reason alone.
    pub fn refused(&mut self, id: ConnId, by: RefusedBy) {
        if let Some(conn) = self.conns.get(id).filter(|conn| conn.is_open()) {
            self.lanes[conn.lane].counters.refuse(by);
        }
        self.finish(id, CloseReason::Refused);
    }
}
