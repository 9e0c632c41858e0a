//! The ways out: finish, abort, shutdown of the whole shard; and the order in which a socket is closed.

use alloc::boxed::Box;

use super::{Drain, Event, Shard, expect_conn};
use crate::conn::{Connecting, NO_HANDLER, State};
use crate::framing::Framing;
use crate::stamp::Stamp;
use crate::{CloseHow, CloseReason, ConnId, Observer, Op};

/// What had arrived when a drain began is answered before quiet connections are closed: they are once a turn
/// brings nothing, or after this many turns and one more for each connection. A turn brings at least one
/// connection's bytes, so those who had sent something by then had their turn even where others never stop.
const DRAIN_TURNS_MIN: u32 = 64;

impl<S, F: Framing, O: Observer> Shard<S, F, O> {
    /// Ends a connection after its queued replies have left. No further frame is handed out and nothing more
    /// is queued; a parked handler is dropped when the replies are gone.
    pub fn finish(&mut self, id: ConnId, reason: CloseReason) {
        let Some(conn) = self.conns.get_mut(id) else { return };
        if !conn.is_open() {
            return;
        }
        if conn.connecting != Connecting::No {
            return self.end(id, reason, true);
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
        self.end(id, reason, true);
    }

    pub(super) fn end(&mut self, id: ConnId, reason: CloseReason, aborting: bool) {
        let Some(conn) = self.conns.get_mut(id) else { return };
        if conn.state == State::Closing {
            if aborting {
                conn.aborting = true;
                conn.lingering = false;
                self.advance_close(id);
            }
            return;
        }
        conn.aborting = aborting;
        self.drop_input(id);
        self.begin_closing(id, reason);
    }

    /// The service is done with the connection.
    fn begin_closing(&mut self, id: ConnId, reason: CloseReason) {
        let Some(conn) = self.conns.get_mut(id) else { return };
        let Some(block) = conn.block.take() else { return };
        // What waits for room may be a task, which is not dropped with the connection.
        block.link.take_ready(|waker| self.events.push_back(Event::Wake(id, waker)));
        block.link.end();
        conn.state = State::Closing;
        let handler = conn.has_handler().then_some(conn.handler);
        (conn.handler, conn.calls, conn.calls_full) = (NO_HANDLER, 0, false);
        conn.reason = None;
        conn.lingering = !conn.aborting && !conn.input_ended;
        conn.send_at = Stamp::at(self.now);
        self.counters.closed += 1;
        self.counters.closed_by_reason[reason.index()] += 1;
        self.observer.ended(self.now, id, reason);
        self.events.push_back(Event::Ended { id, block, reason, opened: conn.opened, handler });
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
        self.room_made();
    }

    /// Begins to shut down: accepting ends, what was received is served, and connections are closed as soon
    /// as nothing is owed; after [`Limits::drain`](crate::Limits::drain) the rest is aborted.
    pub fn drain(&mut self) {
        if self.drain.is_none() {
            let deadline = self.now + self.limits.drain;
            let turns_left = DRAIN_TURNS_MIN + self.conns.len() as u32;
            self.drain = Some(Drain { deadline, turns_left, first_turn: true });
            self.local.set_draining();
            self.refuse_waiting();
            self.sync_accept();
        }
    }

    /// Aborts every connection, and accepts no more.
    pub fn force(&mut self) {
        self.drain();
        self.abort_all(CloseReason::Forced);
    }

    /// Closes every connection after what is queued, and makes or accepts no more; after
    /// [`Limits::drain`](crate::Limits::drain) what is left is aborted.
    pub fn close_all(&mut self) {
        self.drain();
        for index in 0..self.conns.used() {
            if let Some(id) = self.conns.id_at(index) {
                self.finish(id, CloseReason::Shutdown);
            }
        }
    }

    pub(super) fn step_drain(&mut self) {
        let Some(drain) = &mut self.drain else { return };
        if self.now >= drain.deadline {
            return self.abort_all(CloseReason::DrainTimeout);
        }
        if drain.turns_left == 0 {
            return;
        }
        let arrives = core::mem::take(&mut self.has_received) || core::mem::take(&mut drain.first_turn);
        drain.turns_left = if arrives { drain.turns_left - 1 } else { 0 };
        if drain.turns_left == 0 {
            for index in 0..self.conns.used() {
                if let Some(id) = self.conns.id_at(index) {
                    if let Some(conn) = self.conns.get_mut(id) {
                        conn.drain = true;
                    }
                    self.close_if_quiet(id);
                }
            }
        }
    }

    fn abort_all(&mut self, reason: CloseReason) {
        for index in 0..self.conns.used() {
            if let Some(id) = self.conns.id_at(index) {
                self.abort(id, reason);
            }
        }
        if let Some(drain) = &mut self.drain {
            // Once is enough: what is left is with the driver.
            drain.deadline = crate::Time::from_nanos(u64::MAX);
            drain.turns_left = 0;
        }
    }

    /// While draining, closes a connection that is owed nothing.
    #[inline]
    pub(super) fn close_if_quiet(&mut self, id: ConnId) {
        if self.drain.is_none() {
            return;
        }
        let Some(conn) = self.conns.get(id) else { return };
        if conn.drain && conn.is_open() && conn.is_quiet() && self.current.is_empty() {
            self.finish(id, CloseReason::Shutdown);
        }
    }
}
