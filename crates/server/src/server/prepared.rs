//! A server that was told everything, on its way to its start: how it is set, its services, and how they are made.
//!
//! Each program compiles what knows the types of its services. So only [`Prepared`] knows them: what it is described by is
//! checked and started by code that is compiled once.

use std::collections::HashSet;
use std::future::Future;
use std::iter;
use std::pin::pin;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use ringserve_core::{Address, LimitError, Limits, ServerLimits};
use ringserve_drivers::Listener;

#[cfg(feature = "admin")]
use super::driver::DESCRIPTORS_PER_SHARD;
use super::driver::{Chosen, Driver, Wanted};
use super::fit::{Fit, fit, follow};
use super::launch::RunShard;
use super::launch::{announce, cpus_to_pin, descriptors};
use super::listen::addr::{self, Bind};
use super::listen::sockets::{Listen, Listening, Place};
use super::listen::transport::Transports;
use super::plan::{LanePlan, OneShard, Plan};
use super::running::ServerHandle;
#[cfg(feature = "admin")]
use super::running::{Beside, Facts};
use super::runtime::Runtime;
use super::serves::{Kept, Serves};
use super::signals::{StopSignals, end_process};
use super::until::serve_until;
use crate::admission::proxy_protocol::Proxies;
use crate::admission::{Admission, KernelFilters, Limiter, Limiters, RESERVED, ServerRate, watch};
use crate::base::clock::Clock;
use crate::base::random::Random;
use crate::blocking::threads::Threads;
use crate::doctor::{Record, Rings, Setup};
use crate::error::Error;
use crate::log;
use crate::log_thread::write_at_the_end;
use crate::overload::Overload;
use crate::shard::remote::control::ServerControl;
use crate::shard::running::starting::{Starting, Until};
use crate::shard::state::many::SERVICES_MAX;
use crate::shard::state::shard_loop::Admit;
use crate::socket_options::asks::Asks;
use crate::socket_options::options::SocketOptions;
use crate::stats::{ServerStats, ServiceNames};
use crate::telling::Telling;
use crate::watch::options::Stalls;

/// Shards at most: beyond, something is wrong with the number.
const SHARDS_MAX: usize = 1024;

/// For how long a shard may wait for more: less is not told from nothing, and a client that waits for its answer notices more.
const COALESCE_MIN: Duration = Duration::from_micros(1);
const COALESCE_MAX: Duration = Duration::from_millis(1);

/// Connections of the endpoint beside a server.
#[cfg(feature = "admin")]
pub(crate) const ENDPOINT_CONNECTIONS: usize = 64;

/// Descriptors for the endpoint beside a server: those of its shard, and of its connections. Without them it would be silent just
/// when the connections of the server have taken all.
#[cfg(feature = "admin")]
const ENDPOINT_DESCRIPTORS: u64 = DESCRIPTORS_PER_SHARD + ENDPOINT_CONNECTIONS as u64;

/// How a server is set, beside its services.
#[derive(Default)]
pub(crate) struct Settings {
    /// Limits of services without their own; `None` if the program sets none.
    pub(super) limits: Option<Limits>,
    pub(super) sockets: SocketOptions,
    pub(super) admit: Option<Admit>,
    pub(super) admission: Admission,
    /// Of the shards' random numbers in a simulation; the system's if there is none.
    pub(super) seed: Option<u64>,
    /// `None` if the program does not say.
    pub(super) server_limits: Option<ServerLimits>,
    /// Those and the services' stay as they are, whatever memory there is.
    pub(super) keeps_limits: bool,
    pub(super) shards: Option<usize>,
    pub(super) pin: Option<bool>,
    pub(super) share_port: bool,
    pub(super) driver: Driver,
    pub(super) coalesce: Duration,
    pub(super) runtime: Runtime,
    pub(super) stalls: Stalls,
    pub(super) overload: Overload,
    pub(super) on_start: Option<Box<dyn FnOnce(ServerControl) + Send>>,
    /// The endpoint beside the server.
    #[cfg(feature = "admin")]
    pub(super) beside: Option<Box<dyn Beside>>,
    /// This server is itself such an endpoint: its start is no line in the log, and its thread has a name that says so.
    pub(super) is_beside: bool,
    pub(super) telling: Telling,
}

impl Settings {
    /// What the doctor is told of the server. `services` are the options of each one's sockets, and whether it ends idle
    /// connections.
    pub(super) fn setup<'a>(
        &self,
        shards: usize,
        rings: Rings,
        services: impl Iterator<Item = (&'a SocketOptions, bool)> + Clone,
    ) -> Setup {
        let limits = self.server_limits.clone().unwrap_or_default();
        // As it is by default it says nothing of the program's plans.
        let is_default = limits.connections_max == ServerLimits::default().connections_max;
        let all = || services.clone().map(|(options, _)| options);
        let unsent = |options: &SocketOptions| match (options.not_sent_bytes_max, options.send_buffer_bytes) {
            (None, None) => None,
            (None, Some(buffer)) => Some(2 * u64::from(buffer)),
            (Some(unsent), _) => Some(unsent.into()),
        };
        let unsent = all().map(unsent).collect::<Option<Vec<_>>>();
        Setup {
            shards: shards as u64,
            rings,
            pinned: self.pin.unwrap_or(false),
            share_port: self.share_port,
            backlog: all().map(|options| options.backlog).min().unwrap_or_default(),
            one_queue: false,
            unsent_bytes_max: unsent.and_then(|all| all.into_iter().max()),
            incoming_cpu: all().any(|options| options.incoming_cpu),
            ends_silent: services
                .clone()
                .all(|(options, ends_idle)| ends_idle || options.keep_alive.is_some()),
            upstreams_max: limits.upstreams_max as u64,
            connections: (!is_default).then_some(limits.connections_max as u64),
        }
    }

    /// The same before the start, when services may have options that are not known yet.
    pub(super) fn setup_so_far(&self) -> Setup {
        let cpus = thread::available_parallelism().map_or(1, usize::from);
        let shards = self.shards.unwrap_or(cpus);
        let rings = if self.driver.is_epoll() { Rings::Epoll } else { Rings::Untried };
        let ends_idle = self.limits.clone().unwrap_or_default().idle_timeout.is_some();
        let setup = self.setup(shards, rings, iter::once((&self.sockets, ends_idle)));
        Setup { pinned: !cpus_to_pin(self.pin, shards).is_empty(), ..setup }
    }
}

/// The program's settings of one service.
pub(crate) struct ServicePlan {
    /// As the program calls it, if it does.
    pub(super) name: Option<String>,
    pub(super) binds: Vec<Bind>,
    pub(super) limits: Limits,
    /// `limits` are the program's own.
    pub(super) limits_given: bool,
    pub(super) sockets: SocketOptions,
    /// `None` if the program does not say.
    pub(super) access_log: Option<bool>,
    /// In the place of the server's.
    pub(super) admission: Option<Admission>,
    /// The names of services after which it drains.
    pub(super) drains_after: Vec<String>,
}

impl ServicePlan {
    /// The name in errors, before the service has its real ports.
    pub(super) fn label(&self) -> String {
        let first = || self.binds.first().map(|bind| bind.addr.to_string());
        let addr = || first().unwrap_or_else(|| "without an endpoint".to_owned());
        self.name.clone().unwrap_or_else(addr)
    }
}

/// A server as the program described it: all but the services themselves.
pub(crate) struct Described {
    pub(super) settings: Settings,
    pub(super) services: Vec<ServicePlan>,
}

/// All of it.
pub(crate) struct Prepared<S> {
    pub(crate) described: Described,
    pub(crate) serves: S,
}

/// What each listener asks of connections; several may share it.
type LimitersOfListeners = Vec<Option<Arc<Limiter>>>;

/// The settings after the checks.
pub(super) struct Checked {
    pub(super) server_limits: ServerLimits,
    /// The receive buffers of a shard by what the program set, or by default.
    receive_buffers_max: usize,
    pub(super) shards: usize,
    limiters: LimitersOfListeners,
    /// The rate of all of them.
    pub(super) rate: Option<ServerRate>,
    seed: u64,
}

/// Has the framing of the service with a number refuse limits with which it cannot work.
pub(super) type CheckLimits<'a> = &'a dyn Fn(usize, &Limits) -> Result<(), LimitError>;

impl Described {
    /// Checks what the program set. There are `by_default` shards if it does not say.
    pub(super) fn check(&mut self, framings: CheckLimits<'_>, by_default: usize) -> Result<Checked, Error> {
        self.check_services()?;
        if let Some(text) = self.settings.telling.unclear() {
            return Err(Error::Trace(text.to_owned()));
        }
        let mut server_limits = self.settings.server_limits.clone().unwrap_or_default();
        server_limits.check().map_err(Error::Limits)?;
        let is_one_of_several = self.services.len() > 1;
        for (number, service) in self.services.iter_mut().enumerate() {
            let label = is_one_of_several.then(|| service.label());
            let wrong = |error| Error::Limits(error).of_service(label.as_ref());
            service.limits.check().map_err(wrong)?;
            if self.settings.server_limits.is_none() {
                server_limits = server_limits.with_room_for(&service.limits);
            } else if service.limits_given {
                server_limits.check_service(&service.limits).map_err(wrong)?;
            } else {
                server_limits.check_defaults().map_err(wrong)?;
                service.limits = service.limits.clone().fitted(&server_limits);
            }
            framings(number, &service.limits).map_err(wrong)?;
            service.sockets.check().map_err(|error| Error::SocketOption(error).of_service(label.as_ref()))?;
        }
        let shards = self.settings.shards.unwrap_or(by_default);
        if !(1..=SHARDS_MAX).contains(&shards) {
            return Err(Error::Shards(shards));
        }
        let coalesce = self.settings.coalesce;
        if !coalesce.is_zero() && !(COALESCE_MIN..=COALESCE_MAX).contains(&coalesce) {
            return Err(Error::Coalesce(coalesce));
        }
        let seed = self.settings.seed.unwrap_or_else(Random::system_seed);
        let (limiters, rate) = self.check_admission(server_limits.connections_max, seed)?;
        let receive_buffers_max = server_limits.receive_buffers_max();
        Ok(Checked { server_limits, receive_buffers_max, shards, limiters, rate, seed })
    }

    /// Makes the limits on who is let in. Services without their own share those of the server, and listeners those of their
    /// service.
    fn check_admission(
        &self,
        connections_max: usize,
        seed: u64,
    ) -> Result<(LimitersOfListeners, Option<ServerRate>), Error> {
        let seed = (seed, self.settings.seed.is_some());
        let checked = |admission: &Admission, of_one| admission.check(of_one, connections_max, seed);
        let (of_all, rate) = checked(&self.settings.admission, false).map_err(Error::Admission)?;
        let of_all = of_all.map(Arc::new);
        let of_service = |service: &ServicePlan| match &service.admission {
            None => Ok(of_all.clone()),
            Some(own) => match checked(own, true) {
                Ok((limiter, _)) => Ok(limiter.map(Arc::new)),
                Err(error) => Err(Error::Admission(error).of_service(Some(&service.label()))),
            },
        };
        let mut limiters = Vec::new();
        for service in &self.services {
            let shared = of_service(service)?;
            // Addresses that a name resolved to count together.
            let mut made: Vec<(&Arc<Admission>, Option<Arc<Limiter>>)> = Vec::new();
            for bind in &service.binds {
                let Some(own) = &bind.admission else {
                    limiters.push(shared.clone());
                    continue;
                };
                if !made.iter().any(|(known, _)| Arc::ptr_eq(known, own)) {
                    let of_listener = |error| {
                        Error::Admission(error).of_service(Some(&format!(
                            "{}, at {}",
                            service.label(),
                            bind.addr
                        )))
                    };
                    let (limiter, _) = checked(own, true).map_err(of_listener)?;
                    made.push((own, limiter.map(Arc::new)));
                }
                let own = made.iter().find(|(known, _)| Arc::ptr_eq(known, own));
                limiters.push(own.and_then(|(_, limiter)| limiter.clone()));
            }
        }
        Ok((limiters, rate))
    }

    /// The limits at each listener.
    pub(super) fn limiters(&self, checked: &Checked) -> Limiters {
        let each = self.binds().zip(&checked.limiters);
        Limiters::of(
            each.map(|(bind, limiter)| (limiter.as_ref(), &bind.addr, bind.proxy.is_some(), bind.is_plain)),
        )
    }

    fn check_services(&self) -> Result<(), Error> {
        let wrong = |text: String| Err(Error::Services(text));
        if self.services.is_empty() {
            return wrong("there is none: add one by Server::service".to_owned());
        }
        if self.services.len() > SERVICES_MAX {
            return wrong(format!("there are {}; {SERVICES_MAX} is the most", self.services.len()));
        }
        let mut names = HashSet::new();
        for service in &self.services {
            if service.binds.is_empty() {
                return wrong(format!(
                    "the service {} has no endpoint; give it one, such as tcp(\"127.0.0.1:7000\")",
                    service.label()
                ));
            }
            if let Some(name) = &service.name
                && !names.insert(name)
            {
                return wrong(format!("two have the name {name}; give each another one by Endpoints::name"));
            }
        }
        self.drains_after().map_err(Error::Services)?;
        let labels: Vec<String> = self.services.iter().map(ServicePlan::label).collect();
        let label = |n: usize| (labels.len() > 1).then(|| &*labels[n]);
        let of_service = |(n, service): (usize, &'_ ServicePlan)| iter::repeat_n(n, service.binds.len());
        let leads_to = self.services.iter().enumerate().flat_map(of_service).map(label);
        addr::check(self.binds().zip(leads_to)).map_err(Error::Address)
    }

    /// For each service, those as bits after whose end it drains.
    ///
    /// # Errors
    /// One that is not there, and a circle, with the names of both.
    fn drains_after(&self) -> Result<Vec<u32>, String> {
        let number = |name: &String| self.services.iter().position(|of| of.name.as_ref() == Some(name));
        let bits = |service: &ServicePlan| {
            service.drains_after.iter().try_fold(0, |bits: u32, after| match number(after) {
                Some(number) => Ok(bits | 1 << number),
                None => {
                    Err(format!("{} drains after {after}, and no service has that name", service.label()))
                }
            })
        };
        let after = self.services.iter().map(bits).collect::<Result<Vec<u32>, String>>()?;
        let of = |services: u32| after.iter().enumerate().filter(move |(n, _)| services >> n & 1 == 1);
        for (number, direct) in after.iter().enumerate() {
            for (other, _) in of(*direct) {
                // All that the other one waits for, directly or not.
                let (mut all, mut before) = (1 << other, 0);
                while all != before {
                    before = all;
                    all |= of(all).fold(0, |more, (_, after)| more | after);
                }
                if all >> number & 1 == 1 {
                    let [one, two] = [number, other].map(|n| self.services[n].label());
                    return Err(format!("{one} drains after {two}, which in the end drains after {one}"));
                }
            }
        }
        Ok(after)
    }

    /// Where all services are reached, in the order of the listeners.
    pub(super) fn binds(&self) -> impl Iterator<Item = &Bind> {
        self.services.iter().flat_map(|service| &service.binds)
    }

    /// What the doctor is told of the server.
    fn setup(&self, shards: usize, rings: Rings, pinned: bool) -> Setup {
        let services = self.services.iter().map(|of| (&of.sockets, of.limits.idle_timeout.is_some()));
        let has_own = |bind: &Bind| bind.adopted.is_none() && bind.addr.as_ip().is_some();
        let one_queue = !self.binds().any(has_own);
        Setup { pinned, one_queue, ..self.settings.setup(shards, rings, services) }
    }

    /// Connections that the server makes have options and limits of its first service.
    pub(super) fn wanted<'a>(&'a self, checked: &'a Checked, descriptors: u64) -> Wanted<'a> {
        let limiters = self.limiters(checked);
        Wanted {
            driver: self.settings.driver,
            coalesce: self.settings.coalesce,
            shards: checked.shards,
            descriptors,
            left_alone: 0,
            limits: &checked.server_limits,
            receive_buffers_max: checked.receive_buffers_max,
            sockets: &self.services[0].sockets,
            reserved: if limiters.reserve() { RESERVED } else { 0 },
            // Where proxies connect their addresses say whether they are trusted.
            peer_addresses: !limiters.is_empty()
                || self.services.iter().any(|service| service.sockets.peer_address)
                || self.binds().any(|bind| bind.proxy.is_some()),
        }
    }

    /// The parts from which the shards are made.
    pub(super) fn plan(self, checked: Checked, chosen: Chosen, listening: &Listening) -> Plan {
        let limiters = self.limiters(&checked);
        let proxies = Proxies::of(self.binds().map(|bind| (&bind.addr, bind.proxy.as_ref())));
        let transports = Transports::of(self.binds().map(|bind| bind.transport.as_ref()));
        #[cfg(feature = "tls")]
        let tls = super::listen::tls::all(self.binds());
        let mut addrs = listening.addrs.iter();
        let names = ServiceNames::new(self.services.iter().map(|service| {
            let count = service.binds.len();
            let mut its = addrs.by_ref().take(count);
            let first = its.next().map(Address::to_string).unwrap_or_default();
            its.for_each(drop);
            (Arc::from(service.name.clone().unwrap_or(first)), count as u16)
        }));
        // All connections are asked alike.
        let asks = self.services.iter().map(|service| service.sockets.asks()).fold(Asks::default(), Asks::or);
        let told = self.settings.telling.told(self.services.iter().map(|service| service.access_log));
        let asks = asks.or(Asks { credentials: limiters.count_users(), ..Asks::default() });
        let blocking = Arc::new(Threads::new(&checked.server_limits));
        // Was checked.
        let after = self.drains_after().unwrap_or_default();
        let lane = |(number, service): (usize, ServicePlan)| LanePlan {
            limits: service.limits,
            listeners: service.binds.len() as u16,
            after: after.get(number).copied().unwrap_or_default(),
        };
        Plan {
            server_limits: checked.server_limits,
            lanes: self.services.into_iter().enumerate().map(lane).collect(),
            names,
            proxies,
            transports,
            chosen,
            runtime: self.settings.runtime,
            is_beside: self.settings.is_beside,
            stalls: self.settings.stalls,
            overload: self.settings.overload,
            shards: checked.shards,
            listeners: listening.addrs.clone().into(),
            clock: Clock::start(),
            seed: checked.seed,
            limiters,
            rate: checked.rate.map(|rate| Arc::new(rate.shared())),
            asks,
            told,
            blocking,
            record: None,
            #[cfg(feature = "tls")]
            tls,
        }
    }
}

impl<S: Serves + Send + 'static> Prepared<S> {
    /// Serves until a signal says to stop.
    pub(super) fn serve(self) -> Result<(), Error> {
        let starting = Starting::new();
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
        let running = match self.start(Starting::new(), Some(until.as_mut())) {
            Err(Error::Interrupted) => return Ok(ServerStats::default()),
            started => started?,
        };
        serve_until(running, until)
    }

    /// Starts all shards, on their own threads; not to the end if `until` is done while a factory waits.
    pub(super) fn start(self, starting: Starting, until: Until<'_>) -> Result<ServerHandle, Error> {
        let Prepared { described, serves } = self;
        let of_shard = || -> RunShard {
            let (serves, kept) = (serves.again(), Kept::new(serves.again()));
            Box::new(move |shard: OneShard, start| {
                let _kept = kept;
                shard.run(serves, start)
            })
        };
        let framings: CheckLimits<'_> = &|number, limits| serves.check_limits(number, limits);
        Ok(described.start(framings, &of_shard, starting, until)?.keeping(Kept::new(serves)))
    }
}

impl Described {
    /// Starts all shards, each of which does on its thread what `of_shard` returns.
    fn start(
        mut self,
        framings: CheckLimits<'_>,
        of_shard: &dyn Fn() -> RunShard,
        starting: Starting,
        until: Until<'_>,
    ) -> Result<ServerHandle, Error> {
        let by_default = thread::available_parallelism().map_or(1, usize::from);
        let mut checked = self.check(framings, by_default)?;
        self.settings.runtime.check()?;
        // First, so that it answers while factories are pending.
        #[cfg(feature = "admin")]
        let beside = self.settings.beside.take().map(Beside::start).transpose()?;
        let memory = self.fit_memory(&mut checked)?;
        let descriptors = descriptors(checked.shards, self.binds().count())?;
        #[cfg(feature = "admin")]
        let left_alone = if beside.is_some() { ENDPOINT_DESCRIPTORS } else { 0 };
        #[cfg(not(feature = "admin"))]
        let left_alone = 0;
        let chosen = Wanted { left_alone, ..self.wanted(&checked, descriptors) }.choose()?;
        let cpus = cpus_to_pin(self.settings.pin, checked.shards);
        let listen = Listen { shards: checked.shards, share_port: self.settings.share_port, cpus: &cpus };
        let (mut sockets, listening) = listen.at(&self.places())?;
        if checked.rate.is_some() {
            sockets.iter_mut().flatten().for_each(Listener::one_by_one);
        }
        let limiters = self.limiters(&checked);
        // One for all: networks are denied until a time on it.
        let clock = Clock::start();
        watch(&limiters, KernelFilters::of(&sockets, &limiters, clock.clone())).map_err(Error::Thread)?;
        let on_start = self.settings.on_start.take();
        #[cfg(feature = "tls")]
        super::listen::tls::begin(self.binds())?;
        let services = self.services.iter().map(|service| (service.name.as_deref(), &service.limits));
        let services: Vec<_> = services.collect();
        let is_beside = self.settings.is_beside;
        if !is_beside {
            announce(&listening, &cpus, &chosen, (checked.shards, &checked.server_limits), &services);
        }
        // An endpoint beside a server has nothing to say that the server's own record does not.
        let record = (!is_beside)
            .then(|| Arc::new(Record::begin(self.setup(checked.shards, chosen.rings(), !cpus.is_empty()))));
        #[cfg(feature = "admin")]
        let facts = Facts {
            driver: chosen.name(),
            connections_max: chosen.connections_max(),
            connections_wanted: checked.server_limits.connections_max,
            buffers_max: checked.server_limits.receive_buffers_max(),
            limits: self.services.iter().map(|service| service.limits.clone()).collect(),
        };
        let plan = Plan { record, clock, ..self.plan(checked, chosen, &listening) };
        let launched = plan.launch(starting, until, sockets, &cpus, of_shard)?;
        // Made before user code runs: if that panics, or something fails, dropping it ends the server.
        let handle = ServerHandle::new(listening, launched);
        if let Some(memory) = memory {
            follow(memory, &handle.control()).map_err(Error::Thread)?;
        }
        #[cfg(feature = "admin")]
        let handle = {
            beside.iter().for_each(|beside| beside.begins(handle.control(), facts.clone()));
            handle.with_beside(beside)
        };
        if let Some(on_start) = on_start {
            on_start(handle.control());
        }
        Ok(handle)
    }

    /// Fits limits into the memory that the process may use. Returns what that depends on, if it may change.
    fn fit_memory(&mut self, checked: &mut Checked) -> Result<Option<Fit>, Error> {
        // The endpoint beside a server holds little, and the server's own lines say what there is.
        let keeps = self.settings.keeps_limits || self.settings.is_beside;
        let services = self.services.iter().map(|of| (of.limits.clone(), of.limits_given)).collect();
        let wanted =
            Fit::new(&checked.server_limits, self.settings.server_limits.is_some(), services, checked.shards);
        let mut limits: Vec<_> = self.services.iter_mut().map(|of| &mut of.limits).collect();
        fit(if keeps { wanted.kept() } else { wanted }, &mut checked.server_limits, &mut limits)
    }

    fn places(&self) -> Vec<Place<'_>> {
        let several = self.services.len() > 1;
        let all = self.services.iter().flat_map(|of| of.binds.iter().map(move |bind| (of, bind)));
        all.map(|(of, bind)| Place { bind, options: &of.sockets, service: several.then(|| of.label()) })
            .collect()
    }
}
