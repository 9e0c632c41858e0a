//! Tables of a shard, by slot: connections, what belongs to some of them, and which ones hold
//! memory.
// May use: no other room.
// Begin with: `slots.rs`, which gives out the ids of connections.

mod chunked;
mod holders;
mod id;
mod slots;

pub use chunked::Chunked;
pub(crate) use holders::{Holders, LISTED_BYTES, ReturnedItem, RoomOf, class_of};
pub use id::{ConnId, LaneId};
pub use slots::Slots;
