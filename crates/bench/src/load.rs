//! `load`: servers under load from other CPUs, and the cost of a request.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::child::Child;
use crate::generator::{self, Outcome, Pace};
use crate::servers::Server;
use crate::steps::{Shape, check_echo};
use crate::table::{Table, median, spread};
use crate::usage::{Usage, count_calls};

/// Above this share of a CPU a thread of the generator has no time left.
const BUSY_MAX: f64 = 0.95;

/// In an open loop, messages sent later than this were delayed by the generator.
const LATE_MAX: Duration = Duration::from_millis(1);

/// Time for which system calls are counted, or the length of the measurement if that is shorter;
/// after it, since counting costs the server time.
const COUNT_CALLS_MAX: Duration = Duration::from_millis(500);

/// The longest wait of a measurement for its first reply.
const SILENCE_MAX: Duration = Duration::from_secs(10);

/// The most bytes of a message of the check before the measurement.
const CHECK_BYTES_MAX: usize = 16 << 10;

/// A server to measure.
#[derive(Clone)]
pub(crate) enum Target {
    /// A server of the table, started for it.
    Known(&'static Server),
    /// A program that reports its address, and gets an argument for raw bytes or lines.
    Program { name: String, path: PathBuf, mode: &'static str },
    /// One that already runs, and its process if that has to be measured.
    Running { address: SocketAddr, pid: Option<u32> },
}

impl Target {
    pub(crate) fn name(&self) -> String {
        match self {
            Target::Known(server) => server.name.to_owned(),
            Target::Program { name, .. } => name.clone(),
            Target::Running { address, .. } => address.to_string(),
        }
    }

    /// Starts it on a CPU, unless it already runs.
    pub(crate) fn start(&self, cpu: usize, lock_step: bool) -> io::Result<Option<Child>> {
        Ok(match self {
            Target::Known(server) => Some(Child::start(server.name, cpu, lock_step)?),
            Target::Program { name, path, mode } => Some(Child::start_program(name, path, mode, Some(cpu))?),
            Target::Running { .. } => None,
        })
    }
}

/// The plan of a measurement.
pub(crate) struct Plan {
    pub(crate) targets: Vec<Target>,
    pub(crate) connections: usize,
    pub(crate) shape: Shape,
    pub(crate) pace: Pace,
    /// One more connection keeps 16 KiB messages moving back and forth; it is not counted.
    pub(crate) firehose: bool,
    /// Additional connections per second.
    pub(crate) newcomers: Option<f64>,
    pub(crate) server_cpu: usize,
    pub(crate) cpus: Vec<usize>,
    pub(crate) warm_up: Duration,
    pub(crate) measured: Duration,
    pub(crate) rounds: usize,
    /// Whether system calls are counted.
    pub(crate) counts_calls: bool,
    pub(crate) json: Option<PathBuf>,
}

/// One server in one round. Times are in microseconds.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Measured {
    pub(crate) server: String,
    pub(crate) connections: usize,
    pub(crate) bytes: usize,
    pub(crate) pipeline: usize,
    /// Requested messages per second; none in a closed loop.
    pub(crate) rate: Option<f64>,
    pub(crate) requests_per_second: f64,
    /// CPU time of the server for a request, user and system.
    pub(crate) cpu_us: Option<f64>,
    pub(crate) system_calls: Option<f64>,
    pub(crate) context_switches: Option<f64>,
    /// The server's share of a CPU.
    pub(crate) server_busy: Option<f64>,
    /// The busiest generator thread's.
    pub(crate) generator_busy: Option<f64>,
    /// Latencies; `None` in lock step.
    pub(crate) p50_us: Option<f64>,
    pub(crate) p99_us: Option<f64>,
    pub(crate) p999_us: Option<f64>,
    pub(crate) max_us: Option<f64>,
    /// Additional connections per second that were served, and the 99th percentile of their times.
    pub(crate) newcomers_per_second: Option<f64>,
    pub(crate) newcomers_p99_us: Option<f64>,
    /// Whether the generator, not the server, was the bottleneck.
    pub(crate) generator_bound: bool,
}

/// Measures all targets in all rounds, in turn, and prints a table and, if requested, JSON.
pub(crate) fn run(plan: &Plan) -> io::Result<()> {
    let mut all = Vec::new();
    for round in 0..plan.rounds {
        for target in &plan.targets {
            eprint!("\rround {} of {}: {:<20}", round + 1, plan.rounds, target.name());
            all.push(
                measure(plan, target)
                    .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", target.name())))?,
            );
        }
    }
    eprintln!();
    print!("{}", render(&all, plan.targets.len()));
    if all.iter().any(|one| one.generator_bound) {
        println!(
            "* the generator was the bottleneck: requests a second and latencies are its own; CPU for a request holds"
        );
    }
    if let Some(path) = &plan.json {
        std::fs::write(path, serde_json::to_string_pretty(&all)?)?;
    }
    Ok(())
}

/// Measures one server once.
pub(crate) fn measure(plan: &Plan, target: &Target) -> io::Result<Measured> {
    let child = target.start(plan.server_cpu, false)?;
    let (address, pid) = match (&child, target) {
        (Some(child), _) => {
            let (address, pid) = (child.address, child.pid());
            // The check sends its message in one piece before it reads the reply.
            let bytes = plan.shape.bytes.min(CHECK_BYTES_MAX);
            if plan.pace != Pace::Fanout {
                check_echo(address, Shape { bytes, ..plan.shape })?;
            }
            (address, Some(pid))
        }
        (None, Target::Running { address, pid }) => (*address, *pid),
        (None, _) => return Err(io::Error::other("it was not started")),
    };
    let generated = generator::Plan {
        address,
        connections: plan.connections,
        shape: plan.shape,
        pace: plan.pace,
        firehose: plan.firehose,
        newcomers: plan.newcomers,
        cpus: plan.cpus.clone(),
    };
    let (outcome, (used, requests, time, calls)) = generator::run(&generated, plan.warm_up, |running| {
        let usage = |pid: Option<u32>| pid.map(Usage::of_process).transpose();
        let (before, from, start) = (usage(pid)?, running.answered(), Instant::now());
        // On a machine with much other work a short measurement may see nothing.
        while running.go_on(plan.measured) && running.answered() == from && start.elapsed() < SILENCE_MAX {}
        let (after, requests, time) = (usage(pid)?, running.answered() - from, start.elapsed());
        let used = before.zip(after).map(|(before, after)| after.since(before));
        let from = running.answered();
        let calls = pid
            .filter(|_| plan.counts_calls)
            .and_then(|pid| count_calls(pid, plan.measured.min(COUNT_CALLS_MAX)));
        Ok((used, requests, time, calls.map(|calls| (calls, running.answered() - from))))
    })?;
    if requests == 0 {
        return Err(io::Error::other("no reply came while it was measured"));
    }
    Ok(summary(plan, target.name(), &outcome, used, requests, time, calls))
}

fn summary(
    plan: &Plan,
    server: String,
    outcome: &Outcome,
    used: Option<Usage>,
    requests: u64,
    time: Duration,
    calls: Option<(u64, u64)>,
) -> Measured {
    let each = |count: u64| count as f64 / requests as f64;
    let at = |quantile: f64| Some(outcome.latency.value_at_quantile(quantile) as f64 / 1000.0);
    let late = outcome.lateness.value_at_quantile(0.99) > LATE_MAX.as_nanos() as u64;
    let server_busy = used.map(|used| used.cpu_ns as f64 / 1e9 / time.as_secs_f64());
    let busy = outcome.busy > BUSY_MAX && server_busy.is_none_or(|busy| busy < BUSY_MAX);
    let rate = if let Pace::Open(rate) = plan.pace { Some(rate) } else { None };
    Measured {
        server,
        connections: plan.connections,
        bytes: plan.shape.bytes,
        pipeline: plan.shape.pipeline,
        rate,
        requests_per_second: requests as f64 / time.as_secs_f64(),
        cpu_us: used.map(|used| each(used.cpu_ns) / 1000.0),
        system_calls: calls.map(|(calls, requests)| calls as f64 / requests.max(1) as f64),
        context_switches: used.map(|used| each(used.switches)),
        server_busy,
        generator_busy: Some(outcome.busy),
        p50_us: at(0.5),
        p99_us: at(0.99),
        p999_us: at(0.999),
        max_us: at(1.0),
        newcomers_per_second: plan.newcomers.map(|_| outcome.newcomers_per_second),
        newcomers_p99_us: plan.newcomers.map(|_| outcome.newcomers.value_at_quantile(0.99) as f64 / 1000.0),
        // An open loop keeps its threads busy by reading the clock.
        generator_bound: if rate.is_some() { late } else { busy },
    }
}

/// Renders a row for each server: medians over the rounds, their spread, and the ratio to the first
/// server (the median of the ratios of each round, which cancels anything that slowed a whole
/// round).
fn render(all: &[Measured], servers: usize) -> String {
    let first = &all[0].server;
    let ratio_to = format!("to {first}");
    let has_newcomers = all.iter().any(|one| one.newcomers_per_second.is_some());
    let mut headings = vec![
        "server",
        "CPU µs/request",
        "min..max",
        &ratio_to,
        "calls/request",
        "switches/request",
        "requests/s",
        "busy",
        "generator",
        "p50 µs",
        "p99 µs",
        "p99.9 µs",
        "max µs",
    ];
    if has_newcomers {
        headings.extend(["beside/s", "their p99 µs"]);
    }
    let mut table = Table::new(&headings);
    for server in 0..servers {
        let rounds: Vec<&Measured> = all.iter().skip(server).step_by(servers).collect();
        let middle = |value: &dyn Fn(&Measured) -> Option<f64>, digits: usize| {
            let values: Vec<f64> = rounds.iter().filter_map(|one| value(one)).collect();
            median(&values).map_or("-".to_owned(), |value| format!("{value:.digits$}"))
        };
        let cpu: Vec<f64> = rounds.iter().filter_map(|one| one.cpu_us).collect();
        let yardstick = all.iter().step_by(servers);
        let ratios: Vec<f64> = rounds
            .iter()
            .zip(yardstick)
            .filter_map(|(one, first)| Some(one.cpu_us? / first.cpu_us?))
            .collect();
        let mark = if rounds.iter().any(|one| one.generator_bound) { "*" } else { "" };
        let mut cells = vec![
            rounds[0].server.clone(),
            middle(&|one| one.cpu_us, 3),
            spread(&cpu).map_or("-".to_owned(), |(least, most)| format!("{least:.3}..{most:.3}")),
            median(&ratios).map_or("-".to_owned(), |ratio| format!("{ratio:.3}")),
            middle(&|one| one.system_calls, 3),
            middle(&|one| one.context_switches, 3),
            format!("{}{mark}", middle(&|one| Some(one.requests_per_second), 0)),
            middle(&|one| one.server_busy, 2),
            middle(&|one| one.generator_busy, 2),
            middle(&|one| one.p50_us, 1),
            middle(&|one| one.p99_us, 1),
            middle(&|one| one.p999_us, 1),
            middle(&|one| one.max_us, 1),
        ];
        if has_newcomers {
            cells.push(middle(&|one| one.newcomers_per_second, 0));
            cells.push(middle(&|one| one.newcomers_p99_us, 0));
        }
        table.row(cells);
    }
    table.render()
}
