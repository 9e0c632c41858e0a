//! Answers of name servers, as backends.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use hickory_resolver::lookup::Lookup;
use hickory_resolver::proto::rr::RData;
use hickory_resolver::proto::rr::rdata::SRV;

use crate::backend::Backend;

/// Records of a service that are used.
const SERVICES_MAX: usize = 256;

/// The backends of a name, and for how long they are those.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) backends: Vec<Found>,
    pub(super) ttl: Duration,
}

/// A backend that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) addr: SocketAddr,
    pub(super) host: Box<str>,
    pub(super) weight: u16,
    pub(super) priority: u16,
}

impl From<Found> for Backend {
    fn from(found: Found) -> Backend {
        let backend = Backend::new(found.addr).host_name(&found.host);
        backend.weight(found.weight.into()).priority(found.priority)
    }
}

/// The time for which an answer holds: the shortest of its records, and of the names between.
pub(super) fn ttl(lookup: &Lookup, now: Instant) -> Duration {
    let of_records = lookup.answers().iter().map(|record| record.ttl).min();
    let of_records = of_records.map_or(Duration::ZERO, |seconds| Duration::from_secs(seconds.into()));
    of_records.min(lookup.valid_until().saturating_duration_since(now))
}

/// The addresses of an answer, each once; those of IPv6 only if they can be reached, or there is
/// nothing else.
pub(super) fn addresses(found: impl Iterator<Item = IpAddr>, has_ipv6: bool) -> Vec<IpAddr> {
    let mut seen = BTreeSet::new();
    let mut all: Vec<IpAddr> = found.filter(|ip| seen.insert(*ip)).collect();
    if !has_ipv6 && all.iter().any(IpAddr::is_ipv4) {
        all.retain(IpAddr::is_ipv4);
    }
    all
}

/// A record of a service, whose target has to be looked up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Target {
    /// The name, fully qualified.
    pub(super) name: String,
    pub(super) port: u16,
    pub(super) weight: u16,
    pub(super) priority: u16,
}

/// The records of an answer. A target `.` says that the service is not offered, and is none.
pub(super) fn targets(lookup: &Lookup) -> Vec<Target> {
    let services = lookup.answers().iter().filter_map(|record| match &record.data {
        RData::SRV(service) if !service.target.is_root() => Some(target(service)),
        _ => None,
    });
    services.take(SERVICES_MAX).collect()
}

fn target(service: &SRV) -> Target {
    let mut name = service.target.to_ascii();
    if !name.ends_with('.') {
        name.push('.');
    }
    Target { name, port: service.port, weight: service.weight, priority: service.priority }
}

impl Target {
    /// The backends at these addresses.
    pub(super) fn at(&self, addresses: &[IpAddr]) -> Vec<Found> {
        let found = |ip: &IpAddr| Found {
            addr: SocketAddr::new(*ip, self.port),
            host: self.name.trim_end_matches('.').into(),
            weight: self.weight,
            priority: self.priority,
        };
        addresses.iter().map(found).collect()
    }
}
