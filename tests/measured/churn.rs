//! 100 000 connections, one after another and several at once, of which nothing must be left.

use std::net::SocketAddr;
use std::thread;
use std::time::Duration;

use ringserve_tests::{Client, Lab, SOON, alone, descriptors, eventually, no_time_limits, order, status_kib};

const THREADS: u64 = 4;
const ROUNDS: u64 = 5;
const CONNECTIONS: u64 = 100_000;

/// The most that all rounds but the first may leave: less than 7 bytes per connection. A leak is
/// more.
const GROWTH_KIB: u64 = 512;

#[test]
fn a_hundred_thousand_connections_leave_nothing() {
    if !alone(a_hundred_thousand_connections_leave_nothing) {
        return;
    }
    // Everything that is made once, like the threads of the test itself.
    Lab::start(no_time_limits()).finish();
    let descriptors_before = descriptors();
    let lab = Lab::start(no_time_limits().idle_timeout(Duration::from_secs(1)));
    let mut held = Vec::new();
    for _ in 0..ROUNDS {
        connections(lab.addr(), CONNECTIONS / ROUNDS);
        lab.holds(0);
        // Forgets the wakers of the calls that waited there and are gone.
        lab.shared.gate.open();
        lab.shared.gate.close();
        held.push(status_kib("RssAnon:"));
    }
    let report = lab.finish();
    assert_eq!(report.counters.accepted, CONNECTIONS);
    assert!(held[held.len() - 1] < held[0] + GROWTH_KIB, "memory after each round, in KiB: {held:?}");
    eventually("every descriptor is closed", SOON, || descriptors() <= descriptors_before);
}

fn connections(addr: SocketAddr, count: u64) {
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(move || {
                for n in 0..count / THREADS {
                    let mut client = Client::connect(addr);
                    match n % 8 {
                        // Reset, so that no port has to rest: before, while and after it was
                        // served.
                        0 => {}
                        1 => client.write(b"\0\0\0\x02e"),
                        2 => client.send(order::gate("")),
                        3 => client.send(order::replies(3, 3000)),
                        4 | 5 => client.echoes(""),
                        6 => {
                            client.send(order::close());
                            assert_eq!(client.recv(), b"bye");
                        }
                        // In order; the server closes first, so that its port waits and not a new
                        // one.
                        _ => {
                            assert_eq!(client.ask(order::close()), b"bye");
                            assert_eq!(client.end(), ringserve_tests::client::End::Fin);
                            continue;
                        }
                    }
                    client.reset();
                }
            });
        }
    });
}
