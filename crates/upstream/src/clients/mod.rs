//! What a shard calls.

pub(crate) mod exclusive;
pub(crate) mod relay;
pub(crate) mod request;
