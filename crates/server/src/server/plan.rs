//! The parts from which a server's shards are made, and the making of one: the same for threads and for a simulation.

use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Waker;

use ringserve_core::framing::Encoding;
use ringserve_core::{AcceptRate, Address, Driver, LaneId, Limits, Quota, ServerLimits, Transport};
use ringserve_drivers::Listener;

use super::driver::Chosen;
use super::listen::transport::Transports;
use super::runtime::Runtime;
use super::serves::{MadeOf, Serves};
use crate::admission::Limiters;
use crate::admission::proxy_protocol::Proxies;
use crate::base::clock::Clock;
use crate::base::random::Random;
use crate::blocking::Pool;
use crate::doctor::Record;
use crate::error::Error;
use crate::guard::guard;
use crate::log::LogObserver;
use crate::overload::Overload;
use crate::shard::face::guarded_transport::{GuardedTransport, reports_panics};
use crate::shard::face::handle::Shard;
use crate::shard::face::service::Made;
use crate::shard::remote::control::ServerControl;
use crate::shard::running::starting::{ShardStart, Starting};
use crate::shard::state::services::Services;
use crate::shard::state::shard_loop::Parts;
use crate::shard::state::upstreams::add_upstreams;
use crate::shard::tasks::ends::Ends;
use crate::shard::wakes::inbox::RemoteShard;
use crate::socket_options::asks::Asks;
use crate::stats::ServiceNames;
use crate::telling::Told;
use crate::watch::accept_queue::AcceptQueues;
use crate::watch::options::Stalls;

/// The parts from which all shards are made.
pub(super) struct Plan {
    pub(super) server_limits: ServerLimits,
    /// The names of the services, in their order.
    pub(super) lanes: Vec<LanePlan>,
    pub(super) names: ServiceNames,
    /// Which listeners expect PROXY headers.
    pub(super) proxies: Proxies,
    /// Which have a transport.
    pub(super) transports: Transports,
    pub(super) chosen: Chosen,
    pub(super) asks: Asks,
    pub(super) told: Told,
    pub(super) runtime: Runtime,
    /// The server runs beside another one.
    pub(super) is_beside: bool,
    pub(super) stalls: Stalls,
    pub(super) overload: Overload,
    pub(super) shards: usize,
    /// Where the server listens, with the real ports.
    pub(super) listeners: Arc<[Address]>,
    pub(super) clock: Clock,
    /// The seed of the shards' random numbers.
    pub(super) seed: u64,
    /// Whom the listeners let in, and how fast all of them together.
    pub(super) limiters: Limiters,
    pub(super) rate: Option<Arc<AcceptRate>>,
    /// For calls that block, of all shards.
    pub(super) blocking: Arc<dyn Pool>,
    /// Of a server on this machine.
    pub(super) record: Option<Arc<Record>>,
    /// TLS that can be replaced.
    #[cfg(feature = "tls")]
    pub(super) tls: ringserve_tls::ServerTls,
}

/// A service's lane.
#[derive(Clone)]
pub(super) struct LanePlan {
    pub(super) limits: Limits,
    /// The number of listeners that lead to it.
    pub(super) listeners: u16,
    /// The services, as bits, after whose end it drains.
    pub(super) after: u32,
}

impl Plan {
    /// Begins the start.
    pub(super) fn begin(&self, starting: &mut Starting) {
        let names = self.names.lanes().map(|(_, name)| name.to_string()).collect();
        starting.begin(self.shards, self.clock.clone(), self.server_limits.start_timeout, names);
    }

    /// Each shard, before it is made, with its listeners.
    pub(super) fn shards(self, sockets: Vec<Vec<Listener>>, cpus: &[usize]) -> Vec<OneShard> {
        let remotes = (0..self.shards).map(|_| RemoteShard::new()).collect();
        let control = ServerControl::new(remotes, self.listeners, self.blocking, self.clock.clone())
            .with_accept_queues(AcceptQueues::of(&sockets))
            .with_connections_max(self.chosen.connections_max())
            .with_held_bytes_max(self.server_limits.held_bytes_max)
            .with_record(self.record)
            .with_end(&self.server_limits, &sockets)
            .with_limiters(self.limiters, self.rate.clone());
        #[cfg(feature = "metrics")]
        let control = control.with_driver(self.chosen.name());
        #[cfg(feature = "tls")]
        let control = control.with_tls(self.tls);
        let quota = Arc::new(Quota::new(self.chosen.connections_max()));
        let one = |(index, sockets): (usize, Vec<Listener>)| OneShard {
            index,
            cpu: cpus.get(index).copied(),
            server_limits: self.server_limits.clone(),
            lanes: self.lanes.clone(),
            names: self.names.clone(),
            proxies: self.proxies.clone(),
            transports: self.transports.clone(),
            chosen: self.chosen.clone(),
            asks: self.asks,
            told: self.told.clone(),
            runtime: self.runtime,
            clock: self.clock.clone(),
            seed: self.seed,
            control: control.clone(),
            rate: self.rate.clone(),
            quota: quota.clone(),
            one_queue: sockets.iter().map(Listener::is_shared).collect(),
            sockets,
        };
        sockets.into_iter().enumerate().map(one).collect()
    }
}

/// One shard before it runs.
pub(super) struct OneShard {
    pub(super) index: usize,
    pub(super) cpu: Option<usize>,
    server_limits: ServerLimits,
    lanes: Vec<LanePlan>,
    names: ServiceNames,
    proxies: Proxies,
    transports: Transports,
    pub(super) chosen: Chosen,
    asks: Asks,
    told: Told,
    pub(super) runtime: Runtime,
    clock: Clock,
    seed: u64,
    pub(super) control: ServerControl,
    quota: Arc<Quota>,
    rate: Option<Arc<AcceptRate>>,
    /// From which of its listeners all shards accept.
    one_queue: Box<[bool]>,
    pub(super) sockets: Vec<Listener>,
}

impl OneShard {
    /// On the shard's own thread: calls the factories, and makes what lies below the services.
    pub(super) fn make<D: Driver<Descriptor = OwnedFd>, S: Serves>(
        self,
        serves: S,
        driver: D,
        start: &ShardStart,
    ) -> Result<(Parts<D>, MadeOf<impl Services + use<D, S>>), Error> {
        // First, since nothing has to be taken back if that panics.
        let transports = guard(|| self.transports.made().collect::<Vec<_>>());
        let transports = transports
            .map_err(|panic| Error::FactoryPanicked { shard: self.index, message: panic.to_string() })?;
        let shard = self.handle(driver.waker());
        // What the factories before the one that fails left with the shard may hold it.
        let (made, encodings) = serves.make(shard.clone(), start).inspect_err(|_| shard.end())?;
        let parts = self.parts(shard, driver, transports, encodings)?;
        match &made {
            Made::Now(_) => start.succeeded(),
            Made::Later(_) => start.waits(),
        }
        Ok((parts, made))
    }

    /// What the factories are called with.
    fn handle(&self, waker: Waker) -> Shard {
        let remote = self.control.remotes()[self.index].clone();
        remote.set_driver(waker);
        let random = Random::of_shard(self.seed, self.index);
        let ends = Ends::new(self.names.clone(), self.lanes.iter().map(|lane| lane.after).collect());
        let shard = Shard::new(self.index, remote, self.control.clone(), self.clock.clone(), random, ends);
        shard.upstream_requests().set_connect_timeout(self.server_limits.connect_timeout);
        shard
    }

    /// What lies below services whose replies are encoded so.
    fn parts<D: Driver<Descriptor = OwnedFd>>(
        self,
        shard: Shard,
        driver: D,
        transports: Vec<(u16, Rc<dyn Transport>)>,
        encodings: Vec<Encoding>,
    ) -> Result<Parts<D>, Error> {
        let remotes = self.control.remotes().clone();
        let remote = remotes[self.index].clone();
        let limiters = self.control.limiters().clone();
        let mut lanes = self.lanes.iter().zip(encodings);
        // There is a first service, as was checked.
        let Some((first, encoding)) = lanes.next() else { return Err(Error::Services(String::new())) };
        driver.pool().bound(self.server_limits.receive_buffers_max());
        let mut core = ringserve_core::Shard::new(
            self.server_limits,
            first.limits.clone(),
            self.chosen.connections(),
            first.listeners,
            encoding,
            driver.pool().clone(),
            LogObserver::new(
                self.index,
                self.names.clone(),
                remote.publishes(&self.names).clone(),
                &self.told,
                reports_panics(&shard),
            ),
        );
        for (lane, encoding) in lanes {
            core.add_inbound(lane.limits.clone(), lane.listeners, encoding);
        }
        for (number, _) in (0..).zip(&self.lanes).filter(|(_, lane)| lane.after != 0) {
            core.drain_lane_later(LaneId::nth(number));
        }
        for (listener, header) in self.proxies.expected() {
            core.expect_header(listener, header);
        }
        for (listener, transport) in transports {
            core.secure(listener, Rc::new(GuardedTransport::new(transport, &shard)));
        }
        let others = (remotes.len() > 1).then_some(remotes);
        if others.is_some() {
            core.share_quota(self.quota);
        }
        if let Some(rate) = self.rate {
            core.share_rate(rate);
        }
        if limiters.reserve() {
            core.reserve(self.chosen.reserved(), move |listener, peer| limiters.allows(listener, peer));
        }
        // Others may give connections away before this shard's first turn.
        remote.set_room(core.slots_left());
        let upstreams = add_upstreams(&mut core, &first.limits, self.chosen.upstreams());
        let (one_queue, asks, names, proxies) = (self.one_queue, self.asks, self.names, self.proxies);
        let accounted = self.told.accounted;
        Ok(Parts { shard, core, driver, others, one_queue, asks, upstreams, names, proxies, accounted })
    }
}
