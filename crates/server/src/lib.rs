//! Service, server, shards and sockets of ringserve. Users depend on `ringserve`, which re-exports this crate.

#![cfg_attr(docsrs, feature(doc_cfg))]

mod accept_queue;
#[cfg(feature = "codec")]
pub mod codec;
mod cores;
mod cx;
mod driver;
mod error;
mod guard;
mod handle;
mod host;
#[cfg(feature = "http")]
pub mod http;
mod listen;
mod log;
mod memory;
pub mod middleware;
mod peer;
mod running;
mod server;
mod service;
mod shard;
mod socket_options;
mod stats;
mod stream;
#[cfg(feature = "tower")]
pub mod tower;

pub use accept_queue::AcceptQueue;
pub use ringserve_core::framing;
pub use ringserve_core::{
    Actor, Address, CloseReason, ConnId, Counters, DriverStats, Frame, IdleCounts, LimitError, Limits,
    Outbox, Payload,
};
pub use ringserve_ring::SetupError;

pub use cx::Cx;
pub use driver::Driver;
pub use error::Error;
pub use handle::{ConnHandle, LocalHandle, PushError, StreamHandle};
pub use host::Host;
pub use listen::ListenAddr;
pub use memory::{UsableMemory, usable_memory};
pub use peer::Peer;
pub use ringserve_buf::Counts as BufferCounts;
pub use running::{Running, Stopper};
pub use server::Server;
pub use service::{MakeService, Refusal, Service};
pub use shard::draining::DrainBegins;
pub use shard::handle::Shard;
pub use shard::messages::{SendError, Shards};
pub use shard::timers::{Deadline, DeadlineElapsed, Sleep};
pub use socket_options::{KeepAlive, OptionError, OptionWarning, SocketOptions};
pub use stats::{Report, ShardReport, UpstreamReport};
pub use stream::{Connecting, CopyError, CopySide, Stream, StreamResult, copy_bidirectional};

/// Runs a shard, or a whole server, over drivers of the caller's. For benchmarks and tests of this workspace, not for
/// users.
#[doc(hidden)]
pub mod internals {
    pub use crate::server::{Drivers, start_on, start_stream_on};
    pub use crate::shard::timers::age_new_shards;
    pub use crate::shard::turns::run_on;
}
