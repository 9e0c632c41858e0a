//! Settings that all shards of a server share, those that differ by shard, and the making of a
//! shard: the same for threads and for a simulation.

use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Waker;

use ringserve_admission::internals::Proxies;
use ringserve_base::clock::Clock;
use ringserve_base::doctor::Record;
use ringserve_base::guard::guard;
use ringserve_base::random::Random;
use ringserve_core::framing::Encoding;
use ringserve_core::{Address, Driver, LaneId, Quota, Transport};
use ringserve_drivers::Listener;

use super::super::listen::sockets::Listening;
use super::super::listen::tls::TlsLayer;
use super::super::listen::transport::Transports;
use super::super::serves::{MadeOf, Serves};
use super::checked::{CheckedConfig, CheckedService};
use super::driver_config::DriverConfig;
use crate::blocking::Pool;
use crate::error::Error;
use crate::log::LogObserver;
use crate::shard::Core;
use crate::shard::face::guarded_transport::{GuardedTransport, reports_panics};
use crate::shard::face::handle::Shard;
use crate::shard::face::service::FactoryOutput;
use crate::shard::remote::control::ServerControl;
use crate::shard::running::starting::{ShardStart, StartWait};
use crate::shard::state::services::Services;
use crate::shard::state::shard_loop::{Common, LaneParts, ShardLoop};
use crate::shard::state::upstreams::add_upstreams;
use crate::shard::tasks::ends::ServiceEnds;
use crate::shard::wakes::inbox::ShardRemote;
use crate::socket_options::asks::SocketQueries;
use crate::stats::ServiceNames;
use crate::telling::Observers;
use crate::watch::accept_queue::AcceptQueues;

/// The settings of a server, and what its start found.
pub(crate) struct SharedConfig {
    /// Without the addresses of services, whose sockets the shards have.
    pub(crate) checked: CheckedConfig,
    pub(crate) driver: DriverConfig,
    /// The names of the services, in their order.
    pub(crate) names: ServiceNames,
    /// Which listeners expect PROXY headers.
    proxies: Proxies,
    /// Which have a transport.
    transports: Transports,
    asks: SocketQueries,
    told: Observers,
    clock: Clock,
    /// The connections of all shards together.
    quota: Arc<Quota>,
    pub(crate) control: ServerControl,
}

/// One shard before it is made.
pub(crate) struct ShardSeed {
    pub(crate) index: usize,
    /// The CPU on which it is to run, if that is said.
    pub(crate) cpu: Option<usize>,
    /// Its listeners, until its driver has them.
    pub(crate) sockets: Vec<Listener>,
    /// From which of them all shards accept.
    one_queue: Box<[bool]>,
    pub(crate) shared: Arc<SharedConfig>,
}

impl CheckedConfig {
    /// Shares the settings of a server that listens there, by these sockets of each shard.
    /// `blocking` makes the calls that block, of all shards; only a server on this machine has a
    /// `record`.
    pub(crate) fn share(
        mut self,
        driver: DriverConfig,
        (listening, sockets): (&Listening, &[Vec<Listener>]),
        (clock, blocking): (Clock, Arc<dyn Pool>),
        record: Option<Arc<Record>>,
    ) -> Arc<SharedConfig> {
        let names = self.names(&listening.addrs);
        let remotes = (0..self.shards).map(|_| ShardRemote::new()).collect();
        let listeners = listening.addrs.clone().into();
        let rate = self.rate.take().map(|rate| Arc::new(rate.shared()));
        let control = ServerControl::new(remotes, listeners, blocking, clock.clone())
            .with_accept_queues(AcceptQueues::of(sockets))
            .with_connections_max(driver.connections_max())
            .with_held_bytes_max(self.server_limits.held_bytes_max)
            .with_record(record)
            .with_end(&self.server_limits, sockets)
            .with_upstreams(self.given.upstreams.clone().into())
            .with_limiters(self.limiters.clone(), rate)
            .with_driver(driver.name())
            .with_tls(TlsLayer::all(self.binds().map(|bind| &bind.tls)));
        // All connections are asked alike.
        let asks = self
            .services
            .iter()
            .map(|service| service.sockets.asks())
            .fold(SocketQueries::default(), SocketQueries::or);
        let asks =
            asks.or(SocketQueries { credentials: self.limiters.count_users(), ..SocketQueries::default() });
        let proxies = Proxies::of(self.binds().map(|bind| (&bind.addr, bind.proxy.as_ref())));
        let transports = Transports::of(self.binds().map(|bind| bind.transport.as_ref()));
        let told = self.given.telling.told(self.services.iter().map(|service| service.given.access_log));
        let quota = Arc::new(Quota::new(driver.connections_max()));
        // Sockets that were adopted are closed with them, and the shards have duplicates.
        self.services.iter_mut().for_each(|service| service.binds = Vec::new());
        Arc::new(SharedConfig {
            checked: self,
            driver,
            names,
            proxies,
            transports,
            asks,
            told,
            clock,
            quota,
            control,
        })
    }

    /// A service without a name has its first address, with the real port.
    fn names(&self, addrs: &[Address]) -> ServiceNames {
        let mut addrs = addrs.iter();
        ServiceNames::new(self.services.iter().map(|service| {
            let mut its = addrs.by_ref().take(service.binds.len());
            let first = its.next().map(Address::to_string).unwrap_or_default();
            its.for_each(drop);
            (Arc::from(service.given.name.clone().unwrap_or(first)), service.listeners)
        }))
    }
}

impl SharedConfig {
    /// Begins the start.
    pub(crate) fn begin(&self, starting: &mut StartWait) {
        let names = self.names.lanes().map(|(_, name)| name.to_string()).collect();
        let CheckedConfig { shards, server_limits, .. } = &self.checked;
        starting.begin(*shards, self.clock.clone(), server_limits.start_timeout, names);
    }

    /// Each shard, before it is made, with its listeners.
    pub(crate) fn seeds(self: &Arc<Self>, sockets: Vec<Vec<Listener>>, cpus: &[usize]) -> Vec<ShardSeed> {
        let seed = |(index, sockets): (usize, Vec<Listener>)| ShardSeed {
            index,
            cpu: cpus.get(index).copied(),
            one_queue: sockets.iter().map(Listener::is_shared).collect(),
            sockets,
            shared: self.clone(),
        };
        sockets.into_iter().enumerate().map(seed).collect()
    }
}

impl ShardSeed {
    /// On the shard's own thread: calls the factories, and makes what lies below the services.
    pub(crate) fn make<D: Driver<Descriptor = OwnedFd>, S: Serves>(
        self,
        serves: S,
        driver: D,
        start: &ShardStart,
    ) -> Result<(ShardLoop<D, ()>, MadeOf<impl Services + use<D, S>>), Error> {
        // First, since nothing has to be taken back if that panics.
        let transports = guard(|| self.shared.transports.made().collect::<Vec<_>>());
        let transports = transports
            .map_err(|panic| Error::FactoryPanicked { shard: self.index, message: panic.to_string() })?;
        let shard = self.handle(driver.waker());
        // What the factories before the one that fails left with the shard may hold it.
        let (made, encodings) = serves.make(shard.clone(), start).inspect_err(|_| shard.end())?;
        let shard = self.shard_loop(shard, driver, transports, encodings)?;
        match &made {
            FactoryOutput::Now(_) => start.succeeded(),
            FactoryOutput::Later(_) => start.waits(),
        }
        Ok((shard, made))
    }

    /// The handle with which the factories are called.
    fn handle(&self, waker: Waker) -> Shard {
        let SharedConfig { checked, names, clock, control, .. } = &*self.shared;
        let remote = control.remotes()[self.index].clone();
        remote.set_driver(waker);
        let random = Random::of_shard(checked.seed, self.index);
        let after = checked.services.iter().map(|service| service.after).collect();
        let ends = ServiceEnds::new(names.clone(), after);
        let shard = Shard::new(self.index, remote, control.clone(), clock.clone(), random, ends);
        shard.upstream_requests().set_connect_timeout(checked.server_limits.connect_timeout);
        shard
    }

    /// The loop of services whose replies are encoded so, before it has them.
    fn shard_loop<D: Driver<Descriptor = OwnedFd>>(
        self,
        shard: Shard,
        driver: D,
        transports: Vec<(u16, Rc<dyn Transport>)>,
        encodings: Vec<Encoding>,
    ) -> Result<ShardLoop<D, ()>, Error> {
        let SharedConfig { checked, names, proxies, asks, told, .. } = &*self.shared;
        let services = checked.services.iter().zip(encodings);
        // There is a first service, as was checked.
        let Some(mut core) = self.core(&shard, &driver, services) else {
            return Err(Error::Services(String::new()));
        };
        for (listener, header) in proxies.expected() {
            core.expect_header(listener, header);
        }
        for (listener, transport) in transports {
            core.secure(listener, Rc::new(GuardedTransport::new(transport, &shard)));
        }
        self.share(&mut core);
        // Others may give connections away before this shard's first turn.
        shard.remote().set_room(core.slots_left());
        let upstreams = add_upstreams(&mut core, &checked.services[0].limits, self.shared.driver.upstreams());
        let common = Common::new(shard, names.clone(), proxies.clone(), told.accounted);
        let parts = LaneParts::new(&common.shard, driver, upstreams, self.one_queue, *asks);
        Ok(ShardLoop::new(core, common, parts))
    }

    /// The state machine, with a lane for each service. `None` without services.
    fn core<'a, D: Driver>(
        &self,
        shard: &Shard,
        driver: &D,
        mut services: impl Iterator<Item = (&'a CheckedService, Encoding)>,
    ) -> Option<Core> {
        let SharedConfig { checked, names, told, .. } = &*self.shared;
        let (first, encoding) = services.next()?;
        driver.pool().bound(checked.server_limits.receive_buffers_max());
        let mut core = Core::new(
            checked.server_limits.clone(),
            first.limits.clone(),
            self.shared.driver.connections(),
            first.listeners,
            encoding,
            driver.pool().clone(),
            LogObserver::new(
                self.index,
                names.clone(),
                shard.remote().publishes(names).clone(),
                told,
                reports_panics(shard),
            ),
        );
        for (service, encoding) in services {
            core.add_inbound(service.limits.clone(), service.listeners, encoding);
        }
        for (number, _) in (0..).zip(&checked.services).filter(|(_, service)| service.after != 0) {
            core.drain_lane_later(LaneId::nth(number));
        }
        Some(core)
    }

    /// Gives the state machine what it has together with those of other shards.
    fn share(&self, core: &mut Core) {
        let control = &self.shared.control;
        if control.remotes().len() > 1 {
            core.share_quota(self.shared.quota.clone());
        }
        if let Some(rate) = control.rate() {
            core.share_rate(rate.clone());
        }
        let limiters = control.limiters().clone();
        if limiters.reserve() {
            core.reserve(self.shared.driver.reserved(), move |listener, peer| {
                limiters.allows(listener, peer)
            });
        }
    }
}
