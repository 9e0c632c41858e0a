//! A server without threads, for simulations: its shards are made in the same way, and stepped by
//! one thread.

use std::any::Any;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use ringserve_base::clock::{Clock, Deadline};
use ringserve_base::guard::guard;
use ringserve_base::thread_times::ThreadTimes;
use ringserve_core::{Limits, ServerLimits};
use ringserve_drivers::Uring;
use ringserve_simkernel::{Network, RingId, SimKernel};

use super::config::checked::CheckLimits;
use super::config::given::ServerConfig;
use super::config::shared::ShardSeed;
use super::driven::shared;
use super::launch::ended;
use super::running::{ShardDeath, ShardEnd};
use super::runtime::Runtime;
use super::serves::Serves;
use super::start::Prepared;
use crate::blocking::Pool;
use crate::error::Error;
use crate::overload::{Load, LoadReport, Overload};
use crate::shard::face::service::FactoryOutput;
use crate::shard::remote::control::ServerControl;
use crate::shard::running::beginning::StartingShard;
use crate::shard::running::starting::{ShardStart, StartState, StartWait};
use crate::shard::running::stepped::{StepStage, Stepped, SteppedShard};
use crate::shard::state::shard_loop::Peers;
use crate::shard::wakes::inbox::{Command, OnCall, enter_shard, leave_shard};
use crate::stats::{ServerStats, ServiceNames, ShardStats};
use crate::watchdog::loads::Loads;

/// A server whose shards are stepped, on a simulated network, by one thread.
pub(crate) struct SteppedServer {
    pub(crate) addrs: Vec<SocketAddr>,
    /// Its services, with the numbers of their addresses.
    pub(crate) names: ServiceNames,
    pub(crate) limits: ServerLimits,
    /// Connections beyond them that there may be.
    reserved: usize,
    remotes: Peers,
    shards: Vec<Box<dyn Stepped>>,
    ends: Vec<Option<ShardEnd>>,
    blocking: Arc<dyn Pool>,
    starting: StartWait,
    control: ServerControl,
    overload: Overload,
    /// Its loads, if they are watched.
    loads: Option<Loads>,
    /// The factories, until the last shard ended.
    kept: Option<Box<dyn Any>>,
}

/// A simulation steps shards, and no runtime's loop.
fn refuse_runtime(runtime: Runtime) -> Result<(), Error> {
    if runtime == Runtime::Own {
        return Ok(());
    }
    let error = std::io::Error::other("a runtime around shards is not simulated: leave Server::runtime out");
    Err(Error::Runtime { shard: 0, error })
}

/// Descriptors of a simulated process: tables that cost little to make.
const SIMULATED_DESCRIPTORS: u64 = 20_000;

/// Makes a pool for calls that block.
type MakePool<'a> = &'a dyn Fn(&ServerLimits) -> Arc<dyn Pool>;

/// Calls the factories of a shard.
type MakeShard<'a> = &'a dyn Fn(ShardSeed, Uring<SimKernel>, &ShardStart) -> Result<MadeShard, Error>;

/// A shard whose factories returned.
struct MadeShard {
    /// Its services are there.
    is_there: bool,
    /// Makes the stepped shard. The flag is whether the services of all shards are there.
    steps: Box<dyn FnOnce(RingId, bool) -> Box<dyn Stepped>>,
}

impl SteppedServer {
    /// Begins what [`Server::start`] does, on this network, with one shard by default: calls the
    /// factories. The shards use the given clock and chance, and `on_call` observes each of their
    /// calls. Settings of the server's driver, of sockets and of pinning are ignored.
    pub(crate) fn start<S: Serves + 'static>(
        server: Prepared<S>,
        network: &Network,
        simulated: (Clock, u64),
        pool: MakePool<'_>,
        on_call: &OnCall,
    ) -> Result<SteppedServer, Error> {
        let Prepared { config, serves, .. } = server;
        let make = |seed: ShardSeed, driver, start: &ShardStart| {
            let (shard, made) = seed.make(serves.again(), driver, start)?;
            let start = start.clone();
            Ok(MadeShard {
                is_there: matches!(made, FactoryOutput::Now(_)),
                steps: Box::new(move |ring, all_there| {
                    let stage = match made {
                        FactoryOutput::Now(services) if all_there => {
                            StepStage::Serves(shard.serving(services))
                        }
                        made => StepStage::Begins(StartingShard::new(shard, made, start)),
                    };
                    Box::new(SteppedShard::new(ring, stage))
                }),
            })
        };
        let framings = |number, limits: &Limits| serves.check_limits(number, limits);
        let server = SteppedServer::begin(config, &framings, &make, network, simulated, pool, on_call)?;
        Ok(SteppedServer { kept: Some(Box::new(serves)), ..server })
    }

    /// The same of a server whose framings refuse limits, and whose shards are made, by these.
    fn begin(
        mut config: ServerConfig,
        framings: CheckLimits<'_>,
        make: MakeShard<'_>,
        network: &Network,
        (clock, seed): (Clock, u64),
        pool: MakePool<'_>,
        on_call: &OnCall,
    ) -> Result<SteppedServer, Error> {
        refuse_runtime(config.runtime)?;
        config.seed = Some(seed);
        let listen = |addr, is_adopted, shards| match is_adopted {
            true => network.adopt(addr, shards).map(|()| addr),
            false => network.listen(addr, shards),
        };
        let surroundings = |limits: &ServerLimits| (clock, pool(limits));
        let (ring, listening, shared) =
            shared(config, framings, &listen, SIMULATED_DESCRIPTORS, surroundings)?;
        let mut starting = StartWait::new();
        shared.begin(&mut starting);
        let no_sockets = (0..shared.checked.shards).map(|_| Vec::new()).collect();
        let seeds = shared.seeds(no_sockets, &[]);
        let control = shared.control.clone();
        let mut server = SteppedServer {
            addrs: listening.ips.clone(),
            names: shared.names.clone(),
            limits: shared.checked.server_limits.clone(),
            reserved: shared.driver.reserved(),
            remotes: control.remotes().clone(),
            shards: Vec::new(),
            ends: Vec::new(),
            blocking: control.blocking().clone(),
            starting,
            control,
            overload: shared.checked.given.overload.clone(),
            loads: None,
            kept: None,
        };
        // All of them, since their listeners close with them if a factory fails.
        let drivers = (0..seeds.len())
            .map(|index| network.driver(index, &ring).map_err(|error| Error::Broken { shard: index, error }));
        let drivers: Vec<_> = drivers.collect::<Result<_, _>>()?;
        let (mut all_made, mut all_there) = (Vec::new(), true);
        for (seed, driver) in seeds.into_iter().zip(drivers) {
            let (index, remote) = (seed.index, server.remotes[seed.index].clone());
            remote.set_on_call(on_call.clone());
            let (start, ring) = (server.starting.of_shard(index), driver.kernel().ring());
            // As on its thread.
            enter_shard(index, &remote);
            let made = make(seed, driver, &start);
            leave_shard();
            match made {
                Ok(made) => {
                    all_there &= made.is_there;
                    all_made.push((ring, made));
                }
                Err(error) => {
                    all_there = false;
                    remote.close();
                    start.failed(error);
                    break;
                }
            }
        }
        for (ring, made) in all_made {
            server.shards.push((made.steps)(ring, all_there));
            server.ends.push(None);
        }
        Ok(server)
    }

    /// The progress of the start. Shards are informed of what follows from it. Not to be called
    /// again once it ended.
    pub(crate) fn poll_start(&mut self) -> StartState {
        let state = self.starting.poll_start();
        match &state {
            StartState::Ready(true) => self.command(Command::Serve),
            StartState::Failed(_) => self.command(Command::Abort),
            StartState::Ready(false) | StartState::Waits(_) => {}
        }
        state
    }

    /// The factories that the start waits for, as text.
    pub(crate) fn waits_for(&self) -> String {
        self.starting.waits_for()
    }

    /// The number of shards.
    pub(crate) fn count(&self) -> usize {
        self.shards.len()
    }

    pub(crate) fn ring(&self, shard: usize) -> RingId {
        self.shards[shard].ring()
    }

    /// One round of a shard's loop. Its end, if that was the last one.
    pub(crate) fn step(&mut self, shard: usize) -> Option<&ShardEnd> {
        let ran = self.shards[shard].step()?;
        let ran = ran.map(|end| end.map_err(ShardDeath::Driver));
        self.ends[shard] = Some(ended(shard, &self.remotes, ran));
        if self.is_done() {
            self.blocking.end();
            let kept = self.kept.take();
            let _ = guard(move || drop(kept));
        }
        self.ends[shard].as_ref()
    }

    /// The end of a shard; `None` while it runs.
    pub(crate) fn end(&self, shard: usize) -> Option<&ShardEnd> {
        self.ends[shard].as_ref()
    }

    /// True once every shard ended.
    pub(crate) fn is_done(&self) -> bool {
        self.ends.iter().all(Option::is_some)
    }

    pub(crate) fn command(&self, command: Command) {
        self.remotes.iter().for_each(|remote| remote.command(command));
    }

    /// Sets the load that a watchdog would report of each shard.
    pub(crate) fn set_load(&self, load: Load, share: f64) {
        let told = LoadReport { share, turn: None, refuses: load >= Load::Refusing };
        self.remotes.iter().for_each(|remote| remote.load.set(load, told));
    }

    /// Begins to watch the loads.
    pub(crate) fn follow_load(&mut self) {
        self.loads = Some(Loads::new(self.overload.clone(), &self.control));
    }

    pub(crate) fn follows_load(&self) -> bool {
        self.loads.is_some()
    }

    /// Runs one check of the watchdog, of shards that were on a CPU for as long as `ran` says. True
    /// if it would rest.
    pub(crate) fn look(&mut self, ran: &[Duration]) -> bool {
        let Some(loads) = &mut self.loads else { return true };
        let times = |shard: usize| Some(ThreadTimes { ran: ran[shard], waited: Duration::ZERO });
        loads.look(self.control.now(), &self.control, times)
    }

    /// The load of the busiest shard.
    pub(crate) fn load(&self) -> Load {
        self.control.load()
    }

    /// A shard keeps its bounds.
    pub(crate) fn check(&self, shard: usize) -> Result<(), String> {
        self.shards[shard].check();
        let stats = self.shards[shard].stats();
        let connections: usize = self.shards.iter().map(|shard| shard.stats().connections).sum();
        let connections_max = self.limits.connections_max + self.reserved;
        let buffers_max = self.limits.receive_buffers_max();
        if connections > connections_max {
            return Err(format!(
                "there are {connections} connections, and connections_max is {connections_max}"
            ));
        }
        if stats.buffers.total > buffers_max {
            let total = stats.buffers.total;
            return Err(format!("shard {shard} has {total} receive buffers of {buffers_max} at most"));
        }
        Ok(())
    }

    /// The figures of a shard that ended stay, without connections.
    pub(crate) fn check_report(&self, shard: usize) -> Result<(), String> {
        let kept = self.remotes[shard].latest_report(u64::MAX, Deadline::within(Duration::ZERO));
        let (died, counters) = (matches!(self.ends[shard], Some(Err(_))), &kept.counters);
        let left = kept.connections + kept.upstreams.connections;
        for (holds, rule) in [
            (!kept.stale, "its last report is kept"),
            (!died || left == 0, "a dead shard has no connection"),
            (!died || counters.opened == counters.closed, "a dead shard closed what it opened"),
        ] {
            if !holds {
                return Err(format!("at the end of shard {shard} this does not hold: {rule}: {kept:?}"));
            }
        }
        Ok(())
    }

    /// A shard that ended in order left nothing, and its counters add up.
    pub(crate) fn check_end(&self, shard: usize) -> Result<(), String> {
        self.check_report(shard)?;
        let leased = self.shards[shard].leased_at_end();
        if leased > 0 {
            return Err(format!(
                "{leased} receive buffers are leased after everything of shard {shard} was dropped"
            ));
        }
        let Some(Ok(stats)) = &self.ends[shard] else { return Ok(()) };
        let (counters, upstreams, buffers) = (&stats.counters, &stats.upstreams.counters, stats.buffers);
        let by_reason: u64 = counters.reasons().map(|(_, count)| count).sum();
        let left = stats.connections + stats.upstreams.connections;
        let held = self.shards[shard].held_at_end();
        if left == 0 && held > 0 {
            return Err(format!(
                "{held} bytes are counted as held after the last connection of shard {shard}"
            ));
        }
        for (holds, rule) in [
            (left == 0, "no connection is left"),
            (counters.opened == counters.closed, "each connection that was opened is closed"),
            (by_reason == counters.closed, "each close has one reason"),
            (upstreams.opened == upstreams.closed, "each connection to an upstream is closed"),
            (buffers.total == buffers.free + buffers.with_kernel + buffers.leased, "receive buffers add up"),
        ] {
            if !holds {
                return Err(format!("at the end of shard {shard} this does not hold: {rule}: {stats:?}"));
            }
        }
        Ok(())
    }

    pub(crate) fn shard_stats(&self, shard: usize) -> ShardStats {
        self.shards[shard].stats()
    }

    /// The present figures of all shards.
    pub(crate) fn stats(&self) -> ServerStats {
        let mut stats = ServerStats::default();
        self.shards.iter().for_each(|shard| stats.add(shard.stats()));
        stats.blocking = self.blocking.stats();
        stats
    }
}
