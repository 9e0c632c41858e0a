//! Buffers taken back from the kernel while no receive is armed.

use super::*;

#[test]
fn the_buffer_ring_is_replaced_once_no_receive_is_in_flight() {
    let mut rig = Rig::new(64);
    let ids = [rig.receiving(1, 1), rig.receiving(2, 1)];
    assert_eq!(rig.ring.give_back(), GivesBack::Refused, "receives are armed");
    ids.iter().for_each(|id| rig.ring.submit(Op::ReceiveStop { id: *id }));
    assert_eq!(rig.ring.give_back(), GivesBack::Waits);
    let newcomer = rig.adopted(3, 1);
    rig.ring.submit(Op::Receive { id: newcomer });
    for id in ids {
        rig.turn();
        let arms = |op: &RawOp| matches!(op, RawOp::Receive { .. });
        assert!(!rig.ops().iter().any(arms), "nothing is armed meanwhile");
        assert!(rig.kernel().calls.is_empty());
        rig.says_bytes(id, 5, F_MORE);
        rig.says(Kind::Receive, id.bits(), -libc::ECANCELED, 0);
        rig.says(Kind::CancelReceive, id.bits(), 0, 0);
    }
    rig.turn();
    assert_eq!(rig.seen(), ["1.1 got 5", "1.1 Stopped", "2.1 got 5", "2.1 Stopped"]);
    rig.turn();
    assert_eq!(rig.kernel().calls, ["renew the buffer ring"]);
    let ops: Vec<_> = rig.ops().iter().map(RawOp::user_data).collect();
    assert_eq!(ops, [Kind::Receive.with(newcomer.bits())]);
    assert_eq!((rig.ring.give_back(), rig.ring.pool().counts().with_kernel), (GivesBack::Done, 32));
    rig.ring.invariants();
}

#[test]
fn receive_that_does_not_end_keeps_others_for_100_ms() {
    let mut rig = Rig::new(64);
    let id = rig.receiving(1, 1);
    rig.ring.submit(Op::ReceiveStop { id });
    assert_eq!(rig.ring.give_back(), GivesBack::Waits);
    let newcomer = rig.adopted(2, 1);
    rig.ring.submit(Op::Receive { id: newcomer });
    rig.turn();
    rig.ops();
    rig.kernel().enters.clear();
    rig.kernel().now += Duration::from_millis(60);
    rig.ring.turn(Wait::Forever, Budget::default(), &mut rig.out).unwrap();
    assert_eq!(rig.kernel().enters, [(1, Some(Duration::from_millis(40)))], "it waits no longer");
    rig.kernel().now += Duration::from_millis(40);
    rig.turn();
    let ops: Vec<_> = rig.ops().iter().map(RawOp::user_data).collect();
    assert_eq!(ops, [Kind::Receive.with(newcomer.bits())]);
    assert!(rig.kernel().calls.is_empty(), "the ring is not replaced");
    assert_eq!(rig.ring.give_back(), GivesBack::Refused);
}
