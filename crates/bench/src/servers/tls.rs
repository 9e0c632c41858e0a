//! Echo below TLS: ringserve's and tokio-rustls', with the same configuration of the same rustls.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::OnceLock;

use ringserve::Server;
use ringserve::framing::Raw;
use ringserve::server::Driver;
use ringserve::tls::{Tls, TlsListener};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;

use super::product::{Echo, limits, server_limits, sockets, wait};
use super::tokio_echo::{BUFFER_BYTES, for_each};

/// TLS with a certificate that it makes, for P-256.
fn tls() -> io::Result<Tls> {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).map_err(io::Error::other)?;
    Ok(Tls::server().certificate(made.cert.pem().into(), made.signing_key.serialize_pem().into()))
}

/// Echoes raw bytes on io_uring.
pub(super) fn ringserve(address: SocketAddr, shards: usize) -> io::Result<()> {
    serve(address, shards, Driver::IoUring, tls()?)
}

/// Echoes raw bytes on epoll.
pub(super) fn ringserve_on_epoll(address: SocketAddr) -> io::Result<()> {
    serve(address, 1, Driver::Epoll, tls()?)
}

fn serve(address: SocketAddr, shards: usize, driver: Driver, tls: Tls) -> io::Result<()> {
    let server = Server::bind(address).framing(Raw).driver(driver).tls(tls);
    let server = server
        .limits(limits())
        .server_limits(server_limits(shards))
        .sockets(sockets())
        .shards(shards)
        .pin(false);
    wait(server.start(|_shard| Echo).map_err(io::Error::other)?)
}

static ACCEPTOR: OnceLock<TlsAcceptor> = OnceLock::new();

/// Echoes raw bytes by tokio-rustls.
pub(super) fn tokio(listener: TcpListener) -> io::Result<()> {
    let config = TlsListener::new(tls()?).map_err(io::Error::other)?.config();
    ACCEPTOR.get_or_init(|| TlsAcceptor::from(config));
    for_each(listener, echo)
}

async fn echo(stream: TcpStream) -> io::Result<()> {
    let Some(acceptor) = ACCEPTOR.get() else { return Ok(()) };
    let mut stream = acceptor.accept(stream).await?;
    let mut buffer = vec![0; BUFFER_BYTES];
    loop {
        let count = stream.read(&mut buffer).await?;
        if count == 0 {
            return stream.shutdown().await;
        }
        stream.write_all(&buffer[..count]).await?;
        stream.flush().await?;
    }
}
