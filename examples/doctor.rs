//! Obstacles to a server on this machine, reported before it starts.
//!
//! ```text
//! cargo run --example doctor -- --for connections=1000000,accepts=20000
//! ```
//!
//! Each finding has the value, what is needed with its formula, what happens otherwise, and the
//! command. The program ends with 1 if there is an error, so a script can ask it before a start.

use std::process::ExitCode;

use clap::Parser;
use ringserve::Server;
use ringserve::doctor::{Severity, Workload, checks};

#[derive(Parser)]
struct Options {
    /// Requirements on the server: connections, accepts (a second), stall and round_trip (in
    /// milliseconds), session (in bytes), upstreams (to one address)
    #[arg(long = "for", value_name = "NAME=NUMBER,..", default_value = "")]
    expected: Workload,
    /// Shards; by default one for each CPU
    #[arg(long)]
    shards: Option<usize>,
}

fn main() -> ExitCode {
    let options = Options::parse();
    // Nothing listens: the server is only asked about a start.
    let server = Server::bind("127.0.0.1:7000").shards(options.shards);
    let findings = server.doctor_for(&options.expected);
    for finding in &findings {
        println!("{:<5} {finding}", finding.severity);
    }
    println!("{} findings of {} checks", findings.len(), checks().len());
    let has_error = findings.iter().any(|finding| finding.severity == Severity::Error);
    ExitCode::from(u8::from(has_error))
}
