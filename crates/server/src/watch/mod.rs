//! The view of shards from other threads: where they are, their stalls, times and loads, and the
//! alarm that shards set.
//!
//! It uses `base`, `stats` and `overload`. The watchdog, which writes most of it, and the
//! shards are above. `board.rs` is the place to begin.

pub(crate) mod accept_queue;
pub(crate) mod alarm;
pub(crate) mod board;
pub(crate) mod loads;
pub(crate) mod options;
pub(crate) mod state;
pub(crate) mod times;
