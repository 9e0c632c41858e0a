//! Ends of connections with a channel.

use super::*;

#[test]
fn last_word_leaves_with_the_last_replies() {
    let (mut shard, id, mut peer) = ready(Limits::default());
    let shared = shard.shared(id).unwrap().clone();
    shared.reply(b"bye"[..].into());
    shared.close();
    shard.turn(at(2));
    let batch = sent_to(&mut shard, id);
    assert_eq!(hear(&mut peer, &batch), [Said::Data(wire(b"bye")), Said::Other(CLOSE)]);
    done(&mut shard, id, batch);
    assert!(matches!(shard.ops()[..], [Op::Shutdown { .. }]));
}

#[test]
fn last_word_leaves_where_nothing_is_queued() {
    let (mut shard, id, mut peer) = ready(Limits::default());
    shard.shared(id).unwrap().close();
    shard.turn(at(2));
    let (said, ops) = leave(&mut shard, id, &mut peer);
    assert_eq!(said, [Said::Other(CLOSE)]);
    assert!(matches!(ops[..], [Op::Shutdown { .. }]), "FIN behind it: {ops:?}");
}

#[test]
fn last_word_leaves_behind_a_send_that_is_in_flight() {
    let (mut shard, id, mut peer) = ready(Limits::default());
    shard.shared(id).unwrap().write(b"first");
    shard.turn(at(2));
    let first = sent_to(&mut shard, id);
    shard.shared(id).unwrap().write(b"second");
    shard.finish(id, CloseReason::Closed);
    assert!(shard.ops().is_empty());
    let mut said = hear(&mut peer, &first);
    done(&mut shard, id, first);
    said.extend(leave(&mut shard, id, &mut peer).0);
    assert_eq!(said, [Said::Data(b"first".to_vec()), Said::Data(b"second".to_vec()), Said::Other(CLOSE)]);
}

#[test]
fn aborted_connection_has_no_last_word() {
    let (mut shard, id, mut peer) = ready(Limits::default());
    shard.shared(id).unwrap().write(b"dropped");
    shard.shared(id).unwrap().abort();
    shard.turn(at(2));
    let (said, ops) = leave(&mut shard, id, &mut peer);
    assert_eq!(said, []);
    assert!(!ops.iter().any(|op| matches!(op, Op::Shutdown { .. })), "{ops:?}");
    assert_eq!(shard.held_bytes(), 0);
}

#[test]
fn fault_is_told_before_the_close_and_nothing_behind_it() {
    let (mut shard, id, mut peer) = ready(Limits::default());
    shard.begin(at(2), 1);
    shard.receive(id, &[peer.frame(b"good"), peer.record(99, b""), peer.frame(b"behind")].concat());
    assert_eq!(taken(&mut shard), [b"good"]);
    shard.end();
    let (said, ops) = leave(&mut shard, id, &mut peer);
    assert_eq!(said, [Said::Other(ALERT)]);
    assert!(matches!(ops[..], [Op::Shutdown { .. }]), "{ops:?}");
    let reason = CloseReason::TlsBadRecord;
    assert_eq!(shard.heard(), [Heard::Ended { id, reason, opened: true }]);
    assert_eq!((taken(&mut shard).len(), shard.held_bytes()), (0, 0));
}

#[test]
fn fault_is_told_behind_a_send_that_is_in_flight() {
    let (mut shard, id, mut peer) = ready(Limits::default());
    shard.shared(id).unwrap().write(b"first");
    shard.turn(at(2));
    let first = sent_to(&mut shard, id);
    shard.shared(id).unwrap().write(b"never leaves");
    shard.begin(at(2), 1);
    shard.receive(id, &peer.record(99, b""));
    shard.end();
    let mut said = hear(&mut peer, &first);
    done(&mut shard, id, first);
    said.extend(leave(&mut shard, id, &mut peer).0);
    assert_eq!(said, [Said::Data(b"first".to_vec()), Said::Other(ALERT)]);
    assert_eq!(shard.held_bytes(), 0);
}

#[test]
fn held_replies_are_sealed_with_what_follows_them() {
    let (mut shard, id, mut peer) = ready(Limits::default());
    let outlet = shard.shared(id).unwrap().clone();
    outlet.write(b"one");
    outlet.hold_replies();
    shard.turn(at(2));
    assert!(shard.ops().is_empty());
    outlet.release_replies();
    outlet.write(b" two");
    shard.turn(at(3));
    let first = sent_to(&mut shard, id);
    assert_eq!(hear(&mut peer, &first), [Said::Data(b"one two".to_vec())]);
    // Nor does the end of a send take them along.
    outlet.write(b"three");
    outlet.hold_replies();
    done(&mut shard, id, first);
    shard.turn(at(4));
    assert!(shard.ops().is_empty());
    shard.finish(id, CloseReason::Closed);
    assert_eq!(leave(&mut shard, id, &mut peer).0, [Said::Data(b"three".to_vec()), Said::Other(CLOSE)]);
}

#[test]
fn channel_that_can_seal_no_more_has_its_last_word() {
    // While it is open, and while its replies are sent at the end.
    for closes in [false, true] {
        let (mut shard, id, mut peer) = ready(Limits::default());
        shard.shared(id).unwrap().write(b"first");
        shard.turn(at(2));
        let first = sent_to(&mut shard, id);
        shard.shared(id).unwrap().write(UNSEALABLE);
        if closes {
            shard.finish(id, CloseReason::Closed);
        }
        let mut said = hear(&mut peer, &first);
        done(&mut shard, id, first);
        shard.turn(at(3));
        let (more, ops) = leave(&mut shard, id, &mut peer);
        said.extend(more);
        assert_eq!(said, [Said::Data(b"first".to_vec()), Said::Other(ALERT)]);
        assert!(matches!(ops[..], [Op::Shutdown { .. }]), "{ops:?}");
        shard.dispatch();
        let reason = CloseReason::TlsBadRecord;
        assert_eq!(shard.heard(), [Heard::Ended { id, reason, opened: true }]);
        assert_eq!(shard.held_bytes(), 0);
    }
}

#[test]
fn peer_that_closes_gets_its_replies_and_all_behind_is_ignored() {
    let (mut shard, id, mut peer) = ready(Limits::default());
    shard.lane.parks = Some(0);
    shard.begin(at(2), 2);
    shard.receive(id, &[peer.frame(b"request"), peer.record(CLOSE, b""), vec![9; 20]].concat());
    shard.receive(id, &[9; 20]);
    shard.end();
    assert_eq!((taken(&mut shard), shard.heard(), shard.ops().len()), (vec![b"request".to_vec()], vec![], 0));
    shard.shared(id).unwrap().reply(b"reply"[..].into());
    shard.call_done();
    shard.turn(at(3));
    assert_eq!(leave(&mut shard, id, &mut peer).0, [Said::Data(wire(b"reply")), Said::Other(CLOSE)]);
    shard.dispatch();
    let reason = CloseReason::PeerClosed;
    assert_eq!(shard.heard(), [Heard::Batch(id), Heard::Ended { id, reason, opened: true }]);
}

#[test]
fn writing_ends_with_a_last_word_and_reading_goes_on() {
    let (mut shard, id, mut peer) = ready(Limits::default());
    let shared = shard.shared(id).unwrap().clone();
    shared.reply(b"all"[..].into());
    shared.end_writing();
    shard.turn(at(2));
    let (said, ops) = leave(&mut shard, id, &mut peer);
    assert_eq!(said, [Said::Data(wire(b"all")), Said::Other(CLOSE)]);
    assert!(matches!(ops[..], [Op::Shutdown { .. }]), "{ops:?}");
    shard.begin(at(3), 2);
    shard.complete(Completion::ShutDown { id });
    // The channel's answer cannot be sent.
    shard.receive(id, &[peer.record(REKEY, b""), peer.frame(b"more")].concat());
    shard.end();
    assert_eq!((taken(&mut shard), shard.ops().len()), (vec![b"more".to_vec()], 0));
    shared.close();
    shard.turn(at(4));
    assert_eq!(leave(&mut shard, id, &mut peer).0, [], "one last word");
    assert_eq!(shard.held_bytes(), 0);
}

#[test]
fn fin_is_judged_by_what_came_before_it() {
    let closed = CloseReason::PeerClosed;
    let cut = CloseReason::PeerClosedMidFrame;
    for (needs_close, kind, bytes, reason) in [
        (false, CLOSE, usize::MAX, closed),
        (true, CLOSE, usize::MAX, closed),
        (false, CLOSE, 0, closed),
        (true, CLOSE, 0, CloseReason::TlsTruncated),
        (false, CLOSE, 3, cut),
        (true, CLOSE, 3, cut),
        (false, DATA, usize::MAX, cut),
    ] {
        let (mut shard, id) = starting(Limits::default(), Toy { needs_close, ..TOY });
        let mut peer = Peer::default();
        shard.begin(at(1), 1);
        shard.receive(id, &peer.flights());
        shard.end();
        shard.turn(at(1));
        leave(&mut shard, id, &mut peer);
        // Three bytes of data are the start of a frame.
        let record = peer.record(kind, b"abc");
        shard.begin(at(2), 2);
        if bytes > 0 {
            shard.receive(id, &record[..bytes.min(record.len())]);
        }
        shard.complete(Completion::ReceiveEnded { id, end: ReceiveEnd::Eof });
        shard.end();
        let (said, _) = leave(&mut shard, id, &mut peer);
        assert_eq!(said, [Said::Other(CLOSE)]);
        let heard = shard.heard();
        assert_eq!(heard.last(), Some(&Heard::Ended { id, reason, opened: true }), "{needs_close} {bytes}");
        shard.check();
    }
}

#[test]
fn stream_that_was_cut_off_does_not_hear_of_an_end() {
    for (bytes, reason) in [(0, CloseReason::TlsTruncated), (7, CloseReason::PeerClosedMidFrame)] {
        let (mut shard, id) = starting(Limits::default(), Toy { needs_close: true, ..TOY });
        let mut peer = Peer::default();
        shard.begin(at(1), 1);
        shard.receive(id, &peer.flights());
        shard.end();
        shard.turn(at(1));
        shard.shared(id).unwrap().hold_open();
        shard.shared(id).unwrap().hear_end();
        shard.heard();
        shard.begin(at(2), 2);
        if bytes > 0 {
            shard.receive(id, &peer.frame(b"half")[..bytes]);
        }
        shard.complete(Completion::ReceiveEnded { id, end: ReceiveEnd::Eof });
        shard.end();
        leave(&mut shard, id, &mut peer);
        assert_eq!(shard.heard(), [Heard::Ended { id, reason, opened: true }]);
    }
}

#[test]
fn stream_hears_of_an_end_that_was_said() {
    let (mut shard, id, mut peer) = ready(Limits::default());
    shard.shared(id).unwrap().hold_open();
    shard.begin(at(2), 1);
    shard.receive(id, &peer.record(CLOSE, b""));
    shard.end();
    assert_eq!(shard.heard(), [Heard::InputEnded(id)]);
    shard.shared(id).unwrap().write(b"still answered");
    shard.turn(at(3));
    assert_eq!(leave(&mut shard, id, &mut peer).0, [Said::Data(b"still answered".to_vec())]);
    shard.begin(at(4), 1);
    shard.complete(Completion::ReceiveEnded { id, end: ReceiveEnd::Eof });
    shard.end();
    assert_eq!(shard.heard(), [], "it knows");
}

#[test]
fn close_waits_for_the_fin_behind_the_peers_last_word() {
    let (mut shard, id, mut peer) = ready(Limits::default());
    shard.begin(at(2), 1);
    shard.receive(id, &peer.record(CLOSE, b""));
    shard.end();
    let (said, ops) = leave(&mut shard, id, &mut peer);
    assert_eq!(said, [Said::Other(CLOSE)]);
    assert!(
        matches!(ops[..], [Op::Shutdown { .. }]),
        "bytes behind it would make a reset of a close: {ops:?}"
    );
    shard.begin(at(2), 2);
    shard.receive(id, b"ignored");
    shard.complete(Completion::ShutDown { id });
    shard.complete(Completion::ReceiveEnded { id, end: ReceiveEnd::Eof });
    shard.end();
    assert!(matches!(shard.ops()[..], [Op::Close { how: CloseHow::Orderly, .. }]));
}

#[test]
fn close_waits_for_fin_though_its_receive_ended_before() {
    let (mut shard, id, mut peer) = ready(Limits::default());
    shard.begin(at(2), 2);
    shard.receive(id, &peer.record(CLOSE, b""));
    // As if no buffer was left.
    shard.complete(Completion::ReceiveEnded { id, end: ReceiveEnd::Stopped });
    shard.end();
    let (_, ops) = leave(&mut shard, id, &mut peer);
    assert!(matches!(ops[..], [Op::Receive { .. }, Op::Shutdown { .. }]), "{ops:?}");
    shard.begin(at(2), 1);
    shard.complete(Completion::ShutDown { id });
    shard.end();
    assert_eq!(shard.ops().len(), 0, "what is behind the last word is not received yet");
    shard.begin(at(2), 1);
    shard.complete(Completion::ReceiveEnded { id, end: ReceiveEnd::Eof });
    shard.end();
    assert!(matches!(shard.ops()[..], [Op::Close { how: CloseHow::Orderly, .. }]));
}

#[test]
fn drain_closes_a_ready_connection_with_its_last_word() {
    let (mut shard, id, mut peer) = ready(Limits::default());
    shard.begin(at(2), 1);
    shard.receive(id, &peer.frame(b"half")[..7]);
    shard.end();
    shard.drain();
    for turn in 0..60 {
        shard.turn(at(2) + Duration::from_millis(turn * 10));
    }
    assert_eq!(leave(&mut shard, id, &mut peer).0, [Said::Other(CLOSE)]);
    shard.dispatch();
    let reason = CloseReason::Shutdown;
    assert_eq!(shard.heard(), [Heard::Ended { id, reason, opened: true }]);
    assert_eq!(shard.held_bytes(), 0);
    shard.check();
}

#[test]
fn peer_that_closes_in_the_middle_of_something_was_cut_off() {
    for hears_fin in [false, true] {
        let (mut shard, id, mut peer) = ready(Limits::default());
        shard.begin(at(2), 2);
        shard.receive(id, &[peer.record(BEGINS, b""), peer.record(CLOSE, b"")].concat());
        if hears_fin {
            shard.complete(Completion::ReceiveEnded { id, end: ReceiveEnd::Eof });
        }
        shard.end();
        assert_eq!(leave(&mut shard, id, &mut peer).0, [Said::Other(CLOSE)]);
        let reason = CloseReason::PeerClosedMidFrame;
        assert_eq!(shard.heard(), [Heard::Ended { id, reason, opened: true }]);
    }
}
