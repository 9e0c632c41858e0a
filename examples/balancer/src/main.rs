//! Spreads clients over other servers, each to that with the fewest connections, and says by HTTP
//! on a port beside how these fare.
//!
//!     cargo run --release --example echo -- --listen 127.0.0.1:8000
//!     cargo run --release --example echo -- --listen 127.0.0.1:8001
//!     cargo run --release -p example-balancer -- --upstream localhost:8000 --upstream localhost:8001
//!     printf 'hello\n' | nc -N 127.0.0.1 7000
//!     curl http://127.0.0.1:9000                                      as text; /json for programs
//!     curl -X POST http://127.0.0.1:9000/drain/localhost:8000         no more clients for it; /undrain/.. for the way back
//!
//! A name without an address is down until its checks find one. What this process itself lacks
//! (ports, descriptors, memory, a CPU) is not counted against an upstream: a check for which it is
//! lacking leaves the upstream as it was, and the state says `not checked`.
//!
//! TLS ends here with `--cert`, and begins towards upstreams with `--upstream-ca`. An upstream may
//! be for clients that ask by TLS for certain names, as `--upstream
//! www.example.org=web.internal:443`. Without `--cert` the name is read from the client's first
//! record, and TLS passes through to the upstream, whose certificate the client sees.

mod balancer;
mod status;

use std::{error::Error, net::SocketAddr, path::PathBuf, process::ExitCode, sync::Arc, time::Duration};

use clap::{Parser, builder::NonEmptyStringValueParser, value_parser};
use ringserve::limits::ServerLimits;
use ringserve::listen::{ProxyProtocol, tcp};
use ringserve::log::LogOptions;
use ringserve::net::SocketOptions;
use ringserve::server::MultiService;
use ringserve::tls::{Pem, Tls};
use ringserve::{Limits, Server, Stream, stream};

use crate::balancer::Balancer;

/// A TCP load balancer: each client goes to the upstream with the fewest connections.
#[derive(Parser)]
struct Args {
    /// Address and port to listen on; port 0 finds a free one.
    #[arg(long, default_value = "127.0.0.1:7000", value_name = "ADDR:PORT")]
    listen: SocketAddr,
    /// Address of the state, by HTTP: / as text, /json. This host may POST to /drain/HOST:PORT and
    /// /undrain/HOST:PORT.
    #[arg(long, default_value = "127.0.0.1:9000", value_name = "ADDR:PORT")]
    status: SocketAddr,
    /// A name by which the state may be asked for, beside addresses and localhost; may be given
    /// several times.
    #[arg(long, value_name = "NAME")]
    status_name: Vec<String>,
    /// A server for clients; may be given several times. With names it is for those that ask for
    /// one of them by TLS.
    #[arg(long, required = true, value_name = "[NAME,..=]HOST:PORT")]
    upstream: Vec<String>,
    /// Seconds that it may take to connect to an upstream, with the look-up of its name and TLS.
    #[arg(long, default_value = "2", value_name = "SECONDS", value_parser = seconds)]
    connect_timeout: Duration,
    /// Seconds after which a connection ends on which nothing happens either way.
    #[arg(long, default_value = "600", value_name = "SECONDS", value_parser = seconds)]
    idle_timeout: Duration,
    /// Seconds between two checks of an upstream, and that a check may take.
    #[arg(long, default_value = "2", value_name = "SECONDS", value_parser = seconds)]
    check_interval: Duration,
    /// Checks in a row that succeed until an upstream is up again.
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = value_parser!(u32).range(1..))]
    rise: u32,
    /// Checks in a row that fail until an upstream is down.
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = value_parser!(u32).range(1..))]
    fall: u32,
    /// Text that a check sends once it is connected, as $'GET /health HTTP/1.0\r\n\r\n'.
    #[arg(long, value_name = "TEXT", requires = "check_expect")]
    check_send: Option<String>,
    /// Text that the first 16 KiB of the answer to a check must contain, as ' 200 '. By default
    /// being connected is enough.
    #[arg(long, value_name = "TEXT", value_parser = NonEmptyStringValueParser::new())]
    check_expect: Option<String>,
    /// Clients come with a PROXY header, which is believed from this network; may be given several
    /// times.
    #[arg(long, value_name = "ADDR/BITS")]
    trust: Vec<String>,
    /// Tell upstreams who the client is, by the PROXY protocol of this version.
    #[arg(long, value_name = "VERSION", value_parser = value_parser!(u8).range(1..=2))]
    send_proxy: Option<u8>,
    /// TLS ends here, with the certificate in this file, those up to its authority, and its key
    /// (PEM). Read again when it changes.
    #[arg(long, value_name = "FILE")]
    cert: Option<PathBuf>,
    /// Speak TLS with upstreams, whose certificates have their HOST and are of an authority in this
    /// file (PEM).
    #[arg(long, value_name = "FILE")]
    upstream_ca: Option<PathBuf>,
    /// Address of an admin endpoint, with each upstream on its page and in its metrics, such as
    /// 127.0.0.1:9001.
    #[arg(long, value_name = "ADDR:PORT")]
    admin: Option<String>,
    /// Shards; by default one for each CPU.
    #[arg(long, value_name = "N")]
    shards: Option<usize>,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|seconds| (0.001..=31_536_000.0).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| "it must be 0.001 to 31536000".into())
}

fn server(balancer: &Arc<Balancer>) -> Result<Server<MultiService>, Box<dyn Error>> {
    let args = &balancer.args;
    let mut clients = tcp(args.listen);
    if !args.trust.is_empty() {
        clients = clients.proxy_protocol(ProxyProtocol::from(args.trust.clone()));
    }
    if let Some(cert) = &args.cert {
        let tls = Tls::server().certificate(Pem::file(cert)?, Pem::file(cert)?);
        clients = clients.tls(tls.watch_files(Duration::from_secs(10)));
    }
    // In some protocols the server speaks first. A PROXY header says where the client connected to.
    let limits = Limits::default().first_frame_timeout(None).idle_timeout(args.idle_timeout);
    // So that pauses are rare, each of which costs. For a peer that reads slowly as many bytes are
    // kept.
    let limits = limits.outbox_bytes_high(1 << 20).outbox_bytes_low(512 << 10);
    let sockets = SocketOptions::default().local_address(args.send_proxy.is_some());
    // One for each client, and for checks.
    let server_limits = ServerLimits::default().connect_timeout(args.connect_timeout).upstreams_max(1 << 20);
    let mut server =
        Server::new().shards(args.shards).server_limits(server_limits).upstream(&balancer.upstream);
    if let Some(admin) = &args.admin {
        server = server.admin(&**admin);
    }
    let (relays, shown) = (balancer.clone(), balancer.clone());
    let server = server.service(clients.limits(limits).sockets(sockets).name("balancer"), move |shard| {
        let (balancer, relay) = (relays.clone(), relays.upstream.relay(shard));
        stream(async move |client: Stream| balancer.serve(&relay, client).await)
    });
    Ok(server.service(tcp(args.status).name("status"), move |shard| status::service(shard, shown.clone())))
}

fn run() -> Result<(), Box<dyn Error>> {
    ringserve::log::init(LogOptions::default())?;
    let balancer = Arc::new(Balancer::new(Args::parse())?);
    Ok(server(&balancer)?.serve()?)
}

fn main() -> ExitCode {
    run().inspect_err(|error| eprintln!("error: {error}")).map_or(ExitCode::from(2), |()| ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests;
