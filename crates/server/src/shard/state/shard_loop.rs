//! The parts of a working shard: driver, state machine and user code.

use std::sync::Arc;

use bytes::Bytes;
use ringserve_admission::internals::Proxies;
use ringserve_admission::internals::ShardAdmission;
use ringserve_base::guard::{Panicked, guard};
use ringserve_base::lines::LineLimit;
use ringserve_base::peer::Peer;
use ringserve_core::{ConnId, Driver, LaneId, Time};

use super::give_way::YieldPolicy;
use super::meter::{LossLog, Meter};
use super::spare::Spare;
use super::upstreams::UpstreamLane;
use crate::log;
use crate::overload::LoadNow;
use crate::shard::Core;
use crate::shard::face::handle::Shard;
use crate::shard::wakes::inbox::{Command, Delivery, ShardRemote};
use crate::shard::wakes::wake::Attention;
use crate::socket_options::asks::SocketQueries;
use crate::stats::{ServiceNames, StalledWork};
use crate::telling::LaneSet;

/// Decides at accept, before anything is kept for a connection.
pub(crate) type Admit = Arc<dyn Fn(&Peer) -> bool + Send + Sync>;

/// The shards of the server, this one too, for one that passes connections on.
pub(crate) type Peers = Arc<[Arc<ShardRemote>]>;

/// A working shard: the state machine, with the parts above and below it.
pub(crate) struct ShardLoop<D: Driver, V> {
    pub(crate) core: Core,
    pub(crate) lane: ShardLane<D, V>,
}

/// The handler of a turn's events: it passes those of a service or of the upstreams on to them, and
/// carries out the letters of other threads.
pub(crate) struct ShardLane<D: Driver, V> {
    /// Dropped first.
    pub(crate) parts: LaneParts<D>,
    pub(crate) common: Common,
    pub(crate) services: V,
}

/// The state that a shard has for itself.
pub(crate) struct LaneParts<D: Driver> {
    /// Dropped first.
    _end: End,
    pub(crate) driver: D,
    pub(crate) remote: Arc<ShardRemote>,
    pub(crate) others: Option<Peers>,
    /// By listener: whether all shards accept from its one queue, as from a Unix socket and from
    /// one that was adopted.
    pub(crate) shared_queue: Box<[bool]>,
    pub(crate) asks: SocketQueries,
    /// The lane of the connections that the shard makes.
    pub(crate) upstreams: UpstreamLane,
    pub(crate) command: Command,
    /// The bits that the turn has to handle.
    pub(crate) called: Attention,
    pub(crate) way: YieldPolicy,
    pub(crate) delivery: Delivery,
    pub(crate) spare: Spare,
}

/// State that a shard and its services share.
pub(crate) struct Common {
    pub(crate) shard: Shard,
    /// When the turn began.
    pub(crate) now: Time,
    /// The demand on the shard when the turn began.
    pub(crate) load: LoadNow,
    /// Frames may have been shed in the turn before.
    pub(crate) has_shed: bool,
    pub(crate) meter: Meter,
    pub(crate) losses: LossLog,
    pub(crate) names: ServiceNames,
    /// Which listeners expect PROXY headers.
    pub(crate) proxies: Proxies,
    /// Services whose connections have accounts, whatever they say themselves.
    pub(crate) accounted: LaneSet,
    /// There are connections with accounts, or may be.
    pub(crate) keeps_accounts: bool,
    /// `None` if the server limits no peer.
    pub(crate) admission: Option<Box<ShardAdmission>>,
    panics: LineLimit,
    untrusted: LineLimit,
}

/// The end of a shard, when it is dropped.
struct End {
    shard: Shard,
}

impl Drop for End {
    fn drop(&mut self) {
        self.shard.remote().close();
        self.shard.end();
    }
}

/// Drops bytes that left, whose owner is user code.
fn drop_owned(bytes: Bytes) {
    if let Err(panicked) = guard(move || drop(bytes)) {
        log::owner_panicked(&panicked);
    }
}

impl<D: Driver> LaneParts<D> {
    pub(crate) fn new(
        shard: &Shard,
        driver: D,
        upstreams: LaneId,
        one_queue: Box<[bool]>,
        asks: SocketQueries,
    ) -> LaneParts<D> {
        let remotes = shard.server().remotes();
        LaneParts {
            _end: End { shard: shard.clone() },
            driver,
            remote: shard.remote().clone(),
            others: (remotes.len() > 1).then(|| remotes.clone()),
            shared_queue: one_queue,
            asks,
            upstreams: UpstreamLane::new(upstreams, shard),
            command: Command::Serve,
            called: Attention::NONE,
            way: YieldPolicy::default(),
            delivery: Delivery::default(),
            spare: Spare::new(),
        }
    }
}

impl<D: Driver> ShardLoop<D, ()> {
    /// A shard before it has services.
    pub(crate) fn new(core: Core, common: Common, parts: LaneParts<D>) -> Self {
        core.all_share().release_owned_by(drop_owned);
        common.shard.set_core(core.all_share());
        // At the end of the first turn.
        common.shard.timers().set_publication(Time::ZERO);
        ShardLoop { core, lane: ShardLane { parts, common, services: () } }
    }
}

/// A connection as the log names it, until it ended.
pub(crate) fn named(core: &Core, id: ConnId) -> Option<(ConnId, Peer)> {
    core.shared(id).map(|shared| (id, Peer::of(shared)))
}

impl Common {
    pub(crate) fn new(shard: Shard, names: ServiceNames, proxies: Proxies, accounted: LaneSet) -> Common {
        let limiters = shard.server().limiters().clone();
        Common {
            now: Time::ZERO,
            load: LoadNow::default(),
            has_shed: false,
            meter: Meter::new(shard.remote().publishes(&names).clone()),
            losses: LossLog::default(),
            admission: ShardAdmission::new(limiters, shard.count()),
            shard,
            names,
            proxies,
            accounted,
            keeps_accounts: false,
            panics: LineLimit::default(),
            untrusted: LineLimit::default(),
        }
    }

    /// The shard works on a connection from now on, for those who watch it.
    pub(crate) fn works_for(&self, core: &Core, work: StalledWork, id: ConnId) {
        let peer = core.shared(id).map(|shared| shared.peer_words()).unwrap_or_default();
        self.meter.snapshot.work.on_connection(work, id, peer);
    }

    /// The same where it works on no connection.
    #[inline]
    pub(crate) fn works(&self, work: StalledWork) {
        self.meter.snapshot.work.on(work);
    }

    /// Wakes the tasks that slept until now. Returns what else is due.
    #[cold]
    pub(crate) fn fire_timers(&mut self) -> Attention {
        self.works(StalledWork::Waker);
        if let Err(panicked) = self.shard.timers().fire(self.now) {
            self.report_panic("waker", None, &panicked);
        }
        match self.shard.timers().is_publication_due(self.now) {
            true => Attention::PUBLICATION,
            false => Attention::NONE,
        }
    }

    /// A connection came to a listener of proxies from elsewhere.
    #[cold]
    pub(crate) fn report_untrusted(&mut self, peer: &Peer) {
        if let Some(left_out) = self.untrusted.sample(self.now) {
            log::untrusted(self.shard.index(), self.names.at(peer.listener_id()), peer, left_out);
        }
    }

    #[cold]
    pub(crate) fn report_panic(
        &mut self,
        place: &str,
        connection: Option<(ConnId, Peer)>,
        panicked: &Panicked,
    ) {
        if self.panics.allows(self.now) {
            let service = connection.as_ref().and_then(|(_, peer)| self.names.at(peer.listener_id()));
            log::panicked(self.shard.index(), service, place, connection, panicked);
        }
    }
}
