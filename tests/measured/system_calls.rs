//! Number of system calls of a request.

use std::thread;

use ringserve_tests::{Client, Lab, alone, no_time_limits, on_epoll, order};

const CLIENTS: usize = 50;
const ROUNDS: usize = 400;

#[test]
fn fifty_busy_connections_cost_under_one_system_call_a_request() {
    if !alone(fifty_busy_connections_cost_under_one_system_call_a_request) {
        return;
    }
    let lab = Lab::start(no_time_limits());
    let mut clients: Vec<Client> = (0..CLIENTS).map(|_| lab.client()).collect();
    clients.iter_mut().for_each(|client| client.echoes(""));
    let before = lab.stats();
    thread::scope(|scope| {
        for part in clients.chunks_mut(CLIENTS / 2) {
            scope.spawn(move || {
                for _ in 0..ROUNDS {
                    part.iter_mut().for_each(|client| client.send(order::echo("abcdefgh")));
                    part.iter_mut().for_each(|client| assert_eq!(client.recv(), order::echo("abcdefgh")));
                }
            });
        }
    });
    let after = lab.stats();
    let (old, new) = (before.shards[0].driver, after.shards[0].driver);
    let frames = after.counters.frames - before.counters.frames;
    assert_eq!(frames, (CLIENTS * ROUNDS) as u64);
    let calls = new.enters + new.calls - old.enters - old.calls;
    let each = calls as f64 / frames as f64;
    println!("{each:.3} system calls for each request");
    // epoll receives and sends once for each request, and also waits.
    let bound = if on_epoll() { 3.0 } else { 0.5 };
    assert!(each < bound, "{each:.3} system calls for each request: {old:?} {new:?}");
    assert!(new.enters <= new.turns, "more than one a turn: {new:?}");
    drop(clients);
    lab.finish();
}

#[test]
fn a_turn_waits_and_submits_in_one_call_whatever_it_does() {
    if !alone(a_turn_waits_and_submits_in_one_call_whatever_it_does) {
        return;
    }
    let lab = Lab::start(no_time_limits());
    let mut clients: Vec<Client> = (0..20).map(|_| lab.client()).collect();
    for n in 0..200 {
        let client = &mut clients[n % 20];
        match n % 4 {
            0 => client.gets_back(order::thread_wakes("")),
            1 => assert_eq!(client.ask(order::reply(300_000)).len(), 300_000),
            2 => {
                let mut passing = lab.client();
                assert_eq!(passing.ask(order::close()), b"bye");
            }
            _ => client.echoes(""),
        }
    }
    let driver = lab.stats().shards[0].driver;
    assert!(driver.enters <= driver.turns, "{driver:?}");
    drop(clients);
    lab.finish();
}
