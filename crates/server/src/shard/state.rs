//! What a shard at work consists of: driver, state machine and user code.

use std::rc::Rc;
use std::sync::Arc;

use ringserve_core::framing::Framing;
use ringserve_core::{ConnId, Driver, LaneId, Time};

use super::Core;
use super::calls::{Job, Tasks};
use super::handle::Shard;
use super::inbox::{Command, Delivery, RemoteShard};
use super::spare::Spare;
use super::upstreams::UpstreamLane;
use super::wake::Attention;
use crate::guard::Panicked;
use crate::log::{self, LineLimit};
use crate::peer::Peer;
use crate::service::Service;

/// Decides at accept, before anything is kept for a connection.
pub(crate) type Admit = Arc<dyn Fn(&Peer) -> bool + Send + Sync>;

/// What the kernel is asked about each accepted socket, beside its peer's address.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Asks {
    /// The address that the peer connected to.
    pub(crate) local: bool,
    /// The process at the other end of a Unix socket.
    pub(crate) credentials: bool,
}

/// What a shard needs to start.
pub(crate) struct Parts<S: Service, F: Framing, D: Driver> {
    pub shard: Shard,
    pub core: Core,
    pub framing: Rc<F>,
    pub driver: D,
    pub service: S,
    pub admit: Option<Admit>,
    pub others: Option<Others>,
    /// By listener: whether it is a Unix socket, from whose one queue all shards accept.
    pub unix: Box<[bool]>,
    pub asks: Asks,
    /// The lane of the connections that the shard makes.
    pub upstreams: LaneId,
}

/// The shards of the server, this one too, for one that passes connections on.
pub(crate) type Others = Arc<[Arc<RemoteShard>]>;

/// A shard at work: the state machine, and what stands above and below it.
pub(crate) struct ShardLoop<S: Service, F: Framing, D: Driver, Make, Fut> {
    pub(super) core: Core,
    pub(super) lane: ServiceLane<S, F, D, Make, Fut>,
}

/// The service's lane: what a turn does with newcomers, frames, woken calls and the letters of other threads. `Make` makes the
/// future that calls the service, and `Fut` is that future. What concerns a connection to an upstream it gives to that lane.
pub(crate) struct ServiceLane<S: Service, F, D: Driver, Make, Fut> {
    pub(super) shard: Shard,
    pub(super) driver: D,
    pub(super) framing: Rc<F>,
    pub(super) service: Rc<S>,
    pub(super) tasks: Tasks<S, Make, Fut>,
    pub(super) remote: Arc<RemoteShard>,
    pub(super) admit: Option<Admit>,
    pub(super) others: Option<Others>,
    pub(super) unix: Box<[bool]>,
    pub(super) asks: Asks,
    pub(super) upstreams: UpstreamLane,
    pub(super) command: Command,
    /// What the turn has to look at.
    pub(super) called: Attention,
    pub(super) delivery: Delivery,
    pub(super) now: Time,
    pub(super) spare: Spare,
    pub(super) handler_errors: LineLimit,
    pub(super) panics: LineLimit,
}

impl<S: Service, F, D: Driver, Make, Fut> Drop for ServiceLane<S, F, D, Make, Fut> {
    fn drop(&mut self) {
        self.remote.close();
        self.shard.end();
    }
}

impl<S, F, D, Make, Fut> ShardLoop<S, F, D, Make, Fut>
where
    S: Service,
    F: Framing,
    D: Driver,
    Make: Fn(Rc<S>, Rc<Job<S>>) -> Fut,
    Fut: Future<Output = ()>,
{
    pub(crate) fn new(mut parts: Parts<S, F, D>, make: Make) -> Self {
        if !parts.driver.may_lend_beyond_turn() {
            parts.core.copy_frames();
        }
        let service = Rc::new(parts.service);
        let lane = ServiceLane {
            driver: parts.driver,
            framing: parts.framing,
            tasks: Tasks::new(service.clone(), make, parts.shard.clone()),
            service,
            remote: parts.shard.remote().clone(),
            upstreams: UpstreamLane::new(parts.upstreams, &parts.shard),
            shard: parts.shard,
            admit: parts.admit,
            others: parts.others,
            unix: parts.unix,
            asks: parts.asks,
            command: Command::Serve,
            called: Attention::NONE,
            delivery: Delivery::default(),
            now: Time::ZERO,
            spare: Spare::new(),
            handler_errors: LineLimit::default(),
            panics: LineLimit::default(),
        };
        ShardLoop { core: parts.core, lane }
    }
}

/// A connection as the log names it, until it ended.
pub(super) fn named(core: &Core, id: ConnId) -> Option<(ConnId, Peer)> {
    core.shared(id).map(|shared| (id, Peer::of(shared)))
}

impl<S: Service, F, D: Driver, Make, Fut> ServiceLane<S, F, D, Make, Fut> {
    pub(super) fn report_panic(
        &mut self,
        place: &str,
        connection: Option<(ConnId, Peer)>,
        panicked: &Panicked,
    ) {
        if self.panics.allows(self.now) {
            log::panicked(self.shard.index(), place, connection, panicked);
        }
    }
}
