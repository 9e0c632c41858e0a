//! A [NATS](https://nats.io) client for services of [ringserve](https://docs.rs/ringserve): the
//! core protocol, on the connections of a shard.
//!
//! ```no_run
//! use std::time::Duration;
//!
//! use ringserve::framing::Lines;
//! use ringserve::{Cx, Frame, Server, Service};
//! use ringserve_nats::{Nats, NatsOptions};
//!
//! struct Front {
//!     nats: Nats,
//! }
//!
//! impl Service for Front {
//!     type Session = ();
//!     type Error = Box<dyn std::error::Error>;
//!
//!     async fn call(&self, cx: &Cx<'_, ()>, line: Frame) -> Result<(), Self::Error> {
//!         self.nats.publish("lines", &line)?;
//!         let answer = cx.timeout(Duration::from_secs(1), self.nats.request("users.get", &line)).await??;
//!         cx.reply(answer.payload());
//!         Ok(())
//!     }
//! }
//!
//! fn main() -> Result<(), ringserve::Error> {
//!     Server::bind("127.0.0.1:7000")
//!         .framing(Lines::default())
//!         .serve(|shard| Front { nats: Nats::connect(shard, NatsOptions::new("nats.internal:4222")) })
//! }
//! ```
//!
//! # What it promises
//!
//! Core NATS delivers a message at most once. A [`Nats`] reports what may be missing:
//!
//! | what happens | what is reported |
//! |---|---|
//! | a connection is lost | each [`Subscription`] yields [`Event::Gap`] in the place of what may be missing |
//! | a server does not take what was kept for it | [`NatsStats::too_large`], [`NatsStats::no_headers`] |
//! | a subscription is read too slowly | the oldest messages go, and [`Subscription::missed`] counts them |
//! | a connection is lost under a request | [`NatsError::Disconnected`]; a request is never sent twice |
//! | no service listens to a request | [`NatsError::NoResponders`], at once |
//! | too much waits to be sent | [`NatsError::Full`] |
//!
//! Messages published on a connection that is lost may be lost with it, and are neither reported
//! nor counted: also those that waited to be sent. [`Nats::flush`] returns once the server has
//! taken them.
//!
//! # What it does not do
//!
//! TLS begins with the first byte ([`NatsOptions::tls`], `handshake_first` in the server's
//! configuration), not after INFO. JetStream is reached by requests to its subjects; its consumers
//! are not here.
//!
//! | room | holds | may not |
//! |---|---|---|
//! | `protocol` | bytes to messages and back, as pure functions | know a shard, a connection |
//! | `error`, `options`, `nkeys`, `servers` | what a program says, and which server is next | wait |
//! | `queue`, `state` | what the handles and the task share | wait |
//! | `subscription`, `client` | what users call | read from a connection |
//! | `connection` | the task that connects, reads and connects again | know users' handles |

#![deny(clippy::disallowed_methods)]
#![deny(clippy::too_many_lines)]
#![cfg_attr(docsrs, feature(doc_cfg))]

/// The programs of the guide's page.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/guide/nats.md")]
struct Guide;

mod client;
mod connection;
mod error;
#[cfg(feature = "nkeys")]
mod nkeys;
mod options;
mod protocol;
mod queue;
mod servers;
mod state;
mod subscription;

pub use client::{Connected, Nats};
pub use error::NatsError;
#[cfg(feature = "nkeys")]
pub use nkeys::KeyError;
pub use options::NatsOptions;
pub use protocol::headers::{Headers, Status};
pub use protocol::message::Message;
pub use protocol::outgoing::Outgoing;
pub use queue::Event;
pub use state::NatsStats;
pub use subscription::Subscription;
