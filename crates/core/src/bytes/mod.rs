//! Frames, and outgoing bytes: batches of replies and how they are assembled.
// May use: tables, time.
// Begin with: `batch.rs`, which is what a send takes.

mod batch;
mod frame;
mod in_place;
mod outbox;

pub use batch::Batch;
#[cfg(test)]
pub(crate) use batch::HELD_BYTES_MAX;
pub(crate) use batch::{EarlyLooks, KEPT_BYTES_MAX};
pub use frame::Frame;
pub use in_place::{InPlace, WriteResult};
pub(crate) use outbox::LEND_BYTES_MIN;
pub use outbox::{OWNED_BYTES_MIN, Outbox, Payload};
