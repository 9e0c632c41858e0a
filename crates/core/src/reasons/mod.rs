//! Reasons why connections end, causes why new ones are refused, and the count of each.
// May use: framing, proxy.
// Begin with: `reason.rs`.

mod counters;
mod reason;
mod refused;

pub use counters::ConnStats;
pub(crate) use reason::NAMES;
pub use reason::{CloseKind, CloseReason, ClosedBy};
pub use refused::RefusedBy;
