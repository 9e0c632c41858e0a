//! New connections: which listeners accept, which sockets wait for a place, and connections that
//! begin with a header or a handshake.
// May use: channels, lanes, timers, turn.
// Begin with: `arrivals.rs`, then `answers.rs`.

mod answers;
mod arrivals;
mod crowd;
mod headers;
mod listeners;
mod queue;
mod quota;
mod starts;

use alloc::vec::Vec;
use core::time::Duration;

use crate::{LaneId, Time};

use crowd::Crowd;
use listeners::{Listener, Pauses};
pub use queue::WaitCounts;
pub use quota::Quota;
use quota::{Places, Reserve, Tokens};

/// Time for which accepting rests after the kernel refused it: ten attempts a second find a freed
/// descriptor soon and cost nothing.
const RETRY: Duration = Duration::from_millis(100);

/// Whether listeners were armed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// They are not, even if there is room.
    Withheld,
    /// They will be in the next turn.
    Ready,
    /// They were, once.
    Begun,
}

/// Accepting, over all listeners of the shard.
pub(super) struct Accepting {
    phase: Phase,
    listeners: Vec<Listener>,
    /// The listener whose waiting sockets are the first to get places.
    next_listener: usize,
    /// Connections for which the services are asked, of all listeners.
    asked: usize,
    places: Places,
    tokens: Tokens,
    reserve: Option<Reserve>,
    /// The time at which accepting goes on after it was paused because the kernel has no more
    /// descriptors.
    retry_at: Option<Time>,
    pauses: Pauses,
    crowd: Crowd,
    /// Connections that exist only for a rejection message.
    parting: usize,
    /// Whether there may be a [time](Accepting::next_check) to check again, or something to check
    /// at each turn: most turns look at nothing else.
    is_timed: bool,
}

impl Accepting {
    pub(super) fn new(listeners: u16) -> Accepting {
        Accepting {
            phase: Phase::Ready,
            listeners: (0..listeners).map(|_| Listener::new(LaneId::FIRST)).collect(),
            next_listener: 0,
            asked: 0,
            places: Places::default(),
            tokens: Tokens::default(),
            reserve: None,
            retry_at: None,
            pauses: Pauses::default(),
            crowd: Crowd::default(),
            parting: 0,
            is_timed: true,
        }
    }

    /// Adds listeners after the present ones.
    pub(super) fn add_listeners(&mut self, listeners: u16, lane: LaneId) {
        self.listeners.extend((0..listeners).map(|_| Listener::new(lane)));
    }

    /// Makes a place for waiting sockets of a listener: another shard may pass on sockets of a
    /// listener that this one does not have.
    fn know(&mut self, listener: u16) {
        while self.listeners.len() <= usize::from(listener) {
            self.listeners.push(Listener::elsewhere());
        }
    }

    fn at(&mut self, listener: u16) -> Option<&mut Listener> {
        self.listeners.get_mut(usize::from(listener))
    }

    fn lane_of(&self, listener: u16) -> LaneId {
        self.listeners.get(usize::from(listener)).map_or(LaneId::FIRST, |listener| listener.lane)
    }

    /// True if there may be a [time](Accepting::next_check) to check again, or something to check
    /// at each turn.
    #[inline]
    pub(super) fn is_timed(&self) -> bool {
        self.is_timed
    }

    /// True if there is no such time, and nothing to check at each turn.
    pub(super) fn is_settled(&self) -> bool {
        self.phase == Phase::Begun
            && self.retry_at.is_none()
            && !self.tokens.are_awaited()
            && !self.listeners.iter().any(Listener::is_unsettled)
            && self.crowd.next_end().is_none()
            && !(self.pauses.is_full && self.places.are_shared())
    }

    /// True if something is checked at each turn, or a start has to end now.
    #[cold]
    fn rests(&self, now: Time) -> bool {
        self.phase != Phase::Begun
            || self.retry_at.is_some()
            || self.tokens.are_awaited()
            || self.listeners.iter().any(Listener::is_unsettled)
            || self.crowd.next_end().is_some_and(|at| at <= now)
    }

    /// The time to check again: when accepting goes on after an error, when the rate has a token,
    /// when services no longer postpone, when a start has to end, or when another shard may have
    /// room without a report.
    pub(super) fn next_check(&self, now: Time) -> Option<Time> {
        let is_held_by_others = (self.pauses.is_full || self.waits()) && self.places.are_shared();
        let by_others = is_held_by_others.then(|| now + RETRY);
        let all = [self.tokens.awaited_until(), self.retry_at, self.crowd.next_end(), by_others];
        let each =
            self.listeners.iter().flat_map(|listener| [listener.queue.rests_until(), listener.retry_at]);
        all.into_iter().chain(each).flatten().min()
    }

    /// Sockets that wait for a place.
    fn waiting(&self) -> usize {
        self.listeners.iter().map(|listener| listener.queue.len()).sum()
    }

    fn waits(&self) -> bool {
        self.listeners.iter().any(|listener| !listener.queue.is_empty())
    }

    pub(super) fn is_stopped(&self) -> bool {
        !self.waits() && self.listeners_left() == 0
    }

    /// True if a listener of a lane is open, or a socket that came there was not answered.
    pub(super) fn is_open(&self, lane: LaneId) -> bool {
        self.listeners.iter().filter(|listener| listener.lane == lane).any(Listener::is_open)
    }

    /// Listeners whose sockets are open.
    pub(super) fn listeners_left(&self) -> usize {
        self.listeners.iter().filter(|listener| !listener.is_closed()).count()
    }

    /// Connections of all shards of the server, if they share a limit.
    pub(super) fn used_by_all(&self) -> Option<usize> {
        self.places.used()
    }

    /// Notes that an accepted connection is gone: its place is free.
    pub(super) fn connection_gone(&mut self) {
        self.places.give_back();
    }

    /// Notes that a connection is gone that existed only for a rejection message.
    pub(super) fn parted(&mut self) {
        self.parting -= 1;
    }
}
