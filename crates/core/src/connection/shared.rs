//! State that connections share with user code. Those of a shard share the list of dirty ones,
//! batches to send and sums; those of a lane share how replies are encoded, how many may be queued,
//! and what each turn looks up and counts.

use alloc::boxed::Box;
use alloc::rc::Rc;
use alloc::vec::Vec;
use core::cell::{Cell, RefCell};
use core::fmt;
use core::task::Waker;
use core::time::Duration;

use bytes::Bytes;
use ringserve_buf::try_box;

use super::account::Accounts;
use super::deadlines::Deadlines;
use super::line::{CallRequest, Line, reservable_bytes};
use super::pages::Pages;
use super::transport::{ChannelTable, Facts};
use crate::bytes::KEPT_BYTES_MAX;
use crate::framing::Encoding;
use crate::limits::Times;
use crate::proxy::Headers;
use crate::{Batch, ConnId, Limits, ServerLimits};

/// Batches kept for the next send, at most 64 KiB each and usually a few KiB. More than are in use
/// in one turn of 256 completions are not needed. They take at most a sixteenth of what connections
/// may hold, in addition to that. Those with more room than 64 KiB are kept as long as they have no
/// more together.
fn spare_batches_max(limits: &ServerLimits) -> usize {
    (limits.held_bytes_max / 16 / KEPT_BYTES_MAX).clamp(1, 256)
}

/// State that the connections of one lane share.
pub struct LaneShared {
    shard: Rc<ShardShared>,
    encoding: Encoding,
    outbox_bytes_high: usize,
    outbox_bytes_max: usize,
    connection_tasks_max: u16,
    pub(crate) frame_bytes_max: usize,
    /// The lane's times, in steps of the wheel.
    pub(crate) idle: u32,
    pub(crate) write_look: u32,
    pub(crate) moved: TrafficTotals,
    /// For connections that set some limits themselves.
    limits: Limits,
    accounts: Accounts,
    headers: Headers,
    facts: Facts,
}

/// Counts of a lane's connections. They are kept here and not in the shard's
/// [`ConnStats`](crate::ConnStats), since each turn changes them: a connection's outlet leads here
/// at the same cost for every lane.
#[derive(Default)]
pub(crate) struct TrafficTotals {
    pub frames: Count,
    pub bytes_received: Count,
    pub bytes_sent: Count,
    pub sends: Count,
    pub frames_shed: Count,
}

#[derive(Default)]
pub(crate) struct Count(Cell<u64>);

impl Count {
    #[inline]
    pub(crate) fn add(&self, more: u64) {
        self.0.set(self.0.get() + more);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.get()
    }
}

/// Memory of all connections.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Memory {
    /// Bytes that they hold.
    pub(crate) held: usize,
    /// Bytes that the driver still has of those that ended.
    pub(crate) returning: usize,
}

impl Memory {
    #[inline]
    pub(crate) fn bytes(self) -> usize {
        self.held + self.returning
    }
}

/// State that the connections of one shard share.
pub struct ShardShared {
    queues: RefCell<Queues>,
    /// Bytes that all connections hold: in inboxes and outboxes, in flight, by calls that wait, by
    /// services.
    held_bytes: Cell<usize>,
    /// Bytes that the driver still has of connections that ended.
    returning_bytes: Cell<usize>,
    /// A request waits for the end of the turn: a service came to hold more for a connection since
    /// the turn began, a deadline changed, or a call joined the line.
    has_asked: Cell<bool>,
    service_grew: Cell<bool>,
    spare_batches_max: usize,
    held_bytes_max: Cell<usize>,
    /// Drops owned bytes that left.
    release: Cell<fn(Bytes)>,
    /// False while receive memory is short.
    lend: Cell<bool>,
    /// Bytes that peers sent and took while the shard was away may wait in the kernel.
    is_behind: Cell<bool>,
    draining: Cell<bool>,
    channels: ChannelTable,
    /// Calls that wait for memory.
    line: Line,
    deadlines: Deadlines,
    /// Sources of work that wait for a page.
    pages: Pages,
}

#[derive(Default)]
struct Queues {
    dirty: Vec<ConnId>,
    // Boxed because it travels through operations and completions as one word.
    #[allow(clippy::vec_box)]
    spare: Vec<Box<Batch>>,
    /// Kept batches with more room, and the sum of that.
    #[allow(clippy::vec_box)]
    large: Vec<Box<Batch>>,
    large_bytes: usize,
    /// Woken when the first connection becomes dirty.
    on_dirty: Option<Waker>,
}

/// Whether the shard, which may sleep, has to be informed of a dirty connection.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wakes {
    No,
    Yes,
}

impl Queues {
    #[inline]
    fn list_dirty(&mut self, id: ConnId) -> Wakes {
        let wakes = self.on_dirty.is_some() && self.dirty.is_empty();
        self.dirty.push(id);
        if wakes { Wakes::Yes } else { Wakes::No }
    }
}

impl LaneShared {
    pub(crate) fn new(
        shard: Rc<ShardShared>,
        encoding: Encoding,
        limits: &Limits,
        times: &Times,
    ) -> LaneShared {
        LaneShared {
            shard,
            encoding,
            outbox_bytes_high: limits.outbox_bytes_high,
            outbox_bytes_max: limits.outbox_bytes_max,
            connection_tasks_max: limits.connection_tasks_max,
            frame_bytes_max: limits.frame_bytes_max,
            idle: times.idle,
            write_look: times.write_look,
            moved: TrafficTotals::default(),
            limits: limits.clone(),
            accounts: Accounts::default(),
            headers: Headers::default(),
            facts: Facts::default(),
        }
    }

    /// Tasks that a connection may have at once.
    pub fn connection_tasks_max(&self) -> usize {
        self.connection_tasks_max.into()
    }

    /// State that all connections of the shard share.
    #[inline]
    pub fn shard(&self) -> &ShardShared {
        &self.shard
    }

    /// Their limits.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    pub(crate) fn accounts(&self) -> &Accounts {
        &self.accounts
    }

    /// Facts from the PROXY headers of its connections.
    pub(crate) fn headers(&self) -> &Headers {
        &self.headers
    }

    /// Facts from the handshakes of its connections.
    pub(crate) fn facts(&self) -> &Facts {
        &self.facts
    }

    #[inline]
    pub(crate) fn encoding(&self) -> &Encoding {
        &self.encoding
    }

    #[inline]
    pub(crate) fn outbox_bytes_high(&self) -> usize {
        self.outbox_bytes_high
    }

    pub(crate) fn outbox_bytes_max(&self) -> usize {
        self.outbox_bytes_max
    }
}

impl ShardShared {
    pub(crate) fn new(limits: &ServerLimits) -> ShardShared {
        ShardShared {
            queues: RefCell::default(),
            held_bytes: Cell::new(0),
            returning_bytes: Cell::new(0),
            has_asked: Cell::new(false),
            service_grew: Cell::new(false),
            spare_batches_max: spare_batches_max(limits),
            held_bytes_max: Cell::new(limits.held_bytes_max),
            release: Cell::new(drop),
            lend: Cell::new(true),
            is_behind: Cell::new(false),
            draining: Cell::new(false),
            channels: ChannelTable::default(),
            line: Line::default(),
            deadlines: Deadlines::default(),
            pages: Pages::default(),
        }
    }

    /// True if a service came to hold more, a deadline changed, or calls may wait for memory, or
    /// sources for a page.
    #[inline]
    pub(crate) fn has_asked(&self) -> bool {
        self.has_asked.get()
    }

    /// Notes that all requests were looked at, except those that are still open.
    pub(crate) fn looked(&self) {
        self.has_asked.set(self.asks());
    }

    /// True if a service came to hold more, a deadline changed, or calls wait, or sources.
    pub(crate) fn asks(&self) -> bool {
        let has_waiting = !self.line.is_empty() || !self.pages.is_empty();
        has_waiting || self.service_grew.get() || self.deadlines.has_changes()
    }

    /// Sources of work that wait for a page.
    pub(crate) fn pages(&self) -> &Pages {
        &self.pages
    }

    /// Registers a source of work that is done a page at a time
    /// ([`Lane::page`](crate::Lane::page)). Returns its number.
    pub fn add_page_source(&self) -> u32 {
        self.pages.add()
    }

    /// Asks for a page of a source at the end of this turn, or of the next one if this turn is
    /// over, unless it waits already.
    pub fn ask_page(&self, source: u32) {
        if self.pages.ask(source) {
            self.has_asked.set(true);
            self.wake_for_dirty();
        }
    }

    /// Notes that user code sets the deadline of a connection, or takes it away. False if the
    /// system has no memory for the note.
    pub(crate) fn change_deadline(&self, id: ConnId, time: Option<Duration>) -> bool {
        self.has_asked.set(true);
        self.deadlines.change(id, time)
    }

    /// Puts a call at the end of the line.
    pub(crate) fn line_up(&self, last: &Rc<CallRequest>) {
        self.line.push(last);
        self.has_asked.set(true);
    }

    /// The deadlines of its connections.
    #[inline]
    pub(crate) fn deadlines(&self) -> &Deadlines {
        &self.deadlines
    }

    /// Calls that wait for memory.
    #[inline]
    pub(crate) fn line(&self) -> &Line {
        &self.line
    }

    /// The room for reservations.
    pub(crate) fn reservable_bytes(&self) -> usize {
        reservable_bytes(self.held_bytes_max.get())
    }

    /// True if `bytes` more fit into the room for reservations.
    #[inline]
    pub(crate) fn fits(&self, bytes: usize) -> bool {
        self.memory_bytes() + bytes <= self.reservable_bytes()
    }

    /// True if `bytes` can be [reserved](crate::Reservation) without a wait.
    #[inline]
    pub fn has_room(&self, bytes: usize) -> bool {
        self.fits(bytes) && self.line.is_empty()
    }

    /// Bytes that have to be given back until everything fits for which the line was last looked
    /// at.
    pub(crate) fn missing_bytes(&self) -> usize {
        (self.held_bytes() + self.line.looked_for.get()).saturating_sub(self.reservable_bytes())
    }

    /// True if calls wait for memory that is not on its way back.
    pub(crate) fn is_short(&self) -> bool {
        !self.line.is_empty() && self.missing_bytes() > 0
    }

    /// The channels of its connections.
    #[inline]
    pub(crate) fn channels(&self) -> &ChannelTable {
        &self.channels
    }

    /// True once the shard drains: it accepts nothing and closes connections that owe nothing.
    pub fn is_draining(&self) -> bool {
        self.draining.get()
    }

    /// Sets the waker that is woken when user code did something that the state machine has to look
    /// at, at least if it is the first such thing since [`Shard::end`](crate::Shard::end): for a
    /// shard whose user code also runs outside of its turns.
    pub fn wake_when_dirty(&self, waker: Waker) {
        self.queues.borrow_mut().on_dirty = Some(waker);
    }

    /// Nothing is borrowed meanwhile: the waker may come back here.
    #[cold]
    pub(crate) fn wake_for_dirty(&self) {
        let waker = self.queues.borrow().on_dirty.clone();
        waker.into_iter().for_each(Waker::wake);
    }

    pub(crate) fn set_draining(&self) {
        self.draining.set(true);
    }

    /// True if bytes that peers sent and took while the shard was away may wait in the kernel: no
    /// time limit is judged meanwhile.
    pub fn is_behind(&self) -> bool {
        self.is_behind.get()
    }

    pub(crate) fn set_behind(&self, is_behind: bool) {
        self.is_behind.set(is_behind);
    }

    pub(crate) fn set_lend(&self, lend: bool) {
        self.lend.set(lend);
    }

    /// True if large frames may be lent to the kernel instead of copied.
    #[inline]
    pub(crate) fn lends(&self) -> bool {
        self.lend.get()
    }

    /// Adds `bytes` to what connections hold.
    #[inline]
    pub(crate) fn hold(&self, bytes: usize) {
        self.held_bytes.set(self.held_bytes.get() + bytes);
    }

    /// Takes `bytes` from what connections hold.
    #[inline]
    pub(crate) fn release(&self, bytes: usize) {
        self.held_bytes.set(self.held_bytes.get() - bytes);
    }

    pub(crate) fn held_bytes_max(&self) -> usize {
        self.held_bytes_max.get()
    }

    pub(crate) fn set_held_bytes_max(&self, bytes: usize) {
        self.held_bytes_max.set(bytes);
    }

    #[inline]
    pub(crate) fn held_bytes(&self) -> usize {
        self.held_bytes.get()
    }

    /// Bytes that the driver still has of connections that ended, and gives back soon.
    #[inline]
    pub(crate) fn returning_bytes(&self) -> usize {
        self.returning_bytes.get()
    }

    /// Adds `bytes` to those that the driver still has.
    pub(crate) fn add_returning(&self, bytes: usize) {
        self.returning_bytes.set(self.returning_bytes.get() + bytes);
    }

    /// Notes that the driver gave `bytes` of them back.
    pub(crate) fn remove_returning(&self, bytes: usize) {
        self.returning_bytes.set(self.returning_bytes.get() - bytes);
    }

    /// Memory of all connections: what they hold, and what the driver still has of those that
    /// ended.
    #[inline]
    pub(crate) fn memory_bytes(&self) -> usize {
        self.memory().bytes()
    }

    /// Both sums of that memory, apart.
    #[inline]
    pub(crate) fn memory(&self) -> Memory {
        Memory { held: self.held_bytes.get(), returning: self.returning_bytes.get() }
    }

    /// Notes that a service holds `bytes` for a connection for which it held `before`.
    pub(crate) fn set_service_bytes(&self, before: usize, bytes: usize) {
        self.release(before);
        self.hold(bytes);
        if bytes > before {
            self.service_grew.set(true);
            self.has_asked.set(true);
        }
    }

    pub(crate) fn take_service_grew(&self) -> bool {
        self.service_grew.take()
    }

    #[inline]
    pub(crate) fn has_dirty(&self) -> bool {
        !self.queues.borrow().dirty.is_empty()
    }

    #[inline]
    pub(crate) fn swap_dirty(&self, with: &mut Vec<ConnId>) {
        core::mem::swap(&mut self.queues.borrow_mut().dirty, with);
    }

    /// An empty batch for a connection, which becomes dirty if it is not `listed`. `None` if the
    /// system has no memory for one.
    #[inline(always)]
    pub(crate) fn begin_batch(&self, id: ConnId, listed: bool) -> Option<(Box<Batch>, Wakes)> {
        let mut queues = self.queues.borrow_mut();
        let Some(batch) = queues.spare.pop() else {
            drop(queues);
            let batch = self.large_or_new_batch();
            return batch.map(|batch| (batch, if listed { Wakes::No } else { self.list_dirty(id) }));
        };
        Some((batch, if listed { Wakes::No } else { queues.list_dirty(id) }))
    }

    pub(crate) fn list_dirty(&self, id: ConnId) -> Wakes {
        self.queues.borrow_mut().list_dirty(id)
    }

    #[inline(never)]
    pub(crate) fn recycle(&self, batch: Box<Batch>) {
        self.recycle_here(batch);
    }

    /// An empty batch for a connection, on the path that each reply takes.
    #[inline(always)]
    pub(crate) fn recycle_here(&self, mut batch: Box<Batch>) {
        // Leases are dropped before the queues are borrowed.
        if batch.clear() {
            return self.recycle_large(batch);
        }
        let mut queues = self.queues.borrow_mut();
        if queues.spare.len() < self.spare_batches_max {
            queues.spare.push(batch);
        }
    }

    /// A block that grew would grow again at the price of a copy and of a page fault for each 4
    /// KiB, so it is kept.
    #[cold]
    fn recycle_large(&self, batch: Box<Batch>) {
        let mut queues = self.queues.borrow_mut();
        let bytes = queues.large_bytes + batch.room();
        if bytes <= self.spare_batches_max * KEPT_BYTES_MAX {
            queues.large_bytes = bytes;
            queues.large.push(batch);
        }
    }

    #[cold]
    fn large_or_new_batch(&self) -> Option<Box<Batch>> {
        let mut queues = self.queues.borrow_mut();
        let Some(batch) = queues.large.pop() else { return try_box(Batch::releasing(self.release.get())) };
        queues.large_bytes -= batch.room();
        Some(batch)
    }

    /// Sets the function that drops owned bytes once they left: their owner is user code, which may
    /// panic. To be called before the first reply.
    pub fn release_owned_by(&self, release: fn(Bytes)) {
        self.release.set(release);
    }

    /// Bytes of room in kept batches.
    #[cfg(test)]
    pub(crate) fn kept_bytes(&self) -> usize {
        let queues = self.queues.borrow();
        queues.spare.iter().chain(&queues.large).map(|batch| batch.room()).sum()
    }

    /// Frees the kept batches.
    pub(crate) fn drop_spare(&self) {
        let mut queues = self.queues.borrow_mut();
        (queues.spare, queues.large, queues.large_bytes) = (Vec::new(), Vec::new(), 0);
    }
}

impl fmt::Debug for LaneShared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LaneShared").field("encoding", &self.encoding).finish_non_exhaustive()
    }
}
