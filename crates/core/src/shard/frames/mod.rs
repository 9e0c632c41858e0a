//! A connection's batch of frames, pulled by the lane.
// May use: no other room.
// Begin with: `Frames`; `calls.rs` has the calls that wait, `metered.rs` the peers that send too
// fast.

mod calls;
mod metered;

use ringserve_buf::{Lease, try_box};

use super::Shard;
use metered::Pace;

use crate::connection::{Conn, ConnHead, Found, Inbox, QueueFlags, Uncut, cut, cut_whole, not_whole};
use crate::framing::{FrameError, Framing, FramingState, TypedFraming};
use crate::{CloseReason, ConnId, Frame, LaneId, Observer, Op};
pub use calls::ParkOutcome;

/// The cost of a frame on the heap in addition to its bytes: two allocations, one of them with the
/// count of its leases.
const FRAME_BYTES: usize = 96;

/// The result of [`Frames::next_frame`].
#[derive(Debug)]
pub enum Next<H = ()> {
    /// A frame for the service.
    Frame(Frame<H>),
    /// Nothing, for now.
    Nothing,
    /// The peer broke the framing: let the service send its closing message, then call
    /// [`Shard::finish`].
    Bad(FrameError),
}

/// The result of [`Frames::next_whole`].
#[derive(Debug)]
pub enum Whole<H = ()> {
    /// A frame for the service.
    Frame(Frame<H>),
    /// Nothing, for now.
    Nothing,
    /// The answer of [`Frames::next_behind`] is needed.
    Other(Rest<H>),
}

/// The result of [`Frames::next_whole`] if it is not a whole frame, if it looked.
#[derive(Debug)]
pub struct Rest<H>(Option<Uncut<H>>);

/// The frames that a connection may hand out now.
///
/// The common frame lies whole in the lease at hand and is cut off it without a look at the
/// connection: whatever may stop frames in the middle of a batch shows in the outlet's flags, or
/// comes through this type.
pub struct Frames<'a, O: Observer> {
    shard: &'a mut Shard<O>,
    id: ConnId,
    lane: LaneId,
    shared: &'a ConnHead,
    /// The lane's limit.
    frame_bytes_max: usize,
    /// Received bytes that are not cut yet.
    lease: Lease,
    /// Frames that the batch may still hand out, and those handed out.
    left: u32,
    handed: u32,
    /// Whole frames may be cut off the lease without a look at the connection.
    plain: bool,
    /// Nothing waits for the end of the lease.
    ends_plainly: bool,
    /// Frames at hand lie on the heap, or receive memory is short: the bytes that each one pins are
    /// checked.
    weighs: bool,
    /// No frame of the connection was seen before.
    is_first: bool,
    /// Bytes on the heap that only the frame handed out last pins, if it was checked.
    frame_bytes: usize,
}

impl<'a, O: Observer> Frames<'a, O> {
    /// A batch that begins with received bytes. `plain` is true if only a frame's own bytes and the
    /// outlet can keep it from the service.
    #[inline(always)]
    pub(super) fn new(
        shard: &'a mut Shard<O>,
        id: ConnId,
        lane: LaneId,
        shared: &'a ConnHead,
        lease: Lease,
        plain: bool,
        is_first: bool,
    ) -> Frames<'a, O> {
        let (left, weighs) = (shard.work.frames_left(), shard.short_of_buffers);
        Frames {
            frame_bytes_max: shared.lane().frame_bytes_max,
            shard,
            id,
            lane,
            shared,
            lease,
            left,
            handed: 0,
            plain: plain && !weighs,
            ends_plainly: plain,
            weighs,
            is_first,
            frame_bytes: 0,
        }
    }

    /// The connection.
    #[inline]
    pub fn id(&self) -> ConnId {
        self.id
    }

    /// Its lane.
    #[inline]
    pub fn lane(&self) -> LaneId {
        self.lane
    }

    /// Its outlet and session.
    #[inline]
    pub fn shared(&self) -> &'a ConnHead {
        self.shared
    }

    /// The shard, to end the connection.
    pub fn shard(&mut self) -> &mut Shard<O> {
        self.shard
    }

    /// Ends the connection. See [`Shard::finish`].
    pub fn finish(&mut self, reason: CloseReason) {
        self.shard.finish(self.id, reason);
    }

    /// Resets the connection. See [`Shard::abort`].
    pub fn abort(&mut self, reason: CloseReason) {
        self.shard.abort(self.id, reason);
    }

    /// The next frame, cut by `framing`, which is the same in each call for the connection. Between
    /// two calls only user code, [`park`](Frames::park) and the end of the connection may happen.
    #[inline]
    pub fn next_frame(&mut self, framing: &impl Framing) -> Next {
        self.next_typed(framing, &FramingState::new(()))
    }

    /// The next frame, cut by a framing that keeps the connection's `state`.
    #[inline]
    pub fn next_typed<F: TypedFraming>(
        &mut self,
        framing: &F,
        state: &FramingState<F::State>,
    ) -> Next<F::Head> {
        match self.next_whole(framing, state) {
            Whole::Frame(frame) => Next::Frame(frame),
            Whole::Nothing => Next::Nothing,
            Whole::Other(rest) => self.next_behind(rest, framing, state),
        }
    }

    /// The next frame if it lies whole in the lease at hand, and needs no further look. Separate
    /// from [`next_behind`](Frames::next_behind), so that a lane with a loop around both need not
    /// have such a frame in memory.
    #[inline(always)]
    pub fn next_whole<F: TypedFraming>(
        &mut self,
        framing: &F,
        state: &FramingState<F::State>,
    ) -> Whole<F::Head> {
        if self.plain && !self.shared.stops_frames() {
            if self.lease.is_empty() {
                if self.ends_plainly {
                    return Whole::Nothing;
                }
            } else if self.left > 0 {
                return match cut_whole(framing, state, &mut self.lease, self.frame_bytes_max) {
                    Ok(frame) => {
                        self.left -= 1;
                        self.handed += 1;
                        self.frame_bytes = 0;
                        self.shard.observer.frame(self.shard.now, self.shared, frame.wire().len());
                        Whole::Frame(frame)
                    }
                    Err(uncut) => Whole::Other(Rest(Some(uncut))),
                };
            }
        }
        Whole::Other(Rest(None))
    }

    /// The next frame after [`next_whole`](Frames::next_whole) returned [`Rest`].
    #[inline(never)]
    pub fn next_behind<F: TypedFraming>(
        &mut self,
        Rest(uncut): Rest<F::Head>,
        framing: &F,
        state: &FramingState<F::State>,
    ) -> Next<F::Head> {
        if let Some(uncut) = uncut {
            let found = not_whole(uncut, &mut self.lease, self.frame_bytes_max);
            if let Some(next) = self.not_whole(found) {
                return next;
            }
        }
        self.next_checked(framing, state)
    }

    /// The next frame, if it is not whole in the lease, or the connection may hand out none.
    #[inline]
    fn next_checked<F: TypedFraming>(
        &mut self,
        framing: &F,
        state: &FramingState<F::State>,
    ) -> Next<F::Head> {
        loop {
            if let Some(next) = self.may_not_cut() {
                return next;
            }
            let shard = &mut *self.shard;
            let Some(conn) = shard.conns.get_mut(self.id) else { return self.nothing() };
            if self.lease.is_empty() && !conn.inbox.as_ref().is_some_and(|inbox| inbox.is_ripe()) {
                if conn.waiting_bytes() == 0 {
                    return self.out_of_bytes();
                }
                if self.left == 0 {
                    return self.requeue();
                }
                if !self.take_waiting() {
                    return self.no_memory();
                }
                continue;
            }
            if self.left == 0 {
                return self.requeue();
            }
            let max = self.frame_bytes_max;
            let mut finished = false;
            let found = match conn.inbox.take_if(|inbox| inbox.has_partial()) {
                // It is neither there nor counted while the framing runs: a panic in it leaves the
                // accounts right.
                Some(mut inbox) => {
                    shard.shared.release(inbox.held_bytes());
                    let found = inbox.finish(framing, state, &mut self.lease, max);
                    shard.shared.hold(inbox.held_bytes());
                    conn.inbox = Some(inbox);
                    (self.weighs, finished) = (true, true);
                    found
                }
                None => cut(framing, state, &mut self.lease, max),
            };
            let found = match found {
                Found::Frame(frame) => {
                    finished |= conn.inbox.as_mut().is_some_and(|inbox| inbox.end_pieces());
                    let is_metered = conn.is_metered();
                    return self.hand_over(frame, finished, is_metered);
                }
                other => other,
            };
            if let Some(next) = self.not_whole(found) {
                return next;
            }
        }
    }

    /// The answer if the connection may hand out no frame now.
    #[inline(always)]
    fn may_not_cut<H>(&mut self) -> Option<Next<H>> {
        let shard = &mut *self.shard;
        let Some(conn) = shard.conns.get_mut(self.id) else { return Some(self.nothing()) };
        let outlet = self.shared;
        if conn.shared.is_none() || !conn.is_open() || outlet.close_requested() || outlet.abort_requested() {
            return Some(self.nothing());
        }
        if outlet.is_limited()
            && let Some(own) = outlet.own_limits()
        {
            self.frame_bytes_max = own.frame_bytes_max;
        }
        if outlet.holds_back() {
            conn.aside.hold_back();
        }
        if conn.inbox.as_ref().is_some_and(|inbox| inbox.is_away()) {
            // Nothing follows it, and it is looked at when it comes back.
            return Some(self.nothing());
        }
        if !conn.takes_frames() {
            shard.send_awaited |= conn.is_held_back() && conn.send.is_on();
            return Some(self.requeue());
        }
        if conn.is_metered()
            && let Some(next) = self.look_at_meter()
        {
            return Some(next);
        }
        if outlet.take_switched() && !self.unbegin() {
            return Some(self.no_memory());
        }
        None
    }

    /// No byte is left to cut: the end of the input, or nothing for now.
    #[inline(always)]
    fn out_of_bytes<H: Default>(&mut self) -> Next<H> {
        let shard = &mut *self.shard;
        let Some(conn) = shard.conns.get_mut(self.id) else { return self.nothing() };
        // The rest has no bytes, and would keep its buffer pinned.
        self.lease = Lease::empty();
        if conn.is_unsealing() {
            return Next::Nothing;
        }
        if conn.has_channel() && !conn.is_cut() && shard.channels.is_put_off(self.id) {
            shard.want_step(self.id);
            return Next::Nothing;
        }
        if conn.owes_end() {
            self.shared.end_heard();
            (self.plain, self.frame_bytes) = (false, 0);
            return Next::Frame(Frame::default());
        }
        if conn.inbox.is_some() || conn.input_ended() || conn.paused || shard.drain.is_some() {
            shard.out_of_bytes(self.id);
        }
        Next::Nothing
    }

    /// Handles a frame that was cut, which a metered connection pays for. `finished` if its start
    /// was kept before.
    #[inline(always)]
    fn hand_over<H>(&mut self, frame: Frame<H>, finished: bool, is_metered: bool) -> Next<H> {
        let shard = &mut *self.shard;
        if is_metered && !shard.pay(self.id, frame.wire().len()) {
            return self.too_fast();
        }
        self.left -= 1;
        self.handed += 1;
        shard.observer.frame(shard.now, self.shared, frame.wire().len());
        let next = if self.weighs {
            self.weigh(frame)
        } else {
            self.frame_bytes = 0;
            Next::Frame(frame)
        };
        if finished {
            // The bytes after it lie in the lease.
            self.weighs = self.shard.short_of_buffers || !self.lease.is_pooled();
            self.plain = !self.weighs && !is_metered;
        }
        next
    }

    /// Handles a look that found no frame. `None` if the bytes were kept, and may be looked at
    /// again.
    #[cold]
    fn not_whole<H>(&mut self, found: Found<H>) -> Option<Next<H>> {
        self.plain = false;
        match found {
            Found::More(missing) => {
                self.begin_partial(missing);
                None
            }
            Found::Bad(error) => {
                self.lease = Lease::empty();
                self.shard.drop_input(self.id);
                Some(Next::Bad(error))
            }
            Found::NoMemory => Some(self.no_memory()),
            Found::Piece(frame) => Some(self.piece(frame)),
            Found::Frame(frame) => Some(Next::Frame(frame)),
        }
    }

    /// Notes a piece of a frame that goes on: the connection is in the middle of it.
    fn piece<H>(&mut self, frame: Frame<H>) -> Next<H> {
        let shard = &mut *self.shard;
        let Some(conn) = shard.conns.get_mut(self.id) else { return self.nothing() };
        if conn.inbox.is_none() {
            conn.inbox = try_box(Inbox::new(&shard.blocks));
        }
        let Some(inbox) = &mut conn.inbox else { return self.no_memory() };
        let is_first = !inbox.has_begun();
        inbox.note_piece(frame.wire().len(), shard.stamp);
        let is_metered = conn.is_metered();
        if is_first {
            shard.arm(self.id);
        }
        let shard = &mut *self.shard;
        if is_metered && !shard.pay(self.id, frame.wire().len()) {
            return self.too_fast();
        }
        self.left -= 1;
        self.handed += 1;
        shard.observer.frame(shard.now, self.shared, frame.wire().len());
        self.ends_plainly = false;
        self.weigh(frame)
    }

    /// Cuts again after a switch of the rule: the start of a frame by the former rule is looked at
    /// from its first byte, with the bytes after it. False if the system has no memory for that.
    #[cold]
    fn unbegin(&mut self) -> bool {
        let shard = &mut *self.shard;
        let Some(conn) = shard.conns.get_mut(self.id) else { return true };
        let Some(inbox) = conn.inbox.as_mut().filter(|inbox| inbox.has_partial()) else { return true };
        let before = inbox.held_bytes();
        let whole = inbox.unbegin(core::mem::take(&mut self.lease));
        shard.shared.release(before - inbox.held_bytes());
        self.weighs = true;
        whole.map(|whole| self.lease = whole).is_ok()
    }

    /// Parks a call with the frame handed out last; the call holds `bytes` of memory in addition.
    /// See [`Shard::call_parked`].
    #[inline]
    pub fn park(&mut self, call: u32, bytes: usize) -> ParkOutcome {
        self.note_first();
        let parked = self.shard.call_parked(self.id, call, bytes + self.frame_bytes);
        // If it ended the connection, the outlet shows that.
        self.plain &= !self.shard.calls_are_full(self.id);
        parked
    }

    /// Goes on with bytes from the inbox. False if the system has no memory.
    fn take_waiting(&mut self) -> bool {
        let Some(inbox) = self.shard.conns.get_mut(self.id).and_then(|conn| conn.inbox.as_mut()) else {
            return false;
        };
        let before = inbox.held_bytes();
        let taken = inbox.take();
        self.shard.shared.release(before - inbox.held_bytes());
        (self.lease, self.weighs) = (taken.unwrap_or_default(), true);
        !self.lease.is_empty()
    }

    #[cold]
    fn no_memory<H>(&mut self) -> Next<H> {
        self.shard.abort(self.id, CloseReason::MemoryLimit);
        self.nothing()
    }

    fn nothing<H>(&mut self) -> Next<H> {
        self.plain = false;
        self.lease = Lease::empty();
        Next::Nothing
    }

    /// Checks the bytes that a frame pins. While receive memory is short, or if it would pin bytes
    /// received after other pending calls, it is copied, so that it pins no more than itself. Heap
    /// bytes that it pins count if its call waits.
    #[inline(never)]
    fn weigh<H>(&mut self, frame: Frame<H>) -> Next<H> {
        let shard = &mut *self.shard;
        let calls_wait = shard.conns.get(self.id).is_some_and(Conn::has_handler);
        let (pinned, wire) = (frame.pinned_bytes(), frame.wire().len());
        let pooled = frame.is_pooled();
        if pinned >= 2 * wire && (shard.short_of_buffers || (calls_wait && !pooled)) {
            shard.lanes[self.lane].counters.frames_copied += 1;
            self.frame_bytes = wire + FRAME_BYTES;
            let skip = frame.as_ptr() as usize - frame.wire().as_ptr() as usize;
            let Some(copy) = Lease::try_copy_of(frame.wire()) else { return self.no_memory() };
            let len = frame.len();
            return Next::Frame(Frame::sound(copy, skip, len, frame.into_parts().1));
        }
        // The rest of the lease goes back to the inbox, which counts all of it, as long as no other
        // call takes it from there.
        let counted = !self.lease.is_empty() && shard.lanes[self.lane].limits.calls_in_flight_max == 1;
        self.frame_bytes = if pooled || counted { 0 } else { pinned + FRAME_BYTES };
        Next::Frame(frame)
    }

    /// Begins a frame with the rest of the lease.
    fn begin_partial(&mut self, missing: usize) {
        let (shard, id) = (&mut *self.shard, self.id);
        let lease = core::mem::take(&mut self.lease);
        let Some(conn) = shard.conns.get_mut(id) else { return };
        if conn.inbox.is_none() {
            conn.inbox = try_box(Inbox::new(&shard.blocks));
        }
        let Some(inbox) = &mut conn.inbox else { return shard.abort(id, CloseReason::MemoryLimit) };
        if !inbox.has_partial() {
            let before = inbox.held_bytes();
            let begun = inbox.begin(&lease, missing, shard.stamp);
            shard.shared.hold(inbox.held_bytes() - before);
            if begun.is_err() {
                return shard.abort(id, CloseReason::MemoryLimit);
            }
            shard.arm(id);
        }
        if missing >= shard.large_from {
            shard.expect_large(id);
        }
        shard.check_held(id);
    }

    /// Keeps the rest of the lease in the inbox, because the connection takes no more frames now.
    fn requeue<H>(&mut self) -> Next<H> {
        let lease = core::mem::take(&mut self.lease);
        self.shard.requeue(self.id, lease);
        self.plain = false;
        Next::Nothing
    }

    /// Handles a whole frame that came before its time, for which the connection ends.
    #[cold]
    fn too_fast<H>(&mut self) -> Next<H> {
        self.finish(CloseReason::ReadTooFast);
        self.nothing()
    }

    /// Keeps the rest while the peer sends too fast. `None` if the next frame may be cut.
    #[cold]
    fn look_at_meter<H>(&mut self) -> Option<Next<H>> {
        let waiting = self.shard.conns.get(self.id).map_or(0, Conn::waiting_bytes);
        if self.lease.is_empty() && waiting == 0 {
            return None;
        }
        match self.shard.pace(self.id) {
            Pace::Fine => None,
            Pace::Wait(steps) => {
                let lease = core::mem::take(&mut self.lease);
                self.plain = false;
                self.shard.hold_reads(self.id, lease, steps);
                Some(Next::Nothing)
            }
            Pace::NoMemory => Some(self.no_memory()),
        }
    }

    /// Ends the batch.
    #[inline(always)]
    pub(super) fn end(&mut self) {
        self.shard.work.end_batch(self.left);
        self.shared.lane().moved.frames.add(self.handed.into());
        if !self.lease.is_empty() || (self.is_first && self.handed > 0) {
            self.end_with_more();
        }
    }

    /// Notes that a frame was handed out, which may be the connection's first.
    fn note_first(&mut self) {
        let shard = &mut *self.shard;
        let Some(conn) = shard.conns.get_mut(self.id).filter(|conn| !conn.frame_seen) else { return };
        conn.frame_seen = true;
        let (lane, after) = (conn.lane, conn.since.age(shard.stamp));
        shard.observer.first_frame(lane, after);
    }

    #[cold]
    fn end_with_more(&mut self) {
        if self.handed > 0 {
            self.note_first();
        }
        let Some(conn) = self.shard.conns.get_mut(self.id) else { return };
        debug_assert!(!conn.is_open() || self.lease.is_empty(), "the lane left frames of {}", self.id);
    }
}

impl<O: Observer> Shard<O> {
    /// Cuts the start of a frame by the new rule after a switch, in the next turn: no byte need
    /// come for that.
    #[cold]
    pub(super) fn look_again(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get_mut(id) else { return };
        if conn.inbox.as_ref().is_some_and(|inbox| inbox.is_away()) {
            // It is cut as soon as the driver gives the block back.
            if conn.receive.stop() {
                self.ops.push(Op::ReceiveStop { id });
            }
            return;
        }
        if !conn.inbox.as_ref().is_some_and(|inbox| inbox.has_partial()) {
            if let Some(outlet) = conn.outlet() {
                outlet.take_switched();
            }
            return;
        }
        if conn.takes_frames() && !conn.queued.is_in(QueueFlags::RUNNABLE) {
            conn.queued.enter(QueueFlags::RUNNABLE);
            self.runnable.push_back(id);
            self.later += 1;
        }
    }

    /// Keeps the rest of a connection's batch, and gives it another batch later if it may have one.
    pub(super) fn requeue(&mut self, id: ConnId, lease: Lease) {
        if !lease.is_empty() {
            self.hold(id, lease, true);
        }
        if let Some(conn) = self.conns.get_mut(id)
            && conn.takes_frames()
            && !conn.queued.is_in(QueueFlags::RUNNABLE)
            && conn.waiting_bytes() > 0
        {
            conn.queued.enter(QueueFlags::RUNNABLE);
            let queue = if self.work.is_full() { &mut self.runnable } else { &mut self.served };
            queue.push_back(id);
            self.later += 1;
        }
    }
}
