//! Pending calls, as the state machine counts them.

use crate::connection::{NO_HANDLER, OpenState};
use crate::shard::Shard;
use crate::{CloseReason, ConnId, Observer, Stamp};

/// The result of [`Shard::call_parked`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ParkOutcome {
    /// The connection's former first call, after which the caller lists this one.
    pub next: Option<u32>,
    /// Bytes that were counted for the call, which [`Shard::call_done`] takes back.
    pub bytes: usize,
    /// The time at which the call began to wait.
    pub since: Stamp,
}

impl<O: Observer> Shard<O> {
    /// Notes a pending call of a connection, which holds `bytes` of memory. At
    /// [`Limits::calls_in_flight_max`](crate::Limits::calls_in_flight_max) pending calls, or if
    /// memory is tight, no frame is handed out until [`call_done`](Shard::call_done). `handler` is
    /// the caller's name for the call. [`EndedConn`](crate::EndedConn) returns the name of the
    /// first one.
    pub fn call_parked(&mut self, id: ConnId, handler: u32, bytes: usize) -> ParkOutcome {
        let mut bytes = bytes;
        let index = id.slot();
        let Some(conn) = self.conns.get_mut(id) else {
            return ParkOutcome { next: None, bytes: 0, since: self.stamp };
        };
        let next = conn.has_handler().then_some(conn.handler);
        if next.is_none() {
            conn.since = self.stamp;
        }
        conn.handler = handler;
        conn.calls += 1;
        let lane = &mut self.lanes[conn.lane];
        lane.counters.calls_waited += 1;
        conn.calls_full = conn.calls >= lane.limits.calls_in_flight_max;
        self.arm(id);
        // A connection that ended during the call, or just now, holds nothing.
        if self.shared(id).is_none() {
            bytes = 0;
        } else if !self.holders.add_call(index, bytes) {
            bytes = 0;
            self.abort(id, CloseReason::MemoryLimit);
        } else {
            self.shared.hold(bytes);
            self.check_held(id);
        }
        if self.is_tight()
            && let Some(conn) = self.conns.get_mut(id)
        {
            conn.calls_full = true;
        }
        ParkOutcome { next, bytes, since: self.stamp }
    }

    /// Notes the end of a pending call: [`run_frames`](Shard::run_frames) hands out further frames.
    /// `parked` is the result of [`call_parked`](Shard::call_parked), with the call that is now
    /// listed after it as `next`, which becomes the first one if this was. `before` is the `since`
    /// of the call listed before it, if there is one: that of the oldest call from now on, if this
    /// was the last of the list.
    pub fn call_done(&mut self, id: ConnId, handler: u32, parked: ParkOutcome, before: Option<Stamp>) {
        let ParkOutcome { next, bytes, .. } = parked;
        let now = self.stamp;
        let index = id.slot();
        let Some(conn) = self.conns.get_mut(id).filter(|conn| conn.has_handler()) else { return };
        self.holders.remove_call(index, bytes);
        self.shared.release(bytes);
        if conn.handler == handler {
            conn.handler = next.unwrap_or(NO_HANDLER);
        }
        conn.calls -= 1;
        conn.calls_full = false;
        conn.active_at = now;
        if next.is_none() {
            conn.since = before.unwrap_or(now);
        }
        if let Some(inbox) = &mut conn.inbox {
            inbox.begin_window(now);
        }
        self.arm(id);
    }

    /// Notes that the `open` of an [admitted](Shard::admit) connection is pending, and holds
    /// `bytes` of memory. Bytes are received and kept, up to
    /// [`Limits::inbox_bytes_high`](crate::Limits::inbox_bytes_high), and no frame is handed out
    /// until [`open_done`](Shard::open_done). `open` is the caller's name for it, which
    /// [`EndedConn`](crate::EndedConn) returns if the connection ends before: at
    /// [`Limits::open_timeout`](crate::Limits::open_timeout), by the peer, in a drain unless bytes
    /// were received, by an abort. Returns the bytes that were counted for it.
    pub fn open_parked(&mut self, id: ConnId, open: u32, bytes: usize) -> usize {
        let Some(conn) = self.conns.get_mut(id) else { return 0 };
        conn.opened = OpenState::Waits;
        let parked = self.call_parked(id, open, bytes);
        self.sync_receive(id);
        parked.bytes
    }

    /// Notes the end of a pending `open`. The next call for the connection is
    /// [`opened`](Shard::opened), even if it is ending already, [`refused`](Shard::refused) or
    /// [`abort`](Shard::abort). `bytes` is the result of [`open_parked`](Shard::open_parked).
    pub fn open_done(&mut self, id: ConnId, open: u32, bytes: usize) {
        self.call_done(id, open, ParkOutcome { next: None, bytes, since: self.stamp }, None);
        if let Some(conn) = self.conns.get_mut(id) {
            conn.opened = OpenState::No;
            // A peer that was let in just now has its whole time before it is asked for a sign of
            // life.
            conn.heard_at = self.stamp;
        }
    }

    /// True if the turn has room for another call apart from frames: a resumed call or a task. It
    /// counts. Calls without room are left to the next turn, which must come without a wait. There
    /// is no room if much was queued in the turn, or if memory is used up and some of it is on its
    /// way back.
    #[inline]
    pub fn take_call(&mut self) -> bool {
        !self.holds_off() && self.work.take_call()
    }

    /// True if no other call of a connection may begin before a pending one is done.
    pub fn calls_are_full(&self, id: ConnId) -> bool {
        self.conns.get(id).is_some_and(|conn| conn.calls_full)
    }
}
