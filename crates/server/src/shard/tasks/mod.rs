//! Tasks of a shard, and what they wait for.
//!
//! It uses `wakes` and `remote`. `spawned.rs` is the place to begin.

pub(crate) mod attempts;
pub(crate) mod draining;
pub(crate) mod ends;
pub(crate) mod join;
pub(crate) mod records;
pub(crate) mod session;
pub(crate) mod spawned;
pub(crate) mod started;
pub(crate) mod task;
