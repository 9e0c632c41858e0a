//! State that user code and the state machine share for a connection.
//!
//! User code runs while the state machine waits, and never holds a reference into it: it writes
//! into the connection's [`Outlet`] and puts the connection on the list of dirty ones in
//! [`ShardShared`](crate::ShardShared). The state machine looks at that list at the end of the
//! turn. So nothing is locked and nothing is entered twice.
// May use: account, remote_gate, shared, shared_payload.
// Begin with: `Outlet`; `writing.rs` has the path of a reply.

mod extra;
mod peer;
mod writing;

use alloc::boxed::Box;
use alloc::rc::Rc;
use core::cell::{Cell, RefCell};
use core::fmt;
use core::net::SocketAddr;
use core::time::Duration;

use ringserve_buf::{Counted, CountedHead};

use crate::bytes::KEPT_BYTES_MAX;
use crate::connection::shared::{LaneShared, Wakes};
use crate::time::steps_for;
use crate::{Batch, CloseReason, ConnId};

use extra::Extra;
pub use extra::SocketFacts;
pub use peer::PeerWords;

/// The connection is on the dirty list.
const DIRTY: u16 = 1;
/// User code asked to close after its replies.
const CLOSE: u16 = 2;
/// User code asked to abort.
const ABORT: u16 = 4;
/// A reply could not be framed.
const NOT_FRAMED: u16 = 8;
/// The connection accepts no more bytes or requests.
const GONE: u16 = 16;
/// A task waits for the outbox to fall below its low mark.
const AWAITED: u16 = 32;
/// The service holds the connection open after the peer's FIN.
const HELD_OPEN: u16 = 64;
/// Other threads may look at its [`RemoteGate`](crate::RemoteGate).
const GATED: u16 = 128;
/// User code has written its last byte: FIN follows the queued bytes.
const WRITING_ENDED: u16 = 256;
/// Frames are handed out even while the outbox is over its high mark.
const READS_ON: u16 = 512;

/// The system had no memory for a reply: the connection is aborted.
const NO_MEMORY: u16 = 1024;
/// The outbox rose over its high mark, and may still be there.
const OVER_HIGH: u16 = 2048;
/// Its bytes and frames are counted.
const ACCOUNTED: u16 = 4096;
/// It has its own limits. Its frames and replies take the slower paths, which check them.
const LIMITED: u16 = 8192;
/// User code has switched the rule by which its bytes are cut.
const SWITCHED: u16 = 16384;
/// The service is called once more after the peer's last byte, with an empty frame.
const HEARS_END: u16 = 32768;

/// Flags that change nothing about sending its replies.
const UNOBTRUSIVE: u16 = HELD_OPEN | READS_ON | ACCOUNTED | HEARS_END;

/// An owned piece may be this many times the high mark of the outbox. A body of 1 MiB costs up to
/// half as much again in sends of 256 KiB as in one send; with larger pieces the progress of the
/// peer would stay unknown for longer.
const OWNED_PIECE_MARKS: usize = 4;

/// A connection as user code reaches it: outbox, requests, address.
pub struct Outlet {
    id: ConnId,
    lane: Rc<LaneShared>,
    peer: Cell<PeerWords>,
    pending: RefCell<Option<Box<Batch>>>,
    /// Bytes with the kernel.
    in_flight: Cell<u32>,
    listener: u16,
    flags: Cell<u16>,
    extra: Cell<Option<Box<Extra>>>,
}

impl Outlet {
    pub(crate) fn new(id: ConnId, lane: Rc<LaneShared>, peer: Option<SocketAddr>, listener: u16) -> Outlet {
        Outlet {
            id,
            lane,
            peer: Cell::new(peer.into()),
            pending: RefCell::new(None),
            in_flight: Cell::new(0),
            listener,
            flags: Cell::new(0),
            extra: Cell::new(None),
        }
    }

    /// The id of the connection, unique on its shard.
    #[inline]
    pub fn id(&self) -> ConnId {
        self.id
    }

    /// The peer's address, if it has one: for a connection through a proxy, that of the client.
    pub fn peer(&self) -> Option<SocketAddr> {
        self.peer.get().into()
    }

    /// The peer's address as words.
    #[inline]
    pub fn peer_words(&self) -> PeerWords {
        self.peer.get()
    }

    /// The listener that accepted it.
    pub fn listener(&self) -> u16 {
        self.listener
    }

    /// State that the connections of its lane share.
    #[inline]
    pub fn lane(&self) -> &LaneShared {
        &self.lane
    }

    /// True once the connection takes no more bytes.
    #[inline]
    pub fn is_gone(&self) -> bool {
        self.has(GONE)
    }

    /// True once the connection accepts nothing, or its end was asked for, by user code or through
    /// its [`RemoteGate`](crate::RemoteGate).
    pub fn is_ending(&self) -> bool {
        self.has(GONE | CLOSE | ABORT | NOT_FRAMED)
            || self.has(GATED)
                && self.with_extra(|extra| extra.gate.as_ref().is_some_and(|gate| gate.is_gone()))
    }

    /// Closes after the queued bytes.
    pub fn close(&self) {
        self.set(CLOSE);
        self.update_gate();
        self.mark_dirty();
    }

    /// Resets the connection and drops its queued bytes.
    pub fn abort(&self) {
        self.set(ABORT);
        self.update_gate();
        self.mark_dirty();
    }

    /// Closes after the queued bytes, because user code failed.
    pub fn fail(&self) {
        self.note_reason(CloseReason::HandlerError);
        self.close();
    }

    /// Notes the reason for which the connection will end, unless another one is noted already.
    pub fn note_reason(&self, reason: CloseReason) {
        self.with_extra(|extra| {
            extra.reason.get_or_insert(reason);
        });
    }

    /// Closes after the queued bytes, because an upstream failed.
    pub fn upstream_failed(&self) {
        self.with_extra(|extra| {
            if extra.reason != Some(CloseReason::HandlerPanicked) {
                extra.reason = Some(CloseReason::UpstreamFailed);
            }
        });
        self.close();
    }

    /// Resets the connection, because user code panicked.
    pub fn panicked(&self) {
        self.with_extra(|extra| extra.reason = Some(CloseReason::HandlerPanicked));
        self.abort();
    }

    /// The reason for which user code ends it, if there is a more exact one than `otherwise`.
    pub(crate) fn end_reason(&self, otherwise: CloseReason) -> CloseReason {
        if self.has(NO_MEMORY) {
            return CloseReason::MemoryLimit;
        }
        let extra = self.extra.take();
        let reason = extra.as_ref().and_then(|extra| extra.reason);
        self.extra.set(extra);
        reason.unwrap_or(otherwise)
    }

    /// Sends FIN after the queued bytes, and accepts no more. Receiving goes on.
    pub fn end_writing(&self) {
        self.set(WRITING_ENDED);
        self.mark_dirty();
    }

    /// True once no more bytes are taken.
    #[inline]
    pub fn writing_ended(&self) -> bool {
        self.has(WRITING_ENDED | GONE)
    }

    /// True if FIN follows the queued bytes, and receiving goes on.
    #[inline]
    pub(crate) fn half_closes(&self) -> bool {
        self.has(WRITING_ENDED)
    }

    /// Makes the shard hand out frames even while the outbox is over its high mark: for a service
    /// that reads and writes independently, and stops writing by itself
    /// ([`is_full`](Outlet::is_full)).
    pub fn read_on(&self) {
        self.set(READS_ON);
    }

    /// True if frames are handed out whatever waits to be sent.
    pub(crate) fn reads_on(&self) -> bool {
        self.has(READS_ON)
    }

    /// True if no frame is handed out before the outbox has fallen.
    #[inline]
    pub(crate) fn holds_back(&self) -> bool {
        self.is_full() && !self.has(READS_ON)
    }

    /// True if a frame may have to wait: the outbox was full a moment ago, or the connection is
    /// about to end.
    #[inline]
    pub(crate) fn stops_frames(&self) -> bool {
        self.has(GONE | CLOSE | ABORT | NOT_FRAMED | OVER_HIGH | LIMITED | SWITCHED)
    }

    /// Notes that frames are cut by another rule from now on: bytes that are no frame yet are
    /// looked at again from the first.
    pub fn switched(&self) {
        self.set(SWITCHED);
        self.mark_dirty();
    }

    #[inline]
    pub(crate) fn is_switched(&self) -> bool {
        self.has(SWITCHED)
    }

    /// True once after each [`switched`](Outlet::switched).
    #[inline]
    pub(crate) fn take_switched(&self) -> bool {
        let is_switched = self.is_switched();
        self.clear(SWITCHED);
        is_switched
    }

    /// Bytes that can be queued until the outbox is over its high mark, 0 once it is.
    pub fn outbox_room(&self) -> usize {
        (self.lane.outbox_bytes_high() + 1).saturating_sub(self.outbox_bytes())
    }

    /// Bytes of one owned piece that can be queued while the outbox is below its high mark: four
    /// times that mark, so that a piece of 1 MiB is sent at once by default. It is only the room
    /// below the mark if the outbox may hold less, and if the progress of a send is checked less
    /// often than once in `window`: a slow peer would seem to take nothing for longer.
    pub fn owned_room(&self, window: Duration) -> usize {
        let own = if self.is_limited() { self.own_limits() } else { None };
        let look = own.map_or(self.lane.write_look, |own| own.times.write_look);
        let piece = self.lane.outbox_bytes_high().saturating_mul(OWNED_PIECE_MARKS);
        let most = self.lane.outbox_bytes_high().saturating_add(piece);
        if look > steps_for(window) || most > self.lane.outbox_bytes_max() {
            return self.outbox_room();
        }
        piece
    }

    /// Bytes queued or with the kernel.
    #[inline]
    pub fn outbox_bytes(&self) -> usize {
        self.pending_bytes() + self.in_flight.get() as usize
    }

    /// Counts a request of the connection that was shed.
    pub fn count_shed(&self) {
        self.lane().moved.frames_shed.add(1);
    }

    /// True if the outbox is over its high mark.
    #[inline]
    pub fn is_full(&self) -> bool {
        self.outbox_bytes() > self.lane.outbox_bytes_high()
    }

    /// True if something waits for the end of what is being sent: a handler, or FIN.
    #[inline]
    pub(crate) fn is_awaited(&self) -> bool {
        self.has(AWAITED | WRITING_ENDED)
    }

    /// True if other threads find it full, and only the end of what is in flight lets them push
    /// again.
    #[inline]
    pub(crate) fn refuses(&self) -> bool {
        self.has(GATED) && self.is_full()
    }

    /// Keeps the connection open when the peer has sent FIN and every frame was handed out, until
    /// [`close`](Outlet::close). A drain does not close it either, even if it owes nothing.
    pub fn hold_open(&self) {
        self.set(HELD_OPEN);
    }

    /// Asks for one more call of the service when the peer has sent FIN and every frame is
    /// answered: with a frame without a byte, for a service that cuts the bytes itself. Not in a
    /// drain, nor if FIN came in the middle of a frame.
    pub fn hear_end(&self) {
        self.set(HEARS_END);
    }

    pub(crate) fn hears_end(&self) -> bool {
        self.has(HEARS_END)
    }

    pub(crate) fn end_heard(&self) {
        self.clear(HEARS_END);
    }

    #[inline]
    pub(crate) fn is_held_open(&self) -> bool {
        self.has(HELD_OPEN)
    }

    /// Bytes that were in flight and are no longer with the kernel, when `left_over` of them were
    /// not sent.
    #[inline]
    pub(crate) fn sent_but(&self, left_over: usize) -> usize {
        self.in_flight.get() as usize - left_over
    }

    /// True if user code asked for more than to send what is queued.
    #[inline]
    pub(crate) fn has_requests(&self) -> bool {
        self.has(CLOSE | ABORT | NOT_FRAMED)
    }

    /// Queued bytes that the driver was not given.
    #[inline]
    pub fn pending_bytes(&self) -> usize {
        self.pending.borrow().as_ref().map_or(0, |batch| batch.len())
    }

    /// Memory of the batch that waits, beyond its bytes.
    pub(crate) fn pending_room(&self) -> usize {
        self.pending.borrow().as_ref().map_or(0, |batch| batch.room_beyond())
    }

    /// Memory of the waiting batch beyond its bytes, if its block was not one kept for the next
    /// send.
    pub(crate) fn pending_large_room(&self) -> usize {
        let pending = self.pending.borrow();
        pending.as_ref().filter(|batch| batch.may_have_room()).map_or(0, |batch| batch.room_beyond())
    }

    /// Bytes with the kernel.
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight.get() as usize
    }

    /// True if there may be bytes to send next, or the end of them.
    pub(crate) fn has_more(&self) -> bool {
        self.pending.borrow().is_some() || self.half_closes()
    }

    /// The bytes to send next, if there are any; they count as in flight from now on. Those that
    /// are [held](Outlet::hold_replies) wait, unless nothing can follow them.
    #[inline]
    pub(crate) fn take_pending(&self) -> Option<Box<Batch>> {
        let mut pending = self.pending.borrow_mut();
        let mut batch = match pending.take_if(|batch| batch.holds == 0) {
            Some(batch) => batch,
            None => self.take_held(&mut pending)?,
        };
        drop(pending);
        if batch.is_empty() {
            self.lane.shard().recycle(batch);
            return None;
        }
        if batch.room() > KEPT_BYTES_MAX {
            batch.trim();
        }
        self.in_flight.set(batch.len() as u32);
        Some(batch)
    }

    /// Notes that the bytes taken for the next send are sealed, in `bytes` bytes.
    pub(crate) fn sealed(&self, bytes: usize) {
        let before = self.in_flight.replace(bytes as u32);
        self.lane.shard().release(before as usize);
        self.lane.shard().hold(bytes);
        if self.is_full() {
            self.set(OVER_HIGH);
        }
        self.update_gate();
    }

    /// Drops queued bytes that are not in flight.
    pub(crate) fn drop_pending(&self) {
        if let Some(batch) = self.pending.take() {
            self.lane.shard().release(batch.len());
            self.lane.shard().recycle(batch);
        }
    }

    /// Notes that `bytes` bytes in flight were sent, or never will be.
    pub(crate) fn left(&self, bytes: usize) {
        self.in_flight.set(self.in_flight.get() - bytes as u32);
        self.lane.shard().release(bytes);
        if self.has(OVER_HIGH) && !self.is_full() {
            self.clear(OVER_HIGH);
        }
        self.update_gate();
    }

    /// Accepts no more bytes from now on; queued ones are still sent.
    pub(crate) fn seal(&self) {
        self.set(GONE);
        self.update_gate();
    }

    /// Accepts nothing from now on and drops what is queued. Bytes in flight count as on their way
    /// back, elsewhere.
    pub(crate) fn end(&self) {
        self.seal();
        self.unreserve(usize::MAX);
        self.lane.shard().set_service_bytes(self.service_bytes(), 0);
        self.left(self.in_flight.get() as usize);
        self.drop_pending();
    }

    pub(crate) fn is_over_max(&self) -> bool {
        self.outbox_bytes() > self.lane.outbox_bytes_max()
    }

    #[inline]
    pub(crate) fn close_requested(&self) -> bool {
        self.has(CLOSE)
    }

    #[inline]
    pub(crate) fn abort_requested(&self) -> bool {
        self.has(ABORT)
    }

    pub(crate) fn not_framed(&self) -> bool {
        self.has(NOT_FRAMED)
    }

    /// Takes the connection off the dirty list. True if there is more to do for it than sending
    /// what is queued.
    #[inline]
    pub(crate) fn take_dirty_unless_plain(&self) -> bool {
        let flags = self.flags.get();
        self.flags.set(flags & !DIRTY);
        flags & !(DIRTY | UNOBTRUSIVE) != 0
    }

    /// True if user code touched it since the last turn ended.
    pub(crate) fn is_dirty(&self) -> bool {
        self.has(DIRTY)
    }

    /// True if nothing depends on the end of a send: no task, no request, and what is queued after
    /// it is sent at the end of the turn in any case.
    #[inline]
    pub(crate) fn is_plain(&self) -> bool {
        let flags = self.flags.get();
        flags & !(DIRTY | UNOBTRUSIVE) == 0 && (flags & DIRTY != 0 || self.pending.borrow().is_none())
    }

    /// Notes that everything in flight was sent. Returns how much that was.
    #[inline]
    pub(crate) fn all_sent(&self) -> usize {
        let bytes = self.in_flight.replace(0) as usize;
        self.lane.shard().release(bytes);
        bytes
    }

    /// Marks the connection for the state machine, which looks at it at the end of the turn.
    #[inline]
    pub(crate) fn mark_dirty(&self) {
        if self.has(DIRTY) {
            return;
        }
        self.set(DIRTY);
        if self.lane.shard().list_dirty(self.id) == Wakes::Yes {
            self.lane.shard().wake_for_dirty();
        }
    }

    #[inline]
    fn has(&self, flag: u16) -> bool {
        self.flags.get() & flag != 0
    }

    #[inline]
    fn clear(&self, flag: u16) {
        self.flags.set(self.flags.get() & !flag);
    }

    #[inline]
    fn set(&self, flag: u16) {
        self.flags.set(self.flags.get() | flag);
    }
}

impl fmt::Debug for Outlet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Outlet").field("id", &self.id).field("peer", &self.peer()).finish_non_exhaustive()
    }
}

/// A connection as its user code holds it: its outlet and after it the session, in one allocation.
pub type ConnShared<S> = Counted<Outlet, S>;

/// The same if the type of the session does not matter.
pub type ConnHead = CountedHead<Outlet>;

#[cfg(test)]
mod tests;
