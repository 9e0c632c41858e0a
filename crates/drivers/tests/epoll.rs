//! The epoll driver on the kernel of this machine: one connection's life.

mod common;
#[path = "epoll/full_queue.rs"]
mod full_queue;
#[path = "epoll/limits.rs"]
mod limits;
#[path = "epoll/pressure.rs"]
mod pressure;
#[path = "epoll/short.rs"]
mod short;

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::Duration;

use common::{EpollRig as Rig, pattern, small_epoll};
use ringserve_buf::Lease;
use ringserve_core::{Batch, CloseHow, Completion, ConnId, Driver, Op, ReceiveEnd, SendEnd, Socket, Wait};
use socket2::SockRef;

/// Resets the connection.
fn reset(client: TcpStream) {
    SockRef::from(&client).set_linger(Some(Duration::ZERO)).unwrap();
    drop(client);
}

#[test]
fn what_is_sent_is_what_was_received() {
    let mut rig = Rig::accepting(&small_epoll(4096, 64));
    let (mut client, id) = rig.connect_receiving(0);
    for len in [1, 64, 4095, 4096, 4097, 50_000] {
        let bytes = pattern(len, len);
        client.write_all(&bytes).unwrap();
        let got = rig.received_bytes(id, len);
        assert!(got == bytes);
        rig.send(id, &got);
        assert_eq!(rig.sent(id), (SendEnd::Done, 0));
        let mut back = vec![0; len];
        client.read_exact(&mut back).unwrap();
        assert!(back == bytes, "{len} bytes came back changed");
    }
    drop(client);
    assert_eq!(rig.receive_ended(id), ReceiveEnd::Eof);
    rig.close(id, CloseHow::Orderly);
    rig.settled();
}

#[test]
fn a_reset_that_a_send_heard_of_is_no_end_of_the_stream() {
    let mut rig = Rig::accepting(&small_epoll(4096, 64));
    let (client, id) = rig.connect(0);
    reset(client);
    // The socket reports its error once, and a later receive finds what looks like the peer's FIN.
    loop {
        rig.send(id, b"x");
        if rig.sent(id).0 != SendEnd::Done {
            break;
        }
    }
    rig.driver.submit(Op::Receive { id });
    assert!(matches!(rig.receive_ended(id), ReceiveEnd::Error(_)));
    rig.close(id, CloseHow::Abort);
    rig.settled();
}

#[test]
fn a_batch_of_many_pieces_leaves_in_order() {
    let mut rig = Rig::accepting(&small_epoll(4096, 64));
    let (mut client, id) = rig.connect(0);
    let mut batch = Box::new(Batch::new());
    let mut expected = Vec::new();
    for n in 0..70 {
        let (copied, lent) = (pattern(n, 3 + n), pattern(n + 100, 500 + n));
        batch.put(&copied);
        batch.lend(Lease::copy_of(&lent));
        expected.extend(copied.into_iter().chain(lent));
    }
    assert!(batch.pieces().count() > 128);
    rig.driver.submit(Op::Send { id, batch });
    assert_eq!(rig.sent(id), (SendEnd::Done, 0));
    let mut got = vec![0; expected.len()];
    client.read_exact(&mut got).unwrap();
    assert!(got == expected);
    rig.close(id, CloseHow::Orderly);
    rig.settled();
}

#[test]
fn the_end_is_found_although_it_came_with_the_last_bytes() {
    let mut rig = Rig::accepting(&small_epoll(4096, 64));
    let (mut client, id) = rig.connect(0);
    client.write_all(b"last words").unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    // Both are in the socket before the first receive, so there is one edge for both.
    rig.calm();
    rig.driver.submit(Op::Receive { id });
    assert_eq!(rig.received_bytes(id, 10), b"last words");
    assert_eq!(rig.receive_ended(id), ReceiveEnd::Eof);
    rig.driver.submit(Op::Receive { id });
    assert_eq!(rig.receive_ended(id), ReceiveEnd::Eof, "the end is there for a later receive too");
    rig.close(id, CloseHow::Orderly);
    rig.settled();
}

#[test]
fn each_direction_ends_by_itself() {
    let mut rig = Rig::accepting(&small_epoll(4096, 64));
    let (mut client, id) = rig.connect_receiving(0);
    client.shutdown(Shutdown::Write).unwrap();
    assert_eq!(rig.receive_ended(id), ReceiveEnd::Eof);
    rig.send(id, b"still here");
    assert_eq!(rig.sent(id), (SendEnd::Done, 0));
    rig.shut_down(id);
    let mut text = String::new();
    client.read_to_string(&mut text).unwrap();
    assert_eq!(text, "still here");
    rig.close(id, CloseHow::Orderly);

    let (mut client, id) = rig.connect_receiving(0);
    rig.shut_down(id);
    assert_eq!(client.read(&mut [0; 4]).unwrap(), 0);
    client.write_all(b"and I").unwrap();
    assert_eq!(rig.received_bytes(id, 5), b"and I");
    drop(client);
    assert_eq!(rig.receive_ended(id), ReceiveEnd::Eof);
    rig.close(id, CloseHow::Orderly);
    rig.settled();
}

#[test]
fn a_reset_ends_the_receive_in_flight() {
    let mut rig = Rig::accepting(&small_epoll(4096, 64));
    let (client, id) = rig.connect_receiving(0);
    rig.calm();
    reset(client);
    assert_eq!(rig.receive_ended(id), ReceiveEnd::Error(libc::ECONNRESET));
    rig.send(id, b"to no peer");
    assert_eq!(rig.sent(id), (SendEnd::Error(libc::EPIPE), 10));
    rig.shut_down(id);
    rig.close(id, CloseHow::Abort);
    rig.settled();
}

#[test]
fn a_reset_between_operations_is_told_to_the_next_one() {
    let mut rig = Rig::accepting(&small_epoll(4096, 64));
    let (client, id) = rig.connect(0);
    rig.calm();
    reset(client);
    rig.calm();
    rig.driver.submit(Op::Receive { id });
    assert_eq!(rig.receive_ended(id), ReceiveEnd::Error(libc::ECONNRESET));
    rig.close(id, CloseHow::Orderly);

    let (client, id) = rig.connect(0);
    reset(client);
    rig.calm();
    rig.send(id, b"to no peer");
    assert_eq!(rig.sent(id), (SendEnd::Error(libc::ECONNRESET), 10));
    rig.close(id, CloseHow::Orderly);
    rig.settled();
}

#[test]
fn a_stopped_receive_leaves_its_bytes_for_the_next_one() {
    let mut rig = Rig::accepting(&small_epoll(256, 64));
    let (mut client, id) = rig.connect_receiving(0);
    let bytes = pattern(1, 20_000);
    let (mut got, mut stops) = (Vec::new(), 0);
    let mut chunks = bytes.chunks(1000);
    while got.len() < bytes.len() {
        if let Some(chunk) = chunks.next() {
            client.write_all(chunk).unwrap();
        }
        got.extend_from_slice(&rig.received(id));
        rig.driver.submit(Op::ReceiveStop { id });
        if let Some(chunk) = chunks.next() {
            client.write_all(chunk).unwrap();
        }
        assert_eq!(rig.receive_ended(id), ReceiveEnd::Stopped);
        stops += 1;
        for event in std::mem::take(&mut rig.events) {
            match event {
                Completion::Received { lease, .. } => got.extend_from_slice(&lease),
                other => panic!("{other:?} after the receive was stopped"),
            }
        }
        rig.turn(Wait::No);
        assert!(rig.events.is_empty(), "{:?} without a receive", rig.events);
        rig.driver.submit(Op::Receive { id });
    }
    assert!(got == bytes && stops > 2);
    drop(client);
    assert_eq!(rig.receive_ended(id), ReceiveEnd::Eof);
    rig.close(id, CloseHow::Orderly);
    rig.settled();
}

#[test]
fn slot_used_again_owes_nothing_to_its_former_connection() {
    let mut rig = Rig::accepting(&small_epoll(256, 64));
    let mut last = None;
    for round in 0..20 {
        let (mut client, id) = rig.connect_receiving(3);
        assert_ne!(last, Some(id));
        rig.calm();
        assert!(rig.events.is_empty(), "round {round}: {:?}", rig.events);
        client.write_all(&[round; 700]).unwrap();
        assert_eq!(rig.received_bytes(id, 700), [round; 700]);
        // Remaining bytes, the edge and the place in the queue go with it.
        client.write_all(&[0xEE; 700]).unwrap();
        rig.driver.submit(Op::ReceiveStop { id });
        assert_eq!(rig.receive_ended(id), ReceiveEnd::Stopped);
        rig.events.clear();
        rig.close(id, if round % 2 == 0 { CloseHow::Abort } else { CloseHow::Orderly });
        last = Some(id);
    }
    rig.settled();
}

#[test]
fn an_orderly_close_sends_fin_and_an_abort_sends_rst() {
    let mut rig = Rig::accepting(&small_epoll(4096, 64));
    let (mut client, id) = rig.connect(0);
    rig.send(id, b"bye");
    rig.sent(id);
    rig.close(id, CloseHow::Orderly);
    let mut text = String::new();
    client.read_to_string(&mut text).unwrap();
    assert_eq!(text, "bye");

    let (mut client, id) = rig.connect(0);
    rig.close(id, CloseHow::Abort);
    assert_eq!(client.read(&mut [0; 4]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    rig.settled();
}

#[test]
fn refused_sockets_and_those_of_a_dropped_driver_are_closed() {
    let mut rig = Rig::accepting(&small_epoll(4096, 64));
    let mut refused = TcpStream::connect(rig.address).unwrap();
    let (socket, _) = rig.accepted();
    rig.driver.submit(Op::Refuse { socket });
    assert_eq!(refused.read(&mut [0; 4]).unwrap(), 0);
    let (mut adopted, _) = rig.connect_receiving(0);
    let mut waiting = TcpStream::connect(rig.address).unwrap();
    let (again, _) = rig.accepted();
    let slot = |socket: Socket| ConnId::from_bits(socket.0).slot();
    assert_eq!(slot(again), slot(socket), "the slot is free for the next one");
    assert_ne!(again, socket, "the old name is no other socket's");
    drop(rig);
    assert_eq!(adopted.read(&mut [0; 4]).unwrap(), 0);
    assert_eq!(waiting.read(&mut [0; 4]).unwrap(), 0);
}
