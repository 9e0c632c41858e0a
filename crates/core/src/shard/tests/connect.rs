//! Connections that are made, or handed on to another shard.

use super::*;

fn address() -> Address {
    core::net::SocketAddr::from(([127, 0, 0, 1], 80)).into()
}

/// A shard that connects, with names from `first` on.
fn connecting(limits: Limits, first: u32, max: usize) -> (Tested, ConnId) {
    let mut shard = Tested::new(limits, max, 0);
    shard.number_from(first);
    shard.begin(Time::ZERO, 0);
    let id = shard.connect(address(), ()).unwrap();
    shard.end();
    let ops = shard.ops();
    assert!(matches!(&ops[..], [Op::Connect { id: of, address: to }] if *of == id && **to == address()));
    (shard, id)
}

#[test]
fn a_connection_that_is_made_receives_once_it_is_there() {
    let (mut shard, id) = connecting(Limits::default(), 1000, 1);
    assert_eq!((id.slot(), shard.connect(address(), ())), (1000, None));
    shard.begin(at(1), 0);
    shard.complete(Completion::Connected { id, result: Ok(()) });
    assert_eq!(shard.heard(), [Heard::Connected(id)]);
    shard.receive_part(id, &[0, 0]);
    shard.end();
    assert!(shard.take_ops().any(|op| matches!(op, Op::Receive { id: of } if of == id)));
    assert_eq!(shard.counters().opened, 1);
}

#[test]
fn connection_that_cannot_be_made_ends_and_frees_its_slot() {
    let (mut shard, id) = connecting(Limits::default(), 0, 1);
    shard.begin(at(1), 0);
    shard.complete(Completion::Connected { id, result: Err(111) });
    let reason = CloseReason::ConnectFailed(111);
    assert_eq!(shard.heard(), [Heard::Ended { id, reason, opened: false }]);
    shard.end();
    let close = shard.take_ops().next();
    assert!(matches!(close, Some(Op::Close { how: CloseHow::Abort, .. })));
    shard.complete(Completion::Closed { id });
    assert!(shard.connect(address(), ()).is_some());
}

#[test]
fn connect_that_takes_too_long_is_stopped_then_closed() {
    let (mut shard, id) =
        connecting(Limits { connect_timeout: Some(Duration::from_secs(3)), ..Limits::default() }, 70_000, 1);
    shard.turn(at(2));
    assert_eq!(shard.take_ops().count(), 0);
    shard.begin(at(4), 0);
    let reason = CloseReason::ConnectTimeout;
    assert_eq!(shard.heard(), [Heard::Ended { id, reason, opened: false }]);
    shard.end();
    assert!(matches!(shard.ops()[..], [Op::ConnectStop { .. }]));
    // It came after all.
    shard.complete(Completion::Connected { id, result: Ok(()) });
    assert_eq!(shard.heard(), []);
    shard.end();
    assert!(matches!(shard.ops()[..], [Op::Close { .. }]));
}

#[test]
fn all_are_closed_and_none_is_made_any_more() {
    let (mut shard, id) = connecting(Limits::default(), 0, 3);
    shard.complete(Completion::Connected { id, result: Ok(()) });
    let second = shard.connect(address(), ()).unwrap();
    shard.end();
    shard.ops();
    shard.close_all(Time::from_nanos(u64::MAX));
    assert_eq!(shard.connect(address(), ()), None);
    shard.end();
    let ops = shard.ops();
    let stops = |op: &Op| matches!(op, Op::ConnectStop { id } if *id == second);
    assert!(ops.iter().any(|op| matches!(op, Op::Shutdown { .. })) && ops.iter().any(stops), "{ops:?}");
    assert_eq!(shard.counters().closed_for(CloseReason::Shutdown), 2);
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
    shard.handed_off();
    assert_eq!((shard.slots_left(), shard.counters().handed_off), (1, 1));
    shard.dispatch();
    assert_eq!(shard.heard(), [Heard::Accepted(Socket(1))]);
    assert!(shard.admit(Socket(1), None, 0, ()).is_some());
}
