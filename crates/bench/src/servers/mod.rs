//! The servers that can be measured: the one table to extend, and their shared code.

mod codec;
mod fanout;
mod http;
mod limit_epoll;
mod limit_uring;
mod product;
mod proxy;
mod tls;
mod tokio_echo;
mod websocket;

use std::fmt;
use std::io::{self, Write};
use std::net::{SocketAddr, TcpListener};

pub(crate) use fanout::LISTEN;
pub(crate) use product::connections_max as sized_connections_max;
use socket2::{Domain, Protocol, Socket, Type};

use crate::child::LISTENING;

/// The units that a server echoes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Speaks {
    /// Bytes as they arrive. Measured with raw messages and with lines.
    Raw,
    /// Lines, each ended by `\n`. Measured with `--lines` only.
    Lines,
    /// Lines too, which are sent to all listeners.
    Fanout,
    /// Bytes as they arrive, below TLS. Measured with `--tls` only.
    Tls,
    /// WebSocket messages. Measured with `--websocket` only.
    WebSocket,
    /// HTTP with a greeting. Measured by `scripts/http-speed`.
    Http,
}

/// One row of the table of servers.
pub(crate) struct Server {
    /// Name on the command line and in reports.
    pub(crate) name: &'static str,
    /// The units that it echoes.
    pub(crate) speaks: Speaks,
    /// Runs it in this process until the process ends; called by `serve NAME`.
    pub(crate) run: Run,
}

impl Server {
    /// True if it takes a number of shards.
    pub(crate) fn has_shards(&self) -> bool {
        matches!(self.run, Run::Sized(_) | Run::Shards(_))
    }

    /// True if shards of it in one process hold more than its limit of open files.
    pub(crate) fn is_sized(&self) -> bool {
        matches!(self.run, Run::Sized(_))
    }
}

/// The way to run a server.
#[derive(Clone, Copy)]
pub(crate) enum Run {
    /// On a given listener.
    On(fn(TcpListener) -> io::Result<()>),
    /// It binds the address itself and calls [`announce`] when it listens.
    Itself(fn(SocketAddr) -> io::Result<()>),
    /// The same with this many shards, or worker threads.
    Shards(fn(SocketAddr, usize) -> io::Result<()>),
    /// The same with shards that hold [`sized_connections_max`] connections together.
    Sized(fn(SocketAddr, usize) -> io::Result<()>),
}

/// Every server that `serve` can run and `lockstep` can measure. The first is the yardstick by
/// which the others are divided.
///
/// To add one: a row here, and a function that serves a listener until the process ends.
pub(crate) const SERVERS: &[Server] = &[
    Server { name: "limit-uring", speaks: Speaks::Raw, run: Run::On(limit_uring::run) },
    Server { name: "limit-epoll", speaks: Speaks::Raw, run: Run::On(limit_epoll::run) },
    Server { name: "tokio", speaks: Speaks::Raw, run: Run::On(tokio_echo::run) },
    Server { name: "ringserve", speaks: Speaks::Raw, run: Run::Sized(product::raw) },
    Server { name: "ringserve-epoll", speaks: Speaks::Raw, run: Run::Shards(product::raw_on_epoll) },
    Server {
        name: "ringserve-no-addresses",
        speaks: Speaks::Raw,
        run: Run::Sized(product::raw_without_addresses),
    },
    #[cfg(feature = "admin")]
    Server { name: "ringserve-page", speaks: Speaks::Raw, run: Run::Sized(product::raw_with_a_page) },
    Server { name: "ringserve-stream", speaks: Speaks::Raw, run: Run::Sized(product::stream) },
    Server { name: "ringserve-awaits", speaks: Speaks::Raw, run: Run::Sized(product::awaits) },
    Server {
        name: "ringserve-epoll-awaits",
        speaks: Speaks::Raw,
        run: Run::Itself(product::awaits_on_epoll),
    },
    Server { name: "tokio-awaits", speaks: Speaks::Raw, run: Run::On(tokio_echo::awaits) },
    Server { name: "ringserve-on-tokio", speaks: Speaks::Raw, run: Run::Itself(product::raw_on_tokio) },
    #[cfg(feature = "tokio-uring")]
    Server {
        name: "ringserve-on-tokio-uring",
        speaks: Speaks::Raw,
        run: Run::Itself(product::raw_on_tokio_uring),
    },
    Server {
        name: "ringserve-epoll-on-tokio",
        speaks: Speaks::Raw,
        run: Run::Itself(product::raw_epoll_on_tokio),
    },
    Server { name: "ringserve-lines", speaks: Speaks::Lines, run: Run::Sized(product::lines) },
    Server {
        name: "ringserve-epoll-lines",
        speaks: Speaks::Lines,
        run: Run::Shards(product::lines_on_epoll),
    },
    Server { name: "ringserve-codec", speaks: Speaks::Lines, run: Run::Sized(codec::ringserve) },
    Server {
        name: "ringserve-epoll-codec",
        speaks: Speaks::Lines,
        run: Run::Itself(codec::ringserve_on_epoll),
    },
    Server { name: "tokio-codec-batched", speaks: Speaks::Lines, run: Run::On(codec::tokio_batched) },
];

/// Every server that is measured with `--tls`.
pub(crate) const TLS_SERVERS: &[Server] = &[
    Server { name: "ringserve-tls", speaks: Speaks::Tls, run: Run::Sized(tls::ringserve) },
    Server { name: "ringserve-epoll-tls", speaks: Speaks::Tls, run: Run::Itself(tls::ringserve_on_epoll) },
    Server { name: "tokio-rustls", speaks: Speaks::Tls, run: Run::On(tls::tokio) },
];

/// Every server that is measured with `--websocket`.
pub(crate) const WEBSOCKET_SERVERS: &[Server] = &[
    Server { name: "ringserve-ws", speaks: Speaks::WebSocket, run: Run::Sized(websocket::ringserve) },
    Server {
        name: "ringserve-epoll-ws",
        speaks: Speaks::WebSocket,
        run: Run::Itself(websocket::ringserve_on_epoll),
    },
];

/// Every server that `fanout` can measure.
pub(crate) const FANOUT_SERVERS: &[Server] = &[
    Server { name: "ringserve-fanout", speaks: Speaks::Fanout, run: Run::Itself(fanout::ringserve) },
    Server {
        name: "ringserve-epoll-fanout",
        speaks: Speaks::Fanout,
        run: Run::Itself(fanout::ringserve_on_epoll),
    },
    Server { name: "tokio-fanout", speaks: Speaks::Fanout, run: Run::On(fanout::tokio) },
];

/// Every server that `scripts/http-speed` can measure.
pub(crate) const HTTP_SERVERS: &[Server] = &[
    Server { name: "ringserve-http", speaks: Speaks::Http, run: Run::Shards(http::ringserve) },
    Server { name: "ringserve-epoll-http", speaks: Speaks::Http, run: Run::Shards(http::ringserve_on_epoll) },
    Server {
        name: "ringserve-http-full-buffers",
        speaks: Speaks::Http,
        run: Run::Shards(http::ringserve_fills_buffers),
    },
    Server {
        name: "ringserve-epoll-http-full-buffers",
        speaks: Speaks::Http,
        run: Run::Shards(http::ringserve_on_epoll_fills_buffers),
    },
    Server { name: "tokio-http", speaks: Speaks::Http, run: Run::On(http::tokio) },
    Server { name: "tokio-http-flush", speaks: Speaks::Http, run: Run::On(http::tokio_flushes_together) },
    Server { name: "tokio-http-multi", speaks: Speaks::Http, run: Run::Shards(http::tokio_with_workers) },
    Server { name: "tokio-http-timer", speaks: Speaks::Http, run: Run::On(http::tokio_with_timer) },
];

/// Proxies, which `load` can measure: each starts an echo server as its upstream.
pub(crate) const PROXY_SERVERS: &[Server] = &[
    Server { name: "ringserve-proxy", speaks: Speaks::Raw, run: Run::Itself(proxy::ringserve) },
    Server {
        name: "ringserve-epoll-proxy",
        speaks: Speaks::Raw,
        run: Run::Itself(proxy::ringserve_on_epoll),
    },
    Server { name: "tokio-proxy", speaks: Speaks::Raw, run: Run::On(proxy::tokio) },
];

/// Every server that echoes, below TLS and WebSocket or not.
pub(crate) fn echoing() -> impl Iterator<Item = &'static Server> {
    SERVERS.iter().chain(TLS_SERVERS).chain(WEBSOCKET_SERVERS)
}

/// Every server there is.
pub(crate) fn all() -> impl Iterator<Item = &'static Server> {
    echoing().chain(FANOUT_SERVERS).chain(PROXY_SERVERS).chain(HTTP_SERVERS)
}

/// The row of `name`.
pub(crate) fn find(name: &str) -> Option<&'static Server> {
    all().find(|server| server.name == name)
}

/// Listens on `address`, prints it, and runs `server` until the process ends.
pub(crate) fn serve(server: &Server, address: SocketAddr, shards: usize) -> io::Result<()> {
    match server.run {
        Run::On(run) => {
            let listener = listen(address)?;
            announce(listener.local_addr()?)?;
            run(listener)
        }
        Run::Itself(run) => run(address),
        Run::Shards(run) | Run::Sized(run) => run(address, shards),
    }
}

/// Prints the address of the server.
fn announce(address: SocketAddr) -> io::Result<()> {
    say(format_args!("{LISTENING}{address}"))
}

/// Does the same for a server with an admin endpoint.
#[cfg(feature = "admin")]
fn announce_with_admin(address: SocketAddr, admin: SocketAddr) -> io::Result<()> {
    say(format_args!("{LISTENING}{address}{}{admin}", crate::child::ADMIN))
}

fn say(line: fmt::Arguments<'_>) -> io::Result<()> {
    let mut stdout = io::stdout();
    writeln!(stdout, "{line}")?;
    stdout.flush()
}

/// Connections that may wait to be accepted: the default of `net.core.somaxconn`, to which the
/// kernel limits it.
const BACKLOG: i32 = 4096;

/// A non-blocking listener whose accepted sockets inherit `TCP_NODELAY` from it.
fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    if !address.ip().is_loopback() {
        let why = format!("{address} is not a loopback address; these servers have no limits");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    }
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    socket.set_tcp_nodelay(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}
