//! `compare`: every server on the same work, in interleaved rounds, and a report.

mod chart;
mod report;
mod works;

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use serde::Serialize;

use crate::generator::Pace;
use crate::load::{self, Measured, Target};
use crate::lockstep::{self, Shuffler};
use works::{How, Serves, Work};
pub(crate) use works::{WORKS, find as find_work};

/// Load before each measurement, or its length if that is shorter.
const WARM_UP_MAX: Duration = Duration::from_millis(500);

/// Start, check and end of a server.
const AROUND: Duration = Duration::from_millis(250);

/// The plan of a comparison.
pub(crate) struct Plan {
    pub(crate) works: Vec<&'static Work>,
    /// Each server with the ways to measure it: raw bytes, lines.
    pub(crate) servers: Vec<Entrant>,
    pub(crate) rounds: usize,
    pub(crate) measured: Duration,
    pub(crate) server_cpu: usize,
    pub(crate) cpus: Vec<usize>,
    pub(crate) out: PathBuf,
}

impl Plan {
    /// The servers that take part in a piece of work, and the ways to measure them.
    fn entrants(&self, work: &Work) -> Vec<(&Entrant, &Target)> {
        self.servers.iter().filter_map(|one| Some((one, one.target(work)?))).collect()
    }
}

/// A server that takes part.
#[derive(Clone)]
pub(crate) struct Entrant {
    pub(crate) name: String,
    /// The way to measure it with raw messages.
    pub(crate) raw: Option<Target>,
    /// The way to measure it with lines, in a framing of the rival's.
    pub(crate) lines: Option<Target>,
    /// The way to measure it in a form whose handlers wait.
    pub(crate) awaits: Option<Target>,
    /// Whether its echo of raw bytes is listed with those that frame lines, as the floor.
    pub(crate) floor: bool,
}

impl Entrant {
    fn target(&self, work: &Work) -> Option<&Target> {
        let floor = self.raw.as_ref().filter(|_| self.floor);
        match work.serves {
            Serves::Raw => self.raw.as_ref(),
            Serves::Lines => self.lines.as_ref().or(floor),
            Serves::Awaits => self.awaits.as_ref().or(floor),
        }
    }
}

/// The results of one piece of work: for each server that took part, its rounds.
#[derive(Serialize)]
pub(crate) struct Compared {
    pub(crate) work: &'static str,
    pub(crate) about: String,
    pub(crate) servers: Vec<Rounds>,
}

#[derive(Serialize)]
pub(crate) struct Rounds {
    pub(crate) name: String,
    pub(crate) rounds: Vec<Measured>,
    /// The reason why it was left out from some round on.
    pub(crate) failed: Option<String>,
}

/// Measures everything, writes the report and prints it. A server that fails at a piece of work is
/// left out of the rest of it, and the report says why.
pub(crate) fn run(plan: &Plan) -> io::Result<()> {
    std::fs::create_dir_all(&plan.out)?;
    let measurements: usize = plan.works.iter().map(|work| plan.entrants(work).len() * plan.rounds).sum();
    let time = measurements as f64 * (warm_up(plan) + plan.measured + AROUND).as_secs_f64();
    eprintln!("{measurements} measurements, about {:.0} minutes", (time / 60.0).ceil());
    let mut all = Vec::new();
    for work in &plan.works {
        all.push(compare(plan, work)?);
        // The results so far are there, even if the rest is cut short.
        report::write(plan, &all)?;
    }
    let path = plan.out.join("report.md");
    println!("{}\n{}", std::fs::read_to_string(&path)?, path.display());
    Ok(())
}

fn compare(plan: &Plan, work: &'static Work) -> io::Result<Compared> {
    let part = plan.entrants(work);
    let mut servers: Vec<Rounds> = part
        .iter()
        .map(|(one, _)| Rounds { name: one.name.clone(), rounds: Vec::new(), failed: None })
        .collect();
    let (pace, about) = pace(plan, work)?;
    let mut order: Vec<usize> = (0..part.len()).collect();
    let mut shuffler = Shuffler::default();
    for round in 0..plan.rounds {
        shuffler.shuffle(&mut order);
        for &at in &order {
            if servers[at].failed.is_some() {
                continue;
            }
            eprint!("\r{}, round {} of {}: {:<24}", work.name, round + 1, plan.rounds, servers[at].name);
            let load = load_plan(plan, work, pace, round == 0);
            let measured = match work.how {
                How::LockStep => lockstep::measure_target(&load, part[at].1),
                _ => load::measure(&load, part[at].1),
            };
            match measured {
                Ok(measured) => servers[at].rounds.push(measured),
                Err(error) => {
                    eprintln!("\n{}: {error}", servers[at].name);
                    servers[at].failed = Some(error.to_string());
                }
            }
        }
    }
    eprintln!();
    Ok(Compared { work: work.name, about, servers })
}

/// The times of messages, and the description of the work in the report.
fn pace(plan: &Plan, work: &Work) -> io::Result<(Pace, String)> {
    let about = work.about.to_owned();
    Ok(match work.how {
        How::Closed | How::LockStep => (Pace::Closed, about),
        How::Open(rate) => (Pace::Open(rate), about),
        How::Churn => (Pace::Churn, about),
        How::OpenPart(part) => {
            let (name, most) = slowest(plan, work)?;
            // Whole thousands read better, and the figure is rough.
            let rate = (most * part / 1000.0).round().max(1.0) * 1000.0;
            (Pace::Open(rate), format!("{about} ({name}, {most:.0}/s): {rate:.0}/s"))
        }
    })
}

/// The server with the fewest messages per second in a closed loop, and their number.
fn slowest(plan: &Plan, work: &Work) -> io::Result<(String, f64)> {
    let mut slowest: Option<(String, f64)> = None;
    for (one, target) in plan.entrants(work) {
        eprint!("\r{}, what each can do: {:<24}", work.name, one.name);
        // A server that fails here fails in the rounds too, where it is reported.
        let Ok(measured) = load::measure(&load_plan(plan, work, Pace::Closed, false), target) else {
            continue;
        };
        let most = measured.requests_per_second;
        if slowest.as_ref().is_none_or(|(_, least)| most < *least) {
            slowest = Some((one.name.clone(), most));
        }
    }
    slowest.ok_or_else(|| io::Error::other(format!("{}: no server could be measured", work.name)))
}

fn warm_up(plan: &Plan) -> Duration {
    plan.measured.min(WARM_UP_MAX)
}

fn load_plan(plan: &Plan, work: &Work, pace: Pace, counts_calls: bool) -> load::Plan {
    load::Plan {
        targets: Vec::new(),
        connections: work.connections,
        shape: work.shape(),
        pace,
        firehose: work.firehose,
        newcomers: None,
        server_cpu: plan.server_cpu,
        cpus: plan.cpus.clone(),
        warm_up: warm_up(plan),
        measured: plan.measured,
        rounds: 1,
        counts_calls,
        json: None,
    }
}
