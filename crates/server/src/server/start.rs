//! The start of a server: what its program set is checked, it listens, and all of its shards begin.
//!
//! Each program compiles what knows the types of its services. So only [`Prepared`] knows them: the
//! rest is code that is compiled once.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::thread;

use ringserve_admission::internals::{KernelFilters, watch};
use ringserve_base::clock::Clock;
use ringserve_base::cpu::cpus_to_pin;
use ringserve_base::doctor::Record;
use ringserve_base::log_thread::write_at_the_end;
use ringserve_drivers::Listener;

use super::config::checked::{CheckLimits, CheckedConfig};
#[cfg(feature = "admin")]
use super::config::driver_config::DESCRIPTORS_PER_SHARD;
use super::config::driver_config::{DriverChoice, DriverConfig};
use super::config::given::ServerConfig;
use super::config::shared::ShardSeed;
use super::fit::{Fit, fit, follow};
use super::launch::{RunShard, announce, descriptors, launch};
use super::listen::sockets::{Listen, ListenPlace, Listening};
#[cfg(feature = "admin")]
use super::running::Facts;
use super::running::ServerHandle;
use super::running::{Companion, RunningCompanion};
use super::serves::{Serves, SpentFactories};
use super::signals::{StopSignals, end_process};
use super::until::serve_until;
use crate::blocking::threads::Threads;
use crate::error::Error;
use crate::log;
use crate::shard::remote::control::ServerControl;
use crate::shard::running::starting::{StartAbort, StartWait};
use crate::stats::ServerStats;

/// Connections of a server's companion endpoint.
#[cfg(feature = "admin")]
pub(crate) const ENDPOINT_CONNECTIONS: usize = 64;

/// Descriptors for a server's companion endpoint: those of its shard, and of its connections.
/// Without them it would be silent just when the connections of the server have taken all.
#[cfg(feature = "admin")]
const ENDPOINT_DESCRIPTORS: u64 = DESCRIPTORS_PER_SHARD + ENDPOINT_CONNECTIONS as u64;

/// A server as its program described it.
pub(crate) struct Prepared<S> {
    pub(crate) config: ServerConfig,
    pub(crate) hooks: StartHooks,
    pub(crate) serves: S,
}

/// Hooks that a start calls, once.
#[derive(Default)]
pub(crate) struct StartHooks {
    pub(super) on_start: Option<Box<dyn FnOnce(ServerControl) + Send>>,
    /// The companion endpoint.
    pub(super) companion: Companion,
}

impl<S: Serves + Send + 'static> Prepared<S> {
    /// Serves until a signal says to stop.
    pub(super) fn serve(self) -> Result<(), Error> {
        let starting = StartWait::new();
        let mut signals = StopSignals::take(starting.interrupter())?;
        let running = match self.start(starting, None) {
            Ok(running) => running,
            Err(Error::Interrupted) => return Ok(()),
            Err(error) => return Err(signals.failed(error)),
        };
        signals.stop(&running)?;
        let ended = running.wait();
        if matches!(ended, Err(Error::Blocked { .. })) {
            end_process("a call blocks a shard");
        }
        drop(signals);
        let report = ended?;
        write_at_the_end(move || log::stopped(&report));
        Ok(())
    }

    /// Serves until a future is done.
    pub(super) fn serve_until(self, future: impl Future) -> Result<ServerStats, Error> {
        let mut until = pin!(async { drop(future.await) });
        let running = match self.start(StartWait::new(), Some(until.as_mut())) {
            Err(Error::Interrupted) => return Ok(ServerStats::default()),
            started => started?,
        };
        serve_until(running, until)
    }

    /// Starts all shards, on their own threads; not to the end if `until` is done while a factory
    /// waits.
    pub(super) fn start(self, starting: StartWait, until: StartAbort<'_>) -> Result<ServerHandle, Error> {
        let Prepared { config, hooks, serves } = self;
        let of_shard = || -> RunShard {
            let (serves, kept) = (serves.again(), SpentFactories::new(serves.again()));
            Box::new(move |seed: ShardSeed, start| {
                let _kept = kept;
                seed.run(serves, start)
            })
        };
        let framings: CheckLimits<'_> = &|number, limits| serves.check_limits(number, limits);
        let by_default = thread::available_parallelism().map_or(1, usize::from);
        let checked = config.check(framings, by_default)?;
        Ok(start_shards(checked, hooks, &of_shard, (starting, until))?.keeping(SpentFactories::new(serves)))
    }
}

/// Starts all shards, each of which does on its thread what `of_shard` returns.
fn start_shards(
    mut checked: CheckedConfig,
    mut hooks: StartHooks,
    of_shard: &dyn Fn() -> RunShard,
    (starting, until): (StartWait, StartAbort<'_>),
) -> Result<ServerHandle, Error> {
    checked.given.runtime.check()?;
    // First, so that it answers while factories are pending.
    let mut companion = hooks.companion.start()?;
    let memory = fit_memory(&mut checked)?;
    let descriptors = descriptors(checked.shards, checked.binds().count())?;
    let left_alone = descriptors_of(&companion);
    let driver = DriverChoice { checked: &checked, descriptors, left_alone }.choose()?;
    let cpus = cpus_to_pin(checked.given.pin, checked.shards);
    let (mut sockets, listening) = listen(&checked, &cpus)?;
    if checked.rate.is_some() {
        sockets.iter_mut().flatten().for_each(Listener::one_by_one);
    }
    // One for all: networks are denied until a time on it.
    let clock = Clock::start();
    let filters = KernelFilters::of(&sockets, &checked.limiters, clock.clone());
    watch(&checked.limiters, filters).map_err(Error::Thread)?;
    checked.binds().try_for_each(|bind| bind.tls.begin(&bind.addr))?;
    let record = announced(&checked, &driver, &listening, &cpus);
    note_facts(&mut companion, &checked, &driver);
    let blocking = Arc::new(Threads::new(&checked.server_limits));
    let shared = checked.share(driver, (&listening, &sockets), (clock, blocking), record);
    let launched = launch(&shared, (starting, until), sockets, &cpus, of_shard)?;
    // Made before user code runs: if that panics, or something fails, dropping it ends the server.
    let handle = ServerHandle::new(listening, launched);
    if let Some(memory) = memory {
        follow(memory, &handle.control()).map_err(Error::Thread)?;
    }
    let handle = handle.with_companion(companion);
    if let Some(on_start) = hooks.on_start.take() {
        on_start(handle.control());
    }
    Ok(handle)
}

/// Writes how the server runs to the log, and begins the doctor's record of it. The endpoint beside
/// a server has nothing to say that the server's own lines and record do not.
fn announced(
    checked: &CheckedConfig,
    driver: &DriverConfig,
    listening: &Listening,
    cpus: &[usize],
) -> Option<Arc<Record>> {
    if checked.given.is_beside {
        return None;
    }
    announce(listening, cpus, driver, checked);
    Some(Arc::new(Record::begin(checked.setup(driver.rings(), !cpus.is_empty()))))
}

/// Descriptors that the companion endpoint needs.
#[cfg(feature = "admin")]
fn descriptors_of(companion: &RunningCompanion) -> u64 {
    if companion.is_there() { ENDPOINT_DESCRIPTORS } else { 0 }
}

#[cfg(not(feature = "admin"))]
fn descriptors_of(_companion: &RunningCompanion) -> u64 {
    0
}

/// Leaves the settings of the server with its companion endpoint.
#[cfg(feature = "admin")]
fn note_facts(companion: &mut RunningCompanion, checked: &CheckedConfig, driver: &DriverConfig) {
    companion.facts = Facts {
        driver: driver.name(),
        connections_max: driver.connections_max(),
        connections_wanted: checked.server_limits.connections_max,
        buffers_max: checked.server_limits.receive_buffers_max(),
        limits: checked.services.iter().map(|service| service.limits.clone()).collect(),
    };
}

#[cfg(not(feature = "admin"))]
fn note_facts(_companion: &mut RunningCompanion, _checked: &CheckedConfig, _driver: &DriverConfig) {}

/// Fits limits into the memory that the process may use. Returns what that depends on, if it may
/// change.
fn fit_memory(checked: &mut CheckedConfig) -> Result<Option<Fit>, Error> {
    let CheckedConfig { given, services, server_limits, shards, .. } = checked;
    // The endpoint beside a server holds little, and the server's own lines say what there is.
    let keeps = given.keeps_limits || given.is_beside;
    let limits = services.iter().map(|of| (of.limits.clone(), of.has_given_limits)).collect();
    let wanted = Fit::new(server_limits, given.server_limits.is_some(), limits, *shards);
    let mut limits: Vec<_> = services.iter_mut().map(|of| &mut of.limits).collect();
    fit(if keeps { wanted.kept() } else { wanted }, server_limits, &mut limits)
}

/// Listens at the addresses of all services.
fn listen(checked: &CheckedConfig, cpus: &[usize]) -> Result<(Vec<Vec<Listener>>, Listening), Error> {
    let several = checked.services.len() > 1;
    let all = checked.services.iter().flat_map(|of| of.binds.iter().map(move |bind| (of, bind)));
    let place = all.map(|(of, bind)| ListenPlace {
        bind,
        options: &of.sockets,
        service: several.then(|| of.label()),
    });
    let listen = Listen { shards: checked.shards, share_port: checked.given.share_port, cpus };
    listen.at(&place.collect::<Vec<_>>())
}
