//! Receives: armed, parked, stopped, and the buffers they fill.

use super::*;

#[test]
fn cancelled_receive_ends_once_though_its_completion_says_more() {
    let mut rig = Rig::new(8);
    let id = rig.receiving(1, 1);
    rig.ring.submit(Op::ReceiveStop { id });
    rig.turn();
    assert!(matches!(rig.ops()[..], [RawOp::CancelReceive { .. }]));
    rig.says_bytes(id, 5, F_MORE);
    rig.says(Kind::CancelReceive, id.bits(), 0, 0);
    rig.says(Kind::Receive, id.bits(), -libc::ECANCELED, F_MORE);
    rig.turn();
    assert_eq!(rig.seen(), ["1.1 got 5", "1.1 Stopped"]);
    assert_eq!(rig.ring.anomalies(), Anomalies { more_flag: 1, ..Anomalies::default() });
    rig.ring.submit(Op::Close { id, how: CloseHow::Orderly });
    rig.turn();
    rig.says(Kind::Close, id.bits(), 0, 0);
    rig.turn();
    assert_eq!(rig.seen(), ["1.1 closed"]);
}

#[test]
fn a_receive_that_ended_by_itself_is_armed_again() {
    let mut rig = Rig::new(8);
    let id = rig.receiving(1, 1);
    for (res, flags) in [(-libc::ECANCELED, F_MORE), (-libc::EINTR, 0)] {
        rig.says(Kind::Receive, id.bits(), res, flags);
        rig.turn();
        rig.turn();
        assert!(matches!(rig.ops()[..], [RawOp::Receive { .. }]));
    }
    rig.says_bytes(id, 7, 0);
    rig.turn();
    rig.turn();
    assert!(matches!(rig.ops()[..], [RawOp::Receive { .. }]));
    assert_eq!(rig.seen(), ["1.1 got 7"]);
}

#[test]
fn a_stop_that_meets_the_end_of_the_stream_answers_once() {
    let mut rig = Rig::new(8);
    for (generation, natural) in [(1, 0), (2, -libc::ECONNRESET), (3, -libc::ENOBUFS)] {
        let id = rig.receiving(1, generation);
        rig.says(Kind::Receive, id.bits(), natural, 0);
        rig.ring.submit(Op::ReceiveStop { id });
        rig.says(Kind::CancelReceive, id.bits(), -libc::ENOENT, 0);
        rig.turn();
        let seen = rig.seen();
        assert_eq!(seen.len(), 1, "{seen:?}");
        rig.ring.submit(Op::Close { id, how: CloseHow::Orderly });
        rig.turn();
        rig.says(Kind::Close, id.bits(), 0, 0);
        rig.turn();
        assert_eq!(rig.seen().len(), 1);
    }
    assert_eq!(rig.ring.anomalies(), Anomalies::default());
}

#[test]
fn a_receive_that_ended_in_silence_is_found_by_its_stop() {
    let mut rig = Rig::new(8);
    let id = rig.receiving(1, 1);
    rig.ring.submit(Op::ReceiveStop { id });
    rig.turn();
    rig.ops();
    missed(&mut rig, Kind::CancelReceive, id.bits(), 5);
    assert_eq!(rig.seen(), ["1.1 Stopped"]);
    assert_eq!(rig.ring.anomalies().silent_ends, 1);
}

#[test]
fn a_receive_that_a_cancel_missed_is_still_the_connections() {
    let mut rig = Rig::new(8);
    let id = rig.receiving(1, 1);
    rig.ring.submit(Op::ReceiveStop { id });
    rig.turn();
    rig.ops();
    missed(&mut rig, Kind::CancelReceive, id.bits(), 4);
    cancelled_again(&mut rig, Kind::CancelReceive, id.bits());
    assert!(rig.seen().is_empty(), "it may live");
    rig.says_bytes(id, 3, F_MORE);
    rig.says(Kind::Receive, id.bits(), -libc::ECANCELED, 0);
    rig.says(Kind::CancelReceive, id.bits(), 0, 0);
    rig.turn();
    assert_eq!(rig.seen(), ["1.1 got 3", "1.1 Stopped"]);
    assert_eq!(rig.ring.anomalies(), Anomalies::default());
}

#[test]
fn the_answer_to_an_earlier_stop_does_not_end_a_later_receive() {
    let mut rig = Rig::new(8);
    let id = rig.receiving(1, 1);
    // The end is reaped before the stop's own answer, which still has to come.
    rig.ring.submit(Op::ReceiveStop { id });
    rig.turn();
    rig.says(Kind::Receive, id.bits(), -libc::ECANCELED, 0);
    rig.turn();
    assert_eq!(rig.seen(), ["1.1 Stopped"]);
    rig.ring.submit(Op::Receive { id });
    rig.ring.submit(Op::ReceiveStop { id });
    rig.turn();
    rig.says(Kind::CancelReceive, id.bits(), -libc::ENOENT, 0);
    rig.turn();
    assert_eq!(rig.seen(), [""; 0], "the second receive is still in flight");
    rig.ops();
    rig.kernel().now += Duration::from_secs(1);
    rig.turn();
    assert!(rig.ops().is_empty(), "its own cancel is not answered yet");
    rig.says(Kind::CancelReceive, id.bits(), 0, 0);
    rig.says(Kind::Receive, id.bits(), -libc::ECANCELED, 0);
    rig.turn();
    assert_eq!(rig.seen(), ["1.1 Stopped"]);
}

#[test]
fn receives_without_a_buffer_are_parked_and_armed_in_order() {
    let mut rig = Rig::new(2);
    let ids: Vec<ConnId> = (0..5).map(|slot| rig.receiving(slot, 1)).collect();
    rig.says_bytes(ids[0], 64, F_MORE);
    rig.says_bytes(ids[0], 64, F_MORE);
    for id in &ids {
        rig.says(Kind::Receive, id.bits(), -libc::ENOBUFS, 0);
    }
    rig.turn();
    assert_eq!(rig.ring.stats().receives_parked, 5);
    rig.turn();
    rig.turn();
    assert!(rig.ops().is_empty(), "there is no buffer to arm any with");
    rig.out.pop();
    rig.turn();
    // The first one took all there was, so the others come before it.
    assert!(matches!(rig.ops()[..], [RawOp::Receive { id }] if id == ids[1]));
    // A buffer is there that no receive used: the next one must not wait for it.
    rig.ring.turn(Wait::Forever, Budget::default(), &mut rig.out).unwrap();
    assert_eq!(rig.kernel().enters.last(), Some(&(0, None)), "it does not block");
    assert!(matches!(rig.ops()[..], [RawOp::Receive { id }] if id == ids[2]));
    rig.out.clear();
    // A parked one that is stopped ends at once and leaves the list.
    rig.ring.submit(Op::ReceiveStop { id: ids[3] });
    rig.turn();
    assert_eq!(rig.seen(), ["3.1 Stopped"]);
    let armed: Vec<_> = rig.ops().iter().map(RawOp::user_data).collect();
    assert_eq!(armed, [ids[4], ids[0]].map(|id| Kind::Receive.with(id.bits())));
    rig.ring.turn(Wait::Forever, Budget::default(), &mut rig.out).unwrap();
    assert_eq!(rig.kernel().enters.last(), Some(&(1, None)), "now it blocks");
}

#[test]
fn every_buffer_comes_back_once_whatever_its_completion_says() {
    let mut rig = Rig::new(4);
    let id = rig.receiving(1, 1);
    let with_kernel = rig.ring.pool().counts().with_kernel;
    rig.says_bytes(id, -libc::ECONNRESET, 0);
    rig.turn();
    assert_eq!(rig.seen(), ["1.1 Error(104)"]);
    // Late: there is no receive.
    rig.says_bytes(id, 10, F_MORE);
    rig.says_bytes(ConnId::new(1, 9), 10, 0);
    rig.says(Kind::Receive, ConnId::new(900, 1).bits(), -libc::ECANCELED, 0);
    rig.turn();
    assert_eq!(rig.seen(), [""; 0]);
    assert_eq!(rig.ring.anomalies().stale, 3);
    rig.turn();
    let counts = rig.ring.pool().counts();
    assert_eq!((counts.with_kernel, counts.leased), (with_kernel, 0));
    rig.ring.pool().invariants();
}

#[test]
fn bytes_for_a_slots_former_connection_do_not_reach_the_new_one() {
    let mut rig = Rig::new(4);
    let old = rig.receiving(1, 1);
    rig.says(Kind::Receive, old.bits(), 0, 0);
    rig.turn();
    rig.ring.submit(Op::Close { id: old, how: CloseHow::Orderly });
    rig.turn();
    rig.says(Kind::Close, old.bits(), 0, 0);
    rig.turn();
    rig.seen();
    let new = rig.receiving(1, 2);
    rig.says_bytes(old, 10, F_MORE);
    rig.says_bytes(new, 3, F_MORE);
    rig.turn();
    assert_eq!(rig.seen(), ["1.2 got 3"]);
    assert_eq!(rig.ring.anomalies().stale, 1);
}

#[test]
fn buffer_given_back_wakes_a_sleeping_shard_for_a_receive() {
    #[derive(Default)]
    struct Wakes(std::sync::atomic::AtomicUsize);
    impl std::task::Wake for Wakes {
        fn wake(self: std::sync::Arc<Self>) {
            self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        }
    }
    let wakes = std::sync::Arc::new(Wakes::default());
    let count = || wakes.0.load(std::sync::atomic::Ordering::Relaxed);
    let mut rig = Rig::new(1);
    rig.ring.pool().wake_when_freed(wakes.clone().into());
    let (first, second) = (rig.receiving(1, 1), rig.receiving(2, 1));
    rig.says_bytes(first, 3, F_MORE);
    rig.turn();
    rig.ring.wait_for_buffer();
    rig.out.clear();
    assert_eq!(count(), 0, "no receive waits");
    rig.turn();
    rig.says_bytes(first, 3, F_MORE);
    rig.says(Kind::Receive, second.bits(), -libc::ENOBUFS, 0);
    rig.turn();
    rig.ring.submit_queued(Wait::No).unwrap();
    rig.ring.wait_for_buffer();
    assert_eq!(count(), 0);
    rig.ops();
    rig.out.clear();
    assert_eq!(count(), 1);
    rig.ring.submit_queued(Wait::No).unwrap();
    assert!(matches!(rig.ops()[..], [RawOp::Receive { id }] if id == second));
}

#[test]
fn ring_gets_more_buffers_when_empty_and_fewer_when_quiet() {
    let mut rig = Rig::new(1000);
    let id = rig.receiving(1, 1);
    assert_eq!(rig.kernel().provided.len(), 32);
    rig.says(Kind::Receive, id.bits(), -libc::ENOBUFS, 0);
    rig.says_bytes(id, 1, F_MORE);
    rig.kernel().completions.swap(0, 1);
    rig.turn();
    rig.turn();
    assert_eq!(rig.kernel().provided.len(), 64);
    // The ring has 64 entries, and no more go in.
    rig.says(Kind::Receive, id.bits(), -libc::ENOBUFS, 0);
    rig.says_bytes(id, 1, F_MORE);
    rig.kernel().completions.swap(0, 1);
    rig.turn();
    rig.turn();
    assert_eq!(rig.kernel().provided.len(), 64);
    for _ in 0..1 << 15 {
        rig.turn();
    }
    for _ in 0..64 {
        rig.says_bytes(id, 1, F_MORE);
        rig.turn();
        rig.out.clear();
    }
    rig.turn();
    assert_eq!(rig.kernel().provided.len(), 32);
}

/// A connection that receives into a block, which has 3 bytes and room for 100, of which 50 may
/// come.
fn filling(rig: &mut Rig, generation: u64) -> ConnId {
    let id = rig.adopted(1, generation);
    rig.ring.submit(Op::ReceiveInto { id, block: block(), most: 50 });
    rig.turn();
    assert!(matches!(rig.ops()[..], [.., RawOp::ReceiveInto { most: 50, .. }]));
    id
}

fn block() -> Box<Block> {
    let mut block = Box::new(Block::default());
    assert!(block.put(&[1; 3], 3) && block.make_room(100, 100));
    block
}

#[test]
fn receive_into_a_block_ends_with_what_came() {
    let mut rig = Rig::new(8);
    for (generation, res, says) in [
        (1, 20, "filled 20 to 23 Stopped"),
        (2, 0, "filled 0 to 3 Eof"),
        (3, -libc::ECONNRESET, "filled 0 to 3 Error(104)"),
    ] {
        let id = filling(&mut rig, generation);
        rig.says(Kind::ReceiveInto, id.bits(), res, 0);
        rig.turn();
        assert_eq!(rig.seen(), [format!("{id} {says}")]);
        rig.ring.submit(Op::Close { id, how: CloseHow::Orderly });
        rig.turn();
        rig.ops();
        rig.says(Kind::Close, id.bits(), 0, 0);
        rig.turn();
        rig.seen();
    }
    assert_eq!(rig.ring.anomalies(), Anomalies::default());
}

#[test]
fn interrupted_receive_into_a_block_takes_as_many_bytes_again() {
    let mut rig = Rig::new(8);
    let id = filling(&mut rig, 1);
    for errno in [libc::EINTR, libc::ECANCELED, libc::EAGAIN] {
        rig.says(Kind::ReceiveInto, id.bits(), -errno, 0);
        rig.turn();
        rig.turn();
        assert!(matches!(rig.ops()[..], [RawOp::ReceiveInto { most: 50, .. }]));
    }
    assert_eq!(rig.seen(), [""; 0]);
    rig.says(Kind::ReceiveInto, id.bits(), 50, 0);
    rig.turn();
    assert_eq!(rig.seen(), ["1.1 filled 50 to 53 Stopped"]);
}

#[test]
fn receive_into_a_block_that_is_stopped_gives_it_back_once() {
    let mut rig = Rig::new(8);
    for (generation, res, says) in
        [(1, -libc::ECANCELED, "filled 0 to 3 Stopped"), (2, 7, "filled 7 to 10 Stopped")]
    {
        let id = filling(&mut rig, generation);
        rig.ring.submit(Op::ReceiveStop { id });
        rig.turn();
        assert!(matches!(rig.ops()[..], [RawOp::CancelReceive { .. }]));
        assert_eq!(rig.seen(), [""; 0], "not before the kernel is done with it");
        rig.says(Kind::CancelReceive, id.bits(), 0, 0);
        rig.says(Kind::ReceiveInto, id.bits(), res, 0);
        rig.turn();
        assert_eq!(rig.seen(), [format!("{id} {says}")]);
        rig.ring.submit(Op::Close { id, how: CloseHow::Orderly });
        rig.turn();
        rig.says(Kind::Close, id.bits(), 0, 0);
        rig.turn();
        rig.ops();
        rig.seen();
    }
}

#[test]
fn receive_for_once_ends_behind_its_bytes() {
    let mut rig = Rig::new(8);
    let id = rig.adopted(1, 1);
    rig.ring.submit(Op::ReceiveOnce { id, several: false });
    rig.turn();
    assert!(matches!(rig.ops()[..], [.., RawOp::ReceiveOnce { .. }]));
    rig.says(Kind::Receive, id.bits(), -libc::EINTR, 0);
    rig.turn();
    rig.turn();
    assert!(matches!(rig.ops()[..], [RawOp::ReceiveOnce { .. }]), "nothing came yet");
    rig.says_bytes(id, 5, 0);
    rig.turn();
    assert_eq!(rig.seen(), ["1.1 got 5", "1.1 Stopped"]);
    rig.turn();
    assert_eq!(rig.ops().len(), 0);
}
