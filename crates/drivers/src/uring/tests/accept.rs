//! Accepts, and listeners that are closed.

use super::*;

#[test]
fn cancel_that_misses_an_accept_is_repeated_until_it_ends() {
    let mut rig = Rig::new(8);
    rig.ring.submit(Op::Accept { listener: 2 });
    rig.turn();
    rig.ring.submit(Op::AcceptStop { listener: 2 });
    rig.turn();
    rig.ops();
    missed(&mut rig, Kind::CancelAccept, 2, 20);
    cancelled_again(&mut rig, Kind::CancelAccept, 2);
    rig.says(Kind::CancelAccept, 2, 0, 0);
    rig.says(Kind::Accept, 2, -libc::ECANCELED, 0);
    rig.turn();
    assert_eq!(rig.seen(), ["AcceptEnded { listener: 2, end: Stopped }"]);
}

#[test]
fn accepting_goes_on_unless_there_is_a_reason_to_stop() {
    let mut rig = Rig::new(4);
    rig.ring.submit(Op::Accept { listener: 2 });
    rig.turn();
    assert!(matches!(rig.ops()[..], [RawOp::Accept { listener: 2 }]));
    for (res, flags) in [(7, 0), (-libc::ECONNABORTED, 0), (-libc::EINTR, 0), (-libc::ECANCELED, F_MORE)] {
        rig.says(Kind::Accept, 2, res, flags);
        rig.turn();
        rig.turn();
        assert!(matches!(rig.ops()[..], [RawOp::Accept { listener: 2 }]), "{res}");
    }
    assert_eq!(rig.out.drain(..).count(), 1);
    for (errno, expected) in [
        (libc::EMFILE, AcceptEnd::Descriptors),
        (libc::ENFILE, AcceptEnd::SystemFiles),
        (libc::ENOMEM, AcceptEnd::Error(libc::ENOMEM)),
    ] {
        rig.says(Kind::Accept, 2, -errno, 0);
        rig.turn();
        let [Completion::AcceptEnded { end, .. }] = rig.out[..] else { panic!("{:?}", rig.out) };
        assert_eq!(end, expected);
        rig.out.clear();
        rig.ring.submit(Op::Accept { listener: 2 });
        rig.turn();
        rig.ops();
    }
    // A socket that was accepted meanwhile is delivered, then the stop is answered.
    rig.ring.submit(Op::AcceptStop { listener: 2 });
    rig.says(Kind::Accept, 2, 8, F_MORE);
    rig.says(Kind::Accept, 2, -libc::ECANCELED, 0);
    rig.turn();
    let [Completion::Accepted { .. }, Completion::AcceptEnded { end, .. }] = rig.out[..] else {
        panic!("{:?}", rig.out)
    };
    assert_eq!(end, AcceptEnd::Stopped);
    // A socket for which no connect waits is closed.
    rig.says(Kind::Accept, 2, 9, F_MORE);
    rig.ops();
    rig.turn();
    rig.turn();
    assert!(matches!(rig.ops()[..], [RawOp::CloseFd { fd: 9 }]));
}

fn is_closed(completion: &Completion) -> bool {
    matches!(completion, Completion::AcceptEnded { listener: 2, end: AcceptEnd::Closed })
}

#[test]
fn listener_closes_once_its_accept_ended_and_queue_is_empty() {
    let mut rig = Rig::new(4);
    rig.ring.submit(Op::Accept { listener: 2 });
    rig.turn();
    rig.ops();
    rig.kernel().backlog.extend([Ok(11), Err(libc::ECONNABORTED), Ok(12)]);
    rig.ring.submit(Op::StopListening { listener: 2 });
    assert_eq!(std::mem::take(&mut rig.kernel().calls), ["turn away at 2"], "before anything is submitted");
    // The answer to the cancel comes first, and does not end the accept.
    rig.says(Kind::CancelAccept, 2, 0, 0);
    rig.turn();
    assert!(matches!(rig.ops()[..], [RawOp::CancelAccept { listener: 2 }]));
    assert!(rig.out.is_empty() && rig.kernel().calls.is_empty(), "an accept is in flight");
    rig.says(Kind::Accept, 2, 10, F_MORE);
    rig.says(Kind::Accept, 2, -libc::ECANCELED, 0);
    rig.turn();
    rig.turn();
    let [first @ .., end] = &rig.out[..] else { panic!("nothing came") };
    let sockets: Vec<_> = first
        .iter()
        .map(|completion| match completion {
            Completion::Accepted { listener: 2, socket, .. } => socket.0,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(sockets, [10, 11, 12]);
    assert!(is_closed(end), "{end:?}");
    assert_eq!(rig.kernel().calls.last().unwrap(), "close 2");
    assert!(rig.ops().is_empty(), "nothing is armed again");
}

#[test]
fn accept_that_ends_while_listening_stops_is_not_armed_again() {
    for res in [7, -libc::EMFILE, -libc::EINTR, -libc::EINVAL] {
        let mut rig = Rig::new(4);
        rig.ring.submit(Op::Accept { listener: 2 });
        rig.turn();
        rig.ring.submit(Op::AcceptStop { listener: 2 });
        rig.ring.submit(Op::StopListening { listener: 2 });
        rig.turn();
        rig.ops();
        rig.says(Kind::Accept, 2, res, 0);
        rig.turn();
        rig.turn();
        assert!(rig.ops().is_empty(), "{res}");
        assert!(is_closed(rig.out.last().unwrap()), "{res}: {:?}", rig.out);
        assert_eq!(rig.out.len(), 1 + usize::from(res > 0), "{res}: {:?}", rig.out);
    }
}

#[test]
fn queue_is_emptied_within_a_quarter_of_the_budget_a_turn() {
    let mut rig = Rig::new(4);
    rig.kernel().backlog.extend((0..100).map(|n| Ok(20 + n)));
    rig.ring.submit(Op::StopListening { listener: 2 });
    rig.kernel().enters.clear();
    let budget = Budget { completions: 10, ..Budget::default() };
    rig.ring.turn(Wait::Forever, budget, &mut rig.out).unwrap();
    assert_eq!(rig.out.len(), 10);
    assert!(rig.kernel().enters.is_empty(), "it does not wait");
    rig.turn();
    assert_eq!(rig.out.len(), 10 + 64);
    rig.turn();
    assert_eq!(rig.out.len(), 100 + 1);
}

#[test]
fn a_queue_is_looked_at_until_handshakes_had_their_time() {
    let mut rig = Rig::new(4);
    rig.kernel().late = Duration::from_millis(25);
    rig.ring.submit(Op::StopListening { listener: 2 });
    let mut waits = Vec::new();
    rig.turn();
    while !rig.out.last().is_some_and(is_closed) {
        rig.ring.turn(Wait::Forever, Budget::default(), &mut rig.out).unwrap();
        let (_, timeout) = rig.kernel().enters.pop().expect("it waits");
        waits.push(timeout.expect("not for ever").as_millis());
        if waits.len() == 2 {
            rig.kernel().backlog.push_back(Ok(9));
        }
        rig.kernel().now += timeout.unwrap();
        rig.turn();
    }
    assert_eq!(waits, [10, 10, 5]);
    assert_eq!(rig.out.len(), 2, "{:?}", rig.out);
}

#[test]
fn queue_without_descriptors_is_asked_each_10_ms_for_a_second() {
    let mut rig = Rig::new(4);
    rig.kernel().backlog.extend([Err(libc::EMFILE); 1000]);
    rig.ring.submit(Op::StopListening { listener: 2 });
    rig.turn();
    rig.kernel().calls.clear();
    let mut waits = 0;
    while rig.out.is_empty() {
        rig.ring.turn(Wait::Forever, Budget::default(), &mut rig.out).unwrap();
        let (wait_for, timeout) = rig.kernel().enters.pop().expect("it waits");
        assert_eq!((wait_for, timeout), (1, Some(Duration::from_millis(10))), "no longer, and not for ever");
        rig.kernel().now += Duration::from_millis(10);
        rig.turn();
        waits += 1;
    }
    assert_eq!(waits, 100);
    assert!(is_closed(&rig.out[0]));
    assert_eq!(rig.kernel().calls.iter().filter(|call| *call == "take at 2").count(), 100);
}

#[test]
fn queue_that_never_ends_is_closed_after_seconds() {
    let mut rig = Rig::new(4);
    rig.ring.submit(Op::StopListening { listener: 2 });
    let mut turns = 0;
    while !rig.out.last().is_some_and(is_closed) {
        assert!(turns < 100, "the listener stays");
        rig.kernel().backlog.extend([Ok(9); 64]);
        rig.kernel().now += Duration::from_millis(100);
        rig.turn();
        turns += 1;
    }
    assert_eq!((turns, rig.out.len()), (30, 29 * 64 + 1));
}

/// A rig whose listener 2 is adopted and accepts, and is being closed.
fn leaving() -> Rig {
    let mut rig = Rig::new(4);
    rig.kernel().adopted = true;
    rig.ring.submit(Op::Accept { listener: 2 });
    rig.turn();
    rig.kernel().backlog.extend([Ok(11), Ok(12)]);
    rig.ring.submit(Op::StopListening { listener: 2 });
    rig.turn();
    rig.ops();
    assert!(rig.out.is_empty() && rig.kernel().calls.is_empty(), "an accept is in flight");
    rig
}

#[test]
fn an_adopted_listener_is_left_with_its_queue() {
    let mut rig = leaving();
    rig.says(Kind::CancelAccept, 2, -libc::ENOENT, 0);
    // The accept was over before it was cancelled.
    rig.says(Kind::Accept, 2, 10, 0);
    rig.turn();
    rig.turn();
    assert_eq!(rig.kernel().calls, ["close 2"], "nothing else is done to the socket");
    let [Completion::Accepted { socket: Socket(10), .. }, end] = &rig.out[..] else {
        panic!("{:?}", rig.out)
    };
    assert!(is_closed(end), "{end:?}");
    rig.kernel().now += Duration::from_secs(1);
    rig.turn();
    assert!(rig.ops().is_empty(), "nothing is armed again");
}

#[test]
fn connection_for_which_a_cancelled_accept_was_woken_is_taken() {
    let mut rig = leaving();
    rig.says(Kind::CancelAccept, 2, 0, 0);
    rig.says(Kind::Accept, 2, -libc::ECANCELED, 0);
    rig.turn();
    rig.turn();
    assert_eq!(rig.kernel().calls, ["take at 2", "close 2"], "one, and the rest is left");
    let [Completion::Accepted { socket: Socket(11), .. }, end] = &rig.out[..] else {
        panic!("{:?}", rig.out)
    };
    assert!(is_closed(end), "{end:?}");
}

#[test]
fn pause_takes_one_connection_of_an_adopted_listener() {
    for (adopted, res, calls) in [(true, -libc::ECANCELED, 1), (true, 10, 0), (false, -libc::ECANCELED, 0)] {
        let mut rig = Rig::new(4);
        rig.kernel().adopted = adopted;
        rig.ring.submit(Op::Accept { listener: 2 });
        rig.turn();
        rig.kernel().backlog.extend([Ok(11), Ok(12)]);
        rig.ring.submit(Op::AcceptStop { listener: 2 });
        rig.turn();
        rig.says(Kind::CancelAccept, 2, 0, 0);
        rig.says(Kind::Accept, 2, res, 0);
        rig.turn();
        assert_eq!(rig.kernel().calls, vec!["take at 2"; calls], "{adopted} {res}");
        let accepted = |seen: &Completion| matches!(seen, Completion::Accepted { .. });
        assert_eq!(rig.out.iter().filter(|seen| accepted(seen)).count(), usize::from(adopted));
        let end = rig.out.last().unwrap();
        assert!(matches!(end, Completion::AcceptEnded { end: AcceptEnd::Stopped, .. }), "{end:?}");
    }
}

#[test]
fn an_adopted_listener_that_accepts_nothing_is_closed_at_once() {
    let mut rig = Rig::new(4);
    rig.kernel().adopted = true;
    rig.kernel().backlog.push_back(Ok(11));
    rig.ring.submit(Op::StopListening { listener: 2 });
    rig.turn();
    assert_eq!(rig.kernel().calls, ["close 2"]);
    assert!(matches!(&rig.out[..], [end] if is_closed(end)), "{:?}", rig.out);
}
