//! The client of HTTP of a shard: pooled connections, requests that are sent again, bodies that
//! give their connection back.
//!
//! May use `target`, and of other crates hyper's `client::conn` and the pools of
//! `ringserve-upstream`; knows no route. Begin with `exchange.rs`.

pub(crate) mod body;
pub(crate) mod connection;
pub(crate) mod exchange;
pub(crate) mod http;
mod http2;
mod news;
mod pace;
pub(crate) mod request_body;
