//! Words of a service when a call fails, and when the server begins to shut down.

use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use ringserve::CloseReason;

use ringserve_tests::client::End;
use ringserve_tests::{Bounds, Client, Lab, On, SOON, eventually, no_time_limits, order};

/// A lab whose service has last words.
fn lab(on: On, limits: Bounds) -> Lab {
    let lab = Lab::on(on, limits);
    lab.shared.last_words.store(true, SeqCst);
    lab
}

/// The client receives these words, then FIN.
#[track_caller]
fn hears(lab: Lab, mut client: Client, words: &str, reason: CloseReason) {
    assert_eq!(String::from_utf8(client.recv()).unwrap(), words);
    assert_eq!(client.end(), End::Fin);
    drop(client);
    lab.closed_for(reason, 1);
    lab.finish();
}

pub fn of_a_call_that_fails(on: On) {
    let lab = lab(on, no_time_limits());
    let mut client = lab.client();
    client.echoes("");
    client.send(order::fail());
    hears(lab, client, "failed: planted: a call that fails", CloseReason::HandlerError);
}

pub fn of_a_call_that_fails_after_waiting(on: On) {
    let lab = lab(on, no_time_limits());
    let mut client = lab.client();
    client.send(order::fail_late());
    lab.parked(1);
    lab.shared.gate.open();
    hears(lab, client, "failed: planted: a call that fails", CloseReason::HandlerError);
}

pub fn of_a_call_that_panics(on: On) {
    let lab = lab(on, no_time_limits());
    let mut client = lab.client();
    client.send(order::panics());
    let words = String::from_utf8(client.recv()).unwrap();
    assert!(words.starts_with("panicked: planted"), "{words}");
    assert_eq!(client.end(), End::Fin);
    drop(client);
    lab.closed_for(CloseReason::HandlerPanicked, 1);
    lab.finish();
}

pub fn of_a_call_that_waits_too_long(on: On) {
    let lab = lab(on, no_time_limits().handler_timeout(Duration::from_millis(50)));
    let mut client = lab.client();
    client.send(order::gate(""));
    hears(lab, client, "timed out", CloseReason::HandlerTimeout);
}

pub fn nothing_is_said_by_default(on: On) {
    let lab = Lab::on(on, no_time_limits().handler_timeout(Duration::from_millis(50)));
    let (mut failed, mut panicked, mut waits) = (lab.client(), lab.client(), lab.client());
    failed.send(order::fail());
    assert_eq!(failed.end(), End::Fin);
    panicked.send(order::panics());
    assert_eq!(panicked.end(), End::Reset);
    waits.send(order::gate(""));
    assert_eq!(waits.end(), End::Fin);
    drop((failed, panicked, waits));
    lab.holds(0);
    lab.finish();
}

pub fn to_all_at_the_start_of_a_drain(on: On) {
    let lab = Lab::on(on, no_time_limits());
    lab.shared.goodbye.store(true, SeqCst);
    let mut clients: Vec<Client> = (0..50).map(|_| lab.client()).collect();
    clients.iter_mut().for_each(|client| client.echoes(""));
    clients[0].send(order::gate("late"));
    lab.parked(1);
    lab.running.shutdown();
    for client in clients.iter_mut() {
        assert_eq!(client.recv(), b"goodbye");
    }
    for client in &mut clients[1..] {
        assert_eq!(client.end(), End::Fin);
    }
    lab.shared.gate.open();
    let reply = clients[0].recv();
    assert_eq!((&reply[..], clients[0].end()), (&order::gate("late")[..], End::Fin));
    drop(clients);
    lab.ended();
}

pub fn to_one_that_opens_in_a_drain(on: On) {
    let lab = Lab::on(on, no_time_limits().drain_delay(Duration::from_millis(500)));
    lab.shared.goodbye.store(true, SeqCst);
    let mut first = lab.client();
    first.echoes("");
    lab.running.shutdown();
    assert_eq!(first.recv(), b"goodbye");
    let mut late = lab.client();
    assert_eq!(late.recv(), b"goodbye");
    late.echoes("");
    eventually("both are closed", 2 * SOON, || lab.stats().connections == 0);
    assert_eq!((first.end(), late.end()), (End::Fin, End::Fin));
    drop((first, late));
    lab.ended();
}
