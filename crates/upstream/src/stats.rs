//! The figures of an upstream.

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use ringserve_server::stats::{BackendFigures, UpstreamFigures};

use crate::backend::{BackendState, Health};

/// The figures of an [`Upstream`](crate::Upstream) since it was made, over all shards.
#[non_exhaustive]
#[derive(Clone, Debug)]
pub struct UpstreamStats {
    /// Its backends, in the order in which they were given.
    pub backends: Vec<BackendStats>,
    /// Tries beyond the first one of a request, or of a connection.
    pub retries: u64,
    /// Questions that were asked of a second backend beside the first.
    pub hedges: u64,
    /// Requests and connections for which there was no backend.
    pub refused: u64,
    /// Choices that were made among all backends, since fewer than
    /// [`panic_below`](crate::Upstream::panic_below) were left.
    pub panics: u64,
    /// Answers of the [source](crate::Discover) of its backends, and times that it failed or that
    /// its answer was refused.
    pub lookups: u64,
    /// See [`lookups`](UpstreamStats::lookups).
    pub lookups_failed: u64,
}

/// The figures of a backend.
#[non_exhaustive]
#[derive(Clone, Debug)]
pub struct BackendStats {
    /// Its [name](crate::Backend::name).
    pub name: String,
    /// Its part of the requests.
    pub weight: u32,
    /// Its [priority](crate::Backend::priority): those of the lowest number are asked first.
    pub priority: u16,
    /// The result of its checks.
    pub health: Health,
    /// An operator took it out.
    pub is_drained: bool,
    /// Its requests failed, and it is out until one succeeds.
    pub is_ejected: bool,
    /// Its last check did not come about, for want of something of this host.
    pub is_unchecked: bool,
    /// Requests, or connections of relays, that it has now.
    pub in_flight: u64,
    /// Connections to it now, and those of them that are idle, as the shards reported about a
    /// second ago. None of relays.
    pub connections: u64,
    /// See [`connections`](BackendStats::connections).
    pub idle: u64,
    /// All that it was given.
    pub requests: u64,
    /// Requests that it answered, and the time that they took together.
    pub answers: u64,
    /// See [`answers`](BackendStats::answers).
    pub answer_time: Duration,
    /// Failures that count for its ejection.
    pub failures: u64,
    /// Connections made, and attempts that failed.
    pub connects: u64,
    /// See [`connects`](BackendStats::connects).
    pub connects_failed: u64,
    /// Connections of relays that the backend broke in the middle.
    pub broken: u64,
    /// Requests that left, and had no answer when their connection ended.
    pub lost: u64,
    /// Requests that were taken back before they left, since their connection had ended.
    pub unsent: u64,
    /// Connections that were closed since something came on them while they were idle.
    pub stray: u64,
    /// Bytes that relays passed on to it.
    pub bytes_there: u64,
    /// Bytes that relays passed on from it.
    pub bytes_back: u64,
}

impl BackendStats {
    pub(crate) fn of(state: &BackendState) -> BackendStats {
        let counts = &state.counts;
        BackendStats {
            name: state.backend.name().to_owned(),
            weight: state.weight.load(Relaxed),
            priority: state.priority.load(Relaxed),
            health: state.health(),
            is_drained: state.is_drained.load(Relaxed),
            is_ejected: state.ejected_until.load(Relaxed) != 0,
            is_unchecked: state.is_unchecked.load(Relaxed),
            in_flight: state.in_flight.load(Relaxed),
            connections: state.connections.load(Relaxed),
            idle: state.idle.load(Relaxed),
            requests: counts.requests.load(Relaxed),
            answers: counts.answers.load(Relaxed),
            answer_time: Duration::from_nanos(counts.answer_time.load(Relaxed)),
            failures: counts.failures.load(Relaxed),
            connects: counts.connects.load(Relaxed),
            connects_failed: counts.connects_failed.load(Relaxed),
            broken: counts.broken.load(Relaxed),
            lost: counts.lost.load(Relaxed),
            unsent: counts.unsent.load(Relaxed),
            stray: counts.stray.load(Relaxed),
            bytes_there: counts.bytes_there.load(Relaxed),
            bytes_back: counts.bytes_back.load(Relaxed),
        }
    }
}

impl UpstreamStats {
    /// The same as the server reports it.
    pub(crate) fn figures(self, name: &str) -> UpstreamFigures {
        let mut figures = UpstreamFigures::default();
        name.clone_into(&mut figures.name);
        figures.retries = self.retries;
        figures.refused = self.refused;
        figures.panics = self.panics;
        figures.lookups = self.lookups;
        figures.lookups_failed = self.lookups_failed;
        figures.backends = self.backends.into_iter().map(BackendStats::figures).collect();
        figures
    }
}

impl BackendStats {
    /// In one word, what keeps it from being asked the longest.
    fn condition(&self) -> &'static str {
        match self.health {
            _ if self.is_drained => "drained",
            Health::Down => "down",
            _ if self.is_ejected => "ejected",
            Health::Up => "up",
            Health::Unknown => "unknown",
        }
    }

    fn figures(self) -> BackendFigures {
        let mut figures = BackendFigures::default();
        figures.condition = self.condition();
        figures.name = self.name;
        figures.weight = self.weight;
        figures.in_flight = self.in_flight;
        figures.connections = self.connections;
        figures.idle = self.idle;
        figures.requests = self.requests;
        figures.answers = self.answers;
        figures.answer_seconds = self.answer_time.as_secs_f64();
        figures.failures = self.failures;
        figures.connects = self.connects;
        figures.connects_failed = self.connects_failed;
        figures.lost = self.lost;
        figures.unsent = self.unsent;
        figures.stray = self.stray;
        figures
    }
}
