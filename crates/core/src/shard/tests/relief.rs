//! Connections that end when they hold too much, and memory that counts until the driver gives it
//! back.

use core::task::Poll;

use bytes::Bytes;
use proptest::prelude::*;

use super::*;
use crate::tables::LISTED_BYTES;
use crate::{NoMemoryLeft, Reservation};

const HELD_MAX: usize = 1 << 20;

/// A shard with `count` connections that may hold a MiB together.
fn tight(count: usize) -> (Tested, Vec<ConnId>) {
    let limits = Limits {
        frame_bytes_max: 1 << 19,
        outbox_bytes_max: HELD_MAX,
        outbox_bytes_high: HELD_MAX,
        write_stall_timeout: None,
        write_bytes_per_second_min: 0,
        ..Limits::default()
    };
    with_connections(count, (ServerLimits::default().held_bytes_max(HELD_MAX), limits))
}

/// The connections that were closed for lack of memory since the last call of this.
fn closed(shard: &mut Tested) -> Vec<ConnId> {
    let end = |heard| match heard {
        Heard::Ended { id, reason, .. } => {
            assert_eq!(reason, CloseReason::MemoryLimit);
            Some(id)
        }
        _ => None,
    };
    shard.heard().into_iter().filter_map(end).collect()
}

/// The sends that were begun since the last call of this.
fn sends(shard: &mut Tested) -> Vec<(ConnId, Box<Batch>)> {
    let send = |op| if let Op::Send { id, batch } = op { Some((id, batch)) } else { None };
    shard.ops().into_iter().filter_map(send).collect()
}

fn write(shard: &Tested, id: ConnId, bytes: usize) {
    shard.shared(id).unwrap().write_payload(Payload::from(vec![b'r'; bytes]));
}

/// A request that is answered with `answer` bytes.
fn ask(shard: &mut Tested, id: ConnId, answer: usize) {
    shard.lane.replies = answer;
    shard.receive(id, &empty_frames(1));
}

#[test]
fn aborted_outbox_holds_off_calls_until_it_is_back() {
    let (mut shard, ids) = tight(6);
    shard.begin(at(1), 0);
    ids[..3].iter().for_each(|id| write(&shard, *id, 500_000));
    shard.end();
    let gone = closed(&mut shard);
    assert_eq!(gone.len(), 1);
    assert_eq!((shard.held_bytes(), shard.memory_bytes()), (1_000_000, 1_500_000));
    let mut sent = sends(&mut shard);
    for turn in 2..5 {
        shard.begin(at(turn), 0);
        if turn == 2 {
            ask(&mut shard, ids[5], 100);
        }
        assert!(!shard.take_call(), "a call that is resumed would queue more");
        shard.end();
        assert_eq!(shard.handed(), [], "nothing is back");
        assert_eq!(shard.wait(), Wait::No);
    }
    shard.begin(at(5), 1);
    let place = sent.iter().position(|(id, _)| *id == gone[0]).unwrap();
    let (id, batch) = sent.swap_remove(place);
    shard.complete(Completion::Sent { id, batch, end: SendEnd::Stopped });
    assert_eq!(shard.memory_bytes(), shard.held_bytes());
    shard.end();
    shard.turn(at(6));
    assert_eq!(shard.handed(), [ids[5]]);
}

#[test]
fn memory_on_its_way_back_closes_no_peer() {
    let (mut shard, ids) = tight(20);
    shard.begin(at(1), 0);
    ids[..3].iter().for_each(|id| write(&shard, *id, 500_000));
    shard.end();
    assert_eq!(closed(&mut shard).len(), 1);
    // Bytes that peers sent meanwhile are kept, and none pays for them.
    shard.begin(at(2), 0);
    ids[4..].iter().for_each(|id| ask(&mut shard, *id, 100));
    shard.end();
    assert_eq!(closed(&mut shard), []);
}

#[test]
fn peers_without_a_batch_in_a_full_turn_stay() {
    let (mut shard, ids) = tight(40);
    shard.begin(at(1), 40);
    for (n, id) in ids.iter().enumerate() {
        // Each fourth one asks for a third of what all may hold.
        let answer = if n % 4 == 0 { HELD_MAX / 3 } else { 15 };
        ask(&mut shard, *id, answer);
    }
    shard.end();
    let mut gone = closed(&mut shard);
    for turn in 2..200 {
        let sent = sends(&mut shard);
        shard.begin(at(turn), 0);
        for (id, mut batch) in sent {
            // Peers that ask for little take it, and so the driver does with aborted bytes.
            if batch.len() < LISTED_BYTES {
                batch.advance(batch.len());
                shard.complete(Completion::Sent { id, batch, end: SendEnd::Done });
            } else if shard.shared(id).is_none() {
                shard.complete(Completion::Sent { id, batch, end: SendEnd::Stopped });
            } else {
                shard.shard.ops.push(Op::Send { id, batch });
            }
        }
        shard.end();
        gone.extend(closed(&mut shard));
        assert!(shard.memory_bytes() < HELD_MAX + HELD_MAX / 2, "{}", shard.memory_bytes());
    }
    let innocent = |id: &&ConnId| !ids.iter().position(|other| other == *id).unwrap().is_multiple_of(4);
    assert_eq!(gone.iter().filter(innocent).count(), 0, "of {gone:?}");
    let handed = ids.iter().filter(|id| shard.conns.get(**id).is_some_and(|conn| conn.frame_seen)).count();
    assert!(handed >= 30, "{handed} were answered");
}

#[test]
fn turn_ends_when_it_queued_a_part_of_what_may_be_held() {
    let (mut shard, ids) = tight(12);
    shard.begin(at(1), 12);
    ids.iter().for_each(|id| ask(&mut shard, *id, HELD_MAX / 16 + 1000));
    shard.end();
    assert_eq!(shard.handed(), ids[..2]);
    shard.turn(at(1));
    // Bytes of those that wait count too, until they are taken up.
    assert!((2..=3).contains(&shard.handed().len()));
}

#[test]
fn memory_counts_by_what_is_allocated() {
    let (mut shard, ids) = tight(3);
    shard.begin(at(1), 0);
    write(&shard, ids[0], 50_000);
    // By its second part the block of the other one is doubled.
    shard.shared(ids[1]).unwrap().write(&[b'r'; 40_000]);
    shard.shared(ids[1]).unwrap().write(b"end");
    shard.end();
    let mut sent = sends(&mut shard);
    let allocated = sent.iter().map(|(_, batch)| batch.held_bytes()).sum::<usize>();
    assert!(allocated >= 50_000 + 2 * 40_000, "{allocated}");
    assert_eq!(shard.held_bytes(), allocated);
    // Bytes that wait after it count likewise, and those that were sent of it are there until the
    // rest is.
    shard.begin(at(2), 0);
    shard.shared(ids[1]).unwrap().write(&[b'r'; 40_000]);
    shard.shared(ids[1]).unwrap().write(b"end");
    shard.end();
    assert!((allocated + 80_000..allocated + 81_000).contains(&shard.held_bytes()), "{}", shard.held_bytes());
    let before = shard.held_bytes();
    let (id, mut batch) = sent.swap_remove(0);
    batch.advance(45_000);
    shard.begin(at(3), 1);
    shard.complete(Completion::Sent { id, batch, end: SendEnd::Stopped });
    shard.end();
    assert_eq!((shard.held_bytes(), shard.shared(id).unwrap().outbox_bytes()), (before, 5_000));
    // All of it is forgotten at the ends.
    sent.extend(sends(&mut shard));
    shard.begin(at(4), 2);
    for (id, mut batch) in sent {
        batch.advance(batch.len());
        shard.complete(Completion::Sent { id, batch, end: SendEnd::Done });
    }
    shard.end();
    for (id, mut batch) in sends(&mut shard) {
        batch.advance(batch.len());
        shard.complete(Completion::Sent { id, batch, end: SendEnd::Done });
    }
    assert_eq!(shard.memory_bytes(), 0);
}

#[test]
fn block_of_a_large_frame_counts_until_the_driver_gives_it_back() {
    let (mut shard, ids) = tight(1);
    shard.begin(at(1), 0);
    let mut half = Vec::from([0, 4, 0, 0]);
    half.resize(20_000, b'h');
    shard.receive_part(ids[0], &half);
    shard.complete(Completion::ReceiveEnded { id: ids[0], end: crate::ReceiveEnd::Stopped });
    shard.end();
    let into = |op| if let Op::ReceiveInto { block, .. } = op { Some(block) } else { None };
    let block = shard.ops().into_iter().find_map(into).expect("it is received straight into its block");
    let held = shard.held_bytes();
    assert!(held >= 20_000);
    shard.begin(at(2), 0);
    shard.abort(ids[0], CloseReason::Aborted);
    shard.end();
    assert_eq!((shard.held_bytes(), shard.memory_bytes()), (0, held));
    shard.begin(at(3), 1);
    let end = crate::ReceiveEnd::Stopped;
    shard.complete(Completion::Filled { id: ids[0], block, bytes: 0, end });
    shard.end();
    assert_eq!(shard.memory_bytes(), 0);
}

#[test]
fn reply_of_4_gib_is_too_much_and_wraps_no_count() {
    let limits = Limits::default().outbox_bytes_max(1 << 31).outbox_bytes_high(1 << 20);
    let (mut shard, id) = with_connection((ServerLimits::default().held_bytes_max(8 << 30), limits));
    shard.begin(at(1), 0);
    shard.shared(id).unwrap().write(b"first");
    shard.end();
    let (_, mut first) = sends(&mut shard).remove(0);
    shard.begin(at(2), 1);
    let piece = Bytes::from(vec![0; 64 << 20]);
    for _ in 0..64 {
        shard.shared(id).unwrap().write_payload(piece.clone().into());
    }
    // The send before it ends in the turn in which it is queued.
    first.advance(first.len());
    shard.complete(Completion::Sent { id, batch: first, end: SendEnd::Done });
    shard.end();
    assert_eq!(shard.heard(), [Heard::Ended { id, reason: CloseReason::OutboxFull, opened: true }]);
    assert_eq!((sends(&mut shard).len(), shard.memory_bytes()), (0, 0));
}

/// A reservation that was polled once.
fn reserve(shard: &Tested, id: ConnId, bytes: usize) -> (Reservation, Poll<Result<(), NoMemoryLeft>>) {
    let mut reservation = Reservation::new(shard.shared(id).unwrap());
    let polled = reservation.poll(bytes, Waker::noop());
    (reservation, polled)
}

#[test]
fn memory_is_reserved_up_to_three_quarters_and_then_in_a_line() {
    let (mut shard, ids) = tight(6);
    shard.begin(at(1), 0);
    assert_eq!(reserve(&shard, ids[0], HELD_MAX / 4 * 3 + 1).1, Poll::Ready(Err(NoMemoryLeft::TooLarge)));
    let (first, polled) = reserve(&shard, ids[0], HELD_MAX / 2);
    assert_eq!(polled, Poll::Ready(Ok(())));
    let (mut second, polled) = reserve(&shard, ids[1], HELD_MAX / 2);
    assert_eq!(polled, Poll::Pending);
    // A later one waits after it, and so does not keep it waiting for ever.
    let (mut third, polled) = reserve(&shard, ids[2], 10);
    assert_eq!(polled, Poll::Pending);
    let (fourth, _) = reserve(&shard, ids[3], 10);
    let (fifth, _) = reserve(&shard, ids[4], 20);
    shard.end();
    assert_eq!((shard.heard(), shard.held_bytes()), (vec![], HELD_MAX / 2));
    assert!(shard.wait() != Wait::Forever, "a line is looked at");
    shard.begin(at(2), 0);
    drop((first, fourth));
    shard.end();
    assert_eq!(shard.heard(), [1, 2, 4].map(|n| Heard::Wake(ids[n])));
    assert_eq!(second.poll(HELD_MAX / 2, Waker::noop()), Poll::Ready(Ok(())));
    assert_eq!(shard.held_bytes(), HELD_MAX / 2 + 30);
    // A grant that is not taken is given back likewise, and an end gives all back.
    drop(fifth);
    assert_eq!(shard.held_bytes(), HELD_MAX / 2 + 10);
    shard.begin(at(3), 0);
    shard.abort(ids[2], CloseReason::Aborted);
    shard.end();
    assert_eq!(third.poll(10, Waker::noop()), Poll::Ready(Err(NoMemoryLeft::Gone)));
    drop((third, second));
    assert_eq!(shard.memory_bytes(), 0);
}

#[test]
fn what_is_there_already_is_held_without_a_wait() {
    let (mut shard, ids) = tight(6);
    shard.begin(at(1), 0);
    let mut held = Reservation::new(shard.shared(ids[0]).unwrap());
    for bytes in [HELD_MAX, 10, HELD_MAX / 4 * 3 + 1] {
        held.hold(bytes);
        assert_eq!((held.bytes(), shard.held_bytes()), (bytes, bytes));
    }
    // Others wait for it meanwhile.
    let (waits, polled) = reserve(&shard, ids[1], 10);
    assert_eq!(polled, Poll::Pending);
    held.hold(0);
    shard.end();
    assert_eq!((shard.heard(), shard.held_bytes()), (vec![Heard::Wake(ids[1])], 10));
    drop(waits);
    shard.begin(at(2), 0);
    held.hold(10);
    shard.abort(ids[0], CloseReason::Aborted);
    shard.end();
    // An end gives it back, and nothing is held for a connection that is gone.
    held.hold(20);
    assert_eq!(shard.memory_bytes(), 0);
    drop(held);
    assert_eq!(shard.memory_bytes(), 0);
}

#[test]
fn nothing_is_given_back_that_was_not_held_for_who_goes() {
    let (mut shard, ids) = tight(2);
    shard.begin(at(1), 0);
    let outlet = shard.shared(ids[0]).unwrap().clone();
    let (mut before, mut behind) = (Reservation::new(&outlet), Reservation::new(&outlet));
    before.hold(1000);
    write(&shard, ids[0], 100);
    shard.finish(ids[0], CloseReason::Closed);
    shard.end();
    // Its last reply is sent, and memory of a call counts until the end.
    assert!(outlet.is_gone() && shard.shared(ids[0]).is_some());
    let held = shard.held_bytes();
    behind.hold(400);
    behind.hold(100);
    assert_eq!((behind.bytes(), shard.held_bytes()), (0, held));
    drop(behind);
    assert_eq!(shard.held_bytes(), held);
    drop(before);
    assert_eq!(shard.held_bytes(), held - 1000);
}

/// Lets the driver stop the sends that it was asked to stop, of which the peers took `taken` bytes
/// each, and goes on with them.
fn stop(shard: &mut Tested, flying: &mut Vec<(ConnId, Box<Batch>)>, taken: usize) -> Vec<ConnId> {
    let told = |op| if let Op::SendStop { id } = op { Some(id) } else { None };
    let told: Vec<ConnId> = shard.ops().into_iter().filter_map(told).collect();
    let now = shard.now;
    shard.begin(now, told.len());
    for id in &told {
        let (id, mut batch) = flying.remove(flying.iter().position(|(of, _)| of == id).unwrap());
        batch.advance(taken);
        shard.complete(Completion::Sent { id, batch, end: SendEnd::Stopped });
    }
    shard.end();
    flying.extend(sends(shard));
    told
}

fn millis(millis: u64) -> Time {
    Time::ZERO + Duration::from_millis(millis)
}

#[test]
fn those_that_read_nothing_make_room_for_who_waits() {
    let (mut shard, ids) = tight(6);
    shard.begin(at(1), 0);
    ids[..2].iter().for_each(|id| write(&shard, *id, 350_000));
    write(&shard, ids[2], 50_000);
    shard.end();
    let mut flying = sends(&mut shard);
    let (mut waits, polled) = reserve(&shard, ids[3], 300_000);
    assert_eq!(polled, Poll::Pending);
    shard.turn(at(2));
    shard.turn(at(2) + Duration::from_millis(500));
    assert_eq!(stop(&mut shard, &mut flying, 0), [], "they may read yet");
    shard.turn(at(4));
    assert_eq!(stop(&mut shard, &mut flying, 0), ids[..1]);
    assert_eq!(closed(&mut shard), [], "the kernel may have had room");
    assert_eq!(waits.poll(300_000, Waker::noop()), Poll::Pending, "nothing is back");
    shard.turn(at(4) + Duration::from_millis(100));
    assert_eq!(stop(&mut shard, &mut flying, 0), ids[..1]);
    assert_eq!(shard.heard()[0], Heard::Ended { id: ids[0], reason: CloseReason::MemoryLimit, opened: true });
    assert_eq!(waits.poll(300_000, Waker::noop()), Poll::Ready(Ok(())));
}

#[test]
fn none_goes_for_who_waits_that_reads_or_owes_nothing() {
    let (mut shard, ids) = tight(6);
    shard.begin(at(1), 0);
    // Memory held by a service is no peer's fault, and a slow reader takes some.
    let (_granted, polled) = reserve(&shard, ids[0], 400_000);
    assert_eq!(polled, Poll::Ready(Ok(())));
    shard.shared(ids[1]).unwrap().set_service_bytes(200_000);
    write(&shard, ids[2], 150_000);
    shard.end();
    let mut flying = sends(&mut shard);
    let (_waits, polled) = reserve(&shard, ids[3], 300_000);
    assert_eq!(polled, Poll::Pending);
    let mut looks = 0;
    for turn in 1..100 {
        shard.turn(at(1) + Duration::from_millis(100 * turn));
        let told = stop(&mut shard, &mut flying, 1000);
        assert!(told.iter().all(|id| *id == ids[2]));
        looks += told.len();
    }
    assert_eq!(closed(&mut shard), []);
    assert!((2..6).contains(&looks), "{looks} in ten seconds");
}

/// The reason and time of the end of a connection within 25 s, if its peer takes `takes` bytes of a
/// send at each look that memory requests.
fn end_beside_a_line(takes: impl Fn(usize) -> usize) -> Option<(CloseReason, u64)> {
    let server = ServerLimits::default().held_bytes_max(HELD_MAX);
    let limits = Limits {
        outbox_bytes_max: HELD_MAX,
        frame_bytes_max: 1 << 19,
        write_bytes_per_second_min: 10_000,
        idle_timeout: None,
        first_frame_timeout: None,
        ..Limits::default()
    };
    let (mut shard, ids) = with_connections(2, (server, limits));
    shard.begin(at(1), 0);
    write(&shard, ids[0], 700_000);
    shard.end();
    let mut flying = sends(&mut shard);
    let (_waits, polled) = reserve(&shard, ids[1], 700_000);
    assert_eq!(polled, Poll::Pending);
    let mut looks = 0;
    for tenths in 11..250 {
        shard.turn(millis(100 * tenths));
        looks += stop(&mut shard, &mut flying, takes(looks)).len();
        for heard in shard.heard() {
            if let Heard::Ended { id, reason, .. } = heard {
                assert_eq!(id, ids[0]);
                return Some((reason, (tenths - 10) / 10));
            }
        }
    }
    assert!(looks >= 8, "{looks}");
    None
}

#[test]
fn rate_of_a_send_holds_over_its_time_though_memory_asks_sooner() {
    // A small window that opens, and just enough for the whole rate.
    assert_eq!(end_beside_a_line(|look| if look == 0 { 5000 } else { 30_000 }), None);
    assert_eq!(end_beside_a_line(|_| 23_000), None);
    for takes in [18_000, 1] {
        let end = end_beside_a_line(|_| takes);
        // At the first look after its time.
        assert!(matches!(end, Some((CloseReason::WriteTooSlow, 10..=12))), "{takes}: {end:?}");
    }
}

#[test]
fn first_in_the_line_goes_where_it_reads_nothing_itself() {
    let (mut shard, ids) = tight(6);
    shard.begin(at(1), 0);
    write(&shard, ids[0], 600_000);
    // Another holds more, and owes nothing.
    shard.shared(ids[1]).unwrap().set_service_bytes(200_000);
    shard.end();
    let mut flying = sends(&mut shard);
    let (_first, _) = reserve(&shard, ids[0], 300_000);
    let (mut second, _) = reserve(&shard, ids[2], 300_000);
    for turn in 30..33 {
        shard.turn(millis(100 * turn));
        stop(&mut shard, &mut flying, 0);
    }
    assert_eq!(shard.heard()[0], Heard::Ended { id: ids[0], reason: CloseReason::MemoryLimit, opened: true });
    assert_eq!(second.poll(300_000, Waker::noop()), Poll::Ready(Ok(())));
}

#[test]
fn many_that_read_nothing_make_room_for_all_that_wait() {
    let (mut shard, ids) = tight(46);
    shard.begin(at(1), 0);
    ids[..26].iter().for_each(|id| write(&shard, *id, 30_000));
    shard.end();
    let mut flying = sends(&mut shard);
    let mut waiting: Vec<_> = ids[26..36].iter().map(|id| reserve(&shard, *id, 64 << 10).0).collect();
    for turn in 30..33 {
        shard.turn(millis(100 * turn));
        stop(&mut shard, &mut flying, 0);
    }
    let gone = shard.heard().into_iter().filter(|heard| matches!(heard, Heard::Ended { .. })).count();
    assert!((21..25).contains(&gone), "{gone} went");
    let granted = waiting.iter_mut().all(|waits| waits.poll(64 << 10, Waker::noop()).is_ready());
    assert!(granted, "the line is empty");
}

#[test]
fn who_waits_for_more_than_a_lower_bound_allows_is_told() {
    let (mut shard, ids) = tight(3);
    shard.begin(at(1), 0);
    let (_granted, _) = reserve(&shard, ids[0], 200_000);
    let (mut waits, polled) = reserve(&shard, ids[1], 700_000);
    assert_eq!(polled, Poll::Pending);
    let (mut behind, _) = reserve(&shard, ids[2], 100_000);
    shard.bound_memory(HELD_MAX / 2, 1 << 20);
    shard.end();
    assert_eq!(shard.heard(), [Heard::Wake(ids[1]), Heard::Wake(ids[2])]);
    assert_eq!(waits.poll(700_000, Waker::noop()), Poll::Ready(Err(NoMemoryLeft::TooLarge)));
    assert_eq!(behind.poll(100_000, Waker::noop()), Poll::Ready(Ok(())));
}

#[test]
fn connection_that_grew_behind_a_turn_is_looked_at_in_the_next() {
    let (mut shard, ids) = tight(2);
    shard.begin(at(1), 0);
    write(&shard, ids[0], HELD_MAX - 1000);
    shard.end();
    shard.ops();
    // The lane's calls at the end of a turn.
    shard.shard.shared.hold(2000);
    shard.check_held(ids[1]);
    assert_eq!(shard.wait(), Wait::No);
    shard.shard.shared.release(2000);
}

#[test]
fn block_kept_for_the_next_send_costs_a_small_reply_nothing() {
    let (mut shard, ids) = tight(2);
    shard.begin(at(1), 0);
    shard.shared(ids[0]).unwrap().write(&[b'r'; 40_000]);
    shard.end();
    let (id, mut batch) = sends(&mut shard).remove(0);
    batch.advance(40_000);
    shard.begin(at(2), 1);
    shard.complete(Completion::Sent { id, batch, end: SendEnd::Done });
    shard.shared(ids[1]).unwrap().write(b"small");
    shard.end();
    let (id, batch) = sends(&mut shard).remove(0);
    assert!(batch.room() >= 40_000 && !batch.room_counts);
    assert_eq!((shard.held_bytes(), shard.holders.room_of(id.slot())), (5, 0));
    // A peer that leaves it unread is found at a look.
    shard.begin(at(3), 1);
    shard.complete(Completion::Sent { id, batch, end: SendEnd::Stopped });
    shard.shared(id).unwrap().write(b"behind");
    shard.end();
    assert!(shard.held_bytes() >= 40_000);
}

#[test]
fn room_behind_a_send_counts_on_when_that_is_looked_at() {
    let (mut shard, ids) = tight(1);
    shard.begin(at(1), 0);
    write(&shard, ids[0], 10_000);
    shard.end();
    let (id, batch) = sends(&mut shard).remove(0);
    shard.begin(at(2), 0);
    shard.shared(id).unwrap().write(&[b'r'; 70_000]);
    shard.shared(id).unwrap().write(b"its block is doubled");
    shard.end();
    let before = shard.held_bytes();
    assert!(before >= 150_000, "{before}");
    shard.begin(at(3), 1);
    shard.complete(Completion::Sent { id, batch, end: SendEnd::Stopped });
    shard.end();
    assert_eq!(shard.held_bytes(), before);
}

#[derive(Clone, Debug)]
enum Hold {
    Half(usize),
    Reply(usize),
}

fn hold() -> impl Strategy<Value = Hold> {
    let bytes = prop_oneof![1..4000usize, 4100..9000usize, 10_000..300_000usize];
    (any::<bool>(), bytes).prop_map(|(half, bytes)| if half { Hold::Half(bytes) } else { Hold::Reply(bytes) })
}

fn class(bytes: usize) -> u32 {
    if bytes < LISTED_BYTES { 0 } else { bytes.ilog2() }
}

/// Settled bytes of the connections that are compared.
fn settled_bytes(each: impl Iterator<Item = usize>) -> usize {
    each.filter(|held| *held >= LISTED_BYTES).sum()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Steps of connections that hold more, and of time. At each end of a turn those that ended
    /// held most.
    #[test]
    fn heaviest_goes_by_what_it_holds_at_that_moment(
        steps in prop::collection::vec((0..30usize, hold(), 0..4u64, any::<bool>()), 20..120),
    ) {
        let (mut shard, ids) = tight(30);
        let mut millis = 1000;
        let mut flying: Vec<(ConnId, Box<Batch>)> = Vec::new();
        shard.begin(Time::ZERO + Duration::from_millis(millis), 0);
        for (n, hold, waits, takes) in steps {
            let id = ids[n];
            if shard.shared(id).is_none() {
                continue;
            }
            match hold {
                Hold::Half(bytes) if shard.conns.get(id).is_some_and(|conn| conn.inbox.is_none()) => {
                    let mut half = Vec::from([0, 7, 0, 0]);
                    half.resize(bytes + 4, b'h');
                    shard.receive_part(id, &half);
                }
                Hold::Reply(bytes) if shard.shared(id).unwrap().pending_bytes() == 0 => {
                    // So that its block has no more room than it needs.
                    shard.shard.shared.drop_spare();
                    write(&shard, id, bytes);
                }
                Hold::Half(_) | Hold::Reply(_) => {}
            }
            if takes && let Some(at) = flying.iter().position(|(of, _)| *of == id) {
                let (id, mut batch) = flying.swap_remove(at);
                batch.advance(batch.len());
                shard.complete(Completion::Sent { id, batch, end: SendEnd::Done });
            }
            if waits == 0 {
                continue;
            }
            let before: Vec<_> = ids.iter().map(|id| (shard.held_bytes_of(*id, 0), shard.held_bytes_of(*id, 3))).collect();
            let (held, settled) = (shard.held_bytes(), settled_bytes(before.iter().map(|of| of.1)));
            shard.end();
            let gone = closed(&mut shard);
            flying.extend(sends(&mut shard));
            let stay = ids.iter().filter(|id| shard.shared(**id).is_some());
            let now: Vec<_> = stay.map(|id| (shard.held_bytes_of(*id, 0), shard.held_bytes_of(*id, 3))).collect();
            // A reply of less than that is not looked at, and may have brought a connection into
            // the next class.
            let surely = |bytes: usize| class(bytes.saturating_sub(LISTED_BYTES - 1));
            let heaviest = now.iter().map(|of| surely(of.0)).max().unwrap_or(0);
            let heaviest_settled = now.iter().map(|of| surely(of.1)).max().unwrap_or(0);
            let settled_stays = settled_bytes(now.iter().map(|of| of.1));
            for id in &gone {
                let (held_by_it, settled_of_it) = before[ids.iter().position(|other| other == id).unwrap()];
                let text = std::format!("{held_by_it}, {settled_of_it} settled, of {held}, {settled} settled; stay {now:?}");
                prop_assert!(class(held_by_it) > 0 || heaviest == 0, "below 4 KiB: {text}");
                if settled * 4 < held {
                    prop_assert!(class(held_by_it) >= heaviest, "of all: {text}");
                }
                if settled_stays * 4 >= held {
                    prop_assert!(class(settled_of_it) >= heaviest_settled, "of those that settled: {text}");
                }
            }
            shard.check();
            millis += [0, 1, 30, 200][waits as usize];
            shard.begin(Time::ZERO + Duration::from_millis(millis), 0);
            // The driver gives the aborted batches back.
            let (back, on): (Vec<_>, Vec<_>) =
                flying.drain(..).partition(|(id, _)| shard.shared(*id).is_none());
            flying = on;
            for (id, batch) in back {
                shard.complete(Completion::Sent { id, batch, end: SendEnd::Stopped });
            }
        }
        shard.end();
    }
}
