//! A key-value server that Redis clients believe.
//!
//!     cargo run --release -p example-kv
//!     redis-cli -p 6379 set greeting hello
//!
//! Requests are frames ([`resp`]), which tell where their arguments lie. Each shard keeps the keys whose hash leads to it ([`store`],
//! [`keys`]). What a connection asks of other shards is in its [`queue`]: one message to each shard for all that was pipelined, and
//! replies in the order of the requests. Everything is in memory, and nothing is ever evicted.
//!
//! * A command on one key is atomic. One on several is done for each key alone.
//! * A shard with a full mailbox refuses its part with `TRYAGAIN`, and one that ended with `ERR`. The others do theirs all the same.
//! * A message goes to each shard once, and is encoded once there. A subscriber that reads slowly is cut off when 8 MiB wait for it.

mod client;
mod commands;
mod keys;
mod queue;
mod resp;
mod service;
mod store;
#[cfg(test)]
mod tests;

use std::io::IsTerminal;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::Parser;
use ringserve::limits::ServerLimits;
use ringserve::sync::Mesh;
use ringserve::{Driver, Limits, Server, Shard, WithHeads, with_heads};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

use crate::resp::Resp;
use crate::service::{Kv, Node};
use crate::store::Keyer;

/// A key-value server that speaks the Redis protocol.
#[derive(Parser)]
struct Args {
    /// Address and port to listen on; port 0 finds a free one.
    #[arg(long, default_value = "127.0.0.1:6379", value_name = "ADDR:PORT")]
    listen: SocketAddr,
    /// Shards, which share the keys among them; by default one for each CPU.
    #[arg(long, value_name = "N")]
    shards: Option<usize>,
    /// auto, io_uring or epoll.
    #[arg(long, default_value_t, value_name = "NAME")]
    driver: Driver,
    /// Bytes of one request, and of one value, at most.
    #[arg(long, default_value_t = 1 << 20, value_name = "BYTES",
          value_parser = clap::value_parser!(u32).range(1024..=(512 << 20)))]
    request_bytes_max: u32,
}

impl Args {
    fn limits(&self) -> Limits {
        let (defaults, request) = (Limits::default(), self.request_bytes_max as usize);
        let outbox = defaults.outbox_bytes_max.max(2 * request);
        let limits = defaults.frame_bytes_max(request).outbox_bytes_max(outbox);
        // One call carries the queue, and one may wait for its end.
        let limits = limits.calls_in_flight_max(2).handler_timeout(None);
        // Clients keep connections for hours without a word, and Redis lets them.
        limits.first_frame_timeout(None).idle_timeout(None)
    }

    fn server_limits(&self) -> ServerLimits {
        let defaults = ServerLimits::default();
        let held = defaults.held_bytes_max.max(4 * self.request_bytes_max as usize);
        defaults.held_bytes_max(held)
    }
}

/// Requests that may wait for a shard.
const REQUESTS_MAX: usize = 65_536;

/// Time since 1970.
fn unix_time() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Makes the service of each shard. `epoch` tells the time once: keys end by the clock of their shard, which no change of the system's
/// moves.
fn service(
    keyer: Keyer,
    value_bytes_max: usize,
    requests_max: usize,
    epoch: fn() -> Duration,
) -> impl Fn(&Shard) -> WithHeads<Kv> + Send + Sync {
    let work = Mesh::with_capacity(requests_max);
    move |shard| with_heads(Kv(Node::new(shard, keyer.clone(), value_bytes_max, &work, epoch)))
}

fn main() -> ExitCode {
    let log = EnvFilter::builder().with_default_directive(LevelFilter::INFO.into()).from_env_lossy();
    let color = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    tracing_subscriber::fmt().with_env_filter(log).with_target(false).with_ansi(color).init();
    let args = Args::parse();
    let value_bytes_max = args.request_bytes_max as usize;
    let limits = (args.limits(), args.server_limits());
    let mut server = Server::bind(args.listen).driver(args.driver).limits(limits.0).server_limits(limits.1);
    if let Some(shards) = args.shards {
        server = server.shards(shards);
    }
    match server.framing(Resp { request_bytes_max: value_bytes_max }).serve(service(
        store::random_keyer(),
        value_bytes_max,
        REQUESTS_MAX,
        unix_time,
    )) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
