//! Connects.

use super::*;

fn connecting(rig: &mut Rig, address: Address) -> ConnId {
    let id = ConnId::new(5, 1);
    rig.ring.submit(Op::Connect { id, address: Box::new(address) });
    rig.turn();
    id
}

fn local() -> Address {
    SocketAddr::from(([127, 0, 0, 1], 80)).into()
}

#[test]
fn a_connect_is_a_new_socket_in_the_table_and_then_a_connect() {
    let mut rig = Rig::new(8);
    let id = connecting(&mut rig, local());
    match &rig.ops()[..] {
        [RawOp::Install { id: installed, fd: 77 }, RawOp::Connect { id: connected, address }] => {
            assert_eq!((*installed, *connected, &**address), (id, id, &local()));
        }
        other => panic!("{other:?}"),
    }
    rig.says(Kind::Connect, id.bits(), 0, 0);
    rig.turn();
    assert_eq!(rig.seen(), [format!("Connected {{ id: {id}, result: Ok(()) }}")]);
    rig.ring.submit(Op::Receive { id });
    rig.turn();
    assert!(matches!(rig.ops()[..], [RawOp::Receive { .. }]));
}

#[test]
fn a_connect_that_is_stopped_ends_once() {
    let mut rig = Rig::new(8);
    let id = connecting(&mut rig, local());
    rig.ops();
    rig.ring.submit(Op::ConnectStop { id });
    rig.ring.submit(Op::ConnectStop { id });
    rig.turn();
    assert!(matches!(rig.ops()[..], [RawOp::CancelConnect { .. }]), "cancelled once");
    rig.says(Kind::CancelConnect, id.bits(), 0, 0);
    rig.says(Kind::Connect, id.bits(), -libc::ECANCELED, 0);
    rig.turn();
    assert_eq!(rig.seen(), [format!("Connected {{ id: {id}, result: Err({}) }}", libc::ECANCELED)]);
    // The connect is over: there is nothing to stop.
    rig.ring.submit(Op::ConnectStop { id });
    rig.ring.submit(Op::Close { id, how: CloseHow::Abort });
    rig.turn();
    assert!(matches!(rig.ops()[..], [RawOp::Close { .. }]));
    rig.says(Kind::Close, id.bits(), 0, 0);
    rig.turn();
    assert_eq!(rig.seen(), [format!("{id} closed")]);
    rig.says(Kind::Connect, id.bits(), 0, 0);
    rig.turn();
    assert_eq!((rig.seen().len(), rig.ring.anomalies().stale), (0, 1));
}

#[test]
fn socket_that_cannot_be_made_ends_the_connect_and_its_slot() {
    let mut rig = Rig::new(8);
    let id = connecting(&mut rig, Address::unix("/nowhere"));
    assert!(rig.ops().is_empty());
    rig.turn();
    assert_eq!(rig.seen(), [format!("Connected {{ id: {id}, result: Err({}) }}", libc::EAFNOSUPPORT)]);
    rig.ring.submit(Op::Close { id, how: CloseHow::Abort });
    rig.says(Kind::Close, id.bits(), -libc::EBADF, 0);
    rig.turn();
    assert_eq!(rig.seen(), [format!("{id} closed")]);
}

#[test]
fn cancel_that_misses_a_connect_is_repeated_until_it_ends() {
    let mut rig = Rig::new(8);
    let id = connecting(&mut rig, local());
    rig.ring.submit(Op::ConnectStop { id });
    rig.turn();
    rig.ops();
    missed(&mut rig, Kind::CancelConnect, id.bits(), 20);
    cancelled_again(&mut rig, Kind::CancelConnect, id.bits());
    rig.says(Kind::Connect, id.bits(), -libc::ECANCELED, 0);
    rig.says(Kind::CancelConnect, id.bits(), -libc::ENOENT, 0);
    rig.turn();
    assert_eq!(rig.seen().len(), 1);
    rig.kernel().now += Duration::from_secs(1);
    rig.turn();
    assert!(rig.ops().is_empty());
}
