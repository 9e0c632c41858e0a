//! The product: echo on ringserve, one shard.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;

use ringserve::framing::{Framing, Lines, Raw};
use ringserve::{Cx, Driver, Frame, Server, Service};

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

/// Echoes raw bytes on io_uring.
pub(crate) fn raw(address: SocketAddr) -> io::Result<()> {
    serve(address, Raw, Driver::IoUring)
}

/// Echoes lines on io_uring.
pub(crate) fn lines(address: SocketAddr) -> io::Result<()> {
    serve(address, Lines::default(), Driver::IoUring)
}

/// Echoes raw bytes on epoll.
pub(crate) fn raw_on_epoll(address: SocketAddr) -> io::Result<()> {
    serve(address, Raw, Driver::Epoll)
}

fn serve(address: SocketAddr, framing: impl Framing + Clone + Send, driver: Driver) -> io::Result<()> {
    let server = Server::bind(address).framing(framing).driver(driver).shards(1).pin(false);
    let running = server.start(|_shard| Echo).map_err(io::Error::other)?;
    announce(running.local_addrs()[0])?;
    running.wait().map(|_| ()).map_err(io::Error::other)
}
