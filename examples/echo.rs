//! Sends back what it receives.
//!
//!     cargo run --release --example echo
//!     printf 'hello\n' | nc -q1 127.0.0.1 7000

use std::convert::Infallible;
use std::io::IsTerminal;
use std::net::SocketAddr;

use clap::{Parser, ValueEnum};
use ringserve::framing::{LengthPrefix, Lines};
use ringserve::{Cx, Driver, Frame, Server, Service};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

/// An echo server.
#[derive(Parser)]
struct Args {
    /// Address and port to listen on; port 0 finds a free one.
    #[arg(long, default_value = "127.0.0.1:7000", value_name = "ADDR:PORT")]
    listen: SocketAddr,
    /// Shards; by default one for each CPU.
    #[arg(long, value_name = "N")]
    shards: Option<usize>,
    /// auto, io_uring or epoll.
    #[arg(long, default_value_t, value_name = "NAME")]
    driver: Driver,
    /// What a frame is: a line, whatever arrived, or what a 4-byte length says.
    #[arg(long, value_enum, default_value = "lines")]
    framing: Framing,
}

#[derive(Clone, Copy, ValueEnum)]
enum Framing {
    Lines,
    Raw,
    Length,
}

struct Echo;

impl Service for Echo {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Infallible> {
        cx.reply(frame);
        Ok(())
    }
}

fn main() -> Result<(), ringserve::Error> {
    let log = EnvFilter::builder().with_default_directive(LevelFilter::INFO.into()).from_env_lossy();
    let color = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    tracing_subscriber::fmt().with_env_filter(log).with_target(false).with_ansi(color).init();
    let args = Args::parse();
    let mut server = Server::bind(args.listen).driver(args.driver);
    if let Some(shards) = args.shards {
        server = server.shards(shards);
    }
    match args.framing {
        Framing::Lines => server.framing(Lines::default()).serve(|_shard| Echo),
        Framing::Raw => server.serve(|_shard| Echo),
        Framing::Length => server.framing(LengthPrefix::default()).serve(|_shard| Echo),
    }
}
