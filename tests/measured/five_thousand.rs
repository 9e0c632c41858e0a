//! 5000 connections at once.

use std::thread;

use ringserve::CloseReason;
use ringserve_tests::{Client, Lab, alone, no_time_limits, order};

const CONNECTIONS: usize = 5000;

#[test]
fn five_thousand_connections_at_once_are_all_served() {
    if !alone(five_thousand_connections_at_once_are_all_served) {
        return;
    }
    let lab = Lab::start(no_time_limits());
    let mut clients: Vec<Client> = (0..CONNECTIONS).map(|_| lab.client()).collect();
    lab.holds(CONNECTIONS);
    for round in 0..3 {
        thread::scope(|scope| {
            for (part, clients) in clients.chunks_mut(CONNECTIONS / 4).enumerate() {
                scope.spawn(move || {
                    let text = |n: usize| order::echo(format!("{round}/{part}/{n}"));
                    clients.iter_mut().enumerate().for_each(|(n, client)| client.send(text(n)));
                    for (n, client) in clients.iter_mut().enumerate() {
                        assert_eq!(client.recv(), text(n));
                    }
                });
            }
        });
    }
    // Half of them reset at once, half end in order.
    let orderly = clients.split_off(CONNECTIONS / 2);
    clients.into_iter().for_each(Client::reset);
    drop(orderly);
    lab.closed_for(CloseReason::PeerClosed, CONNECTIONS as u64 / 2);
    lab.closed_for(CloseReason::PeerReset, CONNECTIONS as u64 / 2);
    lab.holds(0);
    lab.client().echoes("alive");
    let report = lab.finish();
    assert_eq!(report.counters.frames, 3 * CONNECTIONS as u64 + 1);
}
