//! Proxies, each with an echo server that it starts on another CPU: the product, and the typical
//! tokio program.

use std::io;
use std::net::{SocketAddr, TcpListener};

use ringserve::net::copy_bidirectional;
use ringserve::server::Driver;
use ringserve::{Server, Stream, stream};
use rustix::thread::sched_getcpu;
use tokio::net::TcpStream;

use super::product::{limits, server_limits, sockets, wait};
use crate::child::Child;
use crate::process;

/// The upstream of the proxy, which costs least. Its time is not counted.
const UPSTREAM: &str = "limit-epoll";

/// Starts it on the CPU next to this one, where the generator is; in lock step on this one.
fn upstream() -> io::Result<Child> {
    let here = sched_getcpu();
    if process::has_batch_policy() {
        return Child::start(UPSTREAM, here, true);
    }
    // This thread is on one CPU, so the CPUs of the process do not show how many there are.
    let next = Child::start(UPSTREAM, here + 1, false);
    next.or_else(|_| Child::start(UPSTREAM, 0, false))
}

/// The product on io_uring.
pub(super) fn ringserve(address: SocketAddr) -> io::Result<()> {
    serve(address, Driver::IoUring)
}

/// The product on epoll.
pub(super) fn ringserve_on_epoll(address: SocketAddr) -> io::Result<()> {
    serve(address, Driver::Epoll)
}

fn serve(address: SocketAddr, driver: Driver) -> io::Result<()> {
    let upstream = upstream()?;
    let to = upstream.address;
    let server_limits = server_limits(1).upstreams_max(10_000);
    let server =
        Server::bind(address).driver(driver).limits(limits()).server_limits(server_limits).sockets(sockets());
    let running = server.shards(1).pin(false).start(move |_shard| {
        stream(async move |mut client: Stream| {
            let mut upstream = client.shard().connect(to).await?;
            let copied = copy_bidirectional(&mut client, &mut upstream).await;
            copied.map(drop).map_err(|broken| broken.error)
        })
    });
    wait(running.map_err(io::Error::other)?)
}

/// tokio's `copy_bidirectional`, a task for each client, on a current-thread runtime.
pub(super) fn tokio(listener: TcpListener) -> io::Result<()> {
    let upstream = upstream()?;
    let to = upstream.address;
    tokio::runtime::Builder::new_current_thread().enable_io().build()?.block_on(async {
        let listener = tokio::net::TcpListener::from_std(listener)?;
        loop {
            let Ok((mut client, _)) = listener.accept().await else { continue };
            tokio::spawn(async move {
                let mut upstream = TcpStream::connect(to).await?;
                upstream.set_nodelay(true)?;
                tokio::io::copy_bidirectional(&mut client, &mut upstream).await
            });
        }
    })
}
