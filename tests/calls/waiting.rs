//! Handlers that wait.

use std::sync::atomic::Ordering::SeqCst;

use ringserve::CloseReason;
use ringserve_tests::client::{End, frame};
use ringserve_tests::{Client, Lab, SOON, eventually, no_time_limits, order, pattern};

#[test]
fn a_call_woken_from_another_thread_goes_on() {
    let lab = Lab::start(no_time_limits());
    let mut client = lab.client();
    for n in 0..500 {
        let text = order::thread_wakes(n.to_string());
        client.gets_back(text);
    }
    lab.finish();
}

#[test]
fn other_connections_go_on_while_a_call_waits() {
    let lab = Lab::start(no_time_limits());
    let mut waiting: Vec<Client> = (0..50).map(|_| lab.client()).collect();
    waiting.iter_mut().for_each(|client| client.send(order::gate("waits")));
    lab.parked(50);
    let mut other = lab.client();
    for n in 0..200 {
        let text = n.to_string();
        let order = if n % 2 == 0 { order::echo(text) } else { order::thread_wakes(text) };
        other.gets_back(order);
    }
    assert!(waiting.iter().all(Client::is_silent));
    lab.shared.gate.open();
    waiting.iter_mut().for_each(|client| assert_eq!(client.recv(), order::gate("waits")));
    lab.finish();
}

#[test]
fn a_wake_that_comes_late_costs_no_later_call_its_wake() {
    let lab = Lab::start(no_time_limits());
    let mut client = lab.client();
    for n in 1..=20 {
        lab.shared.gate.close();
        client.send(order::gate("first"));
        lab.parked(2 * n - 1);
        lab.shared.gate.open();
        assert_eq!(client.recv(), order::gate("first"));
        // This one is done at once, and is woken after that, by itself.
        client.gets_back(order::wakes_itself("self"));
        lab.shared.gate.close();
        client.send(order::gate("second"));
        lab.parked(2 * n);
        lab.shared.gate.open();
        assert_eq!(client.recv(), order::gate("second"));
    }
    lab.finish();
}

#[test]
fn a_call_that_waits_is_dropped_when_its_peer_resets() {
    let lab = Lab::start(no_time_limits());
    let clients: Vec<Client> = (0..20).map(|_| lab.client()).collect();
    for (mut client, n) in clients.into_iter().zip(1..) {
        client.send(order::gate(""));
        lab.parked(n);
        client.reset();
    }
    lab.closed_for(CloseReason::PeerReset, 20);
    eventually("the calls are dropped", SOON, || lab.shared.dropped.load(SeqCst) == lab.shared.gate.came());
    lab.shared.gate.open();
    lab.client().gets_back(order::gate("alive"));
    lab.finish();
}

#[test]
fn half_closed_peer_gets_the_reply_that_was_waited_for() {
    let lab = Lab::start(no_time_limits());
    let mut client = lab.client();
    client.write(&[frame(order::gate("1")), frame(order::echo("2")), frame(order::gate("3"))].concat());
    client.finish_writing();
    lab.parked(1);
    assert!(client.is_silent());
    lab.shared.gate.open();
    assert_eq!(
        [client.recv(), client.recv(), client.recv()],
        [order::gate("1"), order::echo("2"), order::gate("3")]
    );
    assert_eq!(client.end(), End::Fin);
    lab.closed_for(CloseReason::PeerClosed, 1);
    lab.finish();
}

#[test]
fn bytes_received_behind_a_waiting_call_are_bounded() {
    const SENT: usize = 32 << 20;
    let limits = no_time_limits().inbox_bytes_high(64 << 10);
    let lab = Lab::start(limits);
    let mut client = lab.client();
    client.send(order::gate(""));
    lab.parked(1);
    let wire = frame(order::echo(pattern(9_999))).repeat(SENT / 10_004);
    let written = client.write_until_stuck(&wire, std::time::Duration::from_millis(300));
    assert!(written < wire.len(), "the server took all {written} bytes");
    let counters = lab.stats().counters;
    assert!(counters.bytes_received < (64 << 10) + (1 << 20) + 5, "{} bytes held", counters.bytes_received);
    assert!(counters.receives_paused >= 1);
    lab.shared.gate.open();
    let mut reader = Client::of(client.stream.try_clone().unwrap());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            client.write(&wire[written..]);
            client.finish_writing();
        });
        assert_eq!(reader.recv(), order::gate(""));
        let (replies, end) = reader.read_to_end();
        assert!(replies == wire, "every byte comes back in its place");
        assert_eq!(end, End::Fin);
    });
    lab.finish();
}

#[test]
fn a_call_that_fails_closes_after_the_replies_before_it() {
    let lab = Lab::start(no_time_limits());
    let mut client = lab.client();
    client.write(&[frame(order::echo("1")), frame(order::fail()), frame(order::echo("2"))].concat());
    assert_eq!(client.recv(), order::echo("1"));
    client.finish_writing();
    assert_eq!(client.end(), End::Fin);
    let mut client = lab.client();
    client.write(&[frame(order::echo("1")), frame(order::fail_late()), frame(order::echo("2"))].concat());
    assert_eq!(client.recv(), order::echo("1"));
    lab.parked(1);
    lab.shared.gate.open();
    client.finish_writing();
    assert_eq!(client.end(), End::Fin);
    lab.closed_for(CloseReason::HandlerError, 2);
    lab.finish();
}
