//! The state of one core: connections, framing, outbox, time limits.
//!
//! *A completion goes in, operations come out.* Nothing here calls a kernel, reads a clock (time is an
//! argument) or spawns; it is `no_std` with `alloc`, which proves it.

#![no_std]
#![deny(clippy::disallowed_methods)]

extern crate alloc;
#[cfg(test)]
extern crate std;

mod account;
mod address;
mod batch;
mod chunked;
mod conn;
mod counters;
mod cut;
mod deadlines;
mod driver;
mod frame;
mod frame_reader;
pub mod framing;
mod holders;
mod id;
mod in_place;
mod inbox;
mod limits;
mod line;
mod observer;
mod outbox;
mod outlet;
pub mod proxy;
mod rate;
mod read_rate;
mod reason;
mod refused;
mod remote_gate;
mod reservation;
mod shard;
mod shared;
mod shared_payload;
mod slots;
mod stack;
mod stamp;
mod time;
mod times;
mod transport;
mod wheel;

pub use account::Account;
pub use address::Address;
pub use batch::Batch;
pub use counters::ConnStats;
pub use driver::{
    AcceptEnd, Budget, CloseHow, Completion, Driver, DriverStats, GivesBack, Op, PeerCredentials, ReceiveEnd,
    SendEnd, Socket, Wait,
};
pub use frame::Frame;
pub use frame_reader::{FrameReader, ReadError};
pub use framing::Payload;
pub use id::{ConnId, LaneId};
pub use limits::{ConnLimits, IdleCounts, LimitError, Limits, ServerLimits, WhenTooFast};
pub use observer::Observer;
pub use outbox::Outbox;
pub use outlet::{Asked, ConnHead, ConnShared, Outlet, PeerWords};
pub use rate::AcceptRate;
pub use reason::{CloseReason, ClosedBy};
pub use refused::RefusedBy;
pub use remote_gate::RemoteGate;
pub use reservation::{NoMemoryLeft, Reservation};
pub use shard::{
    ConnFigure, ConnFigures, ConnState, ConnView, Ended, Frames, Lane, Next, Parked, Quota, Rest, Shard,
    Whole,
};
pub use shared::{LaneShared, ShardShared};
pub use shared_payload::SharedPayload;
pub use stack::{Stack, facts_as};
pub use stamp::Stamp;
pub use time::Time;
pub use transport::{Channel, Fault, Transport, Unsealed};

/// Parts that other crates of this workspace take: the server's timers stand on the wheel, the
/// drivers' tables on chunks, benchmarks measure each one. They
/// change without notice.
#[doc(hidden)]
pub mod internals {
    pub use crate::address::canonical;
    pub use crate::chunked::Chunked;
    pub use crate::outbox::OWNED_BYTES_MIN;
    pub use crate::rate::{Gcra, SharedGcra, UnitRate};
    pub use crate::slots::Slots;
    pub use crate::wheel::{Wheel, step_at};

    /// By [`CloseReason::index`](crate::CloseReason::index).
    pub const CLOSE_REASONS: [&str; crate::CloseReason::COUNT] = crate::reason::NAMES;
}
