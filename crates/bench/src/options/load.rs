//! Options of `load`.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use clap::builder::PossibleValuesParser;

use super::measuring::Measuring;
use super::speaking::{Speaking, check_bytes};
use super::{STEP_BYTES_MAX, chosen_beside, refused};
use crate::generator::Pace;
use crate::load;
use crate::process;
use crate::servers::{self, PROXY_SERVERS};
use crate::steps::Shape;

/// Put servers under load from other CPUs.
///
/// In a closed loop each connection sends its messages and waits for all replies before it sends
/// again: this measures the server's capacity. In an open loop (--rate) messages are sent at fixed
/// times whatever happened to earlier ones, and latency counts from the time at which a message was
/// due, so that a server that stalls is charged for all that had to wait.
///
/// The figure to compare is the server's CPU time for a request; requests per second and latencies
/// depend on other work of the machine. Printed are medians over the rounds, and the ratio to the
/// first server. Every reply is compared with the sent bytes. A server marked * was not the
/// bottleneck in one of its rounds, the generator was. System calls are counted with `perf` for
/// half a second after the measurement, if that is installed and allowed.
#[derive(Args)]
pub(crate) struct LoadOptions {
    /// Servers to start, in this order [default: all that speak the requested layer, except
    /// proxies].
    #[arg(long, value_delimiter = ',', value_parser = PossibleValuesParser::new(servers::echoing().chain(PROXY_SERVERS).map(|server| server.name)))]
    servers: Vec<String>,
    /// Measure the rivals in this directory too; `scripts/rivals` builds them to target/rivals.
    #[arg(long)]
    rivals: Option<PathBuf>,
    /// A server that already runs, instead: a loopback address and port.
    #[arg(long, conflicts_with_all = ["servers", "rivals"])]
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
    #[command(flatten)]
    speaking: Speaking,
    /// Make the messages lines: the last of their bytes is a newline.
    #[arg(long)]
    lines: bool,
    /// Messages per second of an open loop, over all connections.
    #[arg(long, conflicts_with = "pipeline")]
    rate: Option<f64>,
    /// One more connection that keeps 16 KiB messages moving back and forth, so that others are
    /// affected. Neither its messages nor their latencies are counted, and the CPU time is the
    /// server's for both.
    #[arg(long, conflicts_with = "lines")]
    firehose: bool,
    /// Additional connections per second, each with a handshake if --tls requires it and one
    /// message of as many bytes, so that others are affected. Their latencies are reported
    /// separately from those of the messages; the CPU time is the server's for both.
    #[arg(long, conflicts_with = "lines", value_name = "RATE")]
    newcomers: Option<f64>,
    /// Seconds of load before the measurement.
    #[arg(long, default_value_t = 1.0)]
    warm_up: f64,
    #[command(flatten)]
    measuring: Measuring,
    /// Write the results to this file too, as JSON.
    #[arg(long)]
    json: Option<PathBuf>,
}

impl LoadOptions {
    pub(crate) fn plan(self) -> io::Result<load::Plan> {
        let layer = self.speaking.layer();
        let shape = Shape { bytes: self.bytes, pipeline: self.pipeline, lines: self.lines, layer };
        let bytes_min = if self.lines { 2 } else { 1 };
        if !(bytes_min..=16 << 20).contains(&self.bytes) {
            return Err(refused(format!("--bytes {}: {bytes_min} to {}", self.bytes, 16 << 20)));
        }
        check_bytes(shape)?;
        if self.pipeline == 0 || (self.pipeline > 1 && shape.step_bytes() > STEP_BYTES_MAX) {
            return Err(refused(format!(
                "--pipeline {} of --bytes {}: what is sent together is 1 to {STEP_BYTES_MAX} bytes",
                self.pipeline, self.bytes
            )));
        }
        self.measuring.check()?;
        if self.connections == 0 {
            return Err(refused("--connections: 1 and more".to_owned()));
        }
        if !(0.0..=600.0).contains(&self.warm_up) {
            return Err(refused("--warm-up: 0 to 600".to_owned()));
        }
        if self.rate.is_some_and(|rate| !(1.0..=1e8).contains(&rate)) {
            return Err(refused("--rate: 1 to 100000000".to_owned()));
        }
        if self.newcomers.is_some_and(|rate| !(1.0..=1e5).contains(&rate)) {
            return Err(refused("--newcomers: 1 to 100000".to_owned()));
        }
        process::enough_files("--connections", self.connections)?;
        let targets = match self.target {
            Some(address) => vec![load::Target::Running { address, pid: self.pid }],
            None => chosen_beside(self.rivals.as_deref(), &self.servers, layer, self.lines)?,
        };
        Ok(load::Plan {
            targets,
            connections: self.connections,
            shape,
            pace: self.rate.map_or(Pace::Closed, Pace::Open),
            measured: self.measuring.time(),
            rounds: self.measuring.rounds,
            server_cpu: self.measuring.server_cpu,
            cpus: self.measuring.cpus,
            warm_up: Duration::from_secs_f64(self.warm_up),
            firehose: self.firehose,
            newcomers: self.newcomers,
            // Counting takes time, and these connections are here for the latencies of others.
            counts_calls: self.newcomers.is_none(),
            json: self.json,
        })
    }
}
