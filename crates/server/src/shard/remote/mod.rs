//! What other threads hold of the shards of a server, beside their inboxes.
//!
//! It uses `wakes`. `control.rs` is the place to begin.

pub(crate) mod control;
pub(crate) mod ending;
