//! A running server.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::thread::JoinHandle;
use std::time::Duration;

use ringserve_base::clock::Deadline;
use ringserve_base::guard::message_of;
use ringserve_base::log_thread::hand_over;
use ringserve_core::Address;
#[cfg(feature = "admin")]
use ringserve_core::Limits;

use super::listen::sockets::Listening;
use super::serves::SpentFactories;
use crate::error::Error;
use crate::shard::remote::control::ServerControl;
use crate::shard::remote::ending::ABORTS;
use crate::socket_options::apply::SocketOptionWarning;
use crate::stats::AcceptQueueStats;
use crate::stats::{ServerStats, ShardStats};
use crate::watchdog::thread::Watchdog;

/// The companion endpoint of a server before its start, if there is one; none without the feature
/// `admin`.
#[derive(Default)]
pub(super) struct Companion {
    #[cfg(feature = "admin")]
    beside: Option<Box<dyn Beside>>,
}

/// The same from its start on.
#[derive(Default)]
pub(super) struct RunningCompanion {
    #[cfg(feature = "admin")]
    beside: Option<Box<dyn RunsBeside>>,
    /// The settings of the server.
    #[cfg(feature = "admin")]
    pub(super) facts: Facts,
}

#[cfg(feature = "admin")]
impl Companion {
    pub(super) fn of(beside: Box<dyn Beside>) -> Companion {
        Companion { beside: Some(beside) }
    }

    /// Starts it. See [`Beside::start`].
    pub(super) fn start(self) -> Result<RunningCompanion, Error> {
        let beside = self.beside.map(Beside::start).transpose()?;
        Ok(RunningCompanion { beside, facts: Facts::default() })
    }
}

#[cfg(not(feature = "admin"))]
impl Companion {
    pub(super) fn start(self) -> Result<RunningCompanion, Error> {
        Ok(RunningCompanion::default())
    }
}

#[cfg(feature = "admin")]
impl RunningCompanion {
    pub(super) fn is_there(&self) -> bool {
        self.beside.is_some()
    }

    /// All shards of the server are ready.
    fn begins(&self, server: ServerControl) {
        if let Some(beside) = &self.beside {
            beside.begins(server, self.facts.clone());
        }
    }
}

#[cfg(not(feature = "admin"))]
impl RunningCompanion {
    fn begins(&self, _server: ServerControl) {}
}

/// The companion endpoint of a server, before its start.
#[cfg(feature = "admin")]
pub(crate) trait Beside: Send {
    /// Starts it: before the server has a shard, since it answers while factories are pending.
    ///
    /// # Errors
    /// Its address cannot be used.
    fn start(self: Box<Self>) -> Result<Box<dyn RunsBeside>, Error>;
}

/// The companion endpoint of a server. Its drop ends it, and waits for its threads.
#[cfg(feature = "admin")]
pub(crate) trait RunsBeside: Send + Sync {
    /// All shards of the server are ready.
    fn begins(&self, server: ServerControl, facts: Facts);

    /// Its first address, with the real port.
    fn address(&self) -> &Address;

    /// The first address of its listener for probes, if there is one.
    fn probes(&self) -> Option<&Address>;
}

/// Settings of a server that serves, for its companion endpoint.
#[cfg(feature = "admin")]
#[derive(Clone, Debug, Default)]
pub(crate) struct Facts {
    /// `io_uring` or `epoll`.
    pub(crate) driver: &'static str,
    /// Connections at most.
    pub(crate) connections_max: usize,
    /// Those that its limits allow, if descriptors allow fewer.
    pub(crate) connections_wanted: usize,
    /// Receive buffers of each shard at most.
    pub(crate) buffers_max: usize,
    /// Those of each service.
    pub(crate) limits: Vec<Limits>,
}

/// The end of a shard: its figures, or the reason why it ended by itself.
pub(crate) type ShardEnd = Result<ShardStats, ShardDeath>;

/// The reason why a shard ended by itself.
#[derive(Debug)]
pub(crate) enum ShardDeath {
    /// The `errno` of its driver.
    Driver(i32),
    /// The message of its loop's panic.
    Panicked(String),
}

impl ShardDeath {
    pub(crate) fn error(&self, shard: usize) -> Error {
        match self {
            ShardDeath::Driver(errno) => Error::Broken { shard, error: io::Error::from_raw_os_error(*errno) },
            ShardDeath::Panicked(message) => Error::ShardPanicked { shard, message: message.clone() },
        }
    }
}

/// The shards that run, as seen from outside and as threads, and their watchdog.
pub(super) struct Launched {
    pub(super) control: ServerControl,
    pub(super) threads: Vec<JoinHandle<ShardEnd>>,
    pub(super) watchdog: Option<Watchdog>,
}

/// A server that runs on its own threads. Its drop stops the server at once and waits for its
/// threads, for 15 s at most: one that is blocked then is left alone.
#[must_use = "dropping it stops the server"]
pub struct ServerHandle {
    control: ServerControl,
    threads: Vec<JoinHandle<ShardEnd>>,
    watchdog: Option<Watchdog>,
    /// Dropped after the threads ended, which removes the files of Unix sockets.
    listening: Listening,
    /// The factories.
    kept: SpentFactories,
    /// Dropped last: it answers until the server has ended.
    companion: RunningCompanion,
}

impl ServerHandle {
    pub(super) fn new(listening: Listening, launched: Launched) -> ServerHandle {
        let Launched { control, threads, watchdog } = launched;
        ServerHandle {
            control,
            threads,
            watchdog,
            listening,
            kept: SpentFactories::default(),
            companion: RunningCompanion::default(),
        }
    }

    /// The server with its factories.
    pub(super) fn keeping(mut self, kept: SpentFactories) -> ServerHandle {
        self.kept = kept;
        self
    }

    /// The server with a companion endpoint, which ends after it.
    pub(super) fn with_companion(mut self, companion: RunningCompanion) -> ServerHandle {
        companion.begins(self.control());
        self.companion = companion;
        self
    }

    /// The first address of the [admin endpoint](crate::Server::admin), with the real port, if
    /// there is one.
    #[cfg(feature = "admin")]
    pub fn admin_address(&self) -> Option<&Address> {
        self.companion.beside.as_ref().map(|beside| beside.address())
    }

    /// The first address at which the endpoint has [probes answered
    /// alone](crate::admin::Admin::probes), with the real port, if there is one.
    #[cfg(feature = "admin")]
    pub fn probes_address(&self) -> Option<&Address> {
        self.companion.beside.as_ref().and_then(|beside| beside.probes())
    }

    /// The addresses of the server, with the real ports: each address and each Unix socket, in the
    /// order in which they were given. [`Peer::listener`](crate::Peer::listener) is an index of
    /// this list.
    pub fn listeners(&self) -> &[Address] {
        &self.listening.addrs
    }

    /// The IP addresses of [`listeners`](ServerHandle::listeners), with the real ports.
    pub fn local_addrs(&self) -> &[SocketAddr] {
        &self.listening.ips
    }

    /// Socket options without the effect they were set for, see
    /// [`SocketOptions`](crate::net::SocketOptions). The log has them as warnings.
    pub fn socket_option_warnings(&self) -> &[SocketOptionWarning] {
        &self.listening.warnings
    }

    /// The connections that wait to be accepted at each TCP address on each shard, and the losses
    /// there. See [`ServerControl::accept_queues`].
    pub fn accept_queues(&self) -> Vec<AcceptQueueStats> {
        self.control.accept_queues()
    }

    /// Begins to shut down, after
    /// [`ServerLimits::drain_delay`](crate::limits::ServerLimits::drain_delay): the listeners are
    /// closed, frames that had arrived whole are answered, no further call begins, and connections
    /// are closed as soon as they owe nothing. Half a frame is not waited for. Connections that are
    /// held open, streams among them, end by themselves. After
    /// [`ServerLimits::drain_timeout`](crate::limits::ServerLimits::drain_timeout) the rest is
    /// reset. Returns at once; [`wait`](ServerHandle::wait) waits for the end.
    pub fn shutdown(&self) {
        self.control.shutdown();
    }

    /// Resets every connection and stops. Sockets that the kernel does not end within 5 s are left
    /// behind, with a line in the log.
    pub fn abort(&self) {
        self.control.abort();
    }

    /// Figures of the server as the shards published them: totals since its start, and its present
    /// state. See [`ServerControl::stats`].
    pub fn stats(&self) -> ServerStats {
        self.control.stats()
    }

    /// Figures of the server as they are now: each shard is asked. See
    /// [`ServerControl::stats_now`].
    pub fn stats_now(&self) -> ServerStats {
        self.control.stats_now()
    }

    /// The TLS of all addresses that have it, to replace its certificates.
    #[cfg(feature = "tls")]
    pub fn tls(&self) -> &ringserve_tls::ServerTls {
        self.control.tls()
    }

    /// A control for other threads, to watch the server and to shut it down.
    pub fn control(&self) -> ServerControl {
        self.control.clone()
    }

    /// Waits until the server has shut down. [Blocking calls](crate::Shard::spawn_blocking) that
    /// still run then have 5 s more.
    ///
    /// # Errors
    /// If a shard ended by itself: its driver broke, or its loop panicked. That is logged when it
    /// happens, the other shards drain, and the error is returned at their end. [`Error::Blocked`]
    /// if a shard did not end within 10 s after
    /// [`drain_timeout`](crate::limits::ServerLimits::drain_timeout), or 15 s after an abort.
    pub fn wait(mut self) -> Result<ServerStats, Error> {
        let mut report = ServerStats::default();
        let mut failed = None;
        // It tells what blocks a shard, and goes on whatever blocks the log.
        let handing = hand_over(None);
        let all_ended = self.control.ending().wait(self.threads.len());
        drop(handing);
        for (shard, thread) in std::mem::take(&mut self.threads).into_iter().enumerate() {
            if !all_ended && self.control.remotes()[shard].thread().is_some() {
                failed.get_or_insert(Error::Blocked { shard });
                continue;
            }
            match thread.join().unwrap_or_else(|panic| Err(ShardDeath::Panicked(message_of(panic)))) {
                Ok(shard) => report.add(shard),
                Err(death) => _ = failed.get_or_insert_with(|| death.error(shard)),
            }
        }
        drop(self.watchdog.take());
        self.control.blocking().end();
        report.blocking = self.control.blocking().stats();
        match failed {
            Some(error) => Err(error),
            None => Ok(report),
        }
    }
}

impl Drop for ServerHandle {
    fn drop(&mut self) {
        if !self.threads.is_empty() {
            self.abort();
            let deadline = Deadline::within(ABORTS);
            for thread in self.threads.drain(..) {
                while !thread.is_finished() && deadline.pauses(Duration::from_millis(1)) {}
                if thread.is_finished() {
                    let _ = thread.join();
                }
            }
        }
        drop(self.watchdog.take());
        self.control.blocking().end();
    }
}

impl fmt::Debug for ServerHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerHandle").field("listeners", &self.listening.addrs).finish_non_exhaustive()
    }
}
