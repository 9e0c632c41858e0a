//! Receives into a block, on the kernel of this machine, with both drivers.

mod common;

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;

use common::{EpollRig, Rig, Tested, UringRig, pattern, small, small_epoll};
use ringserve_buf::Block;
use ringserve_core::{CloseHow, Driver, Op, ReceiveEnd, Wait};

/// Buffers are of 4096 bytes.
fn uring() -> UringRig {
    Rig::accepting(&small())
}

fn epoll() -> EpollRig {
    Rig::accepting(&small_epoll(4096, 64))
}

fn takes_what_may_come_and_leaves_the_rest<D: Tested>(mut rig: Rig<D>) {
    let (mut client, id) = rig.connect(0);
    let bytes = pattern(1, 100_000);
    client.write_all(&bytes).unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    let mut block = Box::new(Block::default());
    assert!(block.make_room(200_000, 200_000));
    while block.len() < 90_000 {
        let most = (90_000 - block.len()).min(60_000);
        let (back, count, end) = rig.fill(id, block, most);
        assert!((1..=most).contains(&count) && end == ReceiveEnd::Stopped, "{count} {end:?}");
        block = back;
    }
    assert!(**block == bytes[..90_000]);
    rig.driver.submit(Op::ReceiveOnce { id, several: false });
    assert_eq!(*rig.received(id), bytes[90_000..94_096], "one buffer");
    assert_eq!(rig.receive_ended(id), ReceiveEnd::Stopped);
    while block.len() < 95_904 {
        block = rig.fill(id, block, 100_000).0;
    }
    assert!(block[90_000..] == bytes[94_096..]);
    let (_, count, end) = rig.fill(id, block, 1);
    assert_eq!((count, end), (0, ReceiveEnd::Eof));
    rig.close(id, CloseHow::Orderly);
    rig.settled();
}

#[test]
fn receive_into_a_block_leaves_the_rest_on_io_uring() {
    takes_what_may_come_and_leaves_the_rest(uring());
}

#[test]
fn receive_into_a_block_leaves_the_rest_on_epoll() {
    takes_what_may_come_and_leaves_the_rest(epoll());
}

fn is_cancelled_and_nothing_is_lost<D: Tested>(mut rig: Rig<D>) {
    for is_ended_by_peer in [true, false] {
        let (mut client, id) = rig.connect(0);
        let mut block = Box::new(Block::default());
        assert!(block.put(b"abc", 3) && block.make_room(10, 10));
        rig.driver.submit(Op::ReceiveInto { id, block, most: 10 });
        rig.turn(Wait::No);
        rig.driver.submit(Op::ReceiveStop { id });
        let (block, count, end) = rig.filled(id);
        assert_eq!((&**block, count, end), (&b"abc"[..], 0, ReceiveEnd::Stopped));
        client.write_all(b"d").unwrap();
        let (block, count, end) = rig.fill(id, block, 10);
        assert_eq!((&**block, count, end), (&b"abcd"[..], 1, ReceiveEnd::Stopped));
        rig.driver.submit(Op::ReceiveInto { id, block, most: 9 });
        rig.turn(Wait::No);
        if is_ended_by_peer {
            client.shutdown(Shutdown::Write).unwrap();
            let (_, count, end) = rig.filled(id);
            assert_eq!((count, end), (0, ReceiveEnd::Eof));
            rig.close(id, CloseHow::Orderly);
        } else {
            rig.driver.submit(Op::ShutdownInput { id });
            let (_, count, end) = rig.filled(id);
            assert!(count == 0 && matches!(end, ReceiveEnd::Eof | ReceiveEnd::Stopped), "{count} {end:?}");
            rig.close(id, CloseHow::Abort);
        }
    }
    rig.settled();
}

#[test]
fn cancelled_receive_into_a_block_loses_nothing_on_io_uring() {
    is_cancelled_and_nothing_is_lost(uring());
}

#[test]
fn cancelled_receive_into_a_block_loses_nothing_on_epoll() {
    is_cancelled_and_nothing_is_lost(epoll());
}

#[test]
fn driver_ends_a_receive_into_a_block_before_itself() {
    let mut rig = uring();
    let (mut client, id) = rig.connect(0);
    let mut block = Box::new(Block::default());
    assert!(block.make_room(100, 100));
    rig.driver.submit(Op::ReceiveInto { id, block, most: 100 });
    rig.turn(Wait::No);
    drop(rig);
    // The kernel has released the socket.
    let _ = client.write_all(b"late");
    let ended = match client.read(&mut [0; 1]) {
        Ok(count) => count == 0,
        Err(error) => error.kind() == ErrorKind::ConnectionReset,
    };
    assert!(ended);
}
