//! Clock, chance, CPUs, memory, lines of a log, and facts of the machine and of a peer, for the
//! crates of a server. Users depend on `ringserve`, which re-exports what is public for them.
//!
//! It knows no shard and no server, and uses `ringserve-core` and `ringserve-drivers` alone. What
//! is hidden from its documentation is for the crates of this workspace, and changes without
//! notice. `clock.rs` is the place to begin.

#![deny(clippy::disallowed_methods)]
#![deny(clippy::too_many_lines)]

#[doc(hidden)]
pub mod clock;
#[doc(hidden)]
pub mod cpu;
pub mod doctor;
#[doc(hidden)]
pub mod guard;
#[doc(hidden)]
pub mod lines;
#[doc(hidden)]
pub mod log_thread;
#[doc(alias = "host")]
pub mod machine;
pub mod memory;
pub mod peer;
#[doc(hidden)]
pub mod random;
#[doc(hidden)]
pub mod thread_times;
