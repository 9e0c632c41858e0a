//! Lines that a server and its shards write to the log.

use std::net::SocketAddr;
use std::sync::Arc;

use ringserve_base::guard::{Panicked, guard};
use ringserve_base::lines::{LeftOut, LineLimit};
use ringserve_base::peer::Peer;
use ringserve_core::internals::CLOSE_REASONS;
use ringserve_core::{CloseReason, ClosedBy, ConnId, LaneId, Observer, Outlet, Time};
use ringserve_drivers::guarded;
use tracing::{debug, error, info, warn};

use crate::access_log;
use crate::snapshot::Snapshot;
use crate::stats::{ServerStats, ServiceNames, StalledWork};
use crate::telling::{LaneSet, Observers};
use crate::traces::Traces;

/// Writes the life of connections to the log: each at debug level, limits that bite at warning
/// level. And counts how long they take to send their first frame. And guards what the shard calls
/// of transports.
pub(crate) struct LogObserver {
    shard: usize,
    /// Hears of a transport that panicked.
    panicked: Box<dyn Fn(&Panicked)>,
    names: ServiceNames,
    snapshot: Arc<Snapshot>,
    limits: [LineLimit; CLOSE_REASONS.len()],
    accept: LineLimit,
    held: LineLimit,
    /// Services whose connections are in the access log.
    logged: LaneSet,
    /// Spans, if connections are chosen to have them.
    traces: Option<Box<Traces>>,
    /// Frames are looked at: they are counted, or traced.
    looks_at_frames: bool,
}

impl LogObserver {
    pub(crate) fn new(
        shard: usize,
        names: ServiceNames,
        snapshot: Arc<Snapshot>,
        told: &Observers,
        panicked: Box<dyn Fn(&Panicked)>,
    ) -> LogObserver {
        let traces = Traces::new(shard, &told.chosen);
        LogObserver {
            shard,
            logged: told.logged,
            looks_at_frames: traces.is_some(),
            traces,
            panicked,
            names,
            snapshot,
            limits: std::array::from_fn(|_| LineLimit::default()),
            accept: LineLimit::default(),
            held: LineLimit::default(),
        }
    }

    /// Connections have accounts, in which their frames count.
    pub(crate) fn count_frames(&mut self) {
        self.looks_at_frames = true;
    }

    #[cold]
    fn look_at_frame(&self, outlet: &Outlet, bytes: usize) {
        outlet.count_frame();
        if let Some(traces) = &self.traces {
            traces.frame(outlet.id(), bytes);
        }
    }

    #[cold]
    fn look_at_send(&self, id: ConnId, bytes: usize) {
        if let Some(traces) = &self.traces {
            traces.sending(id, bytes);
        }
    }
}

impl Observer for LogObserver {
    #[inline]
    fn guard<T>(&self, id: ConnId, call: impl FnOnce() -> T) -> Option<T> {
        self.snapshot.work.on_connection_alone(StalledWork::Transport, id);
        guard(call).inspect_err(|panicked| (self.panicked)(panicked)).ok()
    }

    fn opened(&mut self, _now: Time, lane: LaneId, id: ConnId, peer: Option<SocketAddr>) {
        let what = match self.names.is_upstream(lane) {
            true => "connected to an upstream",
            false => "connection opened",
        };
        let service = self.names.of(lane);
        guarded(|| debug!(shard = self.shard, service, %id, peer = peer.map(display), "{what}"));
        if let (Some(traces), Some(service)) = (&mut self.traces, self.names.name(lane)) {
            traces.opened(service, id, peer);
        }
    }

    fn proxied(
        &mut self,
        _now: Time,
        lane: LaneId,
        id: ConnId,
        peer: Option<SocketAddr>,
        via: Option<SocketAddr>,
    ) {
        let (shard, service) = (self.shard, self.names.of(lane));
        guarded(
            || debug!(shard, service, %id, peer = peer.map(display), via = via.map(display), "PROXY header read"),
        );
        if let (Some(traces), Some(service)) = (&mut self.traces, self.names.name(lane)) {
            traces.proxied(service, id, peer);
        }
    }

    #[cfg(feature = "metrics")]
    fn first_frame(&mut self, lane: LaneId, after: std::time::Duration) {
        if !self.names.is_upstream(lane) {
            self.snapshot.durations.first_frames.add(after.as_nanos() as u64, 1);
        }
    }

    #[inline]
    fn frame(&mut self, _now: Time, outlet: &Outlet, bytes: usize) {
        self.snapshot.work.on_frame(bytes);
        if self.looks_at_frames {
            self.look_at_frame(outlet, bytes);
        }
    }

    #[inline]
    fn sending(&mut self, _now: Time, id: ConnId, bytes: usize) {
        if self.traces.is_some() {
            self.look_at_send(id, bytes);
        }
    }

    #[cfg(feature = "metrics")]
    fn send_stalled(&mut self, lane: LaneId, time: std::time::Duration) {
        if !self.names.is_upstream(lane) {
            self.snapshot.durations.send_stalls.add(time.as_nanos() as u64, 1);
        }
    }

    fn paused(&mut self, _now: Time, id: ConnId, paused: bool) {
        if let Some(traces) = &self.traces {
            traces.paused(id, paused);
        }
    }

    fn over_held_bytes_max(&mut self, now: Time, lane: LaneId, id: ConnId, bytes: usize, held: usize) {
        if self.held.allows(now) {
            guarded(|| {
                warn!(
                    shard = self.shard,
                    service = self.names.of(lane),
                    %id,
                    bytes,
                    held,
                    upstream = self.names.is_upstream(lane),
                    "held_bytes_max is reached; the connection that holds most is closed"
                );
            });
        }
    }

    fn ended(&mut self, now: Time, lane: LaneId, outlet: &Outlet, reason: CloseReason) {
        let id = outlet.id();
        if let Some(traces) = &mut self.traces {
            traces.ended(id, reason);
        }
        if self.logged.has(lane)
            && let Some(service) = self.names.name(lane)
        {
            access_log::write(self.shard, service, outlet, now, reason);
        }
        let (shard, service, upstream) = (self.shard, self.names.of(lane), self.names.is_upstream(lane));
        // What the peer does is its affair, and handler errors have their own line.
        let notable = match reason.closed_by() {
            // But for a trusted proxy that does not say for whom it comes.
            ClosedBy::Peer => matches!(reason, CloseReason::ProxyBadHeader(_)),
            // The task that asked for it is informed.
            ClosedBy::Upstream => false,
            ClosedBy::Service => reason == CloseReason::OutboxFull,
            ClosedBy::Server => {
                use CloseReason::{DrainTimeout, MemoryLimit, ProxyTimeout};
                matches!(reason, MemoryLimit | DrainTimeout | ProxyTimeout)
            }
            // The system.
            _ => true,
        };
        match notable.then(|| self.limits[reason.index()].sample(now)).flatten() {
            Some(left_out) => {
                guarded(|| warn!(shard, service, %id, %reason, upstream, left_out, "connection ended"));
            }
            None => guarded(|| debug!(shard, service, %id, %reason, upstream, "connection ended")),
        }
    }

    fn accept_paused(&mut self, now: Time, listener: Option<u16>, paused: bool) {
        if !self.accept.allows(now) {
            return;
        }
        let (shard, service) = (self.shard, listener.and_then(|listener| self.names.at(listener)));
        guarded(|| match (paused, listener) {
            (true, None) => warn!(
                shard,
                "accepting paused at a limit: connections_max is reached, or the system has no descriptor left; new connections wait \
                 in the backlog"
            ),
            (true, Some(listener)) => warn!(
                shard,
                service,
                listener,
                "accepting paused at one listener: as many of its connections are in a handshake, or before their PROXY header, as \
                 handshakes_max allows, or its accept failed; its new connections wait in the backlog"
            ),
            (false, listener) => info!(shard, service, listener, "accepting again"),
        });
    }
}

/// A connection came to a listener of proxies from elsewhere.
#[cold]
pub(crate) fn untrusted(shard: usize, service: Option<&str>, peer: &Peer, left_out: LeftOut) {
    guarded(|| {
        // Any stranger can cause it.
        info!(
            shard,
            service,
            %peer,
            left_out,
            "connection reset: its source is in no network whose PROXY headers are trusted (ProxyProtocol)"
        );
    });
}

/// User code panicked in `place`, for a connection if it is one's.
#[cold]
pub(crate) fn panicked(
    shard: usize,
    service: Option<&str>,
    place: &str,
    connection: Option<(ConnId, Peer)>,
    panic: &Panicked,
) {
    panicked_in(shard, service, place, None, connection, panic);
}

/// The owner of bytes that were sent panicked when it was dropped.
#[cold]
pub(crate) fn owner_panicked(panic: &Panicked) {
    guarded(|| error!(%panic, "the owner of sent bytes panicked when they were dropped"));
}

/// A task panicked, which may have a name and be a connection's.
#[cold]
pub(crate) fn task_panicked(
    shard: usize,
    name: Option<&str>,
    connection: Option<(ConnId, Peer)>,
    panic: &Panicked,
) {
    panicked_in(shard, None, "task", name, connection, panic);
}

fn panicked_in(
    shard: usize,
    service: Option<&str>,
    place: &str,
    task: Option<&str>,
    connection: Option<(ConnId, Peer)>,
    panic: &Panicked,
) {
    let what = match (place, connection) {
        ("waker", _) => "a waker panicked; its task may not have been woken",
        (_, Some(_)) => "user code panicked; its connection is closed",
        ("task", None) => "a task on a shard panicked and is dropped",
        _ => "user code panicked",
    };
    let (id, peer) = connection.unzip();
    let (id, peer) = (id.map(tracing::field::display), peer.map(tracing::field::display));
    guarded(|| error!(shard, service, place, task, id, peer, %panic, "{what}"));
}

/// The counts of a server, in its last line.
pub(crate) fn stopped(report: &ServerStats) {
    let counters = &report.counters;
    let skew = report.skew().map(|skew| format!(", the busiest shard had {skew:.2} times the mean"));
    let handshakes = (counters.handshakes_started > 0).then(|| {
        format!("{} of {} handshakes done, ", counters.handshakes_done, counters.handshakes_started)
    });
    let ends: Vec<String> = counters.reasons().map(|(reason, count)| format!("{reason} {count}")).collect();
    info!(
        "stopped after {} connections ({}), {}{} frames, {} bytes received, {} bytes sent{}",
        counters.opened,
        if ends.is_empty() { "none ended".to_owned() } else { ends.join(", ") },
        handshakes.unwrap_or_default(),
        counters.frames,
        counters.bytes_received,
        counters.bytes_sent,
        skew.unwrap_or_default()
    );
}
