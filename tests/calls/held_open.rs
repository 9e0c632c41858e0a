//! Connections that stay open after their peer's last byte.

use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use ringserve::CloseReason;
use ringserve_tests::client::{End, frame, frames};
use ringserve_tests::{Client, Lab, SOON, eventually, no_time_limits, order, pattern};

/// A connection whose peer finished writing, after the service was informed of that.
fn held(lab: &Lab, name: &str) -> Client {
    let mut client = lab.reached(name);
    assert_eq!(client.ask(order::hold_open()), b"held");
    client.finish_writing();
    assert_eq!(client.recv(), b"ended");
    client
}

#[test]
fn the_service_hears_of_the_end_and_goes_on_writing() {
    let lab = Lab::start(no_time_limits());
    let mut client = held(&lab, "it");
    let handle = lab.shared.handle("it");
    for n in 0..100 {
        handle.push(pattern(n * 100)).unwrap();
        assert!(client.recv() == pattern(n * 100));
    }
    assert!(client.is_silent(), "it is open");
    handle.push(pattern(200_000)).unwrap();
    handle.close();
    let (wire, end) = client.read_to_end();
    assert_eq!((frames(&wire), end), (vec![pattern(200_000)], End::Fin));
    lab.closed_for(CloseReason::PeerClosed, 1);
    assert_eq!(lab.shared.inputs_ended.load(SeqCst), 1);
    lab.finish();
}

#[test]
fn every_frame_is_answered_before_the_service_hears_of_the_end() {
    let lab = Lab::start(no_time_limits());
    for calls in 1..=20 {
        let mut client = lab.reached("it");
        lab.shared.gate.close();
        client.write(
            &[
                frame(order::hold_open()),
                frame(order::gate("1")),
                frame(order::echo("2")),
                frame(order::thread_wakes("3")),
            ]
            .concat(),
        );
        client.finish_writing();
        lab.parked(calls);
        assert_eq!(client.recv(), b"held");
        assert!(client.is_silent());
        lab.shared.gate.open();
        for expected in ["p1", "e2", "t3", "ended"] {
            assert_eq!(client.recv(), expected.as_bytes());
        }
        lab.shared.handle("it").close();
        assert_eq!(client.end(), End::Fin);
    }
    lab.closed_for(CloseReason::PeerClosed, 20);
    assert_eq!(lab.shared.inputs_ended.load(SeqCst), 20);
    lab.finish();
}

#[test]
fn calls_in_flight_are_answered_before_the_end_is_told() {
    let lab = Lab::start(no_time_limits().calls_in_flight_max(8));
    let mut client = lab.reached("it");
    client.write(
        &[
            frame(order::hold_open()),
            frame(order::door("1")),
            frame(order::door("2")),
            frame(order::echo("3")),
        ]
        .concat(),
    );
    client.finish_writing();
    lab.at_doors(2);
    assert_eq!([client.recv(), client.recv()], [b"held".to_vec(), order::echo("3")]);
    for name in ["2", "1"] {
        lab.shared.doors.open(name);
        assert_eq!(client.recv(), order::door(name));
    }
    assert_eq!(client.recv(), b"ended");
    lab.shared.handle("it").close();
    assert_eq!(client.end(), End::Fin);
    lab.closed_for(CloseReason::PeerClosed, 1);
    lab.finish();
}

#[test]
fn peer_not_held_open_is_closed_without_a_word() {
    let lab = Lab::start(no_time_limits());
    let mut client = lab.client();
    client.echoes("");
    client.finish_writing();
    assert_eq!(client.end(), End::Fin);
    lab.closed_for(CloseReason::PeerClosed, 1);
    assert_eq!(lab.shared.inputs_ended.load(SeqCst), 0);
    lab.finish();
}

#[test]
fn connection_closed_before_the_peers_end_was_closed_by_service() {
    let lab = Lab::start(no_time_limits());
    let mut client = lab.client();
    assert_eq!(
        (client.ask(order::hold_open()), client.ask(order::close()), client.end()),
        (b"held".to_vec(), b"bye".to_vec(), End::Fin)
    );
    drop(client);
    lab.closed_for(CloseReason::Closed, 1);
    lab.finish();
}

#[test]
fn a_peer_that_resets_after_its_end_is_gone() {
    let lab = Lab::start(no_time_limits());
    let client = held(&lab, "it");
    client.reset();
    let handle = lab.shared.handle("it");
    // A send finds out, if nothing else does.
    eventually("it is gone", SOON, || handle.push("are you there?").is_err());
    lab.closed_for(CloseReason::PeerReset, 1);
    lab.finish();
}

#[test]
fn a_drain_waits_for_it() {
    let lab = Lab::start(no_time_limits());
    let mut client = held(&lab, "it");
    let mut other = lab.client();
    other.echoes("");
    lab.running.shutdown();
    assert_eq!(other.end(), End::Fin);
    drop(other);
    lab.holds(1);
    let handle = lab.shared.handle("it");
    handle.push("goodbye").unwrap();
    assert_eq!(client.recv(), b"goodbye");
    handle.close();
    assert_eq!(client.end(), End::Fin);
    drop(client);
    let counters = lab.ended().counters;
    assert_eq!(
        (counters.closed_for(CloseReason::PeerClosed), counters.closed_for(CloseReason::Shutdown)),
        (1, 1)
    );
}

#[test]
fn a_drain_waits_for_it_no_longer_than_it_may() {
    let lab = Lab::start(no_time_limits().drain_timeout(Duration::from_millis(200)));
    let mut client = held(&lab, "it");
    lab.running.shutdown();
    assert_eq!(client.end(), End::Reset);
    assert_eq!(lab.ended().counters.closed_for(CloseReason::DrainTimeout), 1);
}
