//! The listeners of a shard: each accepts while nothing holds it back, nor all of them.

use super::queue::Queue;
use super::starts::Starts;
use super::{Phase, RETRY};
use crate::proxy::HeaderRules;
use crate::shard::Shard;
use crate::{AcceptEnd, ConnStats, LaneId, Observer, Op, Time};

/// The accept of a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Accept {
    Off,
    Armed,
    Stopping,
    /// The socket is closed, permanently.
    Closed,
}

/// One listener: a reason to wait at one of them holds no other back.
pub(super) struct Listener {
    /// The lane of accepted connections.
    pub(super) lane: LaneId,
    accept: Accept,
    /// The header with which its connections begin, if there is one.
    pub(super) header: Option<HeaderRules>,
    /// Connections whose PROXY header or handshake is awaited.
    pub(super) starts: Starts,
    /// Sockets that were on their way when a limit was reached.
    pub(super) queue: Queue,
    /// Its accept failed, and rests.
    pub(super) retry_at: Option<Time>,
    /// Whether its own pause was reported.
    is_paused: bool,
}

impl Listener {
    pub(super) fn new(lane: LaneId) -> Listener {
        Listener {
            lane,
            accept: Accept::Off,
            header: None,
            starts: Starts::default(),
            queue: Queue::new(),
            retry_at: None,
            is_paused: false,
        }
    }

    /// A listener that another shard has.
    pub(super) fn elsewhere() -> Listener {
        Listener { accept: Accept::Closed, ..Listener::new(LaneId::FIRST) }
    }

    pub(super) fn is_closed(&self) -> bool {
        self.accept == Accept::Closed
    }

    /// True if its socket is open, or a socket that came there was not answered.
    pub(super) fn is_open(&self) -> bool {
        !self.is_closed() || !self.queue.is_empty() || self.queue.asked() > 0
    }

    /// True if something waits here.
    pub(super) fn is_unsettled(&self) -> bool {
        !self.queue.is_empty() || self.queue.rests_until().is_some() || self.retry_at.is_some()
    }

    /// Arms or stops its accept. Returns the operation for that, if it is new.
    fn hold(&mut self, listener: u16, held: bool) -> Option<Op> {
        let (next, op) = match (self.accept, held) {
            (Accept::Armed, true) => (Accept::Stopping, Op::AcceptStop { listener }),
            (Accept::Off, false) => (Accept::Armed, Op::Accept { listener }),
            _ => return None,
        };
        self.accept = next;
        Some(op)
    }

    /// Notes that its accept ended.
    fn accept_ended(&mut self, end: AcceptEnd, rests_until: Option<Time>) {
        self.accept = if end == AcceptEnd::Closed { Accept::Closed } else { Accept::Off };
        if let AcceptEnd::Error(_) = end {
            self.retry_at = rests_until;
        }
    }

    /// Notes that it is being closed: nothing holds it back from now on.
    fn stop(&mut self) {
        self.retry_at = None;
        self.queue.end_rest();
    }
}

/// Pauses of all listeners together.
#[derive(Default)]
pub(super) struct Pauses {
    /// Whether the shard was full when listeners were last armed or stopped.
    pub(super) is_full: bool,
    /// Whether a pause by a limit was reported.
    is_reported: bool,
    /// The number of those pauses.
    count: u64,
}

impl<O: Observer> Shard<O> {
    /// The lane of connections that a listener accepts.
    pub fn lane_of_listener(&self, listener: u16) -> LaneId {
        self.accepting.lane_of(listener)
    }

    pub(super) fn counters_at(&mut self, listener: u16) -> &mut ConnStats {
        &mut self.lanes[self.accepting.lane_of(listener)].counters
    }

    /// Accepts nothing until [`begin_accepting`](Shard::begin_accepting): peers wait in the
    /// kernel's queue. Before the first turn.
    pub fn withhold_accepting(&mut self) {
        self.accepting.phase = Phase::Withheld;
    }

    /// Accepts from the next turn on.
    pub fn begin_accepting(&mut self) {
        if self.accepting.phase == Phase::Withheld {
            self.accepting.phase = Phase::Ready;
        }
    }

    /// True while a limit holds accepting back at all listeners, or the kernel refused it. False
    /// while the server's rate does, and while only one listener is paused because of its number of
    /// starts.
    pub fn is_accept_paused(&self) -> bool {
        self.accepting.pauses.is_reported
    }

    /// The number of times that accepting [was paused](Shard::is_accept_paused).
    pub fn accept_pauses(&self) -> u64 {
        self.accepting.pauses.count
    }

    pub(in crate::shard) fn accept_ended(&mut self, listener: u16, end: AcceptEnd) {
        let rests_until = (!self.has_stopped()).then(|| self.now + RETRY);
        if let Some(at) = self.accepting.at(listener) {
            at.accept_ended(end, rests_until);
        }
        // What one listener lacks, all lack.
        if matches!(end, AcceptEnd::Descriptors | AcceptEnd::SystemFiles) {
            self.accepting.retry_at = rests_until.or(self.accepting.retry_at);
        }
        self.sync_accept();
    }

    /// Arms or stops each listener as the limits require.
    pub(super) fn sync_accept(&mut self) {
        self.sync_listeners();
        self.accepting.is_timed = !self.accepting.is_settled();
    }

    fn sync_listeners(&mut self) {
        if self.accepting.phase == Phase::Withheld {
            return;
        }
        let now = self.now;
        self.accepting.retry_at.take_if(|at| *at <= now);
        self.accepting.tokens.go_on(now);
        if self.accepting.phase == Phase::Ready {
            self.accepting.tokens.begin(now);
        }
        self.accepting.phase = Phase::Begun;
        if self.has_stopped() {
            return;
        }
        let has_room = self.has_room() || self.hands_off();
        self.accepting.pauses.is_full = !has_room;
        self.accepting.crowd.forget_ends();
        let by_rate = self.accepting.tokens.are_awaited();
        let (mut held, mut put_off) = (false, false);
        for listener in 0..self.accepting.listeners.len() as u16 {
            held |= self.sync_listener(listener, has_room && !by_rate);
            put_off |= self.accepting.at(listener).is_some_and(|at| at.queue.is_put_off());
        }
        if !has_room && self.accepting.has_starts() {
            self.make_room_for_all();
        }
        if self.accepting.tokens.hold(held && by_rate) {
            self.lanes[LaneId::FIRST].counters.accept_held += 1;
        }
        let by_limit = held && (!has_room || self.accepting.retry_at.is_some());
        // A rate holds back many times in a second, as intended; and postponed connections are
        // refused soon, or let in. A report of either would make a server refuse connections
        // although it has room.
        let is_reported = self.accepting.pauses.is_reported;
        self.report_pause(by_limit && (is_reported || !(by_rate || put_off)));
    }

    /// Reports a pause of all listeners, or its end, if that is new.
    fn report_pause(&mut self, paused: bool) {
        let pauses = &mut self.accepting.pauses;
        if paused != pauses.is_reported {
            pauses.is_reported = paused;
            pauses.count += u64::from(paused);
            self.lanes[LaneId::FIRST].counters.accept_paused += u64::from(paused);
            self.observer.accept_paused(self.now, None, paused);
        }
    }

    /// Arms or stops one listener; `room` is true if the limits of all listeners leave room. True
    /// if it is held back.
    fn sync_listener(&mut self, listener: u16, room: bool) -> bool {
        let is_full = self.is_full_of_starts(listener) && self.first_to_go(listener).is_none();
        self.note_crowd(listener, is_full);
        let (now, rests) = (self.now, self.accepting.retry_at.is_some());
        let looks_ahead = self.accepting.looks_ahead();
        let Some(at) = self.accepting.at(listener) else { return false };
        at.retry_at.take_if(|at| *at <= now);
        let has_none = !room || is_full || !at.queue.is_empty();
        let looks = at.queue.len() < looks_ahead;
        let held = has_none && !looks || rests || at.retry_at.is_some() || at.queue.is_put_off();
        self.ops.extend(at.hold(listener, held));
        let paused = held && (is_full || at.retry_at.is_some());
        if paused != at.is_paused {
            at.is_paused = paused;
            let lane = at.lane;
            self.lanes[lane].counters.accept_paused += u64::from(paused);
            self.observer.accept_paused(now, Some(listener), paused);
        }
        held
    }

    /// Takes in the queues of the listeners, and closes them.
    pub(in crate::shard) fn stop_listening(&mut self) {
        for (listener, _) in (0..).zip(&self.accepting.listeners).filter(|(_, at)| !at.is_closed()) {
            self.ops.push(Op::StopListening { listener });
        }
        // Accepting is no longer paused or held back.
        self.accepting.retry_at = None;
        self.accepting.tokens.stop();
        self.accepting.crowd.forget_ends();
        self.accepting.pauses.is_full = false;
        self.accepting.listeners.iter_mut().for_each(Listener::stop);
    }
}
