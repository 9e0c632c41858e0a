//! Too few buffers, too slow peers, too much of everything, and time that runs out.

use std::sync::atomic::Ordering::SeqCst;
use std::thread;
use std::time::Duration;

use ringserve::CloseReason;

use ringserve_tests::Bounds;
use ringserve_tests::client::{End, frame};
use ringserve_tests::{Client, Lab, On, SOON, eventually, no_time_limits, order, pattern};

fn four_buffers() -> Bounds {
    no_time_limits().receive_buffer_bytes(64).receive_bytes_max(4 * 64)
}

pub fn few_buffers_serve_many(on: On) {
    let lab = Lab::on(on, four_buffers());
    let mut clients: Vec<Client> = (0..50).map(|_| lab.client()).collect();
    let payload = |n: usize| order::echo(pattern(n * 11));
    for _ in 0..5 {
        clients.iter_mut().enumerate().for_each(|(n, client)| client.send(payload(n)));
        clients.iter_mut().enumerate().for_each(|(n, client)| assert_eq!(client.recv(), payload(n)));
    }
    drop(clients);
    lab.closed_for(CloseReason::PeerClosed, 50);
    lab.finish();
}

pub fn kept_frames_exhaust_no_buffers(on: On) {
    let lab = Lab::on(on, four_buffers());
    let mut clients: Vec<Client> = (0..20).map(|_| lab.client()).collect();
    for _ in 0..5 {
        clients.iter_mut().for_each(|client| client.send(order::keep("")));
        clients.iter_mut().for_each(|client| assert_eq!(client.recv(), b"1"));
    }
    drop(clients);
    lab.closed_for(CloseReason::PeerClosed, 20);
    lab.finish();
}

pub fn a_slow_reader_gets_every_byte(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let mut client = lab.client_with_small_window();
    let wire = frame(order::echo(pattern(5_000))).repeat(4_000);
    let written = client.write_until_stuck(&wire, Duration::from_millis(100));
    assert!(written < wire.len(), "the server took everything of a peer that reads nothing");
    let mut writer = Client::of(client.stream.try_clone().unwrap());
    thread::scope(|scope| {
        scope.spawn(|| {
            writer.write(&wire[written..]);
            writer.finish_writing();
        });
        let (replies, end) = client.read_to_end();
        assert!(replies == wire);
        assert_eq!(end, End::Fin);
    });
    lab.finish();
}

pub fn slow_reader_holds_up_no_other(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let mut slow = lab.client_with_small_window();
    slow.send(order::reply(30_000_000));
    let mut other = lab.client();
    for n in 0..300 {
        let text = order::echo(n.to_string());
        other.gets_back(text);
    }
    assert!(slow.recv() == pattern(30_000_000));
    lab.finish();
}

pub fn a_stream_waits_for_room(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let mut client = lab.client_with_small_window();
    client.send(order::stream(20_000_000));
    client.finish_writing();
    assert!(client.read_to_end() == (pattern(20_000_000), End::Fin));
    let most = lab.shared.outbox_most.load(SeqCst);
    assert!(most <= (256 << 10) + (16 << 10), "{most} bytes were held");
    lab.finish();
}

pub fn bytes_behind_a_call_are_bounded(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let mut client = lab.client();
    client.send(order::gate(""));
    lab.parked(1);
    let wire = frame(order::echo_of(9_996)).repeat(3_200);
    let written = client.write_until_stuck(&wire, Duration::from_millis(100));
    assert!(written < wire.len());
    let received = lab.stats().counters.bytes_received;
    assert!(received < (64 << 10) + (1 << 20) + 100, "{received} bytes were taken");
    client.reset();
    lab.shared.gate.open();
    lab.closed_for(CloseReason::PeerReset, 1);
    lab.finish();
}

pub fn an_outbox_has_a_most(on: On) {
    let lab = Lab::on(on, no_time_limits().outbox_bytes_max(1 << 20));
    let mut client = lab.client();
    client.send(order::reply(2_000_000));
    assert_eq!(client.end_after_all(), End::Reset);
    lab.closed_for(CloseReason::OutboxFull, 1);
    lab.finish();
}

pub fn a_shard_has_a_most(on: On) {
    let limits = no_time_limits().frame_bytes_max(1 << 20).outbox_bytes_max(1 << 20).held_bytes_max(3 << 20);
    let lab = Lab::on(on, limits);
    // It needs nothing meanwhile, so it is not among those that need what is not there.
    let mut quiet = lab.client();
    quiet.echoes("");
    // Each holds most of a frame that never ends.
    let mut clients: Vec<Client> = (0..8).map(|_| lab.client()).collect();
    let part = &frame(order::echo_of(900_000))[..800_000];
    for client in &mut clients {
        // A peer that needs what is not there is reset while it writes.
        let _ = std::io::Write::write_all(&mut client.stream, part);
    }
    eventually("some are closed", SOON, || lab.stats().counters.closed_for(CloseReason::MemoryLimit) >= 4);
    drop(clients);
    lab.holds(1);
    quiet.echoes("");
    lab.finish();
}

const SHORT: Option<Duration> = Some(Duration::from_millis(100));

pub fn first_frame_limit(on: On) {
    let lab = Lab::on(on, no_time_limits().first_frame_timeout(SHORT));
    let mut served = lab.client();
    served.echoes("");
    let mut silent = lab.client();
    let mut slow = lab.client();
    slow.write(&frame(b"hello")[..6]);
    assert_eq!((silent.end(), slow.end()), (End::Fin, End::Fin));
    served.echoes("");
    drop((silent, slow));
    lab.closed_for(CloseReason::FirstFrameTimeout, 2);
    lab.finish();
}

pub fn idle_limit(on: On) {
    let lab = Lab::on(on, no_time_limits().idle_timeout(SHORT));
    let mut waits = lab.client();
    waits.send(order::gate(""));
    lab.parked(1);
    let mut idle = lab.client();
    assert_eq!((idle.ask(order::echo("")), idle.end()), (order::echo(""), End::Fin));
    drop(idle);
    lab.closed_for(CloseReason::IdleTimeout, 1);
    lab.shared.gate.open();
    assert_eq!(waits.recv(), order::gate(""), "a call that waits is not idle");
    lab.finish();
}

pub fn write_limit(on: On) {
    let lab = Lab::on(on, no_time_limits().write_stall_timeout(SHORT));
    let mut client = lab.client_with_small_window();
    client.send(order::reply(20_000_000));
    lab.closed_for(CloseReason::WriteStallTimeout, 1);
    assert_eq!(client.end_after_all(), End::Reset);
    lab.finish();
}

pub fn handler_limit(on: On) {
    let lab = Lab::on(on, no_time_limits().handler_timeout(SHORT));
    let mut client = lab.client_with_small_window();
    assert_eq!(client.ask(order::reach("it")), b"reached");
    let handle = lab.shared.handle("it");
    client.send(order::reply_then_gate(3_000_000));
    eventually("the limit is over", SOON, || handle.is_gone());
    let (wire, end) = client.read_to_end();
    assert!(wire == frame(pattern(3_000_000)), "what was queued leaves, whole");
    assert_eq!(end, End::Fin);
    drop(client);
    lab.closed_for(CloseReason::HandlerTimeout, 1);
    eventually("the call is dropped", SOON, || lab.shared.dropped.load(SeqCst) == 1);
    lab.finish();
}

pub fn heartbeats_without_an_answer(on: On) {
    let limits = no_time_limits().heartbeat_interval(SHORT).heartbeats_missed_max(3);
    let lab = Lab::on(on, limits);
    let (mut mute, mut waits) = (lab.client(), lab.client());
    waits.send(order::gate(""));
    for client in [&mut mute, &mut waits] {
        assert_eq!(client.read_to_end(), (frame(b"beat").repeat(3), End::Fin));
    }
    drop((mute, waits));
    lab.closed_for(CloseReason::HeartbeatLost, 2);
    lab.finish();
}
