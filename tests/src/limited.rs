//! Servers with limits on admission, and peers of many addresses.

use std::convert::Infallible;
use std::io::{BufRead, BufReader};
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::time::Duration;

use ringserve::admission::{Admission, RefusedBy};
use ringserve::framing::Lines;
use ringserve::server::Driver;
use ringserve::service::{OpenCx, Refusal};
use ringserve::{Cx, Error, Frame, Limits, Server, ServerHandle, Service};
use socket2::{Domain, Socket, Type};

use crate::{SOON, eventually, on_epoll};

/// Sends hello.
pub struct Greeter;

impl Service for Greeter {
    type Session = ();
    type Error = Infallible;

    async fn open(&self, opening: &OpenCx<'_>) -> Result<(), Refusal> {
        opening.reply("hello");
        Ok(())
    }

    async fn call(&self, cx: &Cx<'_, ()>, line: Frame) -> Result<(), Infallible> {
        cx.reply(line);
        Ok(())
    }
}

/// The drivers to test.
pub fn drivers() -> Vec<Driver> {
    if on_epoll() { vec![Driver::Epoll] } else { vec![Driver::IoUring, Driver::Epoll] }
}

/// A server of greeters.
#[track_caller]
pub fn greets(driver: Driver, addr: &str, shards: usize, admission: Admission) -> ServerHandle {
    try_to_greet(Server::bind(addr), driver, shards, admission).unwrap()
}

/// Starts the same server, if that is possible.
pub fn try_to_greet(
    server: Server,
    driver: Driver,
    shards: usize,
    admission: Admission,
) -> Result<ServerHandle, Error> {
    // Peers are still there at the end of a test.
    let limits = Limits::default().linger_timeout(Duration::from_millis(100));
    let server = server.driver(driver).shards(shards).pin(false).limits(limits).admission(admission);
    server.framing(Lines::default()).start(|_| Greeter)
}

/// Begins a connection from that address. `None` if the server does not answer in time.
pub fn connect_from(source: &str, to: SocketAddr, within: Duration) -> Option<TcpStream> {
    let source: IpAddr = source.parse().unwrap();
    let socket = Socket::new(Domain::for_address(to), Type::STREAM, None).unwrap();
    // For [::] with an IPv4 client.
    let source = match (source, to) {
        (IpAddr::V4(source), SocketAddr::V6(_)) => IpAddr::V6(source.to_ipv6_mapped()),
        (source, _) => source,
    };
    // Its port must not keep a server of another test from all addresses.
    socket.set_reuse_address(true).unwrap();
    socket.bind(&SocketAddr::from((source, 0)).into()).unwrap();
    socket.connect_timeout(&to.into(), within).ok()?;
    let stream = TcpStream::from(socket);
    stream.set_read_timeout(Some(SOON)).unwrap();
    Some(stream)
}

/// Connects from that address. Returns the connection if it gets the greeting.
#[track_caller]
pub fn greeted(source: &str, to: SocketAddr) -> Option<TcpStream> {
    let stream = connect_from(source, to, SOON).expect("the server listens");
    hears_hello(&stream).then_some(stream)
}

/// True for hello, and false for the end.
pub fn hears_hello(stream: impl std::io::Read) -> bool {
    let mut line = String::new();
    match BufReader::new(stream).read_line(&mut line) {
        Ok(0) => false,
        Ok(_) => {
            assert_eq!(line, "hello\n");
            true
        }
        Err(error) => {
            assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "{error}");
            false
        }
    }
}

/// Waits until that many were refused for that reason.
#[track_caller]
pub fn refused_by(running: &ServerHandle, by: RefusedBy, count: u64) {
    let what = format!("{count} are refused by {}", by.name());
    eventually(&what, SOON, || running.stats_now().counters.refused_by(by) >= count);
    assert_eq!(running.stats_now().counters.refused_by(by), count, "{what}");
}

/// Shuts it down, and checks that nothing is counted.
#[track_caller]
pub fn ended(running: ServerHandle) {
    let control = running.control();
    running.shutdown();
    running.wait().unwrap();
    assert_eq!(control.admission_stats().connections, 0, "connections count that ended");
}
