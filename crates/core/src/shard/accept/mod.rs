//! Newcomers: which listeners accept, who waits for a place, and connections that begin with a header or a handshake.
// May use: channels, lanes, timers, turn.
// Begin with: `arrivals.rs`.

mod arrivals;
mod headers;
mod listeners;
mod starts;

pub(super) use listeners::Accepting;
pub use listeners::Quota;
