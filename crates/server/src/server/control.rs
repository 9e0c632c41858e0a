//! Watching and stopping a server from any thread.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use ringserve_core::Address;

use crate::shard::blocking::Pool;
use crate::shard::clock::Deadline;
use crate::shard::inbox::{Command, RemoteShard};
use crate::stats::ServerStats;

/// How long [`ServerControl::stats`] waits for blocked shards: a shard answers at the end of its turn, which takes
/// milliseconds, and a page of figures may wait a moment for a slow one.
const REPORT_WITHIN: Duration = Duration::from_millis(250);

/// Watches a server and shuts it down, from any thread, shards included ([`Shard::server`](crate::Shard::server)). Clones
/// control the same server; a drop does nothing to it.
#[derive(Clone)]
pub struct ServerControl {
    remotes: Arc<[Arc<RemoteShard>]>,
    listeners: Arc<[Address]>,
    blocking: Arc<dyn Pool>,
    #[cfg(feature = "tls")]
    tls: ringserve_tls::ServerTls,
}

impl ServerControl {
    pub(crate) fn new(
        remotes: Arc<[Arc<RemoteShard>]>,
        listeners: Arc<[Address]>,
        blocking: Arc<dyn Pool>,
    ) -> ServerControl {
        ServerControl {
            remotes,
            listeners,
            blocking,
            #[cfg(feature = "tls")]
            tls: Default::default(),
        }
    }

    #[cfg(feature = "tls")]
    pub(crate) fn with_tls(self, tls: ringserve_tls::ServerTls) -> ServerControl {
        ServerControl { tls, ..self }
    }

    /// The TLS of all addresses that have it, to replace its certificates.
    #[cfg(feature = "tls")]
    pub fn tls(&self) -> &ringserve_tls::ServerTls {
        &self.tls
    }

    pub(crate) fn blocking(&self) -> &Arc<dyn Pool> {
        &self.blocking
    }

    /// Wakes shards that wait for each other.
    pub(crate) fn rouse(&self) {
        self.remotes.iter().for_each(|remote| remote.command(Command::Serve));
    }

    pub(crate) fn remotes(&self) -> &Arc<[Arc<RemoteShard>]> {
        &self.remotes
    }

    /// The addresses of the server, as [`ServerHandle::listeners`](crate::ServerHandle::listeners).
    pub fn listeners(&self) -> &[Address] {
        &self.listeners
    }

    /// Figures of the server: totals since its start, and its present state. Each shard answers at the end of its turn. A shard
    /// that does not answer within 250 ms, because a handler blocks it, is reported with its last figures and [marked as
    /// stale](crate::stats::ShardStats::stale). So every shard is in every report, and counters never fall. A shard that ended
    /// is reported with its last figures too.
    ///
    /// On a shard's own thread, in a handler or a task, it does not wait: it asks every shard and returns the last figures.
    /// Called again a moment later, it returns the answers.
    pub fn stats(&self) -> ServerStats {
        let deadline = Deadline::within(REPORT_WITHIN);
        let mut report = ServerStats::default();
        let asked: Vec<u64> = self.remotes.iter().map(|remote| remote.ask_report()).collect();
        for (remote, number) in self.remotes.iter().zip(asked) {
            report.add(remote.latest_report(number, deadline));
        }
        report.blocking = self.blocking.stats();
        report
    }

    /// Begins to shut down, as [`ServerHandle::shutdown`](crate::ServerHandle::shutdown).
    pub fn shutdown(&self) {
        self.remotes.iter().for_each(|remote| remote.command(Command::Drain));
    }

    /// Stops at once, as [`ServerHandle::abort`](crate::ServerHandle::abort).
    pub fn abort(&self) {
        self.remotes.iter().for_each(|remote| remote.command(Command::Force));
    }
}

impl fmt::Debug for ServerControl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerControl").field("listeners", &self.listeners).finish_non_exhaustive()
    }
}
