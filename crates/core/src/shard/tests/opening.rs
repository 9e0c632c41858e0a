//! An `open` that waits.

use super::*;
use crate::{CloseReason, ReceiveEnd, RefusedBy};

/// A shard with one connection, whose `open` waits and holds 100 bytes.
fn with_opening(limits: Limits) -> (Tested, ConnId) {
    let mut shard = Tested::new(limits, 1, 1);
    shard.lane.parks_open = Some(100);
    shard.begin(Time::ZERO, 1);
    let id = accept(&mut shard, 3);
    shard.end();
    shard.ops();
    (shard, id)
}

/// Its `open` accepts it.
fn open(shard: &mut Tested, id: ConnId) {
    shard.open_done(id, OPEN, 100);
    shard.opened(id);
    shard.shard.run_frames(id, &mut shard.lane);
    shard.dispatch();
}

/// The connection ended for `reason` without being open, and its `open` was dropped.
#[track_caller]
fn check_dropped(shard: &mut Tested, id: ConnId, reason: CloseReason) {
    assert_eq!(shard.heard(), [Heard::Ended { id, reason, opened: false }]);
    assert_eq!((&shard.lane.dropped[..], shard.held_bytes()), (&[OPEN][..], 0));
}

#[test]
fn frames_wait_for_an_open_that_waits() {
    // An `open` that waits is not one of its calls.
    let mut shard = Tested::new(Limits::default().calls_in_flight_max(8), 1, 1);
    shard.lane.parks_open = Some(100);
    shard.begin(Time::ZERO, 1);
    shard.complete(Completion::Accepted { listener: 0, socket: Socket(3), peer: None });
    shard.end();
    let receives = |op| if let Op::Receive { id } = op { Some(id) } else { None };
    let id = shard.ops().into_iter().find_map(receives).expect("bytes are received meanwhile");
    assert_eq!(shard.held_bytes(), 100);
    shard.begin(at(1), 1);
    shard.heard();
    shard.receive(id, &empty_frames(2));
    shard.end();
    assert_eq!(shard.heard(), []);
    shard.begin(at(2), 0);
    open(&mut shard, id);
    shard.end();
    assert_eq!(shard.heard(), [Heard::Batch(id), Heard::Frame(id), Heard::Frame(id)]);
    assert_eq!(shard.held_bytes(), 0);
}

#[test]
fn open_that_never_ends_is_dropped_at_its_limit() {
    let limits =
        Limits::default().open_timeout(Duration::from_secs(40)).handler_timeout(Duration::from_secs(5));
    let (mut shard, id) = with_opening(limits);
    for seconds in 1..=39 {
        shard.turn(at(seconds));
    }
    assert_eq!(shard.heard(), [], "neither the first frame's time nor that of a call is over");
    shard.turn(at(41));
    check_dropped(&mut shard, id, CloseReason::OpenTimeout);
    assert_eq!(shard.counters(LaneId::FIRST).closed_for(CloseReason::OpenTimeout), 1);
}

#[test]
fn open_without_a_limit_waits_as_long_as_it_likes() {
    let (mut shard, _) = with_opening(Limits::default().open_timeout(None));
    for hours in 1..=48 {
        shard.turn(at(3600 * hours));
    }
    assert_eq!(shard.heard(), []);
}

#[test]
fn time_of_the_first_frame_begins_when_open_is_done() {
    let limits = Limits::default().open_timeout(None).first_frame_timeout(Duration::from_secs(10));
    let (mut shard, id) = with_opening(limits);
    shard.turn(at(50));
    shard.begin(at(60), 0);
    open(&mut shard, id);
    shard.end();
    shard.turn(at(69));
    assert_eq!(shard.heard(), [Heard::Batch(id)]);
    shard.turn(at(71));
    assert_eq!(shard.heard(), [Heard::Ended { id, reason: CloseReason::FirstFrameTimeout, opened: true }]);
}

#[test]
fn peer_that_resets_ends_an_open() {
    let (mut shard, id) = with_opening(Limits::default());
    shard.begin(at(1), 1);
    shard.complete(Completion::ReceiveEnded { id, end: ReceiveEnd::Error(104) });
    shard.end();
    check_dropped(&mut shard, id, CloseReason::PeerReset);
}

#[test]
fn peer_that_half_closes_is_answered_once_it_is_open() {
    let (mut shard, id) = with_opening(Limits::default());
    shard.begin(at(1), 2);
    shard.receive(id, &empty_frames(1));
    shard.complete(Completion::ReceiveEnded { id, end: ReceiveEnd::Eof });
    shard.end();
    assert_eq!(shard.heard(), []);
    shard.begin(at(2), 0);
    open(&mut shard, id);
    shard.end();
    let ended = Heard::Ended { id, reason: CloseReason::PeerClosed, opened: true };
    assert_eq!(shard.heard(), [Heard::Batch(id), Heard::Frame(id), ended]);
}

#[test]
fn refusal_after_a_wait_sends_the_last_words() {
    let (mut shard, id) = with_opening(Limits::default());
    shard.begin(at(1), 0);
    shard.shared(id).unwrap().reply(Payload::Bytes(b"no"));
    shard.open_done(id, OPEN, 100);
    shard.refused(id, RefusedBy::Open);
    shard.end();
    let sent = |op| if let Op::Send { batch, .. } = op { Some(batch) } else { None };
    let mut batch = shard.ops().into_iter().find_map(sent).expect("the last words are sent");
    shard.begin(at(2), 1);
    batch.advance(batch.len());
    shard.complete(Completion::Sent { id, batch, end: SendEnd::Done });
    shard.end();
    assert_eq!(shard.heard(), [Heard::Ended { id, reason: CloseReason::Refused, opened: false }]);
    assert_eq!((&shard.lane.dropped[..], shard.counters(LaneId::FIRST).refused), (&[][..], 1));
}

#[test]
fn drain_ends_an_open_whose_peer_said_nothing() {
    let (mut shard, id) = with_opening(Limits::default());
    shard.drain();
    // It was accepted long before the drain.
    for step in 0..=60 {
        shard.turn(at(5) + Duration::from_millis(step * 10));
    }
    check_dropped(&mut shard, id, CloseReason::Shutdown);
}

#[test]
fn drain_answers_what_was_received_before_an_open_was_done() {
    let (mut shard, id) = with_opening(Limits::default());
    shard.begin(at(1), 1);
    shard.receive(id, &empty_frames(1));
    shard.end();
    shard.drain();
    for step in 0..=50 {
        shard.turn(at(5) + Duration::from_millis(step * 10));
    }
    assert_eq!(shard.heard(), []);
    shard.begin(at(6), 0);
    open(&mut shard, id);
    shard.end();
    let ended = Heard::Ended { id, reason: CloseReason::Shutdown, opened: true };
    assert_eq!(shard.heard(), [Heard::Batch(id), Heard::Frame(id), ended]);
}

#[test]
fn open_that_accepts_while_the_last_words_leave_has_its_close() {
    let (mut shard, id) = with_opening(Limits::default());
    shard.begin(at(1), 0);
    shard.shared(id).unwrap().reply(Payload::Bytes(b"wait"));
    shard.finish(id, CloseReason::Closed);
    let sent = |op| if let Op::Send { batch, .. } = op { Some(batch) } else { None };
    let mut batch = shard.ops().into_iter().find_map(sent).expect("the last words are sent");
    open(&mut shard, id);
    shard.end();
    shard.begin(at(2), 1);
    batch.advance(batch.len());
    shard.complete(Completion::Sent { id, batch, end: SendEnd::Done });
    shard.end();
    assert_eq!(
        shard.heard(),
        [Heard::Batch(id), Heard::Ended { id, reason: CloseReason::Closed, opened: true }]
    );
    assert_eq!((&shard.lane.dropped[..], shard.held_bytes()), (&[][..], 0));
}

#[test]
fn refusal_of_a_connection_that_ends_already_is_not_counted() {
    let (mut shard, id) = with_opening(Limits::default());
    shard.begin(at(1), 1);
    shard.shared(id).unwrap().reply(Payload::Bytes(b"wait"));
    shard.finish(id, CloseReason::OpenTimeout);
    shard.open_done(id, OPEN, 100);
    shard.refused(id, RefusedBy::Open);
    shard.end();
    shard.begin(at(2), 1);
    shard.complete(Completion::ReceiveEnded { id, end: ReceiveEnd::Error(104) });
    shard.end();
    let counters = shard.counters(LaneId::FIRST);
    let ended = counters.closed_for(CloseReason::OpenTimeout) + counters.closed_for(CloseReason::PeerReset);
    assert_eq!((counters.refused, ended), (0, 1));
}
