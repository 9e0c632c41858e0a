//! The parts of a working shard.
//!
//! It uses `face`, `tasks`, `remote` and `wakes`. `shard_loop.rs` is the place to begin.

pub(crate) mod give_way;
pub(crate) mod many;
pub(crate) mod meter;
pub(crate) mod services;
pub(crate) mod shard_loop;
pub(crate) mod spare;
pub(crate) mod upstreams;
