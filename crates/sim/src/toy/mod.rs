//! A transport without any secrecy, for tests of the layers between a socket and the framing:
//! records of a few bytes, a handshake of two flights each way, a step that needs a permit, updates
//! of keys, marks of ends and faults.
//!
//! ```text
//!   client                           server
//!     Hello, its name    ─────────▶
//!                        ◀─────────  Reply          after a permit, if the plan says so
//!     Proof, first Data  ─────────▶                 Ready
//!                        ◀─────────  Welcome        the same
//!     Data, Update ..    ◀────────▶  Data, Update ..
//!     Close              ◀────────▶  Close
//! ```
//!
//! Both ends are a [`TransportConn`](ringserve_core::TransportConn), so the client half serves the
//! peers of a simulation ([`PeerStream`]) and connections to upstreams.

mod channel;
mod client;
mod records;
#[cfg(test)]
mod tests;

pub use channel::{Alive, Facts, Permits, Toy};
pub use client::{PeerStream, Pieces};
pub use records::{BODY_BYTES_MAX, HEADER_BYTES};
