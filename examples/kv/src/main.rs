//! A key-value server that Redis clients believe.
//!
//!     cargo run --release -p example-kv
//!     redis-cli -p 6379 set greeting hello
//!
//! Requests are frames ([`ringserve::resp`]), which tell where their arguments lie. Each shard
//! keeps the keys whose hash leads to it ([`store`], [`keys`]). What a connection asks of other
//! shards is one message to each for all that was pipelined, with replies in the order of the
//! requests ([`ringserve::scatter`]). Everything is in memory, and nothing is ever evicted.
//!
//! * A command on one key is atomic. One on several is done for each key alone.
//! * A shard with a full mailbox refuses its part with `TRYAGAIN`, and one that ended with `ERR`.
//!   The others do theirs all the same.
//! * KEYS and SCAN walk over the keys in parts, and SUBSCRIBE takes names in parts: others are
//!   served between them. A pattern has at most 64 KiB. What a client listens to takes at most 8
//!   MiB, and 64 MiB for all of a shard.
//! * What KEYS and SCAN found takes at most 64 MiB of each shard until there is memory for the
//!   answer, which counts as held by its client. Else they are refused with `TRYAGAIN`. Larger sets
//!   of keys are for SCAN.
//! * EX, PX, EXPIRE, PEXPIRE and TTL go by the shard's clock, so that none ends sooner or later
//!   where the system's is set. EXPIREAT, PEXPIREAT, EXAT, PXAT, EXPIRETIME and TIME go by the
//!   system's as it is at the command.
//! * A message goes to each shard once, and is encoded once there. A subscriber that reads slowly
//!   is cut off when 8 MiB wait for it.

mod client;
mod commands;
mod keys;
mod service;
mod store;
#[cfg(test)]
mod tests;
mod walk;

use std::net::SocketAddr;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::Parser;
use ringserve::limits::ServerLimits;
use ringserve::log::LogOptions;
use ringserve::resp::Resp;
use ringserve::scatter::Questions;
use ringserve::server::Driver;
use ringserve::service::{WithHeads, with_heads};
use ringserve::{Limits, Server, Shard};

use crate::service::{Kv, Node, Walks};
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
    /// The server, without what chooses the machine's part: driver and shards.
    fn server(&self, listen: SocketAddr) -> Server<Resp> {
        let (limits, of_server) = (Limits::default(), ServerLimits::default());
        let request = self.request_bytes_max as usize;
        let outbox = limits.outbox_bytes_max.max(2 * request);
        let limits = limits.frame_bytes_max(request).outbox_bytes_max(outbox);
        // One call carries the replies, and one may wait for its turn.
        let limits = limits.calls_in_flight_max(2).handler_timeout(None);
        // Clients keep connections for hours without a word, and Redis lets them.
        let limits = limits.first_frame_timeout(None).idle_timeout(None);
        let held = of_server.held_bytes_max.max(4 * request);
        let of_server = of_server.held_bytes_max(held);
        Server::bind(listen).limits(limits).server_limits(of_server).framing(Resp::new(request))
    }
}

/// Requests that may wait for a shard.
const REQUESTS_MAX: usize = 65_536;

/// Makes the service of each shard. `wall` tells the time since 1970 to a shard of this age. Keys
/// end by the clock of their shard, which no change of the system's moves.
fn service(
    keyer: Keyer,
    value_bytes_max: usize,
    requests_max: usize,
    wall: impl Fn(Duration) -> Duration + Clone + Send + Sync + 'static,
) -> impl Fn(&Shard) -> WithHeads<Kv> + Send + Sync {
    let (work, walks) = (Questions::with_capacity(requests_max), Walks::new());
    move |shard| {
        let node = Node::new(shard, keyer.clone(), value_bytes_max, wall.clone(), &walks);
        with_heads(Kv::new(node, &work))
    }
}

fn main() -> Result<(), ringserve::Error> {
    ringserve::log::init(LogOptions::default())?;
    let args = Args::parse();
    let unix_time = |_age| SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let service = service(store::random_keyer(), args.request_bytes_max as usize, REQUESTS_MAX, unix_time);
    args.server(args.listen).driver(args.driver).shards(args.shards).serve(service)
}
