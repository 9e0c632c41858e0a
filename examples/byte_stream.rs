//! Serves HTTP/1.1, or HTTP/2, with hyper, over connections that are streams of bytes.
//!
//!     cargo run --release --example byte_stream
//!     curl http://127.0.0.1:7000/ -d hello
//!
//!     cargo run --release --example byte_stream -- --http2
//!     curl --http2-prior-knowledge http://127.0.0.1:7000/ -d hello

use std::convert::Infallible;
use std::io::IsTerminal;
use std::net::SocketAddr;
use std::pin::pin;

use clap::Parser;
use http_body_util::Either;
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use ringserve::{Driver, Server, Shard, Stream};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

/// An HTTP server that sends back what is posted.
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
    /// HTTP/2 with prior knowledge instead of HTTP/1.1.
    #[arg(long)]
    http2: bool,
}

/// A body that is posted streams through: it is read as fast as the answer is.
async fn answer(request: Request<Incoming>) -> Result<Response<Either<String, Incoming>>, Infallible> {
    Ok(Response::new(match *request.method() {
        Method::POST => Either::Right(request.into_body()),
        _ => Either::Left(format!("{} {}\n", request.method(), request.uri().path())),
    }))
}

/// HTTP/1.1 until the peer is done, or the server shuts down and what was asked is answered.
async fn serve_http1(stream: Stream) -> hyper::Result<()> {
    let drain = stream.drain_begins();
    let builder = http1::Builder::new();
    let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), service_fn(answer)));
    tokio::select! {
        done = connection.as_mut() => return done,
        () = drain => connection.as_mut().graceful_shutdown(),
    }
    connection.await
}

/// HTTP/2, whose requests are tasks of the connection's shard.
async fn serve_http2(stream: Stream) -> hyper::Result<()> {
    let drain = stream.drain_begins();
    let builder = http2::Builder::new(OnShard(stream.shard().clone()));
    let mut connection = pin!(builder.serve_connection(TokioIo::new(stream), service_fn(answer)));
    tokio::select! {
        done = connection.as_mut() => return done,
        () = drain => connection.as_mut().graceful_shutdown(),
    }
    connection.await
}

/// How hyper spawns on a shard.
#[derive(Clone)]
struct OnShard(Shard);

impl<F: Future<Output = ()> + 'static> hyper::rt::Executor<F> for OnShard {
    fn execute(&self, future: F) {
        self.0.spawn(future);
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
    if args.http2 {
        server.serve_stream(|_shard| serve_http2)
    } else {
        server.serve_stream(|_shard| serve_http1)
    }
}
