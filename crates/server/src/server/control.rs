//! Watching and stopping a server from any thread.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use ringserve_core::{AcceptRate, Address, ServerLimits, Time};
use ringserve_drivers::Listener;

use super::ending::Ending;
use crate::admission::{AdmissionControl, AdmissionStats, Journal, KeyRatesStats, Limiters, UsedKeyRates};
use crate::base::clock::{Clock, Deadline};
use crate::doctor::{Expected, Finding, Lived, Record};
use crate::overload::{Load, ShardLoad};
use crate::shard::accept_queue::AcceptQueues;
use crate::shard::blocking::Pool;
use crate::shard::inbox::{Command, Letter, RemoteShard};
use crate::stats::{AcceptQueueStats, ServerStats, ShardStats, ShardTimes, Stall};
use crate::watch::board::Watch;
use crate::watch::state::State;

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
    rate: Option<Arc<AcceptRate>>,
    journal: Arc<Journal>,
    key_rates: UsedKeyRates,
    clock: Clock,
    blocking: Arc<dyn Pool>,
    watch: Arc<Watch>,
    connections_max: usize,
    held_bytes_max: Arc<AtomicUsize>,
    record: Option<Arc<Record>>,
    /// The name of its driver.
    #[cfg(feature = "metrics")]
    driver: &'static str,
    ending: Arc<Ending>,
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
        let watch = Arc::<Watch>::default();
        let ending = Arc::new(Ending::new(remotes.clone(), watch.clone(), clock.clone()));
        ServerControl {
            remotes,
            listeners,
            accept_queues: AcceptQueues::default(),
            limiters: Limiters::default(),
            rate: None,
            journal: Arc::default(),
            key_rates: UsedKeyRates::default(),
            clock,
            blocking,
            watch,
            connections_max: usize::MAX,
            held_bytes_max: Arc::new(AtomicUsize::new(usize::MAX)),
            record: None,
            #[cfg(feature = "metrics")]
            driver: "simulated",
            ending,
            #[cfg(feature = "tls")]
            tls: Default::default(),
        }
    }

    pub(crate) fn with_accept_queues(self, accept_queues: AcceptQueues) -> ServerControl {
        ServerControl { accept_queues, ..self }
    }

    /// With the connections that all shards together may have.
    pub(crate) fn with_connections_max(self, connections_max: usize) -> ServerControl {
        ServerControl { connections_max, ..self }
    }

    /// With the name of its driver.
    #[cfg(feature = "metrics")]
    pub(crate) fn with_driver(self, driver: &'static str) -> ServerControl {
        ServerControl { driver, ..self }
    }

    #[cfg(feature = "metrics")]
    pub(crate) fn driver(&self) -> &'static str {
        self.driver
    }

    #[cfg(feature = "metrics")]
    pub(crate) fn clock(&self) -> &Clock {
        &self.clock
    }

    /// With the bytes that the connections of each shard may hold.
    pub(crate) fn with_held_bytes_max(self, held_bytes_max: usize) -> ServerControl {
        self.held_bytes_max.store(held_bytes_max, Ordering::Relaxed);
        self
    }

    pub(crate) fn held_bytes_max(&self) -> usize {
        self.held_bytes_max.load(Ordering::Relaxed)
    }

    /// Bounds the memory of each shard by other limits from now on.
    pub(crate) fn bound_memory(&self, held_bytes_max: usize, receive_bytes_max: usize) {
        self.held_bytes_max.store(held_bytes_max, Ordering::Relaxed);
        for remote in self.remotes.iter() {
            // A shard that ended needs none.
            let _ = remote.send(Letter::Memory { held_bytes_max, receive_bytes_max });
        }
    }

    /// False once all shards have ended.
    pub(crate) fn has_shards(&self) -> bool {
        self.remotes.iter().any(|remote| remote.thread().is_some())
    }

    /// With what its end goes by: limits, and listeners by shard.
    pub(super) fn with_end(self, limits: &ServerLimits, sockets: &[Vec<Listener>]) -> ServerControl {
        let ending = Ending::new(self.remotes.clone(), self.watch.clone(), self.clock.clone());
        ServerControl { ending: Arc::new(ending.of(limits, sockets)), ..self }
    }

    pub(super) fn ending(&self) -> &Arc<Ending> {
        &self.ending
    }

    pub(crate) fn with_record(self, record: Option<Arc<Record>>) -> ServerControl {
        ServerControl { record, ..self }
    }

    /// With whom the listeners let in, and how fast all of them together.
    pub(crate) fn with_limiters(self, limiters: Limiters, rate: Option<Arc<AcceptRate>>) -> ServerControl {
        ServerControl { limiters, rate, ..self }
    }

    pub(crate) fn key_rates(&self) -> &UsedKeyRates {
        &self.key_rates
    }

    pub(crate) fn limiters(&self) -> &Limiters {
        &self.limiters
    }

    /// Newcomers had to wait, and come back at once: the rate of all listeners rises as after a start.
    pub(crate) fn starts_slowly(&self, now: Time) {
        if let Some(rate) = &self.rate {
            rate.begin_again(now);
        }
    }

    /// Changes the limits on who is let in while the server runs, of all listeners together: networks that are denied or allowed
    /// for a time, counts and rates. See [`AdmissionControl`].
    pub fn admission(&self) -> AdmissionControl {
        AdmissionControl::new(&self.limiters, self.rate.clone(), self.journal.clone(), self.clock.clone())
    }

    /// The same of one listener, by its place in [`listeners`](ServerControl::listeners), and of those that share its limits: all
    /// of the service, unless it has [its own](crate::listen::Endpoint::listener_admission).
    pub fn admission_at(&self, listener: usize) -> AdmissionControl {
        self.admission().at(&self.limiters, listener)
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

    /// What the [rates by key](crate::admission::KeyRates) hold of which a shard was asked, by their
    /// [name](crate::admission::KeyLimits::name). It takes the 64 locks of each table, one after the other.
    pub fn key_rates_stats(&self) -> BTreeMap<&'static str, KeyRatesStats> {
        self.key_rates.stats()
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

    /// The stalls of the server's shards: the last 64, and those that last, the oldest first. A shard is stalled if it is in one
    /// turn of its loop for longer than [`Stalls`](crate::limits::Stalls) allows. None in a simulation, and with `Stalls::off`.
    ///
    /// No shard is asked or waited for.
    ///
    /// ```
    /// # use ringserve::ServerControl;
    /// fn print_stalls(server: &ServerControl) {
    ///     server.stalls().iter().filter(|stall| stall.ongoing).for_each(|stall| println!("{stall}"));
    /// }
    /// ```
    pub fn stalls(&self) -> Vec<Stall> {
        self.watch.stalls(self.clock.now())
    }

    /// How the threads of the shards spend their time, shard by shard. A file of `/proc` is read for each, which stays open from
    /// then on; no shard is asked or waited for. All zeros for a shard that ended, in a simulation, and where the kernel does
    /// not count (`CONFIG_SCHED_INFO`).
    pub fn shard_times(&self) -> Vec<ShardTimes> {
        let times: Vec<_> = self.remotes.iter().map(|remote| remote.times()).collect();
        self.watch.shares(self.clock.now(), &times)
    }

    /// How much the server is asked for beside what it can do: the worst of its shards.
    pub fn load(&self) -> Load {
        self.remotes.iter().map(|remote| remote.load.get().load()).max().unwrap_or_default()
    }

    /// The same of each shard, with the cause and the share of frames that are shed.
    pub fn shard_loads(&self) -> Vec<ShardLoad> {
        let of = |(shard, remote): (usize, &Arc<RemoteShard>)| {
            let (cause, shed_share) = self.watch.loads.of(shard);
            ShardLoad { shard, load: remote.load.get().load(), cause, shed_share }
        };
        self.remotes.iter().enumerate().map(of).collect()
    }

    pub(crate) fn watch(&self) -> &Arc<Watch> {
        &self.watch
    }

    /// The time on the clock of the shards.
    pub(crate) fn now(&self) -> Time {
        self.clock.now()
    }

    /// The connections that all shards together may have.
    pub(crate) fn connections_max(&self) -> usize {
        self.connections_max
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
        let is_blocked = |remote: &RemoteShard| matches!(remote.state(), State::Turn(began) if now - began > REPORT_WITHIN);
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

    /// True once the server was told to shut down or to stop, also while it goes on as before for
    /// [`ServerLimits::drain_delay`](crate::limits::ServerLimits::drain_delay).
    pub fn is_draining(&self) -> bool {
        self.remotes.iter().any(|remote| remote.last_command() != Command::Serve)
    }

    /// What stands in the way of the server, the worst first: settings of the machine, limits of the process, what was lost
    /// since the start, and which totals of the machine grew since an earlier look, a minute ago or more. It reads files of
    /// `/proc` and `/sys` and the figures that shards published, within milliseconds, and asks no shard. A server on
    /// drivers of the caller, as in a simulation, has no findings. See [`doctor`](crate::doctor).
    ///
    /// ```
    /// # use ringserve::ServerControl;
    /// fn print_findings(server: &ServerControl) {
    ///     for finding in server.doctor() {
    ///         println!("{}: {finding}", finding.severity);
    ///     }
    /// }
    /// ```
    pub fn doctor(&self) -> Vec<Finding> {
        self.doctor_for(&Expected::default())
    }

    /// The same for what is expected of the server.
    pub fn doctor_for(&self, expected: &Expected) -> Vec<Finding> {
        self.record
            .as_ref()
            .map_or_else(Vec::new, |record| record.examine(expected, self.lived(), self.now()))
    }

    fn lived(&self) -> Lived {
        let stats = self.stats();
        let lost = |queue: &AcceptQueueStats| queue.lost.unwrap_or(0);
        let queues = self.accept_queues();
        let worst = queues.iter().max_by_key(|queue| lost(queue)).map(|queue| {
            let addr = self.listeners.get(queue.listener).map(Address::to_string).unwrap_or_default();
            let shard = queue.shard.map(|shard| format!(" of shard {shard}")).unwrap_or_default();
            format!("most at {addr}{shard}")
        });
        Lived {
            connections: stats.connections as u64,
            queue_lost: queues.iter().map(lost).sum(),
            queue_worst: worst.unwrap_or_default(),
            longest_stall: self.stalls().iter().map(|stall| stall.lasted).max(),
            skew: stats.skew(),
            opened: stats.counters.opened,
        }
    }

    /// Begins to shut down, as [`ServerHandle::shutdown`](crate::ServerHandle::shutdown).
    pub fn shutdown(&self) {
        self.remotes.iter().for_each(|remote| remote.command(Command::Drain));
        self.ending.drains();
    }

    /// Stops at once, as [`ServerHandle::abort`](crate::ServerHandle::abort).
    pub fn abort(&self) {
        self.remotes.iter().for_each(|remote| remote.command(Command::Abort));
        self.ending.aborts();
    }
}

impl fmt::Debug for ServerControl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerControl").field("listeners", &self.listeners).finish_non_exhaustive()
    }
}
