//! The checks of what a program set, and what follows from it.

use std::collections::HashSet;
use std::iter;
use std::sync::Arc;
use std::time::Duration;

use ringserve_admission::Admission;
use ringserve_admission::internals::{Limiter, Limiters, RESERVED, ServerRate};
use ringserve_base::doctor::{Rings, Setup};
use ringserve_base::random::Random;
use ringserve_core::{LimitError, Limits, ServerLimits};

use super::super::listen::addr::{self, Bind};
use super::given::{ServerConfig, ServiceConfig, ServiceKind};
use crate::error::Error;
use crate::shard::state::many::SERVICES_MAX;
use crate::socket_options::options::SocketOptions;

/// Shards at most: beyond, something is wrong with the number.
const SHARDS_MAX: usize = 1024;

/// Bounds of the time for which a shard may wait for more input. A shorter wait cannot be
/// distinguished from none, and a client that waits for its answer notices a longer one.
const COALESCE_MIN: Duration = Duration::from_micros(1);
const COALESCE_MAX: Duration = Duration::from_millis(1);

/// The settings after the checks.
pub(crate) struct CheckedConfig {
    /// As the program set them, without its services.
    pub(crate) given: ServerConfig,
    pub(crate) services: Vec<CheckedService>,
    /// Of connections to upstreams.
    pub(crate) upstream_sockets: SocketOptions,
    pub(crate) server_limits: ServerLimits,
    /// The receive buffers of a shard by what the program set, or by default.
    pub(crate) receive_buffers_max: usize,
    pub(crate) shards: usize,
    /// Whom the listeners let in, and how fast all of them together.
    pub(crate) limiters: Limiters,
    pub(crate) rate: Option<ServerRate>,
    pub(crate) seed: u64,
}

/// A service after the checks.
pub(crate) struct CheckedService {
    /// As the program set it, without its addresses.
    pub(crate) given: ServiceConfig,
    pub(crate) binds: Vec<Bind>,
    /// The number of them.
    pub(crate) listeners: u16,
    /// Its own, those of the server, or the defaults.
    pub(crate) limits: Limits,
    /// The program set them.
    pub(crate) has_given_limits: bool,
    /// Its own, or those of the server.
    pub(crate) sockets: SocketOptions,
    /// The services, as bits, after whose end it drains.
    pub(crate) after: u32,
}

/// Checks limits with the framing of the service with a number, which refuses those it cannot work
/// with.
pub(crate) type CheckLimits<'a> = &'a dyn Fn(usize, &Limits) -> Result<(), LimitError>;

impl ServerConfig {
    /// Checks what the program set. There are `by_default` shards if it does not say.
    ///
    /// # Errors
    /// Of the first setting that cannot be used. The text names it.
    pub(crate) fn check(
        mut self,
        framings: CheckLimits<'_>,
        by_default: usize,
    ) -> Result<CheckedConfig, Error> {
        let services = std::mem::take(&mut self.services);
        let services = services.into_iter().map(|service| self.resolve(service));
        let mut services = services.collect::<Result<Vec<_>, Error>>()?;
        check_services(&mut services)?;
        if let Some(text) = self.telling.unclear() {
            return Err(Error::Trace(text.to_owned()));
        }
        let server_limits = self.check_limits(&mut services, framings)?;
        let shards = self.shards.unwrap_or(by_default);
        if !(1..=SHARDS_MAX).contains(&shards) {
            return Err(Error::Shards(shards));
        }
        let coalesce = self.coalesce;
        if !coalesce.is_zero() && !(COALESCE_MIN..=COALESCE_MAX).contains(&coalesce) {
            return Err(Error::Coalesce(coalesce));
        }
        let seed = self.seed.unwrap_or_else(Random::system_seed);
        let (limiters, rate) = self.check_admission(&services, server_limits.connections_max, seed)?;
        let receive_buffers_max = server_limits.receive_buffers_max();
        let upstream_sockets = self.upstream_sockets.clone();
        let upstream_sockets = upstream_sockets.unwrap_or_else(|| services[0].sockets.for_upstreams());
        upstream_sockets.check().map_err(Error::SocketOption)?;
        Ok(CheckedConfig {
            given: self,
            services,
            upstream_sockets,
            server_limits,
            receive_buffers_max,
            shards,
            limiters,
            rate,
            seed,
        })
    }

    /// The service with its addresses, and with what it takes from the server.
    fn resolve(&self, mut given: ServiceConfig) -> Result<CheckedService, Error> {
        let of_service = |error: Error| error.of_service(given.name.as_ref());
        let binds =
            std::mem::take(&mut given.binds).all().map_err(|error| of_service(Error::Address(error)))?;
        let binds = with_transports(binds, given.kind).map_err(of_service)?;
        let limits = given.limits.clone().or_else(|| self.limits.clone());
        let (has_given_limits, mut limits) = (limits.is_some(), limits.unwrap_or_default());
        (given.kind.adjust)(&mut limits);
        let sockets = given.sockets.clone().unwrap_or_else(|| self.sockets.clone());
        // There are 1024 at most, as is checked of all together.
        let listeners = u16::try_from(binds.len()).unwrap_or(u16::MAX);
        Ok(CheckedService { given, binds, listeners, limits, has_given_limits, sockets, after: 0 })
    }

    /// Checks limits and socket options. Limits that the program did not set are fitted into those
    /// that it did.
    fn check_limits(
        &self,
        services: &mut [CheckedService],
        framings: CheckLimits<'_>,
    ) -> Result<ServerLimits, Error> {
        let mut server_limits = self.server_limits.clone().unwrap_or_default();
        server_limits.check().map_err(Error::Limits)?;
        let is_one_of_several = services.len() > 1;
        for (number, service) in services.iter_mut().enumerate() {
            let label = is_one_of_several.then(|| service.label());
            let wrong = |error| Error::Limits(error).of_service(label.as_ref());
            service.limits.check().map_err(wrong)?;
            if self.server_limits.is_none() {
                server_limits = server_limits.with_room_for(&service.limits);
            } else if service.has_given_limits {
                server_limits.check_service(&service.limits).map_err(wrong)?;
            } else {
                server_limits.check_defaults().map_err(wrong)?;
                service.limits = service.limits.clone().fitted(&server_limits);
            }
            framings(number, &service.limits).map_err(wrong)?;
            service.sockets.check().map_err(|error| Error::SocketOption(error).of_service(label.as_ref()))?;
        }
        Ok(server_limits)
    }

    /// Makes the limits on who is let in. Services without their own share those of the server, and
    /// listeners those of their service.
    fn check_admission(
        &self,
        services: &[CheckedService],
        connections_max: usize,
        seed: u64,
    ) -> Result<(Limiters, Option<ServerRate>), Error> {
        let seed = (seed, self.seed.is_some());
        let checked = |admission: &Admission, of_one| admission.check(of_one, connections_max, seed);
        let (of_all, rate) = checked(&self.admission, false).map_err(Error::Admission)?;
        let of_all = of_all.map(Arc::new);
        let of_service = |service: &CheckedService| match &service.given.admission {
            None => Ok(of_all.clone()),
            Some(own) => match checked(own, true) {
                Ok((limiter, _)) => Ok(limiter.map(Arc::new)),
                Err(error) => Err(Error::Admission(error).of_service(Some(&service.label()))),
            },
        };
        let mut limiters: Vec<(&Bind, Option<Arc<Limiter>>)> = Vec::new();
        for service in services {
            let shared = of_service(service)?;
            // Addresses that a name resolved to count together.
            let mut made: Vec<(&Arc<Admission>, Option<Arc<Limiter>>)> = Vec::new();
            for bind in &service.binds {
                let Some(own) = &bind.admission else {
                    limiters.push((bind, shared.clone()));
                    continue;
                };
                if !made.iter().any(|(known, _)| Arc::ptr_eq(known, own)) {
                    let of_listener = |error| {
                        let name = format!("{}, at {}", service.label(), bind.addr);
                        Error::Admission(error).of_service(Some(&name))
                    };
                    let (limiter, _) = checked(own, true).map_err(of_listener)?;
                    made.push((own, limiter.map(Arc::new)));
                }
                let own = made.iter().find(|(known, _)| Arc::ptr_eq(known, own));
                limiters.push((bind, own.and_then(|(_, limiter)| limiter.clone())));
            }
        }
        let each = limiters.iter();
        let each =
            each.map(|(bind, limiter)| (limiter.as_ref(), &bind.addr, bind.proxy.is_some(), bind.is_plain));
        Ok((Limiters::of(each), rate))
    }
}

/// Adds the transports that TLS and WebSocket are, for a service of this kind.
fn with_transports(mut binds: Vec<Bind>, kind: ServiceKind) -> Result<Vec<Bind>, Error> {
    for bind in &mut binds {
        bind.is_plain = bind.transport.is_none() && !bind.tls.is_set();
        let below = bind.tls.transport(kind.protocols)?.or(bind.transport.take());
        bind.transport = bind.websocket.above(below, &bind.addr, kind.framing)?;
    }
    Ok(binds)
}

/// Checks names, addresses, and the order of the drain, which it sets.
fn check_services(services: &mut [CheckedService]) -> Result<(), Error> {
    let wrong = |text: String| Err(Error::Services(text));
    if services.is_empty() {
        return wrong("there is none: add one by Server::service".to_owned());
    }
    if services.len() > SERVICES_MAX {
        return wrong(format!("there are {}; {SERVICES_MAX} is the most", services.len()));
    }
    let mut names = HashSet::new();
    for service in &*services {
        if service.binds.is_empty() {
            return wrong(format!(
                "the service {} has no endpoint; give it one, such as tcp(\"127.0.0.1:7000\")",
                service.label()
            ));
        }
        if let Some(name) = &service.given.name
            && !names.insert(name)
        {
            return wrong(format!("two have the name {name}; give each another one by Endpoints::name"));
        }
    }
    let after = drains_after(services).map_err(Error::Services)?;
    services.iter_mut().zip(after).for_each(|(service, after)| service.after = after);
    let labels: Vec<String> = services.iter().map(CheckedService::label).collect();
    let label = |n: usize| (labels.len() > 1).then(|| &*labels[n]);
    let of_service = |(n, service): (usize, &'_ CheckedService)| iter::repeat_n(n, service.binds.len());
    let leads_to = services.iter().enumerate().flat_map(of_service).map(label);
    addr::check(services.iter().flat_map(|service| &service.binds).zip(leads_to)).map_err(Error::Address)
}

/// For each service, those as bits after whose end it drains.
///
/// # Errors
/// One that is not there, and a circle, with the names of both.
fn drains_after(services: &[CheckedService]) -> Result<Vec<u32>, String> {
    let number = |name: &String| services.iter().position(|of| of.given.name.as_ref() == Some(name));
    let bits = |service: &CheckedService| {
        service.given.drains_after.iter().try_fold(0, |bits: u32, after| match number(after) {
            Some(number) => Ok(bits | 1 << number),
            None => Err(format!("{} drains after {after}, and no service has that name", service.label())),
        })
    };
    let after = services.iter().map(bits).collect::<Result<Vec<u32>, String>>()?;
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
                let [one, two] = [number, other].map(|n| services[n].label());
                return Err(format!("{one} drains after {two}, which in the end drains after {one}"));
            }
        }
    }
    Ok(after)
}

impl CheckedService {
    /// The name in errors, before the service has its real ports.
    pub(crate) fn label(&self) -> String {
        let first = || self.binds.first().map(|bind| bind.addr.to_string());
        let addr = || first().unwrap_or_else(|| "without an endpoint".to_owned());
        self.given.name.clone().unwrap_or_else(addr)
    }
}

impl CheckedConfig {
    /// The addresses of all services, in the order of the listeners.
    pub(crate) fn binds(&self) -> impl Iterator<Item = &Bind> {
        self.services.iter().flat_map(|service| &service.binds)
    }

    /// The facts for the doctor.
    pub(crate) fn setup(&self, rings: Rings, pinned: bool) -> Setup {
        let services = self.services.iter().map(|of| (&of.sockets, of.limits.idle_timeout.is_some()));
        let has_own = |bind: &Bind| bind.adopted.is_none() && bind.addr.as_ip().is_some();
        let one_queue = !self.binds().any(has_own);
        Setup { pinned, one_queue, ..self.given.setup(self.shards, rings, services) }
    }

    /// Slots of each shard in addition to those for all, for peers of allow lists.
    pub(crate) fn reserved(&self) -> usize {
        if self.limiters.reserve() { RESERVED } else { 0 }
    }

    /// True if the address of each peer is asked for: where proxies connect, it says whether they
    /// are trusted.
    pub(crate) fn asks_peer_addresses(&self) -> bool {
        !self.limiters.is_empty()
            || self.services.iter().any(|service| service.sockets.peer_address)
            || self.binds().any(|bind| bind.proxy.is_some())
    }
}
