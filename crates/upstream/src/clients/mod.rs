//! Clients that a shard calls.

pub(crate) mod call;
pub(crate) mod connections;
pub(crate) mod exclusive;
mod hedged;
pub(crate) mod multiplexed;
pub(crate) mod pipelined;
pub(crate) mod pooled;
pub(crate) mod relay;
pub(crate) mod request;
mod shared;
