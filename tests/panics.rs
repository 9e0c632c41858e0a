//! User code that panics, wherever it is called from: its connection ends, the shard lives.

mod common;

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;

use common::client::{End, frame};
use common::{Client, Lab, On, SOON, eventually, no_time_limits};
use ringserve::framing::{Decode, EncodeError, FrameError, Framing, LengthPrefix, Lines};
use ringserve::{CloseReason, Limits, Outbox, Payload};

const PANICKED: CloseReason = CloseReason::HandlerPanicked;

#[track_caller]
fn still_serves(lab: &Lab) {
    let mut client = lab.client();
    assert_eq!(client.ask("ealive"), b"ealive");
    assert_eq!(client.ask("talive"), b"talive", "calls that wait are woken");
}

#[test]
fn a_call_that_panics_ends_its_connection_only() {
    let lab = Lab::start(no_time_limits());
    let mut canary = lab.client();
    for n in 1..=50 {
        let mut client = lab.client();
        client.send("x");
        assert_eq!(client.end(), End::Reset);
        lab.closed_for(PANICKED, n);
        assert_eq!(canary.ask("ecanary"), b"ecanary");
    }
    still_serves(&lab);
    lab.finish();
}

#[test]
fn a_call_that_panics_behind_others_of_the_same_write_ends_them_too() {
    let lab = Lab::start(no_time_limits());
    let mut client = lab.client();
    client.write(&[frame(b"e1"), frame(b"x"), frame(b"e2")].concat());
    assert_eq!(client.end_after_all(), End::Reset);
    lab.closed_for(PANICKED, 1);
    still_serves(&lab);
    lab.finish();
}

#[test]
fn a_call_that_panics_after_waiting_ends_its_connection_only() {
    let lab = Lab::start(no_time_limits());
    let mut clients: Vec<Client> = (0..10).map(|_| lab.client()).collect();
    clients.iter_mut().for_each(|client| client.send("X"));
    let mut other = lab.client();
    other.send("pother");
    lab.parked(11);
    lab.shared.gate.open();
    clients.iter_mut().for_each(|client| assert_eq!(client.end(), End::Reset));
    assert_eq!(other.recv(), b"pother");
    lab.closed_for(PANICKED, 10);
    still_serves(&lab);
    lab.finish();
}

#[test]
fn open_that_panics_ends_its_connection_and_close_is_not_called() {
    let lab = Lab::start(no_time_limits());
    lab.shared.panic_in_open.store(true, SeqCst);
    // The reset may be here before the peer saw that it is connected.
    let end = lab.client_that_may_fail().map_or(End::Reset, |mut client| client.end());
    assert_eq!(end, End::Reset);
    lab.closed_for(PANICKED, 1);
    assert_eq!(lab.shared.closed.load(SeqCst), 0);
    still_serves(&lab);
    lab.finish();
}

#[test]
fn close_that_panics_harms_nobody() {
    let lab = Lab::start(no_time_limits());
    let mut canary = lab.client();
    lab.shared.panic_in_close.store(true, SeqCst);
    drop(lab.client());
    lab.closed_for(CloseReason::PeerClosed, 1);
    assert_eq!(canary.ask("ecanary"), b"ecanary");
    still_serves(&lab);
    lab.finish();
}

#[test]
fn malformed_that_panics_ends_its_connection_only() {
    let lab = Lab::start(no_time_limits());
    let mut canary = lab.client();
    lab.shared.panic_in_malformed.store(true, SeqCst);
    let mut client = lab.client();
    client.write(&[0xFF; 4]);
    assert_eq!(client.end(), End::Reset);
    lab.closed_for(PANICKED, 1);
    assert_eq!(canary.ask("ecanary"), b"ecanary");
    still_serves(&lab);
    lab.finish();
}

#[test]
fn a_session_whose_drop_panics_harms_nobody() {
    let lab = Lab::start(no_time_limits());
    let mut canary = lab.client();
    for _ in 0..3 {
        let mut client = lab.client();
        assert_eq!(client.ask("d"), b"armed");
        drop(client);
    }
    lab.closed_for(CloseReason::PeerClosed, 3);
    assert_eq!(canary.ask("ecanary"), b"ecanary");
    still_serves(&lab);
    lab.finish();
}

#[test]
fn a_dropped_call_whose_drop_panics_harms_nobody() {
    let lab = Lab::start(no_time_limits());
    let mut canary = lab.client();
    let mut clients: Vec<Client> = (0..3).map(|_| lab.client()).collect();
    clients.iter_mut().for_each(|client| client.send("D"));
    lab.parked(3);
    clients.into_iter().for_each(Client::reset);
    lab.closed_for(CloseReason::PeerReset, 3);
    assert_eq!(canary.ask("ecanary"), b"ecanary");
    still_serves(&lab);
    lab.finish();
}

#[test]
fn an_error_whose_drop_panics_harms_nobody() {
    let lab = Lab::start(no_time_limits());
    let mut canary = lab.client();
    let mut client = lab.client();
    client.send("z");
    lab.parked(1);
    lab.shared.gate.open();
    client.end_after_all();
    assert_eq!(canary.ask("ecanary"), b"ecanary");
    still_serves(&lab);
    lab.finish();
}

#[test]
fn a_panic_at_shutdown_does_not_keep_the_server() {
    let lab = Lab::start(no_time_limits());
    let mut armed = lab.client();
    assert_eq!(armed.ask("d"), b"armed");
    let mut waits = lab.client();
    waits.send("D");
    lab.parked(1);
    lab.force();
}

/// Lines, but it panics over the byte 0xEE, in decoding or encoding.
#[derive(Clone)]
struct Touchy;

impl Framing for Touchy {
    fn decode(&self, bytes: &[u8], scanned: usize) -> Result<Decode, FrameError> {
        assert!(!bytes.contains(&0xEE), "planted: decode panics");
        Lines::default().decode(bytes, scanned)
    }

    fn encode(&self, payload: Payload<'_>, out: &mut Outbox<'_>) -> Result<(), EncodeError> {
        assert!(!payload.bytes().starts_with(&[0]), "planted: encode panics");
        Lines::default().encode(payload, out)
    }
}

fn touchy(limits: Limits) -> Lab {
    Lab::of(On::default().server(limits).framing(Touchy))
}

#[track_caller]
fn echoes_lines(client: &mut Client) {
    client.write(b"ecanary\n");
    assert_eq!(client.read(8), b"ecanary\n");
}

#[test]
fn a_framing_that_panics_over_a_new_frame_ends_its_connection_only() {
    let lab = touchy(no_time_limits());
    let mut canary = lab.client();
    let mut client = lab.client();
    echoes_lines(&mut client);
    client.write(&[0xEE]);
    assert_eq!(client.end(), End::Reset);
    lab.closed_for(PANICKED, 1);
    echoes_lines(&mut canary);
    lab.finish();
}

#[test]
fn a_framing_that_panics_in_the_middle_of_a_frame_leaves_the_accounts_right() {
    let lab = touchy(no_time_limits());
    let mut canary = lab.client();
    for n in 1..=20 {
        let mut client = lab.client();
        client.write(&[b'e'; 3000]);
        eventually("the first part arrives", SOON, || lab.report().counters.bytes_received >= n * 3000);
        client.write(&[0xEE; 3000]);
        assert_eq!(client.end(), End::Reset);
        lab.closed_for(PANICKED, n);
        // Anybody who holds half a frame would now be closed for what was counted wrong.
        canary.write(b"e");
        echoes_half(&mut canary);
    }
    lab.finish();
}

/// The rest of a line that began with an `e`.
#[track_caller]
fn echoes_half(client: &mut Client) {
    client.write(&[b'x'; 2000]);
    client.write(b"\n");
    assert_eq!(client.read(2002).len(), 2002);
}

#[test]
fn encoding_that_panics_ends_its_connection_only() {
    let lab = touchy(no_time_limits());
    let mut canary = lab.client();
    let mut client = lab.client();
    // The pattern starts with a 0.
    client.write(b"b10\n");
    assert_eq!(client.end(), End::Reset);
    lab.closed_for(PANICKED, 1);
    echoes_lines(&mut canary);
    lab.finish();
}

#[test]
fn admit_that_panics_refuses_and_the_shard_lives() {
    static PANICS: AtomicBool = AtomicBool::new(true);
    let server = On::default().server(no_time_limits()).framing(LengthPrefix::default()).admit(|_| {
        assert!(!PANICS.swap(false, SeqCst), "planted: admit panics");
        true
    });
    let lab = Lab::of(server);
    lab.client().end_after_all();
    still_serves(&lab);
    let report = lab.finish();
    assert_eq!(report.counters.refused, 1);
}
