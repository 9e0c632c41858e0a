//! An abort of as many connections as a ring holds here.

mod common;

use std::io::{BufRead, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use common::child::{Process, is_child};
use common::{Lab, SOON, eventually, no_time_limits};
use ringserve::CloseReason;

/// Nearly as many as a table of 20 000 entries holds, with room for what the process has open beside them.
const CONNECTIONS: usize = 18_000;

/// Fewer than these prove nothing about the cost of many.
const CONNECTIONS_MIN: usize = 2000;

/// Connects that fail one after the other until the machine is taken to have no more to give.
const FAILURES_MAX: u32 = 40;

/// The child: holds the connections, since both ends together would be more descriptors than a process may have.
#[test]
#[ignore = "the child process of the other test here, which starts it; alone, with a server at that address: echo 127.0.0.1:7000 | RINGSERVE_TEST_CHILD=1 cargo test --test abort_all child_holds_connections -- --exact --ignored --nocapture"]
fn child_holds_connections() {
    if !is_child() {
        return;
    }
    let mut lines = std::io::stdin().lock().lines().map(Result::unwrap);
    let addr: SocketAddr = lines.next().unwrap().parse().unwrap();
    let mut held = Vec::with_capacity(CONNECTIONS);
    let mut failures = 0;
    while held.len() < CONNECTIONS && failures < FAILURES_MAX {
        match TcpStream::connect(addr) {
            Ok(stream) => {
                held.push(stream);
                failures = 0;
            }
            // A machine may have fewer ports, descriptors or less socket memory to give than its limits say.
            Err(error) => {
                println!("connection {} of {CONNECTIONS}: {error}", held.len());
                failures += 1;
                std::thread::park_timeout(Duration::from_millis(50));
            }
        }
    }
    // A byte each, so that every one of them has a receive that was used.
    for (n, stream) in held.iter_mut().enumerate() {
        stream.write_all(&[0]).unwrap_or_else(|error| panic!("byte of connection {n}: {error}"));
    }
    println!("\nconnections held: {}", held.len());
    lines.next();
}

#[test]
fn an_abort_ends_eighteen_thousand_connections_at_once() {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    if limit.maximum.is_some_and(|max| max < 20_000) {
        return eprintln!("not tested: the hard RLIMIT_NOFILE is below 20 000");
    }
    let lab = Lab::start(no_time_limits());
    let mut child = Process::start("child_holds_connections");
    child.say(&lab.addr().to_string());
    let held: usize = child.line_after("connections held: ").parse().unwrap();
    assert!(held >= CONNECTIONS_MIN, "the machine gave {held} connections");
    lab.holds(held);
    eventually("the byte of each arrives", SOON, || lab.report().counters.bytes_received == held as u64);
    let started = Instant::now();
    let report = lab.force();
    eprintln!("{held} connections were aborted in {:?}", started.elapsed());
    assert_eq!(report.counters.closed_for(CloseReason::Forced), held as u64);
    child.say("done");
}
