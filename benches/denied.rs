//! The cost of a denied peer for the machine: a first packet that the kernel's filter drops,
//! compared with a connection that the server accepts and closes. Both ends are on this machine,
//! and all CPU time of the process counts: on loopback the sender's thread carries the packet to
//! the listener, through the filter. The cost of a socket that connects to nothing is subtracted.
//!
//!     cargo bench -p ringserve-benches --bench denied
//!     scripts/denied
//!
//! The script runs it in a network where first packets can also be sent to a link that is down,
//! whose ends are its arguments: that is the sender's cost, and is subtracted as well.
//!
//! Kinds alternate within a round, so that a busy machine disturbs all alike; the median of the
//! rounds is printed.

use std::convert::Infallible;
use std::io::Read;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::Duration;

use ringserve::admission::Admission;
use ringserve::framing::Lines;
use ringserve::server::Driver;
use ringserve::{Cx, Frame, Server, ServerHandle, Service};
use rustix::time::{ClockId, clock_gettime};
use socket2::{Domain, Socket, Type};

/// Rounds of each kind: an odd number, so that there is a median.
const ROUNDS: usize = 41;

/// Attempts that go together, as from a crowd: the server accepts and closes them in few turns.
const TOGETHER: usize = 32;

/// Batches of a kind in a round.
const BATCHES: usize = 12;

/// The source of denied peers.
const DENIED: Ipv4Addr = Ipv4Addr::new(127, 0, 9, 1);

struct Closes;

impl Service for Closes {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, _cx: &Cx<'_, ()>, _line: Frame) -> Result<(), Infallible> {
        Ok(())
    }
}

fn server(driver: Driver, filtered: bool) -> ServerHandle {
    let deny = Admission::default().deny("127.0.9.0/24".parse().expect("a network"));
    let admission = if filtered { deny } else { deny.without_kernel_filter() };
    let server = Server::bind("127.0.0.1:0").driver(driver).shards(1).pin(false).admission(admission);
    server.framing(Lines::default()).start(|_shard| Closes).expect("it starts")
}

/// CPU time of this process, including the kernel's part.
fn spent() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

fn socket_of(source: Ipv4Addr) -> Socket {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
    socket.set_nonblocking(true).expect("non-blocking");
    socket.bind(&SocketAddr::from((source, 0)).into()).expect("an address of this machine");
    socket
}

/// Sends a first packet that gets no answer.
fn knock(source: Ipv4Addr, addr: SocketAddr) {
    let socket = socket_of(source);
    let error = socket.connect(&addr.into()).expect_err("there is no answer");
    assert_eq!(error.raw_os_error(), Some(libc::EINPROGRESS), "{error}");
}

/// Opens as many connections, and waits until the server closed all of them.
fn crowd(addr: SocketAddr) {
    let connected = |_| {
        let socket = socket_of(DENIED);
        socket.set_nonblocking(false).expect("blocking");
        socket.connect(&addr.into()).expect("the kernel accepts");
        TcpStream::from(socket)
    };
    for mut stream in (0..TOGETHER).map(connected).collect::<Vec<_>>() {
        // A reset is an end as well.
        let read = stream.read(&mut [0]);
        assert!(!matches!(read, Ok(1..)), "a denied peer is told nothing");
    }
}

/// CPU time of one attempt, in nanoseconds.
fn each(mut batch: impl FnMut()) -> f64 {
    let before = spent();
    (0..BATCHES).for_each(|_| batch());
    (spent() - before).as_nanos() as f64 / (BATCHES * TOGETHER) as f64
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The ends of a link that is down, if there is one: `cargo bench` gives other arguments.
fn dead_link() -> Option<(Ipv4Addr, SocketAddr)> {
    let mut addresses = std::env::args().filter_map(|arg| arg.parse::<Ipv4Addr>().ok());
    Some((addresses.next()?, SocketAddr::from((addresses.next()?, 9))))
}

fn main() {
    let link = dead_link();
    for driver in [Driver::IoUring, Driver::Epoll] {
        let (filtering, refusing) = (server(driver, true), server(driver, false));
        let [filters, refuses] = [&filtering, &refusing].map(|server| server.local_addrs()[0]);
        let (mut dropped, mut closed, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
        let (mut sent, mut received) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            let nothing = each(|| (0..TOGETHER).for_each(|_| drop(socket_of(DENIED))));
            let drops = each(|| (0..TOGETHER).for_each(|_| knock(DENIED, filters))) - nothing;
            let closes = each(|| crowd(refuses)) - nothing;
            if let Some((source, nowhere)) = link {
                let sends = each(|| (0..TOGETHER).for_each(|_| knock(source, nowhere))) - nothing;
                sent.push(sends);
                received.push(closes / (drops - sends));
            }
            dropped.push(drops);
            closed.push(closes);
            ratios.push(closes / drops);
        }
        println!(
            "{driver}: dropped by the filter {:.2} µs, accepted and closed {:.2} µs: {:.1} times as much",
            median(dropped) / 1000.0,
            median(closed) / 1000.0,
            median(ratios)
        );
        if link.is_some() {
            println!(
                "{driver}: of the former the sender pays {:.2} µs; without that {:.1} times as much",
                median(sent) / 1000.0,
                median(received)
            );
        }
        let refused = refusing.stats_now().counters.refused;
        assert_eq!(refused, (ROUNDS * BATCHES * TOGETHER) as u64, "each one is refused");
        assert_eq!(filtering.stats_now().counters.accepted, 0, "none passes the filter");
        [filtering, refusing].into_iter().for_each(|server| {
            server.shutdown();
            server.wait().expect("it ends");
        });
    }
}
