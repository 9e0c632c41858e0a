//! Echo of whole WebSocket messages. Its rivals are programs of the other workspace.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;

use ringserve::server::Driver;
use ringserve::websocket::{Message, Messages, WebSocket, WebSocketOptions, WsCx};
use ringserve::{Server, ws};

use super::product::{limits, server_limits, sockets, wait};
use crate::websocket::MESSAGE_BYTES_MAX;

/// Bytes before each message in the framing [`Messages`], which count in `frame_bytes_max`.
const MARK_BYTES: usize = 5;

struct Echo;

impl WebSocket for Echo {
    type Session = ();
    type Error = Infallible;

    async fn message(&self, cx: &WsCx<'_, ()>, message: Message) -> Result<(), Infallible> {
        cx.send(message);
        Ok(())
    }
}

/// Echoes messages on io_uring.
pub(super) fn ringserve(address: SocketAddr, shards: usize) -> io::Result<()> {
    serve(address, shards, Driver::IoUring)
}

/// Echoes messages on epoll.
pub(super) fn ringserve_on_epoll(address: SocketAddr) -> io::Result<()> {
    serve(address, 1, Driver::Epoll)
}

fn serve(address: SocketAddr, shards: usize, driver: Driver) -> io::Result<()> {
    let options = WebSocketOptions::new().message_bytes_max(MESSAGE_BYTES_MAX);
    let server = Server::bind(address).websocket_with(options).framing(Messages::binary()).driver(driver);
    let server = server
        .limits(limits().frame_bytes_max(MARK_BYTES + MESSAGE_BYTES_MAX))
        .server_limits(server_limits(shards))
        .sockets(sockets())
        .shards(shards)
        .pin(false);
    wait(server.start(|_shard| ws(Echo)).map_err(io::Error::other)?)
}
