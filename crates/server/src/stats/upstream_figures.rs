//! The figures of a group of other servers.

/// A group of equal servers that this server asks, such as an `Upstream` of the feature `upstream`,
/// for [`Server::upstream`](crate::Server::upstream).
pub trait UpstreamSource: Send + Sync + 'static {
    /// Reads what it has and did. A scrape of metrics and the admin page call it on their thread,
    /// so it must not wait.
    fn figures(&self) -> UpstreamFigures;
}

/// The figures of a group of equal servers since it was made, over all shards.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct UpstreamFigures {
    /// Its name.
    pub name: String,
    /// Its servers.
    pub backends: Vec<BackendFigures>,
    /// Servers beyond the first [`BACKENDS_REPORTED_MAX`] of all groups, which are left out.
    pub left_out: usize,
    /// Tries beyond the first one of a request or a connection.
    pub retries: u64,
    /// Requests and connections for which there was no server.
    pub refused: u64,
    /// Choices among all servers, since too few were left.
    pub panics: u64,
    /// Answers of the source of its servers, and times that it failed.
    pub lookups: u64,
    /// See [`lookups`](UpstreamFigures::lookups).
    pub lookups_failed: u64,
}

/// The figures of one of the servers.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct BackendFigures {
    /// Its address or name.
    pub name: String,
    /// `unknown` before its first check, `up`, `down`, `ejected` or `drained`.
    pub condition: &'static str,
    /// Its part of the requests.
    pub weight: u32,
    /// Requests, or connections of relays, that it has now.
    pub in_flight: u64,
    /// Connections to it now, idle ones included.
    pub connections: u64,
    /// Those that no request uses.
    pub idle: u64,
    /// All requests that it was given.
    pub requests: u64,
    /// Those that it answered, and the seconds that they took together.
    pub answers: u64,
    /// See [`answers`](BackendFigures::answers).
    pub answer_seconds: f64,
    /// Failures that count for its ejection.
    pub failures: u64,
    /// Connections made, and attempts that failed.
    pub connects: u64,
    /// See [`connects`](BackendFigures::connects).
    pub connects_failed: u64,
    /// Requests that left, and had no answer when their connection ended.
    pub lost: u64,
    /// Requests that were taken back before they left, since their connection had ended.
    pub unsent: u64,
    /// Connections that were closed since something came on them while they were idle.
    pub stray: u64,
}

/// Servers that are reported at most, of all groups of a server together: each is a row of the
/// page, and labels of metrics.
pub const BACKENDS_REPORTED_MAX: usize = 200;

/// Leaves servers out beyond the bound.
pub(crate) fn bounded(groups: impl Iterator<Item = UpstreamFigures>) -> Vec<UpstreamFigures> {
    let mut room = BACKENDS_REPORTED_MAX;
    let bound = |mut group: UpstreamFigures| {
        group.left_out = group.backends.len().saturating_sub(room);
        group.backends.truncate(room);
        room -= group.backends.len();
        group
    };
    groups.map(bound).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_servers_are_reported_than_the_bound() {
        let group = |count| UpstreamFigures {
            backends: vec![BackendFigures::default(); count],
            ..UpstreamFigures::default()
        };
        let bounded = bounded([150, 120, 3].map(group).into_iter());
        let counts: Vec<_> = bounded.iter().map(|group| (group.backends.len(), group.left_out)).collect();
        assert_eq!(counts, [(150, 0), (50, 70), (0, 3)]);
    }
}
