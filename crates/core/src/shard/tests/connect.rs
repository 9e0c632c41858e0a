//! Connections that are made, or handed on to another shard.

use super::*;

fn address() -> Address {
    core::net::SocketAddr::from(([127, 0, 0, 1], 80)).into()
}

/// A shard that connects on a lane for at most `max`.
fn connecting(limits: impl Into<Bounds>, max: usize) -> (Tested, LaneId, ConnId) {
    let mut shard = Tested::new(limits, 1, 0);
    let lane = shard.add_outbound(Limits::default(), max, encoding());
    shard.begin(Time::ZERO, 0);
    let id = shard.connect(lane, address(), ()).unwrap();
    shard.end();
    let ops = shard.ops();
    assert!(matches!(&ops[..], [Op::Connect { id: of, address: to }] if *of == id && **to == address()));
    (shard, lane, id)
}

#[test]
fn a_connection_that_is_made_receives_once_it_is_there() {
    let (mut shard, lane, id) = connecting(Limits::default(), 1);
    assert_eq!((shard.lane_of(id), shard.connect(lane, address(), ())), (Some(lane), None));
    shard.begin(at(1), 0);
    shard.complete(Completion::Connected { id, result: Ok(()) });
    assert_eq!(shard.heard(), [Heard::Connected(id)]);
    shard.receive_part(id, &[0, 0]);
    shard.end();
    assert!(shard.take_ops().any(|op| matches!(op, Op::Receive { id: of } if of == id)));
    assert_eq!((shard.counters(lane).opened, shard.counters(LaneId::FIRST).opened), (1, 0));
    assert_eq!((shard.connections(lane), shard.connections(LaneId::FIRST)), (1, 0));
}

#[test]
fn connection_that_cannot_be_made_ends_and_frees_its_slot() {
    let (mut shard, lane, id) = connecting(Limits::default(), 1);
    shard.begin(at(1), 0);
    shard.complete(Completion::Connected { id, result: Err(111) });
    let reason = CloseReason::ConnectFailed(111);
    assert_eq!(shard.heard(), [Heard::Ended { id, reason, opened: false }]);
    shard.end();
    let close = shard.take_ops().next();
    assert!(matches!(close, Some(Op::Close { how: CloseHow::Abort, .. })));
    shard.complete(Completion::Closed { id });
    assert!(shard.connect(lane, address(), ()).is_some());
}

#[test]
fn connect_that_takes_too_long_is_stopped_then_closed() {
    let limits = ServerLimits { connect_timeout: Some(Duration::from_secs(3)), ..ServerLimits::default() };
    let (mut shard, _, id) = connecting(limits, 1);
    shard.turn(at(2));
    assert_eq!(shard.take_ops().count(), 0);
    shard.begin(at(4), 0);
    let reason = CloseReason::ConnectTimeout;
    assert_eq!(shard.heard(), [Heard::Ended { id, reason, opened: false }]);
    shard.end();
    assert!(matches!(shard.ops()[..], [Op::ConnectStop { .. }]));
    // The connect succeeded after all.
    shard.complete(Completion::Connected { id, result: Ok(()) });
    assert_eq!(shard.heard(), []);
    shard.end();
    assert!(matches!(shard.ops()[..], [Op::Close { .. }]));
}

#[test]
fn upstreams_outlive_the_last_accepted_connection_of_a_drain() {
    let (mut shard, accepted) = with_connection(Limits::default());
    let lane = shard.add_outbound(Limits::default(), 3, encoding());
    let first = shard.connect(lane, address(), ()).unwrap();
    shard.begin(at(1), 0);
    shard.complete(Completion::Connected { id: first, result: Ok(()) });
    shard.lane.parks = Some(0);
    shard.receive(accepted, &[0, 0, 0, 0]);
    shard.end();
    shard.drain();
    let listener = 0;
    shard.complete(Completion::AcceptEnded { listener, end: crate::AcceptEnd::Closed });
    // Long enough for every look at arriving bytes, and shorter than the drain limit.
    (1..100).for_each(|turn| shard.turn(at(1) + Duration::from_millis(10 * turn)));
    let second = shard.connect(lane, address(), ()).expect("the call that waits may still connect");
    shard.ops();
    shard.heard();

    shard.call_done();
    shard.turn(at(3));
    assert!(shard.ops().iter().any(|op| matches!(op, Op::Shutdown { id } if *id == accepted)));
    for completion in [
        Completion::ShutDown { id: accepted },
        Completion::ReceiveEnded { id: accepted, end: crate::ReceiveEnd::Eof },
        Completion::Closed { id: accepted },
    ] {
        assert_eq!(shard.connections(lane), 2, "upstreams are left alone");
        shard.complete(completion);
    }
    shard.end();
    assert_eq!(shard.connect(lane, address(), ()), None);
    let ops = shard.ops();
    let stops = |op: &Op| matches!(op, Op::ConnectStop { id } if *id == second);
    let shuts = |op: &Op| matches!(op, Op::Shutdown { id } if *id == first);
    assert!(ops.iter().any(shuts) && ops.iter().any(stops), "{ops:?}");
    assert_eq!(shard.counters(lane).closed_for(CloseReason::Shutdown), 2);
    assert!(!shard.is_done());
    shard.complete(Completion::Connected { id: second, result: Err(125) });
    shard.complete(Completion::ShutDown { id: first });
    shard.complete(Completion::ReceiveEnded { id: first, end: crate::ReceiveEnd::Eof });
    for id in [first, second] {
        shard.complete(Completion::Closed { id });
    }
    assert!(shard.is_done());
}

#[test]
fn upstreams_have_no_drain_limit_beside_that_of_the_shard() {
    let drain_timeout = Duration::from_secs(10);
    let limits = Limits { write_stall_timeout: None, ..Limits::default() };
    let server = ServerLimits { drain_timeout, ..ServerLimits::default() };
    let (mut shard, accepted) = with_connection((server, limits.clone()));
    let lane = shard.add_outbound(limits, 1, encoding());
    let upstream = shard.connect(lane, address(), ()).unwrap();
    shard.begin(at(1), 0);
    shard.complete(Completion::Connected { id: upstream, result: Ok(()) });
    // Its peer takes nothing.
    shard.shared(upstream).unwrap().reply(Payload::from(&[7; 8][..]));
    shard.drain();
    shard.complete(Completion::AcceptEnded { listener: 0, end: crate::AcceptEnd::Closed });
    shard.abort(accepted, CloseReason::Aborted);
    shard.complete(Completion::ReceiveEnded { id: accepted, end: crate::ReceiveEnd::Eof });
    shard.end();
    shard.begin(at(9), 0);
    shard.complete(Completion::Closed { id: accepted });
    shard.end();
    assert!(shard.shared(upstream).is_some_and(|shared| shared.is_gone()), "it goes after what is queued");
    shard.turn(at(11));
    assert_eq!(shard.counters(lane).closed_for(CloseReason::DrainTimeout), 1);
}

#[test]
fn abort_resets_upstreams_together_with_the_others() {
    let (mut shard, lane, _) = connecting(Limits::default(), 2);
    let second = shard.connect(lane, address(), ()).unwrap();
    shard.complete(Completion::Connected { id: second, result: Ok(()) });
    shard.abort_all();
    shard.end();
    assert_eq!(shard.counters(lane).closed_for(CloseReason::ServerAborted), 2);
    assert_eq!(shard.connect(lane, address(), ()), None);
}

#[test]
fn a_socket_handed_off_leaves_its_place_to_the_next() {
    let mut shard = Tested::new(Limits::default(), 2, 1);
    shard.lane.leaves_sockets = true;
    shard.share_quota(Arc::new(Quota::new(1)));
    shard.begin(Time::ZERO, 0);
    for number in 0..2 {
        shard.complete(Completion::Accepted { listener: 0, socket: Socket(number), peer: None });
    }
    assert_eq!(shard.heard(), [Heard::Accepted(Socket(0))], "the quota is used up");
    shard.handed_off(0, None);
    assert_eq!((shard.slots_left(), shard.counters(LaneId::FIRST).handed_off), (1, 1));
    shard.dispatch();
    assert_eq!(shard.heard(), [Heard::Accepted(Socket(1))]);
    assert!(shard.admit::<()>(Socket(1), None, 0).is_some());
}
