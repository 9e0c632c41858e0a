//! The same answers over HTTP: hyper on ringserve, and hyper on tokio as in its own examples.

use std::convert::Infallible;
use std::io;
use std::net::{SocketAddr, TcpListener};

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use ringserve::net::SocketOptions;
use ringserve::server::Driver;
use ringserve::{Server, http};

use super::product::{has_a_cpu_each, wait};

/// The longest body that can be requested.
static BODY: [u8; 16 << 20] = [b'b'; 16 << 20];

/// Answers `/N` with a body of N bytes, every other path with a greeting.
async fn hello(request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    let wanted = request.uri().path()[1..].parse().ok().and_then(|bytes: usize| BODY.get(..bytes));
    Ok(Response::new(Full::new(Bytes::from_static(wanted.unwrap_or(b"hello\n")))))
}

/// Serves on io_uring.
pub(super) fn ringserve(address: SocketAddr, shards: usize) -> io::Result<()> {
    serve(address, shards, Driver::IoUring, SocketOptions::default())
}

/// Does the same with sockets that take as much as their send buffers hold, like tokio's.
pub(super) fn ringserve_fills_buffers(address: SocketAddr, shards: usize) -> io::Result<()> {
    serve(address, shards, Driver::IoUring, SocketOptions::default().not_sent_bytes_max(None))
}

/// Does the same on epoll.
pub(super) fn ringserve_on_epoll(address: SocketAddr, shards: usize) -> io::Result<()> {
    serve(address, shards, Driver::Epoll, SocketOptions::default())
}

/// Does that on epoll.
pub(super) fn ringserve_on_epoll_fills_buffers(address: SocketAddr, shards: usize) -> io::Result<()> {
    serve(address, shards, Driver::Epoll, SocketOptions::default().not_sent_bytes_max(None))
}

fn serve(address: SocketAddr, shards: usize, driver: Driver, sockets: SocketOptions) -> io::Result<()> {
    let server =
        Server::bind(address).driver(driver).sockets(sockets).shards(shards).pin(has_a_cpu_each(shards));
    wait(server.start(|_shard| http(service_fn(hello))).map_err(io::Error::other)?)
}

/// Serves on a current-thread runtime with a task for each connection, which speaks either
/// protocol.
pub(super) fn tokio(listener: TcpListener) -> io::Result<()> {
    serve_on_tokio(listener, auto::Builder::new(TokioExecutor::new()))
}

/// Does the same with one write for all answers to pipelined requests.
pub(super) fn tokio_flushes_together(listener: TcpListener) -> io::Result<()> {
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().pipeline_flush(true);
    serve_on_tokio(listener, builder)
}

/// Does the same with a timer, by which hyper limits the time for headers, like ringserve.
pub(super) fn tokio_with_timer(listener: TcpListener) -> io::Result<()> {
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().pipeline_flush(true).timer(TokioTimer::new());
    builder.http2().timer(TokioTimer::new());
    serve_on_tokio(listener, builder)
}

/// Does the same on a work-stealing runtime with this many workers.
pub(super) fn tokio_with_workers(address: SocketAddr, workers: usize) -> io::Result<()> {
    let listener = super::listen(address)?;
    super::announce(listener.local_addr()?)?;
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().pipeline_flush(true).timer(TokioTimer::new());
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(workers).enable_all().build()?;
    // In a task, so that the accepting loop runs on a worker too.
    runtime.block_on(runtime.spawn(accept_all(listener, builder))).map_err(io::Error::other)?
}

fn serve_on_tokio(listener: TcpListener, builder: auto::Builder<TokioExecutor>) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(accept_all(listener, builder))
}

async fn accept_all(listener: TcpListener, builder: auto::Builder<TokioExecutor>) -> io::Result<()> {
    let listener = tokio::net::TcpListener::from_std(listener)?;
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                let builder = builder.clone();
                drop(tokio::spawn(async move {
                    builder.serve_connection(TokioIo::new(stream), service_fn(hello)).await
                }));
            }
            // Out of descriptors: let connections end before the next try.
            Err(_) => tokio::task::yield_now().await,
        }
    }
}
