//! The product: echo on ringserve, with one shard unless another number is given.

use std::convert::Infallible;
use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::task::Poll;
use std::thread::available_parallelism;
use std::time::Duration;

use ringserve::framing::{Framing, Lines, Raw};
use ringserve::limits::ServerLimits;
#[cfg(feature = "admin")]
use ringserve::net::Address;
use ringserve::net::SocketOptions;
use ringserve::server::{Driver, Runtime};
use ringserve::{Cx, Frame, Limits, Server, ServerHandle, Service, Shard, Stream};
use rustix::process::{Resource, getrlimit};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::announce;

/// Connections of one shard of many, if the limit of open files would allow any number: a table
/// costs memory from the start.
const SHARD_CONNECTIONS_MAX: usize = 20_000;

pub(super) struct Echo;

impl Service for Echo {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Infallible> {
        cx.reply(frame);
        Ok(())
    }
}

/// Waits once before it echoes, so that others run.
struct AwaitingEcho;

impl Service for AwaitingEcho {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Infallible> {
        let mut waited = false;
        poll_fn(|task| {
            if std::mem::replace(&mut waited, true) {
                return Poll::Ready(());
            }
            task.waker().wake_by_ref();
            Poll::Pending
        })
        .await;
        cx.reply(frame);
        Ok(())
    }
}

/// Echoes raw bytes on io_uring.
pub(crate) fn raw(address: SocketAddr, shards: usize) -> io::Result<()> {
    serve(address, shards, Raw, Driver::IoUring, |_| Echo)
}

/// Echoes raw bytes on io_uring, without asking for peers' addresses.
pub(crate) fn raw_without_addresses(address: SocketAddr, shards: usize) -> io::Result<()> {
    let server =
        Server::bind(address).driver(Driver::IoUring).limits(limits()).server_limits(server_limits(shards));
    let server = server.sockets(sockets().peer_address(false)).shards(shards).pin(false);
    wait(server.start(|_shard| Echo).map_err(io::Error::other)?)
}

/// Echoes raw bytes on io_uring, with an admin endpoint.
#[cfg(feature = "admin")]
pub(crate) fn raw_with_a_page(address: SocketAddr, shards: usize) -> io::Result<()> {
    let server = Server::bind(address).driver(Driver::IoUring).admin("127.0.0.1:0");
    let server = server.limits(limits()).server_limits(server_limits(shards)).sockets(sockets());
    let running = server.shards(shards).pin(false).start(|_shard| Echo).map_err(io::Error::other)?;
    let admin = running.admin_address().and_then(Address::as_ip);
    let admin = admin.ok_or_else(|| io::Error::other("the admin endpoint has no address"))?;
    super::announce_with_admin(running.local_addrs()[0], admin)?;
    running.wait().map(|_| ()).map_err(io::Error::other)
}

/// Echoes lines on io_uring.
pub(crate) fn lines(address: SocketAddr, shards: usize) -> io::Result<()> {
    serve(address, shards, Lines::default(), Driver::IoUring, |_| Echo)
}

/// Echoes lines on epoll.
pub(crate) fn lines_on_epoll(address: SocketAddr, shards: usize) -> io::Result<()> {
    serve(address, shards, Lines::default(), Driver::Epoll, |_| Echo)
}

/// Echoes raw bytes on epoll.
pub(crate) fn raw_on_epoll(address: SocketAddr, shards: usize) -> io::Result<()> {
    serve(address, shards, Raw, Driver::Epoll, |_| Echo)
}

/// Echoes raw bytes on io_uring, inside a tokio runtime.
pub(crate) fn raw_on_tokio(address: SocketAddr) -> io::Result<()> {
    serve_hosted(address, Driver::IoUring, Runtime::Tokio)
}

/// Does the same inside a tokio-uring runtime.
#[cfg(feature = "tokio-uring")]
pub(crate) fn raw_on_tokio_uring(address: SocketAddr) -> io::Result<()> {
    serve_hosted(address, Driver::IoUring, Runtime::TokioUring)
}

/// Echoes raw bytes on epoll, inside a tokio runtime.
pub(crate) fn raw_epoll_on_tokio(address: SocketAddr) -> io::Result<()> {
    serve_hosted(address, Driver::Epoll, Runtime::Tokio)
}

fn serve_hosted(address: SocketAddr, driver: Driver, runtime: Runtime) -> io::Result<()> {
    let server = Server::bind(address).driver(driver).runtime(runtime);
    let server =
        server.limits(limits()).server_limits(server_limits(1)).sockets(sockets()).shards(1).pin(false);
    wait(server.start(|_shard| Echo).map_err(io::Error::other)?)
}

/// Echoes raw bytes on io_uring, in handlers that wait.
pub(crate) fn awaits(address: SocketAddr, shards: usize) -> io::Result<()> {
    serve(address, shards, Raw, Driver::IoUring, |_| AwaitingEcho)
}

/// Does the same on epoll.
pub(crate) fn awaits_on_epoll(address: SocketAddr) -> io::Result<()> {
    serve(address, 1, Raw, Driver::Epoll, |_| AwaitingEcho)
}

pub(super) fn serve<S: Service>(
    address: SocketAddr,
    shards: usize,
    framing: impl Framing + Clone + Send,
    driver: Driver,
    factory: fn(&Shard) -> S,
) -> io::Result<()> {
    let server = Server::bind(address).framing(framing).driver(driver);
    let server = server
        .limits(limits())
        .server_limits(server_limits(shards))
        .sockets(sockets())
        .shards(shards)
        .pin(has_a_cpu_each(shards));
    wait(server.start(factory).map_err(io::Error::other)?)
}

/// Echoes on io_uring, through a stream: read and written by copying, with tokio's traits.
pub(crate) fn stream(address: SocketAddr, shards: usize) -> io::Result<()> {
    let server = Server::bind(address).driver(Driver::IoUring);
    let server = server
        .limits(limits())
        .server_limits(server_limits(shards))
        .sockets(sockets())
        .shards(shards)
        .pin(false);
    let running = server.start(|_shard| {
        ringserve::stream(async |mut stream: Stream| {
            let mut buf = [0; 4096];
            loop {
                let len = stream.read(&mut buf).await?;
                if len == 0 {
                    return io::Result::Ok(());
                }
                AsyncWriteExt::write_all(&mut stream, &buf[..len]).await?;
            }
        })
    });
    wait(running.map_err(io::Error::other)?)
}

/// Connections that `shards` shards hold in this process: as many each as the limit of open files,
/// and no fewer together than by default.
pub(crate) fn connections_max(shards: usize) -> usize {
    let files = getrlimit(Resource::Nofile).current.and_then(|files| usize::try_from(files).ok());
    let wanted = ServerLimits::default().connections_max.max(SHARD_CONNECTIONS_MAX * shards);
    files.map_or(wanted, |files| files.saturating_mul(shards).min(wanted))
}

/// True if each of several shards can have a CPU.
pub(super) fn has_a_cpu_each(shards: usize) -> bool {
    shards > 1 && available_parallelism().is_ok_and(|cpus| cpus.get() >= shards)
}

/// The limits of all services here: nothing ends a connection that is measured for long.
pub(super) fn limits() -> Limits {
    Limits::default().idle_timeout(Duration::from_secs(24 * 3600))
}

/// The limits of all servers here.
pub(super) fn server_limits(shards: usize) -> ServerLimits {
    ServerLimits::default().connections_max(connections_max(shards)).upstreams_max(0)
}

/// Disables keep-alive: connections opened together are probed together, after two minutes. On
/// loopback all probes beyond `net.core.netdev_max_backlog` are then lost, and `idle` would measure
/// how the kernel ends connections.
pub(super) fn sockets() -> SocketOptions {
    SocketOptions::default().keep_alive(None)
}

pub(super) fn wait(running: ServerHandle) -> io::Result<()> {
    announce(running.local_addrs()[0])?;
    running.wait().map(|_| ()).map_err(io::Error::other)
}
