//! What hardly any seed of the simulator meets. Everything else about a shard is tested there.

use alloc::boxed::Box;
use alloc::sync::Arc;
use core::time::Duration;

use ringserve_buf::{Lease, Pool, PoolConfig};

use super::{Event, Next, Quota, Shard};
use crate::framing::LengthPrefix;
use crate::{Batch, Completion, ConnId, Limits, Op, Payload, SendEnd, Socket, Time, Wait};

type Tested = Shard<(), LengthPrefix>;

fn at(seconds: u64) -> Time {
    Time::ZERO + Duration::from_secs(seconds)
}

/// A shard with one connection.
fn with_connection(limits: Limits) -> (Tested, ConnId) {
    let (pool, _side) = Pool::new(PoolConfig::default()).unwrap();
    let mut shard = Shard::new(limits, 1, 1, LengthPrefix::default(), pool, ());
    shard.begin_turn(Time::ZERO);
    shard.complete(Completion::Accepted { listener: 0, socket: Socket(3), peer: None });
    let Some(Event::Accepted { socket, .. }) = shard.next_event() else { panic!("a connection") };
    let id = shard.admit(socket, None, 0, ()).unwrap();
    shard.opened(id);
    shard.end_turn();
    shard.take_ops().for_each(drop);
    (shard, id)
}

fn receive(shard: &mut Tested, id: ConnId, bytes: &[u8]) {
    shard.complete(Completion::Received { id, lease: Lease::copy_of(bytes) });
    if shard.take_frames().is_some() {
        assert!(matches!(shard.next_frame(id), Next::Nothing), "a frame");
    }
}

/// Sends a reply of 100 bytes, behind which the peer is held back in the middle of a frame.
fn hold_back(shard: &mut Tested, id: ConnId) -> Box<Batch> {
    shard.begin_turn(at(1));
    receive(shard, id, &[0, 0, 0, 9, b'h']);
    shard.block(id).unwrap().link.reply(Payload::Bytes(&[b'r'; 100]));
    shard.end_turn();
    let send =
        shard.take_ops().find_map(|op| if let Op::Send { batch, .. } = op { Some(batch) } else { None });
    shard.begin_turn(at(2));
    receive(shard, id, b"a");
    shard.end_turn();
    send.expect("the reply is sent")
}

#[test]
fn who_waits_for_the_outbox_hears_of_a_send_that_was_stopped_and_goes_on() {
    let (mut shard, id) =
        with_connection(Limits { outbox_bytes_high: 10, outbox_bytes_low: 5, ..Limits::default() });
    let mut batch = hold_back(&mut shard, id);
    shard.begin_turn(at(3));
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
        handler: None,
        ..Limits::default()
    });
    let mut batch = hold_back(&mut shard, id);
    // The limits of the half frame, and of a peer that is silent, go off and find that it is held back.
    for seconds in 3..40 {
        shard.begin_turn(at(seconds));
        shard.end_turn();
    }
    shard.begin_turn(at(40));
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
        shard.begin_turn(at(40) + waited);
        shard.end_turn();
    }
    assert!(window.contains(&waited) && shard.block(id).is_none(), "closed after {waited:?}");
    assert_eq!(shard.counters().closed_for(crate::CloseReason::ReadTooSlow), 1);
}

#[test]
fn a_socket_given_away_leaves_its_place_to_the_next() {
    let (pool, _side) = Pool::new(PoolConfig::default()).unwrap();
    let mut shard: Tested = Shard::new(Limits::default(), 2, 1, LengthPrefix::default(), pool, ());
    shard.share_quota(Arc::new(Quota::new(1)));
    shard.begin_turn(Time::ZERO);
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
