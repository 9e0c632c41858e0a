//! Messages and questions between shards, and requests of other threads that a shard carries out.
//!
//! It uses `calls`, `state` and what those use. `mesh.rs` is the place to begin.

pub(crate) mod asks;
pub(crate) mod commands;
pub(crate) mod mailbox;
pub(crate) mod mesh;
pub(crate) mod passing;
