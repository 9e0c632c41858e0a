//! The io_uring driver on the kernel of this machine: one connection at a time.

mod common;

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};

use common::{UringRig as Rig, small};
use ringserve_core::{CloseHow, Completion, Driver, Op, ReceiveEnd, SendEnd, Wait};

#[test]
fn what_a_client_sends_comes_back() {
    let mut rig = Rig::accepting(&small());
    let (mut client, id) = rig.connect(3);
    rig.driver.submit(Op::Receive { id });
    for round in 0..100u32 {
        let text = format!("line {round}\n");
        client.write_all(text.as_bytes()).unwrap();
        let got = rig.received_bytes(id, text.len());
        assert_eq!(got, text.as_bytes());
        rig.send(id, &got);
        assert_eq!(rig.sent(id), (SendEnd::Done, 0));
        let mut echo = vec![0; text.len()];
        client.read_exact(&mut echo).unwrap();
        assert_eq!(echo, text.as_bytes());
    }
    client.shutdown(Shutdown::Write).unwrap();
    assert_eq!(rig.receive_ended(id), ReceiveEnd::Eof);
    rig.send(id, b"after your end");
    assert_eq!(rig.sent(id), (SendEnd::Done, 0));
    rig.close(id, CloseHow::Orderly);
    let mut rest = String::new();
    client.read_to_string(&mut rest).unwrap();
    assert_eq!(rest, "after your end");
    assert!(rig.driver.stats().receives_armed < 5, "{:?}", rig.driver.stats());
    rig.settled();
}

#[test]
fn peer_address_costs_one_call_and_is_left_out_on_demand() {
    let calls = [true, false].map(|peer_addresses| {
        let mut rig = Rig::accepting(&ringserve_drivers::UringConfig { peer_addresses, ..small() });
        // The accept is armed.
        rig.turn(Wait::No);
        let before = rig.driver.stats().calls;
        let _client = TcpStream::connect(rig.address).unwrap();
        let accepted = |event: &mut Completion| match event {
            Completion::Accepted { socket, peer, .. } => Some((*socket, *peer)),
            _ => None,
        };
        let (socket, peer) = rig.wait_for("Accepted", accepted);
        assert_eq!(peer.is_some(), peer_addresses);
        let calls = rig.driver.stats().calls - before;
        let id = rig.adopt(0, socket);
        rig.close(id, CloseHow::Orderly);
        rig.settled();
        calls
    });
    assert_eq!(calls, [1, 0]);
}

#[test]
fn a_close_sends_fin_and_an_abort_sends_rst() {
    let mut rig = Rig::accepting(&small());
    // An armed receive on another connection must not hold back the close.
    let (_other, other) = rig.connect(7);
    rig.driver.submit(Op::Receive { id: other });
    let (mut client, id) = rig.connect(0);
    rig.close(id, CloseHow::Orderly);
    assert_eq!(client.read(&mut [0; 8]).unwrap(), 0);
    let (mut client, id) = rig.connect(0);
    rig.close(id, CloseHow::Abort);
    assert_eq!(client.read(&mut [0; 8]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    rig.settled();
}

#[test]
fn a_shutdown_sends_fin_and_receiving_goes_on() {
    let mut rig = Rig::accepting(&small());
    let (mut client, id) = rig.connect(0);
    rig.driver.submit(Op::Receive { id });
    rig.driver.submit(Op::Shutdown { id });
    rig.wait_for("ShutDown", |event| matches!(event, Completion::ShutDown { .. }).then_some(()));
    assert_eq!(client.read(&mut [0; 8]).unwrap(), 0);
    client.write_all(b"still here").unwrap();
    assert_eq!(rig.received_bytes(id, 10), b"still here");
    drop(client);
    assert_eq!(rig.receive_ended(id), ReceiveEnd::Eof);
    rig.close(id, CloseHow::Orderly);
    rig.settled();
}

#[test]
fn a_reset_ends_the_receive_and_the_send_with_errors() {
    let mut rig = Rig::accepting(&small());
    let (client, id) = rig.connect(0);
    rig.driver.submit(Op::Receive { id });
    socket2::SockRef::from(&client).set_linger(Some(std::time::Duration::ZERO)).unwrap();
    drop(client);
    assert_eq!(rig.receive_ended(id), ReceiveEnd::Error(libc::ECONNRESET));
    rig.send(id, b"to no peer");
    assert_eq!(rig.sent(id), (SendEnd::Error(libc::EPIPE), 10));
    rig.close(id, CloseHow::Orderly);
    rig.settled();
}

#[test]
fn a_batch_of_many_pieces_leaves_in_order() {
    let mut rig = Rig::accepting(&small());
    let (mut client, id) = rig.connect(0);
    let mut batch = Box::new(ringserve_core::Batch::new());
    let mut expected = Vec::new();
    for n in 0..60u8 {
        batch.put(&[n; 3]);
        batch.lend(ringserve_buf::Lease::copy_of(&[n ^ 0xFF; 5]));
        expected.extend_from_slice(&[n; 3]);
        expected.extend_from_slice(&[n ^ 0xFF; 5]);
    }
    rig.driver.submit(Op::Send { id, batch });
    assert_eq!(rig.sent(id), (SendEnd::Done, 0));
    let mut got = vec![0; expected.len()];
    client.read_exact(&mut got).unwrap();
    assert_eq!(got, expected);
    rig.close(id, CloseHow::Orderly);
    rig.settled();
}

#[test]
fn batches_of_many_pieces_that_leave_in_one_turn_do_not_mix() {
    let mut rig = Rig::accepting(&small());
    let mut clients: Vec<_> = (0..20).map(|slot| rig.connect(slot)).collect();
    for (_, id) in &clients {
        let mut batch = Box::new(ringserve_core::Batch::new());
        for n in 0..60 {
            batch.put(&[id.slot() as u8; 2]);
            batch.lend(ringserve_buf::Lease::copy_of(&[n; 2]));
        }
        rig.driver.submit(Op::Send { id: *id, batch });
    }
    rig.turn(ringserve_core::Wait::No);
    for (client, id) in &mut clients {
        assert_eq!(rig.sent(*id), (SendEnd::Done, 0));
        let mut got = [0; 240];
        client.read_exact(&mut got).unwrap();
        for (n, piece) in got.chunks(4).enumerate() {
            assert_eq!(piece, [id.slot() as u8, id.slot() as u8, n as u8, n as u8]);
        }
    }
    rig.settled();
}

#[test]
fn a_non_blocking_socket_or_listener_makes_no_difference() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = listener.local_addr().unwrap();
    let mut rig = Rig::over(&small(), listener);
    rig.driver.submit(Op::Accept { listener: 0 });
    let start = std::time::Instant::now();
    rig.turn(ringserve_core::Wait::For(std::time::Duration::from_millis(30)));
    assert!(start.elapsed().as_millis() >= 30, "the accept waits");
    drop(TcpStream::connect(address).unwrap());
    rig.wait_for("Accepted", |event| matches!(event, Completion::Accepted { .. }).then_some(()));

    let (mut near, far) = std::os::unix::net::UnixStream::pair().unwrap();
    far.set_nonblocking(true).unwrap();
    let socket = rig.driver.take_over(far.into());
    let id = rig.adopt(0, socket);
    rig.driver.submit(Op::Receive { id });
    let start = std::time::Instant::now();
    rig.turn(ringserve_core::Wait::For(std::time::Duration::from_millis(30)));
    assert!(start.elapsed().as_millis() >= 30, "the receive waits");
    near.write_all(b"ping").unwrap();
    assert_eq!(rig.received_bytes(id, 4), b"ping");
    rig.send(id, &[5; 4 << 20]);
    let reader = std::thread::spawn(move || near.read_exact(&mut vec![0; 4 << 20]).map(|()| near));
    assert_eq!(rig.sent(id), (SendEnd::Done, 0));
    assert!(rig.driver.stats().sends_short < 3, "the rest of the send waits: {:?}", rig.driver.stats());
    drop(reader.join().unwrap());
}

#[test]
fn sockets_adopted_in_one_turn_keep_their_identities() {
    let mut rig = Rig::accepting(&small());
    let clients: Vec<_> = (0..20).map(|_| TcpStream::connect(rig.address).unwrap()).collect();
    let accepted: Vec<_> = (0..20).map(|_| rig.accepted()).collect();
    let ids: Vec<_> = accepted
        .iter()
        .enumerate()
        .map(|(slot, (socket, _))| {
            let id = rig.adopt(slot as u32, *socket);
            rig.driver.submit(Op::Receive { id });
            id
        })
        .collect();
    for mut client in &clients {
        let port = client.local_addr().unwrap().port();
        client.write_all(&port.to_be_bytes()).unwrap();
    }
    for (id, (_, peer)) in ids.iter().zip(&accepted) {
        assert_eq!(rig.received_bytes(*id, 2), peer.port().to_be_bytes());
    }
    rig.settled();
}

#[test]
fn refused_socket_is_closed_and_its_slot_used_again() {
    let mut rig = Rig::accepting(&small());
    let mut client = TcpStream::connect(rig.address).unwrap();
    let (socket, _) = rig.accepted();
    rig.driver.submit(Op::Refuse { socket });
    rig.turn(ringserve_core::Wait::No);
    assert_eq!(client.read(&mut [0; 8]).unwrap(), 0);
    for round in 0..200u8 {
        let (mut client, id) = rig.connect(5);
        rig.driver.submit(Op::Receive { id });
        client.write_all(&[round; 10]).unwrap();
        assert_eq!(rig.received_bytes(id, 10), [round; 10]);
        drop(client);
        assert_eq!(rig.receive_ended(id), ReceiveEnd::Eof);
        rig.close(id, CloseHow::Orderly);
    }
    rig.settled();
}

#[test]
fn plain_descriptors_do_the_same() {
    let mut rig = Rig::accepting(&ringserve_drivers::UringConfig { plain_descriptors: true, ..small() });
    for how in [CloseHow::Orderly, CloseHow::Abort] {
        let (mut client, id) = rig.connect(5);
        rig.driver.submit(Op::Receive { id });
        client.write_all(b"ping").unwrap();
        assert_eq!(rig.received_bytes(id, 4), b"ping");
        rig.send(id, b"pong");
        assert_eq!(rig.sent(id), (SendEnd::Done, 0));
        let mut pong = [0; 4];
        client.read_exact(&mut pong).unwrap();
        rig.driver.submit(Op::ReceiveStop { id });
        assert_eq!(rig.receive_ended(id), ReceiveEnd::Stopped);
        rig.close(id, how);
        match how {
            CloseHow::Orderly => assert_eq!(client.read(&mut pong).unwrap(), 0),
            CloseHow::Abort => assert!(client.read(&mut pong).is_err()),
        }
    }
    let (mut client, _) = rig.connect(6);
    rig.turn(ringserve_core::Wait::No);
    drop(rig);
    assert_eq!(client.read(&mut [0; 8]).unwrap(), 0, "dropping the driver closes what is left");
}
