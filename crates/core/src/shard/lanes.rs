//! Lanes: what the connections of one sort have in common.
//!
//! A service is a lane, and so are the connections that the server makes. A connection names its lane by a number, so that one
//! table, one wheel and one list of dirty connections serve all.

use alloc::rc::Rc;
use alloc::vec::Vec;
use core::ops::{Index, IndexMut};
use core::time::Duration;

use ringserve_buf::has_room_for;

use super::Shard;
use crate::conn::Conn;
use crate::framing::Encoding;
use crate::outlet::{ConnHead, Outlet};
use crate::shared::{LaneShared, ShardShared};
use crate::times::Times;
use crate::{ConnId, ConnStats, LaneId, Limits, Observer};
use core::net::SocketAddr;

/// What a shard knows of a lane.
pub(super) struct LaneState {
    pub limits: Limits,
    pub times: Times,
    pub shared: Rc<LaneShared>,
    /// But for what `shared` counts.
    pub counters: ConnStats,
    /// The server makes its connections: they stay, in a drain, until no other one is left.
    pub is_outbound: bool,
    /// Connections that exist.
    pub connections: usize,
    /// How many may of those that the server makes. Of those that are accepted all lanes share one limit.
    pub connections_max: usize,
}

/// All lanes of a shard. Where the first one is needs no look at a length.
pub(super) struct Lanes {
    first: LaneState,
    others: Vec<LaneState>,
    /// Connections of all lanes that were accepted, and how many may be.
    inbound: usize,
    inbound_max: usize,
}

impl Lanes {
    pub(super) fn new(
        shared: &Rc<ShardShared>,
        limits: Limits,
        connections_max: usize,
        encoding: Encoding,
    ) -> Lanes {
        let first = LaneState::new(shared, limits, connections_max, encoding, false, None);
        Lanes { first, others: Vec::new(), inbound: 0, inbound_max: connections_max }
    }

    /// Connections that were accepted.
    #[inline]
    pub(super) fn inbound(&self) -> usize {
        self.inbound
    }

    /// Further ones for which there is room.
    #[inline]
    pub(super) fn inbound_left(&self) -> usize {
        self.inbound_max - self.inbound
    }

    /// A connection of a lane exists.
    fn add(&mut self, lane: LaneId) {
        self[lane].connections += 1;
        self[lane].counters.opened += 1;
        self.inbound += usize::from(!self[lane].is_outbound);
    }

    /// A connection of a lane is gone. True if it was accepted.
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

    /// Panics if anything contradicts itself, with `all` connections of all lanes.
    pub(super) fn invariants(&self, all: usize) {
        let of = |outbound| -> usize {
            self.iter().filter(|lane| lane.is_outbound == outbound).map(|lane| lane.connections).sum()
        };
        assert_eq!((of(false), of(false) + of(true)), (self.inbound, all), "connections of lanes");
        assert!(self.inbound <= self.inbound_max, "more connections than there may be");
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
            limits,
            counters: ConnStats::default(),
            is_outbound,
            connections: 0,
            connections_max,
        }
    }
}

impl LaneState {
    /// What was counted so far.
    pub(super) fn counters(&self) -> ConnStats {
        let moved = &self.shared.moved;
        ConnStats {
            frames: moved.frames.get(),
            bytes_received: moved.bytes_received.get(),
            bytes_sent: moved.bytes_sent.get(),
            sends: moved.sends.get(),
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
    /// Adds a lane for connections that the server makes, at most `connections_max` of them. Of its limits those of a connection
    /// hold; the sums of memory, the time to connect and the times of a drain are the shard's.
    pub fn add_outbound(&mut self, limits: Limits, connections_max: usize, encoding: Encoding) -> LaneId {
        let connect_timeout = self.limits.connect_timeout;
        let state = LaneState::new(&self.shared, limits, connections_max, encoding, true, connect_timeout);
        self.lanes.push(state)
    }

    /// Adds a lane for connections that are accepted at `listeners` further listeners, which are numbered behind those that are
    /// there. Of its limits those of a connection hold. How many connections there may be is the shard's, of all such lanes
    /// together. Before the first turn.
    pub fn add_inbound(&mut self, limits: Limits, listeners: u16, encoding: Encoding) -> LaneId {
        let most = self.lanes.inbound_max;
        let lane = self.lanes.push(LaneState::new(&self.shared, limits, most, encoding, false, None));
        self.accepting.add_listeners(listeners, lane);
        lane
    }

    /// Puts a connection into the table, with the block that `block` makes. `None` if there is no memory for it.
    pub(super) fn insert(
        &mut self,
        lane: LaneId,
        peer: Option<SocketAddr>,
        listener: u16,
        block: impl FnOnce(Outlet) -> Option<ConnHead>,
    ) -> Option<ConnId> {
        // For what goes with it, which cannot fail.
        if !has_room_for::<Conn>() {
            return None;
        }
        let (state, now) = (&self.lanes[lane], self.now);
        let id = self.conns.try_insert_with(|id| {
            Some(Conn::new(lane, block(Outlet::new(id, state.shared.clone(), peer, listener))?, now))
        })?;
        self.lanes.add(lane);
        Some(id)
    }
}
