//! The state machine of one core.
//!
//! [`turn`](Shard::turn) takes completions in and dispatches their events to a [`Lane`];
//! [`take_ops`](Shard::take_ops) returns the operations that follow. Each file has one verb.
// May use: all other rooms.
// Begin with: `turn.rs`.

mod accept;
mod channels;
mod check;
mod close;
mod connect;
mod drain;
mod frames;
mod inspect;
mod lanes;
mod memory;
mod pages;
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

use ringserve_buf::{Blocks, Pool};

use crate::connection::{Conn, ConnHead, Memory, QueueFlags, ShardShared};
use crate::framing::Encoding;
use crate::limits::Meters;
use crate::tables::{Holders, Slots};
use crate::time::{Stamp, Wheel};
use crate::{ConnId, ConnStats, LaneId, Limits, Observer, Op, ServerLimits, Time};

use accept::Accepting;
pub use accept::{Quota, WaitCounts};
use channels::Channels;
use drain::Drain;
pub use frames::{Frames, Next, ParkOutcome, Rest, Whole};
pub use inspect::{ConnFigure, ConnFigures, ConnState, ConnView};
use lanes::Lanes;
use memory::calm_bytes;
use receive::short_from;
use timers::Lateness;
use turn::Event;
pub use turn::{EndedConn, Lane};
use work::Work;

/// Connections for which a queue keeps room once it is empty, however long a crowd made it: 8 to 16
/// KiB.
const QUEUE_KEPT: usize = 1024;

/// Bytes of blocks kept for large frames: a sixteenth of what connections may hold, in addition to
/// that, and 32 MiB at most.
fn kept_bytes_max(limits: &ServerLimits) -> usize {
    (limits.held_bytes_max / 16).min(32 << 20)
}

/// The connections of one core, of all its services and upstreams, in one table, below a [`Lane`].
pub struct Shard<O: Observer = ()> {
    /// The limits of the shard as a whole; those of connections are in their lanes.
    limits: ServerLimits,
    lanes: Lanes,
    observer: O,
    shared: Rc<ShardShared>,
    pool: Pool,
    /// The blocks in which large frames are put together.
    blocks: Blocks,
    /// Missing bytes from which a frame is received straight into its block.
    large_from: usize,
    conns: Slots<Conn>,
    wheel: Wheel,
    now: Time,
    /// The time of the turn, in the form that connections keep.
    stamp: Stamp,
    ops: Vec<Op>,
    /// Something depends on a send of this turn.
    send_awaited: bool,
    /// Bytes arrived since the turn began.
    has_received: bool,
    /// Bytes received since the turn began.
    received: usize,
    /// The turn brought as many completions as one may.
    had_more: bool,
    /// Sources of work were left waiting for a page.
    has_pages: bool,
    /// The next turn has more to begin with than most: `had_more`, a drain, awaited headers or
    /// handshakes, or sources that wait for a page.
    begins_aside: bool,
    events: VecDeque<Event>,
    work: Work,
    /// Connections with bytes left over for a later turn, in the order of their turns.
    runnable: VecDeque<ConnId>,
    /// Those of them that had a batch in this turn: they come after all others.
    served: VecDeque<ConnId>,
    /// The number of entries in these two and in the queue of handshakes.
    later: usize,
    channels: Channels,
    holders: Holders,
    meters: Meters,
    /// Memory as the turn began.
    held_before: Memory,
    /// Memory up to which a turn goes on, however much there was before it.
    calm_bytes: usize,
    /// Connections whose inbox or calls grew in this turn while too much was held.
    grew: Vec<ConnId>,
    /// Connections that came to hold much, each once, with the time: it counts after a moment.
    watched: VecDeque<(ConnId, Stamp)>,
    /// Receive memory is short: frames are copied, nothing is lent.
    short_of_buffers: bool,
    /// The number of leased buffers from which on it is: 0 if frames are always copied.
    short_from: usize,
    /// Frames are always copied, because the driver's buffers must not be kept.
    copy_always: bool,
    accepting: Accepting,
    drain: Option<Drain>,
    /// Calls of other shards' connections may still need this shard.
    awaits_others: bool,
    /// Kept for its memory.
    scratch: Vec<ConnId>,
    fired: Vec<u32>,
    lateness: Lateness,
}

impl<O: Observer> Drop for Shard<O> {
    fn drop(&mut self) {
        self.drop_channels();
    }
}

impl<O: Observer> Shard<O> {
    /// Makes a shard within `limits` with one lane, [`LaneId::FIRST`], within `first`: at most
    /// `connections_max` connections of `listeners` listeners, with replies written by `encoding`.
    /// The limits must have been checked.
    pub fn new(
        limits: ServerLimits,
        first: Limits,
        connections_max: usize,
        listeners: u16,
        encoding: Encoding,
        pool: Pool,
        observer: O,
    ) -> Shard<O> {
        let shared = Rc::new(ShardShared::new(&limits));
        Shard {
            accepting: Accepting::new(listeners),
            lanes: Lanes::new(&shared, first, connections_max, encoding),
            observer,
            shared,
            pool,
            blocks: Blocks::new(kept_bytes_max(&limits)),
            large_from: receive::LARGE_BYTES,
            conns: Slots::new(),
            wheel: Wheel::new(),
            now: Time::ZERO,
            stamp: Stamp::at(Time::ZERO),
            ops: Vec::new(),
            send_awaited: false,
            has_received: false,
            received: 0,
            had_more: false,
            has_pages: false,
            begins_aside: false,
            events: VecDeque::new(),
            work: Work::default(),
            runnable: VecDeque::new(),
            served: VecDeque::new(),
            later: 0,
            channels: Channels::new(),
            holders: Holders::new(),
            meters: Meters::new(),
            held_before: Memory::default(),
            calm_bytes: calm_bytes(limits.held_bytes_max),
            grew: Vec::new(),
            watched: VecDeque::new(),
            short_of_buffers: false,
            short_from: short_from(&limits),
            copy_always: false,
            drain: None,
            awaits_others: false,
            scratch: Vec::new(),
            fired: Vec::new(),
            lateness: Lateness::default(),
            limits,
        }
    }

    /// Copies every frame before it is handed out, and lends none. For simulations: a shard does so
    /// when few of its buffers are left.
    pub fn copy_frames(&mut self) {
        (self.copy_always, self.short_from) = (true, 0);
    }

    /// Bounds a turn to `calls` calls, and the smallest batch of a connection's frames to `batch`;
    /// both at least 1. By default 4096 and 16. For simulations, where few frames must fill a turn.
    pub fn bound_turn(&mut self, calls: u32, batch: u32) {
        self.work = Work::bounded(calls, batch);
    }

    /// Receives frames that lack `bytes` straight into their blocks, without the driver's buffers.
    /// By default 32 KiB. For simulations, whose frames are small.
    pub fn large_from(&mut self, bytes: usize) {
        self.large_from = bytes.max(1);
    }

    /// True if bytes of the connection wait for room in a later turn.
    pub fn is_runnable(&self, id: ConnId) -> bool {
        self.conns.get(id).is_some_and(|conn| conn.queued.is_in(QueueFlags::RUNNABLE))
    }

    /// A connection's outlet and session, until it ends.
    pub fn shared(&self, id: ConnId) -> Option<&ConnHead> {
        self.conns.get(id)?.shared.as_ref()
    }

    /// The lane of a connection.
    pub fn lane_of(&self, id: ConnId) -> Option<LaneId> {
        self.conns.get(id).map(|conn| conn.lane)
    }

    /// State that all connections share.
    pub fn all_share(&self) -> &Rc<ShardShared> {
        &self.shared
    }

    /// The counters of a lane so far.
    pub fn counters(&self, lane: LaneId) -> ConnStats {
        self.lanes[lane].counters()
    }

    /// Connections of a lane that exist, closing ones included.
    pub fn connections(&self, lane: LaneId) -> usize {
        self.lanes[lane].connections
    }

    /// Connections of all lanes.
    pub fn all_connections(&self) -> usize {
        self.conns.len()
    }

    /// The observer.
    pub fn observer(&self) -> &O {
        &self.observer
    }

    /// The observer, to change what it watches.
    pub fn observer_mut(&mut self) -> &mut O {
        &mut self.observer
    }
}

#[inline]
pub(crate) fn expect_conn(conns: &mut Slots<Conn>, id: ConnId) -> Option<&mut Conn> {
    let found = conns.get_mut(id);
    debug_assert!(found.is_some(), "a completion for {id}, which is free: it was freed too early");
    found
}
