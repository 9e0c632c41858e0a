//! One server of an upstream, and what all shards know of it.

use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering::Relaxed};

use ringserve_server::net::Destination;

use crate::locked;
use crate::policy::failures::Window;

/// One server of an [`Upstream`](crate::Upstream): where it is, and its weight.
///
/// ```
/// use ringserve::upstream::Backend;
///
/// let large = Backend::new("10.0.0.11:80").weight(4);
/// assert_eq!((large.name(), large.host()), ("10.0.0.11:80", "10.0.0.11"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Backend {
    destination: Destination,
    name: Box<str>,
    host: Option<Box<str>>,
    weight: u32,
    priority: u16,
    zone: Option<Box<str>>,
}

impl Backend {
    /// A backend at an address or a Unix socket, or with a name and a port. A name is looked up for
    /// each connection, as [`Shard::connect`](ringserve_server::Shard::connect) does.
    pub fn new(destination: impl Into<Destination>) -> Backend {
        let destination = destination.into();
        let name = destination.to_string().into();
        Backend { name, destination, host: None, weight: 1, priority: 0, zone: None }
    }

    /// Its part of the requests, 1 to 65535: a backend of weight 2 gets twice as many as one of
    /// weight 1. 1 by default.
    pub fn weight(self, weight: u32) -> Backend {
        Backend { weight: weight.clamp(1, 65535), ..self }
    }

    /// Its priority. Backends of the lowest number are asked while five of seven of them may be,
    /// and 0 is the default. Where fewer may be asked, each is given as many requests as if five of
    /// seven were, and those of the next number have the others.
    pub fn priority(self, priority: u16) -> Backend {
        Backend { priority, ..self }
    }

    /// The zone where it is, such as a data centre: see [`Upstream::zone`](crate::Upstream::zone).
    pub fn zone(self, zone: &str) -> Backend {
        Backend { zone: Some(zone.into()), ..self }
    }

    /// The name of the host, as its certificate has it, where the destination is an address.
    pub fn host_name(self, host: &str) -> Backend {
        Backend { host: Some(host.into()), ..self }
    }

    /// The destination as text, such as `10.0.0.11:80`. Two backends with the same one are the
    /// same.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The name without its port, without the brackets of an IPv6 address: what a certificate has,
    /// unless [`host_name`](Backend::host_name) was given. Empty for a Unix socket.
    pub fn host(&self) -> &str {
        if let Some(host) = &self.host {
            return host;
        }
        if self.name.starts_with("unix:") {
            return "";
        }
        self.name.rsplit_once(':').map_or("", |(host, _port)| host.trim_matches(['[', ']']))
    }

    /// The address of the backend.
    pub fn destination(&self) -> &Destination {
        &self.destination
    }

    pub(crate) fn given_weight(&self) -> u32 {
        self.weight
    }

    pub(crate) fn given_zone(&self) -> Option<&str> {
        self.zone.as_deref()
    }

    pub(crate) fn given_priority(&self) -> u16 {
        self.priority
    }
}

impl<D: Into<Destination>> From<D> for Backend {
    fn from(destination: D) -> Backend {
        Backend::new(destination)
    }
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// The result of the checks of a backend.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Health {
    /// It was not checked yet, or has no checks: it is asked.
    #[default]
    Unknown,
    /// It is asked.
    Up,
    /// It is not asked.
    Down,
}

/// Whether a backend may be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    Usable,
    /// Its ejection is over, and one request may try whether it works.
    OnTrial,
    /// Until then, in nanoseconds.
    Ejected(u64),
    Down,
    Drained,
}

/// State of a backend that all shards share. All of it is atomic but the window of failures, which
/// is locked where one fails, and once a millisecond for those that succeed.
#[derive(Debug)]
pub(crate) struct BackendState {
    pub(crate) backend: Backend,
    pub(crate) weight: AtomicU32,
    pub(crate) priority: AtomicU16,
    health: AtomicU8,
    pub(crate) is_drained: AtomicBool,
    /// It left the upstream.
    pub(crate) is_gone: AtomicBool,
    /// Its last check did not come about, for want of something of this host.
    pub(crate) is_unchecked: AtomicBool,
    /// A shard checks it.
    pub(crate) is_watched: AtomicBool,
    /// The end of its ejection; 0 if it is not ejected. It stays until a request succeeds.
    pub(crate) ejected_until: AtomicU64,
    pub(crate) ejections: AtomicU32,
    /// A request tries whether it works again.
    pub(crate) is_tried: AtomicBool,
    /// When it came back, and how often.
    pub(crate) returned_at: AtomicU64,
    pub(crate) returns: AtomicU32,
    /// Failures since the last success.
    pub(crate) in_a_row: AtomicU32,
    pub(crate) window: Mutex<Window>,
    /// Requests in flight as the shards reported them.
    pub(crate) in_flight: AtomicU64,
    /// Connections of all shards, and those that are idle, likewise.
    pub(crate) connections: AtomicU64,
    pub(crate) idle: AtomicU64,
    pub(crate) counts: Counts,
}

/// Counts since the start.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) requests: AtomicU64,
    pub(crate) answers: AtomicU64,
    /// Nanoseconds of all answers together.
    pub(crate) answer_time: AtomicU64,
    pub(crate) failures: AtomicU64,
    pub(crate) connects: AtomicU64,
    pub(crate) connects_failed: AtomicU64,
    pub(crate) broken: AtomicU64,
    pub(crate) lost: AtomicU64,
    pub(crate) unsent: AtomicU64,
    pub(crate) stray: AtomicU64,
    pub(crate) bytes_there: AtomicU64,
    pub(crate) bytes_back: AtomicU64,
}

impl Counts {
    pub(crate) fn add(count: &AtomicU64, more: u64) {
        count.fetch_add(more, Relaxed);
    }
}

impl BackendState {
    /// True if nothing but an ejection keeps it from being asked.
    pub(crate) fn is_askable(&self) -> bool {
        let is_out = self.is_gone.load(Relaxed) || self.is_drained.load(Relaxed);
        !is_out && self.health() != Health::Down
    }

    pub(crate) fn new(backend: Backend) -> BackendState {
        BackendState {
            weight: AtomicU32::new(backend.weight),
            priority: AtomicU16::new(backend.priority),
            backend,
            health: AtomicU8::new(0),
            is_drained: AtomicBool::new(false),
            is_gone: AtomicBool::new(false),
            is_unchecked: AtomicBool::new(false),
            is_watched: AtomicBool::new(false),
            ejected_until: AtomicU64::new(0),
            ejections: AtomicU32::new(0),
            is_tried: AtomicBool::new(false),
            returned_at: AtomicU64::new(0),
            returns: AtomicU32::new(0),
            in_a_row: AtomicU32::new(0),
            window: Mutex::default(),
            in_flight: AtomicU64::new(0),
            connections: AtomicU64::new(0),
            idle: AtomicU64::new(0),
            counts: Counts::default(),
        }
    }

    pub(crate) fn health(&self) -> Health {
        match self.health.load(Relaxed) {
            0 => Health::Unknown,
            1 => Health::Up,
            _ => Health::Down,
        }
    }

    pub(crate) fn set_health(&self, health: Health) {
        let number = match health {
            Health::Unknown => 0,
            Health::Up => 1,
            Health::Down => 2,
        };
        self.health.store(number, Relaxed);
    }

    pub(crate) fn standing(&self, now: u64) -> Standing {
        if self.is_drained.load(Relaxed) {
            return Standing::Drained;
        }
        if self.health() == Health::Down {
            return Standing::Down;
        }
        match self.ejected_until.load(Relaxed) {
            0 => Standing::Usable,
            until if until <= now => Standing::OnTrial,
            until => Standing::Ejected(until),
        }
    }

    /// Forgets what was noted by the clock of a server that ended. One that was ejected is tried at
    /// once.
    pub(crate) fn forgets_times(&self) {
        if self.ejected_until.load(Relaxed) != 0 {
            self.ejected_until.store(1, Relaxed);
        }
        self.returned_at.store(0, Relaxed);
        self.in_a_row.store(0, Relaxed);
        *locked(&self.window) = Window::default();
    }

    /// Notes that it came back, at `now`.
    pub(crate) fn returns(&self, now: u64) {
        self.returned_at.store(now.max(1), Relaxed);
        self.returns.fetch_add(1, Relaxed);
        self.in_a_row.store(0, Relaxed);
        *locked(&self.window) = Window::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backend_costs_about_500_bytes() {
        assert!(size_of::<BackendState>() <= 400, "{}", size_of::<BackendState>());
    }

    #[test]
    fn backend_has_a_name_and_a_host() {
        let host = |name: &str| Backend::new(name).host().to_owned();
        assert_eq!(host("one.internal:80"), "one.internal");
        assert_eq!(host("[::1]:443"), "::1");
        assert_eq!(host("unix:/run/a:b.sock"), "");
        assert_eq!(Backend::new("a:1").weight(0), Backend::new("a:1"));
    }
}
