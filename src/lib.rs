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
//! # How it works
//!
//! A *shard* is a thread with its own listener, ring, connections and service value; by default
//! each CPU has one. Shards share nothing, so a service keeps its state in `Cell` and `RefCell`.
//!
//! A [`framing`] cuts received bytes into *frames*. [`Service::call`] gets them one after the
//! other, and may await anything: the next frame of its connection waits, other connections go on.
//!
//! [`Cx::reply`] never waits: it queues, and all replies of a turn of the shard's loop leave in one
//! send. When a peer reads too slowly, its next frames are held back, then receiving stops and TCP
//! slows the peer down.
//!
//! [`Limits`] bounds every connection: frames, memory, times. Each connection ends with exactly one
//! [`CloseReason`]. SIGINT and SIGTERM drain the server: what arrived whole is answered first.
//!
//! # Where to begin
//!
//! [The guide](guide) has pages for people who write a server: [a first hour](guide::first_hour),
//! [which kind of service](guide::choosing), [your own framing](guide::framing),
//! [waiting and tasks](guide::waiting), [the end of a server](guide::stopping). The folder
//! `examples` has whole programs.
//!
//! # Modules
//!
//! Fourteen names are at the root: those of the first program, [`Limits`], and the handles and
//! errors that most programs meet. Everything else is in the module of its subject.
//! A module with a star needs the cargo feature of its name.
//!
//! **Write a service**
//!
//! | | |
//! |---|---|
//! | [`service`] | how connections open, close and fail; kinds of services |
//! | [`framing`] | bytes to frames, and replies to bytes (`ReplyWriter`) |
//! | [`handle`] | connections reached from outside of their calls (`LocalHandle`, `PushError`) |
//! | [`task`], [`time`] | tasks, blocking calls, timers |
//! | [`sync`], [`scatter`] | messages between shards; requests over several shards |
//! | [`net`] | addresses, connections to other servers, copying between streams |
//! | [`middleware`] | services that wrap services |
//!
//! **Configure a server**
//!
//! | | |
//! |---|---|
//! | [`server`] | the driver, the runtime, several services |
//! | [`factory`] | what makes the service of a shard |
//! | [`limits`] | limits of the whole server, usable memory |
//! | [`listen`], [`transport`], `tls`\* | endpoints; layers below the framing |
//! | [`admission`] | who is let in: networks, rates, shares |
//! | [`overload`] | what happens with more work than it can do |
//!
//! **Protocols**
//!
//! | | |
//! |---|---|
//! | `http`\*, `websocket`\* | HTTP/1.1, HTTP/2 by hyper; WebSocket |
//! | `resp`\*, `redis`\* | the protocol of Redis for servers; a client |
//! | [`topics`] | publish and subscribe, with history |
//! | `upstream`\* | pools of connections, balancing, health, retries |
//! | `codec`, `tower`\* | codecs of tokio-util (feature `tokio`), services of tower |
//!
//! **Operate and test**
//!
//! | | |
//! |---|---|
//! | [`stats`], `metrics`\* | counters; the same as OpenMetrics |
//! | `log`\*, [`access_log`] | the log; a line for each connection |
//! | `admin`\*, [`inspect`] | a page, health and orders; single connections |
//! | [`doctor`], [`machine`] | what of the machine stands in the way |
//! | `testing`\* | whole servers by seed, in virtual time |
//!
//! # Cargo features
//!
//! All are off by default. A method whose feature is off does not compile, and the error names the
//! feature. In addition to those of modules:
//!
//! | | |
//! |---|---|
//! | `dns` | backends of `upstream` by DNS: TTLs and SRV records |
//! | `tls-ring`, `tls-graviola`, `tls-aws-lc-rs` | `tls` with that cryptography |
//! | `tokio` | [`Stream`] as tokio's `AsyncRead` and `AsyncWrite`; its channels in [`sync`]; the module `codec` |
//! | `websocket-deflate` | compressed messages |
//! | `runtime-tokio`, `runtime-tokio-uring` | shards inside a runtime of tokio's or tokio-uring's |
//!
//! It runs on Linux only. UDP is not built in.

#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(feature = "redis")]
pub use ringserve_redis::client as redis;
#[cfg(feature = "resp")]
pub use ringserve_redis::resp;
pub use ringserve_redis::scatter;
#[cfg(feature = "admin")]
pub use ringserve_server::admin;
#[doc(inline)]
pub use ringserve_server::admission;
#[cfg(feature = "tokio")]
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
    CloseReason, ConnHandle, Cx, Error, Frame, Limits, Peer, Server, ServerControl, ServerHandle, Service,
    Shard, Stream, stream,
};
pub use ringserve_server::{
    access_log, doctor, inspect, limits, listen, machine, middleware, net, overload, stats, sync, task, time,
    transport,
};
#[cfg(feature = "websocket")]
pub use ringserve_server::{websocket, ws};
#[doc(inline)]
pub use ringserve_topics as topics;
#[cfg(feature = "upstream")]
#[doc(inline)]
pub use ringserve_upstream as upstream;

pub mod guide;

/// The parts of a [`Service`]: how connections open, close and fail, and services of streams.
pub mod service {
    pub use ringserve_server::{
        CloseCx, CloseKind, ClosedBy, Failure, HeldReplies, IntoService, OpenCx, Refusal, Session,
        StreamService, WithHeads, with_heads,
    };
}

/// Handles of connections, in addition to [`ConnHandle`]: on their shard, and of streams.
pub mod handle {
    pub use ringserve_server::{ConnId, LocalHandle, PushError, StreamHandle};
}

/// Choices of a [`Server`] that are types: its driver, the runtime of its shards, several services.
pub mod server {
    pub use ringserve_server::{Driver, MultiService, Runtime, SetupError};
}

/// Values that the factory of a server may return: a service, or a future that makes one.
pub mod factory {
    pub use ringserve_server::factory::*;
    pub use ringserve_server::from_future;
}

/// Framings: bytes to frames, and replies to bytes. And the fields of a message by their places.
pub mod framing {
    pub use ringserve_redis::{FrameFields, OwnedField, Span};
    pub use ringserve_server::framing::*;
    pub use ringserve_server::{ReplyWriter, SharedPayload};
}

/// The program of the README is one that compiles.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
