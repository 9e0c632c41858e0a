//! Options of `churn`.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use clap::builder::PossibleValuesParser;

use super::measuring::Measuring;
use super::speaking::Speaking;
use super::{chosen_beside, refused};
use crate::generator::Pace;
use crate::load;
use crate::servers::{self, Speaks};
use crate::steps::Shape;

/// Measure the cost of accepting, serving and closing a connection.
///
/// Each connection is made for one round trip: connect, shake hands if --tls or --websocket
/// requires it, send 64 bytes, receive them, close. The output is that of `load`, with a connection
/// for each request: CPU time of the server for one, and latency from the connect to the reply.
/// Connections come from 250 loopback addresses in turn, since a port is not free again for a
/// minute.
#[derive(Args)]
pub(crate) struct ChurnOptions {
    /// Servers, in this order [default: all that echo raw bytes, or speak the requested layer].
    #[arg(long, value_delimiter = ',', value_parser = PossibleValuesParser::new(servers::echoing().map(|server| server.name)))]
    servers: Vec<String>,
    /// Round trips in progress at once.
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    at_once: u32,
    /// Measure the rivals in this directory too; `scripts/rivals` builds them to target/rivals.
    #[arg(long)]
    rivals: Option<PathBuf>,
    /// A server that already runs, instead: a loopback address and port.
    #[arg(long, conflicts_with_all = ["servers", "rivals"])]
    target: Option<SocketAddr>,
    /// Its process, for its CPU time.
    #[arg(long, requires = "target")]
    pid: Option<u32>,
    #[command(flatten)]
    speaking: Speaking,
    #[command(flatten)]
    measuring: Measuring,
    /// Write the results to this file too, as JSON.
    #[arg(long)]
    json: Option<PathBuf>,
}

impl ChurnOptions {
    pub(crate) fn plan(self) -> io::Result<load::Plan> {
        self.measuring.check()?;
        let speaks_lines =
            |name: &&String| servers::find(name).is_some_and(|one| one.speaks == Speaks::Lines);
        if let Some(name) = self.servers.iter().find(speaks_lines) {
            return Err(refused(format!("{name} speaks lines, and churn does not")));
        }
        let layer = self.speaking.layer();
        let targets = match self.target {
            Some(address) => vec![load::Target::Running { address, pid: self.pid }],
            None => chosen_beside(self.rivals.as_deref(), &self.servers, layer, false)?,
        };
        Ok(load::Plan {
            targets,
            connections: self.at_once as usize,
            shape: Shape { bytes: 64, pipeline: 1, lines: false, layer },
            pace: Pace::Churn,
            measured: self.measuring.time(),
            rounds: self.measuring.rounds,
            server_cpu: self.measuring.server_cpu,
            cpus: self.measuring.cpus,
            warm_up: Duration::from_millis(500),
            firehose: false,
            newcomers: None,
            counts_calls: true,
            json: self.json,
        })
    }
}
