//! Looking at single connections of a server that runs: those with the largest outboxes, those that
//! are silent, the calls that wait for longest.
//!
//! Nothing is kept for it: each shard goes through its table when it is asked, 4096 slots in a
//! turn, and keeps the first [`limit`](Query::limit). A million connections are 250 turns, between
//! which everything else goes on.
//!
//! ```
//! use ringserve::ServerControl;
//! use ringserve::inspect::{By, Query};
//!
//! fn print_slow_readers(server: &ServerControl) {
//!     let inspection = server.inspect(Query::connections().by(By::Outbox).limit(20));
//!     for conn in &inspection.connections {
//!         println!("{} of {}: {} bytes wait, idle for {:?}", conn.id, conn.service, conn.outbox_bytes, conn.idle);
//!     }
//!     for shard in &inspection.silent_shards {
//!         println!("shard {shard} does not answer: a handler blocks it, or it ended");
//!     }
//! }
//! ```
//!
//! The figures are those of the moment at which a connection's shard answered. A connection that
//! ends meanwhile is left out, and none is there twice; one that begins meanwhile may be left out.
//! So there may be fewer than the limit, and more next time.

mod asked;
mod query;
mod walk;

pub use ringserve_core::ConnState;

pub use asked::Inspecting;
pub use query::{By, ConnInfo, Inspection, InspectionSums, Query};
pub(crate) use walk::Walk;
