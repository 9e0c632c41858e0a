//! A connection as a stream of bytes.

use std::fmt;
use std::future::poll_fn;
use std::io;
use std::rc::Rc;
use std::task::{Context, Poll};

#[cfg(any(feature = "http", feature = "tokio"))]
use bytes::{BufMut, Bytes};
use ringserve_base::peer::Peer;
use ringserve_buf::ReplyWriter;
use ringserve_core::framing::WriteResult;
#[cfg(any(feature = "http", feature = "tokio"))]
use ringserve_core::internals::OWNED_BYTES_MIN;
use ringserve_core::proxy::Tlvs;
use ringserve_core::{ConnId, ConnShared, Frame, Payload, facts_as};

use crate::overload::Load;
use crate::shard::face::conn_handle::StreamHandle;
use crate::shard::face::handle::Shard;
use crate::shard::tasks::draining::Draining;
use crate::shard::tasks::session::StreamSession;

/// A connection as a stream of bytes, for a handler of [`stream`](crate::stream()).
///
/// With the cargo feature `tokio` it is an `AsyncRead` and an `AsyncWrite` of tokio's, so crates
/// that speak a protocol over those run on a shard: hyper, tungstenite, tonic. It needs no tokio
/// runtime and is not `Send`.
///
/// An idle stream costs about 340 bytes more than an idle connection of a service, plus its future,
/// which consists almost entirely of buffers.
///
/// # Reading
///
/// [`read_frame`](Stream::read_frame) returns received bytes without a copy; `AsyncRead` copies.
/// Both end at the peer's FIN, after which writing goes on. A reader that stops reading holds at
/// most one received frame; further bytes are received up to
/// [`Limits::inbox_bytes_high`](crate::Limits::inbox_bytes_high), and then TCP holds the peer back.
///
/// # Writing
///
/// Bytes are queued, and all bytes of a turn leave in one send. Nothing has to be flushed:
/// `poll_flush` is ready at once and does not wait for the peer. `AsyncWrite`,
/// [`write_all`](Stream::write_all) and [`ready`](Stream::ready) wait while the outbox is over
/// [`Limits::outbox_bytes_high`](crate::Limits::outbox_bytes_high), until it is below
/// [`outbox_bytes_low`](crate::Limits::outbox_bytes_low). Unlike with a
/// [`Service`](crate::Service), reading goes on meanwhile: the two directions are independent. Only
/// the owner writes to a stream: a [`StreamHandle`] cannot push.
///
/// # The end
///
/// Dropping the stream closes the connection after its queued bytes.
/// [`end_writing`](Stream::end_writing) and `poll_shutdown` send FIN and leave reading open. When
/// the connection ends otherwise (a reset, a limit, the end of
/// [`ServerLimits::drain_timeout`](crate::limits::ServerLimits::drain_timeout)), its future is
/// polled once more to see the error, and dropped if it waits again. A stream that was moved
/// elsewhere stays: reads and writes return the error.
pub struct Stream {
    pub(super) shared: ConnShared<StreamSession>,
    pub(super) shard: Shard,
}

impl Stream {
    pub(super) fn new(shared: ConnShared<StreamSession>, shard: Shard) -> Stream {
        Stream { shared, shard }
    }

    /// The received bytes that were not read: up to a receive buffer without a copy, or more if the
    /// reader was slow. `None` after the peer's last byte.
    ///
    /// A frame that is kept pins its receive buffer; see [`Frame`].
    ///
    /// # Errors
    /// If the connection ended: `ConnectionReset` by the peer, `TimedOut` by a time limit,
    /// `ConnectionAborted` by other code.
    pub async fn read_frame(&mut self) -> io::Result<Option<Frame>> {
        poll_fn(|task| self.poll_next_frame(task)).await
    }

    /// Polls for received bytes, as [`read_frame`](Stream::read_frame). The task that polled last
    /// is woken.
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

    /// Queues bytes, without waiting and without failing: bytes for a connection that ended go
    /// nowhere, as bytes queued just before its end do. A [`Frame`] of 4 KiB or more and owned
    /// bytes of 32 KiB or more are kept until they are sent, without a copy.
    ///
    /// Above [`Limits::outbox_bytes_max`](crate::Limits::outbox_bytes_max) the connection is
    /// closed, so code that writes without end awaits [`ready`](Stream::ready) in between.
    pub fn queue<'p>(&self, bytes: impl Into<Payload<'p>>) {
        self.shared.reply(bytes.into());
    }

    /// Queues bytes that `write` writes in place, as [`Cx::write_with`](crate::Cx::write_with)
    /// does.
    pub fn queue_with<R: WriteResult>(&self, write: impl FnOnce(&mut ReplyWriter<'_>) -> R) -> R {
        self.shared.write_with(write)
    }

    /// Queues all of `bytes`, piece by piece as room appears.
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

    /// Waits until the outbox is below its high mark; returns at once if it is.
    ///
    /// # Errors
    /// `BrokenPipe` if the connection ended, or [`end_writing`](Stream::end_writing) was called.
    pub async fn ready(&self) -> io::Result<()> {
        poll_fn(|task| self.poll_room(task).map_ok(|_| ())).await
    }

    /// The room in the outbox, at least 1 byte.
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

    /// Queues as much of several pieces as there is room for. Pieces whose owner `share` finds are
    /// not copied, and may end beyond the high mark if they begin below it, each with up to
    /// `owned_room` bytes: their memory is held anyway.
    #[cfg(any(feature = "http", feature = "tokio"))]
    pub(crate) fn poll_put_all(
        &self,
        task: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
        owned_room: impl Fn() -> usize,
        share: impl Fn(&[u8]) -> Option<Bytes>,
    ) -> Poll<io::Result<usize>> {
        self.poll_room(task).map_ok(|room| {
            let all: usize = pieces.iter().map(|piece| piece.len()).sum();
            if all <= room && all < OWNED_BYTES_MIN {
                // None of them is long enough to be shared.
                self.queue_with(|out| pieces.iter().for_each(|piece| out.put_slice(piece)));
                return all;
            }
            let mut taken = 0;
            for piece in pieces {
                let left = room - taken;
                let len = match share(piece) {
                    Some(mut bytes) => {
                        bytes.truncate(owned_room().max(left));
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

    /// Sends FIN after the queued bytes. Reading goes on.
    pub fn end_writing(&self) {
        self.shared.end_writing();
    }

    /// Resets the connection and drops its queued bytes.
    pub fn abort(&self) {
        self.shared.abort();
    }

    /// Closes the connection after its queued bytes because an upstream that it needs refused,
    /// stalled or broke; counted as
    /// [`CloseReason::UpstreamFailed`](crate::CloseReason::UpstreamFailed). Call
    /// [`abort`](Stream::abort) next to reset it for the same reason, so that the client does not
    /// take a part for the whole.
    pub fn upstream_failed(&self) {
        self.shared.upstream_failed();
    }

    /// The other end of the connection, with the address of the server that it connected to.
    pub fn peer(&self) -> Peer {
        Peer::of(&self.shared)
    }

    /// Fields that the proxy sent about the peer in addition to its address, as
    /// [`Cx::tlvs`](crate::Cx::tlvs).
    pub fn tlvs(&self) -> Option<Tlvs> {
        self.shared.tlvs()
    }

    /// Facts from the handshake of the connection's [transport](crate::transport), if they are a
    /// `T`.
    #[doc(alias = "facts")]
    pub fn transport_info<T: 'static>(&self) -> Option<Rc<T>> {
        facts_as(self.shared.transport_info()?)
    }

    /// The id of the connection, unique on its shard.
    pub fn id(&self) -> ConnId {
        self.shared.id()
    }

    /// The shard of this connection, to spawn and to sleep.
    pub fn shard(&self) -> &Shard {
        &self.shard
    }

    /// The demand on the shard in relation to its capacity, as [`Cx::load`](crate::Cx::load).
    pub fn load(&self) -> Load {
        self.shard.load()
    }

    /// True for the share of the requests that is to be shed now. A handler asks once for each
    /// request that it has read, and answers one for which this is true with its protocol's word
    /// for that, at little cost; each is counted in
    /// [`ConnStats::frames_shed`](crate::stats::ConnStats::frames_shed). Always false below
    /// [`Load::Shedding`](crate::overload::Load::Shedding). Requests that are served in any case
    /// need not ask.
    ///
    /// ```no_run
    /// use ringserve::{Server, Stream, stream};
    ///
    /// # fn main() -> Result<(), ringserve::Error> {
    /// Server::bind("127.0.0.1:7000").serve(|_shard| {
    ///     stream(async |mut stream: Stream| {
    ///         while let Some(request) = stream.read_frame().await? {
    ///             if stream.sheds() {
    ///                 stream.queue("-BUSY\r\n");
    ///             } else {
    ///                 stream.queue(request);
    ///             }
    ///             stream.ready().await?;
    ///         }
    ///         std::io::Result::Ok(())
    ///     })
    /// })
    /// # }
    /// ```
    pub fn sheds(&self) -> bool {
        let sheds = self.shard.sheds().is_some();
        if sheds {
            self.shared.count_shed();
            self.shard.note_shed();
        }
        sheds
    }

    /// True once the server shuts down.
    pub fn is_draining(&self) -> bool {
        self.shard.is_draining()
    }

    /// Waits until the server shuts down, and what had arrived at this service before was received:
    /// after [`ServerLimits::drain_delay`](crate::limits::ServerLimits::drain_delay), and after
    /// the services that this one [drains after](crate::listen::Endpoints::drains_after). The drain
    /// waits for this connection until the stream is dropped, up to
    /// [`ServerLimits::drain_timeout`](crate::limits::ServerLimits::drain_timeout): a stream that
    /// may be idle for long watches this, reads what is there, and ends.
    /// [`Shard::draining`](crate::Shard::draining) ends at the order already.
    pub fn draining(&self) -> Draining {
        self.shard.stopping()
    }

    /// Bytes that the kernel has not taken yet.
    pub fn outbox_bytes(&self) -> usize {
        self.shared.outbox_bytes()
    }

    /// Of the [outbox](Stream::outbox_bytes) what did not leave yet: the kernel was not given it.
    /// If all that was queued is still there, the peer knows nothing of it, and after
    /// [`abort`](Stream::abort) never will. 0 once the connection has ended.
    pub fn unsent_bytes(&self) -> usize {
        if self.shared.is_gone() { 0 } else { self.shared.pending_bytes() }
    }

    /// A handle that ends this connection from any thread. The first one of a connection allocates.
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
