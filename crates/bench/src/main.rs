//! Load generator, limit servers and comparison reports for ringserve.
//!
//! `ringserve-bench lockstep` prints the CPU time that each server of the table in `servers` spends
//! on a request; `ringserve-bench serve NAME` runs one of them by itself.

mod child;
mod compare;
mod cores;
mod generator;
mod idle;
mod load;
mod lockstep;
mod options;
mod process;
mod schedstat;
mod servers;
mod steps;
mod table;
mod usage;
mod websocket;
mod wire;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::options::{
    ChurnOptions, CompareOptions, CoresOptions, FanoutOptions, HoldOptions, IdleOptions, LoadOptions,
    LockstepOptions, ServeOptions,
};

/// Measures TCP servers against the limit that the kernel allows.
///
/// `lockstep` and `load` compare servers, which they start themselves; `lockstep` repeats best,
/// `load` has latencies and a server that runs freely. `serve` runs one server, for other tools.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Serve(ServeOptions),
    Lockstep(LockstepOptions),
    Load(LoadOptions),
    Churn(ChurnOptions),
    Compare(CompareOptions),
    Cores(CoresOptions),
    Fanout(FanoutOptions),
    Idle(IdleOptions),
    #[command(hide = true)]
    Hold(HoldOptions),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Serve(options) => options.run(),
        Command::Idle(options) => options.plan().and_then(|plan| idle::run(&plan)),
        Command::Hold(options) => options.run(),
        Command::Lockstep(options) => options.plan().and_then(|plan| lockstep::run(&plan)),
        Command::Churn(options) => options.plan().and_then(|plan| load::run(&plan)),
        Command::Compare(options) => options.plan().and_then(|plan| compare::run(&plan)),
        Command::Cores(options) => options.plan().and_then(|plan| cores::run(&plan)),
        Command::Fanout(options) => options.plan().and_then(|plan| load::run(&plan)),
        Command::Load(options) => options.plan().and_then(|plan| load::run(&plan)),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("ringserve-bench: {error}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        super::Cli::command().debug_assert();
    }
}
