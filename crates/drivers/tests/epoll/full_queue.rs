//! Connects to a Unix socket whose queue is full, which no event reports.

use std::path::{Path, PathBuf};

use ringserve_core::{Address, CloseHow, Completion, ConnId, Driver, Op, Wait};
use socket2::{Domain, SockAddr, Socket, Type};

use super::Rig;
use super::common::small_epoll;

/// A listener with a full queue, and how many are in it.
fn full(name: &str) -> (Socket, usize, PathBuf) {
    let path = std::env::temp_dir().join(format!("ringserve-full-{}-{name}", std::process::id()));
    let addr = SockAddr::unix(&path).unwrap();
    let socket = || {
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
        socket.set_nonblocking(true).unwrap();
        socket
    };
    let listener = socket();
    listener.bind(&addr).unwrap();
    listener.listen(1).unwrap();
    // Closed at once, and still in the queue.
    let queued = (0..8).take_while(|_| socket().connect(&addr).is_ok()).count();
    (listener, queued, path)
}

/// Begins these connects.
fn begin(rig: &mut Rig, path: &Path, count: u32) -> Vec<ConnId> {
    let ids: Vec<ConnId> = (0..count).map(|n| ConnId::new(n, 1)).collect();
    for id in &ids {
        rig.driver.submit(Op::Connect { id: *id, address: Address::unix(path.to_str().unwrap()).into() });
    }
    ids
}

fn connected(rig: &mut Rig, id: ConnId) -> Result<(), i32> {
    rig.wait_for("Connected", |event| match event {
        Completion::Connected { id: of, result } if *of == id => Some(*result),
        _ => None,
    })
}

#[test]
fn full_queue_is_tried_again_until_there_is_room() {
    let mut rig = Rig::new(&small_epoll(4096, 64));
    let (listener, queued, path) = full("again");
    let ids = begin(&mut rig, &path, 4);
    rig.calm();
    assert!(rig.events.is_empty(), "{:?}", rig.events);
    let accept = |rig: &mut Rig| loop {
        match listener.accept() {
            Ok((socket, _)) => break socket,
            Err(_) => drop(rig.turn(Wait::Forever)),
        }
    };
    let peers: Vec<Socket> = (0..queued + ids.len()).map(|_| accept(&mut rig)).collect();
    for id in &ids {
        assert_eq!(connected(&mut rig, *id), Ok(()));
        rig.driver.submit(Op::Receive { id: *id });
    }
    peers[queued..].iter().for_each(|peer| assert_eq!(peer.send(b"x").unwrap(), 1));
    for id in ids {
        assert_eq!(rig.received_bytes(id, 1), b"x");
        rig.driver.submit(Op::ReceiveStop { id });
        rig.receive_ended(id);
        rig.close(id, CloseHow::Orderly);
    }
    rig.settled();
    std::fs::remove_file(path).unwrap();
}

#[test]
fn wait_for_a_full_queue_is_stopped_and_ends_with_its_listener() {
    let mut rig = Rig::new(&small_epoll(4096, 64));
    let (listener, _, path) = full("stopped");
    let ids = begin(&mut rig, &path, 2);
    rig.driver.submit(Op::ConnectStop { id: ids[0] });
    assert_eq!(connected(&mut rig, ids[0]), Err(libc::ECANCELED));
    drop(listener);
    std::fs::remove_file(path).unwrap();
    assert!(connected(&mut rig, ids[1]).is_err());
    ids.into_iter().for_each(|id| rig.close(id, CloseHow::Abort));
    rig.settled();
}
