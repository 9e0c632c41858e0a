//! A connection to a backend, of the version that it speaks.

use std::io;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::Incoming;
use hyper::http::uri::Scheme;
use hyper::{Request, Response};
use ringserve_server::http::ShardTimer;
use ringserve_server::{Shard, Stream};
use ringserve_upstream::{Connection, IdleEvent};

use super::connection::{Http1Connection, SendError};
use super::http2::Http2Connection;
use super::request_body::RequestBody;
use crate::target::UpstreamProtocol;

/// A connection, whose drop closes it.
pub(crate) enum HttpConnection {
    Http1(Http1Connection),
    Http2(Http2Connection),
}

impl HttpConnection {
    /// Begins to speak HTTP on a new stream. `timer` is there unless the protocol is HTTP/1.1.
    pub(crate) async fn begin(
        shard: &Shard,
        protocol: UpstreamProtocol,
        timer: Option<&ShardTimer>,
        stream: Stream,
    ) -> io::Result<HttpConnection> {
        let facts = TlsFacts::of(&stream);
        let is_http2 = match protocol {
            UpstreamProtocol::Http1 => false,
            UpstreamProtocol::Http2 if facts.is_tls && !facts.has_chosen_http2 => {
                let error = "the backend does not choose h2 (ALPN)";
                return Err(io::Error::new(io::ErrorKind::InvalidData, error));
            }
            UpstreamProtocol::Http2 => true,
            UpstreamProtocol::Negotiated => facts.has_chosen_http2,
        };
        let Some(timer) = timer.filter(|_| is_http2) else {
            return Ok(HttpConnection::Http1(Http1Connection::begin(shard, stream).await?));
        };
        let scheme = if facts.is_tls { Scheme::HTTPS } else { Scheme::HTTP };
        Ok(HttpConnection::Http2(Http2Connection::begin(shard, timer, scheme, stream).await?))
    }

    pub(crate) fn is_http2(&self) -> bool {
        matches!(self, HttpConnection::Http2(_))
    }

    /// The scheme of targets, which requests of HTTP/2 have.
    pub(crate) fn http2_scheme(&self) -> Option<Scheme> {
        match self {
            HttpConnection::Http1(_) => None,
            HttpConnection::Http2(connection) => Some(connection.scheme.clone()),
        }
    }

    /// Sends a request, and waits for the head of its answer.
    pub(crate) async fn send(
        &mut self,
        request: Request<RequestBody>,
    ) -> Result<Response<Incoming>, SendError> {
        match self {
            HttpConnection::Http1(connection) => connection.send(request).await,
            HttpConnection::Http2(connection) => connection.send(request).await,
        }
    }

    /// Says that the answer to the next request may be that the connection becomes something else.
    /// One of HTTP/2 does not.
    pub(crate) fn can_switch(&self) {
        if let HttpConnection::Http1(connection) = self {
            connection.can_switch();
        }
    }

    /// The stream behind an answer of 101, with what hyper had read of it.
    pub(crate) async fn stream(&mut self) -> io::Result<(Stream, Bytes)> {
        match self {
            HttpConnection::Http1(connection) => connection.stream().await,
            HttpConnection::Http2(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }
}

impl Connection for HttpConnection {
    fn poll_idle(&mut self, task: &mut Context<'_>) -> Poll<IdleEvent> {
        match self {
            HttpConnection::Http1(connection) => connection.poll_idle(task),
            HttpConnection::Http2(connection) => connection.poll_idle(task),
        }
    }
}

/// Facts of the TLS below a stream.
#[derive(Default)]
struct TlsFacts {
    is_tls: bool,
    has_chosen_http2: bool,
}

impl TlsFacts {
    #[cfg(feature = "tls")]
    fn of(stream: &Stream) -> TlsFacts {
        let info = stream.transport_info::<ringserve_server::tls::TlsInfo>();
        let has_chosen_http2 = info.as_ref().is_some_and(|info| info.alpn() == Some(b"h2"));
        TlsFacts { is_tls: info.is_some(), has_chosen_http2 }
    }

    #[cfg(not(feature = "tls"))]
    fn of(_stream: &Stream) -> TlsFacts {
        TlsFacts::default()
    }
}
