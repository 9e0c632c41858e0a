//! Inspection of a running ringserve server through its admin endpoint, and of the machine without
//! one.
//!
//! ```text
//! ringserve-ctl top                                  the server on the screen, each second
//! ringserve-ctl connections --by outbox              who holds most
//! ringserve-ctl stalls                               what held shards up
//! ringserve-ctl doctor --for connections=1000000     this machine, before a server is there
//! ringserve-ctl admission                            the limits on admission, and orders that change them
//! ringserve-ctl drill                                plants ten causes, and checks whether they are named
//! ringserve-ctl drill overload                       more than a server can do, in six ways, each compared with a bar
//! ```

mod admission;
mod args;
mod client;
mod doctor;
mod drill;
mod lists;
mod screen;
mod text;
mod top;

use std::process::ExitCode;

use clap::Parser;

use args::{Cli, Command};
use client::{Endpoint, Failure};
use drill::options::Drill;

/// The exit code of a command that failed, and of a command line that is wrong.
const FAILED: u8 = 3;

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are not failures.
            let code = if error.use_stderr() { FAILED } else { 0 };
            let _ = error.print();
            return ExitCode::from(code);
        }
    };
    match run(&cli) {
        Ok(code) => ExitCode::from(code),
        Err(failure) => {
            eprintln!("ringserve-ctl: {failure}");
            ExitCode::from(FAILED)
        }
    }
}

fn run(cli: &Cli) -> Result<u8, Failure> {
    let token = std::env::var(args::TOKEN).ok().filter(|token| !token.is_empty());
    let place = cli.place().map_err(Failure)?;
    let endpoint = || Endpoint::new(place.clone(), token.clone());
    match &cli.command {
        Command::Top(options) => top::run(&endpoint(), options, cli.json),
        Command::Connections(options) => lists::connections(&endpoint(), options, cli.json),
        Command::Admission(options) => admission::run(&endpoint(), options, cli.json),
        Command::Stalls => lists::stalls(&endpoint(), cli.json),
        Command::Doctor(options) => {
            let there = cli.at.is_some().then(endpoint);
            doctor::run(there.as_ref(), options, cli.json)
        }
        Command::Close { id } => lists::close(&endpoint(), id),
        Command::Drain => lists::drain(&endpoint()),
        Command::Drill(options) => match &options.what {
            Some(Drill::Overload(options)) => drill::overload::run(options, cli.json),
            None => drill::run(options, cli.json),
        },
        Command::OverloadServer { row, driver, micros, sheds } => {
            drill::overload::serve(*row, *driver, *micros, *sheds)
        }
        Command::DrillServer { cause, admin } => drill::serve(*cause, admin),
    }
}
