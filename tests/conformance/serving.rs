//! Calls that wait, fail and panic, and handles.

use ringserve::{CloseReason, Limits};

use crate::common::client::{End, frame};
use crate::common::{Client, Lab, On, SOON, eventually, no_time_limits, pattern};

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

pub fn a_push_to_who_reads_nothing(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let mut target = Client::with_small_window(lab.addr());
    assert_eq!(target.ask("htarget"), b"named");
    let mut other = lab.client();
    let text = pattern(100_000);
    let push = [&b">target:"[..], &text].concat();
    let mut pushed = 0;
    while other.ask(&push) == b"ok" {
        pushed += 1;
        assert!(pushed < 10_000, "never full");
    }
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
    let lab = Lab::on(on, Limits { connections_max: 2, ..no_time_limits() });
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
