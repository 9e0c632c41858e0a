//! What connections hold together, and who goes when that is more than may be.
//!
//! Connections whose inbox, waiting calls, service or outbox hold 4 KiB or more are listed by how much that is
//! ([`Holders`](crate::holders::Holders)). A reply that leaves at once is never held: its connection is listed only if its
//! send is still in flight after [`SEND_SETTLES`]. So at the limit those go that keep memory, and not the one
//! that happens to need some.

use super::Shard;

use crate::conn::Conn;
use crate::framing::Framing;
use crate::holders::class_of;
use crate::stamp::Stamp;
use crate::{CloseReason, ConnId, Observer};

/// How long a send is in flight until what is queued counts as held: two to three steps, 34 to 50 ms. A send that fits
/// the kernel's buffer is over within its turn, and is reported within a few of them.
const SEND_SETTLES: u32 = 3;

/// Which sends are looked at.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Sends {
    /// Those in flight since some time.
    Settled,
    /// All.
    All,
}

impl<S, F: Framing, O: Observer> Shard<S, F, O> {
    /// Bytes that all connections hold.
    pub fn held_bytes(&self) -> usize {
        self.inbox_bytes + self.holders.call_bytes() + self.local.outbox_bytes() + self.local.service_bytes()
    }

    /// Bytes that one connection holds; where its send began just now, without what is queued.
    pub fn held_bytes_of(&self, id: ConnId) -> usize {
        self.bytes_of(id, Sends::Settled)
    }

    fn bytes_of(&self, id: ConnId, which: Sends) -> usize {
        let Some(conn) = self.conns.get(id) else { return 0 };
        let inbox = conn.inbox.as_ref().map_or(0, |inbox| inbox.held_bytes());
        let counts = which == Sends::All || self.is_settled(conn);
        let outbox = conn.link().filter(|_| counts).map_or(0, |link| link.outbox_bytes());
        let service = conn.link().map_or(0, |link| link.service_bytes());
        inbox + outbox + service + self.holders.call_bytes_of(self.conns.index(id))
    }

    /// True if a send is in flight, and not since just now.
    fn is_settled(&self, conn: &Conn<S>) -> bool {
        conn.sending && conn.send_at.left(SEND_SETTLES, Stamp::at(self.now)) <= 0
    }

    /// True if so much is held that no connection is to begin what it need not.
    pub(super) fn is_tight(&self) -> bool {
        self.held_bytes() > self.limits.held_bytes_max / 4 * 3
    }

    /// Lists a connection by what it holds, if that may be much.
    fn list_holder(&mut self, id: ConnId, which: Sends) {
        let bytes = self.bytes_of(id, which);
        if !self.holders.list(self.conns.index(id), bytes) {
            self.abort(id, CloseReason::MemoryLimit);
        }
    }

    /// What services hold for some of these connections grew.
    #[cold]
    pub(super) fn list_holders(&mut self, ids: &[ConnId]) {
        for id in ids {
            if self.conns.get(*id).is_some_and(|conn| conn.block.is_some()) {
                self.list_holder(*id, Sends::Settled);
            }
        }
    }

    /// The inbox or the calls of a connection grew.
    pub(super) fn check_held(&mut self, id: ConnId) {
        self.list_holder(id, Sends::Settled);
        if self.held_bytes() > self.limits.held_bytes_max {
            self.relieve(&[id]);
        }
    }

    /// Much is queued for a connection whose send is in flight.
    #[inline(never)]
    pub(super) fn watch_send(&mut self, id: ConnId) {
        if self.sends_watched.try_reserve(1).is_ok() {
            self.sends_watched.push_back((id, Stamp::at(self.now)));
        } else {
            self.list_holder(id, Sends::All);
        }
        // So that the driver tells of its end.
        self.send_awaited |= self.is_tight();
    }

    /// Lists connections whose sends did not end in time.
    #[inline(never)]
    pub(super) fn settle_sends(&mut self, which: Sends) {
        let now = Stamp::at(self.now);
        while let Some((id, since)) = self.sends_watched.front().copied() {
            if which == Sends::Settled && since.left(SEND_SETTLES, now) > 0 {
                return;
            }
            self.sends_watched.pop_front();
            // A send that began since then is watched by itself.
            let Some(conn) = self.conns.get(id) else { continue };
            if conn.block.is_some() && (which == Sends::All || self.is_settled(conn)) {
                self.list_holder(id, which);
            }
        }
    }

    /// Ends the connections that hold most until the rest is below the limit; `grew` are those that made it pass, the last of
    /// which go where none holds much.
    #[cold]
    pub(super) fn relieve(&mut self, grew: &[ConnId]) {
        let mut which = Sends::Settled;
        self.settle_sends(which);
        let mut others = grew.iter().rev();
        while self.held_bytes() > self.limits.held_bytes_max {
            let heaviest = self.heaviest(which);
            if heaviest.is_none() && which == Sends::Settled {
                which = Sends::All;
                self.settle_sends(which);
                continue;
            }
            let Some(victim) = heaviest.or_else(|| others.next().copied()) else { return };
            let (bytes, held) = (self.bytes_of(victim, which), self.held_bytes());
            self.observer.over_held_bytes_max(self.now, victim, bytes, held);
            self.abort(victim, CloseReason::MemoryLimit);
        }
    }

    /// The connection that has held most for longest. Those that shrank since they were listed move to where they belong.
    fn heaviest(&mut self, which: Sends) -> Option<ConnId> {
        loop {
            let index = self.holders.heaviest()?;
            let Some(id) = self.conns.id_at(index) else {
                debug_assert!(false, "a slot that is free is listed");
                self.holders.forget(index);
                continue;
            };
            let bytes = self.bytes_of(id, which);
            if class_of(bytes) == self.holders.class(index) {
                return Some(id);
            }
            // Its node is there, so this cannot fail.
            self.holders.list(index, bytes);
            if which == Sends::Settled && class_of(self.bytes_of(id, Sends::All)) > class_of(bytes) {
                // What is queued may settle yet.
                self.watch_send(id);
            }
        }
    }
}
