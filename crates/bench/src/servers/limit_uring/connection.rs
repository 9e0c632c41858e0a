//! The loop's state of one connection.

use std::collections::VecDeque;

/// Received bytes that have to be sent back.
#[derive(Clone, Copy)]
pub(super) struct Chunk {
    /// The buffer that holds them.
    pub(super) buffer: u16,
    /// Their start in the buffer.
    pub(super) start: u16,
    /// Their number, 16 KiB at most.
    pub(super) len: u16,
}

/// A connection. It has no generation: its slot is freed only after its last completion.
#[derive(Default)]
pub(super) struct Connection {
    /// The turn in which its latest send was queued. That send is over when the turn has ended.
    pub(super) turn: u64,
    /// True exactly while a multishot receive is with the kernel.
    pub(super) armed: bool,
    /// True once nothing more will be received.
    pub(super) ended: bool,
    /// True once sending failed: queued bytes are dropped.
    pub(super) broken: bool,
    /// True while in `Loop::parked`.
    pub(super) parked: bool,
    /// Present exactly when the connection needs more than one send at a time.
    pub(super) slow: Option<Box<Slow>>,
}

/// State of a connection whose bytes arrive faster than they are sent.
#[derive(Default)]
pub(super) struct Slow {
    /// Bytes to be sent after the send in flight.
    pub(super) queue: VecDeque<Chunk>,
    /// The rest of a send, in flight.
    pub(super) tail: Option<Chunk>,
    /// True from the request to cancel the receive to its last completion.
    pub(super) cancelling: bool,
    /// Result of a first try that did not send everything, until its turn is settled.
    pub(super) short: Option<i32>,
}
