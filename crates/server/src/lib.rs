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
mod remote;
mod running;
mod server;
mod service;
mod shard;
mod shards;
mod socket_options;
mod stream;
mod sync;
mod tasks;
mod timers;
#[cfg(feature = "tower")]
pub mod tower;
mod wake;

pub use accept_queue::AcceptQueue;
pub use ringserve_core::framing;
pub use ringserve_core::{
    Actor, Address, CloseReason, ConnId, Counters, DriverStats, Frame, IdleCounts, LimitError, Limits,
    Outbox, Payload,
};
pub use ringserve_drivers::SetupError;

pub use cx::{Cx, Peer};
pub use driver::Driver;
pub use error::Error;
pub use handle::{ConnHandle, LocalHandle, PushError, StreamHandle};
pub use host::Host;
pub use listen::ListenAddr;
pub use memory::{UsableMemory, usable_memory};
pub use ringserve_buf::Counts as BufferCounts;
pub use running::{Report, Running, ShardReport, Stopper, UpstreamReport};
pub use server::Server;
pub use service::{MakeService, Refusal, Service};
pub use shard::{DrainBegins, Shard};
pub use shards::{SendError, Shards};
pub use socket_options::{KeepAlive, OptionError, OptionWarning, SocketOptions};
pub use stream::{Connecting, CopyError, CopySide, Stream, StreamResult, copy_bidirectional};
pub use timers::{Deadline, DeadlineElapsed, Sleep};

/// Runs a shard, or a whole server, over drivers of the caller's. For benchmarks and tests of this workspace, not for
/// users.
#[doc(hidden)]
pub mod internals {
    pub use crate::server::{Drivers, start_on, start_stream_on};
    pub use crate::shard::run_on;
    pub use crate::timers::age_new_shards;
}
