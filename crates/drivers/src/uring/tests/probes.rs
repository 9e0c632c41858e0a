//! Receives that are probed, and those that end by the end of their input.

use super::*;

/// Probes a receive, with this answer.
fn probed(rig: &mut Rig, id: ConnId, res: i32) {
    rig.ring.submit(Op::Probe { id });
    rig.turn();
    assert!(matches!(rig.ops()[..], [RawOp::Probe { .. }]));
    rig.says(Kind::Probe, id.bits(), res, 0);
    rig.turn();
}

/// Lets the pause pass in which a receive has to report by itself.
fn pause(rig: &mut Rig) -> Vec<RawOp> {
    assert!(rig.ops().is_empty(), "a cancel before its time");
    rig.kernel().now += Duration::from_millis(10);
    rig.turn();
    rig.ops()
}

#[test]
fn probe_that_finds_nothing_leads_to_nothing() {
    let mut rig = Rig::new(8);
    let id = rig.receiving(1, 1);
    probed(&mut rig, id, -libc::EAGAIN);
    assert!(pause(&mut rig).is_empty());
    assert_eq!((rig.ring.stats().probes, rig.ring.stats().cancels), (1, 0));
}

#[test]
fn receive_that_tells_what_a_probe_found_is_left_alone() {
    let mut rig = Rig::new(8);
    let id = rig.receiving(1, 1);
    probed(&mut rig, id, 1);
    rig.says_bytes(id, 5, F_MORE);
    rig.turn();
    assert!(pause(&mut rig).is_empty());
    assert_eq!((rig.seen(), rig.ring.stats().cancels), (vec!["1.1 got 5".to_owned()], 0));
    // Nor is one that ends with what was found, and its successor.
    probed(&mut rig, id, 1);
    rig.says_bytes(id, 5, 0);
    rig.turn();
    rig.turn();
    assert!(matches!(rig.ops()[..], [RawOp::Receive { .. }]));
    assert!(pause(&mut rig).is_empty());
}

#[test]
fn receive_that_does_not_tell_what_a_probe_found_is_armed_again() {
    for found in [1, 0, -libc::EINTR, -libc::ENOMEM] {
        let mut rig = Rig::new(8);
        let id = rig.receiving(1, 1);
        probed(&mut rig, id, found);
        // A second probe would find the same.
        rig.ring.submit(Op::Probe { id });
        rig.turn();
        assert!(matches!(pause(&mut rig)[..], [RawOp::CancelReceive { .. }]), "{found}");
        rig.says(Kind::CancelReceive, id.bits(), 0, 0);
        rig.says(Kind::Receive, id.bits(), -libc::ECANCELED, 0);
        rig.turn();
        rig.turn();
        assert!(matches!(rig.ops()[..], [RawOp::Receive { .. }]));
        rig.says_bytes(id, 7, F_MORE);
        rig.turn();
        assert_eq!((rig.seen(), rig.ring.stats().cancels), (vec!["1.1 got 7".to_owned()], 1));
        assert_eq!(rig.ring.anomalies(), Anomalies::default());
    }
}

#[test]
fn receive_that_was_stopped_while_doubted_is_not_armed_again() {
    let mut rig = Rig::new(8);
    let id = rig.receiving(1, 1);
    probed(&mut rig, id, 1);
    assert_eq!(pause(&mut rig).len(), 1);
    rig.ring.submit(Op::ReceiveStop { id });
    rig.says(Kind::CancelReceive, id.bits(), 0, 0);
    rig.says(Kind::Receive, id.bits(), -libc::ECANCELED, 0);
    rig.turn();
    rig.turn();
    assert_eq!((rig.seen(), rig.ops().len()), (vec!["1.1 Stopped".to_owned()], 0));
}

#[test]
fn error_that_a_probe_was_told_is_how_the_receive_ends() {
    for restarted in [false, true] {
        let mut rig = Rig::new(8);
        let id = rig.receiving(1, 1);
        probed(&mut rig, id, -libc::ECONNRESET);
        if restarted {
            assert_eq!(pause(&mut rig).len(), 1);
            rig.says(Kind::Receive, id.bits(), -libc::ECANCELED, 0);
            rig.says(Kind::CancelReceive, id.bits(), 0, 0);
            rig.turn();
            rig.turn();
            assert!(matches!(rig.ops()[..], [RawOp::Receive { .. }]));
        }
        rig.says(Kind::Receive, id.bits(), 0, 0);
        rig.turn();
        assert_eq!(rig.seen(), ["1.1 Error(104)"]);
    }
}

#[test]
fn probe_of_a_former_connection_says_nothing_of_its_successor() {
    let mut rig = Rig::new(8);
    let old = rig.receiving(1, 1);
    rig.ring.submit(Op::Probe { id: old });
    rig.turn();
    rig.says(Kind::Receive, old.bits(), 0, 0);
    rig.turn();
    rig.ring.submit(Op::Close { id: old, how: CloseHow::Orderly });
    rig.turn();
    rig.says(Kind::Close, old.bits(), 0, 0);
    rig.turn();
    let new = rig.receiving(1, 2);
    rig.seen();
    rig.says(Kind::Probe, old.bits(), -libc::ECONNRESET, 0);
    rig.turn();
    assert!(pause(&mut rig).is_empty());
    rig.says(Kind::Receive, new.bits(), 0, 0);
    rig.turn();
    assert_eq!((rig.seen(), rig.ring.anomalies()), (vec!["1.2 Eof".to_owned()], Anomalies::default()));
}

#[test]
fn receive_that_ended_in_silence_is_found_by_its_probe() {
    let mut rig = Rig::new(8);
    let id = rig.receiving(1, 1);
    probed(&mut rig, id, 1);
    assert_eq!(pause(&mut rig).len(), 1);
    missed(&mut rig, Kind::CancelReceive, id.bits(), 5);
    assert_eq!((rig.seen(), rig.ring.anomalies().silent_ends), (vec!["1.1 Error(5)".to_owned()], 1));
}

#[test]
fn restart_forgets_the_misses_of_an_earlier_one() {
    let mut rig = Rig::new(8);
    let id = rig.receiving(1, 1);
    for _ in 0..3 {
        probed(&mut rig, id, 1);
        assert_eq!(pause(&mut rig).len(), 1);
        missed(&mut rig, Kind::CancelReceive, id.bits(), 3);
        rig.kernel().now += Duration::from_millis(10);
        rig.turn();
        assert_eq!(rig.ops().len(), 1);
        rig.says(Kind::CancelReceive, id.bits(), 0, 0);
        rig.says(Kind::Receive, id.bits(), -libc::ECANCELED, 0);
        rig.turn();
        rig.turn();
        assert!(matches!(rig.ops()[..], [RawOp::Receive { .. }]));
    }
    assert_eq!((rig.seen().len(), rig.ring.anomalies()), (0, Anomalies::default()));
}

#[test]
fn receive_that_is_parked_or_stopping_is_not_probed() {
    let mut rig = Rig::new(8);
    let id = rig.receiving(1, 1);
    rig.ring.submit(Op::Probe { id });
    rig.ring.submit(Op::ReceiveStop { id });
    rig.turn();
    assert!(matches!(rig.ops()[..], [RawOp::CancelReceive { .. }]));
    assert_eq!(rig.ring.stats().probes, 0);
}

#[test]
fn probes_are_few_in_a_turn_and_end_no_wait_early() {
    let mut rig = Rig::new(8);
    let ids: Vec<ConnId> = (0..200).map(|slot| rig.receiving(slot, 1)).collect();
    rig.kernel().enters.clear();
    ids.iter().for_each(|id| rig.ring.submit(Op::Probe { id: *id }));
    rig.ring.submit(Op::Shutdown { id: ids[0] });
    for (turn, count) in [64, 64, 64, 8].into_iter().enumerate() {
        rig.ring.turn(Wait::Forever, Budget::default(), &mut rig.out).unwrap();
        let ops = rig.ops();
        let probes = ops.iter().filter(|op| matches!(op, RawOp::Probe { .. })).count();
        assert_eq!(probes, count);
        assert_eq!(matches!(ops[0], RawOp::Shutdown { .. }), turn == 0, "what the turn has to do goes first");
        assert_eq!(rig.kernel().enters.pop().unwrap().0, u32::from(turn == 3), "turn {turn} waits");
    }
}

/// A receive whose input is being shut down.
fn ending(rig: &mut Rig) -> ConnId {
    let id = rig.receiving(1, 1);
    rig.ring.submit(Op::ShutdownInput { id });
    rig.turn();
    assert!(matches!(rig.ops()[..], [RawOp::ShutdownInput { .. }]));
    id
}

#[test]
fn input_that_is_shut_down_ends_the_receive_without_a_cancel() {
    let mut rig = Rig::new(8);
    let id = ending(&mut rig);
    rig.says(Kind::Receive, id.bits(), 0, 0);
    rig.turn();
    rig.ring.submit(Op::Close { id, how: CloseHow::Abort });
    rig.turn();
    assert!(rig.ops().is_empty(), "the slot is not given back before the shutdown has ended");
    rig.says(Kind::Shutdown, id.bits(), 0, 0);
    rig.turn();
    rig.turn();
    assert!(matches!(rig.ops()[..], [RawOp::Close { how: CloseHow::Abort, .. }]));
    rig.says(Kind::Close, id.bits(), 0, 0);
    rig.turn();
    assert_eq!(rig.seen(), ["1.1 Eof", "1.1 closed"]);
    assert_eq!((rig.ring.stats().cancels, rig.ring.anomalies()), (0, Anomalies::default()));
}

#[test]
fn queued_shutdown_is_pointless_once_the_receive_ended() {
    let mut rig = Rig::new(8);
    let id = rig.receiving(1, 1);
    rig.kernel().room = 0;
    rig.ring.submit(Op::ShutdownInput { id });
    rig.says(Kind::Receive, id.bits(), 0, 0);
    rig.turn();
    rig.ring.submit(Op::Close { id, how: CloseHow::Orderly });
    rig.kernel().room = 1000;
    rig.turn();
    assert!(matches!(rig.ops()[..], [RawOp::Close { how: CloseHow::Orderly, .. }]));
}

#[test]
fn receive_that_misses_the_end_of_its_input_is_cancelled() {
    let mut rig = Rig::new(8);
    let id = ending(&mut rig);
    rig.says(Kind::Shutdown, id.bits(), 0, 0);
    rig.turn();
    assert!(matches!(pause(&mut rig)[..], [RawOp::CancelReceive { .. }]));
    rig.says(Kind::CancelReceive, id.bits(), 0, 0);
    rig.says(Kind::Receive, id.bits(), -libc::ECANCELED, 0);
    rig.turn();
    assert_eq!(rig.seen(), ["1.1 Stopped"]);
    rig.ring.submit(Op::Close { id, how: CloseHow::Abort });
    rig.turn();
    assert!(matches!(rig.ops()[..], [RawOp::Close { .. }]));
}

#[test]
fn answer_to_an_old_cancel_closes_nothing_under_a_shutdown() {
    let mut rig = Rig::new(8);
    let id = rig.receiving(1, 1);
    probed(&mut rig, id, 1);
    assert_eq!(pause(&mut rig).len(), 1);
    rig.ring.submit(Op::ShutdownInput { id });
    rig.says(Kind::Receive, id.bits(), 0, 0);
    rig.turn();
    assert!(matches!(rig.ops()[..], [RawOp::ShutdownInput { .. }]));
    rig.ring.submit(Op::Close { id, how: CloseHow::Abort });
    rig.says(Kind::CancelReceive, id.bits(), -libc::ENOENT, 0);
    rig.turn();
    rig.turn();
    assert!(rig.ops().is_empty(), "closed before the shutdown has ended");
    rig.says(Kind::Shutdown, id.bits(), 0, 0);
    rig.turn();
    rig.turn();
    assert!(matches!(rig.ops()[..], [RawOp::Close { .. }]));
}

#[test]
fn abort_during_a_shutdown_is_told_from_it() {
    let mut rig = Rig::new(8);
    let id = rig.receiving(1, 1);
    rig.ring.submit(Op::Shutdown { id });
    rig.ring.submit(Op::ShutdownInput { id });
    rig.turn();
    assert!(matches!(rig.ops()[..], [RawOp::Shutdown { .. }, RawOp::CancelReceive { .. }]));
}
