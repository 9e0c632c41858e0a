//! The results, as JSON, Markdown and charts.

use std::fmt::Write;
use std::{fs, io};

use super::{Compared, Plan, Rounds, chart};
use crate::load::Measured;
use crate::table::{median, spread};

/// Two servers closer than this count as equal.
const TIE: f64 = 0.03;

/// The server by which the others are divided.
const OURS: &str = "ringserve";

/// A server's row.
struct Row<'a> {
    name: &'a str,
    cpu_us: f64,
    spread: (f64, f64),
    rounds: &'a [Measured],
}

impl<'a> Row<'a> {
    fn of(rounds: &'a Rounds) -> Option<Row<'a>> {
        let cpu: Vec<f64> = rounds.rounds.iter().filter_map(|one| one.cpu_us).collect();
        let row =
            Row { name: &rounds.name, cpu_us: median(&cpu)?, spread: spread(&cpu)?, rounds: &rounds.rounds };
        Some(row)
    }

    fn middle(&self, value: impl Fn(&Measured) -> Option<f64>) -> Option<f64> {
        median(&self.rounds.iter().filter_map(value).collect::<Vec<f64>>())
    }
}

/// The rows of one piece of work, the cheapest first.
fn rows(compared: &Compared) -> Vec<Row<'_>> {
    let mut rows: Vec<Row<'_>> = compared.servers.iter().filter_map(Row::of).collect();
    rows.sort_by(|one, other| one.cpu_us.total_cmp(&other.cpu_us));
    rows
}

/// Writes `report.json`, `report.md` and a chart for each piece of work.
pub(super) fn write(plan: &Plan, all: &[Compared]) -> io::Result<()> {
    fs::write(plan.out.join("report.json"), serde_json::to_string_pretty(all)?)?;
    let mut text = head(plan);
    // Writing to a string cannot fail.
    let _ = overview(all, &mut text);
    for compared in all {
        let bars: Vec<(&str, f64)> = rows(compared).iter().map(|row| (row.name, row.cpu_us)).collect();
        chart::draw(&plan.out.join(format!("{}.svg", compared.work)), &compared.about, &bars)?;
        let _ = section(compared, &mut text);
    }
    fs::write(plan.out.join("report.md"), text)
}

fn head(plan: &Plan) -> String {
    let read = |path: &str| fs::read_to_string(path).map_or("?".to_owned(), |text| text.trim().to_owned());
    let cpu = read("/proc/cpuinfo")
        .lines()
        .find_map(|line| {
            Some(line.strip_prefix("model name")?.trim_start_matches(['\t', ' ', ':']).to_owned())
        })
        .unwrap_or_else(|| "?".to_owned());
    format!(
        "Linux {}, {cpu}, {} CPUs, congestion control {}. Server on CPU {}, generator on {:?}, over loopback. Medians of {} \
         interleaved rounds of {:.1} s in shuffled order.\n",
        read("/proc/sys/kernel/osrelease"),
        std::thread::available_parallelism().map_or(0, usize::from),
        read("/proc/sys/net/ipv4/tcp_congestion_control"),
        plan.server_cpu,
        plan.cpus,
        plan.rounds,
        plan.measured.as_secs_f64()
    )
}

/// CPU time of all servers at all work, in one table.
fn overview(all: &[Compared], text: &mut String) -> std::fmt::Result {
    let columns: Vec<(&str, Vec<Row<'_>>)> =
        all.iter().map(|compared| (compared.work, rows(compared))).collect();
    let mut names: Vec<&str> = Vec::new();
    for row in columns.iter().flat_map(|(_, rows)| rows) {
        if !names.contains(&row.name) {
            names.push(row.name);
        }
    }
    write!(text, "\n## CPU µs for a request\n\n| server |")?;
    columns.iter().try_for_each(|(work, _)| write!(text, " {work} |"))?;
    writeln!(text, "\n|---|{}", "---|".repeat(columns.len()))?;
    for name in names {
        write!(text, "| {name} |")?;
        for (_, rows) in &columns {
            match rows.iter().find(|row| row.name == name) {
                Some(row) => write!(text, " {:.3} |", row.cpu_us)?,
                None => write!(text, " - |")?,
            }
        }
        writeln!(text)?;
    }
    Ok(())
}

fn section(compared: &Compared, text: &mut String) -> std::fmt::Result {
    let rows = rows(compared);
    let ours = rows.iter().find(|row| row.name == OURS).map(|row| row.cpu_us);
    write!(
        text,
        "\n## {}: {}\n\n![{}]({}.svg)\n\n",
        compared.work, compared.about, compared.work, compared.work
    )?;
    writeln!(
        text,
        "| server | CPU µs/request | min..max | to {OURS} | calls/request | requests/s | p50 µs | p99 µs | p99.9 µs |\n\
         |---|---|---|---|---|---|---|---|---|"
    )?;
    for row in &rows {
        let some = |value: Option<f64>, digits: usize| {
            value.map_or("-".to_owned(), |value| format!("{value:.digits$}"))
        };
        let ratio = ours.map(|ours| row.cpu_us / ours);
        let tie = ratio.is_some_and(|ratio| row.name != OURS && (ratio - 1.0).abs() <= TIE);
        let mark = if row.rounds.iter().any(|one| one.generator_bound) { "\\*" } else { "" };
        writeln!(
            text,
            "| {} | {:.3} | {:.3}..{:.3} | {}{} | {} | {}{mark} | {} | {} | {} |",
            row.name,
            row.cpu_us,
            row.spread.0,
            row.spread.1,
            some(ratio, 3),
            if tie { " (tie)" } else { "" },
            some(row.middle(|one| one.system_calls), 3),
            some(row.middle(|one| Some(one.requests_per_second)), 0),
            some(row.middle(|one| one.p50_us), 1),
            some(row.middle(|one| one.p99_us), 1),
            some(row.middle(|one| one.p999_us), 1),
        )?;
    }
    if rows.iter().any(|row| row.rounds.iter().any(|one| one.generator_bound)) {
        writeln!(text, "\n\\* the generator was the bottleneck: its requests a second, and its latencies.")?;
    }
    for one in &compared.servers {
        if let Some(why) = &one.failed {
            writeln!(text, "\n{} failed: {why}", one.name)?;
        }
    }
    Ok(())
}
