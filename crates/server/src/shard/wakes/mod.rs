//! Wake-ups of a shard, and the waits on it for a time or an event.
//!
//! It knows no task and no service. `wake.rs` is the place to begin.

pub(crate) mod awaited;
pub(crate) mod flag;
pub(crate) mod inbox;
pub(crate) mod notice;
pub(crate) mod sync;
pub(crate) mod timers;
pub(crate) mod wake;
