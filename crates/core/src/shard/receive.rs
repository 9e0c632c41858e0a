//! Received bytes on their way to the service.

use alloc::rc::Rc;

use ringserve_buf::{Lease, try_box};

use super::{Event, Next, Shard, expect_conn};
use crate::conn::{Conn, Intake, Queued, State};
use crate::framing::Framing;
use crate::inbox::{Found, Inbox, cut};
use crate::link::{Block, Link};
use crate::stamp::Stamp;
use crate::{CloseReason, ConnId, Frame, Observer, Op, ReceiveEnd};

/// What a frame on the heap costs beside its bytes: two allocations, one of them with what counts its leases.
const FRAME_BYTES: usize = 96;

impl<S, F: Framing, O: Observer> Shard<S, F, O> {
    pub(super) fn received(&mut self, id: ConnId, lease: Lease) {
        debug_assert!(self.current.is_empty(), "the last completion was not worked off");
        self.counters.bytes_received += lease.len() as u64;
        self.has_received = true;
        let now = Stamp::at(self.now);
        let Some(conn) = expect_conn(&mut self.conns, id) else { return };
        if !conn.is_open() {
            // The peer still sends as its time to close is over, and its input is being shut down. What was read behind that
            // opens no window: without a reset the peer would wait for one until the kernel forgets the connection.
            conn.aborting |= conn.state == State::Closing && conn.receive_stopping && !conn.lingering;
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
            self.weighs_frames = self.short_of_buffers;
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
            if !conn.takes_frames() {
                self.send_awaited |= conn.held_back && conn.sending;
                return self.settle(id);
            }
            if self.current.is_empty() {
                if conn.waiting_bytes() == 0 {
                    // What is left has no bytes, and would go on pinning its buffer.
                    self.current = Lease::empty();
                    if conn.inbox.is_some() || conn.input_ended || conn.paused || self.drain.is_some() {
                        self.out_of_bytes(id);
                    }
                    return Next::Nothing;
                }
                if self.work.is_batch_over() {
                    return self.settle(id);
                }
                if !self.take_waiting(id) {
                    return self.no_memory(id);
                }
                continue;
            }
            if self.work.is_batch_over() {
                return self.settle(id);
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
                    self.weighs_frames = true;
                    found
                }
                None => cut(&*self.framing, &mut self.current, max),
            };
            match found {
                Found::Frame(frame) => {
                    conn.frame_seen = true;
                    let block = block.clone();
                    self.work.take_frame();
                    self.counters.frames += 1;
                    self.observer.frame(self.now, id, frame.wire().len());
                    if self.weighs_frames {
                        return self.weigh(id, frame, block);
                    }
                    return Next::Frame(frame, block);
                }
                Found::More(missing) => self.begin_partial(id, missing),
                Found::Bad(error) => {
                    let block = block.clone();
                    self.drop_input(id);
                    return Next::Bad(error, block);
                }
                Found::NoMemory => return self.no_memory(id),
            }
        }
    }

    /// Goes on with bytes from the inbox. False if the system has no memory.
    #[inline(never)]
    fn take_waiting(&mut self, id: ConnId) -> bool {
        let Some(inbox) = self.conns.get_mut(id).and_then(|conn| conn.inbox.as_mut()) else { return false };
        let before = inbox.held_bytes();
        let taken = inbox.take();
        self.inbox_bytes -= before - inbox.held_bytes();
        (self.current, self.current_id, self.weighs_frames) = (taken.unwrap_or_default(), Some(id), true);
        !self.current.is_empty()
    }

    #[cold]
    fn no_memory(&mut self, id: ConnId) -> Next<S> {
        self.abort(id, CloseReason::MemoryLimit);
        self.no_frame()
    }

    /// Looks at what a frame pins. It is copied, so that it pins no more
    /// than itself, while receive memory is short, and where it would keep what was received behind other calls that wait. What
    /// it pins of the heap counts if its call waits. `None` if the system has no memory.
    #[inline(never)]
    fn weigh(&mut self, id: ConnId, frame: Frame, block: Rc<Block<S>>) -> Next<S> {
        let calls_wait = self.conns.get(id).is_some_and(Conn::has_handler);
        let (pinned, wire) = (frame.pinned_bytes(), frame.wire().len());
        let pooled = frame.is_pooled();
        if pinned >= 2 * wire && (self.short_of_buffers || (calls_wait && !pooled)) {
            self.counters.frames_copied += 1;
            self.frame_bytes = wire + FRAME_BYTES;
            let skip = frame.as_ptr() as usize - frame.wire().as_ptr() as usize;
            let Some(copy) = Lease::try_copy_of(frame.wire()) else { return self.no_memory(id) };
            return Next::Frame(Frame::new(copy, skip, frame.len()), block);
        }
        // What is left of the lease goes back to the inbox, which counts all of it, as long as no other call takes it
        // from there.
        let counted = !self.current.is_empty() && self.limits.calls_in_flight_max == 1;
        self.frame_bytes = if pooled || counted { 0 } else { pinned + FRAME_BYTES };
        Next::Frame(frame, block)
    }

    /// What is left of the lease is the start of a frame.
    fn begin_partial(&mut self, id: ConnId, missing: usize) {
        let lease = core::mem::take(&mut self.current);
        let Some(conn) = self.conns.get_mut(id) else { return };
        if conn.inbox.is_none() {
            conn.inbox = try_box(Inbox::default());
        }
        let Some(inbox) = &mut conn.inbox else { return self.abort(id, CloseReason::MemoryLimit) };
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
            && !conn.queued.is_in(Queued::RUNNABLE)
            && conn.waiting_bytes() > 0
        {
            conn.queued.enter(Queued::RUNNABLE);
            let queue = if self.work.is_full() { &mut self.runnable } else { &mut self.served };
            queue.push_back(id);
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
        if conn.inbox.is_none() {
            conn.inbox = try_box(Inbox::default());
        }
        let Some(inbox) = &mut conn.inbox else { return self.abort(id, CloseReason::MemoryLimit) };
        let before = inbox.held_bytes();
        let kept = if front { inbox.put_back(lease) } else { inbox.put(lease) };
        self.inbox_bytes = self.inbox_bytes + inbox.held_bytes() - before;
        if kept.is_err() {
            return self.abort(id, CloseReason::MemoryLimit);
        }
        let waiting = inbox.waiting_bytes();
        let tight = self.is_tight();
        let Some(conn) = self.conns.get_mut(id) else { return };
        if (tight || waiting >= self.limits.inbox_bytes_high) && !conn.paused && !cut {
            conn.paused = true;
            self.counters.receives_paused += 1;
            self.observer.paused(self.now, id, true);
            self.sync_receive(id);
        }
        self.check_held(id);
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

    /// Arms or ends the receive as the state says.
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
        // Nothing is received after it: then the end of the input ends the receive, whatever else the driver waits for.
        let closing = conn.state == State::Closing;
        return Some(if closing { Op::ShutdownInput { id } } else { Op::ReceiveStop { id } });
    }
    None
}
