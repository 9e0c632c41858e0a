//! Streams of frames, for clients.

use std::fmt;
use std::future::poll_fn;
use std::io;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use ringserve_core::framing::{EncodeError, FrameError, Framing};
use ringserve_core::{Frame, FrameReader, LimitError, Payload, ReadError};

use super::byte_stream::Stream;
use super::halves::{ReadHalf, WriteHalf};

/// The start of a frame counts as held memory from this size on: below it, counting costs more than
/// it is worth.
const COUNTED_BYTES_MIN: usize = 4096;

impl Stream {
    /// Makes a stream of frames, cut and written by `framing`: for clients of protocols of frames.
    /// It costs two allocations.
    ///
    /// ```no_run
    /// use ringserve::framing::LengthPrefix;
    /// use ringserve::{Frame, Shard};
    ///
    /// async fn ask(shard: &Shard, question: &str) -> std::io::Result<Option<Frame>> {
    ///     let mut upstream = shard.connect("answers.internal:7000").await?.framed(LengthPrefix::default());
    ///     upstream.send(question).await?;
    ///     Ok(upstream.next().await.transpose()?)
    /// }
    /// ```
    pub fn framed<F: Framing>(self, framing: F) -> Framed<F> {
        let framing = Rc::new(framing);
        let frame_bytes_max = self.shared.lane().limits().frame_bytes_max;
        let (read, write) = self.split();
        Framed {
            reader: FramedReader {
                half: read,
                framing: framing.clone(),
                frames: FrameReader::default(),
                frame_bytes_max,
                counted_bytes: 0,
                stage: Stage::New,
            },
            writer: FramedWriter { half: write, framing },
        }
    }
}

/// A [`Stream`] of frames. See [`Stream::framed`].
///
/// # Reading
///
/// Frames are cut as those of a service: a frame inside one received piece is not copied, a frame
/// that spans pieces is copied once. A kept frame pins its receive buffer; see [`Frame`]. Unread
/// frames hold the peer back, as with a stream.
///
/// # Writing
///
/// Frames are queued, and all frames of a turn leave in one send. [`send`](Framed::send) waits
/// while the outbox is over [`Limits::outbox_bytes_high`](crate::Limits::outbox_bytes_high), so at
/// most that and one frame are queued.
///
/// # Several questions at once
///
/// A `Framed` does not match answers to questions. A client that asks one question at a time keeps
/// a `Framed` for each caller, or a pool of them; other clients [split](Framed::split) it, and
/// match answers by their ids or their order.
#[derive(Debug)]
pub struct Framed<F> {
    reader: FramedReader<F>,
    writer: FramedWriter<F>,
}

impl<F: Framing> Framed<F> {
    /// Sets the largest received frame, with its header. By default it is
    /// [`Limits::frame_bytes_max`](crate::Limits::frame_bytes_max) of the connection: upstreams
    /// have the limit of the server's first service. A peer can make the shard hold this much for a
    /// frame that it does not end; it counts as
    /// [held](crate::limits::ServerLimits::held_bytes_max).
    pub fn frame_bytes_max(mut self, bytes: usize) -> Framed<F> {
        self.reader.frame_bytes_max = bytes;
        self
    }

    /// The next frame, as [`FramedReader::next`].
    ///
    /// # Errors
    /// Those of [`FramedReader::next`].
    pub async fn next(&mut self) -> Option<Result<Frame, FramedError>> {
        self.reader.next().await
    }

    /// Polls for the next frame, as [`FramedReader::poll_next`].
    pub fn poll_next(&mut self, task: &mut Context<'_>) -> Poll<Option<Result<Frame, FramedError>>> {
        self.reader.poll_next(task)
    }

    /// Queues one frame when there is room, as [`FramedWriter::send`].
    ///
    /// # Errors
    /// Those of [`FramedWriter::send`].
    pub async fn send<'p>(&self, payload: impl Into<Payload<'p>>) -> Result<(), FramedError> {
        self.writer.send(payload).await
    }

    /// Queues one frame, as [`FramedWriter::queue`].
    ///
    /// # Errors
    /// Those of [`FramedWriter::queue`].
    pub fn queue<'p>(&self, payload: impl Into<Payload<'p>>) -> Result<(), EncodeError> {
        self.writer.queue(payload)
    }

    /// Bytes of a frame that has begun and not ended. A connection is fit for another question if
    /// this is 0 and `poll_next` waits.
    pub fn unfinished_bytes(&self) -> usize {
        self.reader.frames.unfinished_bytes()
    }

    /// Splits it into its two directions, for two tasks. The drop of the writing half sends FIN;
    /// the drop of both closes the connection.
    pub fn split(self) -> (FramedReader<F>, FramedWriter<F>) {
        (self.reader, self.writer)
    }

    /// The stream below, for its peer, its shard and its end.
    pub fn stream(&self) -> &Stream {
        self.reader.stream()
    }
}

/// The reading half of a [`Framed`].
pub struct FramedReader<F> {
    half: ReadHalf,
    framing: Rc<F>,
    frames: FrameReader,
    frame_bytes_max: usize,
    /// Bytes that the shard counts as held here.
    counted_bytes: usize,
    stage: Stage,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// The framing was not asked yet whether it fits the limit.
    New,
    Reading,
    /// The end or an error was returned.
    Over,
}

impl<F: Framing> FramedReader<F> {
    /// The next frame. `None` after the peer's last frame, and after an error. Dropping the future
    /// loses nothing.
    ///
    /// # Errors
    /// If the peer sent bytes that are no frame, or ended in the middle of a frame, and if the
    /// connection ended. Frames before that are returned first. The connection stays as it is until
    /// both halves are dropped.
    pub async fn next(&mut self) -> Option<Result<Frame, FramedError>> {
        poll_fn(|task| self.poll_next(task)).await
    }

    /// Polls for the next frame, as [`next`](FramedReader::next). The task that polled last is
    /// woken.
    pub fn poll_next(&mut self, task: &mut Context<'_>) -> Poll<Option<Result<Frame, FramedError>>> {
        match self.stage {
            Stage::Reading => {}
            Stage::New => {
                let limits = self.half.stream().shared.lane().limits().clone();
                if let Err(error) = self.framing.check(&limits.frame_bytes_max(self.frame_bytes_max)) {
                    return self.over(Some(FramedError::Limits(error)));
                }
                self.stage = Stage::Reading;
            }
            Stage::Over => return Poll::Ready(None),
        }
        loop {
            let stream = self.half.stream();
            let session = stream.shared.body();
            if let Err(error) = ready!(session.poll_readable(task.waker(), stream.shard.tasks())) {
                return self.over(Some(FramedError::Connection(error)));
            }
            if !session.has_unread() {
                let bytes = self.frames.unfinished_bytes();
                return self.over((bytes > 0).then_some(FramedError::Unfinished { bytes }));
            }
            let read =
                session.take_from(|unread| self.frames.read(&*self.framing, unread, self.frame_bytes_max));
            self.count_held();
            match read {
                Ok(Some(frame)) => return Poll::Ready(Some(Ok(frame))),
                Ok(None) => {}
                Err(ReadError::Frame(error)) => return self.over(Some(FramedError::Malformed(error))),
                Err(ReadError::NoMemory) => {
                    return self.over(Some(FramedError::Connection(io::ErrorKind::OutOfMemory.into())));
                }
            }
        }
    }

    fn over(&mut self, error: Option<FramedError>) -> Poll<Option<Result<Frame, FramedError>>> {
        self.stage = Stage::Over;
        self.frames = FrameReader::default();
        self.count_held();
        Poll::Ready(error.map(Err))
    }

    /// Counts the start of a frame as held by the shard.
    #[inline]
    fn count_held(&mut self) {
        let held = self.frames.held_bytes();
        let counted = if held < COUNTED_BYTES_MIN { 0 } else { held };
        if counted != self.counted_bytes {
            self.counted_bytes = counted;
            self.stream().shared.set_service_bytes(counted);
        }
    }

    /// The stream of both halves, for its peer, its shard and its end.
    pub fn stream(&self) -> &Stream {
        self.half.stream()
    }
}

impl<F> fmt::Debug for FramedReader<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("FramedReader").field(&self.half).finish()
    }
}

impl<F> Drop for FramedReader<F> {
    fn drop(&mut self) {
        if self.counted_bytes > 0 {
            self.half.stream().shared.set_service_bytes(0);
        }
    }
}

/// The writing half of a [`Framed`]. Several tasks may share it.
pub struct FramedWriter<F> {
    half: WriteHalf,
    framing: Rc<F>,
}

impl<F: Framing> FramedWriter<F> {
    /// Queues one frame, once the outbox is below its high mark. A dropped future has queued
    /// nothing.
    ///
    /// # Errors
    /// If the connection ended, or if `payload` has no frame. Nothing is queued then, and the
    /// connection stays as it is.
    pub async fn send<'p>(&self, payload: impl Into<Payload<'p>>) -> Result<(), FramedError> {
        self.ready().await.map_err(FramedError::Connection)?;
        self.queue(payload).map_err(FramedError::Payload)
    }

    /// Queues one frame at once, as [`Stream::queue`] does. A frame for a connection that ended
    /// goes nowhere.
    ///
    /// # Errors
    /// If `payload` has no frame. Nothing is queued then, and the connection stays as it is.
    pub fn queue<'p>(&self, payload: impl Into<Payload<'p>>) -> Result<(), EncodeError> {
        self.half.stream().shared.reply_by(&*self.framing, payload.into())
    }

    /// Waits until the outbox is below its high mark, as [`Stream::ready`].
    ///
    /// # Errors
    /// Those of [`Stream::ready`].
    pub async fn ready(&self) -> io::Result<()> {
        self.half.ready().await
    }

    /// The stream of both halves, for its peer, its shard and its end.
    pub fn stream(&self) -> &Stream {
        self.half.stream()
    }
}

impl<F> fmt::Debug for FramedWriter<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("FramedWriter").field(&self.half).finish()
    }
}

/// The reason why a [`Framed`] read or wrote no frame.
#[non_exhaustive]
pub enum FramedError {
    /// The connection ended otherwise than by the peer's FIN, or takes no more bytes. As from a
    /// [`Stream`].
    Connection(io::Error),
    /// The peer sent bytes that are no frame, or too large a frame.
    Malformed(FrameError),
    /// The peer sent FIN in the middle of a frame.
    Unfinished {
        /// The bytes of that frame that arrived.
        bytes: usize,
    },
    /// The payload to be sent has no frame.
    Payload(EncodeError),
    /// The framing cannot work with the limit on frames.
    Limits(LimitError),
}

impl fmt::Display for FramedError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FramedError::Connection(error) => error.fmt(f),
            FramedError::Malformed(error) => error.fmt(f),
            FramedError::Unfinished { bytes } => {
                write!(f, "the peer sent FIN in the middle of a frame, after {bytes} bytes of it")
            }
            FramedError::Payload(error) => error.fmt(f),
            FramedError::Limits(error) => error.fmt(f),
        }
    }
}

ringserve_buf::debug_is_display!(FramedError);

impl std::error::Error for FramedError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            // The other texts are complete.
            FramedError::Connection(error) => error.source(),
            _ => None,
        }
    }
}

impl From<FramedError> for io::Error {
    fn from(error: FramedError) -> io::Error {
        let kind = match error {
            FramedError::Connection(error) => return error,
            FramedError::Malformed(_) => io::ErrorKind::InvalidData,
            FramedError::Unfinished { .. } => io::ErrorKind::UnexpectedEof,
            FramedError::Payload(_) | FramedError::Limits(_) => io::ErrorKind::InvalidInput,
        };
        io::Error::new(kind, error)
    }
}
