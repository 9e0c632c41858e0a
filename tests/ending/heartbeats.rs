//! Signs of life.

use std::io::Write;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use ringserve::CloseReason;
use ringserve_tests::Bounds;
use ringserve_tests::client::{End, frame, frames};
use ringserve_tests::{Client, Lab, SOON, eventually, no_time_limits, order};

/// Asks every tenth of a second; no peer is lost that is silent for less than a second.
fn often() -> Bounds {
    no_time_limits().heartbeat_interval(Duration::from_millis(100)).heartbeats_missed_max(10)
}

/// A mute peer is lost after twice this.
fn soon_lost() -> Bounds {
    no_time_limits().heartbeat_interval(Duration::from_millis(100)).heartbeats_missed_max(1)
}

/// Waits until a silent client is lost.
#[track_caller]
fn another_is_lost(lab: &Lab, mut mute: Client) {
    assert_eq!(mute.end_after_all(), End::Fin);
    drop(mute);
    eventually("it is lost", SOON, || lab.stats().counters.closed_for(CloseReason::HeartbeatLost) >= 1);
}

#[test]
fn a_mute_peer_is_asked_as_often_as_it_may_miss_and_then_closed() {
    let lab = Lab::start(often().heartbeats_missed_max(3));
    let mut clients: Vec<Client> = (0..20).map(|_| lab.client()).collect();
    clients[..10].iter_mut().for_each(|client| client.write(&frame(order::echo(""))[..2]));
    for client in &mut clients {
        let (wire, end) = client.read_to_end();
        assert_eq!((frames(&wire), end), (vec![b"beat".to_vec(); 3], End::Fin));
    }
    drop(clients);
    lab.closed_for(CloseReason::HeartbeatLost, 20);
    assert_eq!(lab.shared.heartbeats.load(SeqCst), 60);
    lab.finish();
}

#[test]
fn peer_that_answers_lives_while_a_mute_one_is_lost() {
    let lab = Lab::start(often());
    let mut answers = lab.client();
    let mute = lab.client();
    let lost = || lab.stats().counters.closed_for(CloseReason::HeartbeatLost);
    let mut beats = 0;
    // More beats than it could miss, so its answers were counted.
    while beats < 15 || lost() == 0 {
        assert_eq!(answers.recv(), b"beat");
        beats += 1;
        // A part of a frame that never ends: any byte will do.
        answers.write(if beats == 1 { &[0, 0, 1, 0][..] } else { b"x" });
    }
    another_is_lost(&lab, mute);
    lab.closed_for(CloseReason::HeartbeatLost, 1);
    lab.holds(1);
    drop(answers);
    lab.finish();
}

#[test]
fn a_call_that_waits_keeps_no_mute_peer() {
    let lab = Lab::start(soon_lost());
    let mut client = lab.client();
    client.send(order::gate(""));
    lab.parked(1);
    assert_eq!(client.end_after_all(), End::Fin);
    drop(client);
    lab.closed_for(CloseReason::HeartbeatLost, 1);
    eventually("the call is dropped", SOON, || lab.shared.dropped.load(SeqCst) == 1);
    lab.finish();
}

#[test]
fn half_closed_peer_cannot_answer_and_is_not_lost() {
    let lab = Lab::start(soon_lost());
    let mut half = lab.client();
    half.send(order::gate(""));
    half.finish_writing();
    lab.parked(1);
    another_is_lost(&lab, lab.client());
    lab.shared.gate.open();
    // It may have been asked before its end was known.
    let (wire, end) = half.read_to_end();
    assert_eq!((frames(&wire).last(), end), (Some(&order::gate("")), End::Fin));
    lab.closed_for(CloseReason::PeerClosed, 1);
    lab.finish();
}

#[test]
fn peer_that_the_server_holds_back_is_not_lost() {
    let lab = Lab::start(soon_lost());
    let mut client = lab.client();
    // It never stops sending; the call before is what keeps the server from reading.
    let mut writer = client.stream.try_clone().unwrap();
    writer.set_write_timeout(None).unwrap();
    client.send(order::gate(""));
    lab.parked(1);
    let wire = frame(order::echo_of(9_996)).repeat(1_000);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let _ = writer.write_all(&wire);
            let _ = writer.shutdown(std::net::Shutdown::Write);
        });
        eventually("the server reads no more", SOON, || lab.stats().counters.receives_paused >= 1);
        another_is_lost(&lab, lab.client());
        lab.shared.gate.open();
        let (replies, end) = client.read_to_end();
        let replies = frames(&replies);
        let own = replies.iter().filter(|reply| *reply != b"beat").count();
        assert_eq!((own, end), (1_001, End::Fin));
    });
    lab.closed_for(CloseReason::HeartbeatLost, 1);
    lab.finish();
}

#[test]
fn heartbeats_switched_off_ask_no_peer() {
    let lab = Lab::start(no_time_limits().idle_timeout(Duration::from_millis(300)));
    let mut client = lab.client();
    assert_eq!(client.end(), End::Fin);
    drop(client);
    lab.closed_for(CloseReason::IdleTimeout, 1);
    assert_eq!(lab.shared.heartbeats.load(SeqCst), 0);
    lab.finish();
}
