//! Received bytes on their way to the service.

use alloc::boxed::Box;

use ringserve_buf::Lease;

use super::{Event, Next, Shard, expect_conn};
use crate::conn::{Conn, Intake, State};
use crate::framing::Framing;
use crate::inbox::{Found, cut};
use crate::link::Link;
use crate::stamp::Stamp;
use crate::{CloseReason, ConnId, Frame, Observer, Op, ReceiveEnd};

impl<S, F: Framing, O: Observer> Shard<S, F, O> {
    pub(super) fn received(&mut self, id: ConnId, lease: Lease) {
        debug_assert!(self.current.is_empty(), "the last completion was not worked off");
        self.counters.bytes_received += lease.len() as u64;
        self.has_received = true;
        let now = Stamp::at(self.now);
        let Some(conn) = expect_conn(&mut self.conns, id) else { return };
        if !conn.is_open() {
            return;
        }
        conn.active_at = now;
        conn.heard_at = now;
        conn.beats = 0;
        let first_since_armed = !core::mem::replace(&mut conn.receive_used, true);
        if conn.intake == Intake::Cut && conn.is_cut() {
            drop(lease);
        } else if conn.takes_frames() && conn.waiting_bytes() == 0 {
            self.current = lease;
            self.current_id = Some(id);
            self.has_frames = Some(id);
        } else {
            self.hold(id, lease, false);
        }
        if first_since_armed {
            self.arm(id);
        }
    }

    pub(super) fn receive_ended(&mut self, id: ConnId, end: ReceiveEnd) {
        let Some(conn) = expect_conn(&mut self.conns, id) else { return };
        conn.receiving = false;
        conn.receive_stopping = false;
        match end {
            ReceiveEnd::Stopped => {}
            ReceiveEnd::Eof => conn.input_ended = true,
            ReceiveEnd::Error(errno) => {
                conn.input_ended = true;
                if conn.state != State::Closing {
                    return self.abort(id, CloseReason::of_errno(errno));
                }
            }
        }
        match conn.state {
            State::Open if conn.input_ended => {
                if conn.takes_frames() && conn.waiting_bytes() == 0 {
                    self.finish_input(id);
                }
            }
            State::Open | State::Draining => self.sync_receive(id),
            State::Closing => self.advance_close(id),
        }
    }

    /// The next frame of a connection that had [`Event::Frames`](crate::Event::Frames), or whose handler finished. Call it until it
    /// has none, and between two calls nothing but user code and
    /// [`handler_parked`](Shard::handler_parked), [`finish`](Shard::finish) and [`abort`](Shard::abort).
    #[inline]
    pub fn next_frame(&mut self, id: ConnId) -> Next<S> {
        loop {
            let Some(conn) = self.conns.get_mut(id) else { return self.no_frame() };
            let Some(block) = &conn.block else { return self.no_frame() };
            if !conn.is_open() || block.link.close_asked() || block.link.abort_asked() {
                return self.no_frame();
            }
            conn.held_back |= block.link.holds_back();
            if !conn.takes_frames() || self.frames_left == 0 {
                self.send_awaited |= conn.held_back && conn.sending;
                return self.settle(id);
            }
            if self.current.is_empty() {
                let Some(inbox) = conn.inbox.as_mut().filter(|inbox| inbox.waiting_bytes() > 0) else {
                    // What is left has no bytes, and would go on pinning its buffer.
                    self.current = Lease::empty();
                    if conn.inbox.is_some() || conn.input_ended || conn.paused || self.drain.is_some() {
                        self.out_of_bytes(id);
                    }
                    return Next::Nothing;
                };
                let before = inbox.held_bytes();
                self.current = inbox.take();
                self.current_id = Some(id);
                self.inbox_bytes -= before - inbox.held_bytes();
            }
            debug_assert_eq!(self.current_id, Some(id), "frames of two connections at once");
            let max = self.limits.frame_bytes_max;
            let found = match conn.inbox.take_if(|inbox| inbox.has_partial()) {
                // Neither there nor counted while the framing runs: a panic in it leaves the accounts right.
                Some(mut inbox) => {
                    self.inbox_bytes -= inbox.held_bytes();
                    let found = inbox.finish(&*self.framing, &mut self.current, max);
                    self.inbox_bytes += inbox.held_bytes();
                    conn.inbox = Some(inbox);
                    found
                }
                None => cut(&*self.framing, &mut self.current, max),
            };
            match found {
                Found::Frame(frame) => {
                    conn.frame_seen = true;
                    let block = block.clone();
                    self.frames_left -= 1;
                    self.counters.frames += 1;
                    self.observer.frame(self.now, id, frame.wire().len());
                    return Next::Frame(self.roomy(frame), block);
                }
                Found::More(missing) => self.begin_partial(id, missing),
                Found::Bad(error) => {
                    let block = block.clone();
                    self.drop_input(id);
                    return Next::Bad(error, block);
                }
                Found::NoMemory => {
                    self.abort(id, CloseReason::MemoryLimit);
                    return self.no_frame();
                }
            }
        }
    }

    /// While receive memory is short a frame is copied, so that it pins no more than itself.
    #[inline]
    fn roomy(&mut self, frame: Frame) -> Frame {
        if !self.short_of_buffers || frame.pinned_bytes() < 2 * frame.wire().len() {
            return frame;
        }
        self.counters.frames_copied += 1;
        let skip = frame.as_ptr() as usize - frame.wire().as_ptr() as usize;
        let len = frame.len();
        Frame::new(Lease::copy_of(frame.wire()), skip, len)
    }

    /// What is left of the lease is the start of a frame.
    fn begin_partial(&mut self, id: ConnId, missing: usize) {
        let lease = core::mem::take(&mut self.current);
        let Some(conn) = self.conns.get_mut(id) else { return };
        let inbox = conn.inbox.get_or_insert_with(Box::default);
        if !inbox.has_partial() {
            let before = inbox.held_bytes();
            let begun = inbox.begin(&lease, missing, Stamp::at(self.now));
            self.inbox_bytes = self.inbox_bytes + inbox.held_bytes() - before;
            if begun.is_err() {
                return self.abort(id, CloseReason::MemoryLimit);
            }
            self.arm(id);
        }
        self.check_held(id);
    }

    /// The connection takes no more frames now: what is left of the lease waits in its inbox.
    fn settle(&mut self, id: ConnId) -> Next<S> {
        let lease = core::mem::take(&mut self.current);
        if !lease.is_empty() {
            self.hold(id, lease, true);
        }
        if let Some(conn) = self.conns.get_mut(id)
            && conn.takes_frames()
            && !conn.runnable
            && conn.waiting_bytes() > 0
        {
            conn.runnable = true;
            self.runnable.push(id);
        }
        Next::Nothing
    }

    /// Every byte was looked at, and something may wait for that.
    fn out_of_bytes(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get_mut(id) else { return };
        conn.inbox.take_if(|inbox| inbox.is_empty());
        if conn.is_cut() {
            self.drop_partial(id);
            // Whatever the peer did since then.
            self.close_if_quiet(id);
        }
        let Some(conn) = self.conns.get_mut(id) else { return };
        if conn.input_ended {
            return self.finish_input(id);
        }
        if conn.paused {
            conn.paused = false;
            self.observer.paused(self.now, id, false);
            self.sync_receive(id);
        }
        self.close_if_quiet(id);
    }

    /// The peer sent its last byte and every frame is answered.
    fn finish_input(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get_mut(id) else { return };
        // Calls that wait owe an answer, and whoever is done looks here again. And what the service ended before is
        // carried out at the end of the turn, with that as the reason.
        if conn.has_handler() || conn.link().is_some_and(Link::has_wishes) {
            return;
        }
        if conn.link().is_some_and(Link::is_held_open) {
            if !conn.input_end_told {
                conn.input_end_told = true;
                self.events.push_back(Event::InputEnded(id));
            }
            return;
        }
        let mid_frame = conn.inbox.as_ref().is_some_and(|inbox| inbox.is_mid_frame());
        let reason = match mid_frame {
            // What the peer said last was not looked at.
            _ if conn.is_cut() => CloseReason::Shutdown,
            true => CloseReason::PeerClosedMidFrame,
            false => CloseReason::PeerClosed,
        };
        self.finish(id, reason);
    }

    fn no_frame(&mut self) -> Next<S> {
        self.current = Lease::empty();
        Next::Nothing
    }

    /// Keeps bytes until the connection takes frames again: behind all others, or before them if they are what
    /// is left of the lease at hand.
    fn hold(&mut self, id: ConnId, lease: Lease, front: bool) {
        let Some(conn) = self.conns.get_mut(id) else { return };
        // What the service holds open is held back as ever.
        let cut = conn.is_cut();
        let inbox = conn.inbox.get_or_insert_with(Box::default);
        let before = inbox.held_bytes();
        let kept = if front { inbox.put_back(lease) } else { inbox.put(lease) };
        self.inbox_bytes = self.inbox_bytes + inbox.held_bytes() - before;
        if kept.is_err() {
            return self.abort(id, CloseReason::MemoryLimit);
        }
        if inbox.waiting_bytes() >= self.limits.inbox_bytes_high && !conn.paused && !cut {
            conn.paused = true;
            self.counters.receives_paused += 1;
            self.observer.paused(self.now, id, true);
            self.sync_receive(id);
        }
        self.check_held(id);
    }

    /// Ends a connection that made the shard hold too much.
    pub(super) fn check_held(&mut self, id: ConnId) {
        let held = self.inbox_bytes + self.local.outbox_bytes() + self.local.service_bytes();
        if held > self.limits.held_bytes_max {
            self.abort(id, CloseReason::MemoryLimit);
        }
    }

    /// Throws away what was received of a connection and is not a frame yet.
    pub(super) fn drop_input(&mut self, id: ConnId) {
        if self.current_id == Some(id) {
            self.current = Lease::empty();
        }
        if let Some(conn) = self.conns.get_mut(id)
            && let Some(inbox) = conn.inbox.take()
        {
            self.inbox_bytes -= inbox.held_bytes();
        }
    }

    /// Of a connection that is cut: throws away the start of a frame, once nothing else is there.
    pub(super) fn drop_partial(&mut self, id: ConnId) {
        if self
            .conns
            .get(id)
            .is_some_and(|conn| conn.inbox.as_ref().is_some_and(|inbox| inbox.is_mid_frame()))
        {
            self.drop_input(id);
        }
    }

    /// Arms or stops the receive as the state says.
    pub(super) fn sync_receive(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get_mut(id) else { return };
        if let Some(op) = receive_op(conn, id) {
            self.ops.push(op);
        }
    }
}

fn receive_op<S>(conn: &mut Conn<S>, id: ConnId) -> Option<Op> {
    let wanted = conn.wants_receive();
    if wanted && !conn.receiving {
        conn.receiving = true;
        conn.receive_used = false;
        return Some(Op::Receive { id });
    }
    if !wanted && conn.receiving && !conn.receive_stopping {
        conn.receive_stopping = true;
        return Some(Op::ReceiveStop { id });
    }
    None
}
