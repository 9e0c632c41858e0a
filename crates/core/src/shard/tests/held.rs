//! Memory of connections: which one ends when it is too much, and how much a waiting call counts.

use ringserve_buf::KernelSide;

use super::*;
use crate::ReceiveEnd;
use crate::shard::receive::KEPT_FOR_LONG;

/// Ends a turn. Returns the connections that ended in it, and the reasons.
fn ends(shard: &mut Tested) -> Vec<(ConnId, CloseReason)> {
    shard.end();
    let end = |heard| if let Heard::Ended { id, reason, .. } = heard { Some((id, reason)) } else { None };
    shard.heard().into_iter().filter_map(end).collect()
}

/// Ends a turn in which all ends are for memory.
fn ended(shard: &mut Tested) -> Vec<ConnId> {
    ends(shard)
        .into_iter()
        .inspect(|(_, reason)| assert_eq!(*reason, CloseReason::MemoryLimit))
        .map(|(id, _)| id)
        .collect()
}

/// Limits of a shard that holds at most `held_bytes_max`.
fn held(held_bytes_max: usize) -> ServerLimits {
    ServerLimits { held_bytes_max, ..ServerLimits::default() }
}

/// Receives a part of a frame in a separate turn, since a turn takes up a part of what may be held.
fn receive_in_a_turn(shard: &mut Tested, id: ConnId, bytes: &[u8]) {
    shard.receive_part(id, bytes);
    assert_eq!(ended(shard), []);
    let now = shard.now;
    shard.begin(now, 0);
}

/// 8 half frames of 10 KB and one of 20 KB: 100 KB, where 110 KB may be held.
fn nearly_full() -> (Tested, Vec<ConnId>) {
    let limits = (
        held(110_000),
        Limits {
            frame_bytes_max: 100_000,
            outbox_bytes_max: 100_000,
            outbox_bytes_high: 100_000,
            ..Limits::default()
        },
    );
    let (mut shard, ids) = with_connections(12, limits);
    shard.begin(at(1), 0);
    for (n, id) in ids[..9].iter().enumerate() {
        let mut half = Vec::from([0, 0, 0x80, 0]);
        half.resize(if n == 4 { 20_000 } else { 10_000 }, b'h');
        receive_in_a_turn(&mut shard, *id, &half);
    }
    assert_eq!(ended(&mut shard), []);
    (shard, ids)
}

#[test]
fn reply_that_leaves_at_once_ends_the_heaviest_connection() {
    let (mut shard, ids) = nearly_full();
    shard.begin(at(2), 0);
    // More than most others that have held memory for longer, and yet those end first.
    for id in &ids[9..] {
        shard.shared(*id).unwrap().write(&[b'r'; 17_000]);
    }
    assert_eq!(ended(&mut shard), [ids[4], ids[0], ids[1], ids[2]]);
}

#[test]
fn lower_bound_ends_the_heaviest_and_a_higher_one_none() {
    let (mut shard, ids) = nearly_full();
    shard.begin(at(2), 0);
    shard.bound_memory(85_000, 1 << 20);
    assert_eq!(ended(&mut shard), [ids[4]]);
    assert_eq!(shard.pool.available(), 64);
    // Service limits of a connection are bound by it too.
    let limits = crate::ConnLimits::default().frame_bytes_max(90_000);
    assert!(shard.shared(ids[0]).unwrap().set_limits(&limits).is_err());
    shard.begin(at(3), 0);
    shard.bound_memory(200_000, 4 << 20);
    assert!(shard.shared(ids[0]).unwrap().set_limits(&limits).is_ok());
    assert_eq!(shard.pool.available(), 256);
    let mut half = Vec::from([0, 0, 0x80, 0]);
    half.resize(30_000, b'h');
    for id in &ids[9..] {
        shard.receive_part(*id, &half);
    }
    assert_eq!(ended(&mut shard), [], "170 KB");
}

#[test]
fn half_a_frame_counts_once_the_rest_does_not_follow() {
    let (mut shard, ids) = nearly_full();
    shard.begin(at(2), 0);
    let mut half = Vec::from([0, 0, 0x80, 0]);
    half.resize(30_000, b'h');
    shard.receive_part(ids[9], &half);
    assert_eq!(ended(&mut shard), [ids[4]]);
    shard.begin(at(3), 0);
    shard.receive_part(ids[10], &half);
    assert_eq!(ended(&mut shard), [ids[9]], "the rest of it did not come for a second");
}

#[test]
fn half_a_frame_counts_whatever_gives_its_peer_more_time() {
    let limits = (
        held(110_000),
        Limits {
            calls_in_flight_max: 2,
            frame_bytes_max: 100_000,
            outbox_bytes_max: 100_000,
            ..Limits::default()
        },
    );
    let millis = |millis| at(1) + Duration::from_millis(millis);
    let mut half = Vec::from([0, 0, 0xc0, 0]);
    half.resize(40_000, b'h');
    for later in [false, true] {
        let (mut shard, ids) = with_connections(3, limits.clone());
        shard.begin(millis(0), 0);
        shard.lane.parks = Some(0);
        shard.receive(ids[0], &[&empty_frames(1)[..], &half].concat());
        assert_eq!(shard.handed(), [ids[0]]);
        assert_eq!(ended(&mut shard), []);
        // From here on the peer has its whole time for the rest.
        shard.begin(millis(30), 0);
        shard.call_done();
        assert_eq!(shard.handed(), []);
        assert_eq!(ended(&mut shard), []);
        shard.begin(millis(60), 0);
        if later {
            assert_eq!(ended(&mut shard), []);
            shard.begin(at(5), 0);
        }
        shard.shared(ids[1]).unwrap().write(&[b'r'; 60_000]);
        shard.shared(ids[2]).unwrap().write(&[b'r'; 20_000]);
        assert_eq!(ended(&mut shard), [ids[0]], "the others' replies leave at once");
    }
}

#[test]
fn connection_that_closes_is_not_reset_for_what_others_hold() {
    let (mut shard, ids) = with_connections(
        40,
        (
            held(100_000),
            Limits {
                outbox_bytes_max: 3000,
                outbox_bytes_high: 3000,
                outbox_bytes_low: 100,
                frame_bytes_max: 3000,
                inbox_bytes_high: 3000,
                ..Limits::default()
            },
        ),
    );
    shard.begin(at(1), 0);
    // No connection holds enough to be compared.
    for id in &ids[..34] {
        shard.shared(*id).unwrap().write(&[b'r'; 3000]);
    }
    shard.shared(ids[39]).unwrap().close();
    assert_eq!(ends(&mut shard), [(ids[39], CloseReason::Closed), (ids[33], CloseReason::MemoryLimit)]);
    let ops = shard.ops();
    let aborted = |op: &Op| matches!(op, Op::Close { id, .. } | Op::ShutdownInput { id } if *id == ids[39]);
    assert!(!ops.iter().any(aborted), "{ops:?}");
}

#[test]
fn queued_bytes_count_once_they_do_not_leave() {
    let (mut shard, ids) = nearly_full();
    shard.begin(at(2), 0);
    shard.shared(ids[9]).unwrap().write(&[b'r'; 9_000]);
    assert_eq!(ended(&mut shard), []);
    // Of two in the same list the one that came first ends; this one is in the next.
    shard.shared(ids[9]).unwrap().write(&[b'r'; 500]);
    assert_eq!(ended(&mut shard), []);
    shard.begin(at(3), 0);
    shard.shared(ids[9]).unwrap().write(&[b'r'; 60_000]);
    assert_eq!(ended(&mut shard), [ids[9]], "it does not take what was sent a second ago");
}

#[test]
fn heaviest_reply_goes_where_nothing_is_held_for_long() {
    let (mut shard, ids) = with_connections(
        12,
        (held(100_000), Limits { outbox_bytes_max: 100_000, frame_bytes_max: 100_000, ..Limits::default() }),
    );
    shard.begin(at(1), 0);
    for (n, id) in ids.iter().enumerate() {
        shard.shared(*id).unwrap().write(&vec![b'r'; if n == 3 { 60_000 } else { 5_000 }]);
    }
    assert_eq!(ended(&mut shard), [ids[3]]);
}

#[test]
fn heaviest_replies_go_where_little_is_held_for_long() {
    let limits = Limits { outbox_bytes_max: 100_000, frame_bytes_max: 100_000, ..Limits::default() };
    // Those that keep a quarter of it go one by one, until they have less.
    for (keep, expected) in [(2, &[9][..]), (6, &[0, 9])] {
        let (mut shard, ids) = with_connections(12, (held(110_000), limits.clone()));
        shard.begin(at(1), 0);
        let mut half = Vec::from([0, 0, 0x80, 0]);
        half.resize(6_000, b'h');
        ids[..keep].iter().for_each(|id| receive_in_a_turn(&mut shard, *id, &half));
        assert_eq!(ended(&mut shard), []);
        shard.begin(at(2), 0);
        for id in &ids[9..] {
            shard.shared(*id).unwrap().write(&[b'r'; 35_000]);
        }
        let expected: Vec<ConnId> = expected.iter().map(|n| ids[*n]).collect();
        assert_eq!(ended(&mut shard), expected, "{keep} keep 6000 bytes each");
    }
}

#[test]
fn calls_that_wait_hold_back_others_where_memory_is_tight() {
    let limits = (
        held(40_000),
        Limits {
            calls_in_flight_max: 1000,
            frame_bytes_max: 10_000,
            outbox_bytes_max: 10_000,
            outbox_bytes_high: 10_000,
            inbox_bytes_high: 10_000,
            outbox_bytes_low: 1000,
            ..Limits::default()
        },
    );
    let (mut shard, ids) = with_connections(3, limits);
    shard.begin(at(1), 0);
    shard.lane.parks = Some(1000);
    for id in &ids {
        shard.receive(*id, &empty_frames(100));
        // A turn takes up a part of what may be held.
        for _ in 0..10 {
            assert_eq!(ended(&mut shard), [], "calls close no connection");
            shard.begin(at(1), 0);
        }
    }
    assert_eq!(ended(&mut shard), []);
    let calls = |id| shard.lane.calls.iter().filter(|call| call.id == id).count();
    assert_eq!((calls(ids[1]), calls(ids[2])), (1, 1), "each has one call at a time");
    let held = shard.held_bytes();
    assert!((30_000..40_000).contains(&held) && held >= shard.lane.calls.len() * 1000, "{held} bytes");
    // One is done, and the next one begins.
    let done = shard.call_done();
    assert_eq!(shard.handed(), [done.id]);
    shard.end();
    ids.iter().for_each(|id| shard.abort(*id, CloseReason::Aborted));
    assert_eq!(shard.held_bytes(), 0);
}

/// Frames of four bytes, on the heap, as bytes are that had to wait.
const BLOCK: usize = 400;

/// A connection with as many waiting calls as allowed, and a block of frames after them.
fn with_calls_and_a_block_behind(calls_in_flight_max: u16) -> (Tested, ConnId) {
    let (mut shard, id) = with_connection(Limits { calls_in_flight_max, ..Limits::default() });
    shard.begin(at(1), 0);
    shard.lane.parks = Some(1000);
    let calls = usize::from(calls_in_flight_max);
    shard.receive(id, &empty_frames(calls));
    shard.receive(id, &[0; BLOCK]);
    shard.end();
    assert_eq!(shard.handed(), vec![id; calls]);
    (shard, id)
}

#[test]
fn a_tiny_frame_behind_other_calls_pins_no_more_than_itself() {
    let (mut shard, id) = with_calls_and_a_block_behind(2);
    shard.begin(at(2), 0);
    shard.call_done();
    assert_eq!(shard.handed(), [id]);
    let Call { frame, parked, .. } = &shard.lane.calls[1];
    assert_eq!((frame.pinned_bytes(), shard.counters(LaneId::FIRST).frames_copied), (4, 1));
    assert!((1004..1200).contains(&parked.bytes), "{parked:?}");
    shard.end();
}

#[test]
fn the_last_frame_of_a_block_counts_with_all_that_it_pins() {
    let (mut shard, id) = with_calls_and_a_block_behind(1);
    shard.begin(at(2), 0);
    for n in 1..=BLOCK / 4 {
        shard.call_done();
        assert_eq!(shard.handed(), [id], "frame {n}");
        assert_eq!(shard.lane.calls[0].frame.pinned_bytes(), BLOCK, "it is not copied");
        // Before the last one the inbox counts the block.
        assert!(
            (1000 + BLOCK..1200 + BLOCK).contains(&shard.held_bytes()),
            "{} after {n}",
            shard.held_bytes()
        );
    }
    shard.end();
}

#[test]
fn frames_behind_a_finished_one_do_not_count_it_again() {
    let limits = Limits { calls_in_flight_max: 8, ..Limits::default() };
    let (pool, mut side) = Pool::new(PoolConfig::default()).unwrap();
    let shard = Shard::new(ServerLimits::default(), limits, 1, 1, encoding(), pool, ());
    let mut shard = Tested { shard, lane: Recorder::default() };
    shard.begin(Time::ZERO, 1);
    let id = accept(&mut shard, 0);
    shard.end();
    shard.ops();
    shard.begin(at(1), 2);
    let mut first = Vec::from([0, 0, 0x20, 0]);
    first.resize(4 + 0x2000, b'h');
    let (a, b) = first.split_at(1000);
    let mut send = |shard: &mut Tested, bytes: &[u8]| {
        let buffer = side.lend().unwrap();
        side.spare(buffer)[..bytes.len()].copy_from_slice(bytes);
        let lease = side.received(buffer, bytes.len());
        shard.complete(Completion::Received { id, lease });
    };
    send(&mut shard, a);
    shard.lane.parks = Some(0);
    let mut rest = Vec::from(b);
    for _ in 0..3 {
        rest.extend_from_slice(&[0, 0, 0, 8]);
        rest.extend_from_slice(&[b's'; 8]);
    }
    send(&mut shard, &rest);
    let counted: Vec<usize> = shard.lane.calls.iter().map(|call| call.parked.bytes).collect();
    assert_eq!(counted, [counted[0], 0, 0, 0]);
}

/// Bytes of a receive buffer in the tests below, and the number of buffers.
const BUFFER_BYTES: usize = 1024;
const BUFFERS: usize = 64;

/// A shard with `count` connections and few small receive buffers, its pool, and the side that
/// fills them.
fn with_buffers(limits: Limits, count: usize) -> (Tested, Vec<ConnId>, Pool, KernelSide) {
    let config = PoolConfig { buffer_bytes: BUFFER_BYTES, buffers_max: BUFFERS, poison: true };
    let (pool, side) = Pool::new(config).unwrap();
    let server = ServerLimits::default()
        .receive_buffer_bytes(BUFFER_BYTES)
        .receive_bytes_max(BUFFERS * BUFFER_BYTES)
        .held_bytes_max(16 << 20);
    let shard = Shard::new(server, limits, count, 1, encoding(), pool.clone(), ());
    let mut shard = Tested { shard, lane: Recorder::default() };
    shard.begin(Time::ZERO, count);
    let ids = (0..count as u64).map(|number| accept(&mut shard, number)).collect();
    shard.end();
    shard.ops();
    (shard, ids, pool, side)
}

/// Receives `bytes` by as many buffers as that takes.
fn receive_by_buffers(shard: &mut Tested, side: &mut KernelSide, id: ConnId, bytes: &[u8]) {
    for part in bytes.chunks(BUFFER_BYTES) {
        let buffer = side.lend().expect("a buffer");
        side.spare(buffer)[..part.len()].copy_from_slice(part);
        let lease = side.received(buffer, part.len());
        shard.complete(Completion::Received { id, lease });
    }
}

/// `count` frames of a buffer each, numbered from `first`.
fn buffers_of_frames(first: usize, count: usize) -> Vec<u8> {
    let frame = |n: usize| {
        let mut wire = Vec::from(((BUFFER_BYTES - 4) as u32).to_be_bytes());
        wire.resize(BUFFER_BYTES, n as u8);
        wire
    };
    (first..first + count).flat_map(frame).collect()
}

#[test]
fn bytes_behind_a_call_pin_a_part_of_the_buffers_at_most() {
    let limits = Limits { inbox_bytes_high: 1 << 20, ..Limits::default() };
    let (mut shard, ids, pool, mut side) = with_buffers(limits, 3);
    shard.begin(at(1), 1);
    shard.lane.parks = Some(0);
    // One call waits for ever, with its frame; and so does another, which comes later.
    receive_by_buffers(&mut shard, &mut side, ids[0], &buffers_of_frames(0, 1 + 40));
    assert_eq!(pool.leased(), BUFFERS / KEPT_FOR_LONG, "those that fill a buffer are not copied");
    receive_by_buffers(&mut shard, &mut side, ids[1], &buffers_of_frames(0, 1 + 40));
    assert_eq!(pool.leased(), BUFFERS / KEPT_FOR_LONG + 1, "the frame of the call, and none behind it");
    assert_eq!(shard.handed(), ids[..2]);
    shard.end();
    // Both count as held, in buffers or not.
    assert!(shard.held_bytes() >= 80 * BUFFER_BYTES, "{} bytes", shard.held_bytes());
    shard.begin(at(2), 1);
    shard.lane.parks = None;
    receive_by_buffers(&mut shard, &mut side, ids[2], &buffers_of_frames(0, 100));
    assert_eq!(shard.handed(), vec![ids[2]; 100], "what moves finds buffers");
    // Everything comes, in order.
    shard.lane.taken.clear();
    let call = shard.lane.calls.remove(0);
    shard.shard.call_done(call.id, 0, call.parked, None);
    shard.shard.run_frames(call.id, &mut shard.lane);
    shard.dispatch();
    let numbers: Vec<u8> = shard.lane.taken.iter().map(|frame| frame[0]).collect();
    assert_eq!(numbers, (1..=40).collect::<Vec<u8>>());
    drop(call);
    shard.end();
    ids.iter().for_each(|id| shard.abort(*id, CloseReason::Aborted));
    shard.dispatch();
    shard.lane.calls.clear();
    assert_eq!((pool.leased(), shard.held_bytes()), (0, 0));
}

#[test]
fn block_of_a_copy_serves_the_next_copy() {
    let limits = Limits { inbox_bytes_high: 1 << 20, ..Limits::default() };
    let (mut shard, ids, _pool, mut side) = with_buffers(limits, 1);
    shard.shard.copy_frames();
    let mut kept = Vec::new();
    for round in 1..4 {
        shard.begin(at(round), 1);
        shard.lane.parks = Some(0);
        receive_by_buffers(&mut shard, &mut side, ids[0], &buffers_of_frames(0, 1 + 100));
        shard.lane.parks = None;
        shard.call_done();
        assert_eq!(shard.lane.taken.len(), 101);
        shard.lane.taken.clear();
        shard.end();
        assert_eq!(shard.held_bytes(), 0);
        kept.push(shard.blocks.kept_bytes());
    }
    assert!(kept[0] >= 100 * BUFFER_BYTES, "{kept:?}");
    assert_eq!(kept, [kept[0]; 3], "each round takes new ones");
    shard.give_back();
    assert_eq!(shard.blocks.kept_bytes(), 0, "a quiet shard keeps none");
}

#[test]
fn stream_that_was_paused_is_received_from_part_by_part() {
    for is_stream in [true, false] {
        let limits = Limits { inbox_bytes_high: 4 * BUFFER_BYTES, ..Limits::default() };
        let (mut shard, ids, _pool, mut side) = with_buffers(limits, 1);
        if is_stream {
            shard.shared(ids[0]).unwrap().read_on();
        }
        shard.begin(at(1), 1);
        shard.lane.parks = Some(0);
        receive_by_buffers(&mut shard, &mut side, ids[0], &buffers_of_frames(0, 1 + 4));
        shard.end();
        assert!(matches!(shard.ops()[..], [Op::ReceiveStop { .. }]), "its reader is behind");
        let mut once = 0;
        loop {
            shard.begin(at(2), 1);
            shard.lane.parks = None;
            shard.complete(Completion::ReceiveEnded { id: ids[0], end: ReceiveEnd::Stopped });
            if let Some(call) = shard.lane.calls.pop() {
                shard.shard.call_done(ids[0], 0, call.parked, None);
                shard.shard.run_frames(ids[0], &mut shard.lane);
            }
            shard.end();
            match shard.ops()[..] {
                [Op::ReceiveOnce { several: true, .. }] => once += 1,
                [Op::Receive { .. }] => break,
                ref ops => panic!("{ops:?}"),
            }
        }
        assert_eq!(once, if is_stream { 32 } else { 0 }, "a reader that keeps up is received from as ever");
    }
}
