//! Waiting calls are counted with their memory, and held back if memory is tight. One test, since
//! it reads the memory of the process.

use ringserve_tests::client::frame;
use ringserve_tests::{Client, Lab, SOON, alone, eventually, no_time_limits, order, status_kib};

const HELD_BYTES_MAX: usize = 16 << 20;
const RECEIVE_BYTES_MAX: usize = 4 << 20;

/// Calls that a client sends: many times more than there is memory for.
const CALLS: usize = 20_000;
const CLIENTS: usize = 20;

/// Anonymous memory of this process.
fn resident_bytes() -> usize {
    (status_kib("RssAnon:") << 10) as usize
}

#[test]
fn calls_of_tiny_frames_stay_within_the_memory_limit() {
    if !alone(calls_of_tiny_frames_stay_within_the_memory_limit) {
        return;
    }
    let limits = no_time_limits()
        .calls_in_flight_max(65535)
        .frame_bytes_max(1 << 20)
        .outbox_bytes_max(8 << 20)
        .held_bytes_max(HELD_BYTES_MAX)
        .receive_bytes_max(RECEIVE_BYTES_MAX);
    let lab = Lab::start(limits);
    let wire = frame(order::gate("")).repeat(CALLS);
    let mut canary = lab.client();
    canary.echoes("before");
    let mut clients: Vec<Client> = (0..CLIENTS).map(|_| lab.client()).collect();
    let before = resident_bytes();
    clients.iter_mut().for_each(|client| client.write(&wire));
    let mut last = 0;
    eventually("no call begins any more", SOON, || {
        // Answered in between, with a reply that needs memory.
        assert_eq!(canary.ask(order::reply(20_000)).len(), 20_000);
        let calls = lab.shared.gate.came();
        std::mem::replace(&mut last, calls) == calls && calls > 1000
    });
    let grown = resident_bytes().saturating_sub(before);
    let most = HELD_BYTES_MAX + HELD_BYTES_MAX / 10 + RECEIVE_BYTES_MAX;
    println!("{grown} bytes for {last} calls");
    assert!(grown <= most, "{grown} bytes for {last} calls, where {most} may be held");
    assert!(last < (CLIENTS * CALLS) as u64, "all calls fit, so that nothing was held back");
    assert_eq!(lab.stats().counters.closed, 0, "a call that waits closes no connection");
    // Each continues as others are done.
    lab.shared.gate.open();
    for client in &mut clients {
        assert!(client.read(wire.len()) == wire, "every call is answered");
    }
    drop((clients, canary));
    lab.holds(0);
    lab.finish();
}
