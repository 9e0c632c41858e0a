//! The drill of overload: a server on one CPU gets more load than it can serve, in six ways, and is
//! compared with a bar in each.
//!
//! ```text
//!   first CPU    overload-server: one shard, set as its row needs it; lines order what to do and what to report
//!   second CPU   this process: clients and attackers; 127.1.0.0/16 are attackers, 127.2.0.0/16 are not
//! ```
//!
//! | row | load |
//! |---|---|
//! | `goodput`, `marked` | requests at four times the rate that the server can serve, one in ten of them marked |
//! | `prefix` | 20 000 connects per second from one address, and a few from another |
//! | `return` | all clients of a server that restarts, at once |
//! | `memory` | peers that read nothing and halves of frames, to the limit of memory |
//! | `burst` | peers that read nothing, twenty times that limit in a moment |

mod comeback;
mod flood;
mod heavy;
mod peer;
mod process;
pub mod rows;
mod server;
mod storm;

use std::time::Duration;

use ringserve::server::Driver;

use crate::client::Failure;
use crate::drill::options::OverloadOptions;
use crate::text::table;
use process::{Cpus, Process};
use rows::{Bar, Outcome, Row};
pub use server::serve;

/// The share of the time from which on the drill reports that the machine was busy.
const BUSY: f64 = 0.05;

/// Runs the requested rows, prints the result of each, and returns 1 if a bar was missed or a row
/// could not be measured.
pub fn run(options: &OverloadOptions, json: bool) -> Result<u8, Failure> {
    let cpus = Cpus::take()?;
    peer::raise_descriptors()?;
    if let Some(target) = options.target {
        let time = Duration::from_secs_f64(options.seconds);
        let outcomes = [flood::run(&target.to_string(), target.into(), time)?];
        print_all(&outcomes, json)?;
        return Ok(u8::from(outcomes.iter().any(Outcome::fails)));
    }
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
            // One storm is for both rows.
            if row == Row::Marked && asked(Row::Goodput) {
                continue;
            }
            tell(&format!("{row} on {name}"));
            let may_lack = options.driver.is_none() && driver == Driver::IoUring;
            outcomes.extend(match Process::start(&cpus, row, driver, options.micros, true) {
                Ok(process) => tried(row, &name, process, options, asked).unwrap_or_else(|failure| {
                    each_of(row, asked, |row| Outcome::failed(row, &name, &failure.0))
                }),
                Err(failure) if may_lack => {
                    each_of(row, asked, |row| Outcome::left_out(row, &name, &failure.0))
                }
                // The other rows are still of interest.
                Err(failure) => each_of(row, asked, |row| Outcome::failed(row, &name, &failure.0)),
            });
        }
    }
    if asked(Row::Goodput) {
        outcomes.extend(beside(&cpus, options, tell));
    }
    print_all(&outcomes, json)?;
    Ok(u8::from(outcomes.iter().any(Outcome::fails)))
}

/// Returns the same outcome for each row of a storm that was not measured: the table lists the row
/// of marked requests after goodput.
fn each_of(row: Row, asked: impl Fn(Row) -> bool, outcome: impl Fn(Row) -> Outcome) -> Vec<Outcome> {
    let marked = (row == Row::Goodput && asked(Row::Marked)).then_some(Row::Marked);
    [row].into_iter().chain(marked).map(outcome).collect()
}

/// Runs one row, with a server that was started for it.
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
            let storm = storm::run(process.addr(), options)?;
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
        Row::Burst => vec![heavy::burst(name, &mut process, time)?],
    };
    let told = process.told()?;
    outcomes.iter_mut().for_each(|outcome| outcome.starved = told.starved());
    Ok(outcomes)
}

/// Runs the storm with servers that shed nothing, or use other libraries, if those were built.
fn beside(cpus: &Cpus, options: &OverloadOptions, tell: impl Fn(&str)) -> Vec<Outcome> {
    let mut outcomes = Vec::new();
    let driver = options.driver.unwrap_or_default();
    tell("goodput of a server that sheds nothing, for comparison");
    let nothing = Process::start(cpus, Row::Goodput, driver, options.micros, false);
    outcomes.push(compared("sheds nothing", nothing, options));
    for rival in ["tokio-shed", "go-shed"] {
        let Some(program) = options.rivals.as_ref().map(|folder| folder.join(rival)) else { continue };
        if !program.exists() {
            let why = format!("{} is not there: `scripts/rivals {rival}` builds it", program.display());
            outcomes.push(Outcome::left_out(Row::Goodput, rival, why));
            continue;
        }
        tell(&format!("goodput of {rival}, for comparison"));
        outcomes.push(compared(rival, Process::start_rival(cpus, &program, options.micros), options));
    }
    outcomes.iter_mut().for_each(|outcome| outcome.beside = true);
    outcomes
}

/// Runs the storm with a server that was started for comparison, and ends it afterwards.
fn compared(name: &str, process: Result<Process, Failure>, options: &OverloadOptions) -> Outcome {
    match process.and_then(|process| storm::run(process.addr(), options)) {
        Ok(storm) => Outcome::of(Row::Goodput, name, storm.goodput_bars(), storm.to_string()),
        Err(failure) => Outcome::failed(Row::Goodput, name, failure.0),
    }
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
    fn storm_that_failed_leaves_both_of_its_rows_in_the_table() {
        let rows = |row, asked: &[Row]| -> Vec<&'static str> {
            let failed = |row| Outcome::failed(row, "epoll", "the server ended");
            each_of(row, |row| asked.contains(&row), failed).iter().map(|outcome| outcome.row).collect()
        };
        assert_eq!(rows(Row::Goodput, &Row::ALL), ["goodput", "marked"]);
        assert_eq!(rows(Row::Goodput, &[Row::Goodput]), ["goodput"]);
        assert_eq!(rows(Row::Marked, &[Row::Marked]), ["marked"]);
        assert_eq!(rows(Row::Memory, &Row::ALL), ["memory"]);
    }

    #[test]
    fn server_that_does_not_start_is_a_row_that_failed() {
        let options = OverloadOptions {
            only: Vec::new(),
            driver: None,
            times: 4.0,
            micros: 200,
            seconds: 0.1,
            settle: 0.1,
            rivals: None,
            target: None,
        };
        let outcome = compared("go-shed", Err(Failure("no such file".to_owned())), &options);
        assert!(outcome.failed && outcome.why == "no such file", "{outcome:?}");
    }
}
