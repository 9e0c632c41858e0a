//! What user code and the state machine share of a connection.
//!
//! User code runs while the state machine waits, and never holds a reference into it: it writes into the
//! connection's [`Outlet`] and puts the connection on the list of dirty ones in [`ShardShared`](crate::ShardShared).
//! The state machine looks at that list at the end of the turn. So nothing is locked and nothing is entered twice.

use alloc::boxed::Box;
use alloc::rc::Rc;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::cell::{Cell, RefCell};
use core::fmt;
use core::net::SocketAddr;
use core::task::Waker;

use ringserve_buf::{Counted, CountedHead};

use crate::framing::Payload;
use crate::limits::ordered;
use crate::outbox::Outbox;
use crate::shared::{LaneShared, Wakes};
use crate::times::Times;
use crate::{Account, Batch, CloseReason, ConnId, ConnLimits, LimitError, PeerCredentials, RemoteGate, Time};

/// The connection is on the dirty list.
const DIRTY: u16 = 1;
/// User code asked to close after its replies.
const CLOSE: u16 = 2;
/// User code asked to abort.
const ABORT: u16 = 4;
/// A reply could not be framed.
const NOT_FRAMED: u16 = 8;
/// The connection takes nothing any more.
const GONE: u16 = 16;
/// A task waits for the outbox to fall below its low mark.
const AWAITED: u16 = 32;
/// The service holds the connection open beyond the peer's FIN.
const HELD_OPEN: u16 = 64;
/// Other threads may look at its [`RemoteGate`].
const GATED: u16 = 128;
/// User code has written its last byte: FIN follows what is queued.
const WRITING_ENDED: u16 = 256;
/// Frames are handed out even while the outbox is over its high mark.
const READS_ON: u16 = 512;

/// The system had no memory for a reply: the connection is aborted.
const NO_MEMORY: u16 = 1024;
/// The outbox came to be over its high mark, and may still be.
const OVER_HIGH: u16 = 2048;
/// What it sends and receives is counted.
const ACCOUNTED: u16 = 4096;
/// It has limits of its own. Its frames and replies take the slower ways, which look at them.
const LIMITED: u16 = 8192;
/// The kernel was asked for more than the peer's address.
const ASKED: u16 = 16384;
/// User code has switched the rule by which its bytes are cut.
const SWITCHED: u16 = 32768;

/// A connection as user code reaches it: outbox, requests, address.
pub struct Outlet {
    id: ConnId,
    lane: Rc<LaneShared>,
    peer: Option<SocketAddr>,
    pending: RefCell<Option<Box<Batch>>>,
    /// Bytes with the kernel.
    in_flight: Cell<u32>,
    listener: u16,
    flags: Cell<u16>,
    extra: Cell<Option<Box<Extra>>>,
}

/// What few connections have.
#[derive(Default)]
struct Extra {
    /// Woken when the outbox falls below its low mark.
    ready: Option<Waker>,
    /// The same for other calls of the connection.
    more_ready: Vec<Waker>,
    gate: Option<Arc<RemoteGate>>,
    /// Bytes that the service holds for it.
    service_bytes: usize,
    /// Why user code closes or aborts it, if it says more than that.
    reason: Option<CloseReason>,
    asked: Option<Box<Asked>>,
    limits: Option<Box<OwnLimits>>,
}

/// What the kernel was asked for when the connection was accepted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Asked {
    /// The address that the peer connected to.
    pub local: Option<SocketAddr>,
    /// The process at the other end of a Unix socket.
    pub credentials: Option<PeerCredentials>,
}

/// What a connection with limits of its own is bounded by, instead of what its lane says.
#[derive(Clone, Copy)]
pub(crate) struct OwnLimits {
    pub frame_bytes_max: usize,
    pub times: Times,
}

impl Outlet {
    pub(crate) fn new(id: ConnId, lane: Rc<LaneShared>, peer: Option<SocketAddr>, listener: u16) -> Outlet {
        Outlet {
            id,
            lane,
            peer,
            pending: RefCell::new(None),
            in_flight: Cell::new(0),
            listener,
            flags: Cell::new(0),
            extra: Cell::new(None),
        }
    }

    /// The connection's name on its shard.
    #[inline]
    pub fn id(&self) -> ConnId {
        self.id
    }

    /// The peer's address, if it has one.
    pub fn peer(&self) -> Option<SocketAddr> {
        self.peer
    }

    /// What else the kernel was asked for.
    #[inline]
    pub fn asked(&self) -> Asked {
        if !self.has(ASKED) {
            return Asked::default();
        }
        self.with_extra(|extra| extra.asked.as_deref().copied().unwrap_or_default())
    }

    /// Keeps what the kernel was asked for, if it told something.
    pub fn set_asked(&self, asked: Asked) {
        if asked != Asked::default() {
            self.set(ASKED);
            self.with_extra(|extra| extra.asked = Some(Box::new(asked)));
        }
    }

    /// The listener that accepted it.
    pub fn listener(&self) -> u16 {
        self.listener
    }

    /// What the connections of its lane share.
    pub fn lane(&self) -> &LaneShared {
        &self.lane
    }

    /// True once the connection takes nothing any more.
    #[inline]
    pub fn is_gone(&self) -> bool {
        self.has(GONE)
    }

    /// True once the connection takes nothing any more, or its end was asked for, by user code or through its [`RemoteGate`].
    pub fn is_ending(&self) -> bool {
        self.has(GONE | CLOSE | ABORT | NOT_FRAMED)
            || self.has(GATED)
                && self.with_extra(|extra| extra.gate.as_ref().is_some_and(|gate| gate.is_gone()))
    }

    /// Queues one frame. Does nothing once the connection is gone. A payload that cannot be framed closes it.
    #[inline]
    pub fn reply(&self, payload: Payload<'_>) {
        self.append::<1>(|out| self.lane.encoding().encode(payload, out).is_ok());
    }

    /// Queues bytes as they are.
    pub fn write(&self, bytes: &[u8]) {
        self.append::<0>(|out| {
            out.put(bytes);
            true
        });
    }

    /// Queues what `write` writes: as many frames.
    #[inline]
    fn append<const FRAMES: u64>(&self, write: impl FnOnce(&mut Outbox<'_>) -> bool) {
        let flags = self.flags.get();
        if flags & (GONE | WRITING_ENDED | NO_MEMORY) != 0 {
            return;
        }
        let (lane, shard) = (&*self.lane, self.lane.shard());
        let mut wakes = Wakes::No;
        // Dropped after what follows it: nothing is borrowed then.
        let mut unfinished = Unfinished { outlet: self, before: 0 };
        let mut pending = self.pending.borrow_mut();
        let batch = match &mut *pending {
            Some(batch) => batch,
            empty => {
                let Some((batch, wakes_shard)) = shard.begin_batch(self.id, flags & DIRTY != 0) else {
                    drop(pending);
                    core::mem::forget(unfinished);
                    return self.refuse();
                };
                wakes = wakes_shard;
                self.flags.set(flags | DIRTY);
                empty.insert(batch)
            }
        };
        let before = batch.len();
        unfinished.before = before;
        let framed = write(&mut Outbox::new(batch, shard.lends()));
        if !framed || batch.is_refused() {
            let flag = if framed { NO_MEMORY | ABORT } else { NOT_FRAMED };
            batch.roll_back(before);
            self.set(flag);
        }
        let len = batch.len();
        drop(pending);
        core::mem::forget(unfinished);
        shard.hold(len - before);
        if len + self.in_flight.get() as usize > lane.outbox_bytes_high() {
            self.set(OVER_HIGH);
        }
        if self.flags.get() & (GATED | DIRTY | ACCOUNTED) != DIRTY {
            self.update_gate();
            self.mark_dirty();
            if FRAMES > 0 && self.has(ACCOUNTED) && len > before {
                self.count(|account| account.frames_sent += FRAMES);
            }
        }
        if wakes == Wakes::Yes {
            shard.wake_for_dirty();
        }
    }

    /// The system has no memory for a reply, without which the peer cannot go on.
    #[cold]
    fn refuse(&self) {
        self.set(NO_MEMORY | ABORT);
        self.update_gate();
        self.mark_dirty();
    }

    /// Closes after what is queued has left.
    pub fn close(&self) {
        self.set(CLOSE);
        self.update_gate();
        self.mark_dirty();
    }

    /// Resets the connection; what is queued is dropped.
    pub fn abort(&self) {
        self.set(ABORT);
        self.update_gate();
        self.mark_dirty();
    }

    /// Closes after what is queued has left, because user code failed.
    pub fn fail(&self) {
        // It may have said more than that.
        self.with_extra(|extra| {
            extra.reason.get_or_insert(CloseReason::HandlerError);
        });
        self.close();
    }

    /// Closes after what is queued has left, because an upstream failed.
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

    /// Why user code ends it, where `otherwise` does not say it all.
    pub(crate) fn end_reason(&self, otherwise: CloseReason) -> CloseReason {
        if self.has(NO_MEMORY) {
            return CloseReason::MemoryLimit;
        }
        let extra = self.extra.take();
        let reason = extra.as_ref().and_then(|extra| extra.reason);
        self.extra.set(extra);
        reason.unwrap_or(otherwise)
    }

    /// Sends FIN after what is queued, and takes nothing more to send. Receiving goes on.
    pub fn end_writing(&self) {
        self.set(WRITING_ENDED);
        self.mark_dirty();
    }

    /// True once nothing more is taken to be sent.
    #[inline]
    pub fn writing_ended(&self) -> bool {
        self.has(WRITING_ENDED | GONE)
    }

    /// True if FIN follows what is queued, and receiving goes on.
    #[inline]
    pub(crate) fn half_closes(&self) -> bool {
        self.has(WRITING_ENDED)
    }

    /// Has frames handed out even while the outbox is over its high mark: for a service that reads and writes
    /// independently, and stops writing by itself ([`is_full`](Outlet::is_full)).
    pub fn read_on(&self) {
        self.set(READS_ON);
    }

    /// True if no frame is handed out before the outbox has fallen.
    #[inline]
    pub(crate) fn holds_back(&self) -> bool {
        self.is_full() && !self.has(READS_ON)
    }

    /// True if a frame may have to wait: the outbox was full a moment ago, or the connection is to end.
    #[inline]
    pub(crate) fn stops_frames(&self) -> bool {
        self.has(GONE | CLOSE | ABORT | NOT_FRAMED | OVER_HIGH | LIMITED | SWITCHED)
    }

    /// The rule by which frames are cut is another one from now on: what is no frame yet is looked at from its first byte.
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

    /// Bytes queued or with the kernel.
    #[inline]
    pub fn outbox_bytes(&self) -> usize {
        self.pending_bytes() + self.in_flight.get() as usize
    }

    /// True if the outbox is over its high mark.
    #[inline]
    pub fn is_full(&self) -> bool {
        self.outbox_bytes() > self.lane.outbox_bytes_high()
    }

    /// Wakes `waker` when the outbox falls below its low mark, once.
    pub fn wake_when_ready(&self, waker: &Waker) {
        // Cloning and dropping a waker may run others' code: outside.
        let new = waker.clone();
        let unused = self.with_extra(|extra| {
            let known = extra.ready.iter().chain(&extra.more_ready).any(|old| old.will_wake(&new));
            if known {
                return Some(new);
            }
            if extra.ready.is_none() {
                extra.ready = Some(new);
            } else {
                extra.more_ready.push(new);
            }
            None
        });
        drop(unused);
        self.set(AWAITED);
        // A send that was started in this turn, when nothing waited for its end, must be waited for.
        self.mark_dirty();
    }

    /// True if something waits for the end of what is being sent: a handler, or FIN.
    #[inline]
    pub(crate) fn is_awaited(&self) -> bool {
        self.has(AWAITED | WRITING_ENDED)
    }

    /// True if other threads find it full, and nothing but the end of what is in flight lets them push again.
    #[inline]
    pub(crate) fn refuses(&self) -> bool {
        self.has(GATED) && self.is_full()
    }

    /// Gives out the wakers of the tasks that wait for room. Waking them is the caller's affair: wakers are user code, which
    /// may panic, and must not do so in the middle of the state machine.
    pub(crate) fn take_ready(&self, mut take: impl FnMut(Waker)) {
        if !self.has(AWAITED) {
            return;
        }
        self.clear(AWAITED);
        let all = |extra: &mut Extra| (extra.ready.take(), core::mem::take(&mut extra.more_ready));
        let (first, more) = self.with_extra(all);
        first.into_iter().chain(more).for_each(&mut take);
    }

    /// Allocates at the first call.
    fn with_extra<T>(&self, change: impl FnOnce(&mut Extra) -> T) -> T {
        let mut extra = self.extra.take().unwrap_or_default();
        let result = change(&mut extra);
        self.extra.set(Some(extra));
        result
    }

    /// What other threads may know of this connection. The first call allocates.
    pub fn gate(&self) -> Arc<RemoteGate> {
        let make =
            || Arc::new(RemoteGate::new(self.outbox_bytes(), self.lane.outbox_bytes_high(), self.is_gone()));
        let gate = self.with_extra(|extra| extra.gate.get_or_insert_with(make).clone());
        self.set(GATED);
        self.update_gate();
        // As in `wake_when_ready`: a thread that is refused now waits for a send that was started in this turn.
        self.mark_dirty();
        gate
    }

    #[inline]
    fn update_gate(&self) {
        if !self.has(GATED) {
            return;
        }
        self.with_extra(|extra| {
            let Some(gate) = &extra.gate else { return };
            gate.set_outbox_bytes(self.outbox_bytes());
            if self.has(CLOSE | NOT_FRAMED) {
                gate.ask_close();
            }
            if self.has(ABORT) {
                gate.ask_abort();
            }
            if self.is_gone() {
                gate.set_gone();
            }
        });
    }

    /// Says how many bytes the service now holds for the connection beside what the shard sees, as in the buffers of a library.
    /// They count in [`ServerLimits::held_bytes_max`](crate::limits::ServerLimits::held_bytes_max) until the connection ends; beyond it the connections that hold most are closed.
    /// The first call allocates.
    pub fn set_service_bytes(&self, bytes: usize) {
        if self.is_gone() {
            return;
        }
        let before = self.with_extra(|extra| core::mem::replace(&mut extra.service_bytes, bytes));
        self.lane.shard().set_service_bytes(before, bytes);
        if bytes > before {
            // The state machine looks whether that is too much.
            self.mark_dirty();
        }
    }

    /// What [`set_service_bytes`](Outlet::set_service_bytes) said last.
    pub(crate) fn service_bytes(&self) -> usize {
        let extra = self.extra.take();
        let bytes = extra.as_ref().map_or(0, |extra| extra.service_bytes);
        self.extra.set(extra);
        bytes
    }

    /// Bounds the connection by other limits than those of its service, from now on. What an earlier call set and this one does
    /// not is the service's again. Allocates; a connection without limits of its own holds nothing for them.
    ///
    /// # Errors
    /// As [`Limits::check`](crate::Limits::check), of these limits together with the service's, and where a frame may be larger than
    /// all that the shard may hold; nothing is changed then.
    pub fn set_limits(&self, limits: &ConnLimits) -> Result<(), LimitError> {
        let service = self.lane.limits();
        let limits = limits.over(service);
        limits.check()?;
        ordered(
            "frame_bytes_max",
            limits.frame_bytes_max,
            "held_bytes_max",
            self.lane.shard().held_bytes_max(),
        )?;
        let own = OwnLimits { frame_bytes_max: limits.frame_bytes_max, times: Times::new(&limits, None) };
        self.with_extra(|extra| extra.limits = Some(Box::new(own)));
        self.set(LIMITED);
        // The state machine looks when they are due.
        self.mark_dirty();
        Ok(())
    }

    #[inline]
    pub(crate) fn is_limited(&self) -> bool {
        self.has(LIMITED)
    }

    /// The limits that were set, if any were.
    #[cold]
    pub(crate) fn own_limits(&self) -> Option<OwnLimits> {
        let extra = self.extra.take();
        let limits = extra.as_ref().and_then(|extra| extra.limits.as_deref().copied());
        self.extra.set(extra);
        limits
    }

    /// What the connection sends and receives is counted from now on. False if the system has no memory for that.
    pub fn open_account(&self, now: Time) -> bool {
        let is_open = self.lane.accounts().open(self.id.slot(), now);
        if is_open {
            self.set(ACCOUNTED);
        }
        is_open
    }

    /// What was counted, if that was asked for.
    pub fn account(&self, now: Time) -> Option<Account> {
        if self.has(ACCOUNTED) { self.lane.accounts().at(self.id.slot(), now) } else { None }
    }

    /// A frame goes to the service.
    pub fn count_frame(&self) {
        self.count(|account| account.frames_received += 1);
    }

    /// Bytes came.
    pub fn count_received(&self, bytes: usize) {
        self.count(|account| account.bytes_received += bytes as u64);
    }

    /// The send in flight is over, and `left_over` of its bytes were not sent.
    pub fn count_sent(&self, left_over: usize) {
        self.count(|account| account.bytes_sent += self.sent_but(left_over) as u64);
    }

    #[cold]
    fn count(&self, change: impl FnOnce(&mut Account)) {
        if self.has(ACCOUNTED) {
            self.lane.accounts().change(self.id.slot(), change);
        }
    }

    /// Keeps the connection open when the peer has sent FIN and every frame was handed out, until
    /// [`close`](Outlet::close), and keeps a drain from closing it as one that owes nothing.
    pub fn hold_open(&self) {
        self.set(HELD_OPEN);
    }

    #[inline]
    pub(crate) fn is_held_open(&self) -> bool {
        self.has(HELD_OPEN)
    }

    /// Bytes that were in flight and are no longer with the kernel, when `left_over` of them were not sent.
    #[inline]
    pub(crate) fn sent_but(&self, left_over: usize) -> usize {
        self.in_flight.get() as usize - left_over
    }

    /// True if user code asked for more than sending what is queued.
    #[inline]
    pub(crate) fn has_requests(&self) -> bool {
        self.has(CLOSE | ABORT | NOT_FRAMED)
    }

    #[inline]
    pub(crate) fn pending_bytes(&self) -> usize {
        self.pending.borrow().as_ref().map_or(0, |batch| batch.len())
    }

    /// True if there may be bytes to send next, or the end of them.
    pub(crate) fn has_more(&self) -> bool {
        self.pending.borrow().is_some() || self.half_closes()
    }

    /// The bytes to send next, if there are any, and which count as in flight from now on.
    #[inline]
    pub(crate) fn take_pending(&self) -> Option<Box<Batch>> {
        let batch = self.pending.borrow_mut().take()?;
        if batch.is_empty() {
            self.lane.shard().recycle(batch);
            return None;
        }
        self.in_flight.set(batch.len() as u32);
        Some(batch)
    }

    /// `bytes` that were in flight were sent, or will never be.
    pub(crate) fn left(&self, bytes: usize) {
        self.in_flight.set(self.in_flight.get() - bytes as u32);
        self.lane.shard().release(bytes);
        if self.has(OVER_HIGH) && !self.is_full() {
            self.clear(OVER_HIGH);
        }
        self.update_gate();
    }

    /// Takes nothing from now on; what is queued still leaves.
    pub(crate) fn seal(&self) {
        self.set(GONE);
        self.update_gate();
    }

    /// Takes nothing from now on and drops what is queued. What is in flight does not count any more.
    pub(crate) fn end(&self) {
        self.seal();
        self.lane.shard().set_service_bytes(self.service_bytes(), 0);
        self.left(self.in_flight.get() as usize);
        if let Some(batch) = self.pending.take() {
            self.lane.shard().release(batch.len());
            self.lane.shard().recycle(batch);
        }
    }

    pub(crate) fn is_over_max(&self) -> bool {
        self.outbox_bytes() > self.lane.outbox_bytes_max()
    }

    #[inline]
    pub(crate) fn close_asked(&self) -> bool {
        self.has(CLOSE)
    }

    #[inline]
    pub(crate) fn abort_asked(&self) -> bool {
        self.has(ABORT)
    }

    pub(crate) fn not_framed(&self) -> bool {
        self.has(NOT_FRAMED)
    }

    /// Takes the connection off the dirty list. True if there is more to do for it than sending what is queued.
    #[inline]
    pub(crate) fn take_dirty_unless_plain(&self) -> bool {
        let flags = self.flags.get();
        self.flags.set(flags & !DIRTY);
        flags & !(DIRTY | HELD_OPEN | READS_ON | ACCOUNTED | ASKED) != 0
    }

    /// True if nothing depends on the end of a send: no task, no request, and what is queued behind it leaves at the end of
    /// the turn in any case.
    #[inline]
    pub(crate) fn is_plain(&self) -> bool {
        let flags = self.flags.get();
        flags & !(HELD_OPEN | READS_ON | DIRTY | ACCOUNTED | ASKED) == 0
            && (flags & DIRTY != 0 || self.pending.borrow().is_none())
    }

    /// Everything in flight was sent. Returns how much that was.
    #[inline]
    pub(crate) fn all_sent(&self) -> usize {
        let bytes = self.in_flight.replace(0) as usize;
        self.lane.shard().release(bytes);
        bytes
    }

    /// Has the state machine look at the connection at the end of the turn.
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

/// User code writes into an outbox. If it panics, what it wrote is taken back, and the connection is reset: part of a frame
/// must neither leave nor count, and a peer that misses one cannot go on.
struct Unfinished<'a> {
    outlet: &'a Outlet,
    /// Bytes that were queued before.
    before: usize,
}

impl Drop for Unfinished<'_> {
    #[cold]
    fn drop(&mut self) {
        if let Ok(mut pending) = self.outlet.pending.try_borrow_mut()
            && let Some(batch) = &mut *pending
        {
            batch.roll_back(self.before);
        }
        self.outlet.panicked();
        // The connection became dirty before the panic, and nothing else tells a shard that sleeps.
        self.outlet.lane.shard().wake_for_dirty();
    }
}

impl fmt::Debug for Outlet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Outlet").field("id", &self.id).field("peer", &self.peer).finish_non_exhaustive()
    }
}

/// A connection as its user code holds it: its outlet with the session behind it, in one allocation.
pub type ConnShared<S> = Counted<Outlet, S>;

/// The same where the type of the session does not matter.
pub type ConnHead = CountedHead<Outlet>;

#[cfg(test)]
mod tests {
    extern crate std;

    use alloc::task::Wake;
    use core::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::Limits;
    use crate::framing::{Framing, Raw};
    use crate::shared::ShardShared;

    #[derive(Default)]
    struct Woken(AtomicUsize);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn push_that_panics_wakes_a_sleeping_shard() {
        let limits = Limits::default();
        let shard = Rc::new(ShardShared::new(&crate::ServerLimits::default()));
        let lane = Rc::new(LaneShared::new(shard.clone(), Rc::new(Raw).encoding(), &limits));
        let woken = Arc::new(Woken::default());
        shard.wake_when_dirty(Waker::from(woken.clone()));
        let outlet = Outlet::new(ConnId::new(1, 1), lane, None, 0);
        let push = || outlet.append::<1>(|_| panic!("planted: encoding panics"));
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(push)).is_err());
        assert!(outlet.abort_asked() && shard.has_dirty());
        assert_eq!(woken.0.load(Ordering::SeqCst), 1, "the shard sleeps on");
    }
}
