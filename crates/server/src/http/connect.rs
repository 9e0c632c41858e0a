//! A client of WebSocket, above a stream to an upstream.

use std::fmt;
use std::io;

use bytes::Bytes;
use ringserve_websocket::{ClientRequest, HandshakeError};

use super::masks::Masks;
use super::socket::{Parts, Socket, Times};
use super::websocket::WRITE_STALL_TIMEOUT;
use crate::stream::byte_stream::Stream;

/// Asks the server at the other end of `stream` for WebSocket, and waits for its answer. The stream
/// is one that [`Shard::connect`](crate::Shard::connect) made, plain or with the transport of a
/// `TlsClient` below it (`wss`).
///
/// The socket is a [`Socket`] as that of a server's handler: messages of whole, pings answered and
/// silent servers pinged, limits by the [`ClientRequest`]. What it sends is masked. It does not end
/// when the own server drains: its owner closes it, as a handler does whose client is gone.
/// Messages are not compressed.
///
/// ```no_run
/// use ringserve::http::hyper::Response;
/// use ringserve::http::hyper::service::service_fn;
/// use ringserve::websocket::{ClientRequest, Socket, connect, upgrade};
/// use ringserve::{Server, Shard, http};
///
/// /// Passes messages on to another server, one for one.
/// async fn relay(shard: Shard, mut client: Socket) -> Result<(), Box<dyn std::error::Error>> {
///     let request = ClientRequest::new("backend.internal", "/chat").message_bytes_max(64 << 10);
///     let mut backend = connect(shard.connect("backend.internal:80").await?, &request).await?;
///     while let Some(message) = client.next().await? {
///         backend.send(message).await?;
///         let Some(answer) = backend.next().await? else { break };
///         client.send(answer).await?;
///     }
///     backend.close(1000, "").await?;
///     Ok(())
/// }
///
/// # fn main() -> Result<(), ringserve::Error> {
/// Server::bind("127.0.0.1:8080").serve(|shard| {
///     let shard = shard.clone();
///     http(service_fn(move |request| {
///         let shard = shard.clone();
///         let answer: Response<String> = upgrade(request, async |client| _ = relay(shard, client).await);
///         std::future::ready(Ok::<_, std::convert::Infallible>(answer))
///     }))
/// })
/// # }
/// ```
///
/// # Errors
/// [`Handshake`](ConnectError::Handshake) if the request cannot be written, the server refuses it,
/// or its answer is none of WebSocket: a `Sec-WebSocket-Accept` that is not that of the key, a
/// protocol or an extension that was not offered. [`Io`](ConnectError::Io) if the connection ends
/// before that, and `TimedOut` after [`ClientRequest::timeout`].
pub async fn connect(mut stream: Stream, request: &ClientRequest) -> Result<Socket, ConnectError> {
    let shard = stream.shard().clone();
    let (message_bytes_max, timeout, ping) = request.bounds();
    let mut masks = Masks::new(&shard);
    let mut out = Vec::new();
    let mut expected = request.write(masks.key(), &mut out)?;
    stream.queue(&out[..]);
    let mut came = Vec::new();
    let answered = async {
        loop {
            let Some(frame) = stream.read_frame().await? else {
                return Err(ConnectError::Io(io::ErrorKind::UnexpectedEof.into()));
            };
            came.extend_from_slice(&frame);
            if let Some(info) = expected.read(&mut came)? {
                return Ok(info);
            }
        }
    };
    let info = match shard.timeout(timeout, answered).await {
        Ok(answered) => answered?,
        Err(_elapsed) => return Err(ConnectError::Io(io::ErrorKind::TimedOut.into())),
    };
    let times = Times { ping, write_stall: WRITE_STALL_TIMEOUT };
    let parts = Parts { shard, info, extension: None, message_bytes_max, times, masks: Some(masks) };
    Ok(Socket::over_http1(stream, Bytes::from(came), parts))
}

/// Why [`connect`] gives no socket.
#[non_exhaustive]
pub enum ConnectError {
    /// The server's refusal, or a fault of the request.
    Handshake(HandshakeError),
    /// The connection ended, or no answer came in time.
    Io(io::Error),
}

impl From<HandshakeError> for ConnectError {
    fn from(error: HandshakeError) -> ConnectError {
        ConnectError::Handshake(error)
    }
}

impl From<io::Error> for ConnectError {
    fn from(error: io::Error) -> ConnectError {
        ConnectError::Io(error)
    }
}

impl fmt::Display for ConnectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ConnectError::Handshake(error) => error.fmt(f),
            ConnectError::Io(error) => match error.kind() {
                io::ErrorKind::UnexpectedEof => {
                    f.write_str("the server ended the connection before its answer")
                }
                io::ErrorKind::TimedOut => f.write_str("the server did not answer in time"),
                _ => error.fmt(f),
            },
        }
    }
}

ringserve_buf::debug_is_display!(ConnectError);

impl std::error::Error for ConnectError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            ConnectError::Handshake(error) => Some(error),
            ConnectError::Io(error) => Some(error),
        }
    }
}
