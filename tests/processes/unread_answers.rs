//! Peers that request much at once and read nothing: the process takes little more than
//! `held_bytes_max`, and no peer that needs little is closed for them.

use std::io::Write;
use std::net::SocketAddr;
use std::sync::Arc;

use ringserve::framing::LengthPrefix;
use ringserve::limits::ServerLimits;
use ringserve::{Limits, Server};
use ringserve_tests::child::{Process, is_child};
use ringserve_tests::client::frame;
use ringserve_tests::{Client, Puppet, order};

const HELD: usize = 16 << 20;

/// Bytes of an answer, and the peers that request one: together seven times the limit on held
/// bytes.
const ANSWER: usize = 1_000_000;
const PEERS: usize = 120;

/// Peers that need little.
const CALM: usize = 20;

/// The most memory of the process for that: a quarter more than the limit, and some for the peers
/// themselves.
const GROWTH_MAX: usize = HELD + HELD / 4 + (4 << 20);

/// The child: serves, and reports the most memory that its process had, for each line.
#[test]
#[ignore = "the child process of the other test here, which starts it; alone: RINGSERVE_TEST_CHILD=1 cargo test -p ringserve-tests --test processes unread_answers::child_serves -- --exact --ignored --nocapture"]
fn child_serves() {
    if !is_child() {
        return;
    }
    let shared = Arc::default();
    let limits = Limits::default().outbox_bytes_max(2 << 20);
    let server = Server::bind("127.0.0.1:0").shards(1).pin(false).framing(LengthPrefix::default());
    let server = server.limits(limits).server_limits(ServerLimits::default().held_bytes_max(HELD));
    let running = server.start(move |_| Puppet::new(Arc::clone(&shared))).unwrap();
    println!("\naddress {}", running.local_addrs()[0]);
    for _ in std::io::stdin().lines() {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        let most = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("Linux tells it");
        println!("\nmost {}", most.trim().trim_end_matches(" kB"));
    }
}

/// The most memory that the process had so far.
fn most_bytes(server: &mut Process) -> usize {
    server.say("how much?");
    server.line_after("most ").parse::<usize>().unwrap() << 10
}

#[test]
fn peers_that_read_nothing_take_little_more_than_may_be_held() {
    let mut server = Process::start(child_serves);
    let addr: SocketAddr = server.line_after("address ").parse().unwrap();
    let mut calm: Vec<Client> = (0..CALM).map(|_| Client::connect(addr)).collect();
    calm.iter_mut().for_each(|client| client.echoes("before"));
    // One answer after another, so that the memory of a single one is taken before.
    Client::connect(addr).ask(order::reply(ANSWER));
    let before = most_bytes(&mut server);
    let mut hogs: Vec<Client> = (0..PEERS).map(|_| Client::with_small_window(addr)).collect();
    let ask = frame(order::reply(ANSWER));
    hogs.iter_mut().for_each(|client| client.stream.write_all(&ask).unwrap());
    for round in 0..50 {
        calm.iter_mut().for_each(|client| client.echoes(format!("calm {round}")));
    }
    let grew = most_bytes(&mut server) - before;
    assert!(grew <= GROWTH_MAX, "{} KiB, where {} KiB may be", grew >> 10, GROWTH_MAX >> 10);
    assert!(grew >= HELD / 2, "{} KiB: nothing was asked for", grew >> 10);
}
