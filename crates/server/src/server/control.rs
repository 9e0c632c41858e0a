//! What any thread needs to watch a server and to shut it down.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use ringserve_core::Address;

use crate::shard::blocking::Pool;
use crate::shard::clock::Deadline;
use crate::shard::inbox::{Command, RemoteShard};
use crate::stats::ServerStats;

/// How long [`ServerControl::stats`] waits for shards that are blocked: a shard answers at the end of its turn, which takes
/// milliseconds, and a page of figures may wait a moment for one that does not.
const REPORT_WITHIN: Duration = Duration::from_millis(250);

/// Watches a server and shuts it down, from any thread, its shards' too ([`Shard::server`](crate::Shard::server)). Clones are
/// handles on the same server; dropping one does nothing to it.
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

    /// The TLS of all addresses that have it, to be replaced.
    #[cfg(feature = "tls")]
    pub fn tls(&self) -> &ringserve_tls::ServerTls {
        &self.tls
    }

    pub(crate) fn blocking(&self) -> &Arc<dyn Pool> {
        &self.blocking
    }

    /// Has shards that wait for each other look up.
    pub(crate) fn rouse(&self) {
        self.remotes.iter().for_each(|remote| remote.command(Command::Serve));
    }

    pub(crate) fn remotes(&self) -> &Arc<[Arc<RemoteShard>]> {
        &self.remotes
    }

    /// As [`ServerHandle::listeners`](crate::ServerHandle::listeners).
    pub fn listeners(&self) -> &[Address] {
        &self.listeners
    }

    /// What the server did so far and what it holds. Each shard is asked to answer at the end of its turn. One that does not
    /// within 250 ms, because a handler blocks it, is there with what it said the last time, and
    /// [marked as stale](crate::stats::ShardStats::stale). So every shard is in every report, and counters never fall. Those of a shard that
    /// ended are its last ones.
    ///
    /// On a shard's own thread, in a handler or a task, it does not wait: every shard is asked, and the figures are the last
    /// ones there are. Called again a moment later it returns those that were asked for.
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

    /// As [`ServerHandle::shutdown`](crate::ServerHandle::shutdown).
    pub fn shutdown(&self) {
        self.remotes.iter().for_each(|remote| remote.command(Command::Drain));
    }

    /// As [`ServerHandle::abort`](crate::ServerHandle::abort).
    pub fn abort(&self) {
        self.remotes.iter().for_each(|remote| remote.command(Command::Force));
    }
}

impl fmt::Debug for ServerControl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerControl").field("listeners", &self.listeners).finish_non_exhaustive()
    }
}
