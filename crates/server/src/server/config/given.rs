//! The settings of a server and of its services, as the program gives them.

use std::any::TypeId;
use std::iter;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use ringserve_admission::Admission;
use ringserve_base::cpu::cpus_to_pin;
use ringserve_base::doctor::{Rings, Setup};
use ringserve_core::framing::{Raw, TypedFraming};
use ringserve_core::{Limits, ServerLimits};

use super::super::driver::Driver;
use super::super::listen::addr::Binds;
use super::super::runtime::Runtime;
use crate::overload::Overload;
use crate::shard::face::service::IntoService;
use crate::shard::state::shard_loop::Admit;
use crate::socket_options::options::SocketOptions;
use crate::stats::UpstreamSource;
use crate::telling::ObserverConfig;
use crate::watch::options::StallOptions;

/// The settings of a server. What a service may set too is for those that do not.
#[derive(Default)]
pub(crate) struct ServerConfig {
    pub(crate) limits: Option<Limits>,
    pub(crate) sockets: SocketOptions,
    /// Of connections to upstreams; those of the first service for upstreams if there is none.
    pub(crate) upstream_sockets: Option<SocketOptions>,
    pub(crate) admit: Option<Admit>,
    pub(crate) admission: Admission,
    /// The services in the order of their lanes.
    pub(crate) services: Vec<ServiceConfig>,
    /// Of the shards' random numbers in a simulation; the system's if there is none.
    pub(crate) seed: Option<u64>,
    /// `None` if the program does not say.
    pub(crate) server_limits: Option<ServerLimits>,
    /// Those and the services' stay as they are, whatever memory there is.
    pub(crate) keeps_limits: bool,
    pub(crate) shards: Option<usize>,
    pub(crate) pin: Option<bool>,
    pub(crate) share_port: bool,
    pub(crate) driver: Driver,
    pub(crate) coalesce: Duration,
    pub(crate) runtime: Runtime,
    pub(crate) stalls: StallOptions,
    pub(crate) overload: Overload,
    /// This server is the companion endpoint of another one: its start is no line in the log, and
    /// its thread has a name that says so.
    pub(crate) is_beside: bool,
    pub(crate) telling: ObserverConfig,
    /// Groups of other servers, for reports.
    pub(crate) upstreams: Vec<Arc<dyn UpstreamSource>>,
}

/// The settings of a service.
#[derive(Default)]
pub(crate) struct ServiceConfig {
    pub(crate) kind: ServiceKind,
    /// Its addresses.
    pub(crate) binds: Binds,
    pub(crate) name: Option<String>,
    pub(crate) limits: Option<Limits>,
    pub(crate) sockets: Option<SocketOptions>,
    pub(crate) admit: Option<Admit>,
    pub(crate) admission: Option<Admission>,
    pub(crate) access_log: Option<bool>,
    /// The names of services after which it drains.
    pub(crate) drains_after: Vec<String>,
}

/// The settings that follow from the type of a service.
#[derive(Clone, Copy)]
pub(crate) struct ServiceKind {
    /// Switches off the limits that do not apply to it.
    pub(crate) adjust: fn(&mut Limits),
    /// The names of the protocols that it speaks, for TLS.
    pub(crate) protocols: &'static [&'static str],
    /// The type of its framing, by which a transport may go.
    pub(crate) framing: TypeId,
}

impl ServiceKind {
    /// The kind of what a factory makes for this framing.
    pub(crate) fn of<F: TypedFraming, Make: IntoService<F>>() -> ServiceKind {
        ServiceKind { adjust: Make::adjust, protocols: Make::protocols(), framing: TypeId::of::<F>() }
    }
}

impl Default for ServiceKind {
    fn default() -> ServiceKind {
        ServiceKind { adjust: |_| {}, protocols: &[], framing: TypeId::of::<Raw>() }
    }
}

impl ServiceConfig {
    /// The name in errors, before the service has its real ports.
    pub(crate) fn label(&self) -> String {
        let addr =
            || self.binds.first().map_or_else(|| "without an endpoint".to_owned(), ToString::to_string);
        self.name.clone().unwrap_or_else(addr)
    }
}

impl ServerConfig {
    /// The facts for the doctor. `services` are the options of each one's sockets, and whether it
    /// ends idle connections.
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
    pub(crate) fn setup_so_far(&self) -> Setup {
        let cpus = thread::available_parallelism().map_or(1, usize::from);
        let shards = self.shards.unwrap_or(cpus);
        let rings = if self.driver.is_epoll() { Rings::Epoll } else { Rings::Untried };
        let ends_idle = self.limits.clone().unwrap_or_default().idle_timeout.is_some();
        let setup = self.setup(shards, rings, iter::once((&self.sockets, ends_idle)));
        Setup { pinned: !cpus_to_pin(self.pin, shards).is_empty(), ..setup }
    }
}
