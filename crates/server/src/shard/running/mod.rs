//! The life of a shard: its start, its turns, and the ends that each turn gives back.
//!
//! It uses all other rooms of a shard, and none uses it. `turns.rs` is the place to begin.

pub(crate) mod beginning;
pub(crate) mod events;
pub(crate) mod give_back;
#[cfg(feature = "runtime-tokio")]
pub(crate) mod hosted;
pub(crate) mod starting;
#[cfg(feature = "testing")]
pub(crate) mod stepped;
pub(crate) mod turns;
