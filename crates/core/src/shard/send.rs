//! Replies on their way to the peer: one send in flight for each connection.

use alloc::boxed::Box;
use core::time::Duration;

use super::lanes::LaneState;
use super::memory::{UNREAD, count_room, set_room};
use super::turn::Event;
use super::{Shard, expect_conn};
use crate::bytes::EarlyLooks;
use crate::connection::{Flight, Outlet, State, Write};
use crate::tables::{LISTED_BYTES, ReturnedItem, RoomOf};
use crate::time::{STEP, Stamp};
use crate::{Batch, CloseReason, ConnId, LaneId, Observer, Op, SendEnd};

impl<O: Observer> Shard<O> {
    /// Looks at every connection that user code touched.
    pub(super) fn flush(&mut self) {
        // Ending a connection runs no user code, so the list does not grow during the walk; events
        // for user code come in the next turn.
        let mut dirty = core::mem::take(&mut self.scratch);
        self.shared.swap_dirty(&mut dirty);
        for id in &dirty {
            self.flush_one(*id);
        }
        if self.shared.has_asked() || self.held_bytes() > self.limits.held_bytes_max {
            self.see_to_asked(&dirty);
        }
        self.grew.clear();
        dirty.clear();
        self.scratch = dirty;
    }

    /// Takes in deadlines, makes room, and gives it to the calls that wait for it.
    #[cold]
    #[inline(never)]
    fn see_to_asked(&mut self, dirty: &[ConnId]) {
        if self.shared.deadlines().has_changes() {
            self.take_deadlines();
        }
        if self.shared.take_service_grew() {
            self.watch_services(dirty);
        }
        if self.held_bytes() > self.limits.held_bytes_max {
            self.relieve(dirty);
        }
        if !self.shared.line().is_empty() {
            self.serve_line();
        }
        self.shared.looked();
    }

    #[inline]
    fn flush_one(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get_mut(id) else { return };
        let Some(shared) = &conn.shared else { return };
        let outlet = &**shared;
        if outlet.take_dirty_unless_plain() || conn.send.is_on() || conn.is_aside() || !conn.is_open() {
            return self.flush_checked(id);
        }
        // The common case: a reply, with nothing that depends on the time of its sending.
        let Some(mut batch) = outlet.take_pending() else { return self.close_if_quiet(id) };
        if batch.may_have_room() {
            count_room(&mut self.holders, &self.shared, id, &mut batch);
        }
        let len = batch.len();
        let owns = len >= LISTED_BYTES && batch.owns();
        conn.send = Flight::Armed;
        conn.send_at = self.stamp;
        let sooner = i64::from(outlet.lane().write_look) < conn.timer.left(self.stamp);
        outlet.lane().moved.sends.add(1);
        self.observer.sending(self.now, id, len);
        self.ops.push(Op::Send { id, batch });
        if sooner || len >= LISTED_BYTES || self.drain.is_some() {
            self.note_send(id, sooner, len, owns);
        }
    }

    /// Notes a send, for its limits and waiters.
    #[cold]
    fn note_send(&mut self, id: ConnId, sooner: bool, len: usize, owns: bool) {
        if sooner {
            self.arm(id);
        }
        if len >= LISTED_BYTES {
            self.watch(id);
        }
        // The owner of bytes may wait for them.
        self.send_awaited |= owns || self.drain.is_some();
        self.close_if_quiet(id);
    }

    /// Flushes a connection whose user code asked for more than a reply, or with a send in flight.
    #[inline(never)]
    fn flush_checked(&mut self, id: ConnId) {
        let Some(outlet) = self.conns.get(id).and_then(|conn| conn.outlet()) else { return };
        let over_max = outlet.is_over_max();
        if outlet.has_requests() || over_max {
            return self.apply_requests(id, over_max);
        }
        let switched = outlet.is_switched();
        if outlet.is_limited() {
            self.limits_set(id);
        }
        if switched {
            self.look_again(id);
        }
        self.start_send(id);
        self.close_if_quiet(id);
    }

    /// Sends queued bytes, or, if a send is in flight, leaves them until its end.
    #[inline]
    pub(super) fn start_send(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get_mut(id) else { return };
        if conn.send.is_on() {
            // It may have been started in this turn, when nothing waited for its end yet. Now
            // something does, if only the bytes queued after it.
            self.send_awaited = true;
            let Some(outlet) = conn.outlet() else { return };
            let room = match self.holders.room_of(id.slot()) {
                0 => outlet.pending_large_room(),
                _ => outlet.pending_room(),
            };
            if room + outlet.outbox_bytes() >= LISTED_BYTES {
                set_room(&mut self.holders, &self.shared, id, RoomOf::Pending, room);
                self.watch(id);
            }
            return;
        }
        if self.holders.room_of(id.slot()) > 0 {
            // Nothing is queued after it.
            set_room(&mut self.holders, &self.shared, id, RoomOf::Pending, 0);
        }
        if conn.outlet().is_some_and(Outlet::is_over_max) {
            // Such as a reply of 4 GiB, which does not fit into a send.
            return self.abort(id, CloseReason::OutboxFull);
        }
        if conn.has_channel() {
            return self.start_sealed(id);
        }
        let Some(shared) = &conn.shared else { return };
        let Some(batch) = shared.take_pending() else {
            if shared.half_closes() {
                self.end_writing(id);
            }
            return;
        };
        shared.lane().moved.sends.add(1);
        self.send_and_watch(id, batch);
    }

    /// Begins a send that was counted, and watches it if it is large.
    #[inline]
    pub(super) fn send_and_watch(&mut self, id: ConnId, batch: Box<Batch>) {
        self.observer.sending(self.now, id, batch.len());
        let much = batch.len() >= LISTED_BYTES;
        self.send(id, batch);
        if much {
            self.watch(id);
        }
    }

    /// Sends FIN after the last byte, while receiving goes on.
    #[cold]
    pub(super) fn end_writing(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get_mut(id) else { return };
        if conn.is_open() && conn.write == Write::Open {
            conn.write = Write::ShuttingDown;
            self.ops.push(Op::Shutdown { id });
        }
    }

    #[inline]
    fn send(&mut self, id: ConnId, mut batch: Box<Batch>) {
        if batch.may_have_room() {
            count_room(&mut self.holders, &self.shared, id, &mut batch);
        }
        let Some(conn) = self.conns.get_mut(id) else { return };
        conn.send = Flight::Armed;
        conn.send_at = self.stamp;
        let is_plain = conn.is_open()
            && !conn.is_held_back()
            && conn.outlet().is_some_and(|outlet| !outlet.is_awaited() && !outlet.refuses());
        self.send_awaited |=
            !is_plain || self.drain.is_some() || (batch.len() >= LISTED_BYTES && batch.owns());
        // The other limits are not nearer than they were.
        let sooner = i64::from(self.lanes[conn.lane].times.write_look) < conn.timer.left(conn.send_at);
        self.ops.push(Op::Send { id, batch });
        if sooner {
            self.arm(id);
        }
    }

    #[inline(always)]
    pub(super) fn sent(&mut self, id: ConnId, batch: Box<Batch>, end: SendEnd) {
        let Some(conn) = expect_conn(&mut self.conns, id) else { return };
        conn.send = Flight::None;
        // The common case: all was sent, and nothing depends on that.
        if end == SendEnd::Done
            && let Some(shared) = &conn.shared
            && shared.is_plain()
            && !batch.room_counts
            && conn.is_open()
            && (!conn.is_aside() || (conn.is_sealed_alone() && self.channels.has_said_nothing(id)))
            && self.drain.is_none()
            && conn.timer.is_set()
            && conn.timer.left(self.stamp) <= i64::from(shared.lane().idle)
        {
            debug_assert!(batch.is_empty(), "a send ended before its end");
            conn.send_at = self.stamp;
            shared.lane().moved.bytes_sent.add(shared.all_sent() as u64);
            return self.shared.recycle_here(batch);
        }
        self.sent_checked(id, batch, end);
    }

    /// Notes that the peer took a part of a send after this time.
    fn note_stall(&mut self, lane: LaneId, time: Duration) {
        if !time.is_zero() {
            self.observer.send_stalled(lane, time);
        }
    }

    /// Handles the end of a send for which something waits.
    #[inline(never)]
    fn sent_checked(&mut self, id: ConnId, mut batch: Box<Batch>, end: SendEnd) {
        let Some(conn) = self.conns.get_mut(id) else { return };
        let Some(shared) = &conn.shared else {
            self.shared.recycle(batch);
            self.returned(id, ReturnedItem::Batch);
            return self.join(id);
        };
        if core::mem::take(&mut batch.room_counts) {
            set_room(&mut self.holders, &self.shared, id, RoomOf::Flight, 0);
        }
        let left = shared.sent_but(batch.len());
        shared.left(left);
        shared.lane().moved.bytes_sent.add(left as u64);
        let looked_at = core::mem::replace(&mut conn.send_at, self.stamp);
        // Before the abort that may follow.
        let stalled = batch.untaken_since.unwrap_or(looked_at).age(self.stamp);
        let (lane, was_touched) = (conn.lane, shared.is_dirty());
        let mut rest = None;
        match end {
            SendEnd::Done => {
                debug_assert!(batch.is_empty(), "a send ended before its end");
                self.shared.recycle(batch);
            }
            // A write limit requested the stop, to see how much the peer takes.
            SendEnd::Stopped if batch.is_empty() => self.shared.recycle(batch),
            SendEnd::Stopped => {
                let judged = self.lateness.judged_for(self.now);
                let look = Look { looked_at, now: self.stamp, judged, is_short: self.shared.is_short() };
                match judge(&self.lanes[lane], &mut batch, left, &look) {
                    Ok(Verdict::Enough) => {}
                    Ok(Verdict::Excused) => self.lateness.watch(self.now),
                    Err(reason) => {
                        self.note_stall(lane, stalled);
                        return self.abort(id, reason);
                    }
                }
                rest = Some(batch);
            }
            SendEnd::Error(errno) => return self.abort(id, CloseReason::of_errno(errno)),
        }
        let waits = conn.is_held_back() || shared.is_awaited();
        let mut released = false;
        if waits && shared.outbox_bytes() <= self.lanes[conn.lane].limits.outbox_bytes_low {
            shared.take_ready(|waker| self.events.push_back(Event::Wake(id, waker)));
            // A connection without bytes has to find out that nothing waits, so that it receives
            // again, and is quiet.
            let looks = conn.inbox.is_some() || conn.input_ended() || conn.paused;
            if let Some(inbox) = &mut conn.inbox {
                inbox.begin_window(self.stamp);
            }
            released = conn.aside.release();
            if released && looks {
                self.events.push_back(Event::Frames(id));
            }
        }
        // The idle time runs again, unless another send does, or it never rested; and all limits
        // do, if the write limit went off or the peer was held back until now.
        let sooner = released
            || !conn.timer.is_set()
            || i64::from(conn.times(&self.lanes[conn.lane].times).idle) < conn.timer.left(conn.send_at);
        let (draining, sealed) = (conn.state == State::Draining, conn.has_channel());
        let more = shared.has_more() || (sealed && self.owes_sealed(id, draining));
        // A send for which nothing waited may have been reported late. And so may one for which
        // something has waited only for a moment.
        if left > 0 && (rest.is_some() || ((waits || more) && !was_touched)) {
            self.note_stall(lane, stalled);
        }
        match rest {
            Some(batch) => self.send_rest(id, batch, looked_at),
            None if more => self.start_send(id),
            None => {}
        }
        if sooner {
            self.arm(id);
        }
        if draining {
            self.drained(id);
        }
        self.close_if_quiet(id);
    }

    /// Goes on with a send that was looked at.
    #[cold]
    #[inline(never)]
    fn send_rest(&mut self, id: ConnId, mut batch: Box<Batch>, looked_at: Stamp) {
        // Replies may be queued after it.
        self.send_awaited = true;
        let is_untaken = batch.is_untaken;
        count_room(&mut self.holders, &self.shared, id, &mut batch);
        self.send(id, batch);
        let Some(conn) = self.conns.get_mut(id) else { return };
        if is_untaken && is_early(&self.lanes[conn.lane], looked_at, self.stamp) {
            // As if no look had happened.
            conn.send_at = looked_at;
        }
        let room = conn.outlet().map_or(0, Outlet::pending_room);
        set_room(&mut self.holders, &self.shared, id, RoomOf::Pending, room);
        self.watch(id);
    }
}

/// A look at the progress of a send.
struct Look {
    /// The time of the last look, or of the start of the send.
    looked_at: Stamp,
    now: Stamp,
    /// The time for which limits have been judged: a shard that is away sends nothing.
    judged: Duration,
    /// Memory is short.
    is_short: bool,
}

/// The verdict of a look on a peer that stays.
enum Verdict {
    Enough,
    /// It took too little, unless the shard was away for a part of the time.
    Excused,
}

/// Judges a peer that took `bytes` of a send since the last look.
///
/// # Errors
/// The reason to close it: it is too slow, or memory is short and it has read nothing for
/// [`UNREAD`] steps.
#[cold]
#[inline(never)]
fn judge(of: &LaneState, batch: &mut Batch, bytes: usize, look: &Look) -> Result<Verdict, CloseReason> {
    let Look { looked_at, now, judged, is_short } = *look;
    // Bytes for which the kernel just got room are sent after the first look that found nothing,
    // and show at the next.
    let again = core::mem::replace(&mut batch.is_untaken, bytes == 0) && bytes == 0;
    let time = batch.untaken_since.get_or_insert(looked_at).age(now);
    if again && is_short && time.min(judged) >= STEP * UNREAD {
        return Err(CloseReason::MemoryLimit);
    }
    let untaken_since = batch.untaken_since.unwrap_or(looked_at);
    let mut seen = batch.early.take().unwrap_or(EarlyLooks { looked_at, untaken_since, bytes: 0 });
    seen.bytes += bytes;
    if is_early(of, seen.looked_at, now) {
        // A rate applies over its whole time, however often memory has the send looked at.
        batch.early = Some(seen);
        if bytes > 0 {
            batch.untaken_since = Some(now);
        }
        return Ok(Verdict::Enough);
    }
    let verdict = |enough: bool| if enough { Verdict::Enough } else { Verdict::Excused };
    match of.limits.write_stall_timeout {
        Some(stalled) if seen.bytes == 0 => match time >= stalled {
            true if !judged.is_zero() => Err(CloseReason::WriteStallTimeout),
            is_over => Ok(verdict(!is_over)),
        },
        _ => {
            let (bytes, time) = (seen.bytes, seen.untaken_since.age(now));
            batch.untaken_since = Some(now);
            let least = of.limits.write_bytes_per_second_min as u128;
            let takes = |time: Duration| bytes as u128 >= least * time.as_millis() / 1000;
            if takes(time.min(judged)) { Ok(verdict(takes(time))) } else { Err(CloseReason::WriteTooSlow) }
        }
    }
}

/// True if a send was looked at for memory, before its limits are judged.
fn is_early(of: &LaneState, looked_at: Stamp, now: Stamp) -> bool {
    looked_at.left(of.times.write_look, now) > 0
}
