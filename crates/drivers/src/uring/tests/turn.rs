//! Turns: when the kernel is entered, and what it may answer.

use super::*;

#[test]
fn a_full_submission_queue_keeps_the_order_and_does_not_block() {
    let mut rig = Rig::new(4);
    rig.kernel().room = 2;
    for slot in 0..4 {
        rig.adopted(slot, 1);
        rig.ring.submit(Op::Shutdown { id: ConnId::new(slot, 1) });
    }
    let mut submitted = Vec::new();
    for _ in 0..4 {
        rig.ring.turn(Wait::Forever, Budget::default(), &mut rig.out).unwrap();
        let blocked = rig.kernel().enters.last().unwrap().0 > 0;
        submitted.extend(rig.ops());
        assert_eq!(blocked, submitted.len() == 8, "it blocks only when all is submitted");
    }
    let expected: Vec<u64> = (0..4)
        .map(|slot| ConnId::new(slot, 1).bits())
        .flat_map(|bits| [Kind::Install.with(bits), Kind::Shutdown.with(bits)])
        .collect();
    assert_eq!(submitted.iter().map(RawOp::user_data).collect::<Vec<_>>(), expected);
    assert_eq!(rig.ring.stats().submissions_delayed, 6 + 4 + 2);
}

#[test]
fn turn_enters_for_a_reason_and_blocks_with_nothing_else() {
    let mut rig = Rig::new(4);
    let id = rig.receiving(1, 1);
    let enters = |rig: &mut Rig| std::mem::take(&mut rig.kernel().enters);
    enters(&mut rig);
    rig.turn();
    assert_eq!(enters(&mut rig), [], "nothing to do");
    rig.kernel().task_work = true;
    rig.turn();
    assert_eq!(enters(&mut rig), [(0, None)], "there is work to be done");
    rig.kernel().task_work = false;
    rig.says_bytes(id, 1, F_MORE);
    rig.ring.turn(Wait::Forever, Budget::default(), &mut rig.out).unwrap();
    assert_eq!(enters(&mut rig), [], "a completion was there already");
    let time = Duration::from_millis(5);
    rig.ring.turn(Wait::For(time), Budget::default(), &mut rig.out).unwrap();
    assert_eq!(enters(&mut rig), [(1, Some(time))]);
    rig.ring.turn(Wait::For(Duration::ZERO), Budget::default(), &mut rig.out).unwrap();
    assert_eq!(enters(&mut rig), []);
}

#[test]
fn an_overflow_counts_once_and_is_flushed() {
    let mut rig = Rig::new(4);
    rig.kernel().enters.clear();
    rig.kernel().overflowing = true;
    rig.turn();
    rig.turn();
    assert_eq!(rig.kernel().enters, [(0, None), (0, None)]);
    rig.kernel().overflowing = false;
    rig.turn();
    rig.kernel().overflowing = true;
    rig.turn();
    assert_eq!(rig.ring.stats().overflows, 2);
}

#[test]
fn an_interrupted_enter_is_no_failure_and_a_broken_one_is() {
    let mut rig = Rig::new(4);
    for errno in [libc::EINTR, libc::ETIME, libc::EBUSY, libc::EAGAIN] {
        rig.kernel().next_enter = Err(errno);
        rig.ring.turn(Wait::Forever, Budget::default(), &mut rig.out).unwrap();
    }
    rig.kernel().next_enter = Err(libc::EBADR);
    let turned = rig.ring.turn(Wait::Forever, Budget::default(), &mut rig.out);
    assert_eq!(turned, Err(libc::EBADR));
}

/// Panics at every line, as `tracing_subscriber` does once nothing reads what it writes.
struct Panicking;

impl tracing::Subscriber for Panicking {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        LINES.set(LINES.get() + 1);
        panic!("no line can be written: {event:?}");
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

thread_local! {
    static LINES: std::cell::Cell<u32> = const { std::cell::Cell::new(0) };
}

#[test]
fn a_subscriber_that_panics_ends_no_turn() {
    tracing::subscriber::with_default(Panicking, || {
        let mut rig = Rig::new(8);
        let (id, gone) = (rig.receiving(1, 1), ConnId::new(3, 9));
        rig.says(Kind::Install, id.bits(), -libc::ENOMEM, 0);
        rig.says(Kind::Ignored, 0, -libc::EBADF, 0);
        // Completions for connections and operations that are not there, with buffers that must be
        // returned.
        rig.says_bytes(gone, 5, F_MORE);
        rig.says(Kind::Accept, 2, 9, F_MORE);
        rig.says(Kind::Close, gone.bits(), 0, 0);
        rig.says_bytes(id, 3, F_MORE);
        rig.kernel().backlog.push_back(Err(libc::EIO));
        rig.ring.submit(Op::StopListening { listener: 2 });
        rig.turn();
        assert_eq!(rig.seen(), ["AcceptEnded { listener: 2, end: Closed }", "1.1 got 3"]);
        let anomalies = rig.ring.anomalies();
        assert_eq!((anomalies.stale, anomalies.installs_failed), (3, 1));
        assert_eq!(rig.ring.pool().counts().leased, 0);
        rig.turn();
        assert!(matches!(rig.ops()[..], [RawOp::CloseFd { fd: 9 }]), "what the lines were about is done");
        rig.ring.invariants();
    });
    // tracing may have noted while other tests ran that no subscriber wants a line: 6 when this
    // test runs alone.
    assert!(LINES.get() > 0, "the subscriber was asked");
}

#[test]
fn a_wake_ends_the_turn_and_the_next_one_is_armed() {
    let mut rig = Rig::new(4);
    rig.says(Kind::Wake, 0, 8, 0);
    rig.turn();
    assert!(rig.out.is_empty());
    rig.turn();
    assert!(matches!(rig.ops()[..], [RawOp::ReadWake]));
}

#[test]
fn driver_waits_for_more_once_behind_several_connections() {
    let wait = Duration::from_micros(50);
    let mut rig = Rig::new(8);
    rig.ring.coalesce = Coalesce::new(wait);
    let ids = [rig.receiving(1, 1), rig.receiving(2, 1)];
    let waits = |rig: &mut Rig, ids: &[ConnId], wait| {
        ids.iter().for_each(|id| rig.says_bytes(*id, 1, F_MORE));
        rig.turn();
        rig.kernel().enters.clear();
        rig.ring.defer_sent();
        rig.ring.turn(wait, Budget::default(), &mut rig.out).unwrap();
        std::mem::take(&mut rig.kernel().enters)
    };
    assert_eq!(waits(&mut rig, &ids, Wait::Forever), [(256, Some(wait))]);
    rig.ring.turn(Wait::Forever, Budget::default(), &mut rig.out).unwrap();
    assert_eq!(
        std::mem::take(&mut rig.kernel().enters),
        [(1, None)],
        "nothing came, and it is not asked again"
    );
    assert_eq!(waits(&mut rig, &ids, Wait::For(wait / 2)), [(256, Some(wait / 2))]);
    assert_eq!(waits(&mut rig, &ids, Wait::No), []);
    assert_eq!(waits(&mut rig, &[], Wait::Forever), [(256, Some(wait))], "put off, and not forgotten");
    assert_eq!(waits(&mut rig, &[ids[0], ids[0]], Wait::Forever), [(1, None)]);

    rig.out.clear();
    rig.turn();
    ids.iter().for_each(|id| rig.says_bytes(*id, 1, F_MORE));
    rig.turn();
    rig.kernel().enters.clear();
    rig.ring.turn(Wait::Forever, Budget::default(), &mut rig.out).unwrap();
    assert_eq!(rig.kernel().enters, [(1, None)], "a send that something waits for ends the wait");
}
