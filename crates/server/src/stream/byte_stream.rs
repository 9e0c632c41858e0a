//! A connection as a stream of bytes, as its owner holds it.

use std::fmt;
use std::future::poll_fn;
use std::io;
use std::rc::Rc;
use std::task::{Context, Poll};

#[cfg(any(feature = "http", feature = "tokio"))]
use bytes::Bytes;
use ringserve_buf::ReplyWriter;
use ringserve_core::framing::Written;
use ringserve_core::proxy::Tlvs;
use ringserve_core::{ConnId, ConnShared, Frame, Payload, facts_as};

use crate::handle::StreamHandle;
use crate::peer::Peer;
use crate::shard::draining::Draining;
use crate::shard::handle::Shard;
use crate::shard::session::Session;

/// A connection as a stream of bytes, for a handler of [`stream`](crate::stream()).
///
/// With the cargo feature `tokio` it is an `AsyncRead` and an `AsyncWrite` of tokio's, so whatever speaks a protocol over
/// those runs on a shard: hyper, tungstenite, tonic. It needs no tokio runtime and is not `Send`.
///
/// An idle stream costs about 340 bytes beside what every connection costs, and what its future holds: mostly its buffers.
///
/// # Reading
///
/// [`read_frame`](Stream::read_frame) gives what arrived, without a copy; `AsyncRead` copies. Both end with the peer's
/// FIN, after which writing goes on. A reader that does not read holds up at most one received frame; what comes behind
/// it is received up to [`Limits::inbox_bytes_high`](crate::Limits::inbox_bytes_high), and then TCP holds the peer back.
///
/// # Writing
///
/// Bytes are queued, and all of a turn leave together in one send; nothing has to be flushed, and `poll_flush` is ready
/// at once: it does not wait for the peer. `AsyncWrite`, [`write_all`](Stream::write_all) and
/// [`ready`](Stream::ready) wait while the outbox is over
/// [`Limits::outbox_bytes_high`](crate::Limits::outbox_bytes_high), until it is below
/// [`outbox_bytes_low`](crate::Limits::outbox_bytes_low). Unlike with a [`Service`](crate::Service), reading goes on
/// meanwhile: the two directions are independent. Nothing but its owner writes to a stream: a [`StreamHandle`] pushes nothing.
///
/// # The end
///
/// Dropping the stream closes the connection once what is queued has left. [`end_writing`](Stream::end_writing), and
/// `poll_shutdown`, send FIN and leave reading open. When the connection ends otherwise (a reset, a limit, the end of
/// [`ServerLimits::drain_timeout`](crate::limits::ServerLimits::drain_timeout)) its future is polled once more, so that it sees the error, and dropped if it
/// waits again. A stream that was moved elsewhere stays: reads and writes give the error.
pub struct Stream {
    pub(super) shared: ConnShared<Session>,
    pub(super) shard: Shard,
}

impl Stream {
    pub(super) fn new(shared: ConnShared<Session>, shard: Shard) -> Stream {
        Stream { shared, shard }
    }

    /// What arrived and was not read: up to a receive buffer as it lies there, or more if the reader was slow. `None`
    /// after the peer's last byte.
    ///
    /// A frame that is kept pins its receive buffer; see [`Frame`].
    ///
    /// # Errors
    /// If the connection ended: `ConnectionReset` if the peer, `TimedOut` if a time limit, `ConnectionAborted` if
    /// other code did it.
    pub async fn read_frame(&mut self) -> io::Result<Option<Frame>> {
        poll_fn(|task| self.poll_next_frame(task)).await
    }

    /// As [`read_frame`](Stream::read_frame). The task that polled last is woken.
    ///
    /// # Errors
    /// Those of [`read_frame`](Stream::read_frame).
    pub fn poll_read_frame(&mut self, task: &mut Context<'_>) -> Poll<io::Result<Option<Frame>>> {
        self.poll_next_frame(task)
    }

    #[inline]
    pub(super) fn poll_next_frame(&self, task: &mut Context<'_>) -> Poll<io::Result<Option<Frame>>> {
        let session = self.shared.body();
        session.poll_readable(task.waker(), self.shard.tasks()).map_ok(|()| {
            let unread = session.take_unread();
            let len = unread.len();
            (len > 0).then(|| Frame::new(unread, 0, len))
        })
    }

    /// Queues bytes, whatever is queued already. It never waits and never fails: what is queued for a connection that
    /// ended goes nowhere, as what was queued just before does. A [`Frame`] of 4 KiB or more is lent, and owned bytes of 32 KiB
    /// or more are kept until they are sent: not copied.
    ///
    /// More than [`Limits::outbox_bytes_max`](crate::Limits::outbox_bytes_max) queued closes the connection, so code that
    /// writes without end awaits [`ready`](Stream::ready) in between.
    pub fn queue<'p>(&self, bytes: impl Into<Payload<'p>>) {
        self.shared.reply(bytes.into());
    }

    /// Queues what `write` writes in place, as [`Cx::write_with`](crate::Cx::write_with) does.
    pub fn queue_with<R: Written>(&self, write: impl FnOnce(&mut ReplyWriter<'_>) -> R) -> R {
        self.shared.write_with(write)
    }

    /// Queues all of `bytes`, piece by piece as there is room.
    ///
    /// # Errors
    /// `BrokenPipe` if the connection ended, or [`end_writing`](Stream::end_writing) was called.
    pub async fn write_all(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let written = poll_fn(|task| self.poll_put(task, bytes)).await?;
            bytes = &bytes[written..];
        }
        Ok(())
    }

    /// Waits until the outbox is below its high mark; at once if it is.
    ///
    /// # Errors
    /// `BrokenPipe` if the connection ended, or [`end_writing`](Stream::end_writing) was called.
    pub async fn ready(&self) -> io::Result<()> {
        poll_fn(|task| self.poll_room(task).map_ok(|_| ())).await
    }

    /// The bytes there is room for, at least 1.
    pub(crate) fn poll_room(&self, task: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let outlet = &*self.shared;
        if outlet.writing_ended() {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        match outlet.outbox_room() {
            0 => {
                outlet.wake_when_ready(task.waker());
                Poll::Pending
            }
            room => Poll::Ready(Ok(room)),
        }
    }

    /// Queues as much as there is room for, at least one byte.
    pub(crate) fn poll_put(&self, task: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_room(task).map_ok(|room| {
            let len = bytes.len().min(room);
            self.shared.write(&bytes[..len]);
            len
        })
    }

    /// The same with several pieces. Those that `share` finds the owner of are not copied, and may end beyond the high mark if they
    /// begin below it, each with up to `owned_room` bytes: their memory is held anyway.
    #[cfg(any(feature = "http", feature = "tokio"))]
    pub(crate) fn poll_put_all(
        &self,
        task: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
        owned_room: usize,
        share: impl Fn(&[u8]) -> Option<Bytes>,
    ) -> Poll<io::Result<usize>> {
        self.poll_room(task).map_ok(|room| {
            let mut taken = 0;
            for piece in pieces {
                let left = room - taken;
                let len = match share(piece) {
                    Some(mut bytes) => {
                        bytes.truncate(owned_room.max(left));
                        let len = bytes.len();
                        self.shared.write_payload(bytes.into());
                        len
                    }
                    None => {
                        let len = piece.len().min(left);
                        self.shared.write(&piece[..len]);
                        len
                    }
                };
                taken += len;
                if len < piece.len() || taken >= room {
                    break;
                }
            }
            taken
        })
    }

    /// Sends FIN after what is queued. Reading goes on.
    pub fn end_writing(&self) {
        self.shared.end_writing();
    }

    /// Resets the connection. What is queued is dropped.
    pub fn abort(&self) {
        self.shared.abort();
    }

    /// Closes the connection after what is queued, since an upstream that it needs refused, stalled or broke: it is counted as
    /// [`CloseReason::UpstreamFailed`](crate::CloseReason::UpstreamFailed). With [`abort`](Stream::abort) after it the
    /// connection is reset instead, for the same reason: so that the client does not take what came so far for all of it.
    pub fn upstream_failed(&self) {
        self.shared.upstream_failed();
    }

    /// Who is on the other end, and which of the server's addresses it connected to.
    pub fn peer(&self) -> Peer {
        Peer::of(&self.shared)
    }

    /// What the proxy said of the peer beside its address, as [`Cx::tlvs`](crate::Cx::tlvs).
    pub fn tlvs(&self) -> Option<Tlvs> {
        self.shared.tlvs()
    }

    /// What the connection's [transport](crate::transport) found out in its handshake, if that is a `T`.
    pub fn facts<T: 'static>(&self) -> Option<Rc<T>> {
        facts_as(self.shared.facts()?)
    }

    /// The connection's name on its shard.
    pub fn id(&self) -> ConnId {
        self.shared.id()
    }

    /// The shard this connection lives on: to spawn, to sleep.
    pub fn shard(&self) -> &Shard {
        &self.shard
    }

    /// True once the server shuts down.
    pub fn is_draining(&self) -> bool {
        self.shard.is_draining()
    }

    /// Waits until the server shuts down. The drain waits for this connection until the stream is dropped, up to
    /// [`ServerLimits::drain_timeout`](crate::limits::ServerLimits::drain_timeout): so one that may have nothing to do for long watches this, and ends.
    pub fn draining(&self) -> Draining {
        self.shard.draining()
    }

    /// Bytes that the kernel has not taken yet.
    pub fn outbox_bytes(&self) -> usize {
        self.shared.outbox_bytes()
    }

    /// A handle to end this connection from anywhere. The first call for a connection allocates.
    pub fn handle(&self) -> StreamHandle {
        StreamHandle::new(&self.shared, &self.shard)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if !self.shared.is_gone() {
            self.shared.close();
        }
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Stream").field(&self.shared).finish()
    }
}
