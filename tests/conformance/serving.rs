//! Calls that wait, fail and panic, and handles.

use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use ringserve::CloseReason;

use ringserve_tests::client::{End, frame};
use ringserve_tests::{Client, Lab, On, SOON, eventually, no_time_limits, pattern};

pub fn a_call_woken_from_a_thread(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let mut client = lab.client();
    for n in 0..200 {
        let text = format!("t{n}");
        assert_eq!(client.ask_text(&text), text);
    }
    lab.finish();
}

pub fn a_call_woken_before_it_waits(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let mut client = lab.client();
    for n in 0..200 {
        let text = format!("{}{n}", ["w", "t"][n % 2]);
        assert_eq!(client.ask_text(&text), text);
    }
    lab.finish();
}

pub fn order_behind_a_call_that_waits(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let mut client = lab.client();
    let texts: Vec<String> = (0..200).map(|n| format!("{}{n}", ["e", "t", "w"][n % 3])).collect();
    client.send("p");
    client.write(&texts.iter().flat_map(|text| frame(text.as_bytes())).collect::<Vec<u8>>());
    lab.parked(1);
    assert!(client.is_silent());
    lab.shared.gate.open();
    assert_eq!(client.recv(), b"p");
    texts.iter().for_each(|text| assert_eq!(client.recv(), text.as_bytes()));
    lab.finish();
}

pub fn others_go_on_while_a_call_waits(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let mut waits = lab.client();
    waits.send("p");
    lab.parked(1);
    let mut other = lab.client();
    (0..50).for_each(|_| assert_eq!(other.ask("e"), b"e"));
    assert!(waits.is_silent());
    lab.shared.gate.open();
    assert_eq!(waits.recv(), b"p");
    lab.finish();
}

pub fn a_call_that_fails(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let mut client = lab.client();
    client.write(&[frame(b"e"), frame(b"f"), frame(b"e")].concat());
    client.finish_writing();
    assert_eq!((client.recv(), client.end()), (b"e".to_vec(), End::Fin));
    lab.closed_for(CloseReason::HandlerError, 1);
    lab.finish();
}

pub fn a_call_that_panics(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let (mut client, mut other) = (lab.client(), lab.client());
    client.send("x");
    assert_eq!(client.end(), End::Reset);
    assert_eq!(other.ask("t"), b"t");
    lab.closed_for(CloseReason::HandlerPanicked, 1);
    lab.finish();
}

pub fn a_call_that_panics_after_waiting(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let (mut client, mut other) = (lab.client(), lab.client());
    client.send("X");
    lab.parked(1);
    lab.shared.gate.open();
    assert_eq!(client.end(), End::Reset);
    assert_eq!(other.ask("t"), b"t");
    lab.closed_for(CloseReason::HandlerPanicked, 1);
    lab.finish();
}

fn named(lab: &Lab, name: &str) -> Client {
    let mut client = lab.client();
    assert_eq!(client.ask(format!("h{name}")), b"named");
    client
}

pub fn a_push_from_another_connection(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let mut target = named(&lab, "target");
    let mut other = lab.client();
    assert_eq!(other.ask(">target:text"), b"ok");
    assert_eq!(target.recv(), b"text");
    lab.finish();
}

pub fn push_to_a_peer_that_reads_nothing(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let mut target = lab.client_with_small_window();
    assert_eq!(target.ask("htarget"), b"named");
    let mut other = lab.client();
    let text = pattern(100_000);
    let push = [&b">target:"[..], &text].concat();
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
    eventually("there is room again", SOON, || other.ask(">target:more") == b"ok");
    assert_eq!(target.recv(), b"more");
    lab.finish();
}

pub fn a_handle_used_after_the_end(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let target = named(&lab, "target");
    let mut other = lab.client();
    assert_eq!(other.ask("?target"), b"lives");
    drop(target);
    lab.closed_for(CloseReason::PeerClosed, 1);
    assert_eq!([other.ask("?target"), other.ask(">target:text")], [b"gone", b"gone"]);
    lab.finish();
}

pub fn a_handle_used_after_its_slot_was_used_again(on: On) {
    let lab = Lab::on(on, no_time_limits().connections_max(2));
    let mut other = lab.client();
    assert_eq!(other.ask("e"), b"e");
    for n in 0..20 {
        named(&lab, &n.to_string()).reset();
        let mut next = lab.client();
        assert_eq!(next.ask("e"), b"e");
        assert_eq!([other.ask(format!(">{n}:stray")), other.ask(format!("!{n}"))], [&b"gone"[..], b"closed"]);
        assert_eq!(next.ask("estill"), b"estill");
    }
    lab.finish();
}

pub fn a_call_that_sleeps(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let mut clients: Vec<Client> = (0..50).map(|_| lab.client()).collect();
    let mut other = lab.client();
    let started = Instant::now();
    clients.iter_mut().zip(0..).for_each(|(client, n)| client.send(format!("S{}", 100 + n % 7)));
    assert_eq!(other.ask("e"), b"e");
    for (client, n) in clients.iter_mut().zip(0..) {
        assert_eq!(client.recv(), format!("S{}", 100 + n % 7).as_bytes());
        assert!(started.elapsed() >= Duration::from_millis(100 + n % 7), "too early");
    }
    lab.finish();
}

pub fn a_deadline_that_is_over(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let mut client = lab.client();
    for n in 1..=5 {
        assert_eq!([client.ask("=e"), client.ask("L20")], [&b"=e"[..], b"elapsed"]);
        assert_eq!(lab.shared.dropped.load(SeqCst), n);
    }
    lab.finish();
}

fn three_in_flight(on: On) -> (Lab, Client) {
    let lab = Lab::on(on, no_time_limits().calls_in_flight_max(3));
    let mut client = lab.client();
    client.write(&["g1", "g2", "e", "g3", "g4"].map(|text| frame(text.as_bytes())).concat());
    assert_eq!(client.recv(), b"e");
    lab.at_doors(3);
    assert!(client.is_silent());
    (lab, client)
}

pub fn several_in_flight(on: On) {
    let (lab, mut client) = three_in_flight(on);
    for (name, came) in [("2", 4), ("4", 4), ("1", 4), ("3", 4)] {
        lab.shared.doors.open(name);
        assert_eq!(client.recv(), format!("g{name}").as_bytes());
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
        assert_eq!(client.recv(), format!("g{name}").as_bytes());
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
    client.write(&[frame(b"o"), frame(b"t")].concat());
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
