//! The end of a shard, and of a connection that lingers.

use super::*;

#[test]
fn operation_that_never_ends_is_left_behind_in_time() {
    let (mut shard, id) = with_connection(Limits::default());
    shard.begin(at(1), 0);
    shard.abort_all();
    shard.end();
    assert_eq!(shard.heard(), [Heard::Ended { id, reason: CloseReason::ServerAborted, opened: true }]);
    let mut now = at(1);
    // The receive never ends, nor does the listener.
    for _ in 0..8 {
        assert!(!shard.is_done() && shard.left_behind() == 0);
        let Wait::For(time) = shard.wait() else { break };
        now = now + time;
        shard.turn(now);
        if shard.is_done() {
            break;
        }
    }
    assert!(shard.is_done() && (at(6)..at(7)).contains(&now), "{now:?}");
    assert_eq!(shard.left_behind(), 2);
}

#[test]
fn shard_that_stood_still_takes_what_its_driver_ended_meanwhile() {
    let (mut shard, id) = with_connection(Limits::default());
    shard.begin(at(1), 0);
    shard.abort_all();
    shard.end();
    // The machine slept, and all that was awaited came meanwhile.
    let ends = [
        Completion::ReceiveEnded { id, end: crate::ReceiveEnd::Stopped },
        Completion::AcceptEnded { listener: 0, end: crate::AcceptEnd::Closed },
        Completion::Closed { id },
    ];
    let mut now = at(600);
    for completion in ends {
        assert!(!shard.is_done(), "given up, and {completion:?} was there");
        shard.begin(now, 1);
        shard.complete(completion);
        shard.end();
        now = now + Duration::from_millis(10);
    }
    assert!(shard.is_done());
    assert_eq!(shard.left_behind(), 0);
}

#[test]
fn delayed_drain_accepts_until_its_time_or_an_abort() {
    for aborted in [false, true] {
        let (mut shard, id) =
            with_connection(ServerLimits { drain_delay: Duration::from_secs(10), ..ServerLimits::default() });
        shard.begin(at(1), 0);
        shard.drain();
        shard.end();
        assert!(shard.all_share().is_draining() && !shard.has_stopped());
        assert_eq!(shard.take_ops().filter(|op| matches!(op, Op::StopListening { .. })).count(), 0);
        shard.begin(at(if aborted { 5 } else { 11 }), 0);
        if aborted {
            shard.abort_all();
        }
        assert!(shard.has_stopped() && shard.shared(id).is_none() == aborted);
        shard.end();
        assert_eq!(shard.take_ops().filter(|op| matches!(op, Op::StopListening { .. })).count(), 1);
    }
}

/// The order comes right after the connection, or a second later, and one frame after the first turns of the drain.
#[test]
fn connection_accepted_right_before_a_drain_has_its_time_to_ask() {
    for (seconds, is_answered) in [(0, true), (1, false)] {
        let (mut shard, id) = with_connection(Limits::default());
        shard.begin(at(seconds), 0);
        shard.drain();
        shard.end();
        // The first turns of the drain bring nothing.
        for _ in 0..3 {
            shard.turn(at(seconds));
        }
        assert_eq!(shard.is_cut(id), !is_answered, "connected {seconds} s ago");
        shard.begin(at(seconds), 0);
        shard.receive(id, &[0, 0, 0, 1, b'x']);
        shard.end();
        assert_eq!(shard.heard().contains(&Heard::Frame(id)), is_answered, "connected {seconds} s ago");
        // Its time is over, and it is owed nothing.
        shard.turn(at(seconds) + Duration::from_millis(31));
        assert!(shard.is_cut(id) || shard.shared(id).is_none());
    }
}

#[test]
fn peer_that_still_sends_when_its_time_is_over_is_reset() {
    for (still_sends, how) in [(false, CloseHow::Orderly), (true, CloseHow::Abort)] {
        let linger = Duration::from_secs(1);
        let (mut shard, id) = with_connection(Limits { linger_timeout: linger, ..Limits::default() });
        let turn = |shard: &mut Tested, seconds, completion: Option<Completion>| {
            shard.begin(at(seconds), 0);
            completion.into_iter().for_each(|completion| shard.complete(completion));
            shard.end();
            shard.ops()
        };
        shard.finish(id, CloseReason::Closed);
        assert!(matches!(turn(&mut shard, 1, None)[..], [Op::Shutdown { .. }]));
        turn(&mut shard, 1, Some(Completion::ShutDown { id }));
        // Within its time the peer may send what it likes.
        turn(
            &mut shard,
            1,
            Some(Completion::Received { id, lease: LeaseMut::try_copy_of(b"late").unwrap() }),
        );
        assert!(matches!(turn(&mut shard, 3, None)[..], [Op::ShutdownInput { .. }]));
        if still_sends {
            turn(
                &mut shard,
                3,
                Some(Completion::Received { id, lease: LeaseMut::try_copy_of(b"too late").unwrap() }),
            );
        }
        let ended = Completion::ReceiveEnded { id, end: crate::ReceiveEnd::Eof };
        let ops = turn(&mut shard, 3, Some(ended));
        assert!(matches!(&ops[..], [Op::Close { how: close, .. }] if *close == how), "{ops:?}");
    }
}

#[test]
fn every_connection_is_told_once_before_any_is_cut() {
    let (mut shard, ids) = with_connections(1100, Limits::default());
    // Long after they were accepted.
    shard.begin(at(5), 0);
    shard.drain();
    shard.end();
    let mut turns = 0;
    while shard.lane.told.len() < ids.len() {
        assert_eq!(shard.heard(), [], "cut before all were told");
        shard.turn(at(5));
        turns += 1;
        assert!(shard.lane.told.len() <= 512 * turns, "too many at once");
    }
    assert_eq!((turns, &shard.lane.told), (3, &ids));
    while !matches!(shard.wait(), Wait::For(_)) {
        shard.turn(at(5));
    }
    assert_eq!((shard.heard().len(), shard.lane.told.len()), (ids.len(), ids.len()));
}

#[test]
fn connection_that_opens_in_a_drain_is_told_then() {
    let server = ServerLimits::default().drain_delay(Duration::from_secs(10));
    let mut shard = Tested::new(server, 3, 1);
    shard.begin(Time::ZERO, 2);
    let early = accept(&mut shard, 1);
    shard.lane.parks_open = Some(100);
    let waits = accept(&mut shard, 2);
    shard.drain();
    shard.end();
    shard.turn(at(1));
    assert_eq!(shard.lane.told, [early]);
    shard.begin(at(2), 1);
    shard.lane.parks_open = None;
    let late = accept(&mut shard, 3);
    shard.open_done(waits, OPEN, 100);
    shard.opened(waits);
    shard.end();
    assert_eq!(shard.lane.told, [early, late, waits]);
    shard.turn(at(3));
    assert_eq!(shard.lane.told.len(), 3);
}
