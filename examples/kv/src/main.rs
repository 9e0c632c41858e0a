//! A key-value server that Redis clients believe.
//!
//!     cargo run --release -p example-kv
//!     redis-cli -p 6379 set greeting hello
//!
//! Requests are frames ([`resp`]); each shard keeps the keys whose hash leads to it ([`store`], [`route`]); replies are
//! written straight into the outbox ([`reply`]). Everything is in memory, and nothing is ever evicted.
//!
//! # Several shards
//!
//! A command on a key of another shard goes there as a message ([`message`]), and its call waits for the answer ([`node`]).
//! One call of a connection is under way at a time: its replies keep their order, and it sees its own writes. A command on
//! keys of the connection's own shard alone needs no message.
//!
//! * A command on one key is atomic.
//! * MGET, MSET, DEL and EXISTS are atomic for the keys of one shard, not across shards: another client may see a part of
//!   an MSET. A long MGET takes its values in pieces, between which they may change, with one shard as well.
//! * KEYS, DBSIZE, FLUSHALL, FLUSHDB, INFO and CLIENT LIST take the shards one by one.
//! * A shard with a full mailbox refuses its part with `TRYAGAIN`, and one that ended with `ERR`. The other shards do
//!   theirs all the same, so an MSET that fails may have set a part of its keys.
//!
//! Memory: one call of a connection waits at a time, so the other shards hold one copy of its request at most, and the
//! answers to it. Requests of connections that were closed meanwhile wait in mailboxes of 65 536 messages.

mod about;
mod clock;
mod commands;
mod data;
mod gather;
mod glob;
mod inline;
mod message;
mod node;
mod number;
mod reply;
mod resp;
mod route;
mod service;
mod session;
mod store;
#[cfg(test)]
mod tests;

use std::io::IsTerminal;
use std::net::SocketAddr;
use std::process::ExitCode;

use clap::Parser;
use ringserve::limits::ServerLimits;
use ringserve::{Driver, Limits, Server, Shard};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

use crate::message::Ways;
use crate::node::Node;
use crate::reply::OUTBOX_BYTES_HIGH;
use crate::resp::Resp;
use crate::service::Kv;
use crate::store::Keyer;

/// The Redis whose commands, errors and replies these are.
const VERSION: &str = "7.0.0";

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
        let request = self.request_bytes_max as usize;
        let defaults = Limits::default();
        let outbox = defaults.outbox_bytes_max;
        defaults
            .frame_bytes_max(request)
            .outbox_bytes_high(OUTBOX_BYTES_HIGH)
            // Room for a value behind what waits already.
            .outbox_bytes_max(outbox.max(2 * request))
            // Clients keep connections for hours without a word, and Redis lets them.
            .first_frame_timeout(None)
            .idle_timeout(None)
    }

    fn server_limits(&self) -> ServerLimits {
        let defaults = ServerLimits::default();
        let held = defaults.held_bytes_max.max(4 * self.request_bytes_max as usize);
        defaults.held_bytes_max(held)
    }
}

/// Requests that may wait for a shard.
const REQUESTS_MAX: usize = 65_536;

/// Makes the service of each shard.
fn service(keyer: Keyer, value_bytes_max: usize, requests_max: usize) -> impl Fn(&Shard) -> Kv + Send + Sync {
    let ways = Ways::with_capacity(requests_max);
    move |shard| Kv::new(Node::new(shard, keyer, value_bytes_max, &ways))
}

fn main() -> ExitCode {
    let log = EnvFilter::builder().with_default_directive(LevelFilter::INFO.into()).from_env_lossy();
    let color = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    tracing_subscriber::fmt().with_env_filter(log).with_target(false).with_ansi(color).init();
    let args = Args::parse();
    let value_bytes_max = args.request_bytes_max as usize;
    let mut server = Server::bind(args.listen)
        .driver(args.driver)
        .limits(args.limits())
        .server_limits(args.server_limits());
    if let Some(shards) = args.shards {
        server = server.shards(shards);
    }
    match server.framing(Resp).serve(service(Keyer::default(), value_bytes_max, REQUESTS_MAX)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
