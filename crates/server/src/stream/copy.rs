//! Copying bytes both ways between two streams.

use std::fmt;
use std::future::poll_fn;
use std::io;
use std::ops::Range;
use std::task::{Context, Poll, ready};

use ringserve_core::Frame;

use super::byte_stream::Stream;

/// Bytes of one read from a stream that needs a buffer: the default size of a receive buffer.
#[cfg(feature = "tokio")]
const BUFFER_BYTES: usize = 16 << 10;

/// Copies between two streams, in both directions, until both have ended. The end of one direction
/// is passed on as FIN while the other goes on. A slow reader slows its writer down.
///
/// Each is a [`Stream`], or, with the cargo feature `tokio`, an [`AnyStream`] around an `AsyncRead`
/// and `AsyncWrite`, such as a stream of TLS. Between two [`Stream`]s bytes are copied into the
/// outbox, or lent to the send where 4 KiB or more arrived together, without a buffer in between.
/// An `AnyStream` is read into a buffer of 16 KiB. Returns the bytes that went from `first` to
/// `second`, and back.
///
/// # Errors
/// If a stream broke: which of the two, with the bytes that went until then.
pub async fn copy_bidirectional<A: CopyStream, B: CopyStream>(
    first: &mut A,
    second: &mut B,
) -> Result<(u64, u64), CopyError> {
    let (mut there, mut back) = (Direction::default(), Direction::default());
    poll_fn(|task| {
        let polled = there.poll(task, first, second).map_err(|(from_reader, error)| {
            (if from_reader { CopySide::First } else { CopySide::Second }, error)
        });
        let polled = polled.and_then(|there| {
            let back = back.poll(task, second, first).map_err(|(from_reader, error)| {
                (if from_reader { CopySide::Second } else { CopySide::First }, error)
            })?;
            Ok(there.is_ready() && back.is_ready())
        });
        match polled {
            Ok(true) => Poll::Ready(Ok((there.bytes, back.bytes))),
            Ok(false) => Poll::Pending,
            Err((side, error)) => {
                Poll::Ready(Err(CopyError { side, error, copied: (there.bytes, back.bytes) }))
            }
        }
    })
    .await
}

/// One of the two streams of [`copy_bidirectional`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopySide {
    /// The first argument.
    First,
    /// The second argument.
    Second,
}

/// The reason why [`copy_bidirectional`] ended before both streams had.
#[non_exhaustive]
pub struct CopyError {
    /// The stream that broke.
    pub side: CopySide,
    /// Its error.
    pub error: io::Error,
    /// The bytes that the second stream had taken from the first, and the first from the second.
    /// Bytes that a [`Stream`] has taken are queued, and may not have left.
    pub copied: (u64, u64),
}

impl fmt::Display for CopyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let side = match self.side {
            CopySide::First => "first",
            CopySide::Second => "second",
        };
        let (there, back) = self.copied;
        write!(f, "the {side} connection broke after {there} bytes there and {back} back: {}", self.error)
    }
}

ringserve_buf::debug_is_display!(CopyError);

impl std::error::Error for CopyError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.error)
    }
}

/// A side of [`copy_bidirectional`]: a [`Stream`], or, with the cargo feature `tokio`, an
/// `AnyStream`.
pub trait CopyStream: Ends {}

impl CopyStream for Stream {}

/// The two directions of a stream.
pub trait Ends {
    /// Puts received bytes into `chunk`, which is empty. False at the end.
    fn poll_fill(&mut self, task: &mut Context<'_>, chunk: &mut Chunk) -> Poll<io::Result<bool>>;

    /// Ready if there is room for a chunk, or if only an attempt to write can tell.
    fn poll_room(&mut self, task: &mut Context<'_>) -> Poll<io::Result<()>>;

    /// Takes bytes off `chunk`, which has some. Returns how many.
    fn poll_take(&mut self, task: &mut Context<'_>, chunk: &mut Chunk) -> Poll<io::Result<usize>>;

    /// Sends taken bytes, even if nothing follows.
    fn poll_flush(&mut self, task: &mut Context<'_>) -> Poll<io::Result<()>>;

    /// Tells the peer that nothing follows.
    fn poll_end(&mut self, task: &mut Context<'_>) -> Poll<io::Result<()>>;
}

impl Ends for Stream {
    #[inline]
    fn poll_fill(&mut self, task: &mut Context<'_>, chunk: &mut Chunk) -> Poll<io::Result<bool>> {
        self.poll_read_frame(task).map_ok(|frame| {
            let more = frame.is_some();
            chunk.frame = frame;
            more
        })
    }

    #[inline]
    fn poll_room(&mut self, task: &mut Context<'_>) -> Poll<io::Result<()>> {
        Stream::poll_room(self, task).map_ok(|_| ())
    }

    #[inline]
    fn poll_take(&mut self, task: &mut Context<'_>, chunk: &mut Chunk) -> Poll<io::Result<usize>> {
        if let Some(frame) = chunk.frame.take() {
            let len = frame.len();
            self.queue(frame);
            return Poll::Ready(Ok(len));
        }
        let taken = ready!(self.poll_put(task, chunk.bytes()))?;
        chunk.advance(taken);
        Poll::Ready(Ok(taken))
    }

    fn poll_flush(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_end(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.end_writing();
        Poll::Ready(Ok(()))
    }
}

/// Bytes on their way from one stream to the other.
#[derive(Default)]
pub struct Chunk {
    /// The bytes as a [`Stream`] received them.
    frame: Option<Frame>,
    /// The bytes of another stream; empty until the first read.
    buffer: Box<[u8]>,
    /// The part of the frame or the buffer that was not taken yet.
    left: Range<usize>,
}

impl Chunk {
    fn bytes(&self) -> &[u8] {
        match &self.frame {
            Some(frame) => &frame[self.left.start..],
            None => &self.buffer[self.left.clone()],
        }
    }

    fn advance(&mut self, taken: usize) {
        self.left.start += taken;
        if self.frame.as_ref().is_some_and(|frame| frame.len() == self.left.start) {
            (self.frame, self.left) = (None, 0..0);
        }
    }

    #[inline]
    fn is_empty(&self) -> bool {
        self.frame.is_none() && self.left.is_empty()
    }
}

#[derive(Default)]
struct Direction {
    bytes: u64,
    chunk: Chunk,
    progress: Progress,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Progress {
    #[default]
    Copying,
    /// Everything was taken, and more may follow.
    Flushing,
    /// Everything was taken, and the end is to be passed on.
    Ending,
    Ended,
}

impl Direction {
    /// Ready after the end. An error says whether it came from the reading side.
    fn poll(
        &mut self,
        task: &mut Context<'_>,
        from: &mut impl Ends,
        to: &mut impl Ends,
    ) -> Result<Poll<()>, (bool, io::Error)> {
        let polled = self.poll_once(task, from, to);
        match polled {
            Poll::Ready(Ok(())) => Ok(Poll::Ready(())),
            Poll::Ready(Err(error)) => Err(error),
            Poll::Pending => Ok(Poll::Pending),
        }
    }

    fn poll_once(
        &mut self,
        task: &mut Context<'_>,
        from: &mut impl Ends,
        to: &mut impl Ends,
    ) -> Poll<Result<(), (bool, io::Error)>> {
        let (reader, writer) = (|error| (true, error), |error| (false, error));
        loop {
            if !self.chunk.is_empty() {
                let taken = ready!(to.poll_take(task, &mut self.chunk)).map_err(writer)?;
                if taken == 0 {
                    return Poll::Ready(Err(writer(io::ErrorKind::WriteZero.into())));
                }
                self.bytes += taken as u64;
                self.progress = Progress::Flushing;
                continue;
            }
            match self.progress {
                Progress::Ended => return Poll::Ready(Ok(())),
                Progress::Ending => {
                    ready!(to.poll_end(task)).map_err(writer)?;
                    self.progress = Progress::Ended;
                }
                Progress::Copying | Progress::Flushing => {
                    // Without room the bytes stay where they are, which holds the sender back.
                    ready!(to.poll_room(task)).map_err(writer)?;
                    match from.poll_fill(task, &mut self.chunk).map_err(reader)? {
                        Poll::Ready(true) => {}
                        Poll::Ready(false) => self.progress = Progress::Ending,
                        Poll::Pending => {
                            if self.progress == Progress::Flushing {
                                ready!(to.poll_flush(task)).map_err(writer)?;
                                self.progress = Progress::Copying;
                            }
                            return Poll::Pending;
                        }
                    }
                }
            }
        }
    }
}

/// A stream that reads and writes by tokio's traits, for [`copy_bidirectional`].
///
/// ```no_run
/// use ringserve::net::{AnyStream, copy_bidirectional};
/// use ringserve::{Server, Stream, stream};
///
/// # async fn tls(stream: Stream) -> std::io::Result<Stream> { Ok(stream) }
/// # fn main() -> Result<(), ringserve::Error> {
/// Server::bind("127.0.0.1:7443").serve(|_shard| {
///     stream(async |client: Stream| {
///         let mut upstream = client.shard().connect("backend.internal:8000").await?;
///         let mut client = AnyStream(tls(client).await?);
///         copy_bidirectional(&mut client, &mut upstream).await.map_err(|broken| broken.error)
///     })
/// })
/// # }
/// ```
#[cfg(feature = "tokio")]
#[derive(Clone, Copy, Debug)]
pub struct AnyStream<T>(pub T);

#[cfg(feature = "tokio")]
mod any {
    use std::pin::Pin;

    use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

    use super::{AnyStream, BUFFER_BYTES, Chunk, Context, CopyStream, Ends, Poll, io, ready};

    impl<T: AsyncRead + AsyncWrite + Unpin> CopyStream for AnyStream<T> {}

    impl<T: AsyncRead + AsyncWrite + Unpin> Ends for AnyStream<T> {
        fn poll_fill(&mut self, task: &mut Context<'_>, chunk: &mut Chunk) -> Poll<io::Result<bool>> {
            if chunk.buffer.is_empty() {
                chunk.buffer = vec![0; BUFFER_BYTES].into();
            }
            let mut buffer = ReadBuf::new(&mut chunk.buffer);
            ready!(Pin::new(&mut self.0).poll_read(task, &mut buffer))?;
            let len = buffer.filled().len();
            chunk.left = 0..len;
            Poll::Ready(Ok(len > 0))
        }

        fn poll_room(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_take(&mut self, task: &mut Context<'_>, chunk: &mut Chunk) -> Poll<io::Result<usize>> {
            let taken = ready!(Pin::new(&mut self.0).poll_write(task, chunk.bytes()))?;
            chunk.advance(taken);
            Poll::Ready(Ok(taken))
        }

        fn poll_flush(&mut self, task: &mut Context<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.0).poll_flush(task)
        }

        fn poll_end(&mut self, task: &mut Context<'_>) -> Poll<io::Result<()>> {
            Pin::new(&mut self.0).poll_shutdown(task)
        }
    }
}
