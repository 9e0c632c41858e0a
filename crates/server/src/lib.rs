//! Service, server, shards and sockets of ringserve. Users depend on `ringserve`, which re-exports
//! this crate.

#![deny(clippy::disallowed_methods)]
#![deny(clippy::too_many_lines)]
#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod access_log;
#[cfg(feature = "admin")]
pub mod admin;
mod blocking;
#[cfg(feature = "http")]
mod client_info;
#[cfg(feature = "tokio")]
pub mod codec;
mod error;
#[cfg(feature = "admin")]
mod funnel;
#[cfg(feature = "metrics")]
mod histogram;
#[cfg(feature = "http")]
pub mod http;
pub mod inspect;
mod log;
#[cfg(feature = "websocket")]
mod message;
#[cfg(feature = "metrics")]
pub mod metrics;
pub mod middleware;
#[doc(hidden)]
pub mod off;
pub mod overload;
mod room;
mod server;
mod shard;
mod snapshot;
mod socket_options;
pub mod stats;
mod stream;
#[cfg(feature = "log")]
pub mod subscriber;
pub mod sync;
mod telling;
#[cfg(feature = "testing")]
pub mod testing;
#[cfg(feature = "tls")]
pub mod tls;
#[cfg(feature = "tower")]
pub mod tower;
#[cfg(feature = "testing")]
mod trace;
mod traces;
mod watch;
mod watchdog;
#[cfg(feature = "testing")]
mod watched_service;
#[cfg(feature = "websocket")]
pub mod websocket;
mod yields;

#[cfg(feature = "runtime-tokio-uring")]
pub use tokio_uring;

#[doc(inline)]
pub use ringserve_admission as admission;
pub use ringserve_base::peer::Peer;
pub use ringserve_base::{doctor, machine};
pub use ringserve_buf::ReplyWriter;
pub use ringserve_core::{CloseKind, CloseReason, ClosedBy, ConnId, Frame, Limits, SharedPayload};
pub use ringserve_drivers::SetupError;

pub use error::Error;
#[cfg(feature = "http")]
pub use http::http;
pub use server::builder::Server;
pub use server::driver::Driver;
pub use server::running::ServerHandle;
pub use server::runtime::Runtime;
pub use server::several::MultiService;
pub use shard::face::closed::{CloseCx, Failure};
pub use shard::face::conn_handle::{ConnHandle, LocalHandle, PushError, StreamHandle};
pub use shard::face::cx::{Cx, HeldReplies};
pub use shard::face::handle::Shard;
pub use shard::face::opening::{OpenCx, Refusal, Session};
pub use shard::face::service::{IntoService, Service, WithHeads, from_future, with_heads};
pub use shard::remote::control::ServerControl;
pub use stream::byte_stream::Stream;
pub use stream::service::{StreamService, stream};
#[cfg(feature = "websocket")]
pub use websocket::ws;

/// Values that the factory of a server may return: a service, or a future that makes one.
pub mod factory {
    pub use crate::shard::face::service::{FactoryError, FactoryFuture, FactoryOutput, FromFuture};
}

/// Framings: bytes to frames, and replies to bytes.
pub mod framing {
    pub use ringserve_core::Outbox;
    pub use ringserve_core::framing::*;
}

/// Endpoints of the services of a server ([`Server::service`](crate::Server::service)).
pub mod listen {
    pub use crate::server::endpoint::{
        Endpoint, Endpoints, IntoEndpoints, adopt, endpoints, systemd, tcp, unix,
    };
    pub use ringserve_admission::proxy_protocol::ProxyProtocol;
    pub use ringserve_core::proxy::{HeaderError, ProxiedSsl, Tlvs};
}

/// Layers between a socket and the framing of its connections: encryption, or another layer that
/// changes bytes.
///
/// A listener may have a [`Transport`](transport::Transport)
/// ([`Endpoint::transport`](crate::listen::Endpoint::transport), [`Server::transport`]). Each of
/// its connections then has a [`TransportConn`](transport::TransportConn), which completes a
/// handshake before [`Service::open`], and from there on opens received bytes and seals sent ones.
/// Services, streams, HTTP and codecs do not change. Facts of the handshake are read by their type:
/// [`Cx::transport_info`], [`OpenCx::transport_info`], [`Stream::transport_info`].
///
/// A panic of a transport or of a channel ends one connection ([`CloseReason::HandlerPanicked`]),
/// with a line in the log. Bytes that the panicked call appended do not leave, and the channel is
/// dropped at once. Each channel costs 24 bytes for this.
///
/// ```
/// use ringserve::transport::{Batch, TransportConn, TransportError, LeaseMut, Transport, TransportEvent};
/// # use ringserve::{Cx, Frame, Server, Service, framing::Lines};
/// # struct Echo;
/// # impl Service for Echo {
/// #     type Session = ();
/// #     type Error = std::convert::Infallible;
/// #     async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Self::Error> {
/// #         cx.reply(frame);
/// #         Ok(())
/// #     }
/// # }
///
/// /// Each byte is XORed with the same one.
/// struct Xor(u8);
///
/// impl Transport for Xor {
///     fn begin(&self, _out: &mut Vec<u8>) -> Option<Box<dyn TransportConn>> {
///         Some(Box::new(XorChannel { key: self.0, is_ready: false }))
///     }
/// }
///
/// struct XorChannel {
///     key: u8,
///     is_ready: bool,
/// }
///
/// impl TransportConn for XorChannel {
///     fn decode(&mut self, wire: &mut LeaseMut, _out: &mut Vec<u8>) -> TransportEvent {
///         if wire.is_empty() {
///             return TransportEvent::More;
///         }
///         // There is no handshake: the first byte is one.
///         if !std::mem::replace(&mut self.is_ready, true) {
///             return TransportEvent::Ready;
///         }
///         wire.iter_mut().for_each(|byte| *byte ^= self.key);
///         TransportEvent::Plain(std::mem::take(wire))
///     }
///
///     fn work(&mut self, _out: &mut Vec<u8>) -> TransportEvent {
///         TransportEvent::More
///     }
///
///     fn encode(&mut self, plain: &Batch, out: &mut Vec<u8>) -> Result<(), TransportError> {
///         out.extend(plain.pieces().flatten().map(|byte| byte ^ self.key));
///         Ok(())
///     }
///
///     fn finish(&mut self, _out: &mut Vec<u8>) {}
///
///     fn held_bytes(&self) -> usize {
///         0
///     }
///
///     fn is_mid_record(&self) -> bool {
///         false
///     }
/// }
///
/// # fn main() {
/// let server = Server::bind("127.0.0.1:7000").transport(|| Xor(0x55)).framing(Lines::default());
/// # let _ = || server.serve(|_shard| Echo);
/// # }
/// ```
pub mod transport {
    pub use ringserve_buf::LeaseMut;
    pub use ringserve_core::{Batch, Stack, Transport, TransportConn, TransportError, TransportEvent};
}

/// Limits of a server, in addition to those of a service ([`Limits`]), and the memory that it may
/// use.
pub mod limits {
    pub use crate::room::{Capacity, Reservation};
    pub use crate::shard::face::reserve::Reserved;
    pub use crate::watch::options::StallOptions;
    pub use ringserve_base::memory::{UsableMemory, usable_memory};
    pub use ringserve_core::{
        ConnLimits, IdleActivity, LimitError, NoMemoryLeft, ReadRateAction, ServerLimits,
    };
}

/// Addresses, socket options, and connections to other servers.
pub mod net {
    pub use crate::socket_options::apply::SocketOptionWarning;
    pub use crate::socket_options::check::SocketOptionError;
    pub use crate::socket_options::options::{KeepAlive, SocketOptions};
    pub use crate::stream::connecting::{Connecting, Destination};
    #[cfg(feature = "tokio")]
    pub use crate::stream::copy::AnyStream;
    pub use crate::stream::copy::{CopyError, CopySide, CopyStream, copy_bidirectional};
    pub use crate::stream::framed::{Framed, FramedError, FramedReader, FramedWriter};
    pub use crate::stream::halves::{ReadHalf, WriteHalf};
    pub use crate::stream::local_failure::is_local_failure;
    pub use crate::stream::proxy_header::ProxyHeader;
    pub use crate::stream::service::StreamResult;
    pub use ringserve_core::{Address, PeerCredentials};
}

/// Handles of tasks of a shard, and of blocking calls beside the shards.
pub mod task {
    pub use crate::blocking::{Blocking, BlockingError};
    pub use crate::shard::face::pages::Pages;
    pub use crate::shard::tasks::join::{JoinError, JoinHandle, SpawnError};
    pub use crate::yields::yield_now;
    pub use ringserve_core::Page;
}

/// The clock of the shards, and the futures of [`Cx::sleep`](crate::Cx::sleep) and
/// [`Cx::timeout`](crate::Cx::timeout).
pub mod time {
    pub use crate::shard::wakes::timers::{Elapsed, Interval, Sleep, Timeout};
    pub use ringserve_core::Time;
}

/// Runs a shard, or a whole server, over drivers of the caller. For benchmarks and tests of this
/// workspace, not for users.
#[doc(hidden)]
pub mod internals {
    pub use crate::server::driven::{Drivers, start_on, start_several_on};
    pub use crate::shard::running::turns::run_on;
    pub use ringserve_admission::internals::{Counted, Door};
    pub use ringserve_base::clock::age_new_shards;
}
