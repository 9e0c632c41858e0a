//! The state that other threads hold of a server's shards, in addition to their inboxes.
//!
//! It uses `wakes`. `control.rs` is the place to begin.

pub(crate) mod control;
pub(crate) mod ending;
