//! The rules of an upstream.

use std::fmt;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use ringserve_server::limits::ConnLimits;
use ringserve_server::transport::Transport;

use crate::backend::Backend;
use crate::check::Check;
use crate::discover::Source;
use crate::policy::budget::Budget;

/// The choice of the backend of a request.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Balance {
    /// Of two random backends that with the shorter expected wait: the peak of its answers' times,
    /// times its requests in flight. A failure counts as an answer that took 5 s. For requests.
    #[default]
    PeakEwma,
    /// The backend with the fewest in flight for its weight, over all shards and exactly. For what
    /// lasts: relays, tunnels, streams. A backend that fails at once has the fewest, so leave
    /// [`ejection`](crate::Upstream::ejection) on.
    Least,
    /// One after the other on each shard, by weight. For exact shares: a backend that is slow gets
    /// as much as the others.
    RoundRobin,
}

/// The version of a PROXY header.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendProxy {
    /// A line of text.
    V1,
    /// Binary, with a checksum.
    V2,
}

/// Bounds on the connections that a shard has to each backend of an upstream.
#[derive(Clone, Debug)]
pub struct PoolLimits {
    pub(crate) connections_max: usize,
    pub(crate) connecting_max: usize,
    pub(crate) idle_max: usize,
    pub(crate) idle_timeout: Duration,
    pub(crate) age_max: Duration,
    pub(crate) uses_max: u64,
    pub(crate) waiting_max: usize,
    pub(crate) wait_max: Duration,
    pub(crate) failfast_after: Duration,
    pub(crate) idle_total_max: usize,
    pub(crate) warm: usize,
}

impl Default for PoolLimits {
    fn default() -> PoolLimits {
        PoolLimits {
            connections_max: 64,
            connecting_max: 4,
            idle_max: 16,
            idle_timeout: Duration::from_secs(60),
            age_max: Duration::from_secs(3600),
            uses_max: u64::MAX,
            waiting_max: 128,
            wait_max: Duration::from_secs(3),
            failfast_after: Duration::from_secs(3),
            idle_total_max: 512,
            warm: 0,
        }
    }
}

impl PoolLimits {
    /// Connections to a backend, idle ones too; at least 1. 64 by default. Calls beyond wait.
    ///
    /// [`ServerLimits::upstreams_max`](ringserve_server::limits::ServerLimits::upstreams_max)
    /// bounds those to all upstreams together.
    pub fn connections_max(self, connections: usize) -> PoolLimits {
        PoolLimits { connections_max: connections.max(1), ..self }
    }

    /// Connections to a backend that are being made at once; at least 1. 4 by default.
    pub fn connecting_max(self, connections: usize) -> PoolLimits {
        PoolLimits { connecting_max: connections.max(1), ..self }
    }

    /// Connections to a backend that no call uses. 16 by default. Each costs about 1 KiB.
    pub fn idle_max(self, connections: usize) -> PoolLimits {
        PoolLimits { idle_max: connections, ..self }
    }

    /// Time that a connection may be idle. 60 s by default.
    pub fn idle_timeout(self, time: Duration) -> PoolLimits {
        PoolLimits { idle_timeout: time, ..self }
    }

    /// The most age of a connection that is lent, more or less a tenth. 1 h by default.
    pub fn age_max(self, time: Duration) -> PoolLimits {
        PoolLimits { age_max: time, ..self }
    }

    /// The most times that a connection is lent; at least 1. Without a bound by default.
    pub fn uses_max(self, uses: u64) -> PoolLimits {
        PoolLimits { uses_max: uses.max(1), ..self }
    }

    /// Calls of the shard that wait for connections of the upstream. 128 by default; one beyond
    /// fails with [`Full`](crate::UpstreamError::Full) at once.
    pub fn waiting_max(self, calls: usize) -> PoolLimits {
        PoolLimits { waiting_max: calls, ..self }
    }

    /// Time that a call may wait for a connection. 3 s by default.
    pub fn wait_max(self, time: Duration) -> PoolLimits {
        PoolLimits { wait_max: time, ..self }
    }

    /// Time that calls may wait for a backend without one of them getting a connection. After it
    /// later calls pass the backend over at once, and a single call waits there to see when that is
    /// over. 3 s by default.
    pub fn failfast_after(self, time: Duration) -> PoolLimits {
        PoolLimits { failfast_after: time, ..self }
    }

    /// Connections to all backends of the upstream that no call uses; over it the one that is idle
    /// for the longest is closed. 512 by default.
    pub fn idle_total_max(self, connections: usize) -> PoolLimits {
        PoolLimits { idle_total_max: connections, ..self }
    }

    /// Connections to each backend that may be asked that are made before a call needs them, and
    /// stay when they are idle; at most [`idle_max`](PoolLimits::idle_max). 0 by default. One that
    /// a backend ends is made again within a second.
    pub fn warm(self, connections: usize) -> PoolLimits {
        PoolLimits { warm: connections, ..self }
    }
}

/// Rules for sending a request again.
///
/// A request that did not leave this process is sent to another backend in any case. One that left
/// is sent again only if it is [idempotent](crate::Request::idempotent), and within the budget,
/// which all shards share: so an outage is not multiplied.
#[derive(Clone, Debug)]
pub struct Retry {
    pub(crate) tries_max: u32,
    percent: u32,
    per_second: u32,
}

impl Default for Retry {
    fn default() -> Retry {
        Retry { tries_max: 3, percent: 20, per_second: 10 }
    }
}

impl Retry {
    /// Tries of a request with the first one; at least 1. 3 by default.
    pub fn tries_max(self, tries: u32) -> Retry {
        Retry { tries_max: tries.max(1), ..self }
    }

    /// Retries within a second: this percentage of the requests of the second before, and
    /// `per_second` more. 20 and 10 by default.
    pub fn budget_of(self, percent: u32, per_second: u32) -> Retry {
        Retry { percent, per_second, ..self }
    }

    pub(crate) fn budget(&self) -> Budget {
        Budget::new(self.percent, self.per_second)
    }
}

/// When a question that may be asked twice is asked of a second backend, while the first one has
/// not answered.
///
/// ```
/// use ringserve::upstream::{Hedge, Upstream};
///
/// let answers = Upstream::new("answers", ["10.0.0.11:9000", "10.0.0.12:9000"]).hedge(Hedge::default());
/// # let _ = answers;
/// ```
#[derive(Clone, Debug)]
pub struct Hedge {
    pub(crate) percentile: u32,
    budget: u32,
}

impl Default for Hedge {
    fn default() -> Hedge {
        Hedge { percentile: 95, budget: 5 }
    }
}

impl Hedge {
    /// The percentage of the last 1000 answers of a shard that are quicker than the time after
    /// which the second backend is asked; 50 to 99. 95 by default. Nothing is asked twice before
    /// 100 answers are known.
    pub fn percentile(self, percent: u32) -> Hedge {
        Hedge { percentile: percent.clamp(50, 99), ..self }
    }

    /// The most second questions within a second, as a percentage of the questions of the second
    /// before; 1 to 100. 5 by default.
    pub fn budget_of(self, percent: u32) -> Hedge {
        Hedge { budget: percent.clamp(1, 100), ..self }
    }

    pub(crate) fn budget(&self) -> Budget {
        Budget::new(self.budget, 0)
    }
}

/// Makes the transport of a connection.
pub(crate) type MakeTransport = Arc<dyn Fn(&Backend) -> io::Result<Rc<dyn Transport>> + Send + Sync>;

#[derive(Clone)]
pub(crate) struct Settings {
    pub(crate) balance: Balance,
    pub(crate) pool: PoolLimits,
    pub(crate) check: Option<Check>,
    pub(crate) retry: Retry,
    pub(crate) hedge: Option<Hedge>,
    pub(crate) answer_timeout: Duration,
    pub(crate) connect_timeout: Duration,
    pub(crate) ejection: bool,
    pub(crate) panic_below: u32,
    pub(crate) zone: Option<Box<str>>,
    pub(crate) has_subset: bool,
    pub(crate) connection_limits: Option<ConnLimits>,
    pub(crate) send_proxy: Option<SendProxy>,
    pub(crate) transport: Option<MakeTransport>,
    pub(crate) source: Option<Arc<dyn Source>>,
    pub(crate) min_backends: usize,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            balance: Balance::default(),
            pool: PoolLimits::default(),
            check: None,
            retry: Retry::default(),
            hedge: None,
            answer_timeout: Duration::from_secs(10),
            connect_timeout: Duration::from_secs(2),
            ejection: true,
            panic_below: 50,
            zone: None,
            has_subset: true,
            connection_limits: None,
            send_proxy: None,
            transport: None,
            source: None,
            min_backends: 1,
        }
    }
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Settings")
    }
}
