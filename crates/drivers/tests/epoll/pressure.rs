//! Too few buffers, slow readers, small budgets, busy neighbours.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use ringserve_core::{Budget, CloseHow, Completion, ConnId, Driver, Op, ReceiveEnd, SendEnd, Wait};
use socket2::{Domain, SockRef, Socket, Type};

use crate::common::busy::{busy, take_all};
use crate::common::{EpollRig as Rig, pattern, small_epoll};

#[test]
fn an_empty_pool_parks_connections_and_no_byte_is_lost() {
    for buffers_max in [1, 2, 4, 9] {
        let mut rig = Rig::accepting(&small_epoll(512, buffers_max));
        let (ids, writers) = busy(&mut rig, 6, 40_000);
        take_all(&mut rig, &ids, 40_000, buffers_max);
        assert!(rig.driver.stats().receives_parked > 0);
        for writer in writers {
            writer.join().unwrap();
        }
        for id in ids {
            rig.close(id, CloseHow::Orderly);
        }
        rig.settled();
    }
}

#[test]
fn parked_receive_waits_without_spinning_and_can_be_stopped() {
    let mut rig = Rig::accepting(&small_epoll(64, 1));
    let (mut first, a) = rig.connect_receiving(0);
    let (mut second, b) = rig.connect_receiving(1);
    let (mut third, c) = rig.connect_receiving(2);
    first.write_all(b"a").unwrap();
    let held = rig.received(a);
    second.write_all(b"b").unwrap();
    third.write_all(b"c").unwrap();
    while rig.driver.stats().receives_parked < 2 {
        rig.turn_woken();
    }
    let (started, enters) = (Instant::now(), rig.driver.stats().enters);
    let rest = Duration::from_millis(30);
    assert_eq!(rig.turn(Wait::For(rest)), 0);
    assert!(started.elapsed() >= rest, "woken with nothing to do");
    assert_eq!(rig.driver.stats().enters, enters + 1);
    assert_eq!(rig.driver.stats().receives_parked, 2, "each is counted once");
    rig.driver.submit(Op::ReceiveStop { id: b });
    assert_eq!(rig.receive_ended(b), ReceiveEnd::Stopped);
    drop(held);
    assert_eq!(rig.received_bytes(c, 1), b"c");
    rig.driver.submit(Op::Receive { id: b });
    assert_eq!(rig.received_bytes(b, 1), b"b");
}

/// A connection whose buffers are small at both ends, so that a slow reader is noticed early.
fn narrow(rig: &mut Rig, slot: u32) -> (TcpStream, ConnId) {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.set_recv_buffer_size(16 * 1024).unwrap();
    socket.connect(&rig.address.into()).unwrap();
    let client = TcpStream::from(socket);
    let id = rig.take(slot, &client);
    (client, id)
}

/// More than the largest send buffer of the system takes.
const LONG: usize = 12 << 20;

#[test]
fn a_send_goes_on_when_a_slow_reader_reads() {
    let mut rig = Rig::accepting(&small_epoll(4096, 64));
    let (mut client, id) = narrow(&mut rig, 0);
    let bytes = pattern(5, LONG);
    let calls = rig.driver.stats().calls;
    rig.send(id, &bytes);
    let stats = rig.driver.stats();
    assert_eq!((stats.sends_short, stats.calls - calls), (1, 1), "a short send is not tried again at once");
    let reader = thread::spawn(move || {
        let mut got = vec![0; LONG];
        client.read_exact(&mut got).unwrap();
        (client, got)
    });
    assert_eq!(rig.sent(id), (SendEnd::Done, 0));
    let (client, got) = reader.join().unwrap();
    assert!(got == bytes);
    assert_eq!(rig.driver.stats().sends_short, 1, "one send counts once");
    rig.close(id, CloseHow::Orderly);
    drop(client);
    rig.settled();
}

#[test]
fn a_stopped_send_tells_exactly_what_left() {
    let mut rig = Rig::accepting(&small_epoll(4096, 64));
    let (mut client, id) = narrow(&mut rig, 0);
    let bytes = pattern(6, LONG);
    rig.send(id, &bytes);
    // Some is taken, so that it stops in the middle of an edge-driven send.
    client.read_exact(&mut vec![0; 100_000]).unwrap();
    rig.calm();
    assert!(rig.events.is_empty(), "all of it fitted: {:?}", rig.events);
    rig.driver.submit(Op::SendStop { id });
    let (end, left) = rig.sent(id);
    assert_eq!(end, SendEnd::Stopped);
    assert!(left > 0 && left < LONG - 100_000);
    // The rest fits no more than before: it waits for room, and can be stopped again.
    rig.send(id, &bytes[LONG - left..]);
    rig.driver.submit(Op::SendStop { id });
    let (end, left) = rig.sent(id);
    assert!(end == SendEnd::Stopped && left > 0, "{end:?}, {left}");
    rig.close(id, CloseHow::Orderly);
    let mut rest = Vec::new();
    client.read_to_end(&mut rest).unwrap();
    assert_eq!(100_000 + rest.len(), LONG - left);
    assert!(rest == bytes[100_000..LONG - left]);
    rig.settled();
}

#[test]
fn a_reset_ends_a_send_that_is_stuck() {
    let mut rig = Rig::accepting(&small_epoll(4096, 64));
    let (client, id) = narrow(&mut rig, 0);
    rig.send(id, &vec![7; LONG]);
    rig.calm();
    SockRef::from(&client).set_linger(Some(Duration::ZERO)).unwrap();
    drop(client);
    let (end, left) = rig.sent(id);
    assert!(matches!(end, SendEnd::Error(libc::ECONNRESET | libc::EPIPE)) && left > 0, "{end:?}");
    rig.close(id, CloseHow::Orderly);
    rig.settled();
}

#[test]
fn a_budget_of_one_completion_delivers_everything_in_order() {
    let mut rig = Rig::accepting(&small_epoll(256, 64));
    rig.budget.completions = 1;
    let (ids, writers) = busy(&mut rig, 4, 20_000);
    take_all(&mut rig, &ids, 20_000, 0);
    for writer in writers {
        writer.join().unwrap();
    }
    for id in &ids {
        rig.send(*id, b"x");
        rig.driver.submit(Op::Shutdown { id: *id });
    }
    for id in &ids {
        assert!(matches!(rig.sent(*id).0, SendEnd::Done | SendEnd::Error(_)));
    }
    for id in ids {
        rig.wait_for("ShutDown", |event| {
            matches!(event, Completion::ShutDown { id: of } if *of == id).then_some(())
        });
        rig.close(id, CloseHow::Orderly);
    }
    rig.settled();
}

#[test]
fn a_budget_of_bytes_ends_the_turn_that_reaches_it() {
    let mut rig = Rig::accepting(&small_epoll(256, 64));
    let (mut client, id) = rig.connect_receiving(0);
    rig.calm();
    client.write_all(&pattern(0, 2560)).unwrap();
    rig.budget = Budget { bytes: 500, ..Budget::default() };
    assert_eq!(rig.turn_woken(), 2);
    assert_eq!(rig.turn(Wait::No), 2);
    assert_eq!(rig.received_bytes(id, 2560), pattern(0, 2560));
}

/// Turns until this many completions came, whatever they are.
fn fills(rig: &mut Rig, count: usize) {
    while rig.events.len() < count {
        rig.turn_woken();
    }
}

#[test]
fn behind_a_full_buffer_one_call_fills_several() {
    let mut rig = Rig::accepting(&small_epoll(1024, 64));
    let (mut client, id) = rig.connect_receiving(0);
    rig.calm();
    let bytes = pattern(0, 40_000);
    client.write_all(&bytes[..20_000]).unwrap();
    let calls = rig.driver.stats().calls;
    fills(&mut rig, 20);
    // One buffer, 16 of them, and the rest, in which the socket was found empty.
    assert_eq!(rig.driver.stats().calls - calls, 3);
    assert_eq!(rig.received_bytes(id, 20_000), bytes[..20_000]);
    client.write_all(&bytes[20_000..33_000]).unwrap();
    fills(&mut rig, 13);
    assert_eq!(rig.driver.stats().calls - calls, 4, "it is known that much comes");
    assert_eq!(rig.received_bytes(id, 13_000), bytes[20_000..33_000]);
    // The end, after bytes that take several buffers.
    client.write_all(&bytes[33_000..]).unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    assert_eq!(rig.received_bytes(id, 7000), bytes[33_000..]);
    assert_eq!(rig.receive_ended(id), ReceiveEnd::Eof);
    rig.close(id, CloseHow::Orderly);
    rig.settled();
}

#[test]
fn receive_for_once_fills_several_buffers_if_it_may() {
    let mut rig = Rig::accepting(&small_epoll(1024, 64));
    let (mut client, id) = rig.connect(0);
    let bytes = pattern(0, 20_000);
    client.write_all(&bytes).unwrap();
    rig.calm();
    let mut got = Vec::new();
    // A first receive that fills its buffer shows that there may be more.
    for (several, filled) in [(true, 1), (false, 1), (true, 16), (false, 1), (true, 1)] {
        rig.driver.submit(Op::ReceiveOnce { id, several });
        assert_eq!(rig.receive_ended(id), ReceiveEnd::Stopped);
        assert_eq!(rig.events.len(), filled, "{several}");
        while !rig.events.is_empty() {
            got.extend_from_slice(&rig.received(id));
        }
    }
    assert!(got == bytes);
    rig.close(id, CloseHow::Orderly);
    rig.settled();
}

#[test]
fn end_of_a_receive_for_once_keeps_to_the_budget() {
    let mut rig = Rig::accepting(&small_epoll(1024, 64));
    let (mut client, id) = rig.connect(0);
    client.write_all(&pattern(0, 9 * 1024)).unwrap();
    rig.driver.submit(Op::ReceiveOnce { id, several: true });
    assert_eq!(rig.receive_ended(id), ReceiveEnd::Stopped);
    rig.budget.completions = 4;
    rig.driver.submit(Op::ReceiveOnce { id, several: true });
    fills(&mut rig, 1 + 4 + 1);
    assert_eq!(rig.received_bytes(id, 5 * 1024), pattern(0, 5 * 1024));
    assert_eq!(rig.receive_ended(id), ReceiveEnd::Stopped);
    rig.close(id, CloseHow::Abort);
    rig.settled();
}

#[test]
fn those_who_send_much_share_a_turn() {
    let mut rig = Rig::accepting(&small_epoll(1024, 64));
    let mut clients: Vec<_> = (0..3).map(|slot| rig.connect_receiving(slot)).collect();
    rig.calm();
    for (client, _) in &mut clients {
        client.write_all(&[1; 30_000]).unwrap();
    }
    // One buffer each, after which more is found to wait.
    rig.budget.bytes = 3 * 1024;
    fills(&mut rig, 3);
    rig.events.clear();
    rig.budget.bytes = 12 * 1024;
    rig.turn_woken();
    for (_, id) in &clients {
        let of = |event: &&Completion| event.id() == Some(*id);
        assert_eq!(rig.events.iter().filter(of).count(), 4, "{id}: {:?}", rig.events);
    }
}

#[test]
fn firehose_holds_up_neither_neighbours_nor_new_connections() {
    let mut rig = Rig::accepting(&small_epoll(256, 64));
    rig.budget.completions = 2;
    let (ids, writers) = busy(&mut rig, 1, 4 << 20);
    let (mut client, id) = rig.connect_receiving(1);
    rig.calm_for(10);
    client.write_all(b"me too").unwrap();
    let turns = rig.driver.stats().turns;
    assert_eq!(rig.received_bytes(id, 6), b"me too");
    assert!(rig.driver.stats().turns - turns < 10, "the neighbour waited");
    let turns = rig.driver.stats().turns;
    let (_other, _) = rig.connect(2);
    assert!(rig.driver.stats().turns - turns < 10, "the new connection waited");
    let ended = |event: &Completion| matches!(event, Completion::ReceiveEnded { id, .. } if *id == ids[0]);
    while !rig.events.iter().any(ended) {
        rig.calm_for(1);
    }
    for writer in writers {
        writer.join().unwrap();
    }
}

#[test]
fn connection_that_sends_without_pause_holds_up_no_other() {
    let mut rig = Rig::accepting(&small_epoll(256, 64));
    rig.budget.completions = 1;
    let (mut drinker, stream) = rig.connect(0);
    let (mut client, id) = rig.connect_receiving(1);
    rig.calm();
    let reader = thread::spawn(move || std::io::copy(&mut drinker, &mut std::io::sink()).unwrap());
    client.write_all(b"me too").unwrap();
    let mut turns = 0;
    rig.send(stream, &[1; 100]);
    loop {
        turns += 1;
        assert!(turns < 20, "sends that complete at once hide all events");
        rig.turn_woken();
        match rig.events.pop_front() {
            Some(Completion::Sent { .. }) => rig.send(stream, &[1; 100]),
            Some(Completion::Received { id: of, lease }) => {
                assert_eq!((of, &*lease), (id, &b"me too"[..]));
                break;
            }
            other => assert!(other.is_none(), "{other:?}"),
        }
    }
    rig.driver.submit(Op::ReceiveStop { id });
    drop(rig);
    reader.join().unwrap();
}

impl Rig {
    /// Takes some turns and discards their bytes.
    fn calm_for(&mut self, turns: usize) {
        for _ in 0..turns {
            self.turn_woken();
            self.events.retain(|event| !matches!(event, Completion::Received { .. }));
        }
    }
}
