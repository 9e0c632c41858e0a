//! Questions about connections, and their answers.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use ringserve_core::{ConnFigure, ConnId, ConnState};

/// The most connections that an inspection returns.
const LIMIT_MAX: usize = 1000;

/// The connections that a [`Query`] without a [`limit`](Query::limit) returns.
const LIMIT: usize = 20;

/// The time for which `ServerControl::inspect` waits for shards. A shard with a million connections
/// that takes a millisecond a turn needs a quarter of it.
const WITHIN: Duration = Duration::from_secs(1);

/// The order of connections in an [`Inspection`]: those with most come first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum By {
    /// Bytes that wait for the peer: queued, or with the kernel.
    Outbox,
    /// Time since bytes came or a call was done.
    Idle,
    /// Bytes received, where an [account](ConnInfo::bytes_in) is kept.
    BytesIn,
    /// Time since the connection was accepted.
    Age,
    /// Time for which the oldest of its calls waits.
    OldestCall,
}

impl By {
    pub(super) fn figure(self) -> ConnFigure {
        match self {
            By::Outbox => ConnFigure::Outbox,
            By::Idle => ConnFigure::Idle,
            By::BytesIn => ConnFigure::BytesIn,
            By::Age => ConnFigure::Age,
            By::OldestCall => ConnFigure::OldestCall,
        }
    }

    pub(super) fn of(self, conn: &ConnInfo) -> u128 {
        match self {
            By::Outbox => conn.outbox_bytes as u128,
            By::Idle => conn.idle.as_nanos(),
            By::BytesIn => conn.bytes_in.unwrap_or(0).into(),
            By::Age => conn.age.as_nanos(),
            By::OldestCall => conn.oldest_call.unwrap_or_default().as_nanos(),
        }
    }
}

/// The connections that are asked for.
#[derive(Clone, Debug)]
#[must_use = "a query asks nothing until it is given to ServerControl::inspect"]
pub struct Query {
    pub(super) by: By,
    pub(super) calling: bool,
    pub(super) limit: usize,
    pub(crate) within: Duration,
    pub(super) page: u32,
}

/// Slots that a shard looks at in a turn.
const PAGE: u32 = 4096;

impl Query {
    /// All connections, those to upstreams included; by their [outboxes](By::Outbox), if nothing
    /// else is said.
    pub fn connections() -> Query {
        Query { by: By::Outbox, calling: false, limit: LIMIT, within: WITHIN, page: PAGE }
    }

    /// Those with calls that wait, or whose `open` does; the [one that waits for
    /// longest](By::OldestCall) first, if nothing else is said.
    pub fn calls_waiting() -> Query {
        Query { by: By::OldestCall, calling: true, ..Query::connections() }
    }

    /// Sets the order.
    pub fn by(self, by: By) -> Query {
        Query { by, ..self }
    }

    /// Sets how many connections of the whole server are wanted, 1 to 1000; what is outside of that
    /// becomes the nearer of them. 20 by default. Each shard keeps that many entries of 24 bytes
    /// while it looks, and answers with that many at most.
    pub fn limit(self, limit: usize) -> Query {
        Query { limit: limit.clamp(1, LIMIT_MAX), ..self }
    }

    /// Sets how long [`ServerControl::inspect`](crate::ServerControl::inspect) waits for shards
    /// that do not answer. One second by default.
    pub fn within(self, within: Duration) -> Query {
        Query { within, ..self }
    }

    /// Sets how many slots a shard looks at in a turn. For simulations, whose tables are small.
    #[doc(hidden)]
    pub fn page(self, slots: u32) -> Query {
        Query { page: slots.clamp(1, PAGE), ..self }
    }
}

/// A connection as its shard saw it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ConnInfo {
    /// Its id, unique on its shard.
    pub id: ConnId,
    /// The [index](crate::Shard::index) of its shard.
    pub shard: usize,
    /// The [name](crate::stats::ServiceStats::name) of its service; `upstream` for a connection
    /// that the server made.
    pub service: Arc<str>,
    /// The number of its listener ([`ServerHandle::listeners`](crate::ServerHandle::listeners));
    /// `None` for a connection that the server made.
    pub listener: Option<usize>,
    /// The peer's address, as [`Peer::addr`](crate::Peer::addr).
    pub peer: Option<SocketAddr>,
    /// Since it was accepted, to 17 ms.
    pub age: Duration,
    /// Since bytes came or a call was done, to 17 ms.
    pub idle: Duration,
    /// Bytes that wait for the peer: queued, or with the kernel.
    pub outbox_bytes: usize,
    /// Bytes received. `None` unless an account of the connection is kept:
    /// [`Service::ACCOUNTS`](crate::Service::ACCOUNTS),
    /// [`Server::accounts`](crate::Server::accounts) and an [access log](crate::Server::access_log)
    /// keep one.
    pub bytes_in: Option<u64>,
    /// Bytes that the kernel took, where an account is kept.
    pub bytes_out: Option<u64>,
    /// Frames that were handed to the service, where an account is kept.
    pub frames_in: Option<u64>,
    /// Frames that were queued, where an account is kept.
    pub frames_out: Option<u64>,
    /// The stage that it has reached, and what it waits for.
    pub state: ConnState,
    /// Calls that wait; its `open` is one.
    pub calls: usize,
    /// The time that the oldest of them has waited, to 17 ms.
    pub oldest_call: Option<Duration>,
}

/// The answer to a [`Query`].
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Inspection {
    /// The first connections of the server in the order that was asked for.
    pub connections: Vec<ConnInfo>,
    /// Sums over all connections that were asked for, those beyond the limit included.
    pub sums: InspectionSums,
    /// The numbers of the shards that did not answer in time: a handler blocks them, they are
    /// overloaded, or they ended.
    pub silent_shards: Vec<usize>,
}

/// Sums over the connections of an [`Inspection`], of all shards that answered. A connection counts
/// as it was when its shard came by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct InspectionSums {
    /// Connections that were asked for.
    pub connections: u64,
    /// Their bytes that wait for peers: queued, or with the kernel.
    pub outbox_bytes: u64,
    /// Those whose frames are held back, since their peers do not read ([`ConnState::HeldBack`]).
    pub held_back: u64,
    /// Their calls that wait.
    pub calls: u64,
}

impl InspectionSums {
    pub(super) fn add(&mut self, other: InspectionSums) {
        let InspectionSums { connections, outbox_bytes, held_back, calls } = other;
        self.connections += connections;
        self.outbox_bytes += outbox_bytes;
        self.held_back += held_back;
        self.calls += calls;
    }
}
