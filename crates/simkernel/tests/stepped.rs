//! Real drivers above rings in virtual time, stepped by one thread.

mod common;

use std::cell::Cell;
use std::future::poll_fn;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use common::{CLIENT, MS, SERVER, Scheduler, connect, read, read_exactly, write_all};
use ringserve_core::{Address, Batch, Budget, Completion, ConnId, Driver, Op, Wait};
use ringserve_drivers::{Uring, UringConfig};
use ringserve_simkernel::{Fault, FaultCounts, Faults, Network, SimKernel, Socket};

/// Sends three messages, receives each back, and reads the end.
async fn say_and_hear(network: Network, addr: SocketAddr, name: usize) -> io::Result<()> {
    let mut socket = connect(&network, addr).await?;
    for len in [1, 1000, 60_000] {
        let message: Vec<u8> = (0..len).map(|at| (at * 31 + name) as u8).collect();
        for part in message.chunks(40_000) {
            write_all(&mut socket, part).await?;
            assert_eq!(read_exactly(&mut socket, part.len()).await?, part);
        }
    }
    socket.shutdown()?;
    assert_eq!(read(&mut socket, 10).await?, b"");
    Ok(())
}

/// Runs eight clients of two rings. Returns the hash of the events, the time it took, the faults
/// that occurred, and the clients that failed.
#[track_caller]
fn echo(seed: u64, faults: Faults) -> (u64, Duration, FaultCounts, usize) {
    let network = Network::stepped(seed, faults);
    let (mut scheduler, addr) = Scheduler::new(network.clone(), 2, seed);
    let failed = Rc::new(Cell::new(0));
    for name in 0..8 {
        let (network, failed) = (network.clone(), failed.clone());
        scheduler.spawn(async move {
            let done = say_and_hear(network, addr, name).await;
            failed.set(failed.get() + usize::from(done.is_err()));
        });
    }
    scheduler.run();
    let accepted: Vec<usize> = scheduler.servers.iter().map(|server| server.accepted).collect();
    assert!(accepted.iter().sum::<usize>() <= 8, "{accepted:?}");
    let network = scheduler.finish();
    (network.event_hash(), network.now(), network.injected(), failed.get())
}

#[test]
fn same_seed_does_the_same_thing_twice() {
    for faults in [Faults::none(), Faults::harmless(), Faults::all()] {
        assert_eq!(echo(1, faults.clone()), echo(1, faults.clone()));
        assert_ne!(echo(1, faults.clone()).0, echo(2, faults).0);
    }
}

#[test]
fn harmless_faults_cost_time_and_no_connection() {
    let mut struck = vec![0; Fault::ALL.len()];
    for seed in 0..40 {
        let (_, took, injected, failed) = echo(seed, Faults::harmless().drawn(seed));
        assert_eq!(failed, 0, "seed {seed}");
        assert!(took < Duration::from_secs(60), "seed {seed}: {took:?}");
        Fault::ALL.iter().for_each(|fault| struck[*fault as usize] += injected.of(*fault));
    }
    // There is nothing here to cancel, and no shard.
    let seldom = [Fault::ShardStalls, Fault::CancelRace, Fault::CancelMisses, Fault::TakeNoDescriptor];
    for fault in Fault::ALL {
        let expected = Faults::harmless().once_in(*fault) > 0;
        assert!(seldom.contains(fault) || (struck[*fault as usize] > 0) == expected, "{fault:?}");
    }
}

#[test]
fn all_faults_leave_nothing_behind() {
    let (mut failed, mut struck) = (0, [0; 4]);
    for seed in 0..40 {
        let (_, _, injected, of_seed) = echo(seed, Faults::all());
        failed += of_seed;
        use Fault::*;
        let faults = [AcceptNoDescriptor, AcceptNoFile, AcceptAborted, ConnectionResets];
        faults.iter().zip(&mut struck).for_each(|(fault, struck)| *struck += injected.of(*fault));
    }
    assert!(failed > 0 && struck.iter().all(|struck| *struck > 0), "{failed} failed, {struck:?}");
}

#[test]
fn ring_says_until_when_it_waits_and_what_ends_the_wait() {
    let network = Network::stepped(1, Faults::none());
    let (mut scheduler, addr) = Scheduler::new(network.clone(), 1, 1);
    network.set_now(Duration::from_secs(30 * 24 * 3600));
    let start = network.now();
    let ring = scheduler.servers[0].ring;
    assert_eq!(network.wakes_at(ring), Some(start), "the first turn is due");
    scheduler.settle();
    assert_eq!(network.wakes_at(ring), None);

    let waker = scheduler.servers[0].driver.waker();
    scheduler.servers[0].wait = Wait::For(500 * MS);
    waker.wake_by_ref();
    assert_eq!(network.wakes_at(ring), Some(start), "another shard woke it");
    scheduler.settle();
    assert_eq!(network.wakes_at(ring), Some(start + 500 * MS));
    waker.wake();
    assert_eq!(network.wakes_at(ring), Some(start), "each wake counts");
    scheduler.settle();

    let mut socket = network.socket(CLIENT, addr);
    let mut cx = Context::from_waker(Waker::noop());
    assert!(socket.poll_connect(&mut cx).is_ready());
    assert_eq!(network.wakes_at(ring), Some(start), "a connection waits");
    scheduler.settle();
    assert_eq!(network.wakes_at(ring), Some(start + 500 * MS));
    drop(socket);
    scheduler.settle();
    scheduler.servers[0].wait = Wait::Forever;
    network.set_now(start + 500 * MS);
    scheduler.finish();
}

#[test]
fn peer_that_does_not_read_holds_the_writer_back() {
    let network = Network::stepped(1, Faults::none());
    let (mut scheduler, addr) = Scheduler::new(network.clone(), 1, 1);
    let written = Rc::new(Cell::new(0));
    let (count, of) = (written.clone(), network.clone());
    let mut listener = network.socket_listener(SocketAddr::new(CLIENT, 0)).unwrap();
    let upstream = listener.local_addr();
    scheduler.spawn(async move {
        let mut socket = connect(&of, upstream).await.unwrap();
        for _ in 0..1000 {
            write_all(&mut socket, &[7; 1000]).await.unwrap();
            count.set(count.get() + 1000);
        }
    });
    scheduler.run();
    assert_eq!(written.get(), 262_000, "two sockets hold 256 KiB");
    scheduler.spawn(async move {
        let mut socket = poll_fn(|cx| listener.poll_accept(cx)).await;
        assert_eq!(read_exactly(&mut socket, 1_000_000).await.unwrap(), [7; 1_000_000]);
        assert_eq!(read(&mut socket, 1).await.unwrap(), b"");
    });
    scheduler.run();
    assert_eq!(written.get(), 1_000_000);
    let _ = addr;
    scheduler.finish();
}

/// A connection that has echoed once.
fn connected(scheduler: &mut Scheduler, addr: SocketAddr) -> Socket {
    let network = scheduler.network.clone();
    let made = Rc::new(Cell::new(None));
    let place = made.clone();
    scheduler.spawn(async move {
        let mut socket = connect(&network, addr).await.unwrap();
        write_all(&mut socket, b"hello").await.unwrap();
        assert_eq!(read_exactly(&mut socket, 5).await.unwrap(), b"hello");
        place.set(Some(socket));
    });
    scheduler.run();
    made.take().unwrap()
}

fn poll_read(socket: &mut Socket) -> Poll<Result<Vec<u8>, io::ErrorKind>> {
    let mut bytes = [0; 100];
    let read = socket.poll_read(&mut Context::from_waker(Waker::noop()), &mut bytes);
    read.map(|read| read.map(|len| bytes[..len].to_vec()).map_err(|error| error.kind()))
}

fn poll_write(socket: &mut Socket, bytes: &[u8]) -> Poll<Result<usize, io::ErrorKind>> {
    let written = socket.poll_write(&mut Context::from_waker(Waker::noop()), bytes);
    written.map(|written| written.map_err(|error| error.kind()))
}

#[test]
fn held_connection_goes_on_when_it_is_released() {
    let network = Network::stepped(1, Faults::none());
    let (mut scheduler, addr) = Scheduler::new(network.clone(), 1, 1);
    let mut held = connected(&mut scheduler, addr);
    let mut free = connected(&mut scheduler, addr);
    network.hold(held.connection().unwrap());
    for socket in [&mut held, &mut free] {
        assert_eq!(poll_write(socket, b"again"), Poll::Ready(Ok(5)));
    }
    scheduler.run();
    assert_eq!(poll_read(&mut held), Poll::Pending);
    assert_eq!(poll_read(&mut free), Poll::Ready(Ok(b"again".to_vec())));
    network.release(held.connection().unwrap());
    scheduler.run();
    assert_eq!(poll_read(&mut held), Poll::Ready(Ok(b"again".to_vec())));
    drop((held, free));
    scheduler.finish();
}

#[test]
fn partition_keeps_bytes_resets_and_connects_back() {
    let network = Network::stepped(1, Faults::none());
    let (mut scheduler, addr) = Scheduler::new(network.clone(), 1, 1);
    let first = connected(&mut scheduler, addr);
    let mut second = connected(&mut scheduler, addr);
    network.partition(SERVER, CLIENT);
    first.reset();
    assert_eq!(poll_write(&mut second, b"late"), Poll::Ready(Ok(4)));
    let of = network.clone();
    scheduler.spawn(async move {
        drop(connect(&of, addr).await.unwrap());
    });
    scheduler.run();
    assert!(scheduler.has_tasks(), "the connect waits");
    assert_eq!(network.connections().len(), 2, "the server has not heard of the reset");
    assert_eq!(poll_read(&mut second), Poll::Pending);
    network.heal(CLIENT, SERVER);
    scheduler.run();
    assert!(!scheduler.has_tasks());
    assert_eq!(network.connections().len(), 1);
    assert_eq!(poll_read(&mut second), Poll::Ready(Ok(b"late".to_vec())));
    drop(second);
    scheduler.finish();
}

#[test]
fn reset_by_hand_is_found_by_both_ends() {
    let network = Network::stepped(1, Faults::none());
    let (mut scheduler, addr) = Scheduler::new(network.clone(), 1, 1);
    let mut socket = connected(&mut scheduler, addr);
    network.reset(socket.connection().unwrap());
    scheduler.run();
    assert_eq!(poll_read(&mut socket), Poll::Ready(Err(io::ErrorKind::ConnectionReset)));
    assert_eq!(poll_write(&mut socket, b"x"), Poll::Ready(Err(io::ErrorKind::BrokenPipe)));
    drop(socket);
    scheduler.finish();
}

#[test]
fn broken_ring_fails_its_next_turn() {
    let network = Network::stepped(1, Faults::none());
    let (mut scheduler, addr) = Scheduler::new(network.clone(), 2, 1);
    let socket = connected(&mut scheduler, addr);
    let ring = scheduler.servers[0].ring;
    network.break_ring(ring, libc::EBADF);
    assert_eq!(network.wakes_at(ring), Some(network.now()));
    assert_eq!(scheduler.servers[0].turn(), Err(libc::EBADF));
    scheduler.servers.remove(0);
    drop(socket);
    scheduler.run();
    assert_eq!(network.wakes_at(ring), None);
}

#[test]
fn server_connects_to_a_client_and_to_another_server() {
    let network = Network::stepped(1, Faults::none());
    let (mut scheduler, addr) = Scheduler::new(network.clone(), 1, 1);
    let mut listener = network.socket_listener(SocketAddr::new(CLIENT, 80)).unwrap();
    let mut driver = network.driver(0, &UringConfig { connections: 4, ..UringConfig::default() }).unwrap();
    let nowhere = SocketAddr::new(CLIENT, 81);
    for (slot, to) in [listener.local_addr(), addr, nowhere].into_iter().enumerate() {
        let address = Box::new(Address::from(to));
        driver.submit(Op::Connect { id: ConnId::new(slot as u32, 1), address });
    }
    let mut out = Vec::new();
    driver.turn(Wait::Forever, Budget::default(), &mut out).unwrap();
    let results: Vec<_> = out
        .drain(..)
        .map(|completion| match completion {
            Completion::Connected { id, result } => (id.slot(), result),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(results, [(0, Ok(())), (1, Ok(())), (2, Err(libc::ECONNREFUSED))]);
    let accepted = listener.poll_accept(&mut Context::from_waker(Waker::noop()));
    let Poll::Ready(accepted) = accepted else { panic!("a connection waits") };
    assert_eq!(accepted.local_addr(), Some(listener.local_addr()));
    scheduler.run();
    assert_eq!(scheduler.servers[0].accepted, 1);
    drop((driver, accepted, listener));
    scheduler.run();
    assert!(network.leaks().iter().any(|leak| leak.contains("ended with the descriptors")));
}

#[test]
fn quiet_send_is_told_once_the_wait_is_over() {
    let network = Network::stepped(1, Faults::none());
    let addr = network.listen(SocketAddr::new(SERVER, 7000), 1).unwrap();
    let mut driver = network.driver(0, &UringConfig::default()).unwrap();
    let ring = driver.kernel().ring();
    driver.submit(Op::Accept { listener: 0 });
    let mut socket = network.socket(CLIENT, addr);
    assert!(socket.poll_connect(&mut Context::from_waker(Waker::noop())).is_ready());
    let mut out = Vec::new();
    let mut turn = |driver: &mut Uring<SimKernel>| {
        driver.turn(Wait::For(10 * MS), Budget::default(), &mut out).unwrap();
        std::mem::take(&mut out)
    };
    let accepted = turn(&mut driver);
    let [Completion::Accepted { socket: accepted, .. }] = accepted[..] else { panic!("{accepted:?}") };
    let id = ConnId::new(0, 1);
    let send = |driver: &mut Uring<SimKernel>| {
        let mut batch = Box::new(Batch::new());
        batch.put(b"quiet");
        driver.submit(Op::Send { id, batch });
        driver.defer_sent();
    };
    driver.submit(Op::Adopt { id, socket: accepted });
    send(&mut driver);
    assert_eq!(turn(&mut driver).len(), 0);
    assert_eq!(poll_read(&mut socket), Poll::Ready(Ok(b"quiet".to_vec())));
    assert_eq!(turn(&mut driver).len(), 0, "the wait goes on");
    assert_eq!(network.wakes_at(ring), Some(10 * MS));
    network.set_now(10 * MS);
    assert!(matches!(turn(&mut driver)[..], [Completion::Sent { .. }]));
    assert_eq!(network.wakes_at(ring), Some(10 * MS), "it brought something");

    send(&mut driver);
    assert_eq!(turn(&mut driver).len(), 0);
    let other = network.socket(CLIENT, addr).poll_connect(&mut Context::from_waker(Waker::noop()));
    assert!(other.is_ready());
    assert!(matches!(turn(&mut driver)[..], [Completion::Accepted { .. }, Completion::Sent { .. }]));
}

#[test]
fn connection_lost_between_two_rings_is_closed() {
    let network = Network::stepped(1, Faults::none());
    let addr = network.listen(SocketAddr::new(SERVER, 7000), 1).unwrap();
    let mut driver = network.driver(0, &UringConfig::default()).unwrap();
    driver.submit(Op::Accept { listener: 0 });
    let mut sockets = [0; 2].map(|_| network.socket(CLIENT, addr));
    for socket in &mut sockets {
        assert!(socket.poll_connect(&mut Context::from_waker(Waker::noop())).is_ready());
    }
    let mut out = Vec::new();
    driver.turn(Wait::Forever, Budget::default(), &mut out).unwrap();
    let mut passed = out.drain(..).map(|completion| match completion {
        Completion::Accepted { socket, .. } => driver.hand_over(socket).unwrap(),
        other => panic!("{other:?}"),
    });
    let (kept, lost) = (passed.next().unwrap(), passed.next().unwrap());
    drop(passed);
    drop(lost);
    assert_eq!(network.leaks().iter().filter(|leak| leak.contains("passed on")).count(), 1);
    assert_eq!(poll_read(&mut sockets[0]), Poll::Pending);
    assert_eq!(poll_read(&mut sockets[1]), Poll::Ready(Ok(vec![])));
    let mut other = network.driver(1, &UringConfig::default()).unwrap();
    let socket = other.take_over(kept);
    other.submit(Op::Refuse { socket });
    other.turn(Wait::No, Budget::default(), &mut out).unwrap();
    assert_eq!(poll_read(&mut sockets[0]), Poll::Ready(Ok(vec![])));
}
