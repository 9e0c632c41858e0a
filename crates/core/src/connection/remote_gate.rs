//! The state of a connection for other threads.

use core::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering};

/// A connection's outbox as other threads see it, made when it is first asked for
/// ([`Outlet::gate`]). The shard keeps it up to date.
///
/// [`Outlet::gate`]: crate::Outlet::gate
#[derive(Debug)]
pub struct RemoteGate {
    gone: AtomicBool,
    /// Ends that were asked for: bits of [`CLOSE`] and [`ABORT`].
    ends_requested: AtomicU8,
    /// Bytes in the outbox.
    outbox_bytes: AtomicUsize,
    /// Bytes that other threads pushed and that have not reached the outbox yet.
    on_the_way: AtomicUsize,
    outbox_bytes_high: usize,
}

/// After what is queued.
const CLOSE: u8 = 1;

/// At once.
const ABORT: u8 = 2;

impl RemoteGate {
    pub(crate) fn new(outbox_bytes: usize, outbox_bytes_high: usize, gone: bool) -> RemoteGate {
        RemoteGate {
            gone: AtomicBool::new(gone),
            ends_requested: AtomicU8::new(0),
            outbox_bytes: AtomicUsize::new(outbox_bytes),
            on_the_way: AtomicUsize::new(0),
            outbox_bytes_high,
        }
    }

    /// True once the connection accepts nothing, or its end was asked for, here or on its shard.
    pub fn is_gone(&self) -> bool {
        self.has_ended() || self.ends_requested.load(Ordering::Acquire) != 0
    }

    fn has_ended(&self) -> bool {
        self.gone.load(Ordering::Acquire)
    }

    /// True for the first caller that asks to close this connection, unless it is gone: the others
    /// need not.
    pub fn ask_close(&self) -> bool {
        self.ask(CLOSE)
    }

    /// The same for a reset.
    pub fn ask_abort(&self) -> bool {
        self.ask(ABORT)
    }

    fn ask(&self, end: u8) -> bool {
        !self.has_ended() && self.ends_requested.fetch_or(end, Ordering::AcqRel) & end == 0
    }

    /// True if the outbox together with the bytes on the way is over its high mark: then
    /// [`announce`](RemoteGate::announce) refuses.
    pub fn is_full(&self) -> bool {
        self.on_the_way.load(Ordering::Acquire) + self.outbox_bytes.load(Ordering::Acquire)
            > self.outbox_bytes_high
    }

    /// Announces `bytes` bytes for the outbox. False if it is over its high mark together with the
    /// bytes on the way: then they must not be sent.
    pub fn announce(&self, bytes: usize) -> bool {
        let before = self.on_the_way.fetch_add(bytes, Ordering::AcqRel);
        if before + self.outbox_bytes.load(Ordering::Acquire) > self.outbox_bytes_high {
            self.on_the_way.fetch_sub(bytes, Ordering::AcqRel);
            return false;
        }
        true
    }

    /// Bytes that were announced have reached the outbox, or never will.
    pub fn arrived(&self, bytes: usize) {
        self.on_the_way.fetch_sub(bytes, Ordering::AcqRel);
    }

    pub(crate) fn set_outbox_bytes(&self, bytes: usize) {
        self.outbox_bytes.store(bytes, Ordering::Release);
    }

    pub(crate) fn set_gone(&self) {
        self.gone.store(true, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn end_is_asked_for_once_and_never_of_a_gone_connection() {
        let gate = RemoteGate::new(0, 100, false);
        assert!(!gate.is_gone());
        assert!(gate.ask_close() && gate.is_gone() && gate.ask_abort());
        assert!(!gate.ask_close() && !gate.ask_abort());
        assert!(!RemoteGate::new(0, 100, true).ask_close());
    }

    #[test]
    fn what_is_on_the_way_counts_like_what_is_there() {
        let gate = RemoteGate::new(0, 100, false);
        assert!(gate.announce(60) && gate.announce(60));
        assert!(!gate.announce(1), "120 bytes are on the way");
        gate.set_outbox_bytes(60);
        gate.arrived(60);
        assert!(!gate.announce(1), "60 are there, 60 on the way");
        gate.arrived(60);
        assert!(gate.announce(1));
    }
}
