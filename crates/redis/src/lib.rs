//! Pipelined requests that ask several shards ([`scatter`]), the protocol of Redis (`resp`), and
//! the fields of a message by their places ([`FrameFields`]). Users depend on `ringserve`, which
//! re-exports this crate.
//!
//! It stands on the public API of the server alone. `scatter/mod.rs` is the place to begin.

#![deny(clippy::disallowed_methods)]
#![deny(clippy::too_many_lines)]
#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(feature = "client")]
pub mod client;
mod parts;
#[cfg(feature = "resp")]
pub mod resp;
pub mod scatter;

pub use parts::{FrameFields, OwnedField, Span};
