//! What all rooms stand on: the clock, chance, CPUs, memory and lines of a log.
//!
//! It knows no shard and no server, and uses `core`, `drivers` and `host` alone.
//! `clock.rs` is the place to begin.

pub(crate) mod clock;
pub(crate) mod cpu;
pub(crate) mod lines;
pub(crate) mod memory;
pub(crate) mod random;
pub(crate) mod thread_times;
