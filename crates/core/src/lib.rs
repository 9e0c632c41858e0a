//! The state of one core: connections, framing, outbox, time limits.
//!
//! *A completion goes in, operations come out.* Nothing here calls a kernel, reads a clock (time is
//! an argument) or spawns; it is `no_std` with `alloc`, which proves it.

#![no_std]
#![deny(clippy::disallowed_methods)]
#![deny(clippy::too_many_lines)]

extern crate alloc;
#[cfg(test)]
extern crate std;

// Rooms, each of which uses only those before it: tables, time, bytes and limits, driver and
// framing, proxy, reasons, connection, shard. The test `structure` checks this.
mod bytes;
mod connection;
mod driver;
pub mod framing;
mod limits;
pub mod proxy;
mod reasons;
mod shard;
mod tables;
mod time;

pub use bytes::{Batch, Frame, Outbox};
pub use connection::{
    Account, ConnHead, ConnShared, FrameReader, LaneShared, NoMemoryLeft, Observer, Outlet, Page, PeerWords,
    ReadError, RemoteGate, Reservation, ShardShared, SharedPayload, SocketFacts, Stack, Transport,
    TransportConn, TransportError, TransportEvent, facts_as,
};
pub use driver::{
    AcceptEnd, Address, Budget, CloseHow, Completion, Driver, DriverStats, GivesBack, Op, PeerCredentials,
    ReceiveEnd, SendEnd, Socket, Wait,
};
pub use framing::Payload;
pub use limits::{ConnLimits, IdleActivity, LimitError, Limits, ReadRateAction, ServerLimits};
pub use reasons::{CloseKind, CloseReason, ClosedBy, ConnStats, RefusedBy};
pub use shard::{
    ConnFigure, ConnFigures, ConnState, ConnView, EndedConn, Frames, Lane, Next, ParkOutcome, Quota, Rest,
    Shard, WaitCounts, Whole,
};
pub use tables::{ConnId, LaneId};
pub use time::{AcceptRate, Stamp, Time};

/// Parts that other crates of this workspace use: the server's timers are built on the wheel, the
/// drivers' tables on chunks, and benchmarks measure each one. They change without notice.
#[doc(hidden)]
pub mod internals {
    pub use crate::bytes::OWNED_BYTES_MIN;
    pub use crate::driver::canonical;
    pub use crate::tables::{Chunked, Slots};
    pub use crate::time::{Gcra, SharedGcra, UnitRate, Wheel, step_at};

    /// Names of the reasons, by [`CloseReason::index`](crate::CloseReason::index).
    pub const CLOSE_REASONS: [&str; crate::CloseReason::COUNT] = crate::reasons::NAMES;
}
