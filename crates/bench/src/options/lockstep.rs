//! Options of `lockstep`.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use clap::builder::PossibleValuesParser;

use super::speaking::{Speaking, check_bytes};
use super::{STEP_BYTES_MAX, chosen_beside, refused};
use crate::lockstep::{Plan, RoundEnd};
use crate::servers::{self, PROXY_SERVERS};
use crate::steps::Shape;

/// Compare the CPU time that servers spend on a request, in lock step.
///
/// Generator and server share one CPU. In each step the generator sends on all connections and then
/// waits for all replies, so every step gives the server the same batch, and its CPU per request,
/// taken from /proc/PID/task/*/schedstat, repeats to a few per cent. Compare ratios within one run:
/// the microseconds belong to the machine and its load.
///
/// The output for each server: the median over the rounds, the smallest and largest round, the
/// ratio to the first server (median of the ratios of each round), the ratio of the first quartiles
/// with the value it stays below with a confidence of 95 % (use 31 rounds or more: other programs
/// on the machine make rounds more expensive and never cheaper), and how often it was put on the
/// CPU for a step, which is 1 while the batches are fixed.
///
/// Every echoed byte is compared. An error stops the run and all servers.
#[derive(Args)]
pub(crate) struct LockstepOptions {
    /// Numbers of connections, one measurement for each.
    #[arg(long, value_delimiter = ',', default_value = "1,50,1000")]
    connections: Vec<usize>,
    /// Bytes of a message.
    #[arg(long, default_value_t = 64)]
    bytes: usize,
    /// Messages that each connection sends together in a step; each counts as one request.
    #[arg(long, default_value_t = 1)]
    pipeline: usize,
    #[command(flatten)]
    speaking: Speaking,
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
    /// Steps to measure in a round, instead of a length of time.
    #[arg(long, conflicts_with = "seconds_per_round")]
    steps: Option<u64>,
    /// Servers, the one to compare with first [default: all that speak the requested layer, except
    /// proxies].
    #[arg(long, value_delimiter = ',', value_parser = PossibleValuesParser::new(servers::echoing().chain(PROXY_SERVERS).map(|server| server.name)))]
    servers: Vec<String>,
    /// Measure the rivals in this directory too; `scripts/rivals` builds them to target/rivals.
    #[arg(long)]
    rivals: Option<PathBuf>,
}

impl LockstepOptions {
    /// The plan that the options describe, if they make sense.
    pub(crate) fn plan(self) -> io::Result<Plan> {
        let layer = self.speaking.layer();
        let shape = Shape { bytes: self.bytes, pipeline: self.pipeline, lines: self.lines, layer };
        check_bytes(shape)?;
        let bytes_min = if self.lines { 2 } else { 1 };
        if self.bytes < bytes_min {
            return Err(refused(format!("--bytes {}: at least {bytes_min}", self.bytes)));
        }
        if self.pipeline == 0 || shape.step_bytes() > STEP_BYTES_MAX {
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
        let servers = chosen_beside(self.rivals.as_deref(), &self.servers, layer, self.lines)?;
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
