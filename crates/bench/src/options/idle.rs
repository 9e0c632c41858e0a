//! Options of `idle`.

use std::io;

use clap::Args;
use clap::builder::PossibleValuesParser;

use super::known;
use crate::servers::SERVERS;
use crate::{idle, process};

/// Measure what an idle connection costs.
///
/// Each connection exchanges one line and then stays silent. What is printed is the growth of the server's
/// anonymous memory (`RssAnon`) from 1000 connections to all of them, divided by those opened meanwhile: user
/// memory, not the kernel's. And the CPU time the server uses while nothing happens.
#[derive(Args)]
pub(crate) struct IdleOptions {
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

impl IdleOptions {
    pub(crate) fn plan(self) -> io::Result<idle::Plan> {
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
