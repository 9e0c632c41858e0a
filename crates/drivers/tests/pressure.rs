//! The io_uring driver on the kernel of this machine: too few buffers, too few queue entries, slow
//! readers, ends.

mod common;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::thread;
use std::time::{Duration, Instant};

use common::busy::{busy, take_all};
use common::{PATIENCE, UringRig as Rig, pattern, small};
use ringserve_buf::PoolConfig;
use ringserve_core::{Budget, CloseHow, Completion, Driver, Op, ReceiveEnd, SendEnd, Wait};
use ringserve_drivers::UringConfig;

#[test]
fn an_empty_pool_parks_connections_and_no_byte_is_lost() {
    for buffers_max in [1, 2, 4] {
        let pool = PoolConfig { buffer_bytes: 512, buffers_max, poison: true };
        let mut rig = Rig::accepting(&UringConfig { pool, ..small() });
        let len = 200_000;
        let (ids, writers) = busy(&mut rig, 8, len);
        take_all(&mut rig, &ids, len, buffers_max - 1);
        writers.into_iter().for_each(|writer| writer.join().unwrap());
        let stats = rig.driver.stats();
        assert!(stats.receives_parked > 0, "{stats:?}");
        // Each arming has its own buffer: at most one for each filled buffer, and the first ones.
        let filled = (8 * len / 512 + 8 * len / 400) as u64;
        assert!(stats.receives_armed < filled + 8, "{stats:?}");
        ids.iter().for_each(|id| rig.close(*id, CloseHow::Orderly));
        rig.settled();
    }
}

#[test]
fn parked_connections_do_not_spin_while_every_buffer_is_held() {
    let pool = PoolConfig { buffer_bytes: 512, buffers_max: 2, poison: true };
    let mut rig = Rig::accepting(&UringConfig { pool, ..small() });
    let (mut client, id) = rig.connect(0);
    rig.driver.submit(Op::Receive { id });
    client.write_all(&pattern(0, 2000)).unwrap();
    let held = [rig.received(id), rig.received(id)];
    while rig.driver.stats().receives_parked == 0 {
        rig.turn(Wait::For(Duration::from_millis(10)));
    }
    let before = rig.driver.stats();
    let turns = rig.idle_for(Duration::from_millis(60));
    assert!(turns <= 2, "it waited, with nothing to do: {turns} turns");
    assert_eq!(rig.driver.stats().receives_armed, before.receives_armed);
    let mut bytes = [&*held[0], &*held[1]].concat();
    drop(held);
    bytes.extend(rig.received_bytes(id, 2000 - 1024));
    assert_eq!(bytes, pattern(0, 2000));
    // A stop of a parked receive ends at once.
    rig.driver.submit(Op::ReceiveStop { id });
    assert_eq!(rig.receive_ended(id), ReceiveEnd::Stopped);
    rig.close(id, CloseHow::Orderly);
    rig.settled();
}

#[test]
fn one_buffer_serves_all_connections_though_most_are_idle() {
    let pool = PoolConfig { buffer_bytes: 512, buffers_max: 1, poison: true };
    let mut rig = Rig::accepting(&UringConfig { pool, ..small() });
    let mut clients: Vec<_> = (0..100).map(|slot| rig.connect(slot)).collect();
    // All are parked because a buffer is held.
    let (mut first, holder) = rig.connect(100);
    rig.driver.submit(Op::Receive { id: holder });
    first.write_all(b"hold").unwrap();
    let held = rig.received(holder);
    for (_, id) in &clients {
        rig.driver.submit(Op::Receive { id: *id });
    }
    while rig.driver.stats().receives_parked < 100 {
        rig.turn(Wait::For(Duration::from_millis(10)));
    }
    let last = clients.len() - 1;
    clients[last].0.write_all(b"me").unwrap();
    drop(held);
    // Wait forever: with bytes on the last of 100 alone, the turn must not wait for the others.
    let (start, id) = (Instant::now(), clients[last].1);
    while !rig.events.iter().any(|event| matches!(event, Completion::Received { .. })) {
        rig.turn(Wait::For(PATIENCE));
    }
    assert!(start.elapsed() < PATIENCE / 2);
    assert_eq!(&*rig.received(id), b"me");
}

#[test]
fn a_receive_is_stopped_with_bytes_on_the_way_and_goes_on_later() {
    let mut rig = Rig::accepting(&small());
    let len = 3_000_000;
    let (ids, writers) = busy(&mut rig, 1, len);
    let id = ids[0];
    let mut got = Vec::new();
    let mut stops = 0;
    let end = loop {
        let ended = loop {
            rig.turn(Wait::For(Duration::from_millis(100)));
            let mut ended = None;
            while let Some(event) = rig.events.pop_front() {
                match event {
                    Completion::Received { lease, .. } => {
                        assert!(ended.is_none(), "bytes after the end");
                        got.extend_from_slice(&lease);
                    }
                    Completion::ReceiveEnded { end, .. } => assert!(ended.replace(end).is_none()),
                    other => panic!("{other:?}"),
                }
            }
            if ended.is_some() {
                break ended;
            }
            if stops % 2 == 0 {
                rig.driver.submit(Op::ReceiveStop { id });
                stops += 1;
            }
        };
        if ended == Some(ReceiveEnd::Eof) {
            break ended;
        }
        assert_eq!(ended, Some(ReceiveEnd::Stopped));
        stops += stops % 2;
        rig.driver.submit(Op::Receive { id });
    };
    assert_eq!(end, Some(ReceiveEnd::Eof));
    assert!(stops > 10, "{stops}");
    assert!(got == pattern(0, len), "{} bytes", got.len());
    writers.into_iter().for_each(|writer| writer.join().unwrap());
    rig.close(id, CloseHow::Orderly);
    rig.settled();
}

#[test]
fn a_slow_reader_gets_all_and_a_stopped_send_tells_what_left() {
    let mut rig = Rig::accepting(&small());
    let (mut client, id) = rig.connect(0);
    let bytes = pattern(1, 16 << 20);
    rig.send(id, &bytes);
    rig.turn(Wait::No);
    rig.turn(Wait::No);
    assert_eq!(rig.driver.stats().sends_short, 1, "it did not fit");
    let expected = bytes.clone();
    let reader = thread::spawn(move || {
        let mut got = vec![0; 16 << 20];
        client.read_exact(&mut got).unwrap();
        assert!(got == expected);
        client
    });
    assert_eq!(rig.sent(id), (SendEnd::Done, 0));
    let mut client = reader.join().unwrap();

    rig.send(id, &bytes);
    for _ in 0..4 {
        rig.turn(Wait::No);
    }
    rig.driver.submit(Op::SendStop { id });
    let (end, left) = rig.sent(id);
    assert_eq!(end, SendEnd::Stopped);
    assert!(left > 0 && left < bytes.len(), "{left}");
    rig.close(id, CloseHow::Orderly);
    let mut got = Vec::new();
    client.read_to_end(&mut got).unwrap();
    assert_eq!(got.len(), bytes.len() - left, "what left is what arrived");
    assert!(got == bytes[..got.len()]);
    rig.settled();
}

#[test]
fn a_send_stopped_before_it_was_submitted_comes_back_whole() {
    let mut rig = Rig::accepting(&small());
    let (_client, id) = rig.connect(0);
    rig.turn(Wait::No);
    rig.send(id, b"never");
    rig.driver.submit(Op::SendStop { id });
    assert_eq!(rig.sent(id), (SendEnd::Stopped, 5));
    rig.send(id, b"again");
    assert_eq!(rig.sent(id), (SendEnd::Done, 0));
}

#[test]
fn a_small_submission_queue_delays_operations_and_loses_none() {
    let config = UringConfig { submission_entries: 8, completion_entries: 8, ..small() };
    let mut rig = Rig::accepting(&config);
    let mut clients: Vec<_> = (0..100).map(|slot| rig.connect(slot)).collect();
    for (_, id) in &clients {
        rig.driver.submit(Op::Receive { id: *id });
        rig.send(*id, b"hello");
    }
    for (client, id) in &mut clients {
        assert_eq!(rig.sent(*id), (SendEnd::Done, 0));
        let mut hello = [0; 5];
        client.read_exact(&mut hello).unwrap();
        client.write_all(&hello).unwrap();
    }
    for (_, id) in &clients {
        assert_eq!(rig.received_bytes(*id, 5), b"hello");
        rig.driver.submit(Op::ReceiveStop { id: *id });
    }
    for (_, id) in &clients {
        assert_eq!(rig.receive_ended(*id), ReceiveEnd::Stopped);
        rig.driver.submit(Op::Close { id: *id, how: CloseHow::Abort });
    }
    for (_, id) in &clients {
        rig.wait_for("Closed", |event| {
            matches!(event, Completion::Closed { id: of } if of == id).then_some(())
        });
    }
    assert!(rig.driver.stats().submissions_delayed > 100, "{:?}", rig.driver.stats());
    rig.settled();
}

#[test]
fn an_overflowing_completion_queue_loses_nothing() {
    let pool = PoolConfig { buffer_bytes: 512, buffers_max: 128, poison: true };
    let config = UringConfig { submission_entries: 8, completion_entries: 8, pool, ..small() };
    let mut rig = Rig::accepting(&config);
    rig.budget = Budget { completions: 3, bytes: 1 << 20 };
    let (ids, writers) = busy(&mut rig, 16, 100_000);
    take_all(&mut rig, &ids, 100_000, 0);
    writers.into_iter().for_each(|writer| writer.join().unwrap());
    assert!(rig.driver.stats().overflows > 0, "{:?}", rig.driver.stats());
    ids.iter().for_each(|id| rig.close(*id, CloseHow::Orderly));
    rig.settled();
}

#[test]
fn a_turn_stays_within_its_budget_and_the_rest_comes_in_order() {
    let mut rig = Rig::accepting(&small());
    rig.budget = Budget { completions: 5, bytes: 10_000 };
    let (ids, writers) = busy(&mut rig, 4, 500_000);
    let mut got = vec![Vec::new(); ids.len()];
    let mut open = ids.len();
    while open > 0 {
        // Some came while the last clients connected.
        let before = rig.events.len();
        rig.turn(Wait::For(PATIENCE));
        assert!(rig.events.len() - before <= 5);
        let sizes: Vec<usize> = rig
            .events
            .iter()
            .skip(before)
            .filter_map(|event| match event {
                Completion::Received { lease, .. } => Some(lease.len()),
                _ => None,
            })
            .collect();
        assert!(sizes.iter().rev().skip(1).sum::<usize>() < 10_000, "{sizes:?}");
        for event in rig.events.drain(..) {
            match event {
                Completion::Received { id, lease } => got[id.slot() as usize].extend_from_slice(&lease),
                Completion::ReceiveEnded { end: ReceiveEnd::Eof, .. } => open -= 1,
                other => panic!("{other:?}"),
            }
        }
    }
    writers.into_iter().for_each(|writer| writer.join().unwrap());
    for (slot, got) in got.iter().enumerate() {
        assert!(*got == pattern(slot, 500_000));
    }
}

#[test]
fn an_idle_turn_ends_at_its_time_and_makes_one_call() {
    let mut rig = Rig::accepting(&small());
    let (_client, id) = rig.connect(0);
    rig.driver.submit(Op::Receive { id });
    rig.turn(Wait::No);
    let before = rig.driver.stats().enters;
    let start = Instant::now();
    let turns = rig.idle_for(Duration::from_millis(80));
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
    assert!(turns <= 2, "{turns} turns");
    let waited = rig.driver.stats().enters - before;
    assert!(waited <= turns, "{waited} calls in {turns} turns");
    for _ in 0..100 {
        rig.turn(Wait::No);
    }
    assert_eq!(rig.driver.stats().enters - before, waited, "nothing to do is no call");
    assert!(rig.events.is_empty());
}

#[test]
fn a_waker_ends_a_turn_from_another_thread_and_wakes_are_joined() {
    let mut rig = Rig::new(&small());
    let waker = rig.driver.waker();
    for _ in 0..50 {
        let waker = waker.clone();
        let thread = thread::spawn(move || waker.wake());
        let start = Instant::now();
        rig.turn(Wait::For(PATIENCE));
        assert!(start.elapsed() < PATIENCE / 2);
        thread.join().unwrap();
    }
    for _ in 0..1000 {
        waker.wake_by_ref();
    }
    rig.turn(Wait::For(PATIENCE));
    let start = Instant::now();
    rig.turn(Wait::For(Duration::from_millis(40)));
    assert!(start.elapsed() >= Duration::from_millis(40), "a thousand wakes are one");
}

#[test]
fn dropped_driver_ends_everything_in_flight() {
    let mut rig = Rig::accepting(&small());
    let mut clients = Vec::new();
    let much = vec![7; 8 << 20];
    for slot in 0..20 {
        let (client, id) = rig.connect(slot);
        rig.driver.submit(Op::Receive { id });
        rig.send(id, &much);
        clients.push(client);
    }
    // Accepted and neither adopted nor refused; one more that was not even reaped.
    let unadopted = TcpStream::connect(rig.address).unwrap();
    rig.accepted();
    let unreaped = TcpStream::connect(rig.address).unwrap();
    (&clients[3]).write_all(&pattern(0, 100)).unwrap();
    rig.turn(Wait::No);
    let held = rig.events.iter_mut().find_map(|event| match event {
        Completion::Received { lease, .. } => Some(std::mem::take(lease)),
        _ => None,
    });
    let pool = rig.driver.pool().clone();
    let start = Instant::now();
    let address = rig.address;
    drop(rig);
    assert!(start.elapsed() < PATIENCE / 2, "{:?}", start.elapsed());
    assert_eq!(pool.counts().with_kernel, 0, "no buffer is left with the kernel");
    pool.invariants();
    if let Some(held) = held {
        assert_eq!(*held, pattern(0, 100)[..held.len()], "a lease outlives the driver");
    }
    for mut client in clients.into_iter().chain([unadopted, unreaped]) {
        client.set_read_timeout(Some(PATIENCE)).unwrap();
        // FIN, or RST where something was unread; not a timeout.
        let mut rest = Vec::new();
        if let Err(error) = client.read_to_end(&mut rest) {
            assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset, "{error}");
        }
    }
    assert!(TcpStream::connect(address).is_err(), "the listener is closed");
}

#[test]
fn cancelled_multishot_leaves_the_bytes_in_the_socket() {
    let mut rig = Rig::accepting(&small());
    let (mut client, id) = rig.connect(0);
    rig.driver.submit(Op::Receive { id });
    rig.turn(Wait::No);
    rig.driver.submit(Op::ReceiveStop { id });
    assert_eq!(rig.receive_ended(id), ReceiveEnd::Stopped);
    client.write_all(b"later").unwrap();
    rig.turn(Wait::For(Duration::from_millis(30)));
    assert!(rig.events.is_empty());
    rig.driver.submit(Op::Receive { id });
    assert_eq!(rig.received_bytes(id, 5), b"later");
    assert!(client.as_raw_fd() >= 0);
}

#[test]
fn accepting_stops_and_goes_on_and_queued_connections_survive() {
    let mut rig = Rig::accepting(&small());
    rig.connect(0);
    rig.driver.submit(Op::AcceptStop { listener: 0 });
    let end = rig.wait_for("AcceptEnded", |event| match event {
        Completion::AcceptEnded { end, .. } => Some(*end),
        _ => None,
    });
    assert_eq!(end, ringserve_core::AcceptEnd::Stopped);
    let client = TcpStream::connect(rig.address).unwrap();
    rig.turn(Wait::For(Duration::from_millis(30)));
    assert!(rig.events.is_empty());
    rig.driver.submit(Op::Accept { listener: 0 });
    assert_eq!(rig.accepted().1, client.local_addr().unwrap());
}

#[test]
fn a_deferred_send_costs_no_enter_of_its_own() {
    let mut rig = Rig::accepting(&small());
    let (mut client, id) = rig.connect(0);
    rig.driver.submit(Op::Receive { id });
    rig.turn(Wait::No);
    client.write_all(b"0").unwrap();
    drop(rig.received(id));
    let before = rig.driver.stats();
    for _ in 0..50 {
        rig.send(id, b"0");
        rig.driver.defer_sent();
        let mut echo = client.try_clone().unwrap();
        let peer = thread::spawn(move || {
            let mut byte = [0; 1];
            echo.read_exact(&mut byte).unwrap();
            echo.write_all(&byte).unwrap();
        });
        rig.turn(Wait::For(PATIENCE));
        peer.join().unwrap();
        assert_eq!(rig.sent(id), (SendEnd::Done, 0));
        drop(rig.received(id));
    }
    // One each; a few more if a reply comes just between two turns.
    let enters = rig.driver.stats().enters - before.enters;
    assert!((50..75).contains(&enters), "send and wait in one call: {enters} calls for 50 of them");
    rig.settled();
}

#[test]
fn a_deferred_send_that_does_not_fit_or_fails_ends_the_wait() {
    let mut rig = Rig::accepting(&small());
    let (mut client, id) = rig.connect(0);
    rig.turn(Wait::No);
    let bytes = pattern(2, 16 << 20);
    rig.send(id, &bytes);
    rig.driver.defer_sent();
    let start = Instant::now();
    rig.turn(Wait::For(PATIENCE));
    assert!(start.elapsed() < PATIENCE / 2);
    assert_eq!(rig.driver.stats().sends_short, 1);
    let reader = thread::spawn(move || {
        let mut got = vec![0; 16 << 20];
        client.read_exact(&mut got).unwrap();
        assert!(got == pattern(2, 16 << 20));
        socket2::SockRef::from(&client).set_linger(Some(Duration::ZERO)).unwrap();
    });
    assert_eq!(rig.sent(id), (SendEnd::Done, 0));
    reader.join().unwrap();
    rig.driver.submit(Op::Receive { id });
    assert_eq!(rig.receive_ended(id), ReceiveEnd::Error(libc::ECONNRESET));
    // One send that fails, and another that does not.
    let (_second, other) = rig.connect(1);
    rig.send(id, b"lost");
    rig.send(other, b"kept");
    rig.driver.defer_sent();
    let start = Instant::now();
    rig.turn(Wait::For(PATIENCE));
    assert!(start.elapsed() < PATIENCE / 2);
    assert_eq!(rig.sent(id), (SendEnd::Error(libc::EPIPE), 4));
    assert_eq!(rig.sent(other), (SendEnd::Done, 0));
    rig.settled();
}

#[test]
fn deferred_sends_through_a_small_queue_all_come_back() {
    let config = UringConfig { submission_entries: 8, completion_entries: 8, ..small() };
    let mut rig = Rig::accepting(&config);
    let mut clients: Vec<_> = (0..50).map(|slot| rig.connect(slot)).collect();
    for round in 0..20u8 {
        for (_, id) in &clients {
            rig.send(*id, &[round; 100]);
        }
        while !rig.events.iter().filter(|event| matches!(event, Completion::Sent { .. })).count().eq(&50) {
            rig.driver.defer_sent();
            rig.turn(Wait::No);
        }
        for (client, id) in &mut clients {
            assert_eq!(rig.sent(*id), (SendEnd::Done, 0));
            let mut got = [0; 100];
            client.read_exact(&mut got).unwrap();
            assert_eq!(got, [round; 100]);
        }
    }
    rig.settled();
}

#[test]
fn failed_deferred_send_is_told_though_completions_overflow() {
    let config = UringConfig { submission_entries: 8, completion_entries: 8, ..small() };
    let mut rig = Rig::accepting(&config);
    let (client, broken) = rig.connect(50);
    socket2::SockRef::from(&client).set_linger(Some(Duration::ZERO)).unwrap();
    drop(client);
    rig.driver.submit(Op::Receive { id: broken });
    assert_eq!(rig.receive_ended(broken), ReceiveEnd::Error(libc::ECONNRESET));
    let mut clients: Vec<_> = (0..20).map(|slot| rig.connect(slot)).collect();
    clients.iter().for_each(|(_, id)| rig.driver.submit(Op::Receive { id: *id }));
    for _ in 0..5 {
        rig.turn(Wait::No);
    }
    clients.iter_mut().for_each(|(client, _)| client.write_all(b"x").unwrap());
    // The queue is full from here on, of completions that were not taken.
    rig.budget.completions = 1;
    let before = rig.driver.stats().overflows;
    rig.turn(Wait::For(PATIENCE));
    rig.send(broken, b"lost");
    rig.driver.defer_sent();
    rig.turn(Wait::No);
    // Now more is taken than is in the queue, while the kernel still holds completions back.
    rig.budget.completions = 100;
    for _ in 0..40 {
        rig.driver.defer_sent();
        rig.turn(Wait::No);
    }
    assert!(rig.driver.stats().overflows > before);
    assert_eq!(rig.sent(broken), (SendEnd::Error(libc::EPIPE), 4));
    assert_eq!(rig.events.iter().filter(|event| matches!(event, Completion::Received { .. })).count(), 20);
}
