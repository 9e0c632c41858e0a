//! Connections to upstreams.

use alloc::boxed::Box;

use super::turn::Event;
use super::{Shard, expect_conn};
use crate::connection::{ConnShared, Flight, Outlet, State};
use crate::{Address, CloseReason, ConnId, LaneId, Observer, Op};

impl<O: Observer> Shard<O> {
    /// Begins to connect. [`Lane::connected`](crate::Lane::connected) reports the connection,
    /// [`Lane::ended`](crate::Lane::ended) a failure; queue nothing for it before. `None` if the
    /// [outbound](Shard::add_outbound) lane is full, there is no memory, or the shard drains and
    /// every accepted connection is gone.
    pub fn connect<S: 'static>(&mut self, lane: LaneId, address: Address, session: S) -> Option<ConnId> {
        if self.has_closed_outbound() || self.connections_left(lane) == 0 {
            return None;
        }
        let block = |outlet| ConnShared::try_new(outlet, session).map(ConnShared::hide);
        let id = self.insert(lane, address.as_ip(), 0, block)?;
        if let Some(conn) = self.conns.get_mut(id) {
            conn.connect = Flight::Armed;
        }
        self.ops.push(Op::Connect { id, address: Box::new(address) });
        self.arm(id);
        Some(id)
    }

    /// Connections for which an [outbound](Shard::add_outbound) lane has room.
    pub fn connections_left(&self, lane: LaneId) -> usize {
        self.lanes[lane].connections_max - self.lanes[lane].connections
    }

    /// The connection in a slot, if that is taken.
    pub fn id_at(&self, slot: u32) -> Option<ConnId> {
        self.conns.id_at(slot)
    }

    pub(super) fn connected(&mut self, id: ConnId, result: Result<(), i32>) {
        let Some(conn) = expect_conn(&mut self.conns, id) else { return };
        conn.connect = Flight::None;
        if conn.state == State::Closing {
            return self.join(id);
        }
        if let Err(errno) = result {
            return self.abort(id, CloseReason::ConnectFailed(errno));
        }
        let now = self.stamp;
        (conn.since, conn.heard_at, conn.active_at) = (now, now, now);
        let peer = conn.outlet().and_then(Outlet::peer);
        self.observer.opened(self.now, conn.lane, id, peer);
        self.events.push_back(Event::Connected(id));
    }
}
