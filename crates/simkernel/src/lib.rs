//! A network in memory, in real time: listeners, connections, and a kernel for each shard of a server on it.
//!
//! It is there so that tests with blocking clients, written for real sockets, run on the real bookkeeping half of the
//! io_uring driver over a simulated kernel:
//!
//! ```text
//!   MemoryStream        a client, with the calls of a TcpStream; on any thread
//!   ─────────────       one lock over all connections
//!   MemoryKernel        the lower half of Uring<K>; on its shard's thread
//!   ─ kernel interface ─
//!   Uring, core, Server
//! ```
//!
//! It has no oracle; what is right is for the test to say.
//!
//! Without faults it does what Linux does on loopback, with `DEFER_TASKRUN` and direct descriptors: operations are
//! carried out in the enter that submits them, in order, and completions appear only within an enter. Its completion
//! queue has no end.

mod connection;
mod faults;
mod kernel;
mod operations;
mod progress;
pub mod rng;
mod state;
mod stream;

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringserve_buf::Pool;
use ringserve_drivers::{Uring, UringConfig};

use state::Shared;

pub use kernel::MemoryKernel;
pub use stream::MemoryStream;

/// How long a connect waits for room in the backlog.
const CONNECT_WITHIN: Duration = Duration::from_secs(20);

/// A network of its own. Clones are the same network.
#[derive(Clone, Default)]
pub struct Network {
    shared: Arc<Shared>,
    faults: Option<u64>,
}

impl Network {
    /// One whose kernels show, now and then, what a kernel may do at any time and seldom does: short sends, short and
    /// interrupted receives, multishots that end, buffers and room that are said to be missing, cancels that come too late.
    /// The seed decides which. And half of all connections come to the first shard.
    pub fn with_faults(seed: u64) -> Network {
        Network { faults: Some(seed), ..Network::default() }
    }

    /// Listens at `addr`, once for each shard, and returns the address with its port, which it chooses if it is 0.
    ///
    /// # Errors
    /// `AddrInUse`.
    pub fn listen(&self, addr: SocketAddr, shards: usize) -> io::Result<SocketAddr> {
        self.shared.lock().listen(addr, shards)
    }

    /// A driver for this shard, which accepts where [`listen`](Network::listen) was called for it since the last driver
    /// with that number was made.
    ///
    /// # Errors
    /// If the receive memory is impossible, or there is no descriptor for the wake-up.
    pub fn driver(&self, shard: usize, config: &UringConfig) -> io::Result<Uring<MemoryKernel>> {
        let (_, side) = Pool::new(config.pool).map_err(io::Error::other)?;
        let kernel = MemoryKernel::new(self.shared.clone(), self.faults, shard, config)?;
        Ok(Uring::with_kernel(kernel, side, config.connections))
    }

    /// Connects, as soon as a place in the backlog is free.
    ///
    /// # Errors
    /// `ConnectionRefused` if there is no listener, `WouldBlock` if there is no place within 20 s.
    pub fn connect(&self, addr: SocketAddr) -> io::Result<MemoryStream> {
        self.connect_with(addr, None)
    }

    /// As [`connect`](Network::connect), with a socket that holds `bytes` received bytes: what was sent beyond them waits
    /// at the server.
    ///
    /// # Errors
    /// As above.
    pub fn connect_with_window(&self, addr: SocketAddr, bytes: usize) -> io::Result<MemoryStream> {
        self.connect_with(addr, Some(bytes))
    }

    fn connect_with(&self, addr: SocketAddr, window: Option<usize>) -> io::Result<MemoryStream> {
        let deadline = Instant::now() + CONNECT_WITHIN;
        let mut state = self.shared.lock();
        loop {
            match state.connect(addr, window, self.faults.is_some()) {
                Ok(number) => {
                    let addrs = state.connection(number).addrs();
                    drop(state);
                    return Ok(MemoryStream::new(self.shared.clone(), number, addrs));
                }
                Err(libc::EAGAIN) if Instant::now() < deadline => {
                    state = self.shared.wait(state, Some(deadline));
                }
                Err(errno) => return Err(io::Error::from_raw_os_error(errno)),
            }
        }
    }
}

impl fmt::Debug for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Network").field("faults", &self.faults).finish_non_exhaustive()
    }
}
