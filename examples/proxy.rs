//! Passes bytes between its clients and other servers, both ways, with half-closes and
//! back-pressure.
//!
//!     cargo run --release --example echo -- --listen 127.0.0.1:8000
//!     cargo run --release --example proxy -- --upstream 127.0.0.1:8000
//!     printf 'hello\n' | nc -N 127.0.0.1 7000

use std::cell::Cell;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use clap::Parser;
use ringserve::limits::ServerLimits;
use ringserve::log::LogOptions;
use ringserve::net::{Address, CopyError, CopySide, ProxyHeader, copy_bidirectional, is_local_failure};
use ringserve::server::Driver;
use ringserve::{Limits, Server, Stream, stream};

/// A proxy: each client is connected to one of the upstreams, in turn.
#[derive(Parser)]
struct Args {
    /// Address and port to listen on; port 0 finds a free one.
    #[arg(long, default_value = "127.0.0.1:7000", value_name = "ADDR:PORT")]
    listen: SocketAddr,
    /// An upstream: an address with a port, or unix:PATH. May be given several times.
    #[arg(long, required = true, value_name = "UPSTREAM", value_parser = parse_upstream)]
    upstream: Vec<Address>,
    /// Tell the upstreams who the client is, by the PROXY protocol.
    #[arg(long, value_name = "VERSION", value_parser = clap::value_parser!(u8).range(1..=2))]
    send_proxy: Option<u8>,
    /// Seconds that an upstream may take to answer.
    #[arg(long, default_value_t = 10, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..))]
    connect_timeout: u64,
    /// Shards; by default one for each CPU.
    #[arg(long, value_name = "N")]
    shards: Option<usize>,
    /// auto, io_uring or epoll.
    #[arg(long, default_value_t, value_name = "NAME")]
    driver: Driver,
}

fn parse_upstream(text: &str) -> Result<Address, String> {
    match text.strip_prefix("unix:") {
        Some(path) => Ok(Address::unix(path)),
        None => text.parse().map(Address::Ip).map_err(|error| format!("{text}: {error}")),
    }
}

/// The reason why a client was not served to the end.
enum Broken {
    Connect(Address, io::Error),
    Upstream(Address, CopyError),
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Broken::Connect(to, error) => write!(f, "no connection to {to}: {error}"),
            Broken::Upstream(to, broken) => write!(f, "upstream {to}: {}", broken.error),
        }
    }
}

/// Serves one client. Both connections are closed when it returns.
async fn relay(mut client: Stream, to: Address, send_proxy: Option<u8>) -> Result<(), Broken> {
    let connecting = client.shard().connect(to.clone());
    let connecting = match send_proxy {
        None => connecting,
        Some(1) => connecting.proxy_header(ProxyHeader::v1(&client.peer())),
        Some(_) => connecting.proxy_header(ProxyHeader::v2(&client.peer())),
    };
    let mut upstream = match connecting.await {
        Ok(upstream) => upstream,
        Err(error) => {
            if !is_local_failure(&error) {
                client.upstream_failed();
            }
            return Err(Broken::Connect(to, error));
        }
    };
    match copy_bidirectional(&mut client, &mut upstream).await {
        Ok(_) => Ok(()),
        Err(broken) if broken.side == CopySide::Second => {
            // A reset, so that the client does not take the received part for the whole.
            if !is_local_failure(&broken.error) {
                client.upstream_failed();
            }
            client.abort();
            Err(Broken::Upstream(to, broken))
        }
        // Errors of clients are not reported, only counted.
        Err(_) => {
            upstream.abort();
            Ok(())
        }
    }
}

fn main() -> Result<(), ringserve::Error> {
    ringserve::log::init(LogOptions::default())?;
    let args = Args::parse();
    // The protocol decides which side speaks first.
    let limits = Limits::default().first_frame_timeout(None);
    // High marks make pauses rare, each of which has a cost. For a slow reader as many bytes are
    // kept.
    let limits = limits.outbox_bytes_high(1 << 20).outbox_bytes_low(512 << 10);
    let server_limits = ServerLimits::default()
        .connect_timeout(Duration::from_secs(args.connect_timeout))
        // One for each client.
        .upstreams_max(1 << 20);
    let mut server =
        Server::bind(args.listen).driver(args.driver).limits(limits).server_limits(server_limits);
    if let Some(shards) = args.shards {
        server = server.shards(shards);
    }
    let upstreams = args.upstream;
    server.serve(move |_shard| {
        let (upstreams, next) = (upstreams.clone(), Rc::new(Cell::new(0)));
        stream(async move |client: Stream| {
            let to = upstreams[next.replace((next.get() + 1) % upstreams.len())].clone();
            relay(client, to, args.send_proxy).await
        })
    })
}
