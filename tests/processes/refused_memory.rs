//! A process to which the system gives no more memory: a connection that needs some ends, and the
//! process lives.
//!
//! The server is a separate process with a limit on its address space.

use std::convert::Infallible;
use std::future::pending;
use std::io::Write;
use std::net::SocketAddr;

use ringserve::framing::Lines;
use ringserve::{CloseReason, Cx, Frame, Server, Service};
use ringserve_tests::Bounded;
use ringserve_tests::child::{Process, is_child};
use ringserve_tests::client::End;
use ringserve_tests::{Client, SOON, eventually, no_time_limits, status_kib};
use rustix::process::{Resource, Rlimit, setrlimit};

/// Address space that is left once the server runs.
const LEFT: u64 = 48 << 20;

/// A reply that costs the service nothing.
static MEBIBYTE: [u8; 1 << 20] = [b'r'; 1 << 20];

struct Greedy;

impl Service for Greedy {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Infallible> {
        match frame.first() {
            Some(b'r') => (0..100).for_each(|_| cx.reply(&MEBIBYTE)),
            Some(b'w') => pending().await,
            _ => cx.reply(frame),
        }
        Ok(())
    }
}

/// The child: a server that reports its address and, for each line, the number of connections that
/// ended for lack of memory.
#[test]
#[ignore = "the child process of the other tests here, which start it; alone: RINGSERVE_TEST_CHILD=1 cargo test -p ringserve-tests --test processes refused_memory::child_serves -- --exact --ignored --nocapture"]
fn child_serves() {
    if !is_child() {
        return;
    }
    let limits = no_time_limits()
        .frame_bytes_max(1 << 30)
        .outbox_bytes_max(1 << 30)
        .held_bytes_max(4 << 30)
        .inbox_bytes_high(1 << 20)
        .calls_in_flight_max(u16::MAX);
    let server = Server::bind("127.0.0.1:0").shards(1).pin(false).bounded(limits).framing(Lines::default());
    // Otherwise they follow the limit on the address space, and the system refuses nothing.
    let server = server.fit_limits(false);
    let running = server.start(|_| Greedy).unwrap();
    let mut warm = Client::connect(running.local_addrs()[0]);
    warm.write(b"hello\n");
    assert_eq!(warm.read(6), b"hello\n");
    let most = (status_kib("VmSize:") << 10) + LEFT;
    setrlimit(Resource::As, Rlimit { current: Some(most), maximum: Some(most) }).unwrap();
    println!("\nserves at {}", running.local_addrs()[0]);
    for _ in std::io::stdin().lines() {
        println!("\nended {}", running.stats_now().counters.closed_for(CloseReason::MemoryLimit));
    }
}

struct Child {
    process: Process,
    addr: SocketAddr,
}

impl Child {
    fn start() -> Child {
        let mut process = Process::start(child_serves);
        let addr = process.line_after("serves at ").parse().unwrap();
        Child { process, addr }
    }

    /// Connections that ended for lack of memory.
    fn ended(&mut self) -> u64 {
        self.process.say("report");
        self.process.line_after("ended ").parse().unwrap()
    }

    /// Waits until connections ended for lack of memory, and checks that others are served.
    #[track_caller]
    fn lives_without(&mut self, connections: u64, canary: &mut Client) {
        eventually("they end", SOON, || self.ended() >= connections);
        assert_eq!(self.ended(), connections);
        canary.write(b"alive\n");
        assert_eq!(canary.read(6), b"alive\n");
    }
}

#[test]
fn replies_that_do_not_fit_end_their_connection_only() {
    let mut child = Child::start();
    let mut canary = Client::connect(child.addr);
    for round in 1..=5 {
        let mut client = Client::with_small_window(child.addr);
        client.write(b"reply\n");
        assert_eq!(client.end_after_all(), End::Reset);
        child.lives_without(round, &mut canary);
    }
}

#[test]
fn half_a_frame_that_does_not_fit_ends_its_connection_only() {
    let mut child = Child::start();
    let mut canary = Client::connect(child.addr);
    for round in 1..=5 {
        let mut client = Client::connect(child.addr);
        while client.stream.write_all(&MEBIBYTE).is_ok() {}
        child.lives_without(round, &mut canary);
    }
}

#[test]
fn calls_that_do_not_fit_end_their_connection_only() {
    let mut child = Child::start();
    let mut canary = Client::connect(child.addr);
    let calls = b"w\n".repeat(60_000);
    let mut clients = Vec::new();
    // Calls begin a few in a turn, so a later client may be there before those of an earlier one
    // have begun.
    eventually("one of millions of calls does not fit", SOON, || {
        if clients.len() < 50 {
            let mut client = Client::connect(child.addr);
            let _ = client.stream.write_all(&calls);
            clients.push(client);
        }
        canary.write(b"alive\n");
        assert_eq!(canary.read(6), b"alive\n");
        child.ended() > 0
    });
    drop(clients);
    let mut client = Client::connect(child.addr);
    client.write(b"again\n");
    assert_eq!(client.read(6), b"again\n");
}
