//! Reaching a connection from others of its shard.

use ringserve::CloseReason;
use ringserve_tests::client::{End, frame};
use ringserve_tests::{Client, Lab, no_time_limits, order, pattern};

/// A connection that others know by a name.
fn named(lab: &Lab, name: &str) -> Client {
    let mut client = lab.client();
    assert_eq!(client.ask(order::name(name)), b"named");
    client
}

#[test]
fn a_push_from_another_connection_arrives() {
    let lab = Lab::start(no_time_limits());
    let mut target = named(&lab, "target");
    let mut other = lab.client();
    for n in 0..100 {
        assert_eq!(other.ask(order::push_to("target", n.to_string())), b"ok");
        assert_eq!(target.recv(), n.to_string().as_bytes());
    }
    lab.finish();
}

#[test]
fn pushes_and_replies_are_whole_frames_in_order() {
    let lab = Lab::start(no_time_limits());
    let mut target = named(&lab, "target");
    let mut other = lab.client();
    let pushes: Vec<u8> = (0..500).flat_map(|n| frame(order::push_to("target", n.to_string()))).collect();
    other.write(&pushes);
    target.write(&frame(order::echo("own")).repeat(500));
    let (mut pushed, mut own) = (0, 0);
    for _ in 0..1000 {
        let reply = target.recv();
        if reply == order::echo("own") {
            own += 1;
        } else {
            assert_eq!(reply, pushed.to_string().as_bytes());
            pushed += 1;
        }
    }
    assert_eq!((pushed, own), (500, 500));
    (0..500).for_each(|_| assert_eq!(other.recv(), b"ok"));
    lab.finish();
}

#[test]
fn a_handle_of_a_connection_that_ended_is_gone() {
    let lab = Lab::start(no_time_limits());
    let target = named(&lab, "target");
    let mut other = lab.client();
    assert_eq!(other.ask(order::is_gone("target")), b"lives");
    target.reset();
    lab.closed_for(CloseReason::PeerReset, 1);
    assert_eq!(other.ask(order::is_gone("target")), b"gone");
    assert_eq!(other.ask(order::push_to("target", "text")), b"gone");
    assert_eq!(other.ask(order::close_named("target")), b"closed", "closing what ended does nothing");
    lab.finish();
}

#[test]
fn a_handle_says_gone_as_soon_as_a_close_was_asked_for() {
    let lab = Lab::start(no_time_limits());
    let mut other = lab.client();
    // Full, too: queued bytes have yet to be sent, and still the connection is gone for pushes.
    let mut target = Client::with_small_window(lab.addr());
    assert_eq!(target.ask(order::name("target")), b"named");
    let push = order::push_to("target", pattern(100_000));
    while other.ask(&push) == b"ok" {}
    other.write(
        &[
            frame(order::close_named("target")),
            frame(order::is_gone("target")),
            frame(order::push_to("target", "late")),
        ]
        .concat(),
    );
    assert_eq!([other.recv(), other.recv(), other.recv()], [&b"closed"[..], b"gone", b"gone"]);
    target.reset();
    lab.finish();
}

#[test]
fn an_old_handle_never_reaches_the_next_connection_in_its_slot() {
    // Two slots: the named one's is reused at once.
    let lab = Lab::start(no_time_limits().connections_max(2));
    let mut other = lab.client();
    other.echoes("");
    for n in 0..100 {
        let old = named(&lab, &n.to_string());
        if n % 2 == 0 {
            old.reset();
        } else {
            drop(old);
        }
        let mut next = lab.client();
        next.echoes("next");
        assert_eq!(other.ask(order::push_to(n.to_string(), "stray")), b"gone");
        assert_eq!(other.ask(order::close_named(n.to_string())), b"closed");
        assert_eq!(next.ask(order::echo("still")), order::echo("still"), "nothing strayed here");
    }
    lab.finish();
}

#[test]
fn connection_whose_call_waits_can_be_closed_by_another() {
    let lab = Lab::start(no_time_limits());
    let mut target = named(&lab, "target");
    target.write(&[frame(order::echo("1")), frame(order::gate(""))].concat());
    assert_eq!(target.recv(), order::echo("1"));
    lab.parked(1);
    let mut other = lab.client();
    other.write(&[frame(order::push_to("target", "last")), frame(order::close_named("target"))].concat());
    assert_eq!([other.recv(), other.recv()], [b"ok".to_vec(), b"closed".to_vec()]);
    assert_eq!(target.recv(), b"last", "what is queued still leaves");
    assert_eq!(target.end(), End::Fin);
    drop(target);
    lab.closed_for(CloseReason::Closed, 1);
    assert_eq!(lab.shared.dropped.load(std::sync::atomic::Ordering::SeqCst), 1);
    lab.shared.gate.open();
    lab.client().gets_back(order::gate("alive"));
    lab.finish();
}
