//! The results, as a table and as JSON.

use std::{fs, io};

use serde::Serialize;

use super::{Measured, Plan};
use crate::table::{Table, median};

/// Medians over the rounds, a row for each server and number of shards.
pub(super) fn render(rows: &[Measured]) -> String {
    let headings = [
        "work",
        "server",
        "shards",
        "requests/s",
        "CPU µs/request",
        "efficiency",
        "by CPU time",
        "busy",
        "generator",
        "skew",
        "p50 µs",
        "p99 µs",
    ];
    let mut table = Table::new(&headings);
    for row in summaries(rows) {
        let bound = if row.is_generator_bound { "*" } else { "" };
        let ratio = |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{value:.2}"));
        table.row(vec![
            row.work.to_owned(),
            row.server.to_owned(),
            row.shards.to_string(),
            format!("{:.0}{bound}", row.requests_per_second),
            format!("{:.2}", row.cpu_us),
            ratio(row.efficiency),
            ratio(row.cpu_efficiency),
            format!("{:.2}", row.server_busy),
            format!("{:.2}", row.generator_busy),
            format!("{:.2}", row.skew),
            format!("{:.0}", row.p50_us),
            format!("{:.0}", row.p99_us),
        ]);
    }
    let note = if rows.iter().any(Measured::is_generator_bound) {
        "* the generator was the bottleneck in one of the rounds: what holds is the efficiency by CPU time\n"
    } else {
        ""
    };
    table.render() + note
}

/// All rounds, their summary, and the machine.
pub(super) fn json(plan: &Plan, rows: &[Measured], failed: &[String]) -> io::Result<String> {
    #[derive(Serialize)]
    struct Report<'a> {
        kernel: String,
        processor: String,
        server_cpus: &'a [usize],
        generator_cpus: &'a [usize],
        seconds: f64,
        summary: Vec<Summary>,
        rounds: &'a [Measured],
        failed: &'a [String],
    }
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    let cpuinfo = read("/proc/cpuinfo");
    let model = cpuinfo.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    let report = Report {
        kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
        processor: model.map(|(_, name)| name.trim().to_owned()).unwrap_or_default(),
        server_cpus: &plan.servers,
        generator_cpus: &plan.generator,
        seconds: plan.measured.as_secs_f64(),
        summary: summaries(rows),
        rounds: rows,
        failed,
    };
    Ok(serde_json::to_string_pretty(&report)? + "\n")
}

/// One server with one number of shards: medians over the rounds.
#[derive(Clone, Debug, Serialize)]
struct Summary {
    work: &'static str,
    server: &'static str,
    shards: usize,
    requests_per_second: f64,
    cpu_us: f64,
    /// Requests per second, divided by as many times those of one shard.
    efficiency: Option<f64>,
    /// CPU time of one shard for a request, divided by that of these shards.
    cpu_efficiency: Option<f64>,
    server_busy: f64,
    generator_busy: f64,
    skew: f64,
    p50_us: f64,
    p99_us: f64,
    is_generator_bound: bool,
}

fn summaries(rows: &[Measured]) -> Vec<Summary> {
    let of_first_round = rows
        .iter()
        .enumerate()
        .filter(|(at, row)| !rows[..*at].iter().any(|one| one.is_of(row.work, row.server, row.shards)));
    let mut all: Vec<Summary> =
        of_first_round.map(|(_, row)| summary(rows, row.work, row.server, row.shards)).collect();
    for at in 0..all.len() {
        let one = all.iter().find(|one| one.shards == 1 && one.is_beside(&all[at])).cloned();
        if let Some(one) = one {
            let row = &mut all[at];
            row.efficiency = Some(row.requests_per_second / (one.requests_per_second * row.shards as f64));
            row.cpu_efficiency = Some(one.cpu_us / row.cpu_us);
        }
    }
    all
}

impl Measured {
    fn is_of(&self, work: &str, server: &str, shards: usize) -> bool {
        self.work == work && self.server == server && self.shards == shards
    }
}

impl Summary {
    fn is_beside(&self, other: &Summary) -> bool {
        self.work == other.work && self.server == other.server
    }
}

fn summary(rows: &[Measured], work: &'static str, server: &'static str, shards: usize) -> Summary {
    let rounds: Vec<&Measured> = rows.iter().filter(|row| row.is_of(work, server, shards)).collect();
    let middle = |value: fn(&Measured) -> f64| {
        median(&rounds.iter().map(|row| value(row)).collect::<Vec<_>>()).unwrap_or_default()
    };
    Summary {
        work,
        server,
        shards,
        requests_per_second: middle(|row| row.requests_per_second),
        cpu_us: middle(|row| row.cpu_us),
        efficiency: None,
        cpu_efficiency: None,
        server_busy: middle(|row| row.server_busy),
        generator_busy: middle(|row| row.generator_busy),
        skew: middle(|row| row.skew),
        p50_us: middle(|row| row.p50_us),
        p99_us: middle(|row| row.p99_us),
        is_generator_bound: rounds.iter().any(|row| row.is_generator_bound()),
    }
}

#[cfg(test)]
mod tests {
    use super::{Measured, render, summaries};

    fn row(shards: usize, round: usize, requests_per_second: f64, cpu_us: f64) -> Measured {
        Measured {
            work: "echo",
            server: "ringserve",
            shards,
            round,
            connections: 100,
            requests_per_second,
            cpu_us,
            server_busy: 1.0,
            generator_busy: 0.5,
            skew: 1.0,
            p50_us: 1.0,
            p99_us: 2.0,
        }
    }

    #[test]
    fn efficiency_is_of_as_many_times_one_shard() {
        let rows =
            [row(1, 0, 100.0, 10.0), row(4, 0, 300.0, 12.5), row(1, 1, 100.0, 10.0), row(4, 1, 340.0, 12.5)];
        let all = summaries(&rows);
        let found: Vec<_> = all.iter().map(|one| (one.shards, one.efficiency, one.cpu_efficiency)).collect();
        assert_eq!(found, [(1, Some(1.0), Some(1.0)), (4, Some(0.8), Some(0.8))]);
    }

    #[test]
    fn without_one_shard_there_is_no_efficiency() {
        let text = render(&[row(4, 0, 300.0, 12.5)]);
        assert!(text.lines().nth(1).is_some_and(|line| line.contains(" - ")), "{text}");
    }
}
