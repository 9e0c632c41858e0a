//! Load generator, limit servers and comparison reports for ringserve.
//!
//! `ringserve-bench lockstep` prints how much CPU each server of the table in `servers` spends on a
//! request; `ringserve-bench serve NAME` runs one of them by itself.

mod child;
mod generator;
mod idle;
mod load;
mod lockstep;
mod process;
mod schedstat;
mod servers;
mod steps;
mod table;
mod usage;

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::builder::PossibleValuesParser;
use clap::{Args, Parser, Subcommand};

use crate::generator::Pace;
use crate::lockstep::{Plan, RoundEnd};
use crate::servers::{SERVERS, Server, Speaks};
use crate::steps::Shape;

/// Most bytes of one connection in one step. The generator sends all before it reads any: more than
/// fits into the socket buffers of both sides would stand still.
const STEP_BYTES_MAX: usize = 64 * 1024;

/// Descriptors of this process that are not connections: pipes, `/proc`, standard streams.
const OTHER_FILES: u64 = 64;

/// Measures TCP servers against the limit of what the kernel allows.
///
/// `lockstep` and `load` compare servers, which they start themselves; `lockstep` repeats best, `load` has
/// latencies and a server that is free to run. `serve` runs one server, to be looked at with other tools.
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
    Idle(IdleOptions),
}

/// Run one echo server in the foreground until it is killed.
///
/// The first line of output says where it listens: `listening 127.0.0.1:43211`.
#[derive(Args)]
struct ServeOptions {
    /// Which server.
    #[arg(value_parser = PossibleValuesParser::new(SERVERS.iter().map(|server| server.name)))]
    server: String,
    /// Loopback address to listen on; port 0 takes a free one.
    #[arg(long, default_value = "127.0.0.1:0")]
    listen: SocketAddr,
    /// CPU to run on [default: any].
    #[arg(long)]
    cpu: Option<usize>,
    /// End with the process that started it.
    #[arg(long, hide = true)]
    child: bool,
    /// Never preempt the generator.
    #[arg(long, hide = true)]
    lock_step: bool,
}

/// Compare the CPU that servers spend on a request, in lock step.
///
/// Generator and server share one CPU. In each step the generator sends on all connections and then
/// waits for all replies, so every step gives the server the same batch, and its CPU per request,
/// taken from /proc/PID/task/*/schedstat, repeats to a few per cent. Compare ratios within one run:
/// the microseconds belong to the machine and its load.
///
/// What is printed for each server: the median over the rounds, the smallest and largest round, the
/// ratio to the first server (median of the ratios of each round), and how often it was put on the
/// CPU for a step, which is 1 while the batches are fixed.
///
/// Every echoed byte is compared. An error stops the run and all servers.
#[derive(Args)]
struct LockstepOptions {
    /// Numbers of connections, one measurement for each.
    #[arg(long, value_delimiter = ',', default_value = "1,50,1000")]
    connections: Vec<usize>,
    /// Bytes of a message.
    #[arg(long, default_value_t = 64)]
    bytes: usize,
    /// Messages that each connection sends together in a step; each counts as one request.
    #[arg(long, default_value_t = 1)]
    pipeline: usize,
    /// Make the messages lines: the last of their bytes is a newline.
    #[arg(long)]
    lines: bool,
    /// Rounds. In each, every server is measured once, in an order that changes.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// CPU for generator and servers.
    #[arg(long, default_value_t = 0)]
    cpu: usize,
    /// Length of a server's measured part of a round, up to 60; a fifth more is warm-up.
    #[arg(long, default_value_t = 1.5)]
    seconds_per_round: f64,
    /// Measure so many steps in a round instead of a length of time.
    #[arg(long, conflicts_with = "seconds_per_round")]
    steps: Option<u64>,
    /// Servers, the one to compare with first [default: all that speak what is sent].
    #[arg(long, value_delimiter = ',', value_parser = PossibleValuesParser::new(SERVERS.iter().map(|server| server.name)))]
    servers: Vec<String>,
}

/// Measure what an idle connection costs.
///
/// Each connection exchanges one line and then stays silent. What is printed is the growth of the server's
/// anonymous memory (`RssAnon`) from 1000 connections to all of them, divided by those opened meanwhile: user
/// memory, not the kernel's. And the CPU time the server uses while nothing happens.
#[derive(Args)]
struct IdleOptions {
    /// Connections, from 1001 up to the descriptors of this process and the ports of one address.
    #[arg(long, default_value_t = 19_000, value_parser = clap::value_parser!(u32).range(1001..=28_000))]
    connections: u32,
    /// Bytes of the line each connection exchanges.
    #[arg(long, default_value_t = 16 * 1024, value_parser = clap::value_parser!(u32).range(2..=65_536))]
    bytes: u32,
    /// Seconds to watch the idle server.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=600))]
    seconds: u64,
    /// CPU for generator and servers.
    #[arg(long, default_value_t = 0)]
    cpu: usize,
    /// Servers [default: all].
    #[arg(long, value_delimiter = ',', value_parser = PossibleValuesParser::new(SERVERS.iter().map(|server| server.name)))]
    servers: Vec<String>,
}

/// Put servers under load from other CPUs.
///
/// In a closed loop each connection sends its messages and waits for all replies before it sends again: what the server can
/// do. In an open loop (--rate) messages leave at fixed times whatever became of those before, and latency counts from the
/// time at which a message was due, so that a server that stands still is charged for all that had to wait.
///
/// The measure to compare is the server's CPU time for a request; requests a second and latencies depend on what else the
/// machine does. Every reply is compared with what was sent. A line marked * was bound by the generator. System calls are
/// counted with `perf` for half a second after the measurement, where that is installed and allowed.
#[derive(Args)]
struct LoadOptions {
    /// Servers to start, in this order [default: all that speak what is sent].
    #[arg(long, value_delimiter = ',', value_parser = PossibleValuesParser::new(SERVERS.iter().map(|server| server.name)))]
    servers: Vec<String>,
    /// A server that runs already, instead: a loopback address and port.
    #[arg(long, conflicts_with = "servers")]
    target: Option<SocketAddr>,
    /// Its process, for its CPU time.
    #[arg(long, requires = "target")]
    pid: Option<u32>,
    /// Connections.
    #[arg(long, default_value_t = 50)]
    connections: usize,
    /// Bytes of a message, up to 16 MiB.
    #[arg(long, default_value_t = 64)]
    bytes: usize,
    /// Messages that each connection sends together; in a closed loop.
    #[arg(long, default_value_t = 1)]
    pipeline: usize,
    /// Make the messages lines: the last of their bytes is a newline.
    #[arg(long)]
    lines: bool,
    /// An open loop with so many messages a second over all connections.
    #[arg(long, conflicts_with = "pipeline")]
    rate: Option<f64>,
    /// Rounds; in each, every server is measured once.
    #[arg(long, default_value_t = 1)]
    rounds: usize,
    /// Length of a measurement in seconds, 0.1 to 600.
    #[arg(long, default_value_t = 5.0)]
    seconds: f64,
    /// Seconds of load before it.
    #[arg(long, default_value_t = 1.0)]
    warm_up: f64,
    /// CPU for the servers.
    #[arg(long, default_value_t = 0)]
    server_cpu: usize,
    /// CPUs for the generator, a thread on each.
    #[arg(long, value_delimiter = ',', default_value = "1")]
    cpus: Vec<usize>,
    /// Write what was measured to this file too, as JSON.
    #[arg(long)]
    json: Option<PathBuf>,
}

impl LoadOptions {
    fn plan(self) -> io::Result<load::Plan> {
        let shape = Shape { bytes: self.bytes, pipeline: self.pipeline, lines: self.lines };
        let bytes_min = if self.lines { 2 } else { 1 };
        if !(bytes_min..=16 << 20).contains(&self.bytes) {
            return Err(refused(format!("--bytes {}: {bytes_min} to {}", self.bytes, 16 << 20)));
        }
        if self.pipeline == 0 || (self.pipeline > 1 && shape.step_bytes() > STEP_BYTES_MAX) {
            return Err(refused(format!(
                "--pipeline {} of --bytes {}: what is sent together is 1 to {STEP_BYTES_MAX} bytes",
                self.pipeline, self.bytes
            )));
        }
        if self.connections == 0 || self.rounds == 0 || self.cpus.is_empty() {
            return Err(refused("--connections, --rounds and --cpus: 1 and more".to_owned()));
        }
        if self.cpus.contains(&self.server_cpu) && self.target.is_none() {
            return Err(refused(format!("--cpus: CPU {} is the server's", self.server_cpu)));
        }
        if !(0.1..=600.0).contains(&self.seconds) || !(0.0..=600.0).contains(&self.warm_up) {
            return Err(refused("--seconds: 0.1 to 600; --warm-up: 0 to 600".to_owned()));
        }
        if self.rate.is_some_and(|rate| !(1.0..=1e8).contains(&rate)) {
            return Err(refused("--rate: 1 to 100000000".to_owned()));
        }
        let files = process::raise_open_files()?;
        if self.connections as u64 + OTHER_FILES > files {
            return Err(refused(format!(
                "--connections {}: the hard limit of open files is {files}; raise it (ulimit -Hn) or ask for fewer",
                self.connections
            )));
        }
        let fits = |server: &&Server| self.lines || server.speaks == Speaks::Raw;
        let targets = match (self.target, self.servers.is_empty()) {
            (Some(address), _) => vec![load::Target::Running { address, pid: self.pid }],
            (None, true) => SERVERS.iter().filter(fits).map(load::Target::Known).collect(),
            (None, false) => {
                let named = self.servers.iter().map(|name| known(name)).collect::<io::Result<Vec<_>>>()?;
                if let Some(server) = named.iter().find(|server| !fits(server)) {
                    return Err(refused(format!("{} speaks lines: add --lines", server.name)));
                }
                named.into_iter().map(load::Target::Known).collect()
            }
        };
        Ok(load::Plan {
            targets,
            connections: self.connections,
            shape,
            pace: self.rate.map_or(Pace::Closed, Pace::Open),
            server_cpu: self.server_cpu,
            cpus: self.cpus,
            warm_up: Duration::from_secs_f64(self.warm_up),
            measured: Duration::from_secs_f64(self.seconds),
            rounds: self.rounds,
            json: self.json,
        })
    }
}

impl IdleOptions {
    fn plan(self) -> io::Result<idle::Plan> {
        process::raise_open_files()?;
        let named = self.servers.iter().map(|name| known(name)).collect::<io::Result<Vec<_>>>()?;
        Ok(idle::Plan {
            servers: if named.is_empty() { SERVERS.iter().collect() } else { named },
            connections: self.connections as usize,
            bytes: self.bytes as usize,
            cpu: self.cpu,
            seconds: self.seconds,
        })
    }
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Serve(options) => serve(&options),
        Command::Idle(options) => options.plan().and_then(|plan| idle::run(&plan)),
        Command::Lockstep(options) => options.plan().and_then(|plan| lockstep::run(&plan)),
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

fn serve(options: &ServeOptions) -> io::Result<()> {
    let server = known(&options.server)?;
    process::raise_open_files()?;
    if let Some(cpu) = options.cpu {
        process::pin_to(cpu)?;
    }
    if options.child {
        process::die_with_parent()?;
    }
    if options.lock_step {
        process::set_batch_policy()?;
    }
    servers::serve(server, options.listen)
}

impl LockstepOptions {
    /// The plan that the options describe, if they make sense.
    fn plan(self) -> io::Result<Plan> {
        let shape = Shape { bytes: self.bytes, pipeline: self.pipeline, lines: self.lines };
        let bytes_min = if self.lines { 2 } else { 1 };
        if self.bytes < bytes_min {
            return Err(refused(format!("--bytes {}: at least {bytes_min}", self.bytes)));
        }
        if self.pipeline == 0 || self.bytes.saturating_mul(self.pipeline) > STEP_BYTES_MAX {
            return Err(refused(format!(
                "--pipeline {} of --bytes {}: one step of a connection is 1 to {STEP_BYTES_MAX} bytes",
                self.pipeline, self.bytes
            )));
        }
        if self.connections.is_empty() || self.connections.contains(&0) {
            return Err(refused("--connections: numbers of 1 and more".to_owned()));
        }
        if self.rounds == 0 || self.steps == Some(0) {
            return Err(refused("--rounds and --steps: 1 and more".to_owned()));
        }
        if !(0.001..=60.0).contains(&self.seconds_per_round) {
            return Err(refused("--seconds-per-round: 0.001 to 60".to_owned()));
        }
        let round_end = match self.steps {
            Some(steps) => RoundEnd::Steps(steps),
            None => RoundEnd::After(Duration::from_secs_f64(self.seconds_per_round)),
        };
        let fits = |server: &&Server| self.lines || server.speaks == Speaks::Raw;
        let mut servers: Vec<&'static Server> = Vec::new();
        for name in &self.servers {
            let server = known(name)?;
            if !fits(&server) {
                return Err(refused(format!("{name} speaks lines: add --lines")));
            }
            servers.push(server);
        }
        if servers.is_empty() {
            servers = SERVERS.iter().filter(fits).collect();
        }
        Ok(Plan {
            connections: self.connections,
            shape,
            rounds: self.rounds,
            cpu: self.cpu,
            round_end,
            servers,
        })
    }
}

fn known(name: &str) -> io::Result<&'static Server> {
    servers::find(name).ok_or_else(|| refused(format!("there is no server {name}")))
}

fn refused(why: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, why)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        super::Cli::command().debug_assert();
    }
}
