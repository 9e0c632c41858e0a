//! Peers that do not read what they requested.

use std::sync::atomic::Ordering::SeqCst;
use std::thread;
use std::time::{Duration, Instant};

use ringserve::CloseReason;
use ringserve_tests::client::{End, frame};
use ringserve_tests::{Client, Lab, SOON, eventually, no_time_limits, order, pattern};

#[test]
fn a_slow_reader_pauses_the_receive() {
    let lab = Lab::start(no_time_limits());
    let mut client = Client::with_small_window(lab.addr());
    let wire = frame(order::echo(pattern(9_999))).repeat(3_000);
    let written = client.write_until_stuck(&wire, Duration::from_millis(300));
    assert!(written < wire.len(), "the server took all {written} bytes of a peer that reads nothing");
    let counters = lab.stats().counters;
    // Marks of outbox and inbox, and a turn's worth of what was on the way.
    assert!(counters.bytes_received - counters.bytes_sent < (256 << 10) + (64 << 10) + (2 << 20));
    assert!(counters.receives_paused >= 1);
    let mut reader = Client::of(client.stream.try_clone().unwrap());
    thread::scope(|scope| {
        scope.spawn(|| {
            client.write(&wire[written..]);
            client.finish_writing();
        });
        let (replies, end) = reader.read_to_end();
        assert!(replies == wire, "every reply comes back in its place");
        assert_eq!(end, End::Fin);
    });
    lab.closed_for(CloseReason::PeerClosed, 1);
    lab.finish();
}

#[test]
fn peer_that_never_reads_is_closed_and_others_notice_nothing() {
    let write_stalled = Some(Duration::from_millis(300));
    let lab = Lab::start(no_time_limits().write_stall_timeout(write_stalled));
    let mut canary = lab.client();
    let mut client = Client::with_small_window(lab.addr());
    client.send(order::replies(300, 100_000));
    eventually("it is closed", SOON, || {
        canary.echoes("canary");
        lab.stats().counters.closed > 0
    });
    lab.closed_for(CloseReason::WriteStallTimeout, 1);
    assert_eq!(client.end_after_all(), End::Reset);
    lab.finish();
}

#[test]
fn a_reader_that_is_slow_but_reads_is_neither_stalled_nor_idle() {
    // The kernel holds little for the peer, so that most of the reply waits in the server all the
    // time.
    let limits = no_time_limits()
        .write_stall_timeout(Duration::from_millis(400))
        .idle_timeout(Duration::from_millis(200));
    let lab = Lab::start(limits);
    let mut client = Client::with_small_window(lab.addr());
    let len = 24 << 20;
    client.send(order::reply(len));
    let expected = pattern(len);
    assert_eq!(client.read(4), (len as u32).to_be_bytes());
    for (n, piece) in expected.chunks(len / 24).enumerate() {
        assert!(client.read(piece.len()) == piece, "piece {n}");
        // The rest after 16 MiB may lie in the kernel already, where the server sees nothing move.
        if n < 16 {
            // Less than either limit; together much more.
            let tick = Instant::now();
            eventually("a moment passes", SOON, || tick.elapsed() > Duration::from_millis(60));
        }
    }
    client.echoes("alive");
    // Nothing is owed now: the connection is idle.
    assert_eq!(client.end(), End::Fin);
    drop(client);
    lab.closed_for(CloseReason::IdleTimeout, 1);
    lab.finish();
}

#[test]
fn a_streaming_call_waits_for_room_and_holds_little() {
    let lab = Lab::start(no_time_limits());
    let mut client = Client::with_small_window(lab.addr());
    let len = 40 << 20;
    client.send(order::stream(len));
    client.finish_writing();
    let (bytes, end) = client.read_to_end();
    assert!(bytes == pattern(len), "every byte in its place");
    assert_eq!(end, End::Fin);
    let most = lab.shared.outbox_most.load(SeqCst);
    assert!(most <= (256 << 10) + (16 << 10), "{most} bytes were held");
    lab.finish();
}

#[test]
fn streaming_call_to_a_peer_that_reads_nothing_waits() {
    let lab = Lab::start(no_time_limits());
    let mut client = Client::with_small_window(lab.addr());
    client.send(order::stream(1_000_000_000));
    eventually("the outbox fills", SOON, || lab.shared.outbox_most.load(SeqCst) > 256 << 10);
    let mut other = lab.client();
    for _ in 0..100 {
        other.echoes("other");
    }
    let most = lab.shared.outbox_most.load(SeqCst);
    assert!(most <= (256 << 10) + (16 << 10), "{most} bytes were held");
    client.reset();
    lab.closed_for(CloseReason::PeerReset, 1);
    lab.finish();
}

#[test]
fn a_service_that_produces_without_end_is_closed_at_the_most() {
    let limits = no_time_limits().outbox_bytes_max(1 << 20);
    let lab = Lab::start(limits);
    let mut canary = lab.client();
    let mut client = Client::with_small_window(lab.addr());
    client.send(order::replies(40, 100_000));
    assert_eq!(client.end_after_all(), End::Reset);
    lab.closed_for(CloseReason::OutboxFull, 1);
    canary.echoes("canary");
    lab.finish();
}

#[test]
fn peers_that_never_read_do_not_hold_up_others() {
    let write_stalled = Some(Duration::from_millis(500));
    let lab = Lab::start(no_time_limits().write_stall_timeout(write_stalled));
    let mut canary = lab.client();
    let clients: Vec<Client> = (0..20)
        .map(|_| {
            let mut client = Client::with_small_window(lab.addr());
            // More than the kernel takes.
            client.send(order::replies(200, 50_000));
            client
        })
        .collect();
    eventually("all are closed", SOON, || {
        canary.echoes("canary");
        lab.stats().counters.closed_for(CloseReason::WriteStallTimeout) == 20
    });
    drop(clients);
    lab.finish();
}
