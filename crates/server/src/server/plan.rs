//! What a server's shards are made from, and the making of one: the same for threads and for a simulation.

use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;

use ringserve_core::framing::Framing;
use ringserve_core::{Driver, Limits, Quota, ServerLimits};
use socket2::{Domain, SockRef};

use super::driver::Chosen;
use super::error::Error;
use super::runtime::Runtime;
use crate::guard::guard;
use crate::log::LogObserver;
use crate::service::IntoService;
use crate::shard::blocking::Pool;
use crate::shard::calls::calls;
use crate::shard::clock::Clock;
use crate::shard::handle::Shard;
use crate::shard::inbox::RemoteShard;
use crate::shard::random::Random;
use crate::shard::service_lane::ServiceLane;
use crate::shard::services::Services;
use crate::shard::state::{Admit, Asks, Others, Parts};
use crate::shard::upstreams::add_upstreams;

/// What all shards are made from.
pub(super) struct Plan<F, Factory> {
    pub(super) framing: F,
    pub(super) server_limits: ServerLimits,
    pub(super) limits: Limits,
    pub(super) chosen: Chosen,
    pub(super) admit: Option<Admit>,
    pub(super) asks: Asks,
    pub(super) runtime: Runtime,
    pub(super) factory: Arc<Factory>,
    pub(super) shards: usize,
    pub(super) clock: Clock,
    /// Of the shards' random numbers.
    pub(super) seed: u64,
    /// For calls that block, of all shards.
    pub(super) blocking: Arc<dyn Pool>,
}

impl<F: Clone, Factory> Plan<F, Factory> {
    /// Each shard, before it is made, with its listeners.
    pub(super) fn shards(self, sockets: Vec<Vec<OwnedFd>>, cpus: &[usize]) -> Vec<OneShard<F, Factory>> {
        let remotes: Others = (0..self.shards).map(|_| RemoteShard::new()).collect();
        let quota = Arc::new(Quota::new(self.chosen.connections_max()));
        let one = |(index, sockets): (usize, Vec<OwnedFd>)| OneShard {
            index,
            shards: self.shards,
            cpu: cpus.get(index).copied(),
            framing: self.framing.clone(),
            server_limits: self.server_limits.clone(),
            limits: self.limits.clone(),
            chosen: self.chosen.clone(),
            admit: self.admit.clone(),
            asks: self.asks,
            runtime: self.runtime,
            factory: self.factory.clone(),
            clock: self.clock.clone(),
            seed: self.seed,
            blocking: self.blocking.clone(),
            remotes: remotes.clone(),
            quota: quota.clone(),
            unix: sockets.iter().map(is_unix).collect(),
            sockets,
        };
        sockets.into_iter().enumerate().map(one).collect()
    }
}

/// One shard before it runs.
pub(super) struct OneShard<F, Factory> {
    pub(super) index: usize,
    shards: usize,
    pub(super) cpu: Option<usize>,
    framing: F,
    server_limits: ServerLimits,
    limits: Limits,
    pub(super) chosen: Chosen,
    admit: Option<Admit>,
    asks: Asks,
    pub(super) runtime: Runtime,
    factory: Arc<Factory>,
    clock: Clock,
    seed: u64,
    blocking: Arc<dyn Pool>,
    pub(super) remotes: Arc<[Arc<RemoteShard>]>,
    quota: Arc<Quota>,
    /// Which of its listeners are Unix sockets.
    unix: Box<[bool]>,
    pub(super) sockets: Vec<OwnedFd>,
}

fn is_unix(socket: &OwnedFd) -> bool {
    SockRef::from(socket).domain().is_ok_and(|domain| domain == Domain::UNIX)
}

impl<F, Factory, Make> OneShard<F, Factory>
where
    F: Framing + Clone,
    Factory: Fn(&Shard) -> Make,
    Make: IntoService<F>,
{
    /// On the shard's own thread: makes the service and what lies below it.
    pub(super) fn make<D: Driver<Descriptor = OwnedFd>>(
        self,
        driver: D,
        listeners: u16,
    ) -> Result<Parts<D, impl Services>, Error> {
        let remote = self.remotes[self.index].clone();
        remote.set_driver(driver.waker());
        let random = Random::of_shard(self.seed, self.index);
        let shard = Shard::new(self.index, self.shards, remote, self.clock, random, self.blocking);
        shard.upstream_requests().set_connect_timeout(self.server_limits.connect_timeout);
        let service = match guard(|| (self.factory)(&shard).into_service(&shard)) {
            Ok(Ok(service)) => service,
            Ok(Err(error)) => {
                let factory = |error| Error::Factory { shard: self.index, error };
                return Err(error.downcast().map_or_else(factory, |limit| Error::Limits(*limit)));
            }
            Err(_panicked) => return Err(Error::FactoryPanicked { shard: self.index }),
        };
        let framing = Rc::new(self.framing);
        let mut core = ringserve_core::Shard::new(
            self.server_limits,
            self.limits.clone(),
            self.chosen.connections(),
            listeners,
            framing.encoding(),
            driver.pool().clone(),
            LogObserver::new(self.index),
        );
        let others = (self.shards > 1).then(|| self.remotes.clone());
        if others.is_some() {
            core.share_quota(self.quota);
        }
        // Others may give connections away before this shard's first turn.
        self.remotes[self.index].set_room(core.slots_left());
        let upstreams = add_upstreams(&mut core, &self.limits, self.chosen.upstreams());
        let services = ServiceLane::new(&shard, service, framing, self.admit, calls::<Make::Service>);
        Ok(Parts { shard, core, driver, services, others, unix: self.unix, asks: self.asks, upstreams })
    }
}
