//! Connections as streams of bytes.
//!
//! A stream is a [`Service`](crate::Service) over the [`Raw`](crate::framing::Raw) framing:
//!
//! ```text
//!   frame ──▶ call: leaves it in the session ──▶ polls the connection's task, if that waits to read
//!                   │                              └─ reads, queues, waits again: all in the completion
//!                   └─ waits as long as bytes are left: then the core holds back, and pauses, as for any service
//! ```
//!
//! So at most one frame is outside of the core, the task of a reader that keeps up costs no waker
//! and no turn, and all limits apply.

pub(crate) mod byte_stream;
pub(crate) mod connecting;
pub(crate) mod copy;
#[cfg(feature = "http")]
pub(crate) mod fate;
pub(crate) mod framed;
pub(crate) mod halves;
#[cfg(any(feature = "http", feature = "tokio"))]
mod io_traits;
pub(crate) mod local_failure;
pub(crate) mod proxy_header;
pub(crate) mod service;
