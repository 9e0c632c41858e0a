//! Sends back what it receives.
//!
//!     cargo run --release --example echo
//!     printf 'hello\n' | nc -q1 127.0.0.1 7000
//!
//! On several addresses and a Unix socket at once:
//!
//!     cargo run --release --example echo -- --listen 0.0.0.0:7000 --listen [::]:7000 --unix /tmp/echo.sock
//!     printf 'hello\n' | nc -N -U /tmp/echo.sock

use std::convert::Infallible;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Parser, ValueEnum};
use ringserve::framing::{LengthPrefix, Lines};
use ringserve::limits::ServerLimits;
use ringserve::log::LogOptions;
use ringserve::net::SocketOptions;
use ringserve::server::Driver;
use ringserve::{Cx, Frame, Limits, Server, Service, Shard};

/// An echo server.
#[derive(Parser)]
struct Args {
    /// Address and port to listen on, any number of times; port 0 finds a free one. 127.0.0.1:7000
    /// if there is neither this nor --unix.
    #[arg(long, value_name = "ADDR:PORT")]
    listen: Vec<SocketAddr>,
    /// Unix socket to listen on, any number of times.
    #[arg(long, value_name = "PATH")]
    unix: Vec<PathBuf>,
    /// Permissions of the Unix sockets, such as 660; by default the umask decides.
    #[arg(long, value_name = "OCTAL", value_parser = |mode: &str| u32::from_str_radix(mode, 8))]
    unix_mode: Option<u32>,
    /// Shards; by default one for each CPU.
    #[arg(long, value_name = "N")]
    shards: Option<usize>,
    /// auto, io_uring or epoll.
    #[arg(long, default_value_t, value_name = "NAME")]
    driver: Driver,
    /// The frames: lines, whatever arrived, or payloads with a 4-byte length.
    #[arg(long, value_enum, default_value = "lines")]
    framing: Framing,
    /// MiB that all connections of a shard may hold together, in unfinished lines, replies that are
    /// not taken and calls that wait: 1 and more. Beyond that, those that hold most are closed. By
    /// default it follows the memory of the machine.
    #[arg(long, value_name = "MIB")]
    held: Option<usize>,
    /// Time that each call waits before its reply.
    #[arg(long, default_value_t = 0, value_name = "MS")]
    wait: u64,
    /// Calls of a connection that may wait at once, 1 to 65535.
    #[arg(long, default_value_t = 1, value_name = "N")]
    calls: u16,
}

#[derive(Clone, Copy, ValueEnum)]
enum Framing {
    Lines,
    Raw,
    Length,
}

struct Echo {
    wait: Duration,
}

impl Service for Echo {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Infallible> {
        if !self.wait.is_zero() {
            cx.sleep(self.wait).await;
        }
        cx.reply(frame);
        Ok(())
    }
}

fn main() -> Result<(), ringserve::Error> {
    ringserve::log::init(LogOptions::default())?;
    let args = Args::parse();
    let mut server = match (args.listen.split_first(), args.unix.split_first()) {
        (Some((first, others)), _) => {
            let server = others.iter().fold(Server::bind(first), Server::listen);
            args.unix.iter().fold(server, Server::listen_unix)
        }
        (None, Some((first, others))) => others.iter().fold(Server::bind_unix(first), Server::listen_unix),
        (None, None) => Server::bind("127.0.0.1:7000"),
    };
    server = server.driver(args.driver);
    // Without explicit limits a server takes those that fit the machine.
    if args.held.is_some() || args.calls > 1 {
        let (defaults, of_server) = (Limits::default(), ServerLimits::default());
        let held_bytes_max = args.held.map_or(of_server.held_bytes_max, |mib| mib << 20);
        let outbox_bytes_max = defaults.outbox_bytes_max.min(held_bytes_max);
        let limits = defaults.outbox_bytes_max(outbox_bytes_max).calls_in_flight_max(args.calls);
        server = server.limits(limits).server_limits(of_server.held_bytes_max(held_bytes_max));
    }
    server = server.sockets(SocketOptions::default().unix_mode(args.unix_mode));
    if let Some(shards) = args.shards {
        server = server.shards(shards);
    }
    let echo = move |_shard: &Shard| Echo { wait: Duration::from_millis(args.wait) };
    match args.framing {
        Framing::Lines => server.framing(Lines::default()).serve(echo),
        Framing::Raw => server.serve(echo),
        Framing::Length => server.framing(LengthPrefix::default()).serve(echo),
    }
}

#[cfg(test)]
mod tests {
    use ringserve::testing::{Faults, Sim};

    use super::*;

    #[test]
    fn each_line_comes_back_in_its_place() {
        Sim::seeds(100).faults(Faults::all()).run(|sim| {
            let wait = Duration::from_millis(sim.random() % 3 * 700);
            let server = Server::bind("10.0.0.1:7000").framing(Lines::default());
            let shards = 1 + sim.seed() as usize % 4;
            let addr = sim.serve(server.shards(shards), move |_shard| Echo { wait });
            for n in 0..4 {
                sim.client(format!("c{n}"), async move |net| {
                    let mut me = net.connect(addr).await?;
                    for round in 0..5 {
                        let lines: Vec<String> =
                            (0..net.random() % 5).map(|line| format!("{n} {round} {line}")).collect();
                        let sent = net.now();
                        me.send(lines.iter().map(|line| format!("{line}\n")).collect::<String>()).await?;
                        for line in &lines {
                            assert_eq!(me.line().await?.as_deref(), Some(&line[..]));
                        }
                        // A connection has one call after the other.
                        assert!(net.now() - sent >= wait * lines.len() as u32);
                    }
                    me.finish()?;
                    assert_eq!(me.closed().await?, b"");
                    Ok(())
                });
            }
            sim.run_until_done();
        });
    }
}
