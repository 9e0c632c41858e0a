//! Receives that end short of their buffer though more bytes wait: the bytes come all the same,
//! without a further edge.

use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;

use ringserve_buf::Block;
use ringserve_core::{Address, CloseHow, Completion, ConnId, Driver, Op};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, send, sendmsg};
use socket2::SockRef;

use super::Rig;
use super::common::small_epoll;

/// Sends a byte, and this process's standard error with it.
fn send_with_descriptor(socket: &UnixStream, byte: u8) {
    let descriptors = [std::io::stderr().as_fd().try_clone_to_owned().unwrap()];
    let borrowed = descriptors.each_ref().map(|descriptor| descriptor.as_fd());
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&borrowed)));
    let bytes = [std::io::IoSlice::new(std::slice::from_ref(&byte))];
    assert_eq!(sendmsg(socket, &bytes, &mut control, SendFlags::empty()), Ok(1));
}

/// A connection of the driver to a Unix socket, and its peer.
fn unix(rig: &mut Rig, name: &str) -> (UnixStream, ConnId) {
    let path: PathBuf = std::env::temp_dir().join(format!("ringserve-short-{}-{name}", std::process::id()));
    let listener = UnixListener::bind(&path).unwrap();
    let id = ConnId::new(0, 1);
    rig.driver.submit(Op::Connect { id, address: Address::unix(path.to_str().unwrap()).into() });
    rig.wait_for("the connection", |event| match event {
        Completion::Connected { id: of, result } if *of == id => Some(*result),
        _ => None,
    })
    .unwrap();
    std::fs::remove_file(path).unwrap();
    (listener.accept().unwrap().0, id)
}

#[test]
fn bytes_behind_urgent_data_are_read() {
    let mut rig = Rig::accepting(&small_epoll(4096, 64));
    let (mut client, id) = rig.connect(0);
    client.write_all(b"a").unwrap();
    assert_eq!(SockRef::from(&client).send_out_of_band(b"!").unwrap(), 1);
    client.write_all(b"b").unwrap();
    rig.driver.submit(Op::Receive { id });
    assert_eq!(rig.received_bytes(id, 2), b"ab");
    // Alone, it is no byte of the stream, and costs two receives.
    assert_eq!(SockRef::from(&client).send_out_of_band(b"!").unwrap(), 1);
    rig.calm();
    client.write_all(b"c").unwrap();
    assert_eq!(rig.received_bytes(id, 1), b"c");
    rig.calm();
    rig.driver.submit(Op::ReceiveStop { id });
    rig.receive_ended(id);
    rig.close(id, CloseHow::Abort);
    rig.settled();
}

#[test]
fn bytes_behind_urgent_data_are_read_into_a_large_frame() {
    let mut rig = Rig::accepting(&small_epoll(4096, 64));
    let (mut client, id) = rig.connect(0);
    client.write_all(b"a").unwrap();
    assert_eq!(SockRef::from(&client).send_out_of_band(b"!").unwrap(), 1);
    client.write_all(b"b").unwrap();
    let mut block = Box::new(Block::default());
    assert!(block.make_room(100, 100));
    let (block, ..) = rig.fill(id, block, 100);
    let (block, ..) = rig.fill(id, block, 99);
    assert_eq!(**block, *b"ab");
    rig.close(id, CloseHow::Abort);
    rig.settled();
}

#[test]
fn bytes_behind_urgent_data_of_a_unix_socket_are_read() {
    let mut rig = Rig::new(&small_epoll(4096, 64));
    let (mut peer, id) = unix(&mut rig, "urgent");
    peer.write_all(b"a").unwrap();
    // Before Linux 5.15, or without the option, there is none.
    if send(&peer, b"!", SendFlags::OOB).is_err() {
        return eprintln!("skipped: Unix sockets have no urgent data here");
    }
    peer.write_all(b"b").unwrap();
    rig.driver.submit(Op::Receive { id });
    assert_eq!(rig.received_bytes(id, 2), b"ab");
}

#[test]
fn bytes_behind_descriptors_are_read() {
    let mut rig = Rig::new(&small_epoll(4096, 64));
    let (mut peer, id) = unix(&mut rig, "descriptors");
    send_with_descriptor(&peer, b'a');
    peer.write_all(b"b").unwrap();
    send_with_descriptor(&peer, b'c');
    send_with_descriptor(&peer, b'd');
    peer.write_all(&[b'e'; 10_000]).unwrap();
    rig.driver.submit(Op::Receive { id });
    let bytes = rig.received_bytes(id, 10_004);
    assert_eq!(&bytes[..5], b"abcde");
    rig.driver.submit(Op::ReceiveStop { id });
    rig.receive_ended(id);
    rig.close(id, CloseHow::Orderly);
    rig.settled();
}
