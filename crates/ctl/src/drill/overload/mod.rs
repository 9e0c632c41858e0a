//! The drill of overload: a server on one CPU meets more than it can do, in five ways, and is held against a bar in each.
//!
//! ```text
//!   first CPU    overload-server: one shard, set as its row needs it; told by lines what to do, and what to tell
//!   second CPU   this process: clients, and those that attack; 127.1.0.0/16 are attackers, 127.2.0.0/16 are not
//! ```
//!
//! | row | what comes |
//! |---|---|
//! | `goodput`, `marked` | requests at four times the rate that the server can serve, one in ten of them marked |
//! | `prefix` | 20 000 connects a second from one address, and a few from another |
//! | `return` | all clients of a server that restarts, at once |
//! | `memory` | peers that read nothing and halves of frames, to the limit of memory |

mod comeback;
mod flood;
mod heavy;
mod peer;
mod process;
mod server;
mod storm;

use std::fmt;
use std::time::Duration;

use clap::ValueEnum;
use ringserve::Driver;
use serde::Serialize;

use crate::args::OverloadOptions;
use crate::client::Failure;
use crate::text::{plain, table};
use process::{Cpus, Process};
pub use server::serve;

/// What comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Row {
    /// Four times what the server can do: what it still serves, and how soon
    Goodput,
    /// The same: whether frames that are marked are served
    Marked,
    /// A flood of connects from one address: whether another one gets in
    Prefix,
    /// All clients come back at once: whether one is lost
    Return,
    /// Peers that make the server hold memory: who is closed
    Memory,
}

impl Row {
    const ALL: [Row; 5] = [Row::Goodput, Row::Marked, Row::Prefix, Row::Return, Row::Memory];

    /// As the command line has it.
    pub fn name(self) -> &'static str {
        match self {
            Row::Goodput => "goodput",
            Row::Marked => "marked",
            Row::Prefix => "prefix",
            Row::Return => "return",
            Row::Memory => "memory",
        }
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A figure that is held against a number.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Bar {
    /// What is measured.
    of: &'static str,
    unit: &'static str,
    value: f64,
    /// The number.
    bar: f64,
    /// The value may not be below the number; otherwise it may not be above.
    at_least: bool,
    held: bool,
}

impl Bar {
    fn at_least(of: &'static str, unit: &'static str, value: f64, bar: f64) -> Bar {
        Bar { of, unit, value, bar, at_least: true, held: value >= bar }
    }

    fn at_most(of: &'static str, unit: &'static str, value: f64, bar: f64) -> Bar {
        Bar { of, unit, value, bar, at_least: false, held: value <= bar }
    }
}

/// `goodput 0.93 (>= 0.90)`.
impl fmt::Display for Bar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sign = if self.at_least { ">=" } else { "<=" };
        let unit = if self.unit.is_empty() { String::new() } else { format!(" {}", self.unit) };
        let number = |value: f64| match self.unit {
            "" if value.fract() != 0.0 => format!("{value:.4}"),
            "ms" | "s" => format!("{value:.1}"),
            _ => format!("{value:.0}"),
        };
        write!(f, "{} {}{unit} ({sign} {})", self.of, number(self.value), number(self.bar))
    }
}

/// What came of a row.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
struct Outcome {
    row: &'static str,
    /// The driver, or what is measured beside it.
    server: String,
    bars: Vec<Bar>,
    /// All bars are held.
    held: bool,
    /// It is there for comparison, and fails nothing.
    beside: bool,
    /// More figures, as a sentence.
    why: String,
    /// The share of the time for which others had the server's CPU.
    starved: f64,
    /// Why it was not tried.
    left_out: Option<String>,
}

impl Outcome {
    fn of(row: Row, server: &str, bars: Vec<Bar>, why: String) -> Outcome {
        let held = bars.iter().all(|bar| bar.held);
        Outcome { row: row.name(), server: server.to_owned(), held, bars, why, ..Outcome::default() }
    }

    fn left_out(row: Row, server: &str, why: impl Into<String>) -> Outcome {
        let (row, server) = (row.name(), server.to_owned());
        Outcome { row, server, left_out: Some(why.into()), ..Outcome::default() }
    }

    fn fails(&self) -> bool {
        !self.held && !self.beside && self.left_out.is_none()
    }

    fn row(&self) -> Vec<String> {
        let verdict = match self {
            Outcome { left_out: Some(_), .. } => "left out",
            Outcome { beside: true, .. } => "beside",
            Outcome { held: true, .. } => "held",
            _ => "MISSED",
        };
        let bars: Vec<String> = self.bars.iter().map(Bar::to_string).collect();
        vec![
            self.row.to_owned(),
            self.server.clone(),
            verdict.to_owned(),
            bars.join(", "),
            plain(self.left_out.as_ref().unwrap_or(&self.why)).chars().take(160).collect(),
        ]
    }
}

/// From this share of the time on, the drill says that the machine was busy.
const BUSY: f64 = 0.05;

/// Runs the rows that were asked for, prints what came of each, and returns 1 if a bar was missed.
pub fn run(options: &OverloadOptions, json: bool) -> Result<u8, Failure> {
    let cpus = Cpus::take()?;
    peer::raise_descriptors()?;
    let asked = |row| options.only.is_empty() || options.only.contains(&row);
    let drivers = match &options.driver {
        Some(driver) => vec![*driver],
        None => vec![Driver::IoUring, Driver::Epoll],
    };
    let tell = |what: &str| {
        if !json {
            eprintln!("{what}");
        }
    };
    let mut outcomes = Vec::new();
    for driver in drivers {
        let name = driver.to_string();
        for row in Row::ALL.into_iter().filter(|row| asked(*row)) {
            // One storm is for both.
            if row == Row::Marked && asked(Row::Goodput) {
                continue;
            }
            tell(&format!("{row} on {name}"));
            let process = match Process::start(&cpus, row, driver, options.micros, true) {
                Ok(process) => process,
                Err(failure) if options.driver.is_none() && driver == Driver::IoUring => {
                    outcomes.push(Outcome::left_out(row, &name, failure.0));
                    continue;
                }
                Err(failure) => return Err(failure),
            };
            match tried(row, &name, process, options, asked) {
                Ok(came) => outcomes.extend(came),
                // The other rows are of interest all the same.
                Err(failure) => {
                    outcomes.push(Outcome { held: false, ..Outcome::of(row, &name, Vec::new(), failure.0) })
                }
            }
        }
    }
    if asked(Row::Goodput) {
        outcomes.extend(beside(&cpus, options, tell)?);
    }
    print_all(&outcomes, json)?;
    Ok(u8::from(outcomes.iter().any(Outcome::fails)))
}

/// One row, at a server that was started for it.
fn tried(
    row: Row,
    name: &str,
    mut process: Process,
    options: &OverloadOptions,
    asked: impl Fn(Row) -> bool,
) -> Result<Vec<Outcome>, Failure> {
    let time = Duration::from_secs_f64(options.seconds);
    let mut outcomes = match row {
        Row::Goodput | Row::Marked => {
            let storm = storm::run(process.addr(), options.times, time)?;
            let mut both = Vec::new();
            if row == Row::Goodput {
                both.push(Outcome::of(Row::Goodput, name, storm.goodput_bars(), storm.to_string()));
            }
            if asked(Row::Marked) {
                let share = storm.marked_served;
                let bars = vec![Bar::at_least("served of the marked", "", share, storm::MARKED_MIN)];
                both.push(Outcome::of(Row::Marked, name, bars, String::new()));
            }
            both
        }
        Row::Prefix => vec![flood::run(name, process.addr(), time)?],
        Row::Return => vec![comeback::run(name, &mut process)?],
        Row::Memory => vec![heavy::run(name, &mut process, time)?],
    };
    let told = process.told()?;
    outcomes.iter_mut().for_each(|outcome| outcome.starved = told.starved());
    Ok(outcomes)
}

/// The storm at servers that shed nothing, or by other libraries, if those were built.
fn beside(cpus: &Cpus, options: &OverloadOptions, tell: impl Fn(&str)) -> Result<Vec<Outcome>, Failure> {
    let time = Duration::from_secs_f64(options.seconds);
    let mut outcomes = Vec::new();
    let driver = options.driver.unwrap_or_default();
    tell("goodput of a server that sheds nothing, for comparison");
    let nothing = Process::start(cpus, Row::Goodput, driver, options.micros, false)?;
    let storm = storm::run(nothing.addr(), options.times, time)?;
    outcomes.push(Outcome::of(Row::Goodput, "sheds nothing", storm.goodput_bars(), storm.to_string()));
    drop(nothing);
    for rival in ["tokio-shed", "go-shed"] {
        let Some(program) = options.rivals.as_ref().map(|folder| folder.join(rival)) else { continue };
        if !program.exists() {
            let why = format!("{} is not there: `scripts/rivals {rival}` builds it", program.display());
            outcomes.push(Outcome::left_out(Row::Goodput, rival, why));
            continue;
        }
        tell(&format!("goodput of {rival}, for comparison"));
        let process = Process::start_rival(cpus, &program, options.micros)?;
        let storm = storm::run(process.addr(), options.times, time)?;
        outcomes.push(Outcome::of(Row::Goodput, rival, storm.goodput_bars(), storm.to_string()));
    }
    outcomes.iter_mut().for_each(|outcome| outcome.beside = true);
    Ok(outcomes)
}

fn print_all(outcomes: &[Outcome], json: bool) -> Result<(), Failure> {
    if json {
        let text = serde_json::to_string_pretty(outcomes).map_err(|error| Failure(error.to_string()))?;
        println!("{text}");
        return Ok(());
    }
    let rows: Vec<_> = outcomes.iter().map(Outcome::row).collect();
    print!("{}", table(&["row", "server", "", "measured", "beside it"], &rows));
    let tried = outcomes.iter().filter(|outcome| !outcome.beside && outcome.left_out.is_none());
    println!("{} of {} rows held", tried.clone().filter(|outcome| outcome.held).count(), tried.count());
    let starved = outcomes.iter().map(|outcome| outcome.starved).fold(0.0, f64::max);
    if starved >= BUSY {
        println!(
            "others had the server's CPU for up to {:.0} % of the time: repeat it where the machine is quiet",
            starved * 100.0
        );
    }
    if cfg!(debug_assertions) {
        println!(
            "this build is without optimizations: `cargo run --release -p ringserve-ctl` measures what ships"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn row_is_held_by_all_of_its_bars() {
        let bars = vec![Bar::at_least("goodput", "", 0.9, 0.9), Bar::at_most("p99", "ms", 15.0, 15.0)];
        let held = Outcome::of(Row::Goodput, "epoll", bars.clone(), String::new());
        assert!(held.held && !held.fails());
        assert_eq!(
            held.row()[..4],
            ["goodput", "epoll", "held", "goodput 0.9000 (>= 0.9000), p99 15.0 ms (<= 15.0)"]
        );
        for missed in [Bar::at_least("goodput", "", 0.899, 0.9), Bar::at_most("p99", "ms", 15.1, 15.0)] {
            let bars = [&bars[..], &[missed]].concat();
            let missed = Outcome::of(Row::Goodput, "epoll", bars, String::new());
            assert!(missed.fails() && missed.row()[2] == "MISSED");
            assert!(!Outcome { beside: true, ..missed }.fails(), "rivals fail nothing");
        }
        assert!(!Outcome::left_out(Row::Memory, "io_uring", "no rings").fails());
    }

    #[test]
    fn each_row_is_found_by_its_name() {
        assert_eq!(Row::ALL.len(), Row::value_variants().len());
        for row in Row::ALL {
            assert_eq!(Row::from_str(row.name(), false), Ok(row));
        }
    }
}
