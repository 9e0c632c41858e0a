//! Watching and stopping a server from any thread.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use ringserve_core::Address;

use super::accept_queue::AcceptQueues;
use crate::admission::{AdmissionStats, Limiters};
use crate::shard::blocking::Pool;
use crate::shard::clock::{Clock, Deadline};
use crate::shard::inbox::{Command, RemoteShard};
use crate::stats::{AcceptQueueStats, ServerStats, ShardStats};

/// How long [`ServerControl::stats_now`] waits for blocked shards: a shard answers at the end of its turn, which takes
/// milliseconds, and a test may wait a moment for a slow one.
const REPORT_WITHIN: Duration = Duration::from_millis(250);

/// Watches a server and shuts it down, from any thread, shards included ([`Shard::server`](crate::Shard::server)). Clones
/// control the same server; a drop does nothing to it.
#[derive(Clone)]
pub struct ServerControl {
    remotes: Arc<[Arc<RemoteShard>]>,
    listeners: Arc<[Address]>,
    accept_queues: AcceptQueues,
    limiters: Limiters,
    clock: Clock,
    blocking: Arc<dyn Pool>,
    #[cfg(feature = "tls")]
    tls: ringserve_tls::ServerTls,
}

impl ServerControl {
    pub(crate) fn new(
        remotes: Arc<[Arc<RemoteShard>]>,
        listeners: Arc<[Address]>,
        blocking: Arc<dyn Pool>,
        clock: Clock,
    ) -> ServerControl {
        ServerControl {
            remotes,
            listeners,
            accept_queues: AcceptQueues::default(),
            limiters: Limiters::default(),
            clock,
            blocking,
            #[cfg(feature = "tls")]
            tls: Default::default(),
        }
    }

    pub(crate) fn with_accept_queues(self, accept_queues: AcceptQueues) -> ServerControl {
        ServerControl { accept_queues, ..self }
    }

    pub(crate) fn with_limiters(self, limiters: Limiters) -> ServerControl {
        ServerControl { limiters, ..self }
    }

    pub(crate) fn limiters(&self) -> &Limiters {
        &self.limiters
    }

    /// What the limits on addresses hold ([`Admission`](crate::admission::Admission)). It takes the 64 locks of each table, one
    /// after the other.
    pub fn admission_stats(&self) -> AdmissionStats {
        let mut sum = AdmissionStats::default();
        for of in self.limiters.each().map(|limiter| limiter.stats()) {
            let AdmissionStats { prefixes, connections, sketched } = &mut sum;
            *prefixes += of.prefixes;
            *connections += of.connections;
            *sketched += of.sketched;
        }
        sum
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

    /// What waits to be accepted at each TCP address on each shard, and what was lost there, listener by listener and in each of
    /// them by shard; one value for an adopted socket, from whose one queue all shards accept. Two system calls for each:
    /// nothing is asked of a shard, so it tells of one that is blocked, too.
    ///
    /// A listener that is closed, as in a shutdown, is not in it any more. Unix sockets are never: the kernel tells nothing of
    /// their queues, and nothing is lost there, since a peer that finds one full waits in `connect`, or is told `EAGAIN` if it
    /// does not want to wait.
    ///
    /// ```
    /// # use ringserve::ServerControl;
    /// fn print_queues(server: &ServerControl) {
    ///     for queue in server.accept_queues() {
    ///         let addr = &server.listeners()[queue.listener];
    ///         println!("{addr}, shard {:?}: {} of {} wait, {:?} lost", queue.shard, queue.waiting, queue.capacity, queue.lost);
    ///     }
    /// }
    /// ```
    pub fn accept_queues(&self) -> Vec<AcceptQueueStats> {
        self.accept_queues.read().collect()
    }

    pub(crate) fn queues(&self) -> &AcceptQueues {
        &self.accept_queues
    }

    /// What the server did so far and what it holds, as each shard published it: a shard stores its figures at the end of a
    /// turn, if it did not within the last 100 ms, and before it sleeps for longer. No shard is asked or waited for, and
    /// every shard is in it, with its last figures also after its end. Counters never fall.
    ///
    /// A shard that a handler has blocked for more than 250 ms is [marked as stale](crate::stats::ShardStats::stale): its
    /// figures are those from before. [`stats_now`](ServerControl::stats_now) has figures that are exact.
    pub fn stats(&self) -> ServerStats {
        let now = self.clock.now();
        let is_blocked = |remote: &RemoteShard| {
            remote
                .snapshot()
                .and_then(|snapshot| snapshot.in_turn_for(now))
                .is_some_and(|time| time > REPORT_WITHIN)
        };
        let mut report = ServerStats::default();
        for remote in self.remotes.iter() {
            let stale = is_blocked(remote);
            let shard = remote.published();
            report.add(ShardStats { stale: shard.stale || stale, ..shard });
        }
        report.blocking = self.blocking.stats();
        report
    }

    /// The same, as it is now: each shard is asked to answer at the end of its turn. For tests, which count what they just
    /// did; it wakes shards that sleep. One that does not answer within 250 ms, because a handler blocks it, is there with
    /// what it said the last time, and [marked as stale](crate::stats::ShardStats::stale).
    ///
    /// On a shard's own thread, in a handler or a task, it does not wait: every shard is asked, and the figures are the last
    /// ones that were asked for. Called again a moment later it returns those.
    pub fn stats_now(&self) -> ServerStats {
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
