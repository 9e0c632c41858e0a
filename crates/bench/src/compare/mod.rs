//! `compare`: every server on the same work, in interleaved rounds, and a report.

mod chart;
mod report;
mod works;

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use serde::Serialize;

use crate::load::{self, Measured, Target};
use crate::lockstep::Shuffler;
use works::Work;
pub(crate) use works::{WORKS, find as find_work};

/// Load before each measurement.
const WARM_UP: Duration = Duration::from_millis(500);

/// What a measurement takes beside its length: start and check of the server, warm-up, counting of system calls.
const AROUND: Duration = Duration::from_millis(1250);

/// What to compare.
pub(crate) struct Plan {
    pub(crate) works: Vec<&'static Work>,
    /// Each with what it speaks: raw bytes, lines.
    pub(crate) servers: Vec<Entrant>,
    pub(crate) rounds: usize,
    pub(crate) measured: Duration,
    pub(crate) server_cpu: usize,
    pub(crate) cpus: Vec<usize>,
    pub(crate) out: PathBuf,
}

impl Plan {
    /// Who takes part in a piece of work, and how.
    fn entrants(&self, work: &Work) -> Vec<(&Entrant, &Target)> {
        self.servers.iter().filter_map(|one| Some((one, one.target(work)?))).collect()
    }
}

/// A server that takes part.
#[derive(Clone)]
pub(crate) struct Entrant {
    pub(crate) name: String,
    /// How to measure it with raw messages.
    pub(crate) raw: Option<Target>,
    /// ... and with lines, in a framing of its own.
    pub(crate) lines: Option<Target>,
    /// Its echo of raw bytes stands beside those that frame lines, as the floor.
    pub(crate) floor: bool,
}

impl Entrant {
    fn target(&self, work: &Work) -> Option<&Target> {
        if work.lines {
            self.lines.as_ref().or(self.raw.as_ref().filter(|_| self.floor))
        } else {
            self.raw.as_ref()
        }
    }
}

/// What became of one piece of work: for each server that took part, its rounds.
#[derive(Serialize)]
pub(crate) struct Compared {
    pub(crate) work: &'static str,
    pub(crate) about: &'static str,
    pub(crate) servers: Vec<Rounds>,
}

#[derive(Serialize)]
pub(crate) struct Rounds {
    pub(crate) name: String,
    pub(crate) rounds: Vec<Measured>,
    /// Why it was left out from some round on.
    pub(crate) failed: Option<String>,
}

/// Measures everything and writes the report. A server that fails at a piece of work is left out of the rest of it, and
/// the report says why.
pub(crate) fn run(plan: &Plan) -> io::Result<()> {
    std::fs::create_dir_all(&plan.out)?;
    let measurements: usize = plan.works.iter().map(|work| plan.entrants(work).len() * plan.rounds).sum();
    let time = measurements as f64 * (plan.measured + AROUND).as_secs_f64();
    eprintln!("{measurements} measurements, about {:.0} minutes", (time / 60.0).ceil());
    let mut all = Vec::new();
    for work in &plan.works {
        all.push(compare(plan, work)?);
        // What was measured so far is there, also if the rest is cut short.
        report::write(plan, &all)?;
    }
    println!("{}", plan.out.join("report.md").display());
    Ok(())
}

fn compare(plan: &Plan, work: &'static Work) -> io::Result<Compared> {
    let part = plan.entrants(work);
    let mut servers: Vec<Rounds> = part
        .iter()
        .map(|(one, _)| Rounds { name: one.name.clone(), rounds: Vec::new(), failed: None })
        .collect();
    let mut order: Vec<usize> = (0..part.len()).collect();
    let mut shuffler = Shuffler::default();
    for round in 0..plan.rounds {
        shuffler.shuffle(&mut order);
        for &at in &order {
            if servers[at].failed.is_some() {
                continue;
            }
            eprint!("\r{}, round {} of {}: {:<24}", work.name, round + 1, plan.rounds, servers[at].name);
            match load::measure(&load_plan(plan, work), part[at].1) {
                Ok(measured) => servers[at].rounds.push(measured),
                Err(error) => {
                    eprintln!("\n{}: {error}", servers[at].name);
                    servers[at].failed = Some(error.to_string());
                }
            }
        }
    }
    eprintln!();
    Ok(Compared { work: work.name, about: work.about, servers })
}

fn load_plan(plan: &Plan, work: &Work) -> load::Plan {
    load::Plan {
        targets: Vec::new(),
        connections: work.connections,
        shape: work.shape(),
        pace: work.pace,
        server_cpu: plan.server_cpu,
        cpus: plan.cpus.clone(),
        warm_up: WARM_UP,
        measured: plan.measured,
        rounds: 1,
        json: None,
    }
}
