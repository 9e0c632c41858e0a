//! Received bytes on their way to the service.

use ringserve_buf::{Block, Lease, LeaseMut, try_box};

use super::frames::Frames;
use super::turn::{Event, Lane, hand_out};
use super::{Shard, expect_conn};
use crate::connection::{Conn, Flight, Inbox, Input, NoMemory, OpenState, Outlet, QueueFlags, State};
use crate::tables::ReturnedItem;
use crate::{CloseReason, ConnId, Observer, Op, ReceiveEnd, ServerLimits};

/// Missing bytes from which a frame is received straight into its block.
pub(super) const LARGE_BYTES: usize = 32 * 1024;

/// The part of the receive memory up to which full buffers are kept as they are while they wait for
/// replies on their way: that takes only a moment.
pub(super) const KEPT_FOR_A_MOMENT: usize = 2;

/// The same part while they wait for calls and readers, possibly for ever: the rest of the receive
/// memory goes on serving the others.
pub(super) const KEPT_FOR_LONG: usize = 4;

/// Receives that end by themselves after a large frame. The next bytes are the head of another
/// large frame, or there is none; a receive that goes on would bring much of such a frame before it
/// ends, and take a cancel.
const BULK_RECEIVES: u8 = 8;

/// Receives that end by themselves after a stream was paused: as many as fill its outbox and its
/// inbox once more by the default marks, a buffer each, so that a slow reader is paused again
/// without a receive that goes on. Such a receive would bring 32 buffers before it is stopped. Each
/// takes up to 16 buffers on epoll, so that forwarded bytes leave in fewer sends.
const RECEIVES_AFTER_PAUSE: u8 = 32;

/// `EIO`, as every Linux has it.
const EIO: i32 = 5;

/// The number of leased buffers from which on receive memory is short: more than half of it.
pub(super) fn short_from(limits: &ServerLimits) -> usize {
    limits.receive_bytes_max / limits.receive_buffer_bytes.saturating_mul(2).max(1) + 1
}

impl<O: Observer> Shard<O> {
    #[inline]
    pub(super) fn received(&mut self, id: ConnId, lease: LeaseMut, lane: &mut (impl Lane<O> + ?Sized)) {
        self.received += lease.len();
        self.has_received = true;
        let now = self.stamp;
        let Some(conn) = expect_conn(&mut self.conns, id) else { return };
        let lane_shared = match &conn.shared {
            Some(shared) => shared.lane(),
            None => &self.lanes[conn.lane].shared,
        };
        lane_shared.moved.bytes_received.add(lease.len() as u64);
        if !conn.is_open() {
            // The peer still sends although its time to close is over, and its input is being shut
            // down. Bytes read after that open no window: without a reset the peer would wait for
            // one until the kernel forgets the connection.
            conn.aborting |=
                conn.state == State::Closing && conn.receive == Flight::Stopping && !conn.lingering;
            return;
        }
        conn.active_at = now;
        conn.heard_at = now;
        conn.missed_heartbeats = 0;
        let first_since_armed = !core::mem::replace(&mut conn.receive_used, true);
        if conn.takes_frames_at_once()
            && conn.waiting_bytes() == 0
            && !conn.is_cut()
            && let Some(shared) = &conn.shared
        {
            let plain = conn.inbox.is_none() && !conn.input_ended() && !conn.paused && self.drain.is_none();
            let (of, shared, is_first) = (conn.lane, shared.clone(), !conn.frame_seen);
            if first_since_armed {
                self.arm(id);
            }
            self.begin_batch();
            return hand_out(&mut Frames::new(self, id, of, &shared, lease.freeze(), plain, is_first), lane);
        }
        self.received_aside(id, lease, first_since_armed, lane);
    }

    /// Takes bytes that are not handed out now.
    #[inline(never)]
    fn received_aside(
        &mut self,
        id: ConnId,
        lease: LeaseMut,
        first_since_armed: bool,
        lane: &mut (impl Lane<O> + ?Sized),
    ) {
        let Some(conn) = self.conns.get(id) else { return };
        if conn.opened == OpenState::Header {
            return self.start(id, lease, lane);
        }
        if conn.is_cut() {
            drop(lease);
        } else if conn.has_channel() {
            self.unseal(id, lease, lane);
        } else if conn.takes_frames() && conn.waiting_bytes() == 0 {
            // The rate at which its peer sends is limited.
            self.begin_batch();
            self.hand_out_aside(id, lease.freeze(), false, lane);
        } else {
            self.hold(id, lease.freeze(), false);
        }
        if first_since_armed {
            self.arm(id);
        }
    }

    /// Takes back a block of the driver, with bytes received straight into it.
    #[cold]
    pub(super) fn filled(&mut self, id: ConnId, block: Block, bytes: usize, end: ReceiveEnd) {
        self.received += bytes;
        self.has_received |= bytes > 0;
        let now = self.stamp;
        let Some(conn) = expect_conn(&mut self.conns, id) else { return };
        let lane_shared = match &conn.shared {
            Some(shared) => shared.lane(),
            None => &self.lanes[conn.lane].shared,
        };
        lane_shared.moved.bytes_received.add(bytes as u64);
        if bytes > 0 && conn.is_open() {
            (conn.active_at, conn.heard_at, conn.missed_heartbeats) = (now, now, 0);
        }
        if bytes > 0 && conn.state == State::Closing && conn.receive == Flight::Stopping {
            // As for bytes that come in a lease.
            conn.aborting |= !conn.lingering;
        }
        let mut looks = false;
        match conn.inbox.as_mut().filter(|inbox| inbox.is_away()) {
            Some(inbox) => {
                inbox.come_back(block, bytes);
                looks = inbox.is_ripe() || conn.outlet().is_some_and(Outlet::is_switched);
            }
            None => drop(block),
        }
        if conn.is_cut() {
            // Nothing can follow it.
            self.drop_input(id);
            self.close_if_quiet(id);
        } else if looks {
            self.events.push_back(Event::Frames(id));
            self.check_held(id);
        }
        self.receive_ended(id, end);
    }

    /// Prepares for a large frame that began: it is received straight into its block, once the
    /// armed receive has ended, and further receives end by themselves for a while.
    #[cold]
    pub(super) fn expect_large(&mut self, id: ConnId) {
        // Records are received as they arrive.
        let Some(conn) = self.conns.get_mut(id).filter(|conn| !conn.has_channel()) else { return };
        // Without the stop, the armed receive would go on.
        let goes_on = core::mem::replace(&mut conn.bulk, BULK_RECEIVES) == 0;
        if goes_on && conn.receive.stop() {
            self.ops.push(Op::ReceiveStop { id });
        }
    }

    pub(super) fn receive_ended(&mut self, id: ConnId, end: ReceiveEnd) {
        if self.shared.returning_bytes() > 0 {
            self.returned(id, ReturnedItem::Block);
        }
        let Some(conn) = expect_conn(&mut self.conns, id) else { return };
        conn.receive = Flight::None;
        if conn.inbox.as_ref().is_some_and(|inbox| inbox.is_away()) && conn.state != State::Closing {
            // The driver lost it, with the received part of the frame.
            return self.abort(id, CloseReason::of_errno(EIO));
        }
        match end {
            ReceiveEnd::Stopped => {}
            ReceiveEnd::Eof => conn.input = Input::Fin,
            ReceiveEnd::Error(errno) => {
                conn.input = Input::Fin;
                if conn.state != State::Closing {
                    return self.abort(id, CloseReason::of_errno(errno));
                }
            }
        }
        match conn.state {
            State::Open if conn.has_fin() => {
                if conn.has_channel() {
                    self.sealed_input_ended(id);
                }
                let Some(conn) = self.conns.get_mut(id) else { return };
                if conn.takes_frames() && conn.waiting_bytes() == 0 {
                    self.finish_input(id);
                } else if conn.opened == OpenState::Header {
                    self.header_cut_short(id);
                } else if conn.opened == OpenState::Handshake {
                    self.check_handshake(id);
                }
            }
            State::Open | State::Draining => self.sync_receive(id),
            State::Closing => self.join(id),
        }
    }

    /// Handles the moment at which every byte was looked at, for which something may wait.
    pub(super) fn out_of_bytes(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get_mut(id) else { return };
        conn.inbox.take_if(|inbox| inbox.is_empty());
        if conn.is_cut() {
            self.drop_partial(id);
            // Whatever the peer did since then.
            self.close_if_quiet(id);
        }
        let Some(conn) = self.conns.get_mut(id) else { return };
        if conn.has_channel() && !conn.is_cut() && self.channels.is_put_off(id) {
            return self.want_step(id);
        }
        if conn.input_ended() {
            return self.finish_input(id);
        }
        if conn.paused {
            conn.paused = false;
            self.observer.paused(self.now, id, false);
            self.sync_receive(id);
        }
        self.close_if_quiet(id);
    }

    /// Ends the input: the peer sent FIN and every frame is answered.
    fn finish_input(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get_mut(id) else { return };
        // Waiting calls owe an answer, and each looks here again when it is done. If the service
        // ended the connection before, that is carried out at the end of the turn, with its reason.
        if conn.has_handler() || conn.outlet().is_some_and(Outlet::has_requests) {
            return;
        }
        // A step of its channel that waits may give more bytes.
        if conn.queued.is_in(QueueFlags::WORKING) {
            return;
        }
        if conn.has_channel() && !conn.is_cut() && self.channels.is_put_off(id) {
            return self.want_step(id);
        }
        let Some(conn) = self.conns.get_mut(id) else { return };
        // The start of a frame by the former rule may be a whole frame by the new one.
        let is_switched = conn.outlet().is_some_and(Outlet::is_switched)
            && !conn.is_cut()
            && conn.inbox.as_ref().is_some_and(|inbox| inbox.has_partial());
        if conn.has_channel() && !conn.is_cut() {
            self.sealed_input_ended(id);
        }
        let Some(conn) = self.conns.get_mut(id) else { return };
        if is_switched || conn.owes_end() {
            return self.events.push_back(Event::Frames(id));
        }
        if conn.has_channel()
            && !conn.is_cut()
            && let Some(reason) = self.cut_off(id)
        {
            return self.finish(id, reason);
        }
        let Some(conn) = self.conns.get_mut(id) else { return };
        if conn.outlet().is_some_and(Outlet::is_held_open) {
            if !conn.input_end_notified {
                conn.input_end_notified = true;
                self.events.push_back(Event::InputEnded(id));
            }
            return;
        }
        let mid_frame = conn.inbox.as_ref().is_some_and(|inbox| inbox.is_mid_frame());
        let reason = match mid_frame {
            // The peer's last bytes were not looked at.
            _ if conn.is_cut() => CloseReason::Shutdown,
            true => CloseReason::PeerClosedMidFrame,
            false => CloseReason::PeerClosed,
        };
        self.finish(id, reason);
    }

    /// Keeps bytes until the connection takes frames again: after all others, or before them if
    /// they are the rest of the lease at hand.
    pub(super) fn hold(&mut self, id: ConnId, lease: Lease, front: bool) {
        let Some(conn) = self.conns.get_mut(id) else { return };
        // A connection that its service holds open is held back as usual.
        let cut = conn.is_cut();
        // Pinned memory is checked each time, since a turn may bring as much as there is.
        let pinned = self.pool.leased() * self.limits.receive_buffer_bytes;
        let share = if conn.is_held_back() { KEPT_FOR_A_MOMENT } else { KEPT_FOR_LONG };
        let keeps = !self.short_of_buffers && pinned * share <= self.limits.receive_bytes_max;
        if conn.inbox.is_none() {
            conn.inbox = try_box(Inbox::new(&self.blocks));
        }
        let Some(inbox) = &mut conn.inbox else { return self.abort(id, CloseReason::MemoryLimit) };
        let before = inbox.held_bytes();
        let kept = if front { inbox.put_back(lease) } else { inbox.put(lease, keeps) };
        self.shared.hold(inbox.held_bytes() - before);
        if kept.is_err() {
            return self.abort(id, CloseReason::MemoryLimit);
        }
        let waiting = inbox.waiting_bytes();
        let tight = self.is_tight();
        let Some(conn) = self.conns.get_mut(id) else { return };
        if (tight || waiting >= self.lanes[conn.lane].limits.inbox_bytes_high) && !cut {
            self.pause(id);
        }
        self.check_held(id);
    }

    /// Pauses receiving until all received bytes were looked at.
    pub(super) fn pause(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get_mut(id).filter(|conn| !conn.paused) else { return };
        conn.paused = true;
        // Frames of others may end within a receive, and each would need a separate receive.
        if !conn.has_channel() && conn.outlet().is_some_and(Outlet::reads_on) {
            conn.bulk = RECEIVES_AFTER_PAUSE;
        }
        self.lanes[conn.lane].counters.receives_paused += 1;
        self.observer.paused(self.now, id, true);
        self.sync_receive(id);
    }

    /// Drops the received bytes of a connection that are not a frame yet.
    pub(super) fn drop_input(&mut self, id: ConnId) {
        if let Some(conn) = self.conns.get_mut(id)
            && let Some(inbox) = conn.inbox.take()
        {
            self.shared.release(inbox.held_bytes());
            // A block that the driver lost does not come back.
            let away = if conn.receive.is_on() { inbox.away_bytes() } else { 0 };
            // The driver gives the block back; at an end it does so without a request.
            if inbox.is_away() && conn.state != State::Closing && !conn.aborting && conn.receive.stop() {
                self.ops.push(Op::ReceiveStop { id });
            }
            self.returns(id, ReturnedItem::Block, away);
        }
    }

    /// Drops the start of a frame of a cut connection, once it is alone.
    pub(super) fn drop_partial(&mut self, id: ConnId) {
        if self
            .conns
            .get(id)
            .is_some_and(|conn| conn.inbox.as_ref().is_some_and(|inbox| inbox.is_mid_frame()))
        {
            self.drop_input(id);
        }
    }

    /// Arms or ends the receive as the state requires.
    pub(super) fn sync_receive(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get_mut(id) else { return };
        match receive_op(conn, id) {
            Some(Op::ReceiveOnce { .. }) => self.receive_bulk(id),
            Some(op) => self.ops.push(op),
            None => {}
        }
    }

    /// Receives straight into the frame that was begun, or else once.
    #[cold]
    fn receive_bulk(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get_mut(id) else { return };
        // After a switch bytes are cut by the new rule first, which may find a whole frame in them.
        let fills = conn.takes_frames() && !conn.is_cut() && !conn.outlet().is_some_and(Outlet::is_switched);
        let Some(inbox) = conn.inbox.as_mut().filter(|inbox| fills && inbox.lacks().is_some()) else {
            // The head of a large frame takes one buffer, since bytes after it would be copied; a
            // stream takes what it gets.
            let reads_on = !conn.has_channel() && conn.outlet().is_some_and(Outlet::reads_on);
            conn.bulk -= 1;
            return self.ops.push(Op::ReceiveOnce { id, several: reads_on });
        };
        let before = inbox.held_bytes();
        let away = inbox.send_away();
        self.shared.release(before);
        self.shared.hold(inbox.held_bytes());
        match away {
            Ok((block, most)) => {
                // At most 1 MiB.
                self.ops.push(Op::ReceiveInto { id, block, most: most as u32 });
                self.check_held(id);
            }
            Err(NoMemory) => {
                conn.receive = Flight::None;
                self.abort(id, CloseReason::MemoryLimit);
            }
        }
    }
}

fn receive_op(conn: &mut Conn, id: ConnId) -> Option<Op> {
    let wanted = conn.wants_receive();
    if wanted && conn.receive == Flight::None {
        conn.receive = Flight::Armed;
        conn.receive_used = false;
        return Some(if conn.bulk > 0 { Op::ReceiveOnce { id, several: false } } else { Op::Receive { id } });
    }
    if !wanted && conn.receive.stop() {
        // Nothing is received after it: then the end of the input ends the receive, whatever else
        // the driver waits for.
        let closing = conn.state == State::Closing;
        return Some(if closing { Op::ShutdownInput { id } } else { Op::ReceiveStop { id } });
    }
    None
}
