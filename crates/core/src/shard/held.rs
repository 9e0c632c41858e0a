//! Memory that connections hold together, and the choice of those that go when it exceeds its bound.
//!
//! Connections whose inbox, pending calls, service or outbox hold 4 KiB or more are listed by that number
//! ([`Holders`](crate::holders::Holders)). Bytes that come and go at once are not held: a reply counts once its send has been
//! in flight for [`SETTLES`], and half a frame after the same time. So at the limit connections go that keep memory, and not
//! one that happens to need some. Where those that keep some have little of it all, what came just now is the cause, and
//! everything counts.

use super::{QUEUE_KEPT, Shard, kept_bytes_max};

use crate::conn::Queued;
use crate::holders::class_of;
use crate::inbox::Inbox;
use crate::stamp::Stamp;
use crate::{CloseReason, ConnId, Observer};

/// Steps after which queued bytes or half a frame count as held: 34 to 50 ms. A send that fits the kernel's buffer is over
/// within its turn, and is reported within a few of them; the rest of a frame follows as fast as its peer sends.
const SETTLES: u32 = 3;

/// Everything counts.
const AT_ONCE: u32 = 0;

/// Of all that is held, the part that those who keep it have to have, so that they go first.
const KEPT_PART: usize = 4;

impl<O: Observer> Shard<O> {
    /// Bytes that all connections hold.
    pub fn held_bytes(&self) -> usize {
        self.shared.held_bytes()
    }

    /// Bounds what connections hold, and the receive memory, from now on. Connections that hold most go if they hold too much.
    pub fn bound_memory(&mut self, held_bytes_max: usize, receive_bytes_max: usize) {
        (self.limits.held_bytes_max, self.limits.receive_bytes_max) = (held_bytes_max, receive_bytes_max);
        self.shared.set_held_bytes_max(held_bytes_max);
        self.pool.bound(self.limits.receive_buffers_max());
        self.blocks.bound(kept_bytes_max(&self.limits));
        if self.held_bytes() > held_bytes_max {
            self.relieve(&[]);
        }
    }

    /// Bytes that one connection holds, without half a frame and queued bytes that have been there for fewer than `steps` steps
    /// of 17 ms.
    pub fn held_bytes_of(&self, id: ConnId, steps: u32) -> usize {
        let Some(conn) = self.conns.get(id) else { return 0 };
        let is_old = |since: Stamp| since.left(steps, self.stamp) <= 0;
        let outbox =
            conn.outlet().filter(|_| steps == AT_ONCE || (conn.send.is_on() && is_old(conn.send_at)));
        let sealed = |_: &&_| if conn.has_channel() { self.channels.out_bytes(id) } else { 0 };
        let bytes = outbox.map_or(0, |outlet| outlet.outbox_bytes() + sealed(&outlet))
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

    /// Few connections have an inbox: a function apart, so that the others do not pay for its sum.
    #[inline(never)]
    fn inbox_bytes_of(&self, inbox: &Inbox, steps: u32) -> usize {
        let counts = !inbox.is_mid_frame() || inbox.partial_began.left(steps, self.stamp) <= 0;
        if counts { inbox.held_bytes() } else { 0 }
    }

    /// True if bytes of that time must have been listed: they counted after a time, and were seen once more after the same time
    /// at the latest.
    pub(super) fn is_old(&self, since: Stamp) -> bool {
        since.left(2 * SETTLES + 2, self.stamp) <= 0
    }

    /// True if memory is tight: no connection begins optional work.
    pub(super) fn is_tight(&self) -> bool {
        self.held_bytes() > self.limits.held_bytes_max / 4 * 3
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
    pub(super) fn watch_services(&mut self, ids: &[ConnId]) {
        for id in ids {
            if self.shared(*id).is_some() {
                self.watch(*id);
            }
        }
    }

    /// Watches a connection whose inbox or calls grew.
    pub(super) fn check_held(&mut self, id: ConnId) {
        self.watch(id);
        if self.held_bytes() > self.limits.held_bytes_max {
            self.relieve(&[id]);
        }
    }

    /// Watches a connection that holds more, or may: lists it now, and again once its bytes have settled.
    #[inline(never)]
    pub(super) fn watch(&mut self, id: ConnId) {
        let (bytes, settled) = (self.held_bytes_of(id, AT_ONCE), self.held_bytes_of(id, SETTLES));
        if class_of(bytes) > class_of(settled) {
            if self.watched.try_reserve(1).is_err() {
                return self.list_holder(id, AT_ONCE);
            }
            if let Some(conn) = self.conns.get_mut(id).filter(|conn| !conn.queued.is_in(Queued::WATCHED)) {
                conn.queued.enter(Queued::WATCHED);
                self.watched.push_back((id, self.stamp));
            }
            // The driver has to report the end of its send.
            self.send_awaited |= self.is_tight();
        }
        self.list_holder(id, SETTLES);
    }

    /// Lists connections whose memory was not given back in time, or which have any.
    #[inline(never)]
    fn list_settled(&mut self, steps: u32) {
        let now = self.stamp;
        while let Some((id, since)) = self.watched.front().copied() {
            if since.left(steps, now) > 0 {
                return;
            }
            self.watched.pop_front();
            let Some(conn) = self.conns.get_mut(id) else { continue };
            conn.queued.leave(Queued::WATCHED);
            match conn.shared {
                Some(_) if steps == AT_ONCE => self.list_holder(id, AT_ONCE),
                // The bytes may be younger than this look at them.
                Some(_) => self.watch(id),
                None => {}
            }
        }
        self.watched.shrink_to(QUEUE_KEPT);
    }

    /// Counts bytes as held, at the end of a turn, that were there before it and stay.
    #[inline]
    pub(super) fn settle_held(&mut self) {
        if !self.watched.is_empty() {
            self.list_settled(SETTLES);
        }
    }

    /// Ends the connections that hold most until the rest is below the limit. `grew` are those that made it pass; the last of
    /// them go if none holds much.
    #[cold]
    pub(super) fn relieve(&mut self, grew: &[ConnId]) {
        let mut steps = SETTLES;
        self.list_settled(steps);
        let mut others = grew.iter().rev();
        while self.held_bytes() > self.limits.held_bytes_max {
            let heaviest = self.heaviest(steps);
            let keep_little = self.holders.bytes_max() <= self.held_bytes() / KEPT_PART;
            if keep_little && steps != AT_ONCE {
                steps = AT_ONCE;
                self.list_settled(steps);
                continue;
            }
            // A closing connection holds nothing.
            let mut others = others.by_ref().copied().filter(|id| self.shared(*id).is_some());
            let Some(victim) = heaviest.or_else(|| others.next()) else { return };
            let (bytes, held) = (self.held_bytes_of(victim, steps), self.held_bytes());
            if let Some(lane) = self.lane_of(victim) {
                self.observer.over_held_bytes_max(self.now, lane, victim, bytes, held);
            }
            self.abort(victim, CloseReason::MemoryLimit);
        }
    }

    /// The connection that has held most for longest. Those that shrank since they were listed move to where they belong.
    fn heaviest(&mut self, steps: u32) -> Option<ConnId> {
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
            // Its node is there, so this cannot fail.
            self.holders.list(index, bytes);
            if class_of(self.held_bytes_of(id, AT_ONCE)) > class_of(bytes) {
                // What came just now may settle yet.
                self.watch(id);
                if self.holders.class(index) > class_of(bytes) {
                    // The system has no memory to watch it: it counts now.
                    return Some(id);
                }
            }
        }
    }
}
