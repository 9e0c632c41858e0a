//! Connections whose `open` waits.

use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use ringserve::CloseReason;

use ringserve_tests::client::{End, frame};
use ringserve_tests::{Bounds, Client, Lab, On, SOON, eventually, no_time_limits, order};

/// A lab whose service waits in `open` until the gate is open.
fn lab(on: On, limits: Bounds) -> Lab {
    let lab = Lab::on(on, limits);
    lab.shared.waits_in_open.store(true, SeqCst);
    lab
}

/// A client that was asked to wait.
fn told(lab: &Lab) -> Client {
    let mut client = lab.client();
    assert_eq!(client.recv(), b"wait");
    client
}

/// Waits until `opens` were dropped.
fn dropped(lab: &Lab, opens: u64) {
    eventually("its open is dropped", SOON, || lab.shared.dropped.load(SeqCst) == opens);
    assert_eq!((lab.shared.opened.load(SeqCst), lab.shared.closed.load(SeqCst)), (0, 0));
}

pub fn frames_wait_until_they_are_let_in(on: On) {
    let lab = lab(on, no_time_limits());
    let mut client = told(&lab);
    client.write(&[frame(order::echo("1")), frame(order::echo("2"))].concat());
    lab.parked(1);
    assert!(client.is_silent());
    assert_eq!(lab.stats().counters.frames, 0);
    lab.shared.gate.open();
    assert_eq!((client.recv(), client.recv()), (order::echo("1"), order::echo("2")));
    client.echoes("3");
    lab.finish();
}

pub fn half_closed_before_it_is_open(on: On) {
    let lab = lab(on, no_time_limits());
    let mut client = told(&lab);
    client.send(order::echo("1"));
    client.finish_writing();
    lab.parked(1);
    lab.shared.gate.open();
    assert_eq!((client.recv(), client.end()), (order::echo("1"), End::Fin));
    lab.closed_for(CloseReason::PeerClosed, 1);
    lab.finish();
}

pub fn reset_before_it_is_open(on: On) {
    let lab = lab(on, no_time_limits());
    let client = told(&lab);
    lab.parked(1);
    client.reset();
    lab.closed_for(CloseReason::PeerReset, 1);
    dropped(&lab, 1);
    lab.finish();
}

pub fn refused_after_a_wait(on: On) {
    let lab = lab(on, no_time_limits());
    lab.shared.refuse.store(true, SeqCst);
    let mut client = told(&lab);
    lab.parked(1);
    lab.shared.gate.open();
    assert_eq!((client.recv(), client.end()), (b"no".to_vec(), End::Fin));
    drop(client);
    lab.closed_for(CloseReason::Refused, 1);
    lab.finish();
}

pub fn open_that_never_ends(on: On) {
    let lab = lab(on, no_time_limits().open_timeout(Duration::from_millis(50)));
    let mut client = told(&lab);
    client.send(order::echo("1"));
    assert_eq!(client.end(), End::Fin);
    drop(client);
    lab.closed_for(CloseReason::OpenTimeout, 1);
    dropped(&lab, 1);
    lab.finish();
}

pub fn many_are_opened_at_once(on: On) {
    let lab = lab(on, no_time_limits());
    let mut clients: Vec<Client> = (0..200).map(|_| told(&lab)).collect();
    clients.iter_mut().for_each(|client| client.send(order::echo("")));
    lab.parked(200);
    // Every third one goes.
    let mut number = 0;
    clients.retain(|_| {
        number += 1;
        number % 3 > 0
    });
    lab.shared.gate.open();
    clients.iter_mut().for_each(|client| assert_eq!(client.recv(), order::echo("")));
    drop(clients);
    lab.holds(0);
    lab.finish();
}

pub fn shutdown_before_it_is_open(on: On) {
    let lab = lab(on, no_time_limits());
    let mut client = told(&lab);
    lab.parked(1);
    lab.running.shutdown();
    assert_eq!(client.end(), End::Fin);
    drop(client);
    dropped(&lab, 1);
    lab.ended();
}

pub fn shutdown_with_a_frame_before_it_is_open(on: On) {
    let lab = lab(on, no_time_limits());
    let mut client = told(&lab);
    client.send(order::echo("1"));
    lab.parked(1);
    eventually("the frame is received", SOON, || lab.stats().counters.bytes_received > 0);
    lab.running.shutdown();
    assert!(client.is_silent());
    lab.shared.gate.open();
    assert_eq!((client.recv(), client.end()), (order::echo("1"), End::Fin));
    drop(client);
    lab.ended();
}

pub fn force_before_it_is_open(on: On) {
    let lab = lab(on, no_time_limits());
    let mut client = told(&lab);
    lab.parked(1);
    lab.running.abort();
    assert_eq!(client.end(), End::Reset);
    dropped(&lab, 1);
    lab.ended();
}
