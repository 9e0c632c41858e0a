//! Lanes: the shared settings and counters of connections of one kind.
//!
//! A service is a lane, and so are connections to upstreams. A connection names its lane by a
//! number, so that one table, one wheel and one list of dirty connections serve all.

use alloc::rc::Rc;
use alloc::vec::Vec;
use core::ops::{Index, IndexMut};
use core::time::Duration;

use ringserve_buf::has_room_for;

use super::Shard;
use crate::connection::{Conn, ConnHead, LaneShared, Outlet, ShardShared};
use crate::framing::Encoding;
use crate::limits::{ReadRates, Times};
use crate::{ConnId, ConnStats, LaneId, Limits, Observer};
use core::net::SocketAddr;

/// The stage of the shard's drain for the connections of a lane. Those that wait for another lane
/// have a later wave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wave {
    /// They are served as before until [`Shard::drain_lane`].
    Waits,
    /// They have the next wave.
    Next,
    /// They have this one: they are informed, and bytes that had arrived are taken in.
    Begins,
    /// Each has its moment, or had it.
    Begun,
    /// None is left, and none is added.
    Over,
}

/// The shard's state of a lane.
pub(super) struct LaneState {
    pub limits: Limits,
    pub times: Times,
    pub read_rates: Option<ReadRates>,
    pub shared: Rc<LaneShared>,
    /// The counters, apart from those in `shared`.
    pub counters: ConnStats,
    /// True for upstreams: in a drain they stay until no other connection is left.
    pub is_outbound: bool,
    /// The stage of a drain for it.
    pub wave: Wave,
    /// Connections that exist.
    pub connections: usize,
    /// The most connections of an upstream lane. All lanes of accepted connections share one limit.
    pub connections_max: usize,
}

/// All lanes of a shard. The first one lies where no bounds check is needed.
pub(super) struct Lanes {
    first: LaneState,
    others: Vec<LaneState>,
    /// Accepted connections of all lanes, with their limit.
    inbound: usize,
    inbound_max: usize,
    /// The number of accepted connections allowed beyond it.
    inbound_reserved: usize,
}

impl Lanes {
    pub(super) fn new(
        shared: &Rc<ShardShared>,
        limits: Limits,
        connections_max: usize,
        encoding: Encoding,
    ) -> Lanes {
        let first = LaneState::new(shared, limits, connections_max, encoding, false, None);
        Lanes { first, others: Vec::new(), inbound: 0, inbound_max: connections_max, inbound_reserved: 0 }
    }

    /// Connections that were accepted.
    #[inline]
    pub(super) fn inbound(&self) -> usize {
        self.inbound
    }

    /// Room for further accepted connections, after those for which the services are `asked`.
    #[inline]
    pub(super) fn inbound_left(&self, asked: usize) -> usize {
        self.inbound_max.saturating_sub(self.inbound + asked)
    }

    /// The same room for those that may have reserved slots.
    pub(super) fn reserved_left(&self) -> usize {
        self.inbound_max + self.inbound_reserved - self.inbound
    }

    /// The most accepted connections, without the reserved ones.
    pub(super) fn inbound_max(&self) -> usize {
        self.inbound_max
    }

    /// Makes room for `slots` accepted connections beyond the limit.
    pub(super) fn reserve(&mut self, slots: usize) {
        self.inbound_reserved = slots;
    }

    /// Counts a connection of a lane.
    fn add(&mut self, lane: LaneId) {
        self[lane].connections += 1;
        self[lane].counters.opened += 1;
        self.inbound += usize::from(!self[lane].is_outbound);
    }

    /// Counts the end of a connection of a lane. True if it was accepted.
    pub(super) fn remove(&mut self, lane: LaneId) -> bool {
        self[lane].connections -= 1;
        let is_inbound = !self[lane].is_outbound;
        self.inbound -= usize::from(is_inbound);
        is_inbound
    }

    fn push(&mut self, lane: LaneState) -> LaneId {
        assert!(self.others.len() < usize::from(u8::MAX), "a shard has 256 lanes at most");
        self.others.push(lane);
        LaneId::nth(self.others.len() as u8)
    }
}

impl Lanes {
    pub(super) fn iter(&self) -> impl Iterator<Item = &LaneState> {
        core::iter::once(&self.first).chain(&self.others)
    }

    /// Moves the lanes in one stage of their drain to the next one.
    pub(super) fn next_wave(&mut self, from: Wave, to: Wave) {
        let all = core::iter::once(&mut self.first).chain(&mut self.others);
        all.filter(|lane| lane.wave == from).for_each(|lane| lane.wave = to);
    }

    /// Panics if anything contradicts itself, with `all` connections of all lanes.
    pub(super) fn invariants(&self, all: usize) {
        let of = |outbound| -> usize {
            self.iter().filter(|lane| lane.is_outbound == outbound).map(|lane| lane.connections).sum()
        };
        assert_eq!((of(false), of(false) + of(true)), (self.inbound, all), "connections of lanes");
        let max = self.inbound_max + self.inbound_reserved;
        assert!(self.inbound <= max, "more connections than there may be");
    }
}

impl LaneState {
    fn new(
        shared: &Rc<ShardShared>,
        limits: Limits,
        connections_max: usize,
        encoding: Encoding,
        is_outbound: bool,
        connect_timeout: Option<Duration>,
    ) -> LaneState {
        let times = Times::new(&limits, connect_timeout);
        LaneState {
            shared: Rc::new(LaneShared::new(shared.clone(), encoding, &limits, &times)),
            times,
            read_rates: ReadRates::new(&limits),
            limits,
            counters: ConnStats::default(),
            is_outbound,
            wave: Wave::Next,
            connections: 0,
            connections_max,
        }
    }
}

impl LaneState {
    /// The counters so far.
    pub(super) fn counters(&self) -> ConnStats {
        let moved = &self.shared.moved;
        ConnStats {
            frames: moved.frames.get(),
            bytes_received: moved.bytes_received.get(),
            bytes_sent: moved.bytes_sent.get(),
            sends: moved.sends.get(),
            frames_shed: moved.frames_shed.get(),
            ..self.counters.clone()
        }
    }
}

impl Index<LaneId> for Lanes {
    type Output = LaneState;

    #[inline]
    fn index(&self, lane: LaneId) -> &LaneState {
        match lane.number().checked_sub(1) {
            None => &self.first,
            Some(other) => &self.others[usize::from(other)],
        }
    }
}

impl IndexMut<LaneId> for Lanes {
    #[inline]
    fn index_mut(&mut self, lane: LaneId) -> &mut LaneState {
        match lane.number().checked_sub(1) {
            None => &mut self.first,
            Some(other) => &mut self.others[usize::from(other)],
        }
    }
}

impl<O: Observer> Shard<O> {
    /// Adds a lane for connections to upstreams, at most `connections_max` of them. The limits of
    /// single connections apply to them; sums of memory, the time to connect and the times of a
    /// drain are the shard's.
    pub fn add_outbound(&mut self, limits: Limits, connections_max: usize, encoding: Encoding) -> LaneId {
        let connect_timeout = self.limits.connect_timeout;
        let state = LaneState::new(&self.shared, limits, connections_max, encoding, true, connect_timeout);
        self.lanes.push(state)
    }

    /// Adds a lane for connections that are accepted at `listeners` further listeners, numbered
    /// after the present ones. The limits of single connections apply to them; the number of
    /// connections is bounded by the shard, for all such lanes together. Before the first turn.
    pub fn add_inbound(&mut self, limits: Limits, listeners: u16, encoding: Encoding) -> LaneId {
        let most = self.lanes.inbound_max;
        let lane = self.lanes.push(LaneState::new(&self.shared, limits, most, encoding, false, None));
        self.accepting.add_listeners(listeners, lane);
        lane
    }

    /// Puts a connection into the table, with the block that `block` makes. `None` if there is no
    /// memory for it.
    pub(super) fn insert(
        &mut self,
        lane: LaneId,
        peer: Option<SocketAddr>,
        listener: u16,
        block: impl FnOnce(Outlet) -> Option<ConnHead>,
    ) -> Option<ConnId> {
        // For the other tables, whose insertion then cannot fail.
        if !has_room_for::<Conn>() {
            return None;
        }
        let (state, now) = (&self.lanes[lane], self.now);
        let id = self.conns.try_insert_with(|id| {
            Some(Conn::new(lane, block(Outlet::new(id, state.shared.clone(), peer, listener))?, now))
        })?;
        self.conns.set_word(id, self.stamp.to_bits());
        self.lanes.add(lane);
        if let Some(rates) = self.lanes[lane].read_rates {
            self.meter(id, rates);
        }
        Some(id)
    }
}
