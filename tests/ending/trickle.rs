//! Peers that take a little now and then, and others that hold memory up to its limit: they end,
//! and no others.

use std::io::{ErrorKind, Read};
use std::time::Duration;

use ringserve::CloseReason;
use ringserve_tests::Bounds;
use ringserve_tests::client::{End, frame};
use ringserve_tests::{Client, Lab, SOON, eventually, no_time_limits, order};

/// Reads at most `most` of the available bytes. True if the connection was reset, which a socket
/// reports once.
fn sip(client: &mut Client, most: usize) -> bool {
    client.stream.set_nonblocking(true).unwrap();
    let read = client.stream.read(&mut vec![0; most]);
    client.stream.set_nonblocking(false).unwrap();
    read.is_err_and(|error| error.kind() == ErrorKind::ConnectionReset)
}

#[test]
fn peers_that_take_a_little_now_and_then_are_closed() {
    let limits = no_time_limits()
        // Never without a byte for that long.
        .write_stall_timeout(Duration::from_secs(1))
        .write_bytes_per_second_min(2_000_000);
    let lab = Lab::start(limits);
    let mut canary = lab.client();
    let mut sippers: Vec<Client> = (0..20).map(|_| Client::with_small_window(lab.addr())).collect();
    let mut resets = [false; 20];
    sippers.iter_mut().for_each(|client| client.send(order::reply(8_000_000)));
    eventually("all are closed", SOON, || {
        for (client, reset) in sippers.iter_mut().zip(&mut resets) {
            *reset |= sip(client, 512);
        }
        // It takes everything that it is sent, however little that is in all.
        assert_eq!(canary.ask(order::reply(1000)).len(), 1000);
        lab.stats().counters.closed == 20
    });
    lab.closed_for(CloseReason::WriteTooSlow, 20);
    for (mut client, reset) in sippers.into_iter().zip(resets) {
        assert!(reset || client.end_after_all() == End::Reset, "a peer was not reset");
    }
    canary.echoes("alive");
    lab.finish();
}

const HELD_BYTES_MAX: usize = 8 << 20;

/// Little enough to be filled by a few hundred half frames.
fn tight() -> Bounds {
    no_time_limits().outbox_bytes_max(4 << 20).frame_bytes_max(4 << 20).held_bytes_max(HELD_BYTES_MAX)
}

/// A client that sent `bytes` bytes of a frame that never ends.
fn half_a_frame(lab: &Lab, bytes: usize) -> Client {
    let mut client = lab.client();
    client.write(&frame(order::echo_of(1 << 20))[..bytes]);
    client
}

/// Sends half frames of 10 KB each until they fill the memory limit. Returns those that are left,
/// and how many were closed for others.
fn fill(lab: &Lab) -> (Vec<Client>, u64) {
    let mut halves = Vec::new();
    while lab.stats().counters.closed == 0 {
        halves.extend((0..20).map(|_| half_a_frame(lab, 10_000)));
        eventually("they are received", SOON, || {
            lab.stats().counters.bytes_received >= 10_000 * halves.len() as u64
        });
    }
    (halves, lab.stats().counters.closed)
}

#[test]
fn a_reply_at_the_memory_limit_ends_those_that_hold_most() {
    let lab = Lab::start(tight());
    let mut innocents: Vec<Client> = (0..40).map(|_| lab.client()).collect();
    innocents.iter_mut().for_each(|client| client.echoes(""));
    let (halves, gone) = fill(&lab);
    // All at once, twice what each of the others holds.
    innocents.iter_mut().for_each(|client| client.send(order::reply(20_000)));
    for client in &mut innocents {
        assert_eq!(client.recv().len(), 20_000);
    }
    for client in &mut innocents {
        assert_eq!(client.ask(order::reply(20_000)).len(), 20_000);
    }
    let closed = lab.stats().counters.closed;
    assert!(closed > gone && closed < gone + 300, "{closed} of {} half frames went", halves.len());
    lab.closed_for(CloseReason::MemoryLimit, closed);
    drop(halves);
    lab.holds(40);
    innocents.iter_mut().for_each(|client| client.echoes("alive"));
    lab.finish();
}

#[test]
fn of_those_that_hold_memory_the_heaviest_goes_first() {
    let lab = Lab::start(tight());
    let mut heaviest = half_a_frame(&lab, 700_000);
    // A reader that takes nothing counts with all that it holds.
    let mut reader = Client::with_small_window(lab.addr());
    reader.send(order::reply(3_900_000));
    eventually("both are there", SOON, || {
        let counters = lab.stats().counters;
        counters.bytes_received >= 700_000 && counters.frames == 1
    });
    let mut innocent = lab.client();
    let (halves, gone) = fill(&lab);
    assert_eq!(gone, 1);
    assert_eq!(reader.end_after_all(), End::Reset);
    assert_eq!(innocent.ask(order::reply(20_000)).len(), 20_000);
    let mut more = Vec::new();
    while lab.stats().counters.closed == gone {
        more.extend((0..20).map(|_| half_a_frame(&lab, 10_000)));
        eventually("they are received", SOON, || {
            let all = 10_000 * (halves.len() + more.len()) as u64;
            lab.stats().counters.bytes_received >= all + 700_000
        });
    }
    assert_eq!(heaviest.end_after_all(), End::Reset);
    lab.closed_for(CloseReason::MemoryLimit, 2);
    lab.abort();
}
