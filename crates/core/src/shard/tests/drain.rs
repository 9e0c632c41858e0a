//! The end of a shard, and of a connection that lingers.

use super::*;

#[test]
fn what_the_driver_never_ends_is_left_behind_in_time() {
    let (mut shard, _) = with_connection(Limits::default());
    shard.begin_turn(at(1), 0);
    shard.force();
    assert!(matches!(shard.next_event(), Some(Event::Ended { reason: CloseReason::ServerAborted, .. })));
    shard.end_turn();
    let mut now = at(1);
    // The receive never ends, nor does the listener.
    for _ in 0..8 {
        assert!(!shard.is_done() && shard.left_behind() == 0);
        let Wait::For(time) = shard.wait() else { break };
        now = now + time;
        shard.begin_turn(now, 0);
        shard.end_turn();
        if shard.is_done() {
            break;
        }
    }
    assert!(shard.is_done() && (at(6)..at(7)).contains(&now), "{now:?}");
    assert_eq!(shard.left_behind(), 2);
}

#[test]
fn a_delayed_drain_accepts_until_it_is_time_and_force_cuts_it_short() {
    for forced in [false, true] {
        let (mut shard, id) =
            with_connection(Limits { drain_delay: Duration::from_secs(10), ..Limits::default() });
        shard.begin_turn(at(1), 0);
        shard.drain();
        shard.end_turn();
        assert!(shard.local().is_draining() && !shard.has_stopped());
        assert_eq!(shard.take_ops().filter(|op| matches!(op, Op::StopListening { .. })).count(), 0);
        shard.begin_turn(at(if forced { 5 } else { 11 }), 0);
        if forced {
            shard.force();
        }
        assert!(shard.has_stopped() && shard.block(id).is_none() == forced);
        shard.end_turn();
        assert_eq!(shard.take_ops().filter(|op| matches!(op, Op::StopListening { .. })).count(), 1);
    }
}

#[test]
fn peer_that_still_sends_when_its_time_is_over_is_reset() {
    for (still_sends, how) in [(false, CloseHow::Orderly), (true, CloseHow::Abort)] {
        let linger = Duration::from_secs(1);
        let (mut shard, id) = with_connection(Limits { linger_timeout: linger, ..Limits::default() });
        let turn = |shard: &mut Tested, seconds, completion: Option<Completion>| {
            shard.begin_turn(at(seconds), 0);
            completion.into_iter().for_each(|completion| shard.complete(completion));
            while shard.next_event().is_some() {}
            shard.end_turn();
            shard.take_ops().collect::<Vec<Op>>()
        };
        shard.finish(id, CloseReason::Closed);
        assert!(matches!(turn(&mut shard, 1, None)[..], [Op::Shutdown { .. }]));
        turn(&mut shard, 1, Some(Completion::ShutDown { id }));
        // Within its time the peer may send what it likes.
        turn(&mut shard, 1, Some(Completion::Received { id, lease: Lease::copy_of(b"late") }));
        assert!(matches!(turn(&mut shard, 3, None)[..], [Op::ShutdownInput { .. }]));
        if still_sends {
            turn(&mut shard, 3, Some(Completion::Received { id, lease: Lease::copy_of(b"too late") }));
        }
        let ended = Completion::ReceiveEnded { id, end: crate::ReceiveEnd::Eof };
        let ops = turn(&mut shard, 3, Some(ended));
        assert!(matches!(&ops[..], [Op::Close { how: close, .. }] if *close == how), "{ops:?}");
    }
}
