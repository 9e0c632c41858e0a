//! The protocol: pure functions over bytes, without a shard or a connection.
// May use: the server's framing and frames. Begin with: `frames.rs`.

pub(crate) mod frames;
pub(crate) mod headers;
pub(crate) mod info;
pub(crate) mod message;
pub(crate) mod outgoing;
pub(crate) mod subject;
