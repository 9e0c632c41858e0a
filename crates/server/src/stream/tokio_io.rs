//! tokio's traits.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::byte_stream::Stream;
use super::halves::{ReadHalf, WriteHalf};

impl Stream {
    fn poll_read_into(&self, task: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if buf.remaining() == 0 {
            return Poll::Ready(Ok(()));
        }
        let session = self.shared.body();
        session.poll_readable(task.waker(), self.shard.tasks()).map_ok(|()| {
            session.read_with(|bytes| {
                let len = bytes.len().min(buf.remaining());
                buf.put_slice(&bytes[..len]);
                len
            });
        })
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        task: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.poll_read_into(task, buf)
    }
}

impl AsyncRead for ReadHalf {
    fn poll_read(
        self: Pin<&mut Self>,
        task: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.0.poll_read_into(task, buf)
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, task: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_put(task, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        task: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_put_all(task, pieces, || 0, |_| None)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    /// Ready at once: written bytes leave at the end of the turn.
    fn poll_flush(self: Pin<&mut Self>, _task: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    /// Ready at once: FIN leaves behind the written bytes.
    fn poll_shutdown(self: Pin<&mut Self>, _task: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.end_writing();
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for WriteHalf {
    fn poll_write(self: Pin<&mut Self>, task: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.0.poll_put(task, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        task: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.0.poll_put_all(task, pieces, || 0, |_| None)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    /// Ready at once: written bytes leave at the end of the turn.
    fn poll_flush(self: Pin<&mut Self>, _task: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    /// Ready at once: FIN leaves behind the written bytes.
    fn poll_shutdown(self: Pin<&mut Self>, _task: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.0.end_writing();
        Poll::Ready(Ok(()))
    }
}
