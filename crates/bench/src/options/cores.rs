//! Options of `cores`.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use clap::builder::PossibleValuesParser;

use super::refused;
use crate::cores::{Plan, WORKS, split_cpus};
use crate::process;

/// Measure the gain from more cores.
///
/// Runs echo, framed lines, GETs of `example-kv`, HTTP and connections of one round trip on 1, 2, 4
/// and 8 shards, each on a separate CPU, and tokio's work-stealing runtime and Go's on as many. The
/// generator has a thread on each of the CPUs that no server gets: half of them, so that its part
/// is the same for every number of shards. If the machine reports siblings of a core, servers get
/// one of each core and the generator the other.
///
/// Printed for each: requests per second; the CPU time of the server for one; the efficiency, which
/// is the requests per second divided by as many times those of one shard; the same by CPU time,
/// which is valid even if the generator was the bottleneck (marked *); and the skew, the CPU time
/// of the busiest thread divided by the mean of as many threads as there are shards.
///
/// The kernel assigns connections to shards by a hash of their addresses, so few connections have a
/// larger skew than many.
#[derive(Args)]
pub(crate) struct CoresOptions {
    /// Numbers of shards [default: 1, 2, 4 and 8, as far as half of the CPUs go].
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u16).range(1..=512))]
    shards: Vec<u16>,
    /// Work [default: all].
    #[arg(long, value_delimiter = ',', value_parser = PossibleValuesParser::new(WORKS.iter().map(|work| work.name)))]
    works: Vec<String>,
    /// Connections per shard.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=2000))]
    connections: u32,
    /// Length of a measurement in seconds, 0.1 to 60.
    #[arg(long, default_value_t = 1.5)]
    seconds: f64,
    /// Rounds; in each, every server is measured once with each number of shards.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=100))]
    rounds: u16,
    /// Directory of `example-kv`, `tokio-multi` and `go-net` [default: that of this program].
    /// Missing ones are left out.
    #[arg(long)]
    programs: Option<PathBuf>,
    /// File for the results, as JSON.
    #[arg(long, default_value = "many-cores.json")]
    out: PathBuf,
}

impl CoresOptions {
    pub(crate) fn plan(self) -> io::Result<Plan> {
        if !(0.1..=60.0).contains(&self.seconds) {
            return Err(refused("--seconds: 0.1 to 60".to_owned()));
        }
        process::raise_open_files()?;
        let (servers, generator) = split_cpus()?;
        let mut shards: Vec<usize> = self.shards.into_iter().map(usize::from).collect();
        if shards.is_empty() {
            shards = [1, 2, 4, 8].into_iter().filter(|shards| *shards <= servers.len()).collect();
        }
        if let Some(many) = shards.iter().find(|shards| **shards > servers.len()) {
            return Err(refused(format!("--shards {many}: half of the CPUs are {}", servers.len())));
        }
        let works = WORKS
            .iter()
            .filter(|work| self.works.is_empty() || self.works.iter().any(|name| name == work.name));
        let programs = match self.programs {
            Some(programs) => programs,
            None => std::env::current_exe()?.parent().map(PathBuf::from).unwrap_or_default(),
        };
        Ok(Plan {
            servers,
            generator,
            shards,
            works: works.collect(),
            connections: self.connections as usize,
            measured: Duration::from_secs_f64(self.seconds),
            rounds: usize::from(self.rounds),
            programs,
            out: self.out,
        })
    }
}
