//! WebSocket echo on fastwebsockets: hyper answers the request, then a task per connection on one
//! thread.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use common::MESSAGE_BYTES_MAX;
use fastwebsockets::upgrade::{self, UpgradeFut};
use fastwebsockets::{FragmentCollector, OpCode, Role, WebSocket, WebSocketError};
use http_body_util::Empty;
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, BufWriter, ReadBuf};
use tokio::net::{TcpListener, TcpStream};

/// Bytes of answers that are sent in one write.
const BATCH_BYTES: usize = 64 * 1024;

/// The way in which a connection's messages are answered.
#[derive(Clone, Copy, Debug)]
pub enum Answers {
    /// A message is read, then written, as the library does by default.
    OneByOne,
    /// Answers are kept until there is nothing more to read, then all are sent in one write.
    Batched,
}

/// Accepts until the process ends, and gives each connection a task.
pub fn serve(answers: Answers) -> io::Result<()> {
    let address = common::websocket_arguments();
    tokio::runtime::Builder::new_current_thread().enable_io().build()?.block_on(async {
        let listener = TcpListener::from_std(common::listen(address)?)?;
        common::announce(listener.local_addr()?)?;
        loop {
            match listener.accept().await {
                Ok((stream, _)) => drop(tokio::spawn(answer(stream, answers))),
                // Out of descriptors: let connections end before the next try.
                Err(_) => tokio::task::yield_now().await,
            }
        }
    })
}

async fn answer(stream: TcpStream, answers: Answers) -> hyper::Result<()> {
    let upgraded = service_fn(move |request| upgraded(request, answers));
    http1::Builder::new().serve_connection(TokioIo::new(stream), upgraded).with_upgrades().await
}

async fn upgraded(
    mut request: Request<Incoming>,
    answers: Answers,
) -> Result<Response<Empty<Bytes>>, WebSocketError> {
    let (response, socket) = upgrade::upgrade(&mut request)?;
    // Without a budget, as in the example of the library.
    tokio::spawn(tokio::task::unconstrained(serve_one(socket, answers)));
    Ok(response)
}

async fn serve_one(socket: UpgradeFut, answers: Answers) -> Result<(), WebSocketError> {
    let socket = socket.await?;
    match answers {
        Answers::OneByOne => echo(socket).await,
        Answers::Batched => {
            let stream = Batching(BufWriter::with_capacity(BATCH_BYTES, socket.into_inner()));
            echo(WebSocket::after_handshake(stream, Role::Server)).await
        }
    }
}

async fn echo<S: AsyncRead + AsyncWrite + Unpin>(mut socket: WebSocket<S>) -> Result<(), WebSocketError> {
    // It refuses messages of this length.
    socket.set_max_message_size(MESSAGE_BYTES_MAX + 1);
    let mut socket = FragmentCollector::new(socket);
    loop {
        let frame = socket.read_frame().await?;
        match frame.opcode {
            OpCode::Close => return Ok(()),
            OpCode::Text | OpCode::Binary => socket.write_frame(frame).await?,
            _ => {}
        }
    }
}

/// Sends the written bytes when there is nothing to read. A read of the library cannot be cancelled
/// between two frames, so the stream below it has to notice that.
struct Batching<S: AsyncWrite>(BufWriter<S>);

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for Batching<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let read = Pin::new(&mut self.0).poll_read(cx, buf);
        if read.is_pending()
            && let Poll::Ready(Err(error)) = Pin::new(&mut self.0).poll_flush(cx)
        {
            return Poll::Ready(Err(error));
        }
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Batching<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.0.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}
