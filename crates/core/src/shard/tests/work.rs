//! The work of a turn: batches, what is left over, tasks.

use super::*;
use crate::AcceptRate;

#[test]
fn a_frame_waits_for_one_batch_of_each_other_connection() {
    let (mut shard, mut ids) = with_connections(501, Limits::default());
    let pinger = ids.pop().unwrap();
    shard.begin(at(1), 500);
    for &id in &ids {
        shard.receive(id, &empty_frames(2000));
    }
    shard.end();
    let calls = shard.handed().len();
    assert!(calls <= 4096, "{calls} calls in a turn");
    let mut handed = Vec::new();
    // It comes in the second turn, when the driver has no more news than the ping.
    for turn in -1.. {
        assert_eq!(shard.wait(), Wait::No);
        shard.begin(at(1), usize::from(turn == 0));
        if turn == 0 {
            handed.clear();
            shard.receive(pinger, &empty_frames(1));
        }
        shard.end();
        let calls = shard.handed();
        assert!(calls.len() <= 4096, "{} calls in a turn", calls.len());
        handed.extend_from_slice(&calls);
        if calls.contains(&pinger) {
            break;
        }
    }
    // Those that had a batch in the turn in which it came are behind it, those that had none are
    // before it.
    assert!(handed.len() <= (500 + 256) * 16, "{} calls before it", handed.len());
    for id in ids {
        let batches = handed.iter().filter(|of| **of == id).count();
        assert!((16..=32).contains(&batches), "{batches} of {id}");
    }
}

/// The most frames of 500 peers without an end between two of a peer that asks one by one, where
/// each call takes `call`, and the batches of the others at the end. An answer and the next
/// question take one turn. The first questions are left out, in which the shard learns what calls
/// take.
fn most_frames_between_two_of_a_calm_peer(call: Duration) -> (usize, usize) {
    let (mut shard, mut ids) = with_connections(501, Limits::default());
    let calm = ids.pop().unwrap();
    let mut now = at(1);
    let (mut asks_in, mut others, mut counts) = (1, 0, Vec::new());
    let mut batch = 0;
    for turn in 0.. {
        let asks = turn == asks_in;
        shard.begin(now, if turn == 0 { 500 } else { usize::from(asks) });
        if turn == 0 {
            ids.iter().for_each(|id| shard.receive(*id, &empty_frames(2000)));
        }
        if asks {
            shard.receive(calm, &empty_frames(1));
        }
        shard.end();
        shard.ops();
        let handed = shard.handed();
        for (n, id) in handed.iter().enumerate() {
            if *id == calm {
                counts.push(core::mem::take(&mut others));
                asks_in = turn + 2;
            } else {
                others += 1;
                let row = handed[n..].iter().take_while(|of| *of == id).count();
                batch = if n > 0 && handed[n - 1] == *id { batch } else { row };
            }
        }
        if counts.len() == 30 {
            break;
        }
        now = now + call * handed.len() as u32;
    }
    (counts[10..].iter().copied().max().unwrap(), batch)
}

#[test]
fn calm_peer_waits_for_fewer_frames_where_calls_take_longer() {
    let nanos = Duration::from_nanos;
    let (cheap, batch) = most_frames_between_two_of_a_calm_peer(nanos(150));
    assert!(batch == 16 && cheap < 4 * 4096, "{cheap} frames, batches of {batch}");
    let (most, batch) = most_frames_between_two_of_a_calm_peer(nanos(5000));
    assert!(batch == 4 && most <= 6000, "{most} frames, batches of {batch}");
    let (most, batch) = most_frames_between_two_of_a_calm_peer(nanos(100_000));
    assert!(batch == 1 && most <= 1500, "{most} frames, batches of {batch}");
}

#[test]
fn short_turns_have_all_their_calls_again() {
    let (mut shard, ids) = with_connections(500, Limits::default());
    let mut now = at(1);
    let mut turn = |shard: &mut Tested, took: Duration| {
        shard.begin(now, 0);
        shard.end();
        now = now + took;
        shard.handed().len()
    };
    shard.begin(at(1), 500);
    ids.iter().for_each(|id| shard.receive(*id, &empty_frames(4000)));
    shard.end();
    assert_eq!(shard.handed().len(), 4096);
    let (long, middle, short) =
        (Duration::from_millis(7), Duration::from_millis(4), Duration::from_millis(1));
    let took = [long, long, middle, short, short, short, long];
    // What a turn took shows in the next one.
    let calls: Vec<usize> = took.iter().map(|took| turn(&mut shard, *took)).collect();
    // The first one has a sixteenth, since the driver brought as much as it may.
    assert_eq!(calls, [256, 2048, 1024, 1024, 2048, 4096, 4096]);
    let calls: Vec<usize> = [long; 5].iter().map(|took| turn(&mut shard, *took)).collect();
    assert_eq!(calls, [2048, 1024, 512, 256, 256]);
    assert_eq!((shard.turn_part(), shard.cuts_turns()), (Core::WHOLE_TURN / 16, true));
}

#[test]
fn turn_behind_a_wait_is_not_taken_for_a_long_one() {
    let (mut shard, ids) = with_connections(8, Limits::default());
    for second in 1..5 {
        shard.begin(at(second), 8);
        ids.iter().for_each(|id| shard.receive(*id, &empty_frames(512)));
        shard.end();
        assert_eq!(shard.handed().len(), 4096, "it was over with all of them, and then it waited");
        assert_ne!(shard.wait(), Wait::No);
    }
}

#[test]
fn long_turn_is_known_by_the_news_that_a_driver_had_left_too() {
    let (mut shard, ids) = with_connections(256, Limits::default());
    let turns = [0, 20].map(|ms| {
        shard.begin(at(1) + Duration::from_millis(ms), 256);
        ids.iter().for_each(|id| shard.receive(*id, &empty_frames(16)));
        shard.end();
        shard.handed().len()
    });
    assert_eq!(turns, [4096, 2048]);
}

#[test]
fn connections_left_over_leave_the_turn_to_news() {
    let (mut shard, ids) = with_connections(500, Limits::default());
    let turn = |shard: &mut Tested, completions, receives: &[ConnId]| {
        shard.begin(at(1), completions);
        for &id in receives {
            shard.receive(id, &empty_frames(4096));
        }
        shard.end();
        shard.handed().len()
    };
    // 16 KiB each: 1 MiB of 64 connections is as much as a turn may bring, as are 256 completions.
    assert_eq!(turn(&mut shard, 64, &ids[..64]), 64 * 64);
    assert_eq!(turn(&mut shard, 0, &[]), 256);
    assert_eq!(turn(&mut shard, 0, &[]), 4096);
    assert_eq!(turn(&mut shard, 256, &[]), 256);
}

#[test]
fn a_connection_alone_has_its_frames_in_one_row() {
    let (mut shard, ids) = with_connections(1, Limits::default());
    shard.begin(at(1), 1);
    shard.receive(ids[0], &empty_frames(1024));
    shard.end();
    assert_eq!((shard.handed().len(), shard.wait() == Wait::No), (1024, false));
}

#[test]
fn an_end_behind_exactly_one_batch_is_heard() {
    for frames in [31, 32, 33, 64] {
        let (mut shard, ids) = with_connections(1, Limits::default());
        let id = ids[0];
        shard.bound_turn(32, 32);
        shard.begin(at(1), 2);
        // A call waits while the rest arrives.
        shard.lane.parks = Some(0);
        shard.receive(id, &empty_frames(1));
        shard.receive(id, &empty_frames(frames));
        shard.complete(Completion::ReceiveEnded { id, end: crate::ReceiveEnd::Eof });
        shard.end();
        assert_eq!(shard.handed(), [id]);
        shard.lane.parks = None;
        shard.begin(at(2), 0);
        shard.call_done();
        shard.end();
        for _ in 0..4 {
            shard.turn(at(2));
        }
        let handed = shard.heard().into_iter().filter(|heard| *heard == Heard::Frame(id)).count();
        assert_eq!(handed, frames);
        assert_eq!(
            shard.counters(LaneId::FIRST).closed_for(CloseReason::PeerClosed),
            1,
            "after {frames} frames"
        );
    }
}

#[test]
fn tasks_have_their_part_of_each_turn_whatever_peers_send() {
    let (mut shard, ids) = with_connections(8, Limits::default());
    let mut tasks = Vec::new();
    for turn in 0..20 {
        shard.begin(at(2), 8 * usize::from(turn == 0));
        if turn == 0 {
            for id in &ids {
                shard.receive(*id, &empty_frames(15_000));
            }
        }
        tasks.push((0..100).take_while(|_| shard.take_call()).count());
        shard.end();
        shard.ops();
    }
    assert!(tasks.iter().all(|polled| *polled == 100), "{tasks:?}");
}

#[test]
fn send_of_a_full_outbox_is_awaited_where_other_threads_push() {
    for (bytes, is_gated) in [(4000, true), (5000, false), (5000, true)] {
        let limits = Limits::default().outbox_bytes_low(1 << 10).outbox_bytes_high(4 << 10);
        let (mut shard, id) = with_connection(limits);
        shard.begin(at(1), 0);
        let gate = is_gated.then(|| shard.shared(id).unwrap().gate());
        shard.end();
        shard.take_send_awaited();
        // It comes from elsewhere: no frame is held back for it.
        shard.begin(at(1), 0);
        shard.shared(id).unwrap().write(&vec![0; bytes]);
        shard.end();
        let is_full = gate.is_some_and(|gate| gate.is_full());
        assert_eq!(is_full, is_gated && bytes == 5000);
        assert_eq!(shard.take_send_awaited(), is_full, "{bytes} bytes");
    }
}

#[test]
fn send_of_owned_bytes_is_awaited_as_their_owner_may_be() {
    for (bytes, owned) in [(40_000, true), (40_000, false), (100, true)] {
        let limits = Limits::default().outbox_bytes_low(1 << 18).outbox_bytes_high(1 << 19);
        let (mut shard, id) = with_connection(limits);
        shard.take_send_awaited();
        shard.begin(at(1), 0);
        let reply = vec![0; bytes];
        match owned {
            true => shard.shared(id).unwrap().reply(reply.into()),
            false => shard.shared(id).unwrap().reply(reply.as_slice().into()),
        }
        shard.end();
        assert_eq!(shard.take_send_awaited(), owned && bytes == 40_000, "{bytes} bytes, owned: {owned}");
    }
}

#[test]
fn full_shard_whose_rate_has_a_token_sleeps() {
    let mut shard = Tested::new(Limits::default(), 1, 1);
    shard.share_quota(Arc::new(Quota::new(8)));
    shard.share_rate(Arc::new(AcceptRate::new(10, 1, Duration::ZERO)));
    shard.turn(Time::ZERO);
    shard.begin(at(1), 1);
    // It takes the token and the slot.
    accept(&mut shard, 3);
    shard.end();
    shard.turn(at(2));
    assert!(shard.next_turn().is_some_and(|next| next > at(2)), "woken at once, again and again");
}

#[test]
fn shard_that_could_not_accept_wakes_up_to_try_again() {
    let mut shard = Tested::new(Limits::default(), 1, 1);
    shard.turn(Time::ZERO);
    shard.ops();
    assert_eq!((shard.next_turn(), shard.next_turn_or_never()), (None, Time::NEVER));
    shard.begin(at(1), 1);
    shard.complete(Completion::AcceptEnded { listener: 0, end: AcceptEnd::Descriptors });
    shard.end();
    let again = shard.next_turn().expect("it tries again");
    assert!(again > at(1) && again < at(2), "{again:?}");
    assert!(shard.ops().is_empty(), "it rests before");
    shard.turn(again);
    assert!(matches!(shard.ops()[..], [Op::Accept { listener: 0 }]));
}

#[test]
fn shard_that_postponed_a_newcomer_wakes_up_for_it() {
    let mut shard = Tested::new(Limits::default(), 4, 1);
    shard.lane.leaves_sockets = true;
    shard.turn(Time::ZERO);
    shard.begin(at(1), 1);
    shard.complete(Completion::Accepted { listener: 0, socket: Socket(3), peer: None });
    assert_eq!(shard.heard(), [Heard::Accepted(Socket(3))]);
    let until = at(1) + Duration::from_millis(10);
    shard.postpone(Socket(3), None, 0, until);
    shard.end();
    assert_eq!(shard.next_turn(), Some(until));
    // There is room, and the server has to know.
    assert!(!shard.is_accept_paused() && shard.counters(LaneId::FIRST).accept_paused == 0);
    shard.turn(until);
    assert_eq!(shard.heard(), [Heard::Accepted(Socket(3))]);
}

#[test]
fn newcomer_that_is_put_off_holds_up_its_own_listener_alone() {
    let mut shard = Tested::new(Limits::default(), 4, 2);
    shard.lane.leaves_sockets = true;
    shard.turn(Time::ZERO);
    shard.ops();
    shard.begin(at(1), 2);
    shard.complete(Completion::Accepted { listener: 0, socket: Socket(3), peer: None });
    shard.postpone(Socket(3), None, 0, at(2));
    shard.heard();
    shard.complete(Completion::Accepted { listener: 1, socket: Socket(4), peer: None });
    assert_eq!(shard.heard(), [Heard::Accepted(Socket(4))]);
    shard.end();
    assert!(matches!(shard.ops()[..], [Op::AcceptStop { listener: 0 }]));
}

#[test]
fn listener_whose_accept_fails_rests_alone() {
    let mut shard = Tested::new(Limits::default(), 4, 2);
    shard.turn(Time::ZERO);
    shard.ops();
    for (end, rests, now) in [(AcceptEnd::Error(22), 0, at(1)), (AcceptEnd::Descriptors, 1, at(2))] {
        shard.begin(now, 1);
        shard.complete(Completion::AcceptEnded { listener: 0, end });
        shard.end();
        assert_eq!(shard.ops().len(), rests, "the other one is stopped where all lack something: {end:?}");
        let again = shard.next_turn().expect("it tries again");
        assert!(again < now + Duration::from_secs(1), "{again:?}");
        shard.turn(again);
        assert!(shard.ops().iter().any(|op| matches!(op, Op::Accept { listener: 0 })));
    }
}

#[test]
fn pause_ends_with_its_limit_though_newcomers_are_put_off() {
    let mut shard = Tested::new(Limits::default(), 1, 1);
    shard.turn(Time::ZERO);
    shard.begin(at(1), 1);
    let id = accept(&mut shard, 3);
    shard.end();
    assert!(shard.is_accept_paused(), "the table is full");
    shard.ops();
    shard.lane.leaves_sockets = true;
    shard.begin(at(2), 1);
    shard.complete(Completion::Accepted { listener: 0, socket: Socket(4), peer: None });
    shard.abort(id, CloseReason::Aborted);
    shard.complete(Completion::Closed { id });
    shard.end();
    shard.turn(at(3));
    assert!(shard.heard().contains(&Heard::Accepted(Socket(4))));
    shard.postpone(Socket(4), None, 0, at(4));
    shard.end();
    assert!(!shard.is_accept_paused(), "there is room");
}

#[test]
fn newcomers_that_are_put_off_keep_their_order() {
    let mut shard = Tested::new(Limits::default(), 8, 1);
    shard.lane.leaves_sockets = true;
    shard.turn(Time::ZERO);
    shard.ops();
    shard.begin(at(1), 3);
    for number in 1..=3 {
        shard.complete(Completion::Accepted { listener: 0, socket: Socket(number), peer: None });
    }
    let put_off = |shard: &mut Tested, now| {
        for heard in shard.heard() {
            let Heard::Accepted(socket) = heard else { panic!("{heard:?}") };
            shard.postpone(socket, None, 0, now + Duration::from_millis(10));
        }
    };
    put_off(&mut shard, at(1));
    shard.end();
    assert_eq!(shard.counters(LaneId::FIRST).waited, 3);
    assert!(matches!(shard.ops()[..], [Op::AcceptStop { listener: 0 }]));
    for seconds in 2..5 {
        shard.begin(at(seconds), 0);
        // One is asked for at a time, and is next again.
        let first = shard.heard();
        assert_eq!(first.len(), 1);
        assert_eq!(first[0], Heard::Accepted(Socket(1)));
        shard.postpone(Socket(1), None, 0, at(seconds) + Duration::from_millis(10));
        shard.end();
        assert!(shard.ops().is_empty(), "accepting rests");
    }
    // The others follow the first that is let in.
    shard.lane.leaves_sockets = false;
    shard.begin(at(5), 1);
    shard.complete(Completion::AcceptEnded { listener: 0, end: AcceptEnd::Stopped });
    shard.end();
    assert_eq!((shard.connections(LaneId::FIRST), shard.next_turn()), (1, Some(at(5))));
    shard.turn(at(5));
    assert_eq!(shard.connections(LaneId::FIRST), 3);
    assert!(shard.ops().iter().any(|op| matches!(op, Op::Accept { listener: 0 })), "accepting goes on");
    assert_eq!(shard.counters(LaneId::FIRST).waited, 3, "each counts once, however often it was put off");
}
