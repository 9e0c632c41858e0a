//! The ways out: finish and abort; and the order in which a socket is closed.

use alloc::boxed::Box;

use super::turn::{Ended, Event};
use super::{Shard, expect_conn};
use crate::conn::{Connecting, NO_HANDLER, State};
use crate::framing::Framing;
use crate::{CloseHow, CloseReason, ConnId, Observer, Op};

impl<S, F: Framing, O: Observer> Shard<S, F, O> {
    /// Ends a connection after its queued replies have left. No further frame is handed out and nothing more
    /// is queued; a parked handler is dropped when the replies are gone.
    pub fn finish(&mut self, id: ConnId, reason: CloseReason) {
        let Some(conn) = self.conns.get_mut(id) else { return };
        if !conn.is_open() {
            return;
        }
        if conn.connecting != Connecting::No {
            return self.abort(id, reason);
        }
        conn.state = State::Draining;
        conn.reason = Some(Box::new(reason));
        if let Some(link) = conn.link() {
            link.seal();
        }
        self.drop_input(id);
        self.start_send(id);
        self.sync_receive(id);
        self.drained(id);
    }

    /// Goes on to Closing if everything queued has left.
    pub(super) fn drained(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get_mut(id) else { return };
        if conn.state == State::Draining
            && !conn.sending
            && let Some(reason) = conn.reason.take()
        {
            self.begin_closing(id, *reason);
        }
    }

    /// Ends a connection at once, with a reset; queued replies are dropped.
    pub fn abort(&mut self, id: ConnId, reason: CloseReason) {
        let Some(conn) = self.conns.get_mut(id) else { return };
        conn.aborting = true;
        if conn.state == State::Closing {
            conn.lingering = false;
            return self.advance_close(id);
        }
        self.drop_input(id);
        self.begin_closing(id, reason);
    }

    /// The service is done with the connection.
    fn begin_closing(&mut self, id: ConnId, reason: CloseReason) {
        let Some(conn) = self.conns.get_mut(id) else { return };
        let Some(block) = conn.block.take() else { return };
        self.holders.forget(self.conns.index(id));
        let Some(conn) = self.conns.get_mut(id) else { return };
        // What waits for room may be a task, which is not dropped with the connection.
        block.link.take_ready(|waker| self.events.push_back(Event::Wake(id, waker)));
        block.link.end();
        conn.state = State::Closing;
        let call = conn.has_handler().then_some(conn.handler);
        (conn.handler, conn.calls, conn.calls_full) = (NO_HANDLER, 0, false);
        conn.reason = None;
        conn.lingering = !conn.aborting && !conn.input_ended;
        conn.send_at = self.stamp;
        self.counters.closed += 1;
        self.counters.closed_by_reason[reason.index()] += 1;
        self.observer.ended(self.now, id, reason);
        self.events.push_back(Event::Ended(Ended { id, block, reason, opened: conn.opened, call }));
        self.advance_close(id);
    }

    /// Does what is next in closing, if nothing in flight is in the way.
    pub(super) fn advance_close(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get_mut(id) else { return };
        debug_assert_eq!(conn.state, State::Closing);
        if conn.input_ended {
            conn.lingering = false;
        }
        if conn.lingering && !conn.shut {
            conn.shut = true;
            conn.shutting = true;
            self.ops.push(Op::Shutdown { id });
        }
        if conn.sending && !conn.send_stopping {
            conn.send_stopping = true;
            self.ops.push(Op::SendStop { id });
        }
        if conn.connecting == Connecting::Yes {
            conn.connecting = Connecting::Stopping;
            self.ops.push(Op::ConnectStop { id });
        }
        let connecting = conn.connecting != Connecting::No;
        let in_flight = connecting || conn.sending || conn.shutting || conn.receiving || conn.lingering;
        if !in_flight && !conn.close_sent {
            conn.close_sent = true;
            let how = if conn.aborting { CloseHow::Abort } else { CloseHow::Orderly };
            self.ops.push(Op::Close { id, how });
        } else {
            self.sync_receive(id);
            self.arm(id);
        }
    }

    pub(super) fn shut_down(&mut self, id: ConnId) {
        let Some(conn) = expect_conn(&mut self.conns, id) else { return };
        conn.shutting = false;
        if conn.state == State::Closing {
            self.advance_close(id);
        }
    }

    pub(super) fn closed(&mut self, id: ConnId) {
        if expect_conn(&mut self.conns, id).is_none() {
            return;
        }
        self.conns.remove(id);
        self.accepting.give_back();
        self.wheel.clear(self.conns.index(id));
        self.slot_freed();
    }
}
