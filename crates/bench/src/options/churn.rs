//! Options of `churn`.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use clap::builder::PossibleValuesParser;

use super::{known, refused};
use crate::generator::Pace;
use crate::load;
use crate::servers::{SERVERS, Server, Speaks};
use crate::steps::Shape;

/// Measure what it costs to accept, serve and close a connection.
///
/// Each connection is made for one round trip: connect, send 64 bytes, receive them, close. What is printed is as for
/// `load`, with a connection for each request: CPU time of the server for one, and latency from the connect to the reply.
/// Connections come from 250 loopback addresses in turn, since a port is not free again for a minute.
#[derive(Args)]
pub(crate) struct ChurnOptions {
    /// Servers, in this order [default: all that echo raw bytes].
    #[arg(long, value_delimiter = ',', value_parser = PossibleValuesParser::new(SERVERS.iter().map(|server| server.name)))]
    servers: Vec<String>,
    /// Round trips under way at once.
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    at_once: u32,
    /// Rounds; in each, every server is measured once.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Length of a measurement in seconds, 0.1 to 60.
    #[arg(long, default_value_t = 3.0)]
    seconds: f64,
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

impl ChurnOptions {
    pub(crate) fn plan(self) -> io::Result<load::Plan> {
        if self.rounds == 0 || self.cpus.is_empty() {
            return Err(refused("--rounds and --cpus: 1 and more".to_owned()));
        }
        if self.cpus.contains(&self.server_cpu) {
            return Err(refused(format!("--cpus: CPU {} is the server's", self.server_cpu)));
        }
        if !(0.1..=60.0).contains(&self.seconds) {
            return Err(refused("--seconds: 0.1 to 60".to_owned()));
        }
        let named = self.servers.iter().map(|name| known(name)).collect::<io::Result<Vec<_>>>()?;
        let raw = |server: &&Server| server.speaks == Speaks::Raw;
        if let Some(server) = named.iter().find(|server| !raw(server)) {
            return Err(refused(format!("{} speaks lines, and churn does not", server.name)));
        }
        let servers = if named.is_empty() { SERVERS.iter().filter(raw).collect() } else { named };
        Ok(load::Plan {
            targets: servers.into_iter().map(load::Target::Known).collect(),
            connections: self.at_once as usize,
            shape: Shape { bytes: 64, pipeline: 1, lines: false },
            pace: Pace::Churn,
            server_cpu: self.server_cpu,
            cpus: self.cpus,
            warm_up: Duration::from_millis(500),
            measured: Duration::from_secs_f64(self.seconds),
            rounds: self.rounds,
            json: self.json,
        })
    }
}
