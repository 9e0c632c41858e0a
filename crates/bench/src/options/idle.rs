//! Options of `idle`, and of the processes that hold its connections.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use clap::builder::PossibleValuesParser;

use super::speaking::Speaking;
use super::{chosen, known, refused, rivals};
use crate::idle::{self, HolderPlan, Sources, counted_from};
use crate::load::Target;
use crate::process;
use crate::servers::{self, Server, sized_connections_max};

/// Connections per shard, if it may have this many files: its table can then hold 20 000, and the
/// kernel does not spread connections evenly.
const PER_SHARD: u64 = 19_000;

/// Measure the cost of an idle connection.
///
/// Each connection exchanges one line and then stays silent. They are held by separate processes,
/// as many as the limit of open files requires, and come from loopback addresses, as many as their
/// ports require. As many processes as there are CPUs open at once.
///
/// The measure is the growth from 1000 connections (or 50 for each shard, if that is more) to all
/// of them, divided by those opened meanwhile; it is read when the server has been idle for
/// --seconds:
///
/// user bytes: anonymous memory (`RssAnon`) of the server's process.
///
/// kernel bytes: `Slab`, `KernelStack`, `PageTables` and `Percpu` of /proc/meminfo and the `mem` of
/// TCP in /proc/net/sockstat. They are of the whole machine: BOTH ends of each connection live
/// here, and memory that other programs take meanwhile counts too. The client's end costs a socket
/// and its file, the server's end the same and the memory with which the server waits, so half of
/// the figure is too little for the server.
///
/// opened in s: time from the first to the last of the counted connections, each with its line
/// there and back.
///
/// idle CPU: CPU time of the server's threads while nothing happens.
///
/// ringserve-page (built with --features admin) has an admin endpoint, and is watched for --seconds
/// more while a page of it is open: the cost for its threads is printed after the table.
///
/// At the end every connection answers once more; one that does not, or that was closed, ends the
/// run with its name.
///
/// ringserve on io_uring uses a shard for each 19 000 connections, all in one process: its
/// connections cost no descriptors. The other servers hold at most the limit of open files, and are
/// left out above it.
#[derive(Args)]
pub(crate) struct IdleOptions {
    /// Connections, 1001 to 10 million. 1 million needs about 11 GiB of memory.
    #[arg(long, default_value_t = 19_000, value_parser = clap::value_parser!(u32).range(1001..=10_000_000))]
    connections: u32,
    /// Bytes of the line each connection exchanges.
    #[arg(long, default_value_t = 16 * 1024, value_parser = clap::value_parser!(u32).range(2..=65_536))]
    bytes: u32,
    /// Seconds to watch the idle server.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=600))]
    seconds: u64,
    /// Seconds to wait before that. ringserve checks each connection once, a minute after its last
    /// byte, which is work; 65 s exclude it.
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u64).range(0..=600))]
    settle: u64,
    /// CPU for the servers [default: any].
    #[arg(long)]
    cpu: Option<usize>,
    /// Shards of ringserve on io_uring [default: one for each 19 000 connections, or for the limit
    /// of open files].
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=1024))]
    shards: Option<u16>,
    #[command(flatten)]
    speaking: Speaking,
    /// Connections that one process holds [default: the limit of open files].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    per_process: Option<u32>,
    /// Print which of the kernel's caches grew, by /proc/slabinfo; for root.
    #[arg(long)]
    slabs: bool,
    /// Make the kernel free its memory of unused files before memory is read, by
    /// /proc/sys/vm/drop_caches; for root. Needed for exact kernel bytes if a monitor lists
    /// /proc/PID/fd: each descriptor listed leaves 950 bytes.
    #[arg(long)]
    drop_caches: bool,
    /// Measure the rivals in this directory too; `scripts/rivals` builds them to target/rivals.
    #[arg(long)]
    rivals: Option<PathBuf>,
    /// Servers [default: all that hold that many].
    #[arg(long, value_delimiter = ',', value_parser = PossibleValuesParser::new(servers::echoing().map(|server| server.name)))]
    servers: Vec<String>,
}

impl IdleOptions {
    pub(crate) fn plan(self) -> io::Result<idle::Plan> {
        let files = process::raise_open_files()?;
        let connections = self.connections as usize;
        let spare = files.saturating_sub(process::OTHER_FILES).max(1);
        let per_process = self.per_process.map_or(spare, u64::from);
        if per_process > spare {
            return Err(refused(format!(
                "--per-process {per_process}: the hard limit of open files is {files}, which leaves {spare}; raise it (ulimit -Hn) or \
                 hold fewer in each process"
            )));
        }
        let shards =
            self.shards.map_or_else(|| connections.div_ceil(spare.min(PER_SHARD) as usize), usize::from);
        let fits = |server: &Server| {
            let most = if server.is_sized() { sized_connections_max(shards) } else { spare as usize };
            connections <= most
        };
        let shards_of = |server: &Server| if server.is_sized() { shards } else { 1 };

        let named = self.servers.iter().map(|name| known(name)).collect::<io::Result<Vec<_>>>()?;
        if let Some(server) = named.iter().find(|server| !fits(server)) {
            let (name, can) =
                (server.name, if server.is_sized() { "add --shards" } else { "raise it (ulimit -Hn)" });
            return Err(refused(format!(
                "--connections {connections}: {name} holds no more than the limit of open files allows, which is {files}; {can}, ask \
                 for fewer, or leave it out"
            )));
        }
        let layer = self.speaking.layer();
        let named = chosen(named, layer, true)?;
        let all = named.into_iter().filter(|server| {
            if !fits(server) {
                eprintln!(
                    "{}: left out, since it holds no more than {files} connections, the limit of open files",
                    server.name
                );
            }
            fits(server)
        });
        let mut servers: Vec<_> = all.map(|server| (Target::Known(server), shards_of(server))).collect();
        if let Some(place) = &self.rivals {
            if connections > spare as usize {
                return Err(refused(format!(
                    "--rivals: each holds no more than {spare} connections, by the limit of open files; leave them out"
                )));
            }
            servers.extend(rivals::targets(place, layer, true).into_iter().map(|rival| (rival, 1)));
        }
        let from = servers.iter().map(|(_, shards)| counted_from(*shards)).max().unwrap_or_default();
        if connections <= from {
            return Err(refused(format!(
                "--connections {connections}: with {shards} shards counting starts at {from}; ask for more connections or fewer shards"
            )));
        }
        Ok(idle::Plan {
            servers,
            connections,
            bytes: self.bytes as usize,
            cpu: self.cpu,
            settle: Duration::from_secs(self.settle),
            seconds: self.seconds,
            per_process: per_process as usize,
            slabs: self.slabs,
            drop_caches: self.drop_caches,
            layer,
        })
    }
}

/// Hold connections for `idle`.
#[derive(Args)]
pub(crate) struct HoldOptions {
    #[arg(long)]
    server: SocketAddr,
    #[arg(long)]
    first_source: Ipv4Addr,
    #[arg(long)]
    connections_each: usize,
    #[arg(long)]
    bytes: usize,
    #[command(flatten)]
    speaking: Speaking,
    #[arg(long)]
    first: usize,
}

impl HoldOptions {
    /// Holds until the input ends, or the process that started it.
    pub(crate) fn run(self) -> io::Result<()> {
        process::die_with_parent()?;
        process::raise_open_files()?;
        idle::hold(HolderPlan {
            server: self.server,
            sources: Sources { first: self.first_source, connections_each: self.connections_each },
            bytes: self.bytes,
            layer: self.speaking.layer(),
            first: self.first,
        })
    }
}
