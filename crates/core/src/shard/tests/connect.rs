//! Connections that are made, or handed on to another shard.

use super::*;

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
        connecting(Limits { connect_timeout: Some(Duration::from_secs(3)), ..Limits::default() }, 70_000, 1);
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
