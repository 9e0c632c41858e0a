//! The reverse proxy: a service of HTTP whose requests go where routes say.
//!
//! May use everything of this crate. Begin with `handling.rs`, whose steps are in the order in
//! which a request takes them.

pub(crate) mod answers;
pub(crate) mod body;
pub(crate) mod gateway;
mod handling;
mod outgoing;
mod questions;
mod shard_routes;
mod state;
mod tunnel;
