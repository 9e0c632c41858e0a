//! The traits of hyper and of tokio. Both have the same methods under other names of traits, so
//! each is written once, for the types that have them.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};

use super::byte_stream::Stream;
#[cfg(feature = "tokio")]
use super::halves::{ReadHalf, WriteHalf};

impl Stream {
    /// Shows the readable bytes, none at the end, to `look`, which returns how many of them it
    /// took.
    pub(crate) fn poll_peek(
        &self,
        task: &mut Context<'_>,
        look: impl FnOnce(&[u8]) -> usize,
    ) -> Poll<io::Result<()>> {
        let session = self.shared.body();
        session.poll_readable(task.waker(), self.shard.tasks()).map_ok(|()| session.read_with(look))
    }
}

/// A trait of reading into such a buffer, for a type with a stream.
macro_rules! reads {
    ($trait:path, $buf:ty, $type:ty, |$this:ident| $stream:expr) => {
        impl $trait for $type {
            fn poll_read(self: Pin<&mut Self>, task: &mut Context<'_>, buf: $buf) -> Poll<io::Result<()>> {
                let ($this, mut buf) = (&*self, buf);
                let buf = &mut buf;
                if buf.remaining() == 0 {
                    return Poll::Ready(Ok(()));
                }
                $stream.poll_peek(task, |bytes| {
                    let len = bytes.len().min(buf.remaining());
                    buf.put_slice(&bytes[..len]);
                    len
                })
            }
        }
    };
}

/// A trait of writing, for a type with a stream.
macro_rules! writes {
    ($trait:path, $type:ty, |$this:ident| $stream:expr) => {
        impl $trait for $type {
            fn poll_write(
                self: Pin<&mut Self>,
                task: &mut Context<'_>,
                bytes: &[u8],
            ) -> Poll<io::Result<usize>> {
                let $this = &*self;
                $stream.poll_put(task, bytes)
            }

            fn poll_write_vectored(
                self: Pin<&mut Self>,
                task: &mut Context<'_>,
                pieces: &[IoSlice<'_>],
            ) -> Poll<io::Result<usize>> {
                let $this = &*self;
                $stream.poll_put_all(task, pieces, || 0, |_| None)
            }

            fn is_write_vectored(&self) -> bool {
                true
            }

            /// Ready at once: written bytes leave at the end of the turn.
            fn poll_flush(self: Pin<&mut Self>, _task: &mut Context<'_>) -> Poll<io::Result<()>> {
                Poll::Ready(Ok(()))
            }

            /// Ready at once: FIN leaves after the written bytes.
            fn poll_shutdown(self: Pin<&mut Self>, _task: &mut Context<'_>) -> Poll<io::Result<()>> {
                let $this = &*self;
                $stream.end_writing();
                Poll::Ready(Ok(()))
            }
        }
    };
}

#[cfg(feature = "http")]
reads!(hyper::rt::Read, hyper::rt::ReadBufCursor<'_>, Stream, |stream| stream);
#[cfg(feature = "http")]
writes!(hyper::rt::Write, Stream, |stream| stream);

#[cfg(feature = "tokio")]
reads!(tokio::io::AsyncRead, &mut tokio::io::ReadBuf<'_>, Stream, |stream| stream);
#[cfg(feature = "tokio")]
reads!(tokio::io::AsyncRead, &mut tokio::io::ReadBuf<'_>, ReadHalf, |half| half.0);
#[cfg(feature = "tokio")]
writes!(tokio::io::AsyncWrite, Stream, |stream| stream);
#[cfg(feature = "tokio")]
writes!(tokio::io::AsyncWrite, WriteHalf, |half| half.0);
