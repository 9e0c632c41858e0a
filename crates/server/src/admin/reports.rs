//! Reports: everything that is seen of a server, as one value.

use std::collections::BTreeMap;
use std::process;
use std::time::Duration;

use ringserve_base::doctor::Certainty;
use ringserve_base::machine::files::MachineFiles;
use ringserve_report::{
    AcceptQueue, BackendReport, Close, Connection, Finding, Overload, Phase, Quantiles, Rates, Report,
    ServerFacts, ServiceReport, Severity, ShardReport, Stage, State, Times, UpstreamReport,
};

use super::admission::{NETWORKS_REPORTED, admission};
use super::history::Sample;
use super::sources::{Reading, connection, stall};
use super::target::Running;
use crate::funnel::funnel;
use crate::histogram::HistogramSum;
use crate::inspect::Inspection;
use crate::snapshot::Snapshot;
use crate::stats::{BackendFigures, ConnStats, UpstreamFigures};

/// A shard that is in one turn for longer is shown as stalled.
const STALLED: Duration = Duration::from_millis(25);

/// The connections that shards were asked for, and when.
#[derive(Clone, Debug, Default)]
pub(super) struct Lists {
    pub(super) outboxes: Inspection,
    pub(super) waiting: Inspection,
}

/// Of a server whose factories are pending.
pub(super) fn starting() -> Report {
    Report {
        server: ServerFacts { phase: Phase::Starting, ..process_facts(&MachineFiles::here()) },
        ..Report::default()
    }
}

/// `reading` is of now; what is recent is what happened since `before`, and rates are since
/// `second_ago`.
pub(super) fn report(
    running: &Running,
    reading: Reading,
    (before, second_ago): (&Sample, &Sample),
    lists: &Lists,
    mut findings: Vec<Finding>,
) -> Report {
    let Reading { stats, queues, stalls, sample: mut now } = reading;
    now.figures.outboxes = running.outboxes(&stats, &lists.outboxes);
    now.figures.waiting = running.waiting(&stats, &lists.waiting);
    now.figures.share_throttling(&second_ago.figures);
    let control = &running.control;
    let phase = if control.is_draining() { Phase::Draining } else { Phase::Serving };
    let server = ServerFacts {
        driver: running.facts.driver.to_owned(),
        uptime_seconds: Duration::from_nanos(now.at.as_nanos()).as_secs_f64(),
        phase,
        connections: stats.connections as u64,
        connections_max: running.facts.connections_max as u64,
        upstreams: stats.upstreams.connections as u64,
        window_seconds: (now.at - before.at).as_secs_f64(),
        ..process_facts(&running.machine)
    };
    let mut silent_shards = [&lists.outboxes.silent_shards[..], &lists.waiting.silent_shards].concat();
    silent_shards.sort_unstable();
    silent_shards.dedup();
    silent_shards.retain(|shard| running.runs(*shard));
    let connections = |of: &Inspection| of.connections.iter().map(connection).collect::<Vec<Connection>>();
    let accept_queues = queues.iter().map(|queue| AcceptQueue {
        listener: control.listeners()[queue.listener].to_string(),
        shard: queue.shard,
        waiting: queue.waiting,
        capacity: queue.capacity,
        lost: queue.lost,
    });
    let over = (now.at - second_ago.at).as_secs_f64();
    let per_second = |grew: u64| if over > 0.0 { grew as f64 / over } else { 0.0 };
    let services = stats.services.iter().enumerate().map(|(number, service)| {
        let frames = service.counters.frames;
        let earlier = second_ago.frames.get(number).copied().unwrap_or(frames);
        ServiceReport {
            name: service.name.to_string(),
            connections: service.connections as u64,
            frames,
            frames_per_second: per_second(frames.saturating_sub(earlier)),
        }
    });
    let stages = funnel(&now.figures, &before.figures);
    findings.splice(0..0, present(&stages));
    Report {
        server,
        funnel: stages,
        overload: Some(overload(running, stats.counters.frames_shed)),
        admission: Some(admission(running, NETWORKS_REPORTED)),
        rates: rates(&now, second_ago, per_second),
        shards: shards(running, &now, &stats.shards),
        services: services.collect(),
        upstreams: control.upstreams().into_iter().map(upstream).collect(),
        accept_queues: accept_queues.collect(),
        closes: closes(&now.counters, &before.counters),
        times: times(running),
        outboxes: connections(&lists.outboxes),
        waiting_calls: connections(&lists.waiting),
        silent_shards,
        stalls: stalls.iter().map(stall).collect(),
        findings,
    }
}

fn upstream(of: UpstreamFigures) -> UpstreamReport {
    let backend = |backend: BackendFigures| BackendReport {
        name: backend.name,
        condition: backend.condition.to_owned(),
        weight: backend.weight,
        in_flight: backend.in_flight,
        connections: backend.connections,
        idle: backend.idle,
        requests: backend.requests,
        failures: backend.failures,
        mean_seconds: backend.answer_seconds / backend.answers.max(1) as f64,
        connects_failed: backend.connects_failed,
        lost: backend.lost,
    };
    UpstreamReport {
        name: of.name,
        backends: of.backends.into_iter().map(backend).collect(),
        left_out: of.left_out as u64,
        retries: of.retries,
        refused: of.refused,
        panics: of.panics,
        lookups_failed: of.lookups_failed,
    }
}

/// The doctor's finding about the stage that is the cause now: it is what an operator came for.
fn present(stages: &[Stage]) -> Option<Finding> {
    let of = |state| stages.iter().find(|stage| stage.state == state);
    let (stage, severity) = match (of(State::Lost), of(State::Warn)) {
        (Some(stage), _) => (stage, Severity::Error),
        (None, Some(stage)) => (stage, Severity::Warn),
        (None, None) => return None,
    };
    let (value, fix) = stage.why.split_once(": ").unwrap_or((&stage.why, ""));
    Some(Finding {
        check: "now".to_owned(),
        severity,
        what: format!("the stage {}", stage.name),
        value: value.to_owned(),
        fix: fix.to_owned(),
        certainty: Certainty::Seen.as_str().to_owned(),
        ..Finding::default()
    })
}

fn process_facts(machine: &MachineFiles) -> ServerFacts {
    let program = std::env::current_exe().ok();
    let name =
        program.as_ref().and_then(|path| path.file_name()).map(|name| name.to_string_lossy().into_owned());
    ServerFacts {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        pid: process::id(),
        program: name.unwrap_or_default(),
        memory_bytes: machine.kib_field("/proc/self/status", "VmRSS"),
        ..ServerFacts::default()
    }
}

fn rates(now: &Sample, then: &Sample, per_second: impl Fn(u64) -> f64) -> Rates {
    let of = |of: fn(&ConnStats) -> u64| per_second(of(&now.counters).saturating_sub(of(&then.counters)));
    Rates {
        accepts_per_second: of(|counters| counters.accepted),
        closes_per_second: of(|counters| counters.closed),
        frames_per_second: of(|counters| counters.frames),
        received_bytes_per_second: of(|counters| counters.bytes_received),
        sent_bytes_per_second: of(|counters| counters.bytes_sent),
        turns_per_second: per_second(now.turns.saturating_sub(then.turns)),
        system_calls_per_second: per_second(now.system_calls.saturating_sub(then.system_calls)),
    }
}

fn shards(running: &Running, now: &Sample, stats: &[crate::stats::ShardStats]) -> Vec<ShardReport> {
    let waiting = |shard: usize| {
        let its = now.figures.queues.iter().filter(|queue| queue.shard == Some(shard));
        its.map(|queue| queue.waiting).sum()
    };
    let each = stats.iter().zip(&now.figures.shards).enumerate().map(|(shard, (stats, figures))| {
        let stalled = running.in_turn_for(shard).filter(|time| *time > STALLED);
        // What was published as it began says nothing of a shard that is blocked since.
        let has_gone_on = stats.driver.turns > 0 || stalled.is_none();
        let is_known = has_gone_on && running.control.remotes()[shard].has_published();
        let known = |figure: u64| is_known.then_some(figure);
        ShardReport {
            shard,
            busy: figures.busy,
            starved: figures.starved,
            asleep: (1.0 - figures.busy - figures.starved).max(0.0),
            stalled_seconds: stalled.map(|time| time.as_secs_f64()),
            stale: stats.stale,
            connections: known(stats.connections as u64),
            turns: known(stats.driver.turns),
            frames: known(stats.counters.frames),
            buffers_used: known(stats.buffers.leased as u64),
            buffers: known(stats.buffers.total as u64),
            accept_queue: waiting(shard),
            accepted_waiting: accepted_waiting(stats),
        }
    });
    each.collect()
}

fn accepted_waiting(stats: &crate::stats::ShardStats) -> BTreeMap<String, u64> {
    let each = stats.accepted_waiting_by.named().into_iter().filter(|(_, count)| *count > 0);
    each.map(|(why, count)| (why.to_owned(), count as u64)).collect()
}

/// The reasons that occurred, those of most connections first.
fn closes(now: &ConnStats, before: &ConnStats) -> Vec<Close> {
    let each = now.each_reason().filter(|(_, total)| *total > 0).map(|(reason, total)| Close {
        reason: reason.name().to_owned(),
        closed_by: format!("{:?}", reason.closed_by()).to_lowercase(),
        total,
        recently: total.saturating_sub(before.closed_for(reason)),
    });
    let mut closes: Vec<Close> = each.collect();
    closes.sort_by_key(|close| std::cmp::Reverse(close.total));
    closes
}

fn times(running: &Running) -> Times {
    let of = |of: fn(&Snapshot, &mut HistogramSum)| {
        let mut sum = HistogramSum::new();
        let snapshots = running.control.remotes().iter().filter_map(|remote| remote.snapshot());
        snapshots.for_each(|snapshot| of(snapshot, &mut sum));
        let quantile = |share| sum.quantile(share).as_secs_f64();
        Quantiles {
            count: sum.count(),
            p50: quantile(0.5),
            p90: quantile(0.9),
            p99: quantile(0.99),
            p999: quantile(0.999),
            max: quantile(1.0),
        }
    };
    Times {
        turn: of(|snapshot, sum| snapshot.durations.turns.add_to(sum)),
        call: of(|snapshot, sum| snapshot.durations.calls.iter().for_each(|of| of.waited.add_to(sum))),
        first_frame: of(|snapshot, sum| snapshot.durations.first_frames.add_to(sum)),
        send_stall: of(|snapshot, sum| snapshot.durations.send_stalls.add_to(sum)),
    }
}

/// The worst of the shards.
fn overload(running: &Running, shed_total: u64) -> Overload {
    let worst = running.control.shard_loads().into_iter().max_by_key(|of| of.load);
    let Some(worst) = worst else { return Overload::default() };
    let cause = worst.cause.map_or_else(String::new, |cause| format!("shard {}: {cause}", worst.shard));
    Overload { stage: worst.load as u8, name: worst.load.to_string(), cause, shed_total }
}

#[cfg(test)]
mod tests {
    use ringserve_report::StageName;

    use super::*;

    #[test]
    fn doctor_says_what_is_the_cause_now() {
        let stage = |name, state, why: &str| Stage { name, state, why: why.to_owned(), ..Stage::default() };
        let warns = stage(StageName::Table, State::Warn, "90 of 100 connections: further ones will wait");
        let lost = stage(StageName::Handler, State::Lost, "shard 0 is blocked, and computes: await");
        let said = |stages: &[Stage]| {
            present(stages).map(|found| (found.severity, found.what, found.value, found.fix))
        };
        let of = |severity, [what, value, fix]: [&str; 3]| {
            Some((severity, what.to_owned(), value.to_owned(), fix.to_owned()))
        };
        let blocked = ["the stage handler", "shard 0 is blocked, and computes", "await"];
        assert_eq!(said(&[warns.clone(), lost]), of(Severity::Error, blocked));
        let nearly = ["the stage table", "90 of 100 connections", "further ones will wait"];
        assert_eq!(said(&[warns]), of(Severity::Warn, nearly));
        assert_eq!(said(&[Stage::default()]), None);
    }
}
