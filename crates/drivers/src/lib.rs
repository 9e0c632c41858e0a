//! The drivers of ringserve: io_uring, in a safe bookkeeping half and a thin kernel half, and epoll.
//!
//! [`Uring`] is the bookkeeping: it implements [`ringserve_core::Driver`] over a [`Kernel`](kernel::Kernel).
//! [`SystemKernel`] is the real one. [`probe()`] tells whether io_uring works here, by doing.

#![warn(missing_docs)]

mod accept;
mod config;
mod connect;
mod epoll;
mod error;
mod heap;
mod hosted;
mod log;
mod probe;
mod rlimit;
mod sockopt;
mod stopping;
mod table;
mod timer;
mod uring;
mod waker;

pub use config::UringConfig;
pub use connect::BeforeConnect;
pub use epoll::{Epoll, EpollConfig};
pub use error::SetupError;
pub use heap::trim_heap;
pub use hosted::Hosted;
pub use log::guarded;
pub use probe::{Found, probe, probe_epoll, probe_ring, try_apart};
pub use rlimit::{Resource, ResourceLimit};
pub use sockopt::{TcpOption, peer_process};
pub use uring::{Anomalies, SystemKernel, Uring, kernel};
pub use waker::Waker;
