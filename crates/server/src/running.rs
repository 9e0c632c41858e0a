//! A server that runs.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ringserve_buf::Counts as BufferCounts;
use ringserve_core::{Counters, DriverStats};

use crate::accept_queue::AcceptQueue;
use crate::error::Error;
use crate::remote::{Order, Remote};

/// How a shard ended: what it did, or the `errno` of its driver.
pub(crate) type ShardEnd = Result<ShardReport, i32>;

/// How long [`Running::report`] waits for a shard whose handler blocks it.
const REPORT_WITHIN: Duration = Duration::from_secs(5);

/// A server that runs on threads of its own. Dropping it stops the server at once and waits for its threads.
#[must_use = "dropping it stops the server"]
pub struct Running {
    local_addrs: Vec<SocketAddr>,
    remotes: Vec<Arc<Remote>>,
    threads: Vec<JoinHandle<ShardEnd>>,
}

/// What a shard did since its start, and what it holds.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct ShardReport {
    /// What happened to connections.
    pub counters: Counters,
    /// Connections now, closing ones included.
    pub connections: usize,
    /// What happened to connections that the shard made ([`Shard::connect`](crate::Shard::connect)).
    pub upstreams: UpstreamReport,
    /// What the driver did.
    pub driver: DriverStats,
    /// Where the receive buffers are.
    pub buffers: BufferCounts,
}

/// Connections to upstreams: what happened to them, and how many there are. `opened` counts those that were tried; those
/// that failed are counted as closed for [`ConnectFailed`](crate::CloseReason::ConnectFailed) or
/// [`ConnectTimeout`](crate::CloseReason::ConnectTimeout). [`Counters::frames`] counts pieces as they were received.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct UpstreamReport {
    /// What happened to them.
    pub counters: Counters,
    /// Connections now, closing ones and those on their way included.
    pub connections: usize,
}

/// What a server did since its start, and what it holds.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Report {
    /// The sum of all shards' counters.
    pub counters: Counters,
    /// Connections of all shards.
    pub connections: usize,
    /// Those of all shards to upstreams.
    pub upstreams: UpstreamReport,
    /// Each shard's own.
    pub shards: Vec<ShardReport>,
}

impl Report {
    fn add(&mut self, shard: ShardReport) {
        self.counters += &shard.counters;
        self.connections += shard.connections;
        self.upstreams.counters += &shard.upstreams.counters;
        self.upstreams.connections += shard.upstreams.connections;
        self.shards.push(shard);
    }
}

impl Running {
    pub(crate) fn new(
        local_addrs: Vec<SocketAddr>,
        remotes: Vec<Arc<Remote>>,
        threads: Vec<JoinHandle<ShardEnd>>,
    ) -> Running {
        Running { local_addrs, remotes, threads }
    }

    /// Where the server listens, with the real ports.
    pub fn local_addrs(&self) -> &[SocketAddr] {
        &self.local_addrs
    }

    /// What waits to be accepted at each address, in the order of [`local_addrs`](Running::local_addrs), and what the kernel
    /// dropped there.
    ///
    /// # Errors
    /// If `/proc/net` cannot be read.
    pub fn accept_queues(&self) -> io::Result<Vec<AcceptQueue>> {
        self.local_addrs.iter().map(|addr| AcceptQueue::of(*addr)).collect()
    }

    /// Begins to shut down: no connection is accepted any more, requests that have arrived are answered,
    /// connections are closed as soon as nothing is owed. After [`Limits::drain`](crate::Limits::drain) the
    /// rest is reset. Returns at once; [`wait`](Running::wait) waits for the end.
    pub fn shutdown(&self) {
        self.order(Order::Drain);
    }

    /// Resets every connection and stops.
    pub fn force(&self) {
        self.order(Order::Force);
    }

    fn order(&self, order: Order) {
        for remote in &self.remotes {
            remote.order(order);
        }
    }

    /// What the server did so far and what it holds. Each shard is asked to answer at the end of its turn;
    /// one that does not within 5 s, because a handler blocks it, is left out.
    pub fn report(&self) -> Report {
        let deadline = Instant::now() + REPORT_WITHIN;
        let mut report = Report::default();
        let asked: Vec<u64> = self.remotes.iter().map(|remote| remote.ask_report()).collect();
        for (remote, number) in self.remotes.iter().zip(asked) {
            if let Some(shard) = remote.wait_report(number, deadline) {
                report.add(shard);
            }
        }
        report
    }

    /// Something that can shut the server down from another thread.
    pub fn stopper(&self) -> Stopper {
        Stopper { remotes: self.remotes.clone() }
    }

    /// Waits until the server has shut down.
    ///
    /// # Errors
    /// If a shard ended by itself; the others are stopped then.
    pub fn wait(mut self) -> Result<Report, Error> {
        let mut report = Report::default();
        let mut failed = None;
        for (shard, thread) in std::mem::take(&mut self.threads).into_iter().enumerate() {
            let error = match thread.join() {
                Ok(Ok(shard)) => {
                    report.add(shard);
                    continue;
                }
                Ok(Err(errno)) => Error::Broken { shard, error: io::Error::from_raw_os_error(errno) },
                Err(_) => Error::ShardPanicked { shard },
            };
            self.force();
            failed.get_or_insert(error);
        }
        match failed {
            Some(error) => Err(error),
            None => Ok(report),
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if !self.threads.is_empty() {
            self.force();
            for thread in self.threads.drain(..) {
                let _ = thread.join();
            }
        }
    }
}

impl fmt::Debug for Running {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Running").field("local_addrs", &self.local_addrs).finish_non_exhaustive()
    }
}

/// Shuts a server down from any thread.
#[derive(Clone)]
pub struct Stopper {
    remotes: Vec<Arc<Remote>>,
}

impl Stopper {
    /// As [`Running::shutdown`].
    pub fn shutdown(&self) {
        self.remotes.iter().for_each(|remote| remote.order(Order::Drain));
    }

    /// As [`Running::force`].
    pub fn force(&self) {
        self.remotes.iter().for_each(|remote| remote.order(Order::Force));
    }
}

impl fmt::Debug for Stopper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Stopper")
    }
}
