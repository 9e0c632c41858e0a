//! What waits to be accepted, and what was lost there, for each listener and shard.

use std::fmt;
use std::sync::Arc;

use ringserve_drivers::{Listener, ListenerGauge, QueueReading};

/// The kernel's queue of connections that are established and not accepted yet, of one listener and one shard.
///
/// A peer whose first packet finds the queue full hears nothing, and repeats it after a second, then after two, and so on:
/// that is latency which a server's other figures do not show. Its program waits in `connect` meanwhile. Only where the queue
/// filled in the middle of a handshake the peer believes that it is connected.
///
/// The kernel answers at once, also while a handler blocks the shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AcceptQueueStats {
    /// Which listener, in the order of [`ServerHandle::listeners`](crate::ServerHandle::listeners).
    pub listener: usize,
    /// Which shard accepts from the queue; `None` for an [adopted](crate::listen::adopt) socket, from whose one queue all do.
    pub shard: Option<usize>,
    /// Connections that wait now.
    pub waiting: u64,
    /// [`SocketOptions::backlog`](crate::net::SocketOptions::backlog), or what `net.core.somaxconn` left of it. The kernel
    /// takes one connection more, and drops the first packets of those that come then.
    pub capacity: u64,
    /// Packets dropped at this listener since it listens. It is no number of peers: those that a peer repeats count again, and so
    /// do those that a filter of the kernel dropped. A value that grows is the sign. `None` before Linux 4.12.
    pub lost: Option<u64>,
}

/// The gauges of all TCP listeners of a server.
#[derive(Clone, Default)]
pub(crate) struct AcceptQueues(Arc<[Gauge]>);

struct Gauge {
    listener: usize,
    shard: Option<usize>,
    gauge: ListenerGauge,
}

impl AcceptQueues {
    /// Those of the listeners of all shards, each shard's in the same order.
    pub(crate) fn of(sockets: &[Vec<Listener>]) -> AcceptQueues {
        let mut gauges = Vec::new();
        let count = sockets.first().map_or(0, Vec::len);
        for listener in 0..count {
            let mut of_shards = sockets.iter().map(|of_shard| &of_shard[listener]).enumerate().peekable();
            let adopted = of_shards.next_if(|(_, first)| first.is_adopted());
            if let Some((_, first)) = adopted {
                let one = ListenerGauge::of([first].into_iter().chain(of_shards.map(|(_, other)| other)));
                gauges.extend(one.map(|gauge| Gauge { listener, shard: None, gauge }));
                continue;
            }
            let each = of_shards.filter_map(|(shard, socket)| {
                let gauge = ListenerGauge::of([socket])?;
                Some(Gauge { listener, shard: Some(shard), gauge })
            });
            gauges.extend(each);
        }
        AcceptQueues(gauges.into())
    }

    /// Each queue as it is now.
    pub(crate) fn read(&self) -> impl Iterator<Item = AcceptQueueStats> {
        self.0.iter().filter_map(Gauge::read)
    }

    /// Those of one shard; the first one has those from which all accept.
    pub(crate) fn read_those_of(&self, shard: usize) -> impl Iterator<Item = AcceptQueueStats> {
        self.0.iter().filter(move |gauge| gauge.shard.unwrap_or(0) == shard).filter_map(Gauge::read)
    }
}

impl Gauge {
    fn read(&self) -> Option<AcceptQueueStats> {
        let QueueReading { waiting, capacity, lost } = self.gauge.read()?;
        let (waiting, capacity) = (waiting.into(), capacity.into());
        Some(AcceptQueueStats { listener: self.listener, shard: self.shard, waiting, capacity, lost })
    }
}

impl fmt::Debug for AcceptQueues {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.read()).finish()
    }
}
