//! The drivers of ringserve: io_uring, in a safe bookkeeping half and a thin kernel half, and epoll.
//!
//! [`Uring`] is the bookkeeping: it implements [`ringserve_core::Driver`] over a [`Kernel`](kernel::Kernel).
//! [`SystemKernel`] is the real one. [`probe()`] tells whether io_uring works here, by doing.

#![warn(missing_docs)]

mod epoll;
mod hosted;
mod probe;
mod shared;
mod uring;

pub use epoll::{Epoll, EpollConfig};
pub use hosted::Hosted;
pub use probe::{Found, probe, probe_epoll, probe_ring, try_apart};
pub use shared::connect::BeforeConnect;
pub use shared::process::{Resource, ResourceLimit, trim_heap};
pub use shared::report::{SetupError, guarded};
pub use shared::socket_options::{TcpOption, peer_process};
pub use shared::wait::Waker;
pub use uring::{Anomalies, SystemKernel, Uring, UringConfig, kernel};
