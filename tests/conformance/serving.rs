//! Calls that wait, fail and panic, and handles.

use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use ringserve::CloseReason;

use ringserve_tests::client::{End, frame};
use ringserve_tests::{Client, Lab, On, SOON, eventually, no_time_limits, order, pattern};

pub fn a_call_woken_from_a_thread(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let mut client = lab.client();
    for n in 0..200 {
        let text = order::thread_wakes(n.to_string());
        client.gets_back(text);
    }
    lab.finish();
}

pub fn a_call_woken_before_it_waits(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let mut client = lab.client();
    for n in 0..200 {
        let text = n.to_string();
        let order = if n % 2 == 0 { order::wakes_itself(text) } else { order::thread_wakes(text) };
        client.gets_back(order);
    }
    lab.finish();
}

pub fn order_behind_a_call_that_waits(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let mut client = lab.client();
    let texts: Vec<String> = (0..200).map(|n| format!("{}{n}", ["e", "t", "w"][n % 3])).collect();
    client.send(order::gate(""));
    client.write(&texts.iter().flat_map(|text| frame(text.as_bytes())).collect::<Vec<u8>>());
    lab.parked(1);
    assert!(client.is_silent());
    lab.shared.gate.open();
    assert_eq!(client.recv(), order::gate(""));
    texts.iter().for_each(|text| assert_eq!(client.recv(), text.as_bytes()));
    lab.finish();
}

pub fn others_go_on_while_a_call_waits(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let mut waits = lab.client();
    waits.send(order::gate(""));
    lab.parked(1);
    let mut other = lab.client();
    (0..50).for_each(|_| other.echoes(""));
    assert!(waits.is_silent());
    lab.shared.gate.open();
    assert_eq!(waits.recv(), order::gate(""));
    lab.finish();
}

pub fn a_call_that_fails(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let mut client = lab.client();
    client.write(&[frame(order::echo("")), frame(order::fail()), frame(order::echo(""))].concat());
    client.finish_writing();
    assert_eq!((client.recv(), client.end()), (order::echo(""), End::Fin));
    lab.closed_for(CloseReason::HandlerError, 1);
    lab.finish();
}

pub fn a_call_that_panics(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let (mut client, mut other) = (lab.client(), lab.client());
    client.send(order::panics());
    assert_eq!(client.end(), End::Reset);
    other.gets_back(order::thread_wakes(""));
    lab.closed_for(CloseReason::HandlerPanicked, 1);
    lab.finish();
}

pub fn a_call_that_panics_after_waiting(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let (mut client, mut other) = (lab.client(), lab.client());
    client.send(order::panic_late());
    lab.parked(1);
    lab.shared.gate.open();
    assert_eq!(client.end(), End::Reset);
    other.gets_back(order::thread_wakes(""));
    lab.closed_for(CloseReason::HandlerPanicked, 1);
    lab.finish();
}

fn named(lab: &Lab, name: &str) -> Client {
    let mut client = lab.client();
    assert_eq!(client.ask(order::name(name)), b"named");
    client
}

pub fn a_push_from_another_connection(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let mut target = named(&lab, "target");
    let mut other = lab.client();
    assert_eq!(other.ask(order::push_to("target", "text")), b"ok");
    assert_eq!(target.recv(), b"text");
    lab.finish();
}

pub fn push_to_a_peer_that_reads_nothing(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let mut target = lab.client_with_small_window();
    assert_eq!(target.ask(order::name("target")), b"named");
    let mut other = lab.client();
    let text = pattern(100_000);
    let push = order::push_to("target", &text);
    let mut pushed = 0;
    let last = loop {
        let answer = other.ask(&push);
        if answer != b"ok" {
            break answer;
        }
        pushed += 1;
        assert!(pushed < 10_000, "never full");
    };
    assert_eq!(last, b"full");
    (0..pushed).for_each(|_| assert!(target.recv() == text));
    eventually("there is room again", SOON, || other.ask(order::push_to("target", "more")) == b"ok");
    assert_eq!(target.recv(), b"more");
    lab.finish();
}

pub fn a_handle_used_after_the_end(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let target = named(&lab, "target");
    let mut other = lab.client();
    assert_eq!(other.ask(order::is_gone("target")), b"lives");
    drop(target);
    lab.closed_for(CloseReason::PeerClosed, 1);
    assert_eq!(
        [other.ask(order::is_gone("target")), other.ask(order::push_to("target", "text"))],
        [b"gone", b"gone"]
    );
    lab.finish();
}

pub fn a_handle_used_after_its_slot_was_used_again(on: On) {
    let lab = Lab::on(on, no_time_limits().connections_max(2));
    let mut other = lab.client();
    other.echoes("");
    for n in 0..20 {
        named(&lab, &n.to_string()).reset();
        let mut next = lab.client();
        next.echoes("");
        assert_eq!(
            [other.ask(order::push_to(n.to_string(), "stray")), other.ask(order::close_named(n.to_string()))],
            [&b"gone"[..], b"closed"]
        );
        next.echoes("still");
    }
    lab.finish();
}

pub fn a_call_that_sleeps(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let mut clients: Vec<Client> = (0..50).map(|_| lab.client()).collect();
    let mut other = lab.client();
    let started = Instant::now();
    clients.iter_mut().zip(0..).for_each(|(client, n)| client.send(order::sleep(100 + n % 7)));
    other.echoes("");
    for (client, n) in clients.iter_mut().zip(0..) {
        assert_eq!(client.recv(), order::sleep(100 + n % 7));
        assert!(started.elapsed() >= Duration::from_millis(100 + n % 7), "too early");
    }
    lab.finish();
}

pub fn a_deadline_that_is_over(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let mut client = lab.client();
    for n in 1..=5 {
        assert_eq!(
            [client.ask(order::in_time("e")), client.ask(order::time_out(20))],
            [&b"=e"[..], b"elapsed"]
        );
        assert_eq!(lab.shared.dropped.load(SeqCst), n);
    }
    lab.finish();
}

fn three_in_flight(on: On) -> (Lab, Client) {
    let lab = Lab::on(on, no_time_limits().calls_in_flight_max(3));
    let mut client = lab.client();
    client.write(&["g1", "g2", "e", "g3", "g4"].map(|text| frame(text.as_bytes())).concat());
    assert_eq!(client.recv(), order::echo(""));
    lab.at_doors(3);
    assert!(client.is_silent());
    (lab, client)
}

pub fn several_in_flight(on: On) {
    let (lab, mut client) = three_in_flight(on);
    for (name, came) in [("2", 4), ("4", 4), ("1", 4), ("3", 4)] {
        lab.shared.doors.open(name);
        assert_eq!(client.recv(), order::door(name));
        lab.at_doors(came);
    }
    assert_eq!(lab.shared.doors.came(), 4);
    lab.finish();
}

pub fn several_in_flight_and_half_closed(on: On) {
    let (lab, mut client) = three_in_flight(on);
    client.finish_writing();
    for name in ["3", "4", "1", "2"] {
        lab.shared.doors.open(name);
        assert_eq!(client.recv(), order::door(name));
    }
    assert_eq!(client.end(), End::Fin);
    lab.closed_for(CloseReason::PeerClosed, 1);
    lab.finish();
}

pub fn several_in_flight_and_reset(on: On) {
    let (lab, client) = three_in_flight(on);
    client.reset();
    lab.closed_for(CloseReason::PeerReset, 1);
    eventually("all three are dropped", SOON, || lab.shared.dropped.load(SeqCst) == 3);
    lab.finish();
}

fn held_open(on: On) -> (Lab, Client) {
    let lab = Lab::on(on, no_time_limits());
    let mut client = lab.reached("it");
    client.write(&[frame(order::hold_open()), frame(order::thread_wakes(""))].concat());
    client.finish_writing();
    assert_eq!([client.recv(), client.recv(), client.recv()], [&b"held"[..], b"t", b"ended"]);
    (lab, client)
}

pub fn held_open_after_the_peers_end(on: On) {
    let (lab, mut client) = held_open(on);
    let handle = lab.shared.handle("it");
    for n in 0..10 {
        assert_eq!(handle.push(pattern(n * 10_000)), Ok(()));
        assert!(client.recv() == pattern(n * 10_000));
    }
    assert!(client.is_silent());
    handle.close();
    assert_eq!(client.end(), End::Fin);
    lab.closed_for(CloseReason::PeerClosed, 1);
    lab.finish();
}

pub fn held_open_and_reset(on: On) {
    let (lab, client) = held_open(on);
    client.reset();
    let handle = lab.shared.handle("it");
    eventually("a send finds out", SOON, || handle.push("text").is_err());
    lab.closed_for(CloseReason::PeerReset, 1);
    lab.finish();
}
