//! What hardly any seed of the simulator meets. Everything else about a shard is tested there.

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;
use core::time::Duration;

use ringserve_buf::{Lease, Pool, PoolConfig};

use super::{Event, Next, Parked, Quota, Shard};
use crate::framing::LengthPrefix;
use crate::{
    Address, Batch, CloseHow, CloseReason, Completion, ConnId, Limits, Op, Payload, SendEnd, Socket, Time,
    Wait,
};

type Tested = Shard<(), LengthPrefix>;

fn at(seconds: u64) -> Time {
    Time::ZERO + Duration::from_secs(seconds)
}

/// A shard with one connection.
fn with_connection(limits: Limits) -> (Tested, ConnId) {
    let (pool, _side) = Pool::new(PoolConfig::default()).unwrap();
    let mut shard = Shard::new(limits, 1, 1, LengthPrefix::default(), pool, ());
    shard.begin_turn(Time::ZERO, 0);
    shard.complete(Completion::Accepted { listener: 0, socket: Socket(3), peer: None });
    let Some(Event::Accepted { socket, .. }) = shard.next_event() else { panic!("a connection") };
    let id = shard.admit(socket, None, 0, ()).unwrap();
    shard.opened(id);
    shard.end_turn();
    shard.take_ops().for_each(drop);
    (shard, id)
}

fn receive_later(shard: &mut Tested, id: ConnId, bytes: &[u8]) {
    shard.complete(Completion::Received { id, lease: Lease::copy_of(bytes) });
}

fn receive(shard: &mut Tested, id: ConnId, bytes: &[u8]) {
    receive_later(shard, id, bytes);
    if shard.take_frames().is_some() {
        assert!(matches!(shard.next_frame(id), Next::Nothing), "a frame");
    }
}

/// Sends a reply of 100 bytes, behind which the peer is held back in the middle of a frame.
fn hold_back(shard: &mut Tested, id: ConnId) -> Box<Batch> {
    shard.begin_turn(at(1), 0);
    receive(shard, id, &[0, 0, 0, 9, b'h']);
    shard.block(id).unwrap().link.reply(Payload::Bytes(&[b'r'; 100]));
    shard.end_turn();
    let send =
        shard.take_ops().find_map(|op| if let Op::Send { batch, .. } = op { Some(batch) } else { None });
    shard.begin_turn(at(2), 0);
    receive(shard, id, b"a");
    shard.end_turn();
    send.expect("the reply is sent")
}

#[test]
fn who_waits_for_the_outbox_hears_of_a_send_that_was_stopped_and_goes_on() {
    let (mut shard, id) = with_connection(Limits {
        outbox_bytes_high: 10,
        outbox_bytes_low: 5,
        write_bytes_per_second_min: 0,
        ..Limits::default()
    });
    let mut batch = hold_back(&mut shard, id);
    shard.begin_turn(at(3), 0);
    batch.advance(batch.len() - 3);
    shard.complete(Completion::Sent { id, batch, end: SendEnd::Stopped });
    assert!(matches!(shard.next_event(), Some(Event::Frames(of)) if of == id));
    assert!(matches!(shard.next_frame(id), Next::Nothing));
    shard.end_turn();
    assert!(shard.take_ops().any(|op| matches!(op, Op::Send { batch, .. } if batch.len() == 3)));
}

#[test]
fn half_a_frame_is_watched_again_when_its_peer_is_no_longer_held_back() {
    let (mut shard, id) = with_connection(Limits {
        outbox_bytes_high: 10,
        outbox_bytes_low: 5,
        first_frame: Some(Duration::from_secs(3600)),
        idle: None,
        write_stalled: None,
        write_bytes_per_second_min: 0,
        handler: None,
        ..Limits::default()
    });
    let mut batch = hold_back(&mut shard, id);
    // The limits of the half frame, and of a peer that is silent, go off and find that it is held back.
    for seconds in 3..40 {
        shard.begin_turn(at(seconds), 0);
        shard.end_turn();
    }
    shard.begin_turn(at(40), 0);
    batch.advance(batch.len());
    shard.complete(Completion::Sent { id, batch, end: SendEnd::Done });
    while let Some(event) = shard.next_event() {
        assert!(matches!(event, Event::Frames(of) if of == id));
        assert!(matches!(shard.next_frame(id), Next::Nothing));
    }
    shard.end_turn();
    let window = Duration::from_secs(10)..Duration::from_secs(11);
    let mut waited = Duration::ZERO;
    // The wheel may wake the shard on the way.
    while let Wait::For(time) = shard.wait()
        && shard.block(id).is_some()
        && waited < window.end
    {
        waited += time;
        shard.begin_turn(at(40) + waited, 0);
        shard.end_turn();
    }
    assert!(window.contains(&waited) && shard.block(id).is_none(), "closed after {waited:?}");
    assert_eq!(shard.counters().closed_for(crate::CloseReason::ReadTooSlow), 1);
}

/// Turns and time until the one connection is closed, on a shard whose first turn is at `start` and whose connection comes
/// `quiet` later.
fn lives_for(limits: Limits, start: Time, quiet: Duration) -> (u32, Duration) {
    let (pool, _side) = Pool::new(PoolConfig::default()).unwrap();
    let mut shard: Tested = Shard::new(limits, 1, 1, LengthPrefix::default(), pool, ());
    shard.begin_turn(start, 0);
    shard.end_turn();
    let opened = start + quiet;
    shard.begin_turn(opened, 0);
    shard.complete(Completion::Accepted { listener: 0, socket: Socket(3), peer: None });
    let Some(Event::Accepted { socket, .. }) = shard.next_event() else { panic!("a connection") };
    let id = shard.admit(socket, None, 0, ()).unwrap();
    shard.opened(id);
    let (mut now, mut turns) = (opened, 0);
    loop {
        shard.end_turn();
        let ops: Vec<Op> = shard.take_ops().collect();
        if shard.block(id).is_none() {
            return (turns, now - opened);
        }
        if ops.iter().any(|op| matches!(op, Op::ReceiveStop { .. } | Op::ShutdownInput { .. })) {
            shard.complete(Completion::ReceiveEnded { id, end: crate::ReceiveEnd::Stopped });
            continue;
        }
        let Wait::For(time) = shard.wait() else { panic!("it waits for a limit, not {:?}", shard.wait()) };
        (now, turns) = (now + time, turns + 1);
        shard.begin_turn(now, 0);
        while shard.next_event().is_some() {}
    }
}

#[test]
fn limits_are_kept_whenever_the_clock_started_and_however_long_it_was_quiet() {
    let none = Limits { first_frame: None, idle: None, ..Limits::default() };
    let minutes = |count: u64| Duration::from_secs(60 * count);
    let year = Duration::from_secs(365 * 24 * 3600);
    let cases = [
        (Limits { idle: Some(minutes(5)), ..none.clone() }, minutes(5)),
        (Limits { idle: Some(year), ..none.clone() }, year),
        (Limits { heartbeat: Some(minutes(1)), ..none.clone() }, minutes(4)),
        (Limits { heartbeat: Some(year), heartbeats_missed_max: 9, ..none.clone() }, year * 10),
        // As `Limits::check` would not let it be.
        (Limits { idle: Some(Duration::MAX), ..none.clone() }, Duration::from_nanos((1 << 55) - (1 << 24))),
    ];
    let starts = [0, 1 << 52, 1 << 55, 1 << 56, 5 << 56].map(|wrap: u64| wrap.saturating_sub(1_000_000_000));
    for start in starts.map(Time::from_nanos) {
        for days in [0, 30, 53, 835, 20_000] {
            for (limits, time) in &cases {
                let (turns, lived) = lives_for(limits.clone(), start, Duration::from_secs(days * 24 * 3600));
                let late = lived.checked_sub(*time).unwrap_or_else(|| panic!("{lived:?} is before {time:?}"));
                // Each heartbeat may be two steps late.
                assert!(late < Duration::from_millis(400), "{late:?} late, start {start:?}, {days} days");
                // A look at its receive, the heartbeats, and the wheel may wake the shard once for each.
                assert!(turns <= 40, "{turns} turns, start {start:?}, {days} days, {time:?}");
            }
        }
    }
}

fn address() -> Address {
    core::net::SocketAddr::from(([127, 0, 0, 1], 80)).into()
}

/// A shard that connects, with names from `first` on.
fn connecting(limits: Limits, first: u32, max: usize) -> (Tested, ConnId) {
    let (pool, _side) = Pool::new(PoolConfig::default()).unwrap();
    let mut shard = Shard::new(limits, max, 0, LengthPrefix::default(), pool, ());
    shard.number_from(first);
    shard.begin_turn(Time::ZERO, 0);
    let id = shard.connect(address(), ()).unwrap();
    shard.end_turn();
    let ops: Vec<Op> = shard.take_ops().collect();
    assert!(matches!(&ops[..], [Op::Connect { id: of, address: to }] if *of == id && **to == address()));
    (shard, id)
}

#[test]
fn a_connection_that_is_made_receives_once_it_is_there() {
    let (mut shard, id) = connecting(Limits::default(), 1000, 1);
    assert_eq!((id.slot(), shard.connect(address(), ())), (1000, None));
    shard.begin_turn(at(1), 0);
    shard.complete(Completion::Connected { id, result: Ok(()) });
    assert!(matches!(shard.next_event(), Some(Event::Connected(of)) if of == id));
    shard.opened(id);
    receive(&mut shard, id, &[0, 0]);
    shard.end_turn();
    assert!(shard.take_ops().any(|op| matches!(op, Op::Receive { id: of } if of == id)));
    assert_eq!(shard.counters().opened, 1);
}

#[test]
fn a_connection_that_cannot_be_made_ends_with_the_errno_and_frees_its_slot() {
    let (mut shard, id) = connecting(Limits::default(), 0, 1);
    shard.begin_turn(at(1), 0);
    shard.complete(Completion::Connected { id, result: Err(111) });
    let Some(Event::Ended { reason, opened, .. }) = shard.next_event() else { panic!("it ended") };
    assert_eq!((reason, opened), (CloseReason::ConnectFailed(111), false));
    shard.end_turn();
    let close = shard.take_ops().next();
    assert!(matches!(close, Some(Op::Close { how: CloseHow::Abort, .. })));
    shard.complete(Completion::Closed { id });
    assert!(shard.connect(address(), ()).is_some());
}

#[test]
fn a_connect_that_takes_too_long_is_stopped_and_closed_once_it_has_ended() {
    let (mut shard, id) =
        connecting(Limits { connect: Some(Duration::from_secs(3)), ..Limits::default() }, 70_000, 1);
    shard.begin_turn(at(2), 0);
    shard.end_turn();
    assert_eq!(shard.take_ops().count(), 0);
    shard.begin_turn(at(4), 0);
    let Some(Event::Ended { reason, .. }) = shard.next_event() else { panic!("it ended") };
    assert_eq!(reason, CloseReason::ConnectTimeout);
    shard.end_turn();
    assert!(matches!(shard.take_ops().collect::<Vec<_>>()[..], [Op::ConnectStop { .. }]));
    // It came after all.
    shard.complete(Completion::Connected { id, result: Ok(()) });
    assert!(shard.next_event().is_none());
    shard.end_turn();
    assert!(matches!(shard.take_ops().collect::<Vec<_>>()[..], [Op::Close { .. }]));
}

#[test]
fn all_are_closed_and_none_is_made_any_more() {
    let (mut shard, id) = connecting(Limits::default(), 0, 3);
    shard.complete(Completion::Connected { id, result: Ok(()) });
    shard.next_event();
    shard.opened(id);
    let second = shard.connect(address(), ()).unwrap();
    shard.end_turn();
    shard.take_ops().for_each(drop);
    shard.close_all(Time::from_nanos(u64::MAX));
    assert_eq!(shard.connect(address(), ()), None);
    shard.end_turn();
    let ops: Vec<Op> = shard.take_ops().collect();
    let stops = |op: &Op| matches!(op, Op::ConnectStop { id } if *id == second);
    assert!(ops.iter().any(|op| matches!(op, Op::Shutdown { .. })) && ops.iter().any(stops), "{ops:?}");
    assert_eq!(shard.counters().closed_for(CloseReason::Shutdown), 2);
}

#[test]
fn a_socket_given_away_leaves_its_place_to_the_next() {
    let (pool, _side) = Pool::new(PoolConfig::default()).unwrap();
    let mut shard: Tested = Shard::new(Limits::default(), 2, 1, LengthPrefix::default(), pool, ());
    shard.share_quota(Arc::new(Quota::new(1)));
    shard.begin_turn(Time::ZERO, 0);
    for number in 0..2 {
        shard.complete(Completion::Accepted { listener: 0, socket: Socket(number), peer: None });
    }
    assert!(matches!(shard.next_event(), Some(Event::Accepted { socket: Socket(0), .. })));
    assert!(shard.next_event().is_none(), "the quota is used up");
    shard.given_away();
    assert_eq!((shard.slots_left(), shard.counters().passed_on), (1, 1));
    assert!(matches!(shard.next_event(), Some(Event::Accepted { socket: Socket(1), .. })));
    assert!(shard.admit(Socket(1), None, 0, ()).is_some());
}

#[test]
fn what_the_driver_never_ends_is_left_behind_in_time() {
    let (mut shard, _) = with_connection(Limits::default());
    shard.begin_turn(at(1), 0);
    shard.force();
    assert!(matches!(shard.next_event(), Some(Event::Ended { reason: CloseReason::Forced, .. })));
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

/// Frames handed out to each connection, in order, until it has none for now.
fn frames_of(shard: &mut Tested, id: ConnId, handed: &mut Vec<ConnId>) {
    while let Next::Frame(..) = shard.next_frame(id) {
        handed.push(id);
    }
}

/// A shard with `count` connections, each of which may be handed frames.
fn with_connections(count: usize, limits: Limits) -> (Tested, Vec<ConnId>) {
    let (pool, _side) = Pool::new(PoolConfig::default()).unwrap();
    let mut shard: Tested = Shard::new(limits, count, 1, LengthPrefix::default(), pool, ());
    shard.begin_turn(Time::ZERO, count);
    let ids = (0..count as u64).map(|number| {
        shard.complete(Completion::Accepted { listener: 0, socket: Socket(number), peer: None });
        let Some(Event::Accepted { socket, .. }) = shard.next_event() else { panic!("a connection") };
        let id = shard.admit(socket, None, 0, ()).unwrap();
        shard.opened(id);
        id
    });
    let ids = ids.collect();
    shard.end_turn();
    shard.take_ops().for_each(drop);
    (shard, ids)
}

fn empty_frames(count: usize) -> Vec<u8> {
    vec![0; 4 * count]
}

#[test]
fn a_frame_waits_for_one_batch_of_each_other_connection() {
    let (mut shard, mut ids) = with_connections(501, Limits::default());
    let pinger = ids.pop().unwrap();
    let mut handed = Vec::new();
    shard.begin_turn(at(1), 500);
    for &id in &ids {
        receive_later(&mut shard, id, &empty_frames(2000));
        while let Some(event) = shard.next_event() {
            let Event::Frames(of) = event else { panic!("{event:?}") };
            frames_of(&mut shard, of, &mut handed);
        }
    }
    shard.end_turn();
    assert!(handed.len() <= 4096, "{} calls in a turn", handed.len());
    let mut pinged = false;
    // It comes in the second turn, when the driver has no more news than the ping.
    for turn in -1.. {
        if turn == 0 {
            handed.clear();
        }
        assert_eq!(shard.wait(), Wait::No);
        shard.begin_turn(at(2), usize::from(turn == 0));
        let before = handed.len();
        let mut work_off = |shard: &mut Tested| {
            while let Some(event) = shard.next_event() {
                let Event::Frames(of) = event else { panic!("{event:?}") };
                frames_of(shard, of, &mut handed);
                pinged |= of == pinger && handed.last() == Some(&pinger);
            }
        };
        work_off(&mut shard);
        if turn == 0 {
            receive_later(&mut shard, pinger, &empty_frames(1));
            work_off(&mut shard);
        }
        shard.end_turn();
        assert!(handed.len() - before <= 4096, "{} calls in a turn", handed.len() - before);
        if pinged {
            break;
        }
    }
    // Those that had a batch in the turn in which it came are behind it, those that had none are before it.
    assert!(handed.len() <= (500 + 256) * 16, "{} calls before it", handed.len());
    for id in ids {
        let batches = handed.iter().filter(|of| **of == id).count();
        assert!((16..=32).contains(&batches), "{batches} of {id}");
    }
}

#[test]
fn connections_that_wait_leave_the_turn_to_news_while_there_is_more() {
    let (mut shard, ids) = with_connections(500, Limits::default());
    let mut handed = Vec::new();
    let mut turn = |shard: &mut Tested, completions, receives: &[ConnId]| {
        handed.clear();
        shard.begin_turn(at(1), completions);
        let mut work_off = |shard: &mut Tested| {
            while let Some(event) = shard.next_event() {
                let Event::Frames(of) = event else { panic!("{event:?}") };
                frames_of(shard, of, &mut handed);
            }
        };
        work_off(shard);
        for &id in receives {
            receive_later(shard, id, &empty_frames(4096));
            work_off(shard);
        }
        shard.end_turn();
        handed.len()
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
    let mut handed = Vec::new();
    shard.begin_turn(at(1), 1);
    receive_later(&mut shard, ids[0], &empty_frames(1024));
    assert_eq!(shard.take_frames(), Some(ids[0]));
    frames_of(&mut shard, ids[0], &mut handed);
    shard.end_turn();
    assert_eq!((handed.len(), shard.wait() == Wait::No), (1024, false));
}

#[test]
fn connection_whose_bytes_wait_for_the_shard_is_not_idle() {
    let limits = Limits { idle: Some(Duration::from_secs(10)), ..Limits::default() };
    let (mut shard, ids) = with_connections(1, limits);
    let mut handed = Vec::new();
    // Beside the news of so many others it has a small batch.
    shard.begin_turn(at(1), 500);
    receive_later(&mut shard, ids[0], &empty_frames(40));
    assert_eq!(shard.take_frames(), Some(ids[0]));
    frames_of(&mut shard, ids[0], &mut handed);
    shard.end_turn();
    // The first of them looks at its receive.
    for seconds in [20, 60] {
        assert!(handed.len() < 40, "nothing waits");
        shard.begin_turn(at(seconds), 500);
        assert!(matches!(shard.next_event(), Some(Event::Frames(of)) if of == ids[0]));
        frames_of(&mut shard, ids[0], &mut handed);
        shard.end_turn();
        assert_eq!(shard.counters().closed_for(CloseReason::IdleTimeout), 0);
    }
    assert_eq!(handed.len(), 40);
    shard.begin_turn(at(61), 0);
    assert_eq!(shard.counters().closed_for(CloseReason::IdleTimeout), 1);
}

#[test]
fn an_end_behind_exactly_one_batch_is_heard() {
    for frames in [31, 32, 33, 64] {
        let (mut shard, ids) = with_connections(1, Limits::default());
        let id = ids[0];
        let mut handed = Vec::new();
        shard.bound_turn(32, 32);
        shard.begin_turn(at(1), 2);
        // A call waits while the rest arrives.
        receive_later(&mut shard, id, &empty_frames(1));
        assert_eq!(shard.take_frames(), Some(id));
        assert!(matches!(shard.next_frame(id), Next::Frame(..)));
        shard.handler_parked(id, 7, 0);
        assert!(matches!(shard.next_frame(id), Next::Nothing));
        receive_later(&mut shard, id, &empty_frames(frames));
        shard.complete(Completion::ReceiveEnded { id, end: crate::ReceiveEnd::Eof });
        shard.end_turn();
        shard.begin_turn(at(2), 0);
        shard.handler_done(id, 7, None, 0);
        frames_of(&mut shard, id, &mut handed);
        shard.end_turn();
        for _ in 0..4 {
            shard.begin_turn(at(2), 0);
            while let Some(event) = shard.next_event() {
                if let Event::Frames(of) = event {
                    frames_of(&mut shard, of, &mut handed);
                }
            }
            shard.end_turn();
        }
        assert_eq!(handed.len(), frames);
        assert_eq!(shard.counters().closed_for(CloseReason::PeerClosed), 1, "after {frames} frames");
    }
}

/// The turns of a shard with probes, as steps of its clock, and how many: for that many connections, all silent since the
/// first turn, behind these bytes.
fn probes(connections: u32, bytes: &[u8]) -> Vec<(u64, usize)> {
    let limits = Limits { first_frame: None, idle: None, read_bytes_per_second_min: 0, ..Limits::default() };
    let (pool, _side) = Pool::new(PoolConfig::default()).unwrap();
    let mut shard: Tested = Shard::new(limits, connections as usize, 1, LengthPrefix::default(), pool, ());
    shard.begin_turn(Time::ZERO, connections as usize);
    for number in 0..connections {
        shard.complete(Completion::Accepted { listener: 0, socket: Socket(number.into()), peer: None });
        let Some(Event::Accepted { socket, .. }) = shard.next_event() else { panic!("a connection") };
        let id = shard.admit(socket, None, 0, ()).unwrap();
        shard.opened(id);
        shard.complete(Completion::Received { id, lease: Lease::copy_of(bytes) });
        shard.take_frames();
        while let Next::Frame(..) = shard.next_frame(id) {}
    }
    shard.end_turn();
    shard.take_ops().for_each(drop);
    let mut now = Time::ZERO;
    let mut turns = Vec::new();
    while turns.iter().map(|(_, count)| count).sum::<usize>() < connections as usize {
        shard.begin_turn(now, 0);
        shard.end_turn();
        let count = shard.take_ops().inspect(|op| assert!(matches!(op, Op::Probe { .. }), "{op:?}")).count();
        if count > 0 {
            turns.push((now.as_nanos() >> 24, count));
        }
        let Wait::For(time) = shard.wait() else { break };
        now = now + time;
    }
    turns
}

#[test]
fn probes_of_connections_silent_together_are_spread() {
    // Half a frame, and a whole one.
    for (bytes, per_turn, span) in [(&[0, 0][..], 40, 60..70), (&[0, 0, 0, 0][..], 3, 1000..1100)] {
        let turns = probes(2500, bytes);
        assert_eq!(turns.iter().map(|(_, count)| count).sum::<usize>(), 2500, "each is looked at once");
        assert!(turns.iter().all(|(_, count)| *count <= per_turn), "{turns:?}");
        let took = turns.last().unwrap().0 - turns[0].0;
        assert!(span.contains(&took), "{took} steps");
    }
}

/// The batch that is sent to a connection.
fn sent_to(shard: &mut Tested, id: ConnId) -> Option<Box<Batch>> {
    shard.end_turn();
    shard.take_ops().fold(None, |found, op| match op {
        Op::Send { id: to, batch } if to == id => Some(batch),
        _ => found,
    })
}

/// Sends much to a peer that takes what `takes` says in each interval in which the shard looks. Returns the seconds after which
/// it looked, and why and when the connection ended, within five minutes.
fn trickle(limits: Limits, mut takes: impl FnMut(usize) -> usize) -> (Vec<u64>, Option<(CloseReason, u64)>) {
    let (mut shard, id) = with_connection(limits);
    shard.block(id).unwrap().link.write(&[b'r'; 1 << 20]);
    let mut batch = sent_to(&mut shard, id);
    let mut looks = Vec::new();
    for tenths in 1..3000 {
        let now = Time::ZERO + Duration::from_millis(100 * tenths);
        shard.begin_turn(now, 0);
        shard.end_turn();
        if !shard.take_ops().any(|op| matches!(op, Op::SendStop { .. })) {
            continue;
        }
        let mut stopped = batch.take().expect("a send is in flight");
        stopped.advance(takes(looks.len()));
        looks.push(tenths / 10);
        shard.complete(Completion::Sent { id, batch: stopped, end: SendEnd::Stopped });
        while let Some(event) = shard.next_event() {
            if let Event::Ended { reason, .. } = event {
                return (looks, Some((reason, tenths / 10)));
            }
        }
        batch = sent_to(&mut shard, id);
    }
    (looks, None)
}

/// Limits under which only those of writing count.
fn write_limits(write_stalled: Option<u64>, write_bytes_per_second_min: usize) -> Limits {
    let write_stalled = write_stalled.map(Duration::from_secs);
    Limits { first_frame: None, idle: None, write_stalled, write_bytes_per_second_min, ..Limits::default() }
}

#[test]
fn a_peer_that_takes_a_little_now_and_then_is_too_slow() {
    let limits = write_limits(Some(30), 240);
    // Each time just before it would be stalled.
    let (_, end) = trickle(limits.clone(), |look| if look % 3 == 2 { 1000 } else { 0 });
    assert_eq!(end, Some((CloseReason::WriteTooSlow, 30)));
    let (_, end) = trickle(limits.clone(), |_| 2300);
    assert_eq!(end, Some((CloseReason::WriteTooSlow, 10)));
    // What it took at first is no credit.
    let (_, end) = trickle(limits, |look| if look == 0 { 500_000 } else { 1 });
    assert_eq!(end, Some((CloseReason::WriteTooSlow, 20)));
}

#[test]
fn a_peer_that_takes_enough_stays_however_it_comes() {
    let (_, end) = trickle(write_limits(Some(30), 240), |_| 2500);
    assert_eq!(end, None);
    // A window that opens every 20 s.
    let (_, end) = trickle(write_limits(Some(30), 240), |look| if look % 2 == 1 { 5100 } else { 0 });
    assert_eq!(end, None);
    let (looks, end) = trickle(write_limits(Some(30), 0), |_| 1);
    assert_eq!((looks[0], end), (30, None), "without a rate a byte is enough");
}

#[test]
fn a_peer_that_takes_nothing_has_its_whole_time() {
    for stalled in [1, 7, 10, 11, 25, 30, 100] {
        let (looks, end) = trickle(write_limits(Some(stalled), 240), |_| 0);
        assert_eq!(looks.len() as u64, stalled.div_ceil(10), "looks of {stalled} s");
        let (reason, seconds) = end.expect("it ends");
        assert_eq!(reason, CloseReason::WriteStalled);
        assert!((stalled..=stalled + 1).contains(&seconds), "{stalled} s took {seconds} s");
    }
    let (_, end) = trickle(write_limits(None, 240), |_| 0);
    assert_eq!(end, Some((CloseReason::WriteTooSlow, 10)));
    assert_eq!(trickle(write_limits(None, 0), |_| 0), (Vec::new(), None));
}

/// Ends a turn. Returns the connections that ended in it.
fn ended(shard: &mut Tested) -> Vec<ConnId> {
    shard.end_turn();
    let mut ended = Vec::new();
    while let Some(event) = shard.next_event() {
        if let Event::Ended { id, reason, .. } = event {
            assert_eq!(reason, CloseReason::MemoryLimit);
            ended.push(id);
        }
    }
    ended
}

/// 8 half frames of 10 KB and one of 20 KB: 100 KB, where 110 KB may be held.
fn nearly_full() -> (Tested, Vec<ConnId>) {
    let limits = Limits {
        frame_bytes_max: 100_000,
        outbox_bytes_max: 100_000,
        outbox_bytes_high: 100_000,
        held_bytes_max: 110_000,
        ..Limits::default()
    };
    let (mut shard, ids) = with_connections(12, limits);
    shard.begin_turn(at(1), 0);
    for (n, id) in ids[..9].iter().enumerate() {
        let mut half = Vec::from([0, 0, 0x80, 0]);
        half.resize(if n == 4 { 20_000 } else { 10_000 }, b'h');
        receive(&mut shard, *id, &half);
    }
    assert_eq!(ended(&mut shard), []);
    (shard, ids)
}

#[test]
fn a_reply_that_leaves_at_once_ends_who_holds_most_and_not_its_own() {
    let (mut shard, ids) = nearly_full();
    shard.begin_turn(at(2), 0);
    // More than most of those hold that have been holding it, and they go first all the same.
    for id in &ids[9..] {
        shard.block(*id).unwrap().link.write(&[b'r'; 17_000]);
    }
    assert_eq!(ended(&mut shard), [ids[4], ids[0], ids[1], ids[2]]);
}

#[test]
fn half_a_frame_counts_once_the_rest_does_not_follow() {
    let (mut shard, ids) = nearly_full();
    shard.begin_turn(at(2), 0);
    let mut half = Vec::from([0, 0, 0x80, 0]);
    half.resize(30_000, b'h');
    receive(&mut shard, ids[9], &half);
    assert_eq!(ended(&mut shard), [ids[4]]);
    shard.begin_turn(at(3), 0);
    receive(&mut shard, ids[10], &half);
    assert_eq!(ended(&mut shard), [ids[9]], "the rest of it did not come for a second");
}

#[test]
fn half_a_frame_counts_whatever_gives_its_peer_more_time() {
    let limits = Limits {
        calls_in_flight_max: 2,
        frame_bytes_max: 100_000,
        outbox_bytes_max: 100_000,
        held_bytes_max: 110_000,
        ..Limits::default()
    };
    let (mut shard, ids) = with_connections(3, limits);
    let millis = |millis| at(1) + Duration::from_millis(millis);
    shard.begin_turn(millis(0), 0);
    let mut half = Vec::from([0, 0, 0x80, 0]);
    half.resize(20_000, b'h');
    receive_later(&mut shard, ids[0], &[&empty_frames(1)[..], &half].concat());
    assert!(shard.take_frames().is_some() && matches!(shard.next_frame(ids[0]), Next::Frame(..)));
    let parked = shard.handler_parked(ids[0], 7, 0);
    assert!(matches!(shard.next_frame(ids[0]), Next::Nothing));
    assert_eq!(ended(&mut shard), []);
    // From here on the peer has its whole time for the rest.
    shard.begin_turn(millis(30), 0);
    shard.handler_done(ids[0], 7, None, parked.bytes);
    assert!(matches!(shard.next_frame(ids[0]), Next::Nothing));
    assert_eq!(ended(&mut shard), []);
    shard.begin_turn(millis(60), 0);
    assert_eq!(ended(&mut shard), []);
    shard.begin_turn(at(5), 0);
    shard.block(ids[1]).unwrap().link.write(&[b'r'; 60_000]);
    shard.block(ids[2]).unwrap().link.write(&[b'r'; 40_000]);
    assert_eq!(ended(&mut shard), [ids[0]], "the others' replies leave at once");
}

#[test]
fn connection_that_closes_is_not_reset_for_what_others_hold() {
    let (mut shard, ids) = with_connections(
        40,
        Limits {
            outbox_bytes_max: 3000,
            outbox_bytes_high: 3000,
            outbox_bytes_low: 100,
            frame_bytes_max: 3000,
            inbox_bytes_high: 3000,
            held_bytes_max: 100_000,
            ..Limits::default()
        },
    );
    shard.begin_turn(at(1), 0);
    // No one holds so much that it is compared.
    for id in &ids[..34] {
        shard.block(*id).unwrap().link.write(&[b'r'; 3000]);
    }
    shard.block(ids[39]).unwrap().link.close();
    shard.end_turn();
    let mut ends = Vec::new();
    while let Some(event) = shard.next_event() {
        if let Event::Ended { id, reason, .. } = event {
            ends.push((id, reason));
        }
    }
    assert_eq!(ends, [(ids[39], CloseReason::Closed), (ids[33], CloseReason::MemoryLimit)]);
    let ops: Vec<Op> = shard.take_ops().collect();
    let aborted = |op: &Op| matches!(op, Op::Close { id, .. } | Op::ShutdownInput { id } if *id == ids[39]);
    assert!(!ops.iter().any(aborted), "{ops:?}");
}

#[test]
fn what_is_queued_counts_once_it_does_not_leave() {
    let (mut shard, ids) = nearly_full();
    shard.begin_turn(at(2), 0);
    shard.block(ids[9]).unwrap().link.write(&[b'r'; 9_000]);
    assert_eq!(ended(&mut shard), []);
    // Of two in the same list the one that came first goes; this one is in the next.
    shard.block(ids[9]).unwrap().link.write(&[b'r'; 500]);
    assert_eq!(ended(&mut shard), []);
    shard.begin_turn(at(3), 0);
    shard.block(ids[9]).unwrap().link.write(&[b'r'; 60_000]);
    assert_eq!(ended(&mut shard), [ids[9]], "it does not take what was sent a second ago");
}

#[test]
fn where_nothing_is_held_for_long_the_heaviest_reply_goes() {
    let (mut shard, ids) = with_connections(
        12,
        Limits {
            outbox_bytes_max: 100_000,
            frame_bytes_max: 100_000,
            held_bytes_max: 100_000,
            ..Limits::default()
        },
    );
    shard.begin_turn(at(1), 0);
    for (n, id) in ids.iter().enumerate() {
        shard.block(*id).unwrap().link.write(&vec![b'r'; if n == 3 { 60_000 } else { 5_000 }]);
    }
    assert_eq!(ended(&mut shard), [ids[3]]);
}

#[test]
fn calls_that_wait_are_counted_and_hold_back_others_where_memory_is_tight() {
    let limits = Limits {
        calls_in_flight_max: 1000,
        frame_bytes_max: 10_000,
        outbox_bytes_max: 10_000,
        outbox_bytes_high: 10_000,
        inbox_bytes_high: 10_000,
        outbox_bytes_low: 1000,
        held_bytes_max: 40_000,
        ..Limits::default()
    };
    let (mut shard, ids) = with_connections(3, limits);
    shard.begin_turn(at(1), 0);
    let mut parked = Vec::new();
    for id in &ids {
        shard.complete(Completion::Received { id: *id, lease: Lease::copy_of(&[0, 0, 0, 0].repeat(100)) });
        assert!(shard.take_frames().is_some());
        while let Next::Frame(..) = shard.next_frame(*id) {
            parked.push((*id, shard.handler_parked(*id, parked.len() as u32, 1000)));
        }
    }
    assert_eq!(ended(&mut shard), [], "calls close no connection");
    let calls = |id| parked.iter().filter(|(of, _)| *of == id).count();
    assert_eq!((calls(ids[1]), calls(ids[2])), (1, 1), "each has one call at a time");
    let held = shard.held_bytes();
    assert!((30_000..40_000).contains(&held) && held >= parked.len() * 1000, "{held} bytes");
    // One is done, and the next one begins.
    let (id, call) = parked.pop().unwrap();
    shard.handler_done(id, parked.len() as u32, call.next, call.bytes);
    assert!(matches!(shard.next_frame(id), Next::Frame(..)));
    shard.handler_parked(id, 1000, 1000);
    assert!(matches!(shard.next_frame(id), Next::Nothing));
    shard.end_turn();
    ids.iter().for_each(|id| shard.abort(*id, CloseReason::Aborted));
    assert_eq!(shard.held_bytes(), 0);
}

/// Frames of four bytes, on the heap as bytes are that had to wait.
const BLOCK: usize = 400;

/// A connection with as many calls that wait as may, and a block of frames behind them.
fn with_calls_and_a_block_behind(calls_in_flight_max: u16) -> (Tested, ConnId, Vec<Parked>) {
    let (mut shard, id) = with_connection(Limits { calls_in_flight_max, ..Limits::default() });
    shard.begin_turn(at(1), 0);
    let first = [0; 4].repeat(usize::from(calls_in_flight_max));
    shard.complete(Completion::Received { id, lease: Lease::copy_of(&first) });
    assert!(shard.take_frames().is_some());
    let mut calls = Vec::new();
    while let Next::Frame(..) = shard.next_frame(id) {
        calls.push(shard.handler_parked(id, calls.len() as u32, 1000));
    }
    shard.complete(Completion::Received { id, lease: Lease::copy_of(&[0; BLOCK]) });
    shard.end_turn();
    (shard, id, calls)
}

#[test]
fn a_tiny_frame_behind_other_calls_pins_no_more_than_itself() {
    let (mut shard, id, calls) = with_calls_and_a_block_behind(2);
    shard.begin_turn(at(2), 0);
    shard.handler_done(id, 1, calls[1].next, calls[1].bytes);
    let Next::Frame(frame, _) = shard.next_frame(id) else { panic!("a frame") };
    assert_eq!((frame.pinned_bytes(), shard.counters().frames_copied), (4, 1));
    let parked = shard.handler_parked(id, 1, 1000);
    assert!((1004..1200).contains(&parked.bytes), "{parked:?}");
    assert!(matches!(shard.next_frame(id), Next::Nothing));
    shard.end_turn();
}

#[test]
fn the_last_frame_of_a_block_counts_with_all_that_it_pins() {
    let (mut shard, id, mut calls) = with_calls_and_a_block_behind(1);
    shard.begin_turn(at(2), 0);
    for n in 1..=BLOCK / 4 {
        let before = calls.pop().unwrap();
        shard.handler_done(id, 0, None, before.bytes);
        let Next::Frame(frame, _) = shard.next_frame(id) else { panic!("frame {n}") };
        assert_eq!(frame.pinned_bytes(), BLOCK, "it is not copied");
        calls.push(shard.handler_parked(id, 0, 1000));
        assert!(matches!(shard.next_frame(id), Next::Nothing));
        // Before the last one the inbox counts the block.
        assert!(
            (1000 + BLOCK..1200 + BLOCK).contains(&shard.held_bytes()),
            "{} after {n}",
            shard.held_bytes()
        );
    }
    shard.end_turn();
}

#[test]
fn tasks_have_their_part_of_each_turn_whatever_peers_send() {
    let (mut shard, ids) = with_connections(8, Limits::default());
    let mut tasks = Vec::new();
    for turn in 0..20 {
        shard.begin_turn(at(2), 8 * usize::from(turn == 0));
        let mut handed = Vec::new();
        if turn == 0 {
            for id in &ids {
                receive_later(&mut shard, *id, &empty_frames(15_000));
                while let Some(Event::Frames(id)) = shard.next_event() {
                    frames_of(&mut shard, id, &mut handed);
                }
            }
        }
        while let Some(Event::Frames(id)) = shard.next_event() {
            frames_of(&mut shard, id, &mut handed);
        }
        tasks.push((0..100).take_while(|_| shard.take_call()).count());
        shard.end_turn();
        shard.take_ops().for_each(drop);
    }
    assert!(tasks.iter().all(|polled| *polled == 100), "{tasks:?}");
}

#[test]
fn peer_that_still_sends_when_its_time_is_over_is_reset() {
    for (still_sends, how) in [(false, CloseHow::Orderly), (true, CloseHow::Abort)] {
        let linger = Duration::from_secs(1);
        let (mut shard, id) = with_connection(Limits { linger, ..Limits::default() });
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
