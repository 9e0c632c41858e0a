//! A gateway on [ringserve](https://docs.rs/ringserve): a reverse proxy of HTTP as a service, the
//! client below it, and a program that reads a file.
//!
//! ```text
//!   client ── http(Gateway) ── which route? ── may it? ── fields ──▶ HttpClient ── a pooled connection ──▶ backend
//!                │   ▲             RouteTable                            │  tries again what was not heard
//!                │   └── streamed, with back-pressure both ways ◀────────┘
//!                └─ 101: both connections become one tunnel
//! ```
//!
//! [`Gateway`] is a service of hyper's for [`http`](ringserve_server::http()). Its [`Routes`] are
//! shared by all shards and can be replaced while it serves. Upstreams are [`HttpUpstream`]s:
//! groups of servers with balancing, checks, ejection and a budget of retries, of
//! `ringserve-upstream`. [`HttpClient`] is the client alone, for services that ask others.
//!
//! # What is passed on
//!
//! * The path has one form: `.` and `..` are resolved, also as `%2e`, and a path with `%2f`, `%5c`,
//!   `%00`, a backslash or `//` gets 400, unless its route takes [raw paths](Route::raw_paths).
//!   What is matched is what is sent.
//! * Fields of a connection end here, both ways, with those that `connection` names (RFC 9110,
//!   7.6.1). What the gateway says itself is added after that. A body has one framing, which the
//!   gateway chooses; a transfer coding other than `chunked` gets 501.
//! * Who the client is stands in [`x-forwarded-*` or `forwarded`](ForwardedFields), and what
//!   clients say of it is removed unless they are [trusted](Gateway::trusted).
//! * Trailers pass where both sides take them. Interim answers (102, 103) are dropped: hyper's
//!   server cannot send them.
//! * A request that was not heard is sent elsewhere; one that may have been heard only if it may be
//!   asked twice.
//! * After the head of an answer an error resets the client's connection: a part never looks like
//!   the whole.
//!
//! Requests of clients are HTTP/1.1 and HTTP/2. Upstreams are asked by HTTP/1.1, or by HTTP/2 where
//! [`HttpUpstream::protocol`] says so, which gRPC needs.
//!
//! # Rooms
//!
//! | room | holds | may not |
//! |---|---|---|
//! | `fields` | fields of messages, pure | know routes, connections |
//! | `target` | an upstream of HTTP | |
//! | `table` | routes, pure; what all shards share | wait, or know a connection |
//! | `client` | requests and answers over pooled connections | know routes |
//! | `proxy` | the service | |
//! | `config` | the file, and a server of it; feature `bin` | |

#![deny(clippy::disallowed_methods)]
#![deny(clippy::too_many_lines)]
#![cfg_attr(docsrs, feature(doc_cfg))]

mod client;
#[cfg(feature = "bin")]
pub mod config;
mod fields;
mod proxy;
mod table;
mod target;

/// The programs of the guide's page.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/guide/gateway.md")]
struct Guide;

pub use client::body::UpstreamBody;
pub use client::exchange::{ClientError, HttpClient};
pub use fields::edit::{FieldEdits, FieldError};
pub use fields::forwarded::ForwardedFields;
pub use proxy::answers::Refusal;
pub use proxy::body::GatewayBody;
pub use proxy::gateway::Gateway;
pub use table::access::RateKey;
pub use table::pattern::PatternError;
pub use table::route::{Route, RouteTimeouts};
pub use table::routes::{RouteError, RouteTable, Routes};
pub use target::{HttpUpstream, UpstreamProtocol};
