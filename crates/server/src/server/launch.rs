//! From a plan to running shards: a thread and a driver for each, and the wait until all are ready.

use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use ringserve_base::clock::Deadline;
use ringserve_base::cpu;
use ringserve_base::doctor::CONNECTION_BYTES;
use ringserve_base::guard::{guard, message_of};
use ringserve_base::lines::{error, info, warn};
use ringserve_base::log_thread::hand_over;
use ringserve_core::Driver;
use ringserve_drivers::guarded;
use ringserve_drivers::{Epoll, Listener, Uring};
use socket2::SockRef;
use tracing::info_span;

use super::config::checked::CheckedConfig;
use super::config::driver_config::{DESCRIPTORS_PER_SHARD, DriverConfig, DriverKind};
use super::config::shared::{ShardSeed, SharedConfig};
use super::listen::sockets::Listening;
use super::running::{Launched, ServerHandle, ShardDeath, ShardEnd};
#[cfg(feature = "runtime-tokio")]
use super::runtime::Runtime;
use super::serves::Serves;
use crate::error::Error;
use crate::shard::face::service::FactoryOutput;
use crate::shard::running::beginning::StartingShard;
use crate::shard::running::starting::{Ended, Gate, ShardStart, StartAbort, StartWait};
use crate::shard::state::services::Services;
use crate::shard::state::shard_loop::ShardLoop;
use crate::shard::wakes::inbox::{Command, ShardRemote, enter_shard};
use crate::watchdog::thread::Watchdog;

/// Threads of a start that failed have this long to end: a shard gives up after 5 s what its driver
/// does not end.
const ENDS_WITHIN: Duration = Duration::from_secs(6);

/// The work of a shard on its thread, to its end.
pub(super) type RunShard = Box<dyn FnOnce(ShardSeed, ShardStart) -> ShardEnd + Send>;

/// Starts all shards and waits until each one is ready. `of_shard` is called for each, and returns
/// what that one does.
pub(super) fn launch(
    shared: &Arc<SharedConfig>,
    (mut starting, until): (StartWait, StartAbort<'_>),
    sockets: Vec<Vec<Listener>>,
    cpus: &[usize],
    of_shard: &dyn Fn() -> RunShard,
) -> Result<Launched, Error> {
    // Copies with which a failed start shuts its listeners down, whatever a factory still waits
    // for. Adopted sockets are not this server's to shut down.
    let own = sockets.iter().flatten().filter(|listener| !listener.is_adopted());
    let own: Vec<OwnedFd> = own.filter_map(|listener| listener.as_fd().try_clone_to_owned().ok()).collect();
    shared.begin(&mut starting);
    let given = &shared.checked.given;
    let control = shared.control.clone();
    let threads = start_threads(shared.seeds(sockets, cpus), given.is_beside, &starting, of_shard);
    match starting.wait(until) {
        Ok(waited) => {
            if waited {
                control.rouse();
            }
            let watchdog = Watchdog::start(given.stalls, given.overload.clone(), &control);
            Ok(Launched { control, threads, watchdog })
        }
        Err(ended) => {
            let Ended { error, heard, panic } = *ended;
            for listener in &own {
                let _ = SockRef::from(listener).shutdown(Shutdown::Both);
            }
            control.abort();
            starting.give_up();
            let threads = of_those_that_end(threads, &heard);
            drop(ServerHandle::new(Listening::default(), Launched { control, threads, watchdog: None }));
            match panic {
                Some(panic) => resume_unwind(panic),
                None => Err(error),
            }
        }
    }
}

/// Starts a thread for each shard, or reports to the start why there is none.
fn start_threads(
    seeds: Vec<ShardSeed>,
    is_beside: bool,
    starting: &StartWait,
    of_shard: &dyn Fn() -> RunShard,
) -> Vec<thread::JoinHandle<ShardEnd>> {
    let mut threads = Vec::new();
    let name = if is_beside { "ringserve-admin" } else { "ringserve" };
    // The span separates its lines in the log from those of the server. Subscribers may panic.
    let span = if is_beside { guard(|| info_span!("admin")).ok() } else { None };
    for seed in seeds {
        let index = seed.index;
        let (start, run, span) = (starting.of_shard(index), of_shard(), span.clone());
        let thread = thread::Builder::new().name(format!("{name}-{index}")).spawn(move || {
            // An endpoint answers whatever becomes of the log.
            let _handing = if is_beside { hand_over(span.clone()) } else { None };
            let _entered = span.and_then(|span| guard(|| span.entered()).ok());
            to_the_end(seed, start, run)
        });
        match thread {
            Ok(thread) => threads.push(thread),
            Err(error) => {
                starting.of_shard(index).failed(Error::Thread(error));
                break;
            }
        }
    }
    threads
}

/// The threads that end in time. A factory that blocks its thread may never return: the thread is
/// left alone, and ends by itself if it does. One that returned a future ends soon, unless the
/// future blocks.
fn of_those_that_end(
    threads: Vec<thread::JoinHandle<ShardEnd>>,
    heard: &[bool],
) -> Vec<thread::JoinHandle<ShardEnd>> {
    const LOOKS_EVERY: Duration = Duration::from_millis(1);
    let deadline = Deadline::within(ENDS_WITHIN);
    let ends = |thread: &thread::JoinHandle<ShardEnd>| {
        while !thread.is_finished() {
            if !deadline.pauses(LOOKS_EVERY) {
                warn!("a factory blocks its thread, which is left alone");
                return false;
            }
        }
        true
    };
    let threads = threads.into_iter().zip(heard);
    threads.filter(|(thread, heard)| **heard && ends(thread)).map(|(thread, _)| thread).collect()
}

/// Runs a shard's thread to its end. If the shard ends by itself, the cause is logged and the
/// others get the order to drain.
fn to_the_end(seed: ShardSeed, start: ShardStart, run: RunShard) -> ShardEnd {
    let (index, control, not_ready) = (seed.index, seed.shared.control.clone(), start.clone());
    enter_shard(index, &control.remotes()[index]);
    control.remotes()[index].set_thread(cpu::this_thread());
    let end = ended(index, control.remotes(), catch_unwind(AssertUnwindSafe(|| run(seed, start))));
    control.remotes()[index].set_thread(0);
    if let Err(death) = &end {
        not_ready.failed(death.error(index));
        // The others have the order.
        control.ending().drains();
    }
    control.ending().shard_ended();
    end
}

/// The end of a shard, of which the others are informed.
pub(super) fn ended(index: usize, remotes: &[Arc<ShardRemote>], ran: thread::Result<ShardEnd>) -> ShardEnd {
    let end = ran.unwrap_or_else(|panic| Err(ShardDeath::Panicked(message_of(panic))));
    // Needed also where the loop never began.
    remotes[index].close();
    // Wakes shards whose services wait for the end of others.
    remotes.iter().for_each(|remote| remote.look_again());
    if let Err(death) = &end {
        let cause = death.error(index);
        guarded(|| error!(shard = index, "{cause}; the other shards drain and the server ends"));
        remotes.iter().for_each(|remote| remote.command(Command::Drain));
    }
    end
}

impl ShardSeed {
    /// Makes driver and service on the shard's own thread, reports that to the start, and serves.
    pub(super) fn run<S: Serves>(mut self, serves: S, start: ShardStart) -> ShardEnd {
        if let Some(cpu) = self.cpu
            && let Err(error) = cpu::pin_to(cpu)
        {
            warn!(shard = self.index, cpu, %error, "shard runs unpinned");
        }
        let sockets = std::mem::take(&mut self.sockets);
        // The one place where the driver is decided: from here on everything is compiled for it.
        let shared = self.shared.clone();
        match &shared.driver.kind {
            DriverKind::Uring(config) => match Uring::new(config, sockets) {
                Ok(driver) => self.run_inside(serves, driver, start),
                Err(error) => give_up(&start, Error::Driver(error)),
            },
            DriverKind::Epoll(config) => match Epoll::new(config, sockets) {
                Ok(driver) => self.run_inside(serves, driver, start),
                Err(error) => give_up(&start, Error::Driver(error)),
            },
        }
    }

    /// Serves inside the configured runtime: without the features of others there is only its own.
    #[cfg(not(feature = "runtime-tokio"))]
    fn run_inside<D: Driver<Descriptor = OwnedFd>, S: Serves>(
        self,
        serves: S,
        driver: D,
        start: ShardStart,
    ) -> ShardEnd {
        self.run_on(serves, driver, start)
    }

    /// Serves inside the configured runtime.
    #[cfg(feature = "runtime-tokio")]
    fn run_inside<D: Driver<Descriptor = OwnedFd>, S: Serves>(
        self,
        serves: S,
        driver: D,
        start: ShardStart,
    ) -> ShardEnd {
        match self.shared.checked.given.runtime {
            Runtime::Own => self.run_on(serves, driver, start),
            runtime => {
                let (shard, started) = (self.index, start.clone());
                let served = runtime.run(Box::pin(async move {
                    match self.prepare(serves, driver, &start) {
                        None => Ok(Default::default()),
                        Some((shard, Gate::Serving, FactoryOutput::Now(services))) => {
                            shard.serving(services).run_hosted().await
                        }
                        Some((shard, _, made)) => StartingShard::new(shard, made, start).run_hosted().await,
                    }
                }));
                match served {
                    Ok(end) => end.map_err(ShardDeath::Driver),
                    Err(error) => give_up(&started, Error::Runtime { shard, error }),
                }
            }
        }
    }

    /// Serves on its own thread, where the driver blocks.
    pub(super) fn run_on<D: Driver<Descriptor = OwnedFd>, S: Serves>(
        self,
        serves: S,
        driver: D,
        start: ShardStart,
    ) -> ShardEnd {
        let end = match self.prepare(serves, driver, &start) {
            None => return Ok(Default::default()),
            Some((shard, Gate::Serving, FactoryOutput::Now(services))) => shard.serving(services).run(),
            Some((shard, _, made)) => StartingShard::new(shard, made, start).run(),
        };
        end.map_err(ShardDeath::Driver)
    }

    /// Calls the factories of the shard, reports that to the start, and waits until those of all
    /// others returned. `None` if the shard cannot be made.
    fn prepare<D: Driver<Descriptor = OwnedFd>, S: Serves>(
        self,
        serves: S,
        driver: D,
        start: &ShardStart,
    ) -> Option<Prepared<D, impl Services + use<D, S>>> {
        match self.make(serves, driver, start) {
            Ok((shard, made)) => Some((shard, start.pass(), made)),
            Err(error) => {
                start.failed(error);
                None
            }
        }
    }
}

/// A shard whose factories returned: how far the start is, and its services.
type Prepared<D, V> = (ShardLoop<D, ()>, Gate, FactoryOutput<V, Error>);

pub(super) fn give_up(start: &ShardStart, error: Error) -> ShardEnd {
    start.failed(error);
    Ok(Default::default())
}

/// The limit on descriptors where neither the kernel nor `/proc` reports one: the usual default.
const DESCRIPTORS_UNKNOWN: u64 = 1024;

/// Raises the limit on descriptors and checks that it suffices. Returns it.
pub(super) fn descriptors(shards: usize, addrs: usize) -> Result<u64, Error> {
    let (before, limit) = cpu::raise_descriptor_limit().unwrap_or_else(|error| {
        warn!("RLIMIT_NOFILE cannot be found out ({error}); it is taken to be {DESCRIPTORS_UNKNOWN}");
        (DESCRIPTORS_UNKNOWN, DESCRIPTORS_UNKNOWN)
    });
    if limit > before {
        info!("RLIMIT_NOFILE raised from {before} to {limit}");
    }
    let needed = shards as u64 * (DESCRIPTORS_PER_SHARD + addrs as u64);
    if limit < needed { Err(Error::Descriptors { limit, needed }) } else { Ok(limit) }
}

/// Logs where and how the server runs.
pub(super) fn announce(
    listening: &Listening,
    cpus: &[usize],
    driver: &DriverConfig,
    checked: &CheckedConfig,
) {
    let CheckedConfig { services, server_limits, shards, .. } = checked;
    let pinned = if cpus.is_empty() { "not pinned" } else { "each pinned to a CPU" };
    for (addr, adopted) in listening.addrs.iter().zip(&listening.adopted) {
        let adopted = if *adopted { " (adopted)" } else { "" };
        info!("listening on {addr}{adopted} with {shards} shards, {pinned}");
    }
    listening.warnings.iter().for_each(|warning| warn!("{warning}"));
    info!("driver: {}", driver.reason());
    let several = services.len() > 1;
    for (number, service) in services.iter().enumerate() {
        let limits = &service.limits;
        let service = match (several, &service.given.name) {
            (false, _) => String::new(),
            (true, Some(name)) => format!(" of the service {name}"),
            (true, None) => format!(" of service {number}"),
        };
        info!(
            "limits{service}: {} connections, {} for each shard, frames up to {} bytes, receive memory up to {} MiB for each \
             shard, {} MiB held; times: first frame {}, idle {}, write stalled {}, at least {} bytes a second written \
             and {} read, handler {}, drain {:?}",
            driver.connections_max(),
            driver.connections(),
            limits.frame_bytes_max,
            server_limits.receive_bytes_max >> 20,
            server_limits.held_bytes_max >> 20,
            or_off(limits.first_frame_timeout),
            or_off(limits.idle_timeout),
            or_off(limits.write_stall_timeout),
            limits.write_bytes_per_second_min,
            limits.read_bytes_per_second_min,
            or_off(limits.handler_timeout),
            server_limits.drain_timeout,
        );
    }
    info!(
        "an idle connection costs about {CONNECTION_BYTES} bytes of user memory, beside the session and the kernel's socket"
    );
}

fn or_off(limit: Option<Duration>) -> String {
    limit.map_or("off".to_owned(), |limit| format!("{limit:?}"))
}
