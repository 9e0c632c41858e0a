//! WebSocket (RFC 6455) below the services of [ringserve](https://docs.rs/ringserve).
//!
//! A listener has [`WebSocketOptions`]; each of its connections is a channel of `ringserve-core`:
//! the peer's bytes go in, the payloads of its messages come out, and back. It calls no kernel and
//! reads no clock.
//!
//! ```text
//!   the request ── upgrade::read ──▶ Upgrade ── WebSocketOptions::upgrade ──▶ Accept or Reject
//!   frames ── frame::Header ── mask ── utf8 ──▶ payloads, with marks for Messages
//! ```
//!
//! Two kinds of services use it. A service of bytes, whatever its framing, sees no messages: the
//! payloads are a stream ([`WebSocketTransport::stream`]). A service of whole messages has the
//! framing [`Messages`], and one of lines [`TextLines`] ([`WebSocketTransport::messages`]).
//!
//! A client begins with a [`ClientRequest`], and reads the server's messages by
//! [`reader::Reader::of_server`]. Not here: the bytes of WebSocket over HTTP/2 (RFC 8441).

#![deny(clippy::too_many_lines)]

mod channel;
pub mod client;
pub mod close;
mod code;
#[cfg(feature = "deflate")]
mod deflate;
mod extension;
mod fragments;
pub mod frame;
pub mod in_http;
mod info;
pub mod mask;
mod messages;
mod options;
pub mod reader;
mod text_lines;
pub mod upgrade;
pub mod utf8;

pub use channel::WebSocketTransport;
pub use client::{ClientRequest, HandshakeError};
#[cfg(feature = "deflate")]
pub use deflate::{Deflate, PerMessageDeflate};
pub use extension::{Extension, InflateError};
pub use info::WebSocketInfo;
pub use messages::{Kind, MARK_BYTES, Messages};
pub use options::WebSocketOptions;
pub use text_lines::TextLines;
pub use upgrade::{Accept, Reject, Upgrade};
