//! An echo of lines that limits who is let in: connections and their rate by address, the rate of
//! all, lists of networks; and how many lines an address may send.
//!
//!     cargo run --release --example guarded -- --per-address 2
//!     for n in 1 2 3; do (printf 'hello\n'; sleep 2) | nc -N 127.0.0.1 7000 & done; wait
//!
//! It listens at all addresses, or only at those of IPv4 if this host has no IPv6.

use std::convert::Infallible;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;
use ringserve::admission::{AddressKey, Admission, IpList, IpListError, KeyLimits, KeyRates};
use ringserve::framing::Lines;
use ringserve::log::LogOptions;
use ringserve::middleware::RateLimit;
use ringserve::server::Driver;
use ringserve::{Cx, Frame, Server, Service};
use tracing::warn;

/// A server that echoes lines, and limits who is let in.
#[derive(Parser)]
struct Args {
    /// Address and port; port 0 finds a free one, and [::] is each address of this host, with IPv6
    /// or without.
    #[arg(long, default_value = "[::]:7000", value_name = "ADDR:PORT")]
    listen: SocketAddr,
    /// Connections that an address may have at once: one of IPv4, or a network of 64 bits of IPv6.
    #[arg(long, default_value_t = 100, value_name = "COUNT")]
    per_address: u32,
    /// Connections that an address may open in a second.
    #[arg(long, default_value_t = 50, value_name = "COUNT")]
    address_rate: u32,
    /// Lines that the connections of an address may send in a second together; further ones wait.
    #[arg(long, default_value_t = 10_000, value_name = "COUNT")]
    lines_per_second: u32,
    /// Connections that are taken in a second, of all addresses together; the rate rises within ten
    /// seconds.
    #[arg(long, default_value_t = 20_000, value_name = "COUNT")]
    accept_rate: u32,
    /// A file with a denied network in each line. It is read again when it changes.
    #[arg(long, value_name = "FILE")]
    deny: Option<PathBuf>,
    /// A network that is let in whatever the other limits are. May be given several times.
    #[arg(long, value_name = "NETWORK")]
    allow: Vec<String>,
    /// Threads, each with a listener and a driver; by default one for each CPU.
    #[arg(long, value_name = "COUNT")]
    shards: Option<usize>,
    /// auto, io_uring or epoll.
    #[arg(long, default_value_t, value_name = "NAME")]
    driver: Driver,
}

impl Args {
    /// A burst of four seconds: browsers open several connections at once, and come back together.
    fn admission(&self) -> Result<Admission, IpListError> {
        let mut admission = Admission::default()
            .per_address(self.per_address)
            .address_rate(self.address_rate, self.address_rate.saturating_mul(4))
            .accept_rate(self.accept_rate, self.accept_rate.div_ceil(4))
            .slow_start(Duration::from_secs(10))
            .shed_reply(BUSY);
        if let Some(file) = &self.deny {
            admission = admission.deny(IpList::file(file));
        }
        if !self.allow.is_empty() {
            admission = admission.allow(self.allow.join("\n").parse()?);
        }
        Ok(admission)
    }
}

/// The address to use for `[::]` on a host that cannot bind it: each address of IPv4.
fn with_or_without_ipv6(wanted: SocketAddr, binds: impl Fn(SocketAddr) -> io::Result<()>) -> SocketAddr {
    if wanted.ip() != Ipv6Addr::UNSPECIFIED {
        return wanted;
    }
    // Any port will do to see whether there is such an address.
    let error = match binds((Ipv6Addr::UNSPECIFIED, 0).into()) {
        Err(error) if matches!(error.raw_os_error(), Some(EAFNOSUPPORT | EADDRNOTAVAIL)) => error,
        // The server reports other errors.
        _ => return wanted,
    };
    warn!("there is no IPv6 here, so it listens at all addresses of IPv4: {error}");
    (Ipv4Addr::UNSPECIFIED, wanted.port()).into()
}

/// The error's number on Linux.
const EAFNOSUPPORT: i32 = 97;
const EADDRNOTAVAIL: i32 = 99;

/// The echo, with a limit on the lines that an address may send.
fn limited(rates: &KeyRates) -> impl Service<Session = ()> + use<> {
    RateLimit::by_key(Echo, rates.clone(), |cx, _line| cx.peer().addr().map(|addr| AddressKey::of(addr.ip())))
}

/// The rejection message of a connection that is refused, for its address or because the server is
/// full.
const BUSY: &str = "-BUSY try again\n";

struct Echo;

impl Service for Echo {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, line: Frame) -> Result<(), Infallible> {
        cx.reply(line);
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    ringserve::log::init(LogOptions::default())?;
    let args = Args::parse();
    let listen = with_or_without_ipv6(args.listen, |addr| TcpListener::bind(addr).map(drop));
    let server = Server::bind(listen).driver(args.driver).shards(args.shards);
    let rates = KeyRates::new(KeyLimits::default().frames(args.lines_per_second, args.lines_per_second))?;
    server.admission(args.admission()?).framing(Lines::default()).serve(move |_shard| limited(&rates))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use ringserve::testing::{Faults, Sim};

    use super::*;

    #[test]
    fn host_without_ipv6_is_served_by_ipv4() {
        let at = |wanted: &str, errno: Option<i32>| {
            let binds = |_| errno.map_or(Ok(()), |errno| Err(io::Error::from_raw_os_error(errno)));
            with_or_without_ipv6(wanted.parse().unwrap(), binds).to_string()
        };
        for errno in [EAFNOSUPPORT, EADDRNOTAVAIL] {
            assert_eq!(at("[::]:7000", Some(errno)), "0.0.0.0:7000");
            assert_eq!(at("[::1]:7000", Some(errno)), "[::1]:7000", "another one was asked for");
        }
        assert_eq!(at("[::]:7000", None), "[::]:7000");
        // EMFILE says nothing about IPv6.
        assert_eq!(at("[::]:7000", Some(24)), "[::]:7000");
    }

    #[test]
    fn greedy_host_has_its_count_and_others_are_served() {
        Sim::seeds(50).faults(Faults::harmless()).run(|sim| {
            let args = Args::parse_from(["guarded", "--per-address", "2", "--address-rate", "100"]);
            let server = Server::bind("10.0.0.1:7000").shards(2).admission(args.admission().unwrap());
            let addr = sim.serve(server.framing(Lines::default()), |_shard| Echo);
            sim.client("greedy", async move |net| {
                let mut served = Vec::new();
                for _ in 0..5 {
                    let mut me = net.connect(addr).await?;
                    // A refused connection may be closed before it has sent.
                    let _ = me.send("mine\n").await;
                    match me.line().await {
                        Ok(Some(line)) if line == "mine" => served.push(me),
                        Ok(Some(line)) => assert_eq!(line, BUSY.trim_end()),
                        Ok(None) | Err(_) => {}
                    }
                }
                assert_eq!(served.len(), 2);
                Ok(())
            });
            sim.client("modest", async move |net| {
                let mut me = net.connect(addr).await?;
                me.send("hello\n").await?;
                assert_eq!(me.line().await?.as_deref(), Some("hello"));
                Ok(())
            });
            sim.run_until_done();
        });
    }

    #[test]
    fn lines_of_an_address_wait_for_its_rate_and_others_do_not() {
        Sim::seeds(20).faults(Faults::none()).run(|sim| {
            let rates = KeyRates::new(KeyLimits::default().frames(5, 5)).unwrap();
            let server = Server::bind("10.0.0.1:7000").shards(2).framing(Lines::default());
            let addr = sim.serve(server, move |_shard| limited(&rates));
            for (name, lines, seconds) in [("hasty", 20, 3), ("modest", 5, 0)] {
                sim.client(name, async move |net| {
                    // Two connections share one rate.
                    let mut both = [net.connect(addr).await?, net.connect(addr).await?];
                    let began = net.now();
                    for n in 0..lines {
                        both[n % 2].send(format!("{n}\n")).await?;
                    }
                    for n in 0..lines {
                        assert_eq!(both[n % 2].line().await?, Some(n.to_string()));
                    }
                    assert_eq!((net.now() - began).as_secs_f64().round() as u64, seconds);
                    Ok(())
                });
            }
            sim.run_until_done();
        });
    }
}
