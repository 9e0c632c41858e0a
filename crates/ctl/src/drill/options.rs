//! Options of `drill`.

use std::net::SocketAddrV4;
use std::path::PathBuf;

use clap::{Args, Subcommand};
use ringserve::server::Driver;

use super::causes::Cause;
use super::overload::rows::Row;
use crate::text::read_seconds;

#[derive(Clone, Debug, Subcommand)]
pub enum Drill {
    /// Overloads servers that it starts itself in six ways, on both drivers, and compares the rest
    /// of their service with a bar each. Needs two otherwise idle CPUs, and three minutes
    Overload(OverloadOptions),
}

#[derive(Clone, Debug, Args)]
pub struct OverloadOptions {
    /// Tries only these rows
    #[arg(long, value_enum, value_name = "ROW")]
    pub only: Vec<Row>,
    /// The driver of the servers: io_uring or epoll; both if left out
    #[arg(long)]
    pub driver: Option<Driver>,
    /// Load as a multiple of the server's capacity, in the rows goodput and marked
    #[arg(long, default_value_t = 4.0, value_parser = times)]
    pub times: f64,
    /// CPU time of a call in these rows, in microseconds
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u64).range(10..=100_000))]
    pub micros: u64,
    /// Seconds to measure in each row
    #[arg(long, default_value_t = 10.0, value_parser = read_seconds)]
    pub seconds: f64,
    /// Seconds from the start of the storm to the start of the measurement, in the rows goodput and
    /// marked
    #[arg(long, default_value_t = 5.0, value_parser = read_seconds)]
    pub settle: f64,
    /// A directory with tokio-shed and go-shed, as scripts/rivals builds them, to be measured for
    /// comparison
    #[arg(long, value_name = "DIRECTORY")]
    pub rivals: Option<PathBuf>,
    /// Tries only the row prefix, with a server that already runs on this machine: it limits
    /// connections by address, and answers each line with itself
    #[arg(long, value_name = "ADDRESS", conflicts_with_all = ["only", "driver", "rivals"])]
    pub target: Option<SocketAddrV4>,
}

fn times(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(times) if (0.1..=20.0).contains(&times) => Ok(times),
        _ => Err("give a factor, 0.1 to 20".to_owned()),
    }
}

#[derive(Clone, Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct DrillOptions {
    /// Another drill
    #[command(subcommand)]
    pub what: Option<Drill>,
    /// Plants only these causes
    #[arg(long, value_enum, value_name = "CAUSE")]
    pub only: Vec<Cause>,
    /// Seconds within which each cause has to be named
    #[arg(long, default_value_t = 20.0, value_parser = read_seconds)]
    pub within: f64,
    /// Seconds for which each cause stays after it was named, for inspection: the address of its
    /// page is printed
    #[arg(long, default_value_t = 0.0, value_parser = seconds_or_none, value_name = "SECONDS")]
    pub hold: f64,
    /// This process has a network to itself, and its server's endpoint has this path
    #[arg(long, hide = true)]
    pub alone: Option<PathBuf>,
}

fn seconds_or_none(text: &str) -> Result<f64, String> {
    if text == "0" { Ok(0.0) } else { read_seconds(text) }
}
