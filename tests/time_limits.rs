//! Each time limit closes what it is about, with its own reason, and nobody else notices.

mod common;

use std::time::{Duration, Instant};

use common::client::{End, frame};
use common::{Client, Lab, no_time_limits};
use ringserve::{CloseReason, Limits};

const SHORT: Option<Duration> = Some(Duration::from_millis(200));

/// Keeps asking until the server counted so many closes for a reason; every answer must be right.
#[track_caller]
fn asks_until_closed(lab: &Lab, canary: &mut Client, reason: CloseReason, count: u64) {
    let started = Instant::now();
    while lab.report().counters.closed_for(reason) < count {
        assert_eq!(canary.ask("ecanary"), b"ecanary");
        assert!(started.elapsed() < common::SOON, "{:?}", lab.report().counters);
    }
}

#[test]
fn silent_peers_are_closed_at_the_first_frame_limit() {
    let lab = Lab::start(Limits { first_frame: SHORT, ..no_time_limits() });
    let started = Instant::now();
    let mut canary = lab.client();
    assert_eq!(canary.ask("e"), b"e");
    let clients: Vec<Client> = (0..100).map(|_| lab.client()).collect();
    asks_until_closed(&lab, &mut canary, CloseReason::FirstFrameTimeout, 100);
    assert!(started.elapsed() >= Duration::from_millis(180), "not before the limit");
    for mut client in clients {
        assert_eq!(client.end(), End::Fin);
    }
    lab.holds(1);
    lab.finish();
}

#[test]
fn a_slow_sender_of_one_frame_is_closed_at_the_first_frame_limit() {
    let lab = Lab::start(Limits { first_frame: SHORT, idle: SHORT, ..no_time_limits() });
    let mut canary = lab.client();
    let mut clients: Vec<Client> = (0..20).map(|_| lab.client()).collect();
    let wire = frame(&[0; 10_000]);
    let started = Instant::now();
    // One byte now and then: never idle, and never a frame.
    for byte in wire {
        assert_eq!(canary.ask("ecanary"), b"ecanary");
        for client in &mut clients {
            let _ = std::io::Write::write(&mut client.stream, &[byte]);
        }
        if lab.report().counters.closed_for(CloseReason::FirstFrameTimeout) == 20 {
            break;
        }
        assert!(started.elapsed() < common::SOON);
    }
    lab.closed_for(CloseReason::FirstFrameTimeout, 20);
    lab.finish();
}

#[test]
fn idle_peers_are_closed_at_the_idle_limit() {
    let lab = Lab::start(Limits { idle: SHORT, ..no_time_limits() });
    let mut canary = lab.client();
    let mut clients: Vec<Client> = (0..100).map(|_| lab.client()).collect();
    clients.iter_mut().for_each(|client| assert_eq!(client.ask("e"), b"e"));
    asks_until_closed(&lab, &mut canary, CloseReason::IdleTimeout, 100);
    for mut client in clients {
        assert_eq!(client.end(), End::Fin);
    }
    lab.holds(1);
    lab.finish();
}

#[test]
fn a_call_that_waits_is_not_idle() {
    let lab = Lab::start(Limits { idle: SHORT, ..no_time_limits() });
    let mut waits = lab.client();
    waits.send("p");
    lab.parked(1);
    let mut idle = lab.client();
    // When this one is closed as idle, the other one's time would be over too.
    assert_eq!(idle.end(), End::Fin);
    drop(idle);
    lab.closed_for(CloseReason::IdleTimeout, 1);
    lab.shared.gate.open();
    assert_eq!(waits.recv(), b"p");
    assert_eq!(waits.end(), End::Fin);
    drop(waits);
    lab.closed_for(CloseReason::IdleTimeout, 2);
    lab.finish();
}

#[test]
fn a_half_received_frame_does_not_keep_a_connection_from_being_idle() {
    let lab = Lab::start(Limits { idle: SHORT, ..no_time_limits() });
    let mut client = lab.client();
    assert_eq!(client.ask("e"), b"e");
    client.write(&[0, 0, 1, 0, 1, 2, 3]);
    assert_eq!(client.end(), End::Fin);
    drop(client);
    lab.closed_for(CloseReason::IdleTimeout, 1);
    lab.finish();
}

#[test]
fn a_limit_that_is_off_closes_nobody() {
    let lab = Lab::start(Limits { first_frame: SHORT, ..no_time_limits() });
    let mut quiet = lab.client();
    assert_eq!(quiet.ask("e"), b"e");
    // A second one's limit passes; the first one has no limit left.
    assert_eq!(lab.client().end(), End::Fin);
    assert_eq!(lab.client().end(), End::Fin);
    assert_eq!(quiet.ask("ealive"), b"ealive");
    lab.closed_for(CloseReason::FirstFrameTimeout, 2);
    lab.finish();
}

#[test]
fn limits_that_contradict_each_other_do_not_start() {
    let limits = Limits { outbox_bytes_low: 10, outbox_bytes_high: 5, ..no_time_limits() };
    let server = common::On::default().server(limits);
    let error = server.start(|_| common::Actor::new(Default::default())).unwrap_err();
    assert!(error.to_string().starts_with("limits: outbox_bytes_low is 10"), "{error}");
}
