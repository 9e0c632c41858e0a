//! Counts and holdings of a server, its shards and their parts.

mod stall;
pub(crate) mod upstream_figures;

#[cfg(feature = "testing")]
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

pub use ringserve_buf::BufferStats;
use ringserve_core::LaneId;
pub use ringserve_core::{Account, ConnStats, DriverStats, WaitCounts};
pub use stall::{ShardTimes, Stall, StallCause, StalledWork};
pub use upstream_figures::{BACKENDS_REPORTED_MAX, BackendFigures, UpstreamFigures, UpstreamSource};

pub use ringserve_admission::{AdmissionStats, RefusedBy};

/// Counts of a shard since its start, and what it holds.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct ShardStats {
    /// Counts of connections, of all services together.
    pub counters: ConnStats,
    /// Connections now, closing ones included, of all services together.
    pub connections: usize,
    /// Each service's own, in the order in which the server got them.
    pub services: Vec<ServiceStats>,
    /// Counts of connections that the shard made ([`Shard::connect`](crate::Shard::connect)).
    pub upstreams: UpstreamStats,
    /// Counts of the driver.
    pub driver: DriverStats,
    /// The states of the receive buffers.
    pub buffers: BufferStats,
    /// Bytes that its connections hold beside the buffers, of
    /// [`ServerLimits::held_bytes_max`](crate::limits::ServerLimits::held_bytes_max).
    pub held_bytes: usize,
    /// Connections that it accepted and that wait for a place: a burst brings some before accepting
    /// stops at a limit. No accept queue counts them.
    pub accepted_waiting: usize,
    /// The same, by the reason why they wait.
    pub accepted_waiting_by: WaitCounts,
    /// True if all of the above is what the shard said some time ago: a handler blocks it for more
    /// than 250 ms, its loop panicked, or
    /// [`ServerControl::stats_now`](crate::ServerControl::stats_now) was called on a shard's own
    /// thread.
    pub stale: bool,
}

/// The connections of one service: what happened to them, and how many there are. A pause of all
/// listeners together counts in [`ConnStats::accept_paused`] of the first one, and that of a single
/// listener in that of its service.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ServiceStats {
    /// The service's name: that which the program gave
    /// ([`Endpoints::name`](crate::listen::Endpoints::name)), or the first address at which it is
    /// reached.
    pub name: Arc<str>,
    /// Counts of its connections.
    pub counters: ConnStats,
    /// Connections now, closing ones included.
    pub connections: usize,
}

impl ShardStats {
    pub(crate) fn add(&mut self, service: ServiceStats) {
        self.counters += &service.counters;
        self.connections += service.connections;
        self.services.push(service);
    }
}

/// Connections to upstreams: what happened to them, and how many there are. `opened` counts those
/// that were tried; those that failed are counted as closed for
/// [`ConnectFailed`](crate::CloseReason::ConnectFailed) or
/// [`ConnectTimeout`](crate::CloseReason::ConnectTimeout). [`ConnStats::frames`] counts pieces as
/// they were received.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct UpstreamStats {
    /// Counts of them.
    pub counters: ConnStats,
    /// Connections now, closing ones and those on their way included.
    pub connections: usize,
}

/// Counts of a server since its start, and what it holds.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct ServerStats {
    /// The sum of all shards' counters.
    pub counters: ConnStats,
    /// Connections of all shards.
    pub connections: usize,
    /// Each service's own, summed over the shards, in the order in which the server got them.
    pub services: Vec<ServiceStats>,
    /// Those of all shards to upstreams.
    pub upstreams: UpstreamStats,
    /// Calls that block, on the threads beside the shards.
    pub blocking: BlockingStats,
    /// Each shard's own.
    pub shards: Vec<ShardStats>,
}

impl ServerStats {
    /// The imbalance of connections between the shards: those that came to the shard with most,
    /// divided by the mean of all. 1 is even, and the number of shards means that one of them got
    /// all. `None` for a single shard and before the first connection. With few connections chance
    /// alone makes it large: 16 on four shards come out at about 1.5, a thousand at 1.06.
    pub fn skew(&self) -> Option<f64> {
        let most = self.shards.iter().map(|shard| shard.counters.opened).max()?;
        let all: u64 = self.shards.iter().map(|shard| shard.counters.opened).sum();
        let mean = all as f64 / self.shards.len() as f64;
        (self.shards.len() > 1 && all > 0).then(|| most as f64 / mean)
    }

    /// The service with this name.
    pub fn service(&self, name: &str) -> Option<&ServiceStats> {
        self.services.iter().find(|service| &*service.name == name)
    }

    /// The numbers of the shards whose figures are [stale](ShardStats::stale).
    pub fn stale_shards(&self) -> impl Iterator<Item = usize> {
        self.shards.iter().enumerate().filter(|(_, shard)| shard.stale).map(|(index, _)| index)
    }

    pub(crate) fn add(&mut self, shard: ShardStats) {
        self.counters += &shard.counters;
        self.connections += shard.connections;
        for (n, service) in shard.services.iter().enumerate() {
            match self.services.get_mut(n) {
                Some(sum) => {
                    sum.counters += &service.counters;
                    sum.connections += service.connections;
                }
                None => self.services.push(service.clone()),
            }
        }
        self.upstreams.counters += &shard.upstreams.counters;
        self.upstreams.connections += shard.upstreams.connections;
        self.shards.push(shard);
    }
}

/// The kernel's queue of connections that are established and not accepted yet, of one listener and
/// one shard.
///
/// A peer whose first packet finds the queue full gets no answer, and repeats it after a second,
/// then after two, and so on: that is latency which a server's other figures do not show. Its
/// program waits in `connect` meanwhile. Only where the queue filled in the middle of a handshake
/// the peer believes that it is connected.
///
/// The kernel answers at once, also while a handler blocks the shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AcceptQueueStats {
    /// Which listener, in the order of [`ServerHandle::listeners`](crate::ServerHandle::listeners).
    pub listener: usize,
    /// Which shard accepts from the queue; `None` for an [adopted](crate::listen::adopt) socket,
    /// from whose one queue all do.
    pub shard: Option<usize>,
    /// Connections that wait now.
    pub waiting: u64,
    /// [`SocketOptions::backlog`](crate::net::SocketOptions::backlog), or what `net.core.somaxconn`
    /// left of it. The kernel takes one connection more, and drops the first packets of those that
    /// come then.
    pub capacity: u64,
    /// Packets of new connections dropped since the server began because a queue had no room. It is
    /// no number of peers: those that a peer repeats count again. A value that grows is the sign.
    /// `None` before Linux 4.12.
    ///
    /// Drops count if at a look the queue holds four fifths of its capacity, or if since the look
    /// before the kernel counted that queues of the network namespace overflowed
    /// (`ListenOverflows`, `TCPReqQFullDrop` of `/proc/net/netstat`), and then no more than it
    /// counted.
    pub lost: Option<u64>,
    /// Packets discarded at this listener since it listens, for whatever reason: those of `lost`,
    /// those that a filter of the kernel refuses, and those that a peer repeats though the first
    /// one was answered, as peers do whose network loses packets. No sign of a fault of the server.
    /// `None` before Linux 4.12.
    pub dropped: Option<u64>,
}

/// Figures of the threads for [blocking calls](crate::Shard::spawn_blocking), for all shards
/// together. Look-ups of names for [`connect`](crate::Shard::connect) are among them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct BlockingStats {
    /// Threads now, idle ones included.
    pub threads: usize,
    /// Functions running now.
    pub running: usize,
    /// Functions that wait for a thread now.
    pub queued: usize,
    /// Functions that returned.
    pub done: u64,
    /// Functions that were dropped: the queue was full, the server ended, or no thread could be
    /// started.
    pub refused: u64,
    /// Functions that panicked.
    pub panicked: u64,
}

/// Counts of calls. All but [`in_flight`](CallStats::in_flight) are totals since the start.
///
/// The shards go on while they are read, so the numbers are of slightly different moments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CallStats {
    /// Calls that began.
    pub begun: u64,
    /// Calls that succeeded.
    pub done: u64,
    /// Calls that returned an error.
    pub failed: u64,
    /// Calls that were dropped: their connection ended, a limit was exceeded, or they panicked.
    pub dropped: u64,
    /// Calls that did not finish at once and had to wait.
    pub waited: u64,
    /// Waiting calls that took longer than
    /// [`Calls::slower_than`](crate::middleware::Calls::slower_than).
    pub slow: u64,
    /// Calls whose whole time was taken, see
    /// [`Calls::time_one_in`](crate::middleware::Calls::time_one_in).
    pub timed: u64,
    /// The sum of the timed calls' times.
    pub timed_sum: Duration,
}

impl CallStats {
    /// Calls in progress.
    pub fn in_flight(&self) -> u64 {
        self.begun.saturating_sub(self.done + self.failed + self.dropped)
    }

    /// The mean time of the timed calls, if there are any.
    pub fn mean_time(&self) -> Option<Duration> {
        let timed = u32::try_from(self.timed).ok().filter(|timed| *timed > 0);
        match timed {
            Some(timed) => Some(self.timed_sum / timed),
            None if self.timed == 0 => None,
            None => Some(Duration::from_nanos((self.timed_sum.as_nanos() / u128::from(self.timed)) as u64)),
        }
    }
}

/// The services of a server by name, in the order of their lanes.
#[derive(Clone)]
pub(crate) struct ServiceNames(Arc<[Named]>);

struct Named {
    name: Arc<str>,
    /// The number behind those of its listeners.
    listeners_end: u16,
}

impl ServiceNames {
    /// Each name with the number of listeners that lead to that service.
    pub(crate) fn new(services: impl IntoIterator<Item = (Arc<str>, u16)>) -> ServiceNames {
        let mut end = 0;
        let named = services.into_iter().map(|(name, listeners)| {
            end += listeners;
            Named { name, listeners_end: end }
        });
        ServiceNames(named.collect())
    }

    /// The lanes with their names.
    pub(crate) fn lanes(&self) -> impl Iterator<Item = (LaneId, &Arc<str>)> {
        (0..).map(LaneId::nth).zip(self.0.iter().map(|named| &named.name))
    }

    /// The listeners that lead to the service of this name.
    #[cfg(feature = "testing")]
    pub(crate) fn listeners(&self, name: &str) -> Option<Range<usize>> {
        let service = self.0.iter().position(|named| &*named.name == name)?;
        let begin = service.checked_sub(1).map_or(0, |before| self.0[before].listeners_end);
        Some(begin.into()..self.0[service].listeners_end.into())
    }

    /// All names, as text.
    pub(crate) fn list(&self) -> String {
        self.0.iter().map(|named| &*named.name).collect::<Vec<_>>().join(", ")
    }

    /// True for connections that the server makes: no service is theirs.
    pub(crate) fn is_upstream(&self, lane: LaneId) -> bool {
        lane.index() >= self.0.len()
    }

    /// The name of a lane's service; `None` for connections that the server makes.
    pub(crate) fn name(&self, lane: LaneId) -> Option<&Arc<str>> {
        self.0.get(lane.index()).map(|named| &named.name)
    }

    /// The service of a lane, if there are several.
    pub(crate) fn of(&self, lane: LaneId) -> Option<&str> {
        let named = self.0.get(lane.index()).filter(|_| self.0.len() > 1)?;
        Some(&named.name)
    }

    /// The service to which a listener leads, if there are several.
    pub(crate) fn at(&self, listener: u16) -> Option<&str> {
        let service = self.0.iter().position(|named| listener < named.listeners_end)?;
        self.of(LaneId::nth(service as u8))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn skew_is_the_busiest_shard_over_the_mean() {
        let skew = |opened: &[u64]| {
            let mut report = ServerStats::default();
            for count in opened {
                let mut shard = ShardStats::default();
                shard.counters.opened = *count;
                report.add(shard);
            }
            report.skew()
        };
        assert_eq!((skew(&[10, 10]), skew(&[30, 10]), skew(&[0, 12, 0])), (Some(1.0), Some(1.5), Some(3.0)));
        assert_eq!((skew(&[]), skew(&[7]), skew(&[0, 0])), (None, None, None));
    }
}
