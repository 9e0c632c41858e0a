//! What connections hold: which goes when it is too much, and what a call that waits counts.

use super::*;

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
fn reply_that_leaves_at_once_ends_the_heaviest_connection() {
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
fn queued_bytes_count_once_they_do_not_leave() {
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
fn heaviest_reply_goes_where_nothing_is_held_for_long() {
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
fn calls_that_wait_hold_back_others_where_memory_is_tight() {
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
