//! Frames that are kept pin receive buffers; others must not notice.

use ringserve::stats::ServerStats;
use ringserve_tests::{Client, Lab, alone, no_time_limits, order, pattern};

const RECEIVE_BYTES_MAX: usize = 8 << 20;

/// Bytes that one turn may bring in addition: its budget.
const TURN: usize = 1 << 20;

#[track_caller]
fn pinned_is_bounded(report: &ServerStats) {
    let buffers = report.shards[0].buffers;
    let pinned = buffers.leased * (16 << 10);
    assert!(pinned <= RECEIVE_BYTES_MAX / 2 + TURN, "{pinned} bytes pinned: {buffers:?}");
    assert!(buffers.total <= RECEIVE_BYTES_MAX / (16 << 10), "{buffers:?}");
}

#[test]
fn kept_small_frames_out_of_much_traffic_harm_no_peer() {
    if !alone(kept_small_frames_out_of_much_traffic_harm_no_peer) {
        return;
    }
    let lab = Lab::start(no_time_limits().receive_bytes_max(RECEIVE_BYTES_MAX));
    // A call that waits with its frame, and bytes after it.
    let mut waits = lab.client();
    waits.send(order::gate([0; 63]));
    lab.parked(1);
    waits.write(&ringserve_tests::client::frame(order::echo_of(63)).repeat(100));
    // A peer that requests much and reads nothing: its replies are lent from buffers.
    let mut slow = Client::with_small_window(lab.addr());
    let large = order::echo(pattern(12_000));
    slow.write_until_stuck(
        &ringserve_tests::client::frame(&large).repeat(2_000),
        std::time::Duration::from_millis(100),
    );
    // A call that keeps a small frame in its session, again and again, during the others' traffic.
    let mut keeps = lab.client();
    let small = order::keep([0; 63]);
    let mut others: Vec<Client> = (0..4).map(|_| lab.client()).collect();
    let before = lab.stats();
    for n in 0..2_000 {
        assert_eq!(keeps.ask(&small), b"64");
        if n % 4 == 0 {
            let large = order::echo(pattern(100_000 + n));
            let other = &mut others[n / 4 % 4];
            assert!(other.ask(&large) == large);
            pinned_is_bounded(&lab.stats());
        }
    }
    let report = lab.stats();
    assert!(report.counters.frames_copied > 0, "frames that do not fit are copied: {:?}", report.counters);
    // A receive may find the few buffers of a quiet shard used up, but neither for long nor often.
    let parked = report.shards[0].driver.receives_parked - before.shards[0].driver.receives_parked;
    assert!(parked <= 100, "{parked} receives found no buffer");
    drop((keeps, slow));
    lab.shared.gate.open();
    assert_eq!(waits.recv().len(), 64);
    (0..100).for_each(|_| assert_eq!(waits.recv(), [b'e'; 63]));
    drop((waits, others));
    lab.holds(0);
    assert_eq!(lab.stats().shards[0].buffers.leased, 0);
    lab.finish();
}

#[test]
fn frames_kept_in_all_of_the_memory_end_no_connection() {
    if !alone(frames_kept_in_all_of_the_memory_end_no_connection) {
        return;
    }
    // Eight buffers, and each of a hundred connections keeps five frames.
    let limits = no_time_limits().receive_buffer_bytes(1024).receive_bytes_max(8 << 10);
    let lab = Lab::start(limits);
    let mut clients: Vec<Client> = (0..100).map(|_| lab.client()).collect();
    for _ in 0..5 {
        clients.iter_mut().for_each(|client| client.send(order::keep("ept")));
        clients.iter_mut().for_each(|client| assert_eq!(client.recv(), b"4"));
    }
    let large = order::echo(pattern(50_000));
    clients.iter_mut().for_each(|client| assert!(client.ask(&large) == large));
    lab.holds(100);
    drop(clients);
    lab.finish();
}
