//! The limit on descriptors. It is the process's, so this is the only test in this file.

mod common;

use std::io::Read;
use std::net::TcpStream;

use common::{Rig, small};
use ringserve_core::{AcceptEnd, CloseHow, Completion, Driver, Op, Wait};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

fn accept_ended(rig: &mut Rig) -> AcceptEnd {
    rig.wait_for("AcceptEnded", |event| match event {
        Completion::AcceptEnded { end, .. } => Some(*end),
        _ => None,
    })
}

#[test]
fn at_the_descriptor_limit_accepting_ends_and_the_queued_connection_survives() {
    let mut rig = Rig::accepting(&small());
    let (_first, id) = rig.connect(0);
    // An armed accept goes by the limit of when it was armed (seen on 6.18).
    rig.ring.submit(Op::AcceptStop { listener: 0 });
    assert_eq!(accept_ended(&mut rig), AcceptEnd::Stopped);
    rig.turn(Wait::No);
    let limit = getrlimit(Resource::Nofile);
    let next = rustix::io::dup(std::io::stdin()).unwrap();
    let number = std::os::fd::AsRawFd::as_raw_fd(&next) as u64;
    drop(next);
    // The client gets the last one.
    setrlimit(Resource::Nofile, Rlimit { current: Some(number + 1), maximum: limit.maximum }).unwrap();
    let mut client = TcpStream::connect(rig.address).unwrap();
    rig.ring.submit(Op::Accept { listener: 0 });
    assert_eq!(accept_ended(&mut rig), AcceptEnd::Descriptors);
    setrlimit(Resource::Nofile, limit).unwrap();
    rig.ring.submit(Op::Accept { listener: 0 });
    let (socket, peer) = rig.accepted();
    assert_eq!(peer, client.local_addr().unwrap());
    let second = rig.adopt(1, socket);
    rig.close(second, CloseHow::Orderly);
    assert_eq!(client.read(&mut [0; 4]).unwrap(), 0);
    rig.close(id, CloseHow::Orderly);
    rig.settled();
}
