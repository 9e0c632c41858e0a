//! A network in memory below ringserve's io_uring driver: listeners, connections, and a simulated
//! kernel for each shard of a server on it. It needs no io_uring, no privileges and no ports, and
//! has no `unsafe`.
//!
//! ```text
//!   Socket, BlockingStream   clients
//!   ──────────────────────   Network: listeners, connections, faults, time
//!   SimKernel                the lower half of Uring<K>: readiness, and its times
//!   ring                     its queues, buffers and file table, and the operations in flight
//!   ── kernel interface ──   operations in; user_data, res, flags out
//!   Uring, core, Server      the code that runs in production
//! ```
//!
//! A network has one of two kinds of time:
//!
//! * In *real time* ([`Network::default`]) each shard has a thread, whose enter blocks, and clients
//!   are [`BlockingStream`]s on any thread.
//! * In *virtual time* ([`Network::stepped`]) nothing blocks and nothing reads a clock. One thread
//!   steps all shards and all clients, whose sockets ([`Socket`]) leave wakers. When nothing is
//!   left to do, it sets the clock ([`Network::set_now`]) to the next event. The same seed and the
//!   same steps have the same results; [`Network::event_hash`] confirms that.
//!
//! ```
//! use std::net::SocketAddr;
//! use std::task::{Context, Waker};
//!
//! use ringserve_core::{Budget, Completion, Driver, Op, Wait};
//! use ringserve_drivers::UringConfig;
//! use ringserve_simkernel::{Faults, Network};
//!
//! let network = Network::stepped(1, Faults::none());
//! let addr = network.listen(SocketAddr::from(([10, 0, 0, 1], 7000)), 1)?;
//! let mut driver = network.driver(0, &UringConfig::default())?;
//! driver.submit(Op::Accept { listener: 0 });
//!
//! let mut client = network.socket([10, 0, 0, 2].into(), addr);
//! let mut cx = Context::from_waker(Waker::noop());
//! assert!(client.poll_connect(&mut cx).is_ready());
//!
//! let mut completions = Vec::new();
//! driver.turn(Wait::Forever, Budget::default(), &mut completions).expect("no fault broke the ring");
//! assert!(matches!(completions[..], [Completion::Accepted { .. }]));
//! # std::io::Result::Ok(())
//! ```
//!
//! Without faults it does what Linux does on loopback, with `DEFER_TASKRUN` and direct descriptors:
//! operations are carried out in the enter that submits them, in order, and completions appear only
//! within an enter. Its completion queue is unbounded. With [`Faults`] it shows rare behaviour of a
//! kernel and a network, and with an [`Adversary`], in virtual time, everything that its interface
//! allows. It has no oracle; the test decides which results are right.

#![deny(clippy::too_many_lines)]

mod adversary;
mod alarm;
mod connection;
mod faults;
mod kernel;
mod operations;
mod progress;
pub mod ring;
pub mod rng;
mod shared;
mod socket;
mod state;
mod stepped;
mod stream;

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringserve_buf::Pool;
use ringserve_drivers::{Uring, UringConfig};

use faults::Plan;
use shared::Shared;

pub use adversary::{Adversary, HostileEvent};
pub use faults::{Fault, FaultCounts, Faults};
pub use kernel::{RingId, SimKernel};
pub use socket::{ConnectionId, Socket, SocketListener};
pub use stream::BlockingStream;

/// Time limit of a connect in real time for a place in the backlog.
const CONNECT_WITHIN: Duration = Duration::from_secs(20);

/// A separate network, in real time or in virtual time. Clones are the same network.
#[derive(Clone)]
pub struct Network {
    shared: Arc<Shared>,
}

impl Default for Network {
    /// Creates a network in real time, without faults.
    fn default() -> Network {
        Network::new(false, Plan::new(Faults::none(), 0))
    }
}

impl Network {
    fn new(stepped: bool, plan: Plan) -> Network {
        Network { shared: Arc::new(Shared::new(stepped, plan)) }
    }

    /// Creates a network in real time, with [`Faults::harmless`], drawn by the seed. Half of all
    /// connections reach the first shard.
    pub fn with_faults(seed: u64) -> Network {
        Network::new(false, Plan::new(Faults::harmless(), seed))
    }

    /// Listens at `addr`, once for each shard, and returns the address with its port, which it
    /// chooses if it is 0. The shard whose listener a connection reaches is drawn, as with
    /// `SO_REUSEPORT`.
    ///
    /// # Errors
    /// `AddrInUse`.
    pub fn listen(&self, addr: SocketAddr, shards: usize) -> io::Result<SocketAddr> {
        self.shared.lock().listen(addr, shards)
    }

    /// Adopts the listener at `addr`, for each shard: the shards accept from its one queue,
    /// together with all other rings that adopted it. It is created with the first adoption, and
    /// exists, with its queue, until the network is dropped, as if a service manager held it.
    ///
    /// # Errors
    /// `AddrInUse` if there is a listener that was not created this way.
    pub fn adopt(&self, addr: SocketAddr, shards: usize) -> io::Result<()> {
        self.shared.lock().adopt(addr, shards)
    }

    /// Creates a driver for this shard, which accepts where [`listen`](Network::listen) or
    /// [`adopt`](Network::adopt) was called for it since the last driver with that number was
    /// created. It connects from the first of these addresses, or else from 127.0.0.1.
    ///
    /// # Errors
    /// If the receive memory is impossible, or, in real time, there is no descriptor for the
    /// wake-up.
    pub fn driver(&self, shard: usize, config: &UringConfig) -> io::Result<Uring<SimKernel>> {
        let (_, side) = Pool::new(config.pool).map_err(io::Error::other)?;
        let kernel = SimKernel::new(self.shared.clone(), shard, config)?;
        Ok(Uring::with_kernel(kernel, side, config.connections).coalescing(config.coalesce))
    }

    /// Connects in real time, as soon as a place in the backlog is free.
    ///
    /// # Errors
    /// `ConnectionRefused` if there is no listener, `WouldBlock` if there is no place within 20 s,
    /// `Unsupported` in virtual time.
    pub fn connect(&self, addr: SocketAddr) -> io::Result<BlockingStream> {
        self.connect_with(addr, None)
    }

    /// Does [`connect`](Network::connect), with a socket that holds `bytes` received bytes: bytes
    /// sent beyond them wait at the server.
    ///
    /// # Errors
    /// Those of [`connect`](Network::connect).
    pub fn connect_with_window(&self, addr: SocketAddr, bytes: usize) -> io::Result<BlockingStream> {
        self.connect_with(addr, Some(bytes))
    }

    fn connect_with(&self, addr: SocketAddr, window: Option<usize>) -> io::Result<BlockingStream> {
        if self.shared.stepped {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let deadline = Instant::now() + CONNECT_WITHIN;
        let mut state = self.shared.lock();
        loop {
            match state.connect(addr.ip(), addr, window, self.shared.plan.has_faults()) {
                Ok(number) => {
                    let addrs = state.connection(number).addrs();
                    drop(state);
                    return Ok(BlockingStream::new(self.shared.clone(), number, addrs));
                }
                Err(libc::EAGAIN) if Instant::now() < deadline => {
                    state = self.shared.wait(state, Some(deadline));
                }
                Err(errno) => return Err(io::Error::from_raw_os_error(errno)),
            }
        }
    }

    /// Occurrences of each fault.
    pub fn injected(&self) -> FaultCounts {
        self.shared.plan.injected()
    }

    /// Occurrences of this hostile event.
    pub fn occurred(&self, event: HostileEvent) -> u64 {
        self.shared.plan.occurred.of(event)
    }

    /// Everything open, one line each: listeners, ends of connections, connections in transit
    /// between rings, rings; and resources that rings held when they ended: descriptors, leased
    /// buffers, operations in flight. Empty once all drivers and clients of a test were dropped in
    /// order.
    pub fn leaks(&self) -> Vec<String> {
        let mut state = self.shared.lock();
        state.close_lost();
        state.open()
    }
}

impl fmt::Debug for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut f = f.debug_struct("Network");
        f.field("seed", &self.shared.plan.seed).field("stepped", &self.shared.stepped).finish_non_exhaustive()
    }
}
