//! Service, server, shards and sockets of ringserve. Users depend on `ringserve`, which re-exports this crate.

#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(feature = "codec")]
pub mod codec;
mod cx;
mod guard;
mod handle;
#[cfg(feature = "http")]
pub mod http;
mod log;
pub mod middleware;
mod peer;
mod server;
mod service;
mod shard;
mod stats;
mod stream;
#[cfg(feature = "tower")]
pub mod tower;

pub use ringserve_buf::BufferStats;
pub use ringserve_core::framing;
pub use ringserve_core::{
    Address, CloseReason, ClosedBy, ConnId, ConnStats, DriverStats, Frame, IdleCounts, LimitError, Limits,
    Outbox, Payload,
};
pub use ringserve_drivers::SetupError;

pub use cx::Cx;
pub use handle::{ConnHandle, LocalHandle, PushError, StreamHandle};
pub use peer::Peer;
pub use server::accept_queue::AcceptQueueStats;
pub use server::builder::Server;
pub use server::driver::Driver;
pub use server::error::Error;
pub use server::listen::addr::ListenAddr;
pub use server::memory::{UsableMemory, usable_memory};
pub use server::running::{ServerHandle, ShutdownHandle};
pub use server::runtime::Runtime;
pub use server::socket_options::apply::SocketOptionWarning;
pub use server::socket_options::check::SocketOptionError;
pub use server::socket_options::options::{KeepAlive, SocketOptions};
pub use service::{MakeService, Refusal, Service};
pub use shard::draining::Draining;
pub use shard::handle::Shard;
pub use shard::messages::{Mesh, SendError};
pub use shard::timers::{Elapsed, Sleep, Timeout};
pub use stats::{ServerStats, ShardStats, UpstreamStats};
pub use stream::byte_stream::Stream;
pub use stream::connecting::Connecting;
pub use stream::copy::{CopyError, CopySide, copy_bidirectional};
pub use stream::service::StreamResult;

/// Runs a shard, or a whole server, over drivers of the caller's. For benchmarks and tests of this workspace, not for
/// users.
#[doc(hidden)]
pub mod internals {
    pub use crate::server::driven::{Drivers, start_on, start_stream_on};
    pub use crate::shard::timers::age_new_shards;
    pub use crate::shard::turns::run_on;
}
