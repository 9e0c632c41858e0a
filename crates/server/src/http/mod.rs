//! HTTP/1.1 and HTTP/2, by hyper. With the feature `http`, which is off by default.
//!
//! ```no_run
//! use std::convert::Infallible;
//!
//! use ringserve::http::hyper::body::Incoming;
//! use ringserve::http::hyper::service::service_fn;
//! use ringserve::http::hyper::{Request, Response};
//! use ringserve::{Server, http};
//!
//! async fn hello(_request: Request<Incoming>) -> Result<Response<String>, Infallible> {
//!     Ok(Response::new("hello".into()))
//! }
//!
//! fn main() -> Result<(), ringserve::Error> {
//!     Server::bind("127.0.0.1:8080").serve(|_shard| http(service_fn(hello)))
//! }
//! ```
//!
//! The abilities of a service are hyper's: bodies that stream both ways with back-pressure,
//! trailers, `Expect: 100-continue`. Each shard has one service, which need not be `Send` and
//! shares state of its shard by `Rc` and `Cell`. A request of HTTP/2 is a task of the shard, those
//! of HTTP/1.1 run in their connection's.
//!
//! # What it takes care of
//!
//! * The first bytes show the protocol: those of HTTP/2 begin with its preface. Below TLS the
//!   service offers `h2` and `http/1.1` (ALPN), unless the program says which: one that serves a
//!   single version does so by `Tls::alpn`.
//! * When the server shuts down, requests that had arrived are answered. A connection that waits
//!   for one is closed at its moment within
//!   [`drain_spread`](crate::limits::ServerLimits::drain_spread), with HTTP/1.1 half a second after
//!   the order at the earliest: until then a request is answered, with `connection: close` where
//!   nothing more came after it. HTTP/2 sends GOAWAY, PING and GOAWAY at its moment, and ends when
//!   its streams do; without a stream after 2 s, whether the client answers or not.
//! * A service of HTTP/2 may answer an upload without reading it: up to 64 KiB of the rest are
//!   dropped for up to a second, so that a client which sends little sees its answer alone, and the
//!   stream is reset then. With HTTP/1.1 the connection ends.
//! * A request of HTTP/1.1 without a `host`, and one of HTTP/1.1 or 1.0 with two of them or with
//!   one that is no name and port, is answered with 400, and its connection ends. An empty `host`
//!   is valid.
//! * Each request has a [`ClientInfo`] among its extensions: the peer, what a proxy said of it, the
//!   facts of TLS.
//! * `hyper::upgrade::on` gives a service the bytes after its answer of 101, or of 2xx to CONNECT,
//!   on any thread. What such a tunnel holds, with HTTP/1.1 up to 64 KiB in each direction, counts
//!   with its connection; beyond that the peer, or the service, is held back. The connection's
//!   limits still hold, those of a request end with the answer, and a drain waits for the tunnel as
//!   for a [`Stream`](crate::Stream).
//! * [`HttpOptions`] bound headers, time, rates and streams. What hyper finds too large it answers
//!   with 431 or 414 and closes. A body is as long as the peer likes, unless the service stops
//!   reading: `http_body_util::Limited` stops it.
//! * A request beyond its bounds is answered with 408 (its body came too slowly) or 503 (the
//!   service took too long). Where the answer began already, a stream of HTTP/2 is reset and a
//!   connection of HTTP/1.1 too.
//! * An error of a connection is logged once as "stream failed", at most ten times a second for
//!   each shard. The connection is counted by its cause: [`BadFrame`](crate::CloseReason::BadFrame)
//!   for what is no HTTP or beyond a bound of a head,
//!   [`ReadTooSlow`](crate::CloseReason::ReadTooSlow) and
//!   [`WriteTooSlow`](crate::CloseReason::WriteTooSlow) for the rates of bodies,
//!   [`HandlerTimeout`](crate::CloseReason::HandlerTimeout) for the times of an answer and a
//!   request, [`HandlerError`](crate::CloseReason::HandlerError) for the service's own errors. A
//!   peer that vanishes, whether in the middle of a request or while it waits, or is silent for too
//!   long, is no failure and shows at debug level. An error that a service returns closes its
//!   connection with HTTP/1.1; with HTTP/2 hyper resets that one stream and says nothing.
//!
//! All [`Limits`](crate::Limits) of a [`Stream`](crate::Stream) hold.
//!
//! # When more is wanted
//!
//! [`Http::serve`] serves a stream with its own service: for one that wants to know its peer, or
//! for streams that are not all HTTP.
//!
//! ```no_run
//! # use std::convert::Infallible;
//! # use ringserve::http::hyper::body::Incoming;
//! # use ringserve::http::hyper::service::service_fn;
//! # use ringserve::http::hyper::{Request, Response};
//! use std::future::ready;
//!
//! use ringserve::http::{Http, HttpOptions};
//! use ringserve::limits::LimitError;
//! use ringserve::{Server, Stream, stream};
//!
//! # fn main() -> Result<(), ringserve::Error> {
//! Server::bind("127.0.0.1:8080").serve(|shard| {
//!     let http = Http::new(shard, &HttpOptions::default())?;
//!     Ok::<_, LimitError>(stream(async move |stream: Stream| {
//!         let peer = stream.peer();
//!         let answer = move |_: Request<Incoming>| ready(Ok::<_, Infallible>(Response::new(peer.to_string())));
//!         http.serve(stream, service_fn(answer)).await
//!     }))
//! })
//! # }
//! ```
//!
//! Below that are [`ShardExecutor`] and [`ShardTimer`], for a builder of hyper's with your own
//! settings; a [`Stream`](crate::Stream) is what such a builder serves, as it implements hyper's
//! `Read` and `Write`. The bounds after the head of a request ([`HttpOptions::response_timeout`],
//! `request`, `body_bytes_per_second_min`, `http2_idle`) are those of [`Http`] alone.

mod access;
#[cfg(feature = "websocket")]
pub(crate) mod connect;
mod connection;
mod detect;
mod host;
mod leaving;
#[cfg(feature = "websocket")]
mod masks;
mod options;
mod rests;
mod runtime;
mod serve;
#[cfg(feature = "websocket")]
pub(crate) mod socket;
mod tunnel;
pub mod upgrade;
mod watch;
mod watched;
#[cfg(feature = "websocket")]
pub(crate) mod websocket;

pub use connection::{Http, HttpError};
pub use hyper;
pub use options::{HttpOptions, HttpVersions};
pub use runtime::{ShardExecutor, ShardTimer, ShardTimerSleep};
pub use serve::{HttpService, http};

pub use crate::client_info::ClientInfo;

/// For [`Admission::shed_reply`](crate::admission::Admission::shed_reply) of a service of HTTP or
/// WebSocket: 503 with `retry-after`, and the end of the connection.
pub const SHED_REPLY: &[u8] =
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 2\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
