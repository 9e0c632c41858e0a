//! Connections that the server makes, to upstreams.

use alloc::boxed::Box;
use alloc::rc::Rc;

use ringserve_buf::has_room_for;

use super::turn::Event;
use super::{Shard, expect_conn};
use crate::conn::{Conn, Flight, State};
use crate::framing::Framing;
use crate::outlet::{ConnShared, Outlet};
use crate::slots::Slots;
use crate::{Address, CloseReason, ConnId, Observer, Op};

impl<S, F: Framing, O: Observer> Shard<S, F, O> {
    /// Gives connections names with slots from `first` on, so that two shards can share a driver. Before the first
    /// connection.
    pub fn number_from(&mut self, first: u32) {
        debug_assert!(self.conns.is_empty(), "there are connections already");
        self.conns = Slots::numbered_from(first);
    }

    /// Begins to connect. [`Lane::connected`](crate::Lane::connected) says that the connection is there, [`Lane::ended`](crate::Lane::ended) that it will not be;
    /// nothing may be queued for it before. `None` if there is no slot or no memory for it, or the shard drains.
    pub fn connect(&mut self, address: Address, session: S) -> Option<ConnId> {
        if self.has_stopped()
            || !self.has_slot()
            || !has_room_for::<ConnShared<S>>()
            || !self.accepting.take_quota()
        {
            return None;
        }
        let (local, now) = (&self.local, self.now);
        let id = self.conns.insert_with(|id| {
            let outlet = Outlet::new(id, local.clone(), address.as_ip(), 0);
            let mut conn = Conn::new(Rc::new(ConnShared { outlet, session }), now);
            conn.connect = Flight::Armed;
            conn
        });
        let Some(id) = id else {
            self.accepting.give_back();
            return None;
        };
        self.counters.opened += 1;
        self.ops.push(Op::Connect { id, address: Box::new(address) });
        self.arm(id);
        if !self.has_room() {
            self.sync_accept();
        }
        Some(id)
    }

    /// The name in the slot at this index, counted from the first one, if it is taken.
    pub fn id_at(&self, index: u32) -> Option<ConnId> {
        self.conns.id_at(index)
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
        self.observer.opened(self.now, id, peer);
        self.events.push_back(Event::Connected(id));
    }
}
