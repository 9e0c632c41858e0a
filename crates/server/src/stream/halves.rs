//! The two directions of a stream, for two owners.

use std::future::poll_fn;
use std::io;
use std::rc::Rc;
use std::task::{Context, Poll};

use ringserve_buf::ReplyWriter;
use ringserve_core::framing::WriteResult;
use ringserve_core::{Frame, Payload};

use super::byte_stream::Stream;

impl Stream {
    /// Splits the stream into its two directions, for two tasks or two futures of one task. The
    /// drop of the writing half sends FIN, as [`end_writing`](Stream::end_writing) does; the drop
    /// of both closes the connection. It costs one allocation.
    ///
    /// ```no_run
    /// use ringserve::{Server, Stream, stream};
    ///
    /// # fn main() -> Result<(), ringserve::Error> {
    /// Server::bind("127.0.0.1:7000").serve(|_shard| {
    ///     stream(async |stream: Stream| {
    ///         let (mut reader, mut writer) = stream.split();
    ///         reader.stream().shard().clone().spawn(async move {
    ///             let _ = writer.write_all(b"as much as there is\n").await;
    ///         });
    ///         while let Some(bytes) = reader.read_frame().await? {
    ///             println!("{} bytes", bytes.len());
    ///         }
    ///         std::io::Result::Ok(())
    ///     })
    /// })
    /// # }
    /// ```
    pub fn split(self) -> (ReadHalf, WriteHalf) {
        let stream = Rc::new(self);
        (ReadHalf(stream.clone()), WriteHalf(stream))
    }
}

/// The reading half of a [`Stream`]. See [`Stream::split`]. With the cargo feature `tokio` it is an
/// `AsyncRead`.
#[derive(Debug)]
pub struct ReadHalf(pub(super) Rc<Stream>);

/// The writing half of a [`Stream`]. See [`Stream::split`]. With the cargo feature `tokio` it is an
/// `AsyncWrite`.
#[derive(Debug)]
pub struct WriteHalf(pub(super) Rc<Stream>);

impl ReadHalf {
    /// The received bytes, as [`Stream::read_frame`].
    ///
    /// # Errors
    /// Those of [`Stream::read_frame`].
    pub async fn read_frame(&mut self) -> io::Result<Option<Frame>> {
        poll_fn(|task| self.0.poll_next_frame(task)).await
    }

    /// Polls for received bytes, as [`Stream::poll_read_frame`].
    ///
    /// # Errors
    /// Those of [`Stream::read_frame`].
    pub fn poll_read_frame(&mut self, task: &mut Context<'_>) -> Poll<io::Result<Option<Frame>>> {
        self.0.poll_next_frame(task)
    }

    /// The stream of both halves, for its peer, its shard and its end.
    pub fn stream(&self) -> &Stream {
        &self.0
    }
}

impl WriteHalf {
    /// Queues bytes, as [`Stream::queue`].
    pub fn queue<'p>(&self, bytes: impl Into<Payload<'p>>) {
        self.0.queue(bytes);
    }

    /// Queues bytes written in place, as [`Stream::queue_with`].
    pub fn queue_with<R: WriteResult>(&self, write: impl FnOnce(&mut ReplyWriter<'_>) -> R) -> R {
        self.0.queue_with(write)
    }

    /// Queues all of `bytes`, as [`Stream::write_all`].
    ///
    /// # Errors
    /// Those of [`Stream::write_all`].
    pub async fn write_all(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let written = poll_fn(|task| self.0.poll_put(task, bytes)).await?;
            bytes = &bytes[written..];
        }
        Ok(())
    }

    /// Waits for room, as [`Stream::ready`].
    ///
    /// # Errors
    /// Those of [`Stream::ready`].
    pub async fn ready(&self) -> io::Result<()> {
        self.0.ready().await
    }

    /// The stream of both halves, for its peer, its shard and its end.
    pub fn stream(&self) -> &Stream {
        &self.0
    }
}

impl Drop for WriteHalf {
    fn drop(&mut self) {
        if !self.0.shared.is_gone() {
            self.0.end_writing();
        }
    }
}
