//! TCP servers on io_uring: a shard per core, frames in, replies in batches.
//!
//! Implement [`Service`], say how bytes become frames, and serve:
//!
//! ```no_run
//! use ringserve::{Cx, Frame, Server, Service, framing::Lines, log::LogOptions};
//!
//! struct Echo;
//!
//! impl Service for Echo {
//!     type Session = ();
//!     type Error = std::convert::Infallible;
//!
//!     async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Self::Error> {
//!         cx.reply(frame);
//!         Ok(())
//!     }
//! }
//!
//! fn main() -> Result<(), ringserve::Error> {
//!     ringserve::log::init(LogOptions::default())?; // the log goes to the screen
//!     Server::bind("127.0.0.1:7000").framing(Lines::default()).serve(|_shard| Echo)
//! }
//! ```
//!
//! # What happens
//!
//! Each *shard* is a thread with its own listener, ring, connections and service value; by default
//! each CPU has one. Shards share nothing, so a service keeps its state in `Cell` and `RefCell`.
//!
//! The server's [`framing`] cuts received bytes into *frames*. Each frame is handed to
//! [`Service::call`], one after the other for a connection. A call that never waits runs straight
//! from the completion, without an allocation. A pending call is set aside, and other connections
//! go on.
//!
//! [`Cx::reply`] never waits: it queues, and all replies of a turn of the shard's loop leave in one
//! send. When a peer reads too slowly its next frames are held back, then receiving stops and TCP
//! slows the peer down. A handler that streams awaits [`Cx::ready`]; a [`ConnHandle`] pushes to a
//! connection from any thread, and reports a full outbox.
//!
//! # Framings
//!
//! [`framing`] has lines, delimiters, fixed sizes, lengths of every kind and raw bytes. Your own is
//! a trait with two methods: [a page](guide::framing) of the [guide] writes one, and
//! `examples/custom_framing.rs` is a server with it. With the feature `codec` the module `codec`
//! takes codecs of `tokio_util` as they are.
//!
//! # Waiting and tasks
//!
//! A call may await anything: [`Cx::sleep`], [`Cx::timeout`] around any future, a channel fed by
//! another thread. The next frame of its connection waits until it is done, unless
//! [`Limits::calls_in_flight_max`] allows more at once. [`Cx::spawn`] starts a task that is
//! independent of connections, [`Cx::spawn_on_connection`] one that ends with its connection; the
//! [handle](task::JoinHandle) of a task returns its value, and aborts it. [`Shard::interval`]
//! ticks. With the feature `sync` there are channels and locks in [`sync`].
//!
//! [`ConnHandle`] reaches a connection from any thread; [`LocalHandle`] reaches it on its own shard
//! and costs less. Messages reach state on other shards: [`sync::Mesh`].
//!
//! # Existing protocols
//!
//! With [`stream()`] a factory serves connections as [`Stream`]s of bytes. With the cargo feature
//! `tokio` they are tokio's `AsyncRead` and `AsyncWrite`, so hyper and other protocol crates run on
//! a shard, without a tokio runtime. For crates that spawn, [`Shard::spawn`] is the executor.
//!
//! With the feature `http`, `http(..)` serves HTTP/1.1 and HTTP/2 with a service of hyper's; the
//! module `http` has its bounds and its parts.
//!
//! # Middleware
//!
//! [`middleware`] has structs that wrap a service and are services: a time limit, a bound on the
//! calls in flight, rates by key, counts. With the feature `tower` the module `tower` takes stacks
//! of tower's layers.
//!
//! # Upstreams
//!
//! [`Shard::connect`] connects to another server, over the shard's own driver, in any service, and
//! returns a [`Stream`]. [`net::copy_bidirectional`] copies bytes between two of them, so a proxy
//! is ten lines. [`Stream::framed`] makes a client of frames of it: [a page](guide::upstreams) of
//! the guide has one. With the feature `upstream` the module `upstream` has groups of equal
//! servers: it keeps connections, balances, takes out what fails, and asks again.
//!
//! # Limits
//!
//! [`Limits`] has every limit of a service with its default, its reason and its cost: frame size,
//! bytes held for a connection, time to the first frame, slow senders, silent peers, pending calls,
//! idle time, stalled writes. [`ServerLimits`](limits::ServerLimits) has those of the server:
//! connections, bytes held by a shard, receive memory, upstreams, drain. They are checked against
//! each other at the start. [`net::SocketOptions`] has the options of sockets: keep-alive, user
//! timeout, buffers, backlog, fast open and more, each read back at the start.
//!
//! # The end of a connection
//!
//! Each connection ends with exactly one [`CloseReason`], for [`Service::close`] and the counters
//! of [`stats::ConnStats`]. Its [`closed_by`](CloseReason::closed_by) names the side: the peer, the
//! service, the server, an upstream, the system.
//!
//! # The end of a server
//!
//! [`Server::serve`] handles SIGINT and SIGTERM. After
//! [`ServerLimits::drain_delay`](limits::ServerLimits::drain_delay), 0 by default, the listeners
//! are closed; frames that had arrived whole are answered, no further call begins, and connections
//! are closed when they owe nothing; after
//! [`ServerLimits::drain_timeout`](limits::ServerLimits::drain_timeout) the rest is reset. A second
//! signal stops at once. [`Server::start`] leaves signals alone and returns a [`ServerHandle`] with
//! the addresses, the [`stats`], and the same two ways to stop.
//!
//! # Cargo features
//!
//! All are off by default. A method whose feature is off does not compile, and the error names the
//! feature.
//!
//! | feature | what it adds |
//! |---|---|
//! | `admin` | the module `admin`: a port beside the server with a page, metrics, health and orders, and paths of the program |
//! | `codec` | the module `codec`: services over codecs of `tokio_util` |
//! | `http` | the function and the module `http`: HTTP/1.1 and HTTP/2, by hyper, which is there as `http::hyper` |
//! | `log` | the module `log`: a subscriber of tracing that never holds up a shard; text or JSON |
//! | `metrics` | the module `metrics`: what a server and its program count, as OpenMetrics, by prometheus-client |
//! | `redis` | the module `redis`: a client of Redis, with `resp` and `upstream` |
//! | `resp` | the module `resp`: the protocol of Redis, requests as frames and replies in both versions |
//! | `sync` | in the module [`sync`] channels and locks: tokio's, which need no runtime |
//! | `testing` | the module `testing`: whole servers by seed, in virtual time, for tests |
//! | `tls` | the module `tls`: TLS below any service, by rustls; without cryptography |
//! | `tls-ring`, `tls-graviola`, `tls-aws-lc-rs` | `tls` with that cryptography |
//! | `tokio` | tokio's `AsyncRead` and `AsyncWrite` for [`Stream`], without a runtime |
//! | `tower` | the module `tower`: services of tower |
//! | `upstream` | the module `upstream`: pools of connections to other servers, balancing, health, retries |
//! | `websocket` | the module `websocket`: WebSocket below any service, and the function `ws`: services of whole messages; with `http` too, sockets inside HTTP, and clients |
//! | `websocket-deflate` | messages of it that are compressed |
//! | `runtime-tokio` | `Runtime::Tokio`: shards inside a runtime of tokio's |
//! | `runtime-tokio-uring` | `Runtime::TokioUring`: shards inside a runtime of tokio-uring's, which is there as `tokio_uring` |
//!
//! # Modules
//!
//! | module | contents |
//! |---|---|
//! | the root | the first program: services, the server, its handles, connections, [`Limits`], [`CloseReason`] |
//! | [`admission`] | who is let in: limits on addresses, lists of networks, the rate of new connections, rates by key |
//! | [`guide`] | pages for people who write a server: a first hour, which kind, state, waiting, ends, tests, deployment |
//! | [`factory`] | values that the factory of a server may return |
//! | [`framing`] | bytes to frames, and replies to bytes |
//! | [`listen`] | endpoints of several services |
//! | [`limits`] | limits of the server ([`ServerLimits`](limits::ServerLimits)), errors of limits, usable memory, when a shard counts as stalled |
//! | [`middleware`] | services that wrap services |
//! | [`net`] | addresses, socket options, connections to other servers |
//! | [`scatter`] | pipelined requests whose answers lie on several shards |
//! | [`stats`] | counters and state of a server, stalls of its shards |
//! | [`sync`] | messages between shards, the end of the start, the drain; with the feature `sync` channels and locks |
//! | [`task`] | handles of tasks and of blocking calls |
//! | [`time`] | a shard's clock, intervals, the futures of [`Cx::sleep`] and [`Cx::timeout`] |
//! | [`topics`] | publish and subscribe: topics with history and recovery, filters with wildcards |
//! | [`transport`] | layers between a socket and its framing |
//! | `admin`, `codec`, `http`, `log`, `metrics`, `redis`, `resp`, `testing`, `tls`, `tower`, `upstream`, `websocket` | with the feature of that name |
//!
//! # Limitations
//!
//! Not built in: UDP. It runs on Linux only.

#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(feature = "redis")]
pub use ringserve_redis::client as redis;
#[cfg(feature = "resp")]
pub use ringserve_redis::resp;
pub use ringserve_redis::scatter;
#[cfg(feature = "admin")]
pub use ringserve_server::admin;
#[cfg(feature = "codec")]
pub use ringserve_server::codec;
#[cfg(feature = "http")]
pub use ringserve_server::http;
#[cfg(feature = "metrics")]
pub use ringserve_server::metrics;
#[cfg(feature = "log")]
#[doc(inline)]
pub use ringserve_server::subscriber as log;
#[cfg(feature = "testing")]
pub use ringserve_server::testing;
#[cfg(feature = "tls")]
pub use ringserve_server::tls;
#[cfg(feature = "runtime-tokio-uring")]
pub use ringserve_server::tokio_uring;
#[cfg(feature = "tower")]
pub use ringserve_server::tower;
pub use ringserve_server::{
    CloseCx, CloseReason, ClosedBy, ConnHandle, ConnId, Cx, Driver, Error, Failure, Frame, IntoService,
    Limits, LocalHandle, MultiService, OpenCx, Peer, PushError, Refusal, ReplyWriter, Runtime, Server,
    ServerControl, ServerHandle, Service, Session, SetupError, Shard, SharedPayload, Stream, StreamHandle,
    StreamService, WithHeads, from_future, stream, with_heads,
};
pub use ringserve_server::{
    access_log, admission, doctor, factory, inspect, limits, listen, machine, middleware, net, overload,
    stats, sync, task, time, transport,
};
#[cfg(feature = "websocket")]
pub use ringserve_server::{websocket, ws};
#[doc(inline)]
pub use ringserve_topics as topics;
#[cfg(feature = "upstream")]
#[doc(inline)]
pub use ringserve_upstream as upstream;

pub mod guide;

/// Framings: bytes to frames, and replies to bytes. And the fields of a message by their places.
pub mod framing {
    pub use ringserve_redis::{FrameFields, OwnedField, Span};
    pub use ringserve_server::framing::*;
}

/// The program of the README is one that compiles.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
