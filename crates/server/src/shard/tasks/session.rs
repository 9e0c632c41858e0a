//! State that a stream and its service share for a connection.

use std::cell::{Cell, RefCell};
use std::io;
use std::task::{Context, Poll, Waker};

use ringserve_buf::Lease;
use ringserve_core::CloseReason;

use super::spawned::{LocalTasks, TaskId};

/// A lease that is kept beyond the turn pins its buffer. One of at least this many bytes which are
/// at least this part of its buffer may; the rest of others is copied. As for replies, which are
/// lent or copied by the same rule.
const KEPT_BYTES_MIN: usize = 4096;
const KEPT_SHARE_MIN: usize = 4;

/// State that a stream and its service share for a connection.
#[derive(Default)]
pub struct StreamSession {
    /// The last received bytes, unread.
    unread: Cell<Lease>,
    /// The reader, if it is a task of the shard with nothing in between: it is polled without a
    /// waker.
    reader_task: Cell<Option<TaskId>>,
    /// The waker of a reader that is no task of the shard. Kept after it was woken, since the next
    /// one is usually the same.
    reader: RefCell<Option<Waker>>,
    /// True while the reader waits.
    reader_waits: Cell<bool>,
    /// The peer sent its last byte.
    input_ended: Cell<bool>,
    /// It was cut off there: its transport reports an end, and had reported none.
    is_cut_off: Cell<bool>,
    /// The call that waits until everything is read.
    call: Cell<Option<Waker>>,
    /// The connection's future.
    pub(crate) task: Cell<Option<TaskId>>,
    /// Why the connection ended.
    ended: Cell<Option<CloseReason>>,
}

impl StreamSession {
    /// Ready if there are bytes, or none will come.
    pub(crate) fn poll_readable(&self, waker: &Waker, tasks: &LocalTasks) -> Poll<io::Result<()>> {
        if self.has_unread() {
            return Poll::Ready(Ok(()));
        }
        if let Some(reason) = self.ended.get() {
            return Poll::Ready(self.end(reason));
        }
        if self.input_ended.get() {
            return Poll::Ready(self.end_of_input());
        }
        self.reader_waits.set(true);
        self.reader_task.set(tasks.current(waker));
        if self.reader_task.get().is_some() {
            return Poll::Pending;
        }
        let known = self.reader.borrow().as_ref().is_some_and(|reader| reader.will_wake(waker));
        if !known {
            // Cloning and dropping a waker may run others' code: outside.
            let waker = waker.clone();
            let old = self.reader.borrow_mut().replace(waker);
            drop(old);
        }
        Poll::Pending
    }

    pub(crate) fn end(&self, reason: CloseReason) -> io::Result<()> {
        let kind = match reason {
            CloseReason::PeerReset => io::ErrorKind::ConnectionReset,
            CloseReason::System(errno) => return Err(io::Error::from_raw_os_error(errno)),
            CloseReason::ConnectFailed(errno) => return Err(io::Error::from_raw_os_error(errno)),
            CloseReason::FirstFrameTimeout
            | CloseReason::ConnectTimeout
            | CloseReason::IdleTimeout
            | CloseReason::WriteStallTimeout
            | CloseReason::WriteTooSlow
            | CloseReason::ReadTooSlow
            | CloseReason::HeartbeatLost
            | CloseReason::HandlerTimeout
            | CloseReason::OpenTimeout
            | CloseReason::HandshakeTimeout
            | CloseReason::DrainTimeout => io::ErrorKind::TimedOut,
            // The end of the input was there to be read before.
            CloseReason::TlsTruncated | CloseReason::PeerClosedMidFrame => io::ErrorKind::UnexpectedEof,
            CloseReason::TlsHandshakeFailed(_)
            | CloseReason::TlsBadRecord
            | CloseReason::TlsAlertReceived(_) => io::ErrorKind::InvalidData,
            _ if self.input_ended.get() => return self.end_of_input(),
            _ => io::ErrorKind::ConnectionAborted,
        };
        Err(io::Error::new(kind, reason.name()))
    }

    fn end_of_input(&self) -> io::Result<()> {
        match self.is_cut_off.get() {
            false => Ok(()),
            true => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the peer was cut off")),
        }
    }

    pub(crate) fn has_unread(&self) -> bool {
        let unread = self.unread.take();
        let has = !unread.is_empty();
        self.unread.set(unread);
        has
    }

    /// All that is there.
    pub(crate) fn take_unread(&self) -> Lease {
        let unread = self.unread.take();
        self.all_read();
        unread
    }

    /// Shows the bytes to `read`, which returns how many it took.
    #[cfg(any(feature = "http", feature = "tokio"))]
    pub(crate) fn read_with(&self, read: impl FnOnce(&[u8]) -> usize) {
        self.take_from(|unread| unread.advance(read(unread)));
    }

    /// Hands the bytes to `take`, which removes bytes from the front.
    pub(crate) fn take_from<T>(&self, take: impl FnOnce(&mut Lease) -> T) -> T {
        let mut unread = self.unread.take();
        let taken = take(&mut unread);
        if unread.is_empty() {
            drop(unread);
            self.all_read();
        } else {
            self.unread.set(unread);
        }
        taken
    }

    fn all_read(&self) {
        if let Some(call) = self.call.take() {
            call.wake();
        }
    }

    /// More bytes arrived; everything before them was read.
    pub(crate) fn put(&self, lease: Lease) {
        debug_assert!(!self.has_unread(), "a frame came before the last one was read");
        self.unread.set(lease);
    }

    /// The reader is not done with the bytes: they must not pin more than they should.
    pub(crate) fn spill(&self) {
        let unread = self.unread.take();
        let pinned = unread.pinned_bytes();
        let small = unread.len() < KEPT_BYTES_MIN || unread.len() * KEPT_SHARE_MIN < pinned;
        let copies = unread.is_pooled() && small;
        let copy = if copies { Lease::try_copy_of(&unread) } else { None };
        self.unread.set(copy.unwrap_or(unread));
    }

    /// Wakes this one when everything was read.
    pub(crate) fn wake_when_read(&self, waker: Waker) {
        self.call.set(Some(waker));
    }

    /// Ready when everything was read.
    pub(crate) fn poll_all_read(&self, task: &mut Context<'_>) -> Poll<()> {
        if !self.has_unread() {
            return Poll::Ready(());
        }
        self.wake_when_read(task.waker().clone());
        Poll::Pending
    }

    /// True if the peer sent its last byte, or the connection is gone.
    #[cfg(feature = "http")]
    pub(crate) fn nothing_comes(&self) -> bool {
        self.input_ended.get() || self.ended.get().is_some()
    }

    pub(crate) fn end_input(&self) {
        self.input_ended.set(true);
    }

    /// The end of the input, which is next, is not the peer's.
    pub(crate) fn cut_off(&self) {
        self.is_cut_off.set(true);
    }

    /// The connection is gone, with its unread bytes.
    pub(crate) fn set_ended(&self, reason: CloseReason) {
        self.ended.set(Some(reason));
        drop(self.unread.take());
        drop(self.call.take());
    }

    /// Runs the reader, if it waits: here and now if it is a task of the shard, as it usually is.
    pub(crate) fn run_reader(&self, tasks: &LocalTasks) {
        if !self.reader_waits.replace(false) {
            return;
        }
        if let Some(task) = self.reader_task.get() {
            return tasks.poll(task);
        }
        let reader = self.reader.borrow().clone();
        if let Some(reader) = reader {
            reader.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_idle_stream_costs_little_beside_its_future() {
        assert!(size_of::<StreamSession>() <= 120, "{}", size_of::<StreamSession>());
    }

    #[test]
    fn an_end_shows_as_the_error_it_is() {
        use io::ErrorKind::{ConnectionAborted, ConnectionReset, TimedOut};
        for (reason, kind) in [
            (CloseReason::PeerReset, ConnectionReset),
            (CloseReason::FirstFrameTimeout, TimedOut),
            (CloseReason::IdleTimeout, TimedOut),
            (CloseReason::WriteStallTimeout, TimedOut),
            (CloseReason::WriteTooSlow, TimedOut),
            (CloseReason::ReadTooSlow, TimedOut),
            (CloseReason::HeartbeatLost, TimedOut),
            (CloseReason::HandlerTimeout, TimedOut),
            (CloseReason::DrainTimeout, TimedOut),
            (CloseReason::ServerAborted, ConnectionAborted),
            (CloseReason::MemoryLimit, ConnectionAborted),
        ] {
            assert_eq!(StreamSession::default().end(reason).unwrap_err().kind(), kind, "{reason}");
        }
    }

    #[test]
    fn a_small_rest_is_copied_and_a_large_one_kept() {
        use ringserve_buf::{Pool, PoolConfig};
        let config = PoolConfig { buffer_bytes: 16 << 10, buffers_max: 64, poison: false };
        let (pool, mut side) = Pool::new(config).unwrap();
        for (bytes, kept) in [(4095, 0), (4096, 1), (16 << 10, 1)] {
            let id = side.lend().unwrap();
            let session = StreamSession::default();
            session.put(side.received(id, bytes).freeze());
            session.spill();
            assert_eq!(pool.counts().leased, kept, "{bytes} bytes");
            assert_eq!(session.take_unread().len(), bytes);
        }
    }
}
