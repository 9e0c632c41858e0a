//! The configuration of a server: each setting stands in one struct here, and is read from there.
//!
//! ```text
//!   Server, Endpoints ─▶ ServerConfig     as the program set it
//!                          │ check
//!                          ▼
//!                        CheckedConfig    with what follows from that, and from the defaults
//!                          │ share
//!                          ▼
//!                        SharedConfig     with what the start found: one for all shards
//!                          │ seeds
//!                          ▼
//!                        ShardSeed        what differs by shard, on whose thread it is made
//!                          │ make
//!                          ▼
//!                        ShardLoop
//! ```
//!
//! It uses `listen`, `serves`, `driver` and `runtime` of the server, and rooms below that.
//! `given.rs` is the place to begin.

pub(crate) mod checked;
pub(crate) mod driver_config;
pub(crate) mod given;
pub(crate) mod shared;
