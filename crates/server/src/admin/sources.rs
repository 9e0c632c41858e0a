//! Figures of the server that is looked at, as the funnel and reports have them. No shard is asked
//! for them.

use std::time::Duration;

use ringserve_base::doctor::{Severity, Workload};
use ringserve_base::machine::read_of;
use ringserve_core::{CloseReason, Limits, Time};
use ringserve_report as report;

use super::history::Sample;
use super::routes::name_of;
use super::target::Running;
use crate::funnel::{
    ClosedFigures, FunnelFigures, MachineFigures, OutboxFigures, QueueFigures, ShardFigures, StallFigures,
    WaitingFigures,
};
use crate::inspect::{ConnInfo, ConnState, Inspection};
use crate::stats::{AcceptQueueStats, ServerStats, Stall};
use crate::watch::state::State;

/// A stall that ended longer ago no longer counts.
const RECENT: Duration = Duration::from_secs(10);

/// Everything that is read of a server at once.
pub(super) struct Reading {
    pub(super) stats: ServerStats,
    pub(super) queues: Vec<AcceptQueueStats>,
    pub(super) stalls: Vec<Stall>,
    pub(super) sample: Sample,
}

impl Running {
    /// Reads everything, now.
    pub(super) fn read(&self) -> Reading {
        let at = self.control.now();
        let (stats, queues) = (self.control.stats(), self.control.accept_queues());
        let stalls = self.control.stalls();
        let figures = FunnelFigures {
            queues: queues.iter().map(|queue| self.queue(queue)).collect(),
            shards: self.shards(&stalls),
            machine: MachineFigures::of(&read_of(&self.machine)).since(&self.before),
            ..self.totals(at, &stats)
        };
        Reading { sample: Sample::new(at, figures, &stats), stats, queues, stalls }
    }

    /// True until a shard ended.
    pub(super) fn runs(&self, shard: usize) -> bool {
        self.control.remotes()[shard].thread().is_some()
    }

    fn totals(&self, at: Time, stats: &ServerStats) -> FunnelFigures {
        let facts = &self.facts;
        let closed = |reasons: &[CloseReason]| {
            reasons.iter().map(|reason| stats.counters.closed_for(*reason)).sum::<u64>()
        };
        use CloseReason::*;
        let buffers = stats.shards.iter().map(|shard| shard.buffers.leased as u64);
        let parked = stats.shards.iter().map(|shard| shard.driver.receives_parked);
        FunnelFigures {
            at: Duration::from_nanos(at.as_nanos()),
            connections: stats.connections as u64,
            connections_max: facts.connections_max as u64,
            connections_wanted: facts.connections_wanted as u64,
            newcomers: stats.shards.iter().map(|shard| shard.accepted_waiting as u64).sum(),
            waited: stats.counters.waited,
            accept_paused: stats.counters.accept_paused,
            opened: stats.counters.opened,
            closed: ClosedFigures {
                first_frame: closed(&[FirstFrameTimeout, HandshakeTimeout, ProxyTimeout]),
                handler_timeout: closed(&[HandlerTimeout, OpenTimeout]),
                panicked: closed(&[HandlerPanicked]),
                outbox_full: closed(&[OutboxFull]),
                memory: closed(&[MemoryLimit]),
                peer: closed(&[WriteStallTimeout, WriteTooSlow]),
            },
            buffers: buffers.sum(),
            buffers_max: (facts.buffers_max * stats.shards.len()) as u64,
            receives_parked: parked.sum(),
            buffers_full: stats.shards.iter().any(|shard| shard.buffers.total >= facts.buffers_max),
            ..FunnelFigures::default()
        }
    }

    fn queue(&self, queue: &AcceptQueueStats) -> QueueFigures {
        QueueFigures {
            listener: self.control.listeners()[queue.listener].to_string(),
            shard: queue.shard,
            waiting: queue.waiting,
            capacity: queue.capacity,
            lost: queue.lost.unwrap_or(0),
        }
    }

    fn shards(&self, stalls: &[Stall]) -> Vec<ShardFigures> {
        let times = self.control.shard_times();
        let last = |shard: usize| {
            let its = stalls.iter().filter(|stall| stall.shard == shard);
            // One that lasts, else the longest of those that ended a moment ago.
            its.filter(|stall| stall.ongoing || stall.ago.saturating_sub(stall.lasted) < RECENT)
                .max_by_key(|stall| (stall.ongoing, stall.lasted))
        };
        let each = times.iter().map(|times| ShardFigures {
            busy: times.busy,
            starved: times.starved,
            throttled: 0.0,
            stall: last(times.shard).map(|stall| StallFigures {
                ongoing: stall.ongoing,
                lasted: stall.lasted,
                cause: stall.cause,
                work: match &stall.peer {
                    Some(peer) => format!("{} for {peer}", stall.work),
                    None => stall.work.to_string(),
                },
                waits_in: stall.waits_in.clone(),
            }),
        });
        each.collect()
    }

    /// The time that a shard has been in its turn, if it is in one.
    pub(super) fn in_turn_for(&self, shard: usize) -> Option<Duration> {
        match self.control.remotes().get(shard)?.state() {
            State::Turn(began) => Some(self.control.now() - began),
            State::Waits(_) | State::Called(_) => None,
        }
    }

    /// The limits of a service.
    fn limits(&self, stats: &ServerStats, service: &str) -> Option<&Limits> {
        let number = stats.services.iter().position(|known| &*known.name == service)?;
        self.facts.limits.get(number)
    }

    /// The figures of outboxes, the largest by name.
    pub(super) fn outboxes(&self, stats: &ServerStats, of: &Inspection) -> OutboxFigures {
        let is_held_back = |conn: &&ConnInfo| conn.state == ConnState::HeldBack;
        // One that is held back is worth more words than a larger one that moves.
        let shown = of.connections.iter().find(is_held_back).or(of.connections.first());
        let limits = shown.and_then(|conn| self.limits(stats, &conn.service));
        OutboxFigures {
            bytes: of.sums.outbox_bytes,
            held_back: of.sums.held_back,
            largest: shown.map_or(0, |conn| conn.outbox_bytes as u64),
            largest_max: limits.map_or(0, |limits| limits.outbox_bytes_max as u64),
            peer: shown.map_or_else(String::new, peer_of),
            idle: shown.map_or(Duration::ZERO, |conn| conn.idle),
            stall_timeout: limits.and_then(|limits| limits.write_stall_timeout),
        }
    }

    /// The figures of calls that wait, the one that waits longest by name.
    pub(super) fn waiting(&self, stats: &ServerStats, of: &Inspection) -> WaitingFigures {
        let Some(oldest) = of.connections.first() else { return WaitingFigures::default() };
        let limits = self.limits(stats, &oldest.service);
        WaitingFigures {
            calls: of.sums.calls,
            oldest: oldest.oldest_call.unwrap_or_default(),
            peer: peer_of(oldest),
            paused: oldest.state == ConnState::Paused,
            in_flight_max: limits.map_or(0, |limits| limits.calls_in_flight_max.into()),
            timeout: limits.and_then(|limits| limits.handler_timeout),
        }
    }
}

/// A peer as a sentence names it.
fn peer_of(conn: &ConnInfo) -> String {
    match conn.peer {
        Some(addr) => addr.to_string(),
        None => format!("connection {}", name_of(conn.shard, conn.id)),
    }
}

/// A connection as reports have it.
pub(super) fn connection(conn: &ConnInfo) -> report::Connection {
    report::Connection {
        id: name_of(conn.shard, conn.id),
        shard: conn.shard,
        service: conn.service.to_string(),
        peer: conn.peer.map_or_else(|| "unix".to_owned(), |addr| addr.to_string()),
        age_seconds: conn.age.as_secs_f64(),
        idle_seconds: conn.idle.as_secs_f64(),
        outbox_bytes: conn.outbox_bytes as u64,
        bytes_in: conn.bytes_in,
        bytes_out: conn.bytes_out,
        frames_in: conn.frames_in,
        frames_out: conn.frames_out,
        state: conn.state.as_str().to_owned(),
        calls: conn.calls as u64,
        oldest_call_seconds: conn.oldest_call.map(|time| time.as_secs_f64()),
    }
}

/// A stall as reports have it.
pub(super) fn stall(stall: &Stall) -> report::Stall {
    report::Stall {
        shard: stall.shard,
        ago_seconds: stall.ago.as_secs_f64(),
        lasted_seconds: stall.lasted.as_secs_f64(),
        ongoing: stall.ongoing,
        work: stall.work.as_str().to_owned(),
        several: stall.several,
        peer: stall.peer.as_ref().map(ToString::to_string),
        connection: stall.connection.map(|id| name_of(stall.shard, id)),
        frame_bytes: stall.frame_bytes.map(|bytes| bytes as u64),
        cause: stall.cause.as_str().to_owned(),
        text: stall.to_string(),
        waits_in: stall.waits_in.clone(),
        queue_waiting: stall.queue_waiting.map(u64::from),
        queue_lost: stall.queue_lost,
    }
}

/// The findings of the doctor, by files that are read: some milliseconds.
pub(super) fn findings(running: &Running, expected: &Workload) -> Vec<report::Finding> {
    let each = running.control.doctor_for(expected).into_iter().map(|found| report::Finding {
        check: found.check.to_owned(),
        severity: match found.severity {
            Severity::Info => report::Severity::Info,
            Severity::NotChecked => report::Severity::NotChecked,
            Severity::Warn => report::Severity::Warn,
            Severity::Error => report::Severity::Error,
            _ => report::Severity::Unknown,
        },
        what: found.what,
        value: found.value,
        needed: found.needed,
        otherwise: found.otherwise,
        fix: found.fix,
        certainty: found.certainty.as_str().to_owned(),
    });
    each.collect()
}
