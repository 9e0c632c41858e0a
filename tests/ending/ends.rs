//! The ends of connections: half-closed, reset, closed by either side.

use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use ringserve::CloseReason;
use ringserve_tests::client::{End, frame, frames};
use ringserve_tests::{Client, Lab, SOON, no_time_limits, order, pattern};

#[test]
fn a_half_closed_peer_gets_all_replies_then_fin() {
    let lab = Lab::start(no_time_limits());
    let mut client = Client::with_small_window(lab.addr());
    // Far more than the kernel holds.
    client.send(order::replies(100, 100_000));
    client.send(order::echo("last"));
    client.finish_writing();
    let (wire, end) = client.read_to_end();
    let replies = frames(&wire);
    assert_eq!(replies.len(), 101);
    assert!(replies[..100].iter().all(|reply| *reply == pattern(100_000)));
    assert_eq!((&replies[100], end), (&order::echo("last"), End::Fin));
    lab.closed_for(CloseReason::PeerClosed, 1);
    lab.finish();
}

#[test]
fn peer_that_ends_within_a_frame_gets_the_replies_before_it() {
    let lab = Lab::start(no_time_limits());
    let mut client = lab.client();
    client.write(
        &[frame(order::echo("1")), frame(order::echo("2")), frame(order::echo("3"))[..5].to_vec()].concat(),
    );
    client.finish_writing();
    let (wire, end) = client.read_to_end();
    assert_eq!((frames(&wire), end), (vec![order::echo("1"), order::echo("2")], End::Fin));
    lab.closed_for(CloseReason::PeerClosedMidFrame, 1);
    lab.finish();
}

#[test]
fn reset_in_the_middle_of_replies_frees_the_slot() {
    let lab = Lab::start(no_time_limits());
    let mut canary = lab.client();
    for n in 1..=20 {
        let mut client = Client::with_small_window(lab.addr());
        client.send(order::replies(100, 100_000));
        assert_eq!(client.recv(), pattern(100_000));
        client.reset();
        lab.closed_for(CloseReason::PeerReset, n);
        canary.echoes("canary");
    }
    lab.holds(1);
    lab.finish();
}

#[test]
fn a_reset_in_the_middle_of_a_frame_ends_the_connection() {
    let lab = Lab::start(no_time_limits());
    for n in 1..=20 {
        let mut client = lab.client();
        client.echoes("");
        client.write(&frame([0; 50_000])[..n * 2_000]);
        client.reset();
    }
    lab.closed_for(CloseReason::PeerReset, 20);
    lab.holds(0);
    lab.finish();
}

#[test]
fn reset_behind_a_frame_ends_a_parked_handlers_connection() {
    let lab = Lab::start(no_time_limits());
    for _ in 0..100 {
        let mut client = lab.client();
        client.echoes("");
        client.send(order::gate(""));
        client.reset();
    }
    lab.closed_for(CloseReason::PeerReset, 100);
    lab.holds(0);
    lab.finish();
}

#[test]
fn a_reset_right_after_connecting_leaves_nothing() {
    let lab = Lab::start(no_time_limits());
    for _ in 0..300 {
        lab.client().reset();
    }
    lab.client().echoes("alive");
    lab.holds(0);
    lab.finish();
}

#[test]
fn close_lets_the_replies_leave_and_says_fin() {
    let lab = Lab::start(no_time_limits());
    let mut client = lab.client();
    client.write(
        &[frame(order::replies(50, 100_000)), frame(order::close()), frame(order::echo("never"))].concat(),
    );
    (0..50).for_each(|_| assert_eq!(client.recv(), pattern(100_000)));
    assert_eq!(client.recv(), b"bye");
    assert_eq!(client.end(), End::Fin);
    drop(client);
    lab.closed_for(CloseReason::Closed, 1);
    assert_eq!(lab.finish().counters.frames, 2);
}

#[test]
fn close_keeps_the_reply_though_the_peer_goes_on_writing() {
    // Bytes that the kernel still holds must survive whatever the peer sends, for the time of
    // linger.
    let lab = Lab::start(no_time_limits().linger_timeout(SOON));
    for n in 1..=10 {
        let mut client = Client::with_small_window(lab.addr());
        client.write(&[frame(order::replies(5, 20_000)), frame(order::close())].concat());
        lab.closed_for(CloseReason::Closed, n);
        client.write(&[0; 500_000]);
        let (wire, end) = client.read_to_end();
        assert_eq!((frames(&wire).len(), end), (6, End::Fin));
    }
    lab.holds(0);
    lab.finish();
}

#[test]
fn a_peer_that_does_not_close_is_let_go_after_the_linger_limit() {
    let lab = Lab::start(no_time_limits().linger_timeout(Duration::from_millis(100)));
    let mut client = lab.client();
    assert_eq!(client.ask(order::close()), b"bye");
    assert_eq!(client.end(), End::Fin);
    lab.holds(0);
    lab.finish();
}

#[test]
fn abort_resets_and_drops_what_is_queued() {
    let lab = Lab::start(no_time_limits());
    let mut client = lab.client();
    client.write(&[frame(order::replies(10, 1000)), frame(order::abort())].concat());
    assert_eq!(client.end_after_all(), End::Reset);
    lab.closed_for(CloseReason::Aborted, 1);
    lab.finish();
}

#[test]
fn connection_refused_in_open_hears_why_and_has_no_close() {
    let lab = Lab::start(no_time_limits());
    lab.shared.refuse.store(true, SeqCst);
    let mut client = lab.client();
    client.finish_writing();
    assert_eq!(client.recv(), b"no");
    assert_eq!(client.end(), End::Fin);
    lab.closed_for(CloseReason::Refused, 1);
    assert_eq!(lab.shared.closed.load(SeqCst), 0);
    let report = lab.finish();
    assert_eq!((report.counters.accepted, report.counters.refused), (1, 1));
}

#[test]
fn a_greeting_comes_before_anything_was_said() {
    let lab = Lab::start(no_time_limits());
    lab.shared.greet.store(true, SeqCst);
    let mut client = lab.client();
    assert_eq!(client.recv(), b"hello");
    client.echoes("");
    lab.finish();
}
