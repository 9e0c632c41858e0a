//! Why connections end, why newcomers are refused, and how many of each there were.
// May use: framing, proxy.
// Begin with: `reason.rs`.

mod counters;
mod reason;
mod refused;

pub use counters::ConnStats;
pub(crate) use reason::NAMES;
pub use reason::{CloseKind, CloseReason, ClosedBy};
pub use refused::RefusedBy;
