//! The memory that hyper holds for a connection, and the tasks that wait until it holds less.
//!
//! A connection counts the bytes of its responses that hyper has and has not passed on, and of what
//! the peer sent as much as hyper may hold; together they are the connection's in the shard's
//! account. A body is asked for its next piece once there is room:
//!
//! ```text
//!   Tracked ── waits_for_room: of its connection ── waits_for_memory: of the shard ──▶ the next piece ── hold
//!   Piece   ── let_go: it left, or was dropped ──▶ those that wait go on
//! ```

use std::rc::Rc;
use std::task::Context;

use hyper::body::Bytes;
use ringserve_core::internals::OWNED_BYTES_MIN;

use super::{Watch, Watching};
use crate::http::tunnel::SEED_BYTES;

/// The step in which hyper's memory is counted, in bytes, so that a small request changes the
/// account of the shard once.
const COUNT_STEP: usize = 4096;

/// As much memory is reserved for a piece of a response: as a reader of files brings at once.
const MEMORY_PIECE: usize = 64 << 10;

impl Watch {
    /// Bytes that hyper writes, as a share in the piece of a response in which they lie. hyper
    /// shows where they are and keeps what owns them to itself.
    pub(in crate::http) fn shared(&self, written: &[u8]) -> Option<Bytes> {
        self.shared.borrow().iter().find_map(|piece| {
            let from = written.as_ptr().addr().checked_sub(piece.as_ptr().addr())?;
            (from + written.len() <= piece.len()).then(|| piece.slice(from..from + written.len()))
        })
    }

    /// The most that hyper holds of what the peer sent.
    pub(super) fn received_max(&self) -> u64 {
        self.bounds.received_max[usize::from(self.http2.get())]
    }

    /// As much of what the peer sent as hyper may hold: what it read since the oldest request began
    /// whose body may be there.
    pub(super) fn received_held(&self) -> u64 {
        (self.read.get() - self.held_from.get()).min(self.received_max())
    }

    pub(super) fn find_oldest(&self, requests: &[Rc<Watching>]) {
        let running = requests.iter().filter(|request| request.has_body && Rc::strong_count(request) > 1);
        let oldest = running.map(|request| request.read_from.get()).min();
        self.held_from.set(oldest.unwrap_or(self.read_from.get()));
    }

    /// Counts what hyper holds for the connection, rounded up.
    pub(super) fn count(&self) {
        let held = self.received_held() as usize + self.held.get() + self.seeds.get();
        let held = held + self.upgraded_held.get();
        let held = held.next_multiple_of(COUNT_STEP);
        if held != self.counted.replace(held)
            && let Some(fate) = &self.fate
        {
            fate.set_held(held);
        }
    }
}

/// The memory of one seed, until its request is answered.
pub(in crate::http) struct SeedBytes(Rc<Watch>);

impl SeedBytes {
    pub(in crate::http) fn hold(watch: &Rc<Watch>) -> SeedBytes {
        watch.seeds.set(watch.seeds.get() + SEED_BYTES);
        watch.count();
        SeedBytes(watch.clone())
    }
}

impl Drop for SeedBytes {
    fn drop(&mut self) {
        self.0.seeds.set(self.0.seeds.get() - SEED_BYTES);
        self.0.count();
    }
}

impl Watching {
    /// Counts a change of the bytes that are held of what came on this stream.
    #[cfg(feature = "websocket")]
    pub(in crate::http) fn hold_received(&self, before: usize, bytes: usize) {
        if let Some(connection) = self.connection.upgrade() {
            connection.upgraded_held.set(connection.upgraded_held.get() - before + bytes);
            connection.count();
        }
    }

    /// True if the body has to wait, since hyper holds too much for its connection and some of that
    /// is its own. Its task is woken when none of it is, or when much less is held.
    pub(in crate::http) fn waits_for_room(&self) -> bool {
        if !self.http2 || self.held.get() == 0 {
            return false;
        }
        let Some(connection) = self.connection.upgrade() else { return false };
        let waits = connection.held.get() >= connection.bounds.held_bytes_max;
        if waits {
            self.held_back.set(true);
            connection.holds_back.set(true);
        }
        waits
    }

    /// True if a body of `left` bytes or more has to wait, since the shard's memory is used up: an
    /// answer that is short, of a connection that holds little, does not. Its task is woken when
    /// there is some.
    #[inline]
    pub(in crate::http) fn waits_for_memory(&self, left: u64, task: &mut Context<'_>) -> bool {
        let Some(connection) = self.connection.upgrade() else { return false };
        let Some(fate) = &connection.fate else { return false };
        // What was granted meanwhile goes back, and what waits leaves the line.
        let memory = self.memory.take();
        if fate.has_room(MEMORY_PIECE) {
            return false;
        }
        let is_short = left <= OWNED_BYTES_MIN as u64;
        if is_short && connection.held.get() + fate.outbox_bytes() < COUNT_STEP {
            return false;
        }
        let mut memory = memory.unwrap_or_else(|| {
            self.memory_ticks.set(0);
            fate.reservation()
        });
        // What it makes of it counts at once, and so the reservation need not.
        let waits = memory.poll(MEMORY_PIECE, task.waker()).is_pending();
        if waits {
            self.memory.set(Some(memory));
        }
        waits
    }

    /// True while its body waits for memory.
    pub(super) fn waits_for_memory_now(&self) -> bool {
        let memory = self.memory.take();
        let waits = memory.is_some();
        self.memory.set(memory);
        waits
    }

    /// hyper holds more of the body.
    pub(in crate::http) fn hold(&self, bytes: usize) {
        self.held.set(self.held.get() + bytes);
        if let Some(connection) = self.connection.upgrade() {
            connection.held.set(connection.held.get() + bytes);
            connection.count();
        }
    }

    /// hyper holds a large piece of the response, whose bytes can be shared until it is done with
    /// it.
    pub(in crate::http) fn share(&self, piece: &Bytes) {
        if let Some(connection) = self.connection.upgrade() {
            connection.shared.borrow_mut().push(piece.clone());
        }
    }

    /// hyper is done with the piece that began at this address.
    pub(in crate::http) fn unshare(&self, address: usize) {
        let Some(connection) = self.connection.upgrade() else { return };
        let mut shared = connection.shared.borrow_mut();
        let piece = shared.iter().position(|piece| piece.as_ptr().addr() == address);
        let piece = piece.map(|piece| shared.swap_remove(piece));
        // The owner of its bytes is user code: nothing is borrowed when it is dropped.
        drop(shared);
        drop(piece);
    }

    /// Less of it: `bytes` left, for the peer if they were `sent`.
    pub(in crate::http) fn let_go(&self, bytes: usize, sent: bool) {
        self.held.set(self.held.get() - bytes);
        if sent {
            self.sent.set(self.sent.get() + bytes as u64);
        }
        if self.held.get() == 0 {
            self.go_on();
        }
        let Some(connection) = self.connection.upgrade() else { return };
        let held = connection.held.get() - bytes;
        connection.held.set(held);
        connection.count();
        // Half of it: else each byte that leaves would wake all.
        if held <= connection.bounds.held_bytes_max / 2 && connection.holds_back.take() {
            connection.requests.borrow().iter().for_each(|request| request.go_on());
        }
    }

    fn go_on(&self) {
        if self.held_back.take()
            && let Some(waker) = self.waker.take()
        {
            _ = ringserve_base::guard::wake(waker);
        }
    }
}
