//! A server as its shards know it: their inboxes, and what all of them share. What programs ask of
//! it is in `server/control.rs`.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ringserve_admission::internals::{Journal, Limiters, UsedKeyRates};
use ringserve_base::clock::Clock;
use ringserve_base::doctor::Record;
use ringserve_core::{AcceptRate, Address, ServerLimits, Time};
use ringserve_drivers::Listener;

use super::ending::Ending;
use crate::blocking::Pool;
use crate::shard::wakes::inbox::{Command, ShardRemote, ShardRequest};
use crate::stats::upstream_figures::{UpstreamFigures, UpstreamSource, bounded};
use crate::watch::accept_queue::AcceptQueues;
use crate::watch::board::Watch;

/// Watches a server and shuts it down, from any thread, shards included
/// ([`Shard::server`](crate::Shard::server)). Clones control the same server; a drop does nothing
/// to it.
#[derive(Clone)]
pub struct ServerControl {
    remotes: Arc<[Arc<ShardRemote>]>,
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
    driver: &'static str,
    ending: Arc<Ending>,
    upstreams: Arc<[Arc<dyn UpstreamSource>]>,
    tls: ReplaceableTls,
}

/// The TLS of all addresses that have it; none without the feature `tls`.
#[derive(Clone, Debug, Default)]
pub(crate) struct ReplaceableTls {
    #[cfg(feature = "tls")]
    all: ringserve_tls::ServerTls,
}

#[cfg(feature = "tls")]
impl ReplaceableTls {
    pub(crate) fn of(listeners: impl Iterator<Item = ringserve_tls::TlsListener>) -> ReplaceableTls {
        ReplaceableTls { all: listeners.collect() }
    }
}

impl ServerControl {
    pub(crate) fn new(
        remotes: Arc<[Arc<ShardRemote>]>,
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
            driver: "simulated",
            ending,
            upstreams: Arc::default(),
            tls: ReplaceableTls::default(),
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
    pub(crate) fn with_driver(self, driver: &'static str) -> ServerControl {
        ServerControl { driver, ..self }
    }

    #[cfg(feature = "metrics")]
    pub(crate) fn driver(&self) -> &'static str {
        self.driver
    }

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
            let _ = remote.send(ShardRequest::Memory { held_bytes_max, receive_bytes_max });
        }
    }

    /// False once all shards have ended.
    pub(crate) fn has_shards(&self) -> bool {
        self.remotes.iter().any(|remote| remote.thread().is_some())
    }

    /// With what its end goes by: limits, and listeners by shard.
    pub(crate) fn with_end(self, limits: &ServerLimits, sockets: &[Vec<Listener>]) -> ServerControl {
        let ending = Ending::new(self.remotes.clone(), self.watch.clone(), self.clock.clone());
        ServerControl { ending: Arc::new(ending.of(limits, sockets)), ..self }
    }

    pub(crate) fn ending(&self) -> &Arc<Ending> {
        &self.ending
    }

    pub(crate) fn with_upstreams(self, upstreams: Arc<[Arc<dyn UpstreamSource>]>) -> ServerControl {
        ServerControl { upstreams, ..self }
    }

    /// The figures of the [groups of other servers](crate::Server::upstream), in the order in which
    /// the server was given them.
    pub fn upstreams(&self) -> Vec<UpstreamFigures> {
        bounded(self.upstreams.iter().map(|upstream| upstream.figures()))
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

    /// The rate at which all listeners together accept, if it is limited.
    pub(crate) fn rate(&self) -> Option<&Arc<AcceptRate>> {
        self.rate.as_ref()
    }

    pub(crate) fn journal(&self) -> &Arc<Journal> {
        &self.journal
    }

    pub(crate) fn record(&self) -> Option<&Record> {
        self.record.as_deref()
    }

    pub(crate) fn limiters(&self) -> &Limiters {
        &self.limiters
    }

    /// Newcomers had to wait, and come back at once: the rate of all listeners rises as after a
    /// start.
    pub(crate) fn starts_slowly(&self, now: Time) {
        if let Some(rate) = &self.rate {
            rate.begin_again(now);
        }
    }

    pub(crate) fn with_tls(self, tls: ReplaceableTls) -> ServerControl {
        ServerControl { tls, ..self }
    }

    /// The TLS of all addresses that have it, to replace its certificates.
    #[cfg(feature = "tls")]
    pub fn tls(&self) -> &ringserve_tls::ServerTls {
        &self.tls.all
    }

    pub(crate) fn blocking(&self) -> &Arc<dyn Pool> {
        &self.blocking
    }

    /// Wakes shards that wait for each other.
    pub(crate) fn rouse(&self) {
        self.remotes.iter().for_each(|remote| remote.command(Command::Serve));
    }

    pub(crate) fn remotes(&self) -> &Arc<[Arc<ShardRemote>]> {
        &self.remotes
    }

    /// The addresses of the server, as [`ServerHandle::listeners`](crate::ServerHandle::listeners).
    pub fn listeners(&self) -> &[Address] {
        &self.listeners
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

    /// True from the order to shut down or to stop on, also while the server goes on as before for
    /// [`ServerLimits::drain_delay`](crate::limits::ServerLimits::drain_delay).
    pub fn is_draining(&self) -> bool {
        self.remotes.iter().any(|remote| remote.last_command() != Command::Serve)
    }
}

impl fmt::Debug for ServerControl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerControl")
            .field("listeners", &self.listeners)
            .field("driver", &self.driver)
            .field("tls", &self.tls)
            .finish_non_exhaustive()
    }
}
