//! Options shared by the subcommands that measure a server on one CPU and generate its work on
//! others.

use std::io;
use std::time::Duration;

use clap::Args;

use super::refused;

/// Length, repetition and CPUs of a measurement.
#[derive(Args)]
pub(super) struct Measuring {
    /// Rounds; in each, every server is measured once. 5 and more for figures to be published.
    #[arg(long, default_value_t = 5)]
    pub(super) rounds: usize,
    /// Length of a measurement in seconds, 0.1 to 600.
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// CPU for the servers.
    #[arg(long, default_value_t = 0)]
    pub(super) server_cpu: usize,
    /// CPUs for the generator, a thread on each.
    #[arg(long, value_delimiter = ',', default_value = "1")]
    pub(super) cpus: Vec<usize>,
}

impl Measuring {
    pub(super) fn check(&self) -> io::Result<()> {
        if self.rounds == 0 || self.cpus.is_empty() {
            return Err(refused("--rounds and --cpus: 1 and more".to_owned()));
        }
        if !(0.1..=600.0).contains(&self.seconds) {
            return Err(refused("--seconds: 0.1 to 600".to_owned()));
        }
        if self.cpus.contains(&self.server_cpu) {
            return Err(refused(format!("--cpus: CPU {} is the server's", self.server_cpu)));
        }
        Ok(())
    }

    pub(super) fn time(&self) -> Duration {
        Duration::from_secs_f64(self.seconds)
    }
}
