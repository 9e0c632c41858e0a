//! Connections with a channel between socket and framing.

mod ends;
mod handshakes;
mod toy;

use super::*;
use crate::ReceiveEnd;
use toy::*;

/// A shard whose first listener has a transport, and its second none.
fn secured(limits: impl Into<Bounds>, toy: Toy) -> Tested {
    let mut shard = Tested::new(limits, 20, 2);
    shard.secure(0, Rc::new(toy));
    shard
}

const TOY: Toy =
    Toy { needs_close: false, greets: false, tells_rests: false, makes_facts: false, kept_bytes: 0 };

/// Such a shard with one connection, which has sent nothing.
fn starting(limits: impl Into<Bounds>, toy: Toy) -> (Tested, ConnId) {
    let mut shard = secured(limits, toy);
    shard.begin(Time::ZERO, 1);
    let id = accept(&mut shard, 3);
    shard.end();
    (shard, id)
}

/// Such a shard with one connection whose handshake is done.
fn ready(limits: impl Into<Bounds>) -> (Tested, ConnId, Peer) {
    let (mut shard, id) = starting(limits, TOY);
    let mut peer = Peer::default();
    shard.begin(at(1), 1);
    shard.receive(id, &peer.flights());
    shard.end();
    shard.turn(at(1));
    assert_eq!(shard.heard(), [Heard::Secured(id)]);
    let (said, ops) = leave(&mut shard, id, &mut peer);
    assert_eq!((said, ops.len()), (vec![Said::Other(HELLO), Said::Other(FINISHED)], 0));
    assert_eq!(shard.held_bytes(), 0);
    (shard, id, peer)
}

/// Takes the operations and carries the sends out. Returns what the peer received, and the other
/// operations.
fn leave(shard: &mut Tested, id: ConnId, peer: &mut Peer) -> (Vec<Said>, Vec<Op>) {
    let (mut said, mut others) = (Vec::new(), Vec::new());
    loop {
        let ops = shard.ops();
        if ops.is_empty() {
            return (said, others);
        }
        for op in ops {
            match op {
                Op::Send { id: of, batch } if of == id => {
                    said.extend(hear(peer, &batch));
                    done(shard, id, batch);
                }
                Op::AcceptStop { .. } | Op::Accept { .. } => {}
                other => others.push(other),
            }
        }
    }
}

fn hear(peer: &mut Peer, batch: &Batch) -> Vec<Said> {
    batch.invariants();
    peer.hear(batch.pieces().flatten().copied())
}

/// Completes a send whose bytes were all sent.
fn done(shard: &mut Tested, id: ConnId, mut batch: Box<Batch>) {
    batch.advance(batch.len());
    shard.complete(Completion::Sent { id, batch, end: SendEnd::Done });
}

/// The batch that is sent to a connection.
#[track_caller]
fn sent_to(shard: &mut Tested, id: ConnId) -> Box<Batch> {
    let sends = |op| match op {
        Op::Send { id: of, batch } if of == id => Some(batch),
        _ => None,
    };
    shard.ops().into_iter().find_map(sends).expect("a send")
}

/// The payloads that were handed out since the last call of this.
fn taken(shard: &mut Tested) -> Vec<Vec<u8>> {
    shard.lane.heard.retain(|heard| !matches!(heard, Heard::Batch(_) | Heard::Frame(_)));
    core::mem::take(&mut shard.lane.taken)
}

fn stats(shard: &Tested) -> ConnStats {
    shard.counters(LaneId::FIRST)
}

#[test]
fn frames_come_however_their_records_are_cut() {
    let frames: [&[u8]; 4] = [b"one", b"", &[7; 3000], b"last"];
    for step in [1, 2, 5, 7, 100, 4000, 10_000] {
        let (mut shard, id, mut peer) = ready(Limits::default());
        let plain: Vec<u8> = frames.iter().flat_map(|frame| wire(frame)).collect();
        // Records end in the middle of frames.
        let records: Vec<u8> = plain.chunks(11).flat_map(|part| peer.record(DATA, part)).collect();
        for piece in records.chunks(step) {
            shard.begin(at(2), 1);
            shard.receive(id, piece);
            shard.end();
            shard.check();
        }
        assert_eq!((taken(&mut shard), shard.heard()), (frames.map(Vec::from).to_vec(), vec![]), "{step}");
        assert_eq!((shard.held_bytes(), stats(&shard).frames), (0, 4));
        assert_eq!(stats(&shard).bytes_received as usize, records.len() + 5 + 5 + 5);
    }
}

#[test]
fn record_that_lies_in_one_lease_is_not_copied() {
    let (pool, mut side) = Pool::new(PoolConfig::default()).unwrap();
    let shard = Shard::new(ServerLimits::default(), Limits::default(), 1, 1, encoding(), pool, ());
    let mut shard = Tested { shard, lane: Recorder { parks: Some(0), ..Recorder::default() } };
    shard.secure(0, Rc::new(TOY));
    shard.begin(Time::ZERO, 1);
    let id = accept(&mut shard, 0);
    let mut peer = Peer::default();
    shard.receive(id, &peer.flights());
    shard.end();
    shard.turn(at(1));
    let bytes = peer.frame(b"here");
    let buffer = side.lend().unwrap();
    side.spare(buffer)[..bytes.len()].copy_from_slice(&bytes);
    let start = side.spare(buffer).as_ptr();
    shard.begin(at(1), 1);
    let lease = side.received(buffer, bytes.len());
    shard.complete(Completion::Received { id, lease });
    shard.end();
    let frame = &shard.lane.calls[0].frame;
    assert_eq!((&**frame, frame.as_ptr()), (&b"here"[..], start.wrapping_add(9)));
}

#[test]
fn records_behind_a_call_that_waits_are_kept_in_the_inbox() {
    let (mut shard, id, mut peer) = ready(Limits::default().inbox_bytes_high(100));
    shard.lane.parks = Some(0);
    shard.begin(at(2), 2);
    shard.receive(id, &[peer.frame(b"first"), peer.frame(b"second")].concat());
    shard.receive(id, &peer.frame(&[7; 200]));
    shard.end();
    assert_eq!(taken(&mut shard), [b"first"]);
    assert!(shard.ops().iter().any(|op| matches!(op, Op::ReceiveStop { .. })), "too much is kept");
    shard.begin(at(3), 0);
    shard.call_done();
    assert_eq!(taken(&mut shard), [b"second"]);
    shard.call_done();
    assert_eq!(taken(&mut shard), [[7; 200]]);
    shard.call_done();
    shard.end();
    assert_eq!(shard.held_bytes(), 0);
}

#[test]
fn channel_answers_without_a_reply() {
    let (mut shard, id, mut peer) = ready(Limits::default());
    shard.begin(at(2), 1);
    shard.receive(id, &peer.record(REKEY, b""));
    shard.end();
    assert_eq!(leave(&mut shard, id, &mut peer).0, [Said::Other(REKEY)]);
    // And after a send that is in flight.
    shard.shared(id).unwrap().write(b"reply");
    shard.turn(at(2));
    let first = sent_to(&mut shard, id);
    shard.begin(at(2), 1);
    shard.receive(id, &peer.record(REKEY, b""));
    shard.end();
    assert!(shard.ops().is_empty() && shard.take_send_awaited());
    assert_eq!(shard.held_bytes(), first.len() + 5);
    assert_eq!(hear(&mut peer, &first), [Said::Data(b"reply".to_vec())]);
    done(&mut shard, id, first);
    assert_eq!(leave(&mut shard, id, &mut peer).0, [Said::Other(REKEY)]);
    assert_eq!(shard.held_bytes(), 0);
}

#[test]
fn all_replies_of_a_turn_are_sealed_once() {
    let (mut shard, id, mut peer) = ready(Limits::default());
    let sends = stats(&shard).sends;
    let shared = shard.shared(id).unwrap().clone();
    for reply in [&b"one"[..], b"two"] {
        shared.reply(reply.into());
    }
    let frame = Frame::new(ringserve_buf::Lease::copy_of(&[7; 40_000]), 0, 40_000);
    shared.write_payload((&frame).into());
    shard.turn(at(2));
    let batch = sent_to(&mut shard, id);
    let plain = [&wire(b"one")[..], &wire(b"two"), &frame].concat();
    assert_eq!((shared.outbox_bytes(), shard.held_bytes()), (plain.len() + 5, plain.len() + 5));
    let sent = stats(&shard).bytes_sent;
    assert_eq!(hear(&mut peer, &batch), [Said::Data(plain.clone())]);
    done(&mut shard, id, batch);
    assert_eq!((shared.outbox_bytes(), shard.held_bytes()), (0, 0));
    assert_eq!(stats(&shard).sends, sends + 1);
    assert_eq!(stats(&shard).bytes_sent - sent, plain.len() as u64 + 5);
}

#[test]
fn channel_hears_of_a_rest_before_what_follows_it() {
    let (mut shard, id) = starting(Limits::default(), Toy { tells_rests: true, ..TOY });
    let mut peer = Peer::default();
    shard.begin(at(1), 1);
    shard.receive(id, &peer.flights());
    shard.end();
    let mut said_at = |time: Time| {
        shard.shared(id).unwrap().write(b"x");
        shard.turn(time);
        leave(&mut shard, id, &mut peer).0
    };
    let start = at(1);
    said_at(start);
    let (x, after) = (Said::Data(b"x".to_vec()), |millis| start + Duration::from_millis(millis));
    assert_eq!(said_at(after(900)), [x]);
    let x = || Said::Data(b"x".to_vec());
    assert_eq!(said_at(after(1800)), [x()], "it counts from the last send");
    assert_eq!(said_at(after(2900)), [Said::Other(REST), x()]);
    assert_eq!(said_at(after(2950)), [x()]);
}

#[test]
fn what_was_lent_is_free_once_it_is_sealed() {
    let (mut shard, id, _) = ready(Limits::default());
    let dropped = Arc::new(());
    struct Owner(#[allow(dead_code)] Arc<()>, Vec<u8>);
    impl AsRef<[u8]> for Owner {
        fn as_ref(&self) -> &[u8] {
            &self.1
        }
    }
    let owned = bytes::Bytes::from_owner(Owner(dropped.clone(), vec![7; 40_000]));
    shard.shared(id).unwrap().write_payload(owned.into());
    assert_eq!(Arc::strong_count(&dropped), 2);
    shard.turn(at(2));
    assert_eq!(Arc::strong_count(&dropped), 1, "the send is in flight");
}

#[test]
fn stopped_send_goes_on_with_the_same_bytes() {
    let (mut shard, id, mut peer) = ready(Limits::default());
    shard.shared(id).unwrap().write(&[7; 1000]);
    shard.turn(at(2));
    let mut batch = sent_to(&mut shard, id);
    let all: Vec<u8> = batch.pieces().flatten().copied().collect();
    batch.advance(300);
    shard.begin(at(3), 1);
    shard.complete(Completion::Sent { id, batch, end: SendEnd::Stopped });
    shard.shared(id).unwrap().write(b"next");
    shard.end();
    let rest = sent_to(&mut shard, id);
    assert!(rest.pieces().flatten().eq(&all[300..]));
    assert_eq!(shard.held_bytes(), 705 + 4);
    let mut said = peer.hear(all);
    done(&mut shard, id, rest);
    said.extend(leave(&mut shard, id, &mut peer).0);
    assert_eq!(said, [Said::Data(vec![7; 1000]), Said::Data(b"next".to_vec())]);
}

#[test]
fn room_behind_a_send_is_forgotten_once_it_is_sealed() {
    let limits = Limits::default().outbox_bytes_max(1 << 20);
    let (mut shard, id, mut peer) = ready(limits);
    shard.shared(id).unwrap().write(&[7; 100_000]);
    shard.turn(at(2));
    let batch = sent_to(&mut shard, id);
    // Its large block, which is kept, takes a small reply.
    let before = shard.held_bytes();
    shard.shared(id).unwrap().write(b"small");
    shard.turn(at(3));
    assert!(shard.held_bytes() >= before + 90_000, "{}", shard.held_bytes());
    shard.begin(at(4), 1);
    done(&mut shard, id, batch);
    shard.end();
    assert!(shard.held_bytes() < 1000, "{}", shard.held_bytes());
    leave(&mut shard, id, &mut peer);
    assert_eq!(shard.held_bytes(), 0);
}

#[test]
fn peer_that_takes_nothing_is_held_back_by_what_is_sealed() {
    let limits = Limits::default().outbox_bytes_high(500).outbox_bytes_low(400);
    let (mut shard, id, mut peer) = ready(limits);
    // Beyond the mark only with the head of its record.
    shard.shared(id).unwrap().write(&[7; 498]);
    shard.turn(at(2));
    let batch = sent_to(&mut shard, id);
    shard.begin(at(2), 1);
    shard.receive(id, &peer.frame(b"waits"));
    shard.end();
    assert_eq!(taken(&mut shard), [[]; 0]);
    shard.begin(at(2), 1);
    done(&mut shard, id, batch);
    shard.end();
    assert_eq!(taken(&mut shard), [b"waits"]);
    assert_eq!(shard.held_bytes(), 0);
}

#[test]
fn start_of_a_record_is_held_and_has_its_time() {
    let limits = Limits { first_frame_timeout: None, idle_timeout: None, ..Limits::default() };
    let (mut shard, id, mut peer) = ready(limits);
    let record = peer.record(DATA, &[7; 19_000]);
    shard.begin(at(2), 1);
    shard.receive(id, &record[..9000]);
    shard.end();
    assert_eq!((shard.held_bytes(), shard.held_bytes_of(id, 3)), (9000, 0));
    shard.turn(at(3));
    assert_eq!(shard.held_bytes_of(id, 3), 9000);
    shard.check();
    // A byte in a second is too little.
    for second in 3..12 {
        shard.begin(at(second), 1);
        shard.receive(id, &record[9000 + second as usize..][..1]);
        shard.end();
        assert_eq!(shard.heard(), [], "{second} s");
    }
    for second in 12..22 {
        shard.turn(at(second));
        assert_eq!(shard.heard(), [], "{second} s");
    }
    (22..26).for_each(|second| shard.turn(at(second)));
    assert_eq!(leave(&mut shard, id, &mut peer).0, [Said::Other(CLOSE)]);
    shard.dispatch();
    let reason = CloseReason::ReadTooSlow;
    assert_eq!(shard.heard(), [Heard::Ended { id, reason, opened: true }]);
    assert_eq!(shard.held_bytes(), 0);
}

#[test]
fn much_of_a_record_is_not_too_slow() {
    let limits = Limits { first_frame_timeout: None, idle_timeout: None, ..Limits::default() };
    let (mut shard, id, mut peer) = ready(limits);
    let record = peer.record(DATA, &wire(&[7; 12_000]));
    for (second, piece) in record.chunks(300).enumerate() {
        shard.begin(at(2 + second as u64), 1);
        shard.receive(id, piece);
        shard.end();
    }
    assert_eq!((taken(&mut shard).len(), shard.heard()), (1, vec![]));
}

#[test]
fn large_frames_come_by_records_and_not_into_a_block() {
    let (mut shard, id, mut peer) = ready(Limits::default());
    shard.begin(at(2), 30);
    for part in wire(&[7; 300_000]).chunks(16_000) {
        shard.receive(id, &peer.record(DATA, part));
    }
    shard.end();
    assert_eq!(taken(&mut shard), [[7; 300_000]]);
    assert!(shard.ops().is_empty(), "the receive goes on");
}

#[test]
fn listener_without_a_transport_costs_nothing_beside_one_with() {
    let mut shard = secured(Limits::default(), TOY);
    shard.begin(Time::ZERO, 1);
    shard.complete(Completion::Accepted { listener: 1, socket: Socket(1), peer: None });
    let receives = |op| if let Op::Receive { id } = op { Some(id) } else { None };
    let id = shard.ops().into_iter().find_map(receives).unwrap();
    shard.receive(id, &wire(b"plain"));
    shard.end();
    assert_eq!(taken(&mut shard), [b"plain"]);
    let room = shard.channels.room() + shard.shard.shared.channels().room();
    assert_eq!((room, stats(&shard).handshakes_started), (0, 0));
}

/// Records that decode to a frame of 100 000 bytes each.
fn bombs(peer: &mut Peer, count: u8) -> Vec<u8> {
    (0..count).flat_map(|number| peer.record(GROWS, &[number])).collect()
}

#[test]
fn records_that_say_far_more_than_came_take_several_turns() {
    let (mut shard, id, mut peer) = ready(Limits::default());
    shard.bound_handshakes(1, 1);
    shard.begin(at(2), 3);
    shard.receive(id, &bombs(&mut peer, 20));
    shard.receive(id, &peer.frame(b"behind"));
    shard.complete(Completion::ReceiveEnded { id, end: ReceiveEnd::Eof });
    shard.end();
    let mut heard = Vec::new();
    for look in 0..7 {
        if look > 0 {
            assert_eq!(shard.heard(), [], "{look}");
            assert_eq!(shard.next_turn(), Some(at(2)), "{look}");
            shard.turn(at(2));
        }
        shard.check();
        let frames = taken(&mut shard);
        assert_eq!(frames.len(), 3, "{look}");
        heard.extend(frames.iter().map(|frame| (frame[0], frame.len())));
    }
    let expected = (0..20).map(|number| (number, GROWN_BYTES)).chain([(b'b', 6)]);
    assert!(heard.iter().copied().eq(expected), "{heard:?}");
    leave(&mut shard, id, &mut peer);
    let reason = CloseReason::PeerClosed;
    assert_eq!(shard.heard(), [Heard::Ended { id, reason, opened: true }]);
    assert_eq!(shard.held_bytes(), 0);
}

#[test]
fn nothing_is_unsealed_for_an_inbox_that_is_full() {
    let (mut shard, id, mut peer) = ready(Limits::default());
    shard.lane.parks = Some(0);
    shard.begin(at(2), 2);
    shard.receive(id, &bombs(&mut peer, 50));
    shard.receive(id, &peer.frame(b"behind"));
    shard.end();
    assert!(shard.ops().iter().any(|op| matches!(op, Op::ReceiveStop { .. })), "too much is kept");
    for _ in 0..10 {
        shard.turn(at(2));
        shard.check();
        assert!(shard.held_bytes() < 10 * GROWN_BYTES, "{} bytes are held", shard.held_bytes());
    }
    assert_ne!(shard.next_turn(), Some(at(2)), "it waits for nothing");
    let mut count = 0;
    while !shard.lane.calls.is_empty() {
        shard.begin(at(3), 0);
        shard.call_done();
        shard.end();
        shard.turn(at(3));
        shard.check();
        assert!(shard.held_bytes() < 10 * GROWN_BYTES, "{} bytes are held", shard.held_bytes());
        count += 1;
    }
    assert_eq!((count, taken(&mut shard).len(), shard.held_bytes()), (51, 51, 0));
    // And one that ends in the middle leaves nothing.
    shard.begin(at(4), 1);
    shard.receive(id, &bombs(&mut peer, 50));
    shard.end();
    shard.abort(id, CloseReason::Aborted);
    shard.turn(at(4));
    shard.check();
}
