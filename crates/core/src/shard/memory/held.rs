//! Memory that connections hold together, and the choice of those that end when it exceeds its
//! bound.
//!
//! Connections whose inbox, pending calls, service or outbox hold 4 KiB or more are listed by that
//! number ([`Holders`]). Bytes that come and go at once are not held: a reply counts once its send
//! has been in flight for [`SETTLES`], and half a frame after the same time. So at the limit
//! connections end that keep memory, and not one that happens to need some. If those that keep
//! memory have only a small part of it, the cause is what came just now, and everything counts.
//!
//! The choice is made at the end of a turn, when everything that was queued in it was looked at.
//! The driver has what a closed connection had in flight until it gives it back. It counts apart:
//! it holds off new calls, and closes no connection.

use crate::shard::receive::short_from;
use crate::shard::{QUEUE_KEPT, Shard, kept_bytes_max};

use crate::connection::{Inbox, QueueFlags, ShardShared};
use crate::tables::{Holders, ReturnedItem, RoomOf, class_of};
use crate::time::Stamp;
use crate::{Batch, CloseReason, ConnId, Observer};

/// Steps after which queued bytes or half a frame count as held: 34 to 50 ms. A send that fits the
/// kernel's buffer is over within its turn, and is reported within a few of them; the rest of a
/// frame follows as fast as its peer sends.
pub(super) const SETTLES: u32 = 3;

/// The value with which everything counts.
pub(super) const AT_ONCE: u32 = 0;

/// The part of all held memory that those who keep it must have in order to end first.
const KEPT_PART: usize = 4;

/// The most memory that input takes for each of its bytes, not counting blocks that double.
const INPUT_GROWS: usize = 8;

/// The part of the memory limit that may be queued in one turn before it ends: then it is sent, and
/// what peers take at once is given back.
const PART_IN_A_TURN: usize = 8;

/// Memory up to which a turn goes on, however much there was before it.
pub(in crate::shard) fn calm_bytes(held_bytes_max: usize) -> usize {
    held_bytes_max / PART_IN_A_TURN
}

/// Counts memory of a connection's batch beyond the bytes that it has to send.
#[cold]
pub(in crate::shard) fn set_room(
    holders: &mut Holders,
    shared: &ShardShared,
    id: ConnId,
    of: RoomOf,
    bytes: usize,
) {
    let (before, now) = holders.set_room(id.slot(), of, bytes);
    shared.release(before);
    shared.hold(now);
}

/// Counts such memory of a batch that is about to be sent, after which there is none.
#[cold]
#[inline(never)]
pub(in crate::shard) fn count_room(
    holders: &mut Holders,
    shared: &ShardShared,
    id: ConnId,
    batch: &mut Batch,
) {
    set_room(holders, shared, id, RoomOf::Pending, 0);
    set_room(holders, shared, id, RoomOf::Flight, batch.room_beyond());
    batch.room_counts = holders.room_in_flight(id.slot()) > 0;
}

impl<O: Observer> Shard<O> {
    /// Bytes that all connections hold.
    pub fn held_bytes(&self) -> usize {
        self.shared.held_bytes()
    }

    /// Bounds what connections hold, and the receive memory, from now on. Connections that hold
    /// most end if they hold too much.
    pub fn bound_memory(&mut self, held_bytes_max: usize, receive_bytes_max: usize) {
        (self.limits.held_bytes_max, self.limits.receive_bytes_max) = (held_bytes_max, receive_bytes_max);
        self.calm_bytes = calm_bytes(held_bytes_max);
        if !self.copy_always {
            self.short_from = short_from(&self.limits);
        }
        self.shared.set_held_bytes_max(held_bytes_max);
        self.pool.bound(self.limits.receive_buffers_max());
        self.blocks.bound(kept_bytes_max(&self.limits));
        if self.held_bytes() > held_bytes_max {
            self.relieve(&[]);
        }
    }

    /// Bytes that all connections hold, with those that the driver still has of ended ones.
    #[inline]
    pub(in crate::shard) fn memory_bytes(&self) -> usize {
        self.shared.memory_bytes()
    }

    /// Counts what the driver will give back of a connection that ends.
    pub(in crate::shard) fn returns(&mut self, id: ConnId, what: ReturnedItem, bytes: usize) {
        self.shared.add_returning(self.holders.returns(id.slot(), what, bytes));
        // The driver has to report it in its next wait.
        self.send_awaited |= bytes > 0;
    }

    /// Notes that the driver gave it back.
    pub(in crate::shard) fn returned(&mut self, id: ConnId, what: ReturnedItem) {
        self.shared.remove_returning(self.holders.returned(id.slot(), what));
    }

    /// True if user code must wait until the driver has given memory back, or until the turn is
    /// over: what it queues would add to that.
    #[inline]
    pub(in crate::shard) fn holds_off(&self) -> bool {
        self.memory_bytes() > self.calm_bytes && self.is_over_turn()
    }

    /// True if that is so because more was queued than a turn may queue. Received bytes are no
    /// answer: blocks of frames grow with them, by several times as much at once.
    #[cold]
    #[inline(never)]
    fn is_over_turn(&self) -> bool {
        let (before, held_max) = (self.held_before, self.limits.held_bytes_max);
        // If the turn before could bring no relief, nothing would ever go on.
        let most = if before.held <= held_max { held_max } else { usize::MAX };
        let in_turn = before.bytes().saturating_add(self.calm_bytes);
        let with_input = in_turn.saturating_add(self.received.saturating_mul(INPUT_GROWS));
        self.memory_bytes() > with_input.min(most)
    }

    /// Bytes that one connection holds, without half a frame and queued bytes that have been there
    /// for fewer than `steps` steps of 17 ms.
    pub fn held_bytes_of(&self, id: ConnId, steps: u32) -> usize {
        let Some(conn) = self.conns.get(id) else { return 0 };
        let is_old = |since: Stamp| since.left(steps, self.stamp) <= 0;
        let outbox =
            conn.outlet().filter(|_| steps == AT_ONCE || (conn.send.is_on() && is_old(conn.send_at)));
        let sealed = |_: &&_| if conn.has_channel() { self.channels.out_bytes(id) } else { 0 };
        let room = |_: &&_| self.holders.room_of(id.slot());
        let bytes = outbox.map_or(0, |outlet| outlet.outbox_bytes() + sealed(&outlet) + room(&outlet))
            + conn.outlet().map_or(0, |outlet| outlet.service_bytes())
            + self.holders.call_bytes_of(id.slot())
            + match conn.has_channel() {
                true => self.channels.later_bytes(id) + self.channels.kept_bytes(id),
                false => 0,
            };
        match &conn.inbox {
            None => bytes,
            Some(inbox) => bytes + self.inbox_bytes_of(inbox, steps),
        }
    }

    /// Few connections have an inbox: a separate function, so that the others do not pay for its
    /// sum.
    #[inline(never)]
    fn inbox_bytes_of(&self, inbox: &Inbox, steps: u32) -> usize {
        let counts = !inbox.is_mid_frame() || inbox.partial_began.left(steps, self.stamp) <= 0;
        if counts { inbox.held_bytes() } else { 0 }
    }

    /// True if bytes of that time must have been listed: they counted after a time, and were seen
    /// once more after the same time at the latest.
    pub(in crate::shard) fn is_old(&self, since: Stamp) -> bool {
        since.left(2 * SETTLES + 2, self.stamp) <= 0
    }

    /// True if memory is tight: no connection begins optional work.
    pub(in crate::shard) fn is_tight(&self) -> bool {
        self.memory_bytes() > self.limits.held_bytes_max / 4 * 3
    }

    /// Lists a connection by the bytes that it has held for `steps` steps.
    fn list_holder(&mut self, id: ConnId, steps: u32) {
        let bytes = self.held_bytes_of(id, steps);
        if !self.holders.list(id.slot(), bytes) {
            self.abort(id, CloseReason::MemoryLimit);
        }
    }

    /// Watches connections whose services came to hold more.
    #[cold]
    pub(in crate::shard) fn watch_services(&mut self, ids: &[ConnId]) {
        for id in ids {
            if self.shared(*id).is_some() {
                self.watch(*id);
            }
        }
    }

    /// Watches a connection whose inbox or calls grew. Whether that is too much is checked at the
    /// end of the turn.
    pub(in crate::shard) fn check_held(&mut self, id: ConnId) {
        self.watch(id);
        if self.held_bytes() > self.limits.held_bytes_max && self.grew.try_reserve(1).is_ok() {
            self.grew.push(id);
        }
    }

    /// Watches a connection that holds more, or may: lists it now, and again once its bytes have
    /// settled.
    #[inline(never)]
    pub(in crate::shard) fn watch(&mut self, id: ConnId) {
        let (bytes, settled) = (self.held_bytes_of(id, AT_ONCE), self.held_bytes_of(id, SETTLES));
        if class_of(bytes) > class_of(settled) {
            if self.watched.try_reserve(1).is_err() {
                return self.list_holder(id, AT_ONCE);
            }
            if let Some(conn) = self.conns.get_mut(id).filter(|conn| !conn.queued.is_in(QueueFlags::WATCHED))
            {
                conn.queued.enter(QueueFlags::WATCHED);
                self.watched.push_back((id, self.stamp));
            }
            // The driver has to report the end of its send.
            self.send_awaited |= self.is_tight();
        }
        self.list_holder(id, SETTLES);
    }

    /// Lists connections whose memory was not given back in time.
    #[inline(never)]
    fn list_settled(&mut self) {
        let now = self.stamp;
        while let Some((id, since)) = self.watched.front().copied() {
            if since.left(SETTLES, now) > 0 {
                return;
            }
            self.watched.pop_front();
            let Some(conn) = self.conns.get_mut(id) else { continue };
            conn.queued.leave(QueueFlags::WATCHED);
            if conn.shared.is_some() {
                // The bytes may be younger than this look at them.
                self.watch(id);
            }
        }
        self.watched.shrink_to(QUEUE_KEPT);
    }

    /// Lists watched connections by what they have held for `steps` steps. They stay watched.
    fn list_watched(&mut self, steps: u32) {
        for at in 0..self.watched.len() {
            if let Some((id, _)) = self.watched.get(at).copied()
                && self.shared(id).is_some()
            {
                self.list_holder(id, steps);
            }
        }
    }

    /// Counts bytes as held, at the end of a turn, that were there before it and stay.
    #[inline]
    pub(in crate::shard) fn settle_held(&mut self) {
        if !self.watched.is_empty() {
            self.list_settled();
        }
    }

    /// Ends the connections that hold most until the rest is below the limit. `dirty` and those
    /// that grew exceeded it; the last of them end if none holds much.
    #[cold]
    pub(in crate::shard) fn relieve(&mut self, dirty: &[ConnId]) {
        let mut steps = SETTLES;
        self.list_settled();
        // Some of what settled since then would be looked at later.
        self.list_watched(SETTLES);
        let grew = core::mem::take(&mut self.grew);
        let mut others = dirty.iter().chain(&grew).rev().copied();
        // Bytes that connections which keep memory are known to hold at least.
        let mut kept = 0;
        while self.held_bytes() > self.limits.held_bytes_max {
            let quarter = self.held_bytes().div_ceil(KEPT_PART);
            if steps == SETTLES && kept < quarter {
                kept = self.settled_bytes(quarter);
                if kept < quarter {
                    steps = AT_ONCE;
                    self.list_watched(AT_ONCE);
                }
            }
            let heaviest = self.heaviest(steps);
            // A closing connection holds nothing.
            let mut others = others.by_ref().filter(|id| self.shared(*id).is_some());
            let Some(victim) = heaviest.or_else(|| others.next()) else { break };
            let (bytes, held) = (self.held_bytes_of(victim, steps), self.held_bytes());
            if let Some(lane) = self.lane_of(victim) {
                self.observer.over_held_bytes_max(self.now, lane, victim, bytes, held);
            }
            self.abort(victim, CloseReason::MemoryLimit);
            kept = kept.saturating_sub(bytes);
        }
        if steps == AT_ONCE {
            self.list_watched(SETTLES);
        }
    }

    /// Bytes that listed connections hold now and that have settled, or slightly more than `wanted`
    /// if they are more. Connections that no longer hold as much move to where they belong.
    fn settled_bytes(&mut self, wanted: usize) -> usize {
        let mut sum = 0;
        let mut next = self.holders.heaviest();
        while let Some(index) = next {
            if sum >= wanted {
                break;
            }
            let class = self.holders.class(index);
            next = self.holders.behind(index);
            if let Some(id) = self.conns.id_at(index) {
                let bytes = self.held_bytes_of(id, SETTLES);
                sum += if class_of(bytes) >= class { bytes } else { 0 };
                self.list_again(id, bytes);
            }
            if next.is_none() {
                next = self.holders.heaviest_below(class);
            }
        }
        sum
    }

    /// Moves a listed connection to the list for `bytes`, the bytes that have settled. Bytes that
    /// came just now may settle yet.
    fn list_again(&mut self, id: ConnId, bytes: usize) {
        // Its node is there, so this cannot fail.
        self.holders.list(id.slot(), bytes);
        if class_of(self.held_bytes_of(id, AT_ONCE)) > class_of(bytes) {
            self.watch(id);
        }
    }

    /// The connection that holds most, of equal ones the first that did. Those that shrank since
    /// they were listed move to where they belong.
    pub(super) fn heaviest(&mut self, steps: u32) -> Option<ConnId> {
        loop {
            let index = self.holders.heaviest()?;
            let Some(id) = self.conns.id_at(index) else {
                debug_assert!(false, "a slot that is free is listed");
                self.shared.release(self.holders.forget(index));
                continue;
            };
            let bytes = self.held_bytes_of(id, steps);
            if class_of(bytes) == self.holders.class(index) {
                return Some(id);
            }
            self.list_again(id, bytes);
            if self.holders.class(index) > class_of(bytes) {
                // The system has no memory to watch it: it counts now.
                return Some(id);
            }
        }
    }
}
