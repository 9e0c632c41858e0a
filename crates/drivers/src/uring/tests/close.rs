//! Closes of connections whose receive was never found.

use super::*;

/// A connection whose receive was never found.
fn doubtful(rig: &mut Rig) -> ConnId {
    let id = rig.receiving(1, 1);
    rig.ring.submit(Op::ReceiveStop { id });
    rig.turn();
    rig.ops();
    missed(rig, Kind::CancelReceive, id.bits(), 5);
    assert_eq!(rig.seen(), ["1.1 Stopped"]);
    id
}

#[test]
fn receive_never_found_is_proven_gone_before_its_slot_is_free() {
    let mut rig = Rig::new(8);
    let id = doubtful(&mut rig);
    rig.ring.submit(Op::Close { id, how: CloseHow::Abort });
    rig.turn();
    assert!(matches!(rig.ops()[..], [RawOp::ShutdownInput { .. }]), "before anything is closed");
    // The receive lived after all: its bytes go to no connection.
    rig.says_bytes(id, 3, F_MORE);
    rig.says(Kind::Receive, id.bits(), 0, 0);
    rig.says(Kind::Shutdown, id.bits(), 0, 0);
    rig.turn();
    rig.turn();
    assert!(matches!(rig.ops()[..], [RawOp::CancelReceive { .. }]));
    // Anything but "not found" proves nothing.
    rig.says(Kind::CancelReceive, id.bits(), 0, 0);
    rig.turn();
    cancelled_again(&mut rig, Kind::CancelReceive, id.bits());
    rig.says(Kind::CancelReceive, id.bits(), -libc::ENOENT, 0);
    rig.turn();
    rig.turn();
    assert!(matches!(rig.ops()[..], [RawOp::Close { how: CloseHow::Abort, .. }]));
    rig.says(Kind::Close, id.bits(), 0, 0);
    rig.turn();
    assert_eq!(rig.seen(), ["1.1 closed"]);
    assert_eq!((rig.ring.anomalies().late_ends, rig.ring.anomalies().stale), (2, 0));
    assert_eq!(rig.ring.pool().counts().leased, 0);
}

/// The kernel's behaviour on which the proof rests: an armed receive has ended when the shutdown is
/// reaped.
#[test]
fn a_shutdown_of_the_input_ends_the_receive_first() {
    let config = crate::UringConfig {
        connections: 4,
        pool: PoolConfig { buffer_bytes: 64, buffers_max: 64, poison: true },
        ..crate::UringConfig::default()
    };
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut ring = Uring::new(&config, Vec::new()).unwrap();
    for round in 0..100u64 {
        let client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let socket = ring.take_over(listener.accept().unwrap().0.into());
        let id = ConnId::new(1, round);
        ring.submit(Op::Adopt { id, socket });
        ring.submit(Op::Receive { id });
        ring.turn(Wait::No, Budget::default(), &mut Vec::new()).unwrap();
        if round % 2 == 1 {
            std::io::Write::write_all(&mut &client, &[7; 200]).unwrap();
        }
        assert!(ring.kernel.submit(RawOp::ShutdownInput { id }).is_ok());
        let mut ends = Vec::new();
        while !ends.contains(&Kind::Shutdown) {
            ring.kernel.enter(1, Some(Duration::from_secs(10))).unwrap();
            while let Some(cqe) = ring.kernel.reap(&mut ring.side) {
                let lease = ring.buffers.arrived(&mut ring.side, &cqe);
                if cqe.flags & F_MORE == 0 {
                    ends.extend(Kind::of(cqe.user_data));
                }
                drop(lease);
            }
        }
        assert_eq!(ends, [Kind::Receive, Kind::Shutdown], "round {round}");
        assert!(ring.kernel.submit(RawOp::Close { id, how: CloseHow::Abort }).is_ok());
        ring.kernel.enter(1, None).unwrap();
        assert_eq!(ring.kernel.reap(&mut ring.side).map(|cqe| cqe.res), Some(0));
        ring.ports.close(id);
    }
}

#[test]
fn a_connection_whose_receive_was_never_found_receives_no_more() {
    let mut rig = Rig::new(8);
    let id = doubtful(&mut rig);
    rig.ring.submit(Op::Receive { id });
    rig.turn();
    assert!(rig.ops().is_empty(), "a second receive could not be told from the first");
    assert_eq!(rig.seen(), [format!("1.1 Error({})", libc::EIO)]);
}
