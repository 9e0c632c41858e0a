//! The state machine of one core.
//!
//! [`turn`](Shard::turn) takes completions in and has a [`Lane`] work them off; [`take_ops`](Shard::take_ops) has the
//! operations that follow. One verb a file.

mod accept;
mod calls;
mod check;
mod close;
mod connect;
mod drain;
mod frames;
mod give_back;
mod held;
mod receive;
mod send;
#[cfg(test)]
mod tests;
mod timers;
mod turn;
mod work;

use alloc::collections::VecDeque;
use alloc::rc::Rc;
use alloc::vec::Vec;

use ringserve_buf::Pool;

use crate::conn::{Conn, Queued, Times};
use crate::framing::Framing;
use crate::holders::Holders;
use crate::lane_shared::LaneShared;
use crate::outlet::ConnShared;
use crate::slots::Slots;
use crate::stamp::Stamp;
use crate::wheel::Wheel;
use crate::{ConnId, ConnStats, Limits, Observer, Op, Time};

use accept::Accepting;
pub use accept::Quota;
pub use calls::Parked;
use drain::Drain;
pub use frames::{Frames, Next};
use turn::Event;
pub use turn::{Ended, Lane};
use work::Work;

/// Connections for which a queue keeps room once it is empty, however long a crowd made it: 8 to 16 KiB.
const QUEUE_KEPT: usize = 1024;

/// The connections of one core. A [`Lane`] stands above it.
pub struct Shard<S, F: Framing, O: Observer = ()> {
    limits: Limits,
    times: Times,
    framing: Rc<F>,
    observer: O,
    local: Rc<LaneShared>,
    pool: Pool,
    conns: Slots<Conn<S>>,
    wheel: Wheel,
    now: Time,
    /// The same, as connections keep it.
    stamp: Stamp,
    ops: Vec<Op>,
    /// Something depends on a send of this turn.
    send_awaited: bool,
    /// Bytes arrived since the turn began.
    has_received: bool,
    /// Bytes received before the last turn began.
    received: u64,
    events: VecDeque<Event<S>>,
    work: Work,
    /// Connections with bytes left over for a later turn, in the order in which they get one.
    runnable: VecDeque<ConnId>,
    /// Those of them that had a batch in this turn: they come after all that had none.
    served: VecDeque<ConnId>,
    /// Memory in inboxes.
    inbox_bytes: usize,
    holders: Holders,
    /// Bytes held beyond which a turn hands out no frame.
    held_in_turn_max: usize,
    /// Connections that came to hold much, each once, and when: that counts once it has been there for a moment.
    watched: VecDeque<(ConnId, Stamp)>,
    /// Receive memory is short: frames are copied, nothing is lent.
    short_of_buffers: bool,
    /// Frames are copied always, since the driver's buffers must not be kept.
    copy_always: bool,
    accepting: Accepting,
    drain: Option<Drain>,
    counters: ConnStats,
    /// Kept for its room.
    scratch: Vec<ConnId>,
    fired: Vec<u32>,
}

impl<S, F: Framing, O: Observer> Shard<S, F, O> {
    /// A shard with `listeners` listeners that holds at most `connections_max` connections. The limits must
    /// have been checked.
    pub fn new(
        limits: Limits,
        connections_max: usize,
        listeners: u16,
        framing: F,
        pool: Pool,
        observer: O,
    ) -> Shard<S, F, O> {
        let framing = Rc::new(framing);
        let local = Rc::new(LaneShared::new(framing.encoding(), &limits));
        Shard {
            accepting: Accepting::new(listeners, connections_max),
            framing,
            observer,
            local,
            pool,
            conns: Slots::new(),
            wheel: Wheel::new(),
            now: Time::ZERO,
            stamp: Stamp::at(Time::ZERO),
            ops: Vec::new(),
            send_awaited: false,
            has_received: false,
            received: 0,
            events: VecDeque::new(),
            work: Work::default(),
            runnable: VecDeque::new(),
            served: VecDeque::new(),
            inbox_bytes: 0,
            holders: Holders::new(),
            held_in_turn_max: usize::MAX,
            watched: VecDeque::new(),
            short_of_buffers: false,
            copy_always: false,
            drain: None,
            counters: ConnStats::default(),
            scratch: Vec::new(),
            fired: Vec::new(),
            times: Times::new(&limits),
            limits,
        }
    }

    /// Copies every frame before it is handed out, and lends none: for drivers whose buffers must not be kept.
    pub fn copy_frames(&mut self) {
        self.copy_always = true;
    }

    /// Bounds a turn to `calls` calls, and the smallest batch of a connection's frames to `batch`; both at least 1. By default
    /// 4096 and 16. For simulations, where few frames must fill a turn.
    pub fn bound_turn(&mut self, calls: u32, batch: u32) {
        self.work = Work::bounded(calls, batch);
    }

    /// True if bytes of the connection wait for room in a later turn.
    pub fn is_runnable(&self, id: ConnId) -> bool {
        self.conns.get(id).is_some_and(|conn| conn.queued.is_in(Queued::RUNNABLE))
    }

    /// A connection's outlet and session, until it ended.
    pub fn shared(&self, id: ConnId) -> Option<&Rc<ConnShared<S>>> {
        self.conns.get(id)?.shared.as_ref()
    }

    /// What the shard's connections share.
    pub fn local(&self) -> &Rc<LaneShared> {
        &self.local
    }

    /// What was counted so far.
    pub fn counters(&self) -> &ConnStats {
        &self.counters
    }

    /// Connections that exist, closing ones included.
    pub fn connections(&self) -> usize {
        self.conns.len()
    }

    /// The watcher.
    pub fn observer(&self) -> &O {
        &self.observer
    }
}

pub(crate) fn expect_conn<S>(conns: &mut Slots<Conn<S>>, id: ConnId) -> Option<&mut Conn<S>> {
    let found = conns.get_mut(id);
    debug_assert!(found.is_some(), "a completion for {id}, which is free: it was freed too early");
    found
}
