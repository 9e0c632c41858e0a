//! From a plan to running shards: a thread and a driver for each, and the wait until all are ready.

use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use ringserve_core::{Driver, Limits, ServerLimits};
use ringserve_drivers::{Epoll, Listener, Uring};
use socket2::SockRef;
use tracing::{error, info, warn};

use super::control::ServerControl;
use super::cpu;
use super::driver::{Chosen, ChosenKind, DESCRIPTORS_PER_SHARD};
use super::error::Error;
use super::listen::sockets::Listening;
use super::plan::{OneShard, Plan};
use super::running::{ServerHandle, ShardDeath, ShardEnd};
use super::runtime::Runtime;
use super::serves::Serves;
use super::starting::{Heard, Ready, Starting};
use crate::guard::message_of;
use crate::log::guarded;
use crate::shard::inbox::{Command, RemoteShard, enter_shard};
use crate::shard::services::Services;
use crate::shard::state::{Parts, ShardLoop};

/// Measured as 251 with `ringserve-bench idle`.
const IDLE_BYTES: usize = 256;

/// The shards that run, as seen from outside and as threads.
pub(super) type Launched = (ServerControl, Vec<thread::JoinHandle<ShardEnd>>);

impl<S: Serves + Send + 'static> Plan<S> {
    /// Starts all shards and waits until each one is ready. `run` is what each does on its thread, to its end.
    pub(super) fn launch(
        self,
        starting: Starting,
        sockets: Vec<Vec<Listener>>,
        cpus: &[usize],
        run: impl Fn(OneShard<S>, Ready) -> ShardEnd + Clone + Send + 'static,
    ) -> Result<Launched, Error> {
        let mut threads = Vec::new();
        // So that nothing listens any more after a start that failed, whatever a factory still waits for. Adopted sockets are
        // not this server's to shut down.
        let own = sockets.iter().flatten().filter(|listener| !listener.is_adopted());
        let own: Vec<OwnedFd> =
            own.filter_map(|listener| listener.as_fd().try_clone_to_owned().ok()).collect();
        let shards = self.shards(sockets, cpus);
        let (count, control) = (shards.len(), shards[0].control.clone());
        for shard in shards {
            let index = shard.index;
            let (ready, run) = (starting.ready(index), run.clone());
            let thread = thread::Builder::new()
                .name(format!("ringserve-{index}"))
                .spawn(move || to_the_end(shard, ready, run));
            match thread {
                Ok(thread) => threads.push(thread),
                Err(error) => {
                    starting.ready(index).failed(Error::Thread(error));
                    break;
                }
            }
        }
        let gate = starting.gate();
        let ready = starting.wait(count);
        if let Err((_, heard)) = &ready {
            for listener in &own {
                let _ = SockRef::from(listener).shutdown(Shutdown::Both);
            }
            control.abort();
            threads = of_those_heard(threads, heard);
        }
        gate.open();
        match ready {
            Ok(()) => Ok((control, threads)),
            Err((error, _)) => {
                drop(ServerHandle::new(Listening::default(), control, threads));
                Err(error)
            }
        }
    }
}

/// A factory that waits may never return: its thread is left alone, and ends by itself if it does.
fn of_those_heard(
    threads: Vec<thread::JoinHandle<ShardEnd>>,
    heard: &Heard,
) -> Vec<thread::JoinHandle<ShardEnd>> {
    threads.into_iter().enumerate().filter(|(shard, _)| heard.of(*shard)).map(|(_, thread)| thread).collect()
}

/// A shard's thread. If the shard ends by itself, the cause is logged and the others are told to drain.
fn to_the_end<S>(shard: OneShard<S>, ready: Ready, run: impl Fn(OneShard<S>, Ready) -> ShardEnd) -> ShardEnd {
    let (index, control, not_ready) = (shard.index, shard.control.clone(), ready.again());
    enter_shard(index, &control.remotes()[index]);
    let end = ended(index, control.remotes(), catch_unwind(AssertUnwindSafe(|| run(shard, ready))));
    if let Err(death) = &end {
        not_ready.failed(death.error(index));
    }
    end
}

/// How a shard ended, which the others learn too.
pub(super) fn ended(index: usize, remotes: &[Arc<RemoteShard>], ran: thread::Result<ShardEnd>) -> ShardEnd {
    let end = ran.unwrap_or_else(|panic| Err(ShardDeath::Panicked(message_of(panic))));
    // Also where the loop never began.
    remotes[index].close();
    if let Err(death) = &end {
        let cause = death.error(index);
        guarded(|| error!(shard = index, "{cause}; the other shards drain and the server ends"));
        remotes.iter().for_each(|remote| remote.command(Command::Drain));
    }
    end
}

impl<S: Serves> OneShard<S> {
    /// On the shard's own thread: makes driver and service, says so, and serves.
    pub(super) fn run(mut self, ready: Ready) -> ShardEnd {
        if let Some(cpu) = self.cpu
            && let Err(error) = cpu::pin_to(cpu)
        {
            warn!(shard = self.index, cpu, %error, "shard runs unpinned");
        }
        let sockets = std::mem::take(&mut self.sockets);
        // The one place where the driver is decided: from here on everything is compiled for it.
        match self.chosen.kind.clone() {
            ChosenKind::Uring(config) => match Uring::new(&config, sockets) {
                Ok(driver) => self.run_inside(driver, ready),
                Err(error) => give_up(ready, Error::Driver(error)),
            },
            ChosenKind::Epoll(config) => match Epoll::new(&config, sockets) {
                Ok(driver) => self.run_inside(driver, ready),
                Err(error) => give_up(ready, Error::Driver(error)),
            },
        }
    }

    /// Inside the runtime it was told to run in.
    fn run_inside<D: Driver<Descriptor = OwnedFd>>(self, driver: D, ready: Ready) -> ShardEnd {
        match self.runtime {
            Runtime::Own => self.run_on(driver, ready),
            #[cfg(feature = "runtime-tokio")]
            runtime => {
                let (shard, mut ready) = (self.index, Some(ready));
                let serves = runtime.run(|| {
                    let ready = ready.take();
                    async move {
                        let Some(ready) = ready else { return Ok(Default::default()) };
                        match self.prepare(driver, ready) {
                            Some(parts) => {
                                ShardLoop::new(parts).run_hosted().await.map_err(ShardDeath::Driver)
                            }
                            None => Ok(Default::default()),
                        }
                    }
                });
                serves.unwrap_or_else(|error| match ready {
                    Some(ready) => give_up(ready, Error::Runtime { shard, error }),
                    None => Ok(Default::default()),
                })
            }
        }
    }

    /// On its own thread, where the driver blocks.
    pub(super) fn run_on<D: Driver<Descriptor = OwnedFd>>(self, driver: D, ready: Ready) -> ShardEnd {
        match self.prepare(driver, ready) {
            Some(parts) => ShardLoop::new(parts).run().map_err(ShardDeath::Driver),
            None => Ok(Default::default()),
        }
    }

    /// Makes the shard, says so, and waits until all others are made. `None` if it cannot be.
    fn prepare<D: Driver<Descriptor = OwnedFd>>(
        self,
        driver: D,
        ready: Ready,
    ) -> Option<Parts<D, impl Services + use<D, S>>> {
        match self.make(driver) {
            Ok(parts) => {
                ready.succeeded();
                Some(parts)
            }
            Err(error) => {
                ready.failed(error);
                None
            }
        }
    }
}

pub(super) fn give_up(ready: Ready, error: Error) -> ShardEnd {
    ready.failed(error);
    Ok(Default::default())
}

/// The limit on descriptors where neither the kernel nor `/proc` tells: what systems begin with.
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

/// The CPU of each shard, or none.
pub(super) fn cpus_to_pin(pin: Option<bool>, shards: usize) -> Vec<usize> {
    let cpus = cpu::cpus();
    let fits = cpus.len() == shards && !cpu::has_quota();
    if pin.unwrap_or(fits) { cpus.into_iter().cycle().take(shards).collect() } else { Vec::new() }
}

/// Says where and how the server runs. `services` have a name if the program gave one.
pub(super) fn announce<'a>(
    listening: &Listening,
    cpus: &[usize],
    chosen: &Chosen,
    (shards, server): (usize, &ServerLimits),
    services: impl ExactSizeIterator<Item = (Option<&'a str>, &'a Limits)>,
) {
    let pinned = if cpus.is_empty() { "not pinned" } else { "each pinned to a CPU" };
    for (addr, adopted) in listening.addrs.iter().zip(&listening.adopted) {
        let adopted = if *adopted { " (adopted)" } else { "" };
        info!("listening on {addr}{adopted} with {shards} shards, {pinned}");
    }
    listening.warnings.iter().for_each(|warning| warn!("{warning}"));
    info!("driver: {}", chosen.reason());
    let several = services.len() > 1;
    for (number, (name, limits)) in services.enumerate() {
        let service = match (several, name) {
            (false, _) => String::new(),
            (true, Some(name)) => format!(" of the service {name}"),
            (true, None) => format!(" of service {number}"),
        };
        info!(
            "limits{service}: {} connections, {} for each shard, frames up to {} bytes, receive memory up to {} MiB for each \
             shard, {} MiB held; times: first frame {}, idle {}, write stalled {}, at least {} bytes a second written \
             and {} read, handler {}, drain {:?}",
            chosen.connections_max(),
            chosen.connections(),
            limits.frame_bytes_max,
            server.receive_bytes_max >> 20,
            server.held_bytes_max >> 20,
            or_off(limits.first_frame_timeout),
            or_off(limits.idle_timeout),
            or_off(limits.write_stall_timeout),
            limits.write_bytes_per_second_min,
            limits.read_bytes_per_second_min,
            or_off(limits.handler_timeout),
            server.drain_timeout,
        );
    }
    info!(
        "an idle connection costs {IDLE_BYTES} bytes of user memory or less, beside the session and the kernel's \
         socket"
    );
}

fn or_off(limit: Option<Duration>) -> String {
    limit.map_or("off".to_owned(), |limit| format!("{limit:?}"))
}
