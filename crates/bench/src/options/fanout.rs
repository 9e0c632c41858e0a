//! Options of `fanout`.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use clap::builder::PossibleValuesParser;

use super::measuring::Measuring;
use super::refused;
use crate::generator::Pace;
use crate::load;
use crate::process;
use crate::servers::{FANOUT_SERVERS, find};
use crate::steps::Shape;
use crate::wire::Layer;

/// Measure the cost of sending one message to many connections.
///
/// One connection sends a line, the server sends it to every listener, and when all have it the
/// next one is sent. The output is that of `load`, with a delivery for each request: CPU time of
/// the server for one, deliveries per second, and latency from the sending to each delivery. Every
/// delivered byte is compared.
#[derive(Args)]
pub(crate) struct FanoutOptions {
    /// Servers, in this order [default: all that fan out].
    #[arg(long, value_delimiter = ',', value_parser = PossibleValuesParser::new(FANOUT_SERVERS.iter().map(|server| server.name)))]
    servers: Vec<String>,
    /// Listeners.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    listeners: u32,
    /// Bytes of the line, including its end.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(2..=65_536))]
    bytes: u32,
    #[command(flatten)]
    measuring: Measuring,
    /// Write the results to this file too, as JSON.
    #[arg(long)]
    json: Option<PathBuf>,
}

impl FanoutOptions {
    pub(crate) fn plan(self) -> io::Result<load::Plan> {
        self.measuring.check()?;
        if self.measuring.cpus.len() > 1 {
            return Err(refused("--cpus: one, since who sends must see every delivery".to_owned()));
        }
        process::enough_files("--listeners", self.listeners as usize)?;
        let named: Vec<_> = self.servers.iter().filter_map(|name| find(name)).collect();
        let servers = if named.is_empty() { FANOUT_SERVERS.iter().collect() } else { named };
        Ok(load::Plan {
            targets: servers.into_iter().map(load::Target::Known).collect(),
            connections: self.listeners as usize,
            shape: Shape { bytes: self.bytes as usize, pipeline: 1, lines: true, layer: Layer::Plain },
            pace: Pace::Fanout,
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
