//! TLS below the services of [ringserve](https://docs.rs/ringserve), by rustls.
//!
//! A listener has a [`Tls`] with its certificates; each of its connections is a channel of
//! `ringserve-core`: ciphertext in, plaintext out, and back. It calls no kernel and starts no
//! thread.
//!
//! ```text
//!   Tls ── TlsListener::new: checked ──▶ TlsListener ── transport(): one per shard ──▶ TlsTransport ── begin ──▶ channel
//! ```
//!
//! Not supported: early data of TLS 1.3 (0-RTT), which can be replayed; TLS in the kernel (kTLS);
//! versions before 1.2; renegotiation. Receive buffers hold plaintext until they are used again.

#![deny(clippy::too_many_lines)]

mod channel;
mod client;
mod clients;
mod config;
mod connection;
mod error;
mod info;
mod key_log;
mod listener;
mod names;
mod pem;
mod provider;
mod records;
mod server;
mod stable;
mod tickets;
mod version;

pub use client::{TlsClient, TlsClientTransport};
pub use clients::Clients;
pub use config::Tls;
pub use error::TlsError;
pub use info::{Identity, TlsInfo};
pub use listener::{TlsListener, TlsTransport};
pub use pem::Pem;
pub use server::{CertificateExpiry, ServerTls};
pub use tickets::Tickets;

pub use rustls;
