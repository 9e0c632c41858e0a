//! The product: echo on ringserve, one shard.

use std::convert::Infallible;
use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::task::Poll;

use ringserve::framing::{Framing, Lines, Raw};
use ringserve::{Cx, Driver, Frame, Running, Server, Service, Shard, Stream};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::announce;

struct Echo;

impl Service for Echo {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Infallible> {
        cx.reply(frame);
        Ok(())
    }
}

/// Waits once before it echoes, for others to run.
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
pub(crate) fn raw(address: SocketAddr) -> io::Result<()> {
    serve(address, Raw, Driver::IoUring, |_| Echo)
}

/// Echoes lines on io_uring.
pub(crate) fn lines(address: SocketAddr) -> io::Result<()> {
    serve(address, Lines::default(), Driver::IoUring, |_| Echo)
}

/// Echoes lines on epoll.
pub(crate) fn lines_on_epoll(address: SocketAddr) -> io::Result<()> {
    serve(address, Lines::default(), Driver::Epoll, |_| Echo)
}

/// Echoes raw bytes on epoll.
pub(crate) fn raw_on_epoll(address: SocketAddr) -> io::Result<()> {
    serve(address, Raw, Driver::Epoll, |_| Echo)
}

/// Echoes raw bytes on io_uring, in handlers that wait.
pub(crate) fn awaits(address: SocketAddr) -> io::Result<()> {
    serve(address, Raw, Driver::IoUring, |_| AwaitingEcho)
}

/// The same on epoll.
pub(crate) fn awaits_on_epoll(address: SocketAddr) -> io::Result<()> {
    serve(address, Raw, Driver::Epoll, |_| AwaitingEcho)
}

fn serve<S: Service>(
    address: SocketAddr,
    framing: impl Framing + Clone + Send,
    driver: Driver,
    factory: fn(&Shard) -> S,
) -> io::Result<()> {
    let server = Server::bind(address).framing(framing).driver(driver).shards(1).pin(false);
    wait(server.start(factory).map_err(io::Error::other)?)
}

/// Echoes on io_uring, through a stream: read and written by copying, with tokio's traits.
pub(crate) fn stream(address: SocketAddr) -> io::Result<()> {
    let server = Server::bind(address).driver(Driver::IoUring).shards(1).pin(false);
    let running = server.start_stream(|_shard| {
        async |mut stream: Stream| {
            let mut buf = [0; 4096];
            loop {
                let len = stream.read(&mut buf).await?;
                if len == 0 {
                    return io::Result::Ok(());
                }
                AsyncWriteExt::write_all(&mut stream, &buf[..len]).await?;
            }
        }
    });
    wait(running.map_err(io::Error::other)?)
}

pub(super) fn wait(running: Running) -> io::Result<()> {
    announce(running.local_addrs()[0])?;
    running.wait().map(|_| ()).map_err(io::Error::other)
}
