//! Echo on ringline: parts shared by its two forms.

use std::io;
use std::net::SocketAddr;

use common::{BACKLOG, BUFFER_BYTES, RING_ENTRIES};
use ringline::{AsyncEventHandler, ConfigBuilder, RinglineBuilder};

/// Receive buffers: 16 MiB.
const RECEIVE_BUFFERS: u16 = 1024;

/// Buffers into which sends are copied: one for each of 4096 connections, 64 MiB if all are in use.
const SEND_BUFFERS: u16 = 4096;

/// Connections at a time: the setting of the library's own benchmark. Their state is allocated at
/// the start.
const CONNECTIONS_MAX: u32 = 16 * 1024;

/// Runs one worker, which does everything except accepting: a separate thread does that.
pub fn run<H: AsyncEventHandler>(address: SocketAddr) -> io::Result<()> {
    let config = ConfigBuilder::new()
        .workers(1)
        // The affinity of the process is kept.
        .pin_to_core(false)
        .backlog(BACKLOG)
        .max_connections(CONNECTIONS_MAX)
        .tcp_nodelay(true)
        .sq_entries(RING_ENTRIES)
        .recv_buffer(RECEIVE_BUFFERS, BUFFER_BYTES as u32)
        .send_pool(SEND_BUFFERS, BUFFER_BYTES as u32)
        // No wake-up each millisecond for a callback that does not exist.
        .tick_timeout_us(0)
        // No helpers, since there is no work for them.
        .no_fs()
        .resolver_threads(0)
        .spawner_threads(0)
        .blocking_threads(0)
        .build()
        .map_err(io::Error::other)?;
    let (shutdown, workers) =
        RinglineBuilder::new(config).bind(address).launch::<H>().map_err(io::Error::other)?;
    common::announce(shutdown.bound_addr().ok_or_else(|| io::Error::other("no address is bound"))?)?;
    for worker in workers {
        worker.join().map_err(|_| io::Error::other("a worker panicked"))?.map_err(io::Error::other)?;
    }
    Ok(())
}
