//! The ends: requests of user code, finish and abort; and the stages of a close, in order.
//!
//! ```text
//!   apply_requests ─┬─▶ finish ──▶ begin_drain ──▶ begin_close ──▶ join ──▶ close_socket ──▶ closed
//!                   └─▶ abort ─────────────────────────┘
//! ```

use alloc::boxed::Box;

use super::turn::{EndedConn, Event};
use super::{Shard, expect_conn};
use crate::connection::{NO_HANDLER, OpenState, Own, State, Write};
use crate::tables::ReturnedItem;
use crate::{CloseHow, CloseReason, ConnId, Observer, Op};

impl<O: Observer> Shard<O> {
    /// Carries out a request of user code: the end of its connection, in one way or another.
    #[cold]
    pub(super) fn apply_requests(&mut self, id: ConnId, over_max: bool) {
        let Some(outlet) = self.conns.get(id).and_then(|conn| conn.outlet()) else { return };
        if outlet.abort_requested() {
            self.abort(id, outlet.end_reason(CloseReason::Aborted));
        } else if over_max {
            self.abort(id, CloseReason::OutboxFull);
        } else if outlet.not_framed() {
            self.finish(id, CloseReason::ReplyNotFramed);
        } else if outlet.close_requested() {
            // If the peer ended first, and the service only held the connection open.
            let told = self.conns.get(id).is_some_and(|conn| conn.input_end_notified);
            let reason = if told { CloseReason::PeerClosed } else { CloseReason::Closed };
            self.finish(id, outlet.end_reason(reason));
        }
    }

    /// Ends a connection after its queued replies. No further frame is handed out and no reply is
    /// taken; a pending call is dropped when the replies are gone.
    pub fn finish(&mut self, id: ConnId, reason: CloseReason) {
        let Some(conn) = self.conns.get_mut(id) else { return };
        if !conn.is_open() {
            return;
        }
        if conn.connect.is_on() {
            return self.abort(id, reason);
        }
        self.begin_drain(id, reason);
    }

    /// Ends a connection at once, with a reset; queued replies are dropped.
    pub fn abort(&mut self, id: ConnId, reason: CloseReason) {
        let Some(conn) = self.conns.get_mut(id) else { return };
        conn.aborting = true;
        if conn.state == State::Closing {
            conn.lingering = false;
            return self.join(id);
        }
        self.drop_input(id);
        self.begin_close(id, reason);
    }

    /// The first stage: queued replies are sent, and none is added.
    fn begin_drain(&mut self, id: ConnId, reason: CloseReason) {
        let Some(conn) = self.conns.get_mut(id) else { return };
        conn.state = State::Draining;
        conn.reason = Some(Box::new(reason));
        if let Some(outlet) = conn.outlet() {
            outlet.seal();
        }
        self.drop_input(id);
        self.start_send(id);
        self.sync_receive(id);
        self.drained(id);
    }

    /// Goes on to the next stage if all queued replies have left.
    pub(super) fn drained(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get_mut(id) else { return };
        if conn.state == State::Draining
            && !conn.send.is_on()
            && let Some(reason) = conn.reason.take()
        {
            self.begin_close(id, *reason);
        }
    }

    /// The second stage: the service is done with the connection.
    fn begin_close(&mut self, id: ConnId, reason: CloseReason) {
        let Some(conn) = self.conns.get_mut(id) else { return };
        let Some(shared) = conn.shared.take() else { return };
        let sends = conn.send.is_on();
        // Before its room is forgotten.
        let in_flight = if sends { shared.in_flight() + self.holders.room_in_flight(id.slot()) } else { 0 };
        self.shared.release(self.holders.forget(id.slot()));
        self.returns(id, ReturnedItem::Batch, in_flight);
        let Some(conn) = self.conns.get_mut(id) else { return };
        // A task may wait for room, and is not dropped with the connection.
        shared.take_ready(|waker| self.events.push_back(Event::Wake(id, waker)));
        shared.end();
        if conn.own.has(Own::DEADLINE) {
            conn.own.note(Own::DEADLINE, false);
            self.shared.deadlines().forget(id);
        }
        conn.state = State::Closing;
        let call = conn.has_handler().then_some(conn.handler);
        (conn.handler, conn.calls, conn.calls_full) = (NO_HANDLER, 0, false);
        conn.reason = None;
        conn.lingering = !conn.aborting && !conn.has_fin();
        conn.send_at = self.stamp;
        let (of, listener, was_starting) = (conn.lane, shared.listener(), conn.is_starting());
        let sealed = conn.has_channel().then(|| shared.clone());
        if was_starting {
            conn.opened = OpenState::No;
        }
        self.lanes[conn.lane].counters.closed += 1;
        self.lanes[conn.lane].counters.closed_by_reason.0[reason.index()] += 1;
        self.observer.ended(self.now, conn.lane, &shared, reason);
        self.events.push_back(Event::Ended(EndedConn {
            id,
            lane: conn.lane,
            shared,
            reason,
            opened: conn.opened == OpenState::Yes,
            call,
        }));
        if let Some(outlet) = sealed {
            self.drop_channel(id, &outlet, was_starting, reason);
        }
        if was_starting {
            self.start_over(of, listener);
        }
        self.join(id);
    }

    /// The third stage: FIN is sent, the peer has its time to close too, and operations in flight
    /// are stopped and awaited.
    pub(super) fn join(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get_mut(id) else { return };
        debug_assert_eq!(conn.state, State::Closing);
        if conn.has_fin() {
            conn.lingering = false;
        }
        if conn.lingering && conn.write == Write::Open {
            conn.write = Write::ShuttingDown;
            self.ops.push(Op::Shutdown { id });
        }
        if conn.send.stop() {
            self.ops.push(Op::SendStop { id });
        }
        if conn.connect.stop() {
            self.ops.push(Op::ConnectStop { id });
        }
        let in_flight = conn.connect.is_on()
            || conn.send.is_on()
            || conn.receive.is_on()
            || conn.write == Write::ShuttingDown
            || conn.lingering;
        if in_flight || conn.close_sent {
            self.sync_receive(id);
            self.arm(id);
        } else {
            self.close_socket(id);
        }
    }

    /// The fourth stage: nothing is in flight, and the socket is closed.
    fn close_socket(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get_mut(id) else { return };
        conn.close_sent = true;
        let how = if conn.aborting { CloseHow::Abort } else { CloseHow::Orderly };
        self.ops.push(Op::Close { id, how });
    }

    /// Handles the end of the close: the slot is free.
    pub(super) fn closed(&mut self, id: ConnId) {
        if expect_conn(&mut self.conns, id).is_none() {
            return;
        }
        let Some(conn) = self.conns.remove(id) else { return };
        debug_assert_eq!(
            self.holders.returning(id.slot()),
            0,
            "the driver has memory of {id}, which is free"
        );
        if conn.opened == OpenState::LastWords {
            self.accepting.parted();
        }
        self.wheel.clear(id.slot());
        self.lanes[conn.lane].shared.headers().forget(id);
        self.lanes[conn.lane].shared.facts().forget(id);
        if self.lanes.remove(conn.lane) {
            self.accepting.connection_gone();
        }
        // Its descriptor may serve another connection that waits.
        self.slot_freed();
    }

    pub(super) fn shut_down(&mut self, id: ConnId) {
        let Some(conn) = expect_conn(&mut self.conns, id) else { return };
        conn.write = Write::Shut;
        if conn.state == State::Closing {
            self.join(id);
        }
    }
}
