//! The memory of a server after a storm of connections: it returns to the system.
//!
//! The server is a separate process, so that its resident memory is the server's alone.

use std::fs;
use std::net::SocketAddr;

use ringserve_tests::child::{Process, is_child};
use ringserve_tests::client::frame;
use ringserve_tests::{Client, Lab, SOON, eventually, no_time_limits, order};

/// The least memory that each storm takes, and the part of it that may stay.
const TAKES_MIN: usize = 64 << 20;
const STAYS_MAX: usize = 16 << 20;

/// The child: serves until its input ends, and answers each line with the number of its
/// connections.
#[test]
#[ignore = "the child process of the other tests here, which start it; alone: RINGSERVE_TEST_CHILD=1 cargo test -p ringserve-tests --test processes memory_returns::child_serves -- --exact --ignored --nocapture"]
fn child_serves() {
    if !is_child() {
        return;
    }
    let lab = Lab::start(no_time_limits());
    println!("\naddress {}", lab.addr());
    for _ in std::io::stdin().lines() {
        println!("\nconnections {}", lab.stats().connections);
    }
}

struct ServerProcess {
    process: Process,
    addr: SocketAddr,
    /// Resident memory before the first storm.
    before: usize,
}

impl ServerProcess {
    fn start() -> ServerProcess {
        let mut process = Process::start(child_serves);
        let addr = process.line_after("address ").parse().unwrap();
        // Allocates the memory of the first connection.
        Client::connect(addr).echoes("");
        let mut server = ServerProcess { process, addr, before: 0 };
        server.holds(0);
        server.before = server.resident();
        server
    }

    fn resident(&self) -> usize {
        let statm = fs::read_to_string(format!("/proc/{}/statm", self.process.child.id())).unwrap();
        let pages: usize = statm.split(' ').nth(1).unwrap().parse().unwrap();
        pages * rustix::param::page_size()
    }

    #[track_caller]
    fn holds(&mut self, connections: usize) {
        eventually("the connections are as many", SOON, || {
            self.process.say("how many?");
            self.process.line_after("connections ") == connections.to_string()
        });
    }

    /// Runs a storm, and waits until its memory is back.
    #[track_caller]
    fn weathers(&mut self, name: &str, storm: fn(SocketAddr) -> Vec<Client>) {
        let held = storm(self.addr);
        let (mut most, mut now) = (0, 0);
        eventually("the storm takes its memory", 3 * SOON, || {
            most = most.max(self.resident());
            most >= self.before + TAKES_MIN
        });
        drop(held);
        eventually("the memory is back", 3 * SOON, || {
            now = self.resident();
            now <= self.before + STAYS_MAX
        });
        let [before, most, now] = [self.before, most, now].map(|bytes| bytes as f64 / f64::from(1 << 20));
        eprintln!("{name}: {before:.1} MiB before, {most:.1} in the storm, {now:.1} after it");
    }
}

/// Peers that request much and read nothing of it.
fn unread_replies(addr: SocketAddr) -> Vec<Client> {
    let burst = frame(order::reply(65_536)).repeat(6);
    let mut peers: Vec<_> = (0..800).map(|_| Client::with_small_window(addr)).collect();
    peers.iter_mut().for_each(|peer| peer.write(&burst));
    peers
}

/// Peers that send most of a large frame.
fn half_frames(addr: SocketAddr) -> Vec<Client> {
    let whole = frame(order::echo_of((1 << 20) - 4));
    let mut peers: Vec<_> = (0..200).map(|_| Client::connect(addr)).collect();
    peers.iter_mut().for_each(|peer| peer.write(&whole[..900 << 10]));
    peers
}

/// Peers whose frames are kept.
fn kept_frames(addr: SocketAddr) -> Vec<Client> {
    let kept = frame(order::keep([7; 15 << 10]));
    let mut peers: Vec<_> = (0..500).map(|_| Client::connect(addr)).collect();
    for _ in 0..16 {
        peers.iter_mut().for_each(|peer| peer.write(&kept));
    }
    peers
}

#[test]
fn memory_of_unread_replies_returns() {
    ServerProcess::start().weathers("unread replies", unread_replies);
}

#[test]
fn memory_of_half_frames_returns() {
    ServerProcess::start().weathers("half frames", half_frames);
}

/// The receives of remaining connections are armed again, over other buffers.
#[test]
fn memory_of_kept_frames_returns_while_connections_stay() {
    let mut server = ServerProcess::start();
    let mut stay: Vec<Client> = (0..20).map(|_| Client::connect(server.addr)).collect();
    for round in 0..2 {
        stay.iter_mut().take(10).for_each(|client| client.echoes("before"));
        server.weathers("kept frames", kept_frames);
        server.holds(20);
        let text = order::echo(format!("after storm {round}"));
        stay.iter_mut().for_each(|client| client.gets_back(&text));
    }
}
