//! Options of `fanout`.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use clap::builder::PossibleValuesParser;

use super::{OTHER_FILES, refused};
use crate::generator::Pace;
use crate::servers::{FANOUT_SERVERS, find};
use crate::steps::Shape;
use crate::{load, process};

/// Measure what it costs to send one message to many connections.
///
/// One connection sends a line, the server sends it to every listener, and when all have it the next one is sent. What is
/// printed is as for `load`, with a delivery for each request: CPU time of the server for one, deliveries a second, and
/// latency from the sending to each delivery. Every delivered byte is compared.
#[derive(Args)]
pub(crate) struct FanoutOptions {
    /// Servers, in this order [default: all that fan out].
    #[arg(long, value_delimiter = ',', value_parser = PossibleValuesParser::new(FANOUT_SERVERS.iter().map(|server| server.name)))]
    servers: Vec<String>,
    /// Listeners.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    listeners: u32,
    /// Bytes of the line, its end included.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(2..=65_536))]
    bytes: u32,
    /// Rounds; in each, every server is measured once.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Length of a measurement in seconds, 0.1 to 60.
    #[arg(long, default_value_t = 3.0)]
    seconds: f64,
    /// CPU for the servers.
    #[arg(long, default_value_t = 0)]
    server_cpu: usize,
    /// CPU for the generator.
    #[arg(long, default_value_t = 1)]
    cpu: usize,
    /// Write what was measured to this file too, as JSON.
    #[arg(long)]
    json: Option<PathBuf>,
}

impl FanoutOptions {
    pub(crate) fn plan(self) -> io::Result<load::Plan> {
        if self.rounds == 0 || !(0.1..=60.0).contains(&self.seconds) {
            return Err(refused("--rounds: 1 and more; --seconds: 0.1 to 60".to_owned()));
        }
        if self.cpu == self.server_cpu {
            return Err(refused(format!("--cpu: CPU {} is the server's", self.cpu)));
        }
        let files = process::raise_open_files()?;
        if u64::from(self.listeners) + OTHER_FILES > files {
            return Err(refused(format!(
                "--listeners {}: the hard limit of open files is {files}",
                self.listeners
            )));
        }
        let named: Vec<_> = self.servers.iter().filter_map(|name| find(name)).collect();
        let servers = if named.is_empty() { FANOUT_SERVERS.iter().collect() } else { named };
        Ok(load::Plan {
            targets: servers.into_iter().map(load::Target::Known).collect(),
            connections: self.listeners as usize,
            shape: Shape { bytes: self.bytes as usize, pipeline: 1, lines: true },
            pace: Pace::Fanout,
            server_cpu: self.server_cpu,
            cpus: vec![self.cpu],
            warm_up: Duration::from_millis(500),
            measured: Duration::from_secs_f64(self.seconds),
            rounds: self.rounds,
            json: self.json,
        })
    }
}
