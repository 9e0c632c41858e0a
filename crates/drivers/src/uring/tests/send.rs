//! Sends.

use super::*;

#[test]
fn cancel_that_misses_a_send_is_repeated_until_it_ends() {
    let mut rig = Rig::new(8);
    let id = rig.sending(10);
    rig.ring.submit(Op::SendStop { id });
    rig.turn();
    assert!(matches!(rig.ops()[..], [RawOp::CancelSend { .. }]));
    for errno in [libc::ENOENT, libc::EALREADY, libc::ENOENT] {
        rig.says(Kind::CancelSend, id.bits(), -errno, 0);
        rig.turn();
        cancelled_again(&mut rig, Kind::CancelSend, id.bits());
    }
    rig.says(Kind::CancelSend, id.bits(), 0, 0);
    rig.says(Kind::Send, id.bits(), 4, 0);
    rig.turn();
    assert_eq!(rig.seen(), ["1.1 sent Stopped left 6"]);
    rig.kernel().now += Duration::from_secs(1);
    rig.turn();
    assert_eq!((rig.ops().len(), rig.ring.stats().cancels_missed), (0, 3));
}

#[test]
fn a_cancel_that_missed_a_send_is_not_made_once_the_send_ended() {
    let mut rig = Rig::new(8);
    let id = rig.sending(10);
    rig.ring.submit(Op::SendStop { id });
    rig.turn();
    rig.ops();
    rig.says(Kind::CancelSend, id.bits(), -libc::ENOENT, 0);
    rig.says(Kind::Send, id.bits(), 10, 0);
    rig.turn();
    assert_eq!(rig.seen(), ["1.1 sent Done left 0"]);
    let mut batch = Box::new(Batch::new());
    batch.put(b"next");
    rig.ring.submit(Op::Send { id, batch });
    rig.kernel().now += Duration::from_secs(1);
    rig.turn();
    assert!(matches!(rig.ops()[..], [RawOp::Send { .. }]), "the next send is left alone");
}

#[test]
fn what_did_not_fit_is_sent_again_with_patience() {
    let mut rig = Rig::new(4);
    let id = rig.sending(100);
    for (res, left) in [(30, 70), (-libc::EAGAIN, 70), (69, 1)] {
        rig.says(Kind::Send, id.bits(), res, 0);
        rig.turn();
        rig.turn();
        assert!(matches!(rig.ops()[..], [RawOp::Send { mode: SendMode::All, .. }]));
        assert_eq!(rig.kernel().batches[&id.bits()].len(), left);
    }
    rig.says(Kind::Send, id.bits(), 1, 0);
    rig.turn();
    assert_eq!(rig.seen(), ["1.1 sent Done left 0"]);
}

#[test]
fn a_send_that_moves_nothing_is_an_error_and_not_a_loop() {
    let mut rig = Rig::new(4);
    let id = rig.sending(100);
    rig.says(Kind::Send, id.bits(), 0, 0);
    rig.turn();
    assert_eq!(rig.seen(), ["1.1 sent Error(32) left 100"]);
}

#[test]
fn a_stopped_send_answers_once_wherever_it_is() {
    for (res, expected) in [
        (40, "1.1 sent Stopped left 60"),
        (100, "1.1 sent Done left 0"),
        (-libc::EAGAIN, "1.1 sent Stopped left 100"),
        (-libc::ECANCELED, "1.1 sent Stopped left 100"),
        (-libc::EPIPE, "1.1 sent Error(32) left 100"),
    ] {
        // Submitted.
        let mut rig = Rig::new(4);
        let id = rig.sending(100);
        rig.ring.submit(Op::SendStop { id });
        rig.says(Kind::Send, id.bits(), res, 0);
        rig.turn();
        assert!(matches!(rig.ops()[..], [RawOp::CancelSend { .. }]));
        assert_eq!(rig.seen(), [expected]);
    }
    // Its rest is still in the driver's queue.
    let mut rig = Rig::new(4);
    let id = rig.sending(100);
    rig.says(Kind::Send, id.bits(), 40, 0);
    rig.turn();
    rig.ring.submit(Op::SendStop { id });
    rig.turn();
    assert_eq!(rig.seen(), ["1.1 sent Stopped left 60"]);
    assert!(rig.ops().is_empty(), "neither the rest nor a cancel is submitted");
}

#[test]
fn only_sends_of_a_deferred_turn_are_quiet() {
    let mut rig = Rig::new(4);
    for (deferred, expected) in [(true, SendMode::TryQuietly), (false, SendMode::Try)] {
        let id = rig.adopted(u32::from(deferred), 1);
        let mut batch = Box::new(Batch::new());
        batch.put(b"x");
        rig.ring.submit(Op::Send { id, batch });
        if deferred {
            rig.ring.defer_sent();
        }
        rig.turn();
        assert!(matches!(rig.ops()[..], [_, RawOp::Send { mode, .. }] if mode == expected));
    }
}
