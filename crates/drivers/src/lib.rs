//! The drivers of ringserve: io_uring, in a safe bookkeeping half and a thin kernel half, and
//! epoll.
//!
//! [`Uring`] is the bookkeeping: it implements [`ringserve_core::Driver`] over a
//! [`Kernel`](kernel::Kernel). [`SystemKernel`] is the real one. [`probe()`] tries whether io_uring
//! works here.

#![warn(missing_docs)]
#![deny(clippy::disallowed_methods)]
#![deny(clippy::too_many_lines)]

mod epoll;
mod listener_end;
mod listener_filter;
mod listener_gauge;
mod shared;
mod uring;

pub use epoll::{Epoll, EpollConfig, probe_epoll};
pub use listener_end::ListenerEnd;
pub use listener_filter::ListenerFilter;
pub use listener_gauge::{ListenerGauge, QueueReading};
pub use shared::accept::Listener;
pub use shared::activation::take_activated;
pub use shared::connect::BeforeConnect;
pub use shared::process::{Resource, ResourceLimit, at_exit, trim_heap};
pub use shared::report::{SetupError, guarded};
pub use shared::socket_options::{TcpOption, peer_process};
pub use shared::wait::{Waker, monotonic_nanos};
pub use uring::{
    Anomalies, Found, SystemKernel, Uring, UringConfig, kernel, probe, probe_accept, probe_ring, try_apart,
};
