//! Connections that wait to be accepted, and losses, for each listener and shard.

use std::net::{SocketAddr, TcpStream};
use std::thread;

use ringserve::framing::LengthPrefix;
use ringserve::net::SocketOptions;
use ringserve::stats::AcceptQueueStats;
use ringserve_tests::proc_net::listen_drops;
use ringserve_tests::{Client, Lab, On, SOON, eventually, no_time_limits, order};
use socket2::{Domain, Socket, Type};

const BACKLOG: u32 = 4;

/// Peers: with two shards the chance that one of them gets no more than its queue takes is one in a
/// million.
const PEERS: usize = 40;

/// Connects without waiting for the end of the handshake, which does not come while the queue is
/// full.
fn begins_to_connect(addr: SocketAddr) -> Socket {
    let socket = Socket::new(Domain::for_address(addr), Type::STREAM, None).unwrap();
    socket.set_nonblocking(true).unwrap();
    let _in_progress = socket.connect(&addr.into());
    socket
}

#[track_caller]
fn queue_of(queues: &[AcceptQueueStats], shard: usize) -> AcceptQueueStats {
    *queues.iter().find(|queue| queue.shard == Some(shard)).expect("each shard has one")
}

#[test]
fn queue_of_a_blocked_shard_fills_and_loses_alone() {
    let sockets = SocketOptions::default().backlog(BACKLOG);
    let server = On::default().server(no_time_limits()).shards(2).sockets(sockets);
    let lab = Lab::of(server.framing(LengthPrefix::default()));
    let before = listen_drops();
    let mut busy = lab.client();
    let blocked: usize = busy.ask_text(order::shard()).parse().unwrap();
    busy.send(order::block());
    eventually("the shard is blocked", SOON, || lab.shared.block.came() == 1);
    let free = 1 - blocked;
    let peers: Vec<Socket> = (0..PEERS)
        .map(|_| {
            let peer = begins_to_connect(lab.addr());
            eventually("the other shard accepts", SOON, || queue_of(&lab.accept_queues(), free).waiting == 0);
            peer
        })
        .collect();
    let queues = lab.accept_queues();
    assert_eq!(queues.len(), 2);
    let (full, other) = (queue_of(&queues, blocked), queue_of(&queues, free));
    assert_eq!((full.listener, full.waiting, full.capacity), (0, u64::from(BACKLOG) + 1, u64::from(BACKLOG)));
    assert_eq!((other.waiting, other.capacity, other.lost), (0, u64::from(BACKLOG), Some(0)));
    // Listeners of other tests may lose some too.
    let (lost, dropped) = (full.lost.unwrap(), listen_drops() - before);
    assert!((1..=dropped).contains(&lost), "{lost} lost here, and {dropped} on the machine");
    lab.shared.block.end();
    // Their kernels try again. A peer whose last packet met a full queue takes itself for
    // connected, and is accepted once it sends.
    eventually("all are connected", 3 * SOON, || peers.iter().all(|peer| peer.peer_addr().is_ok()));
    let mut clients: Vec<Client> = peers
        .into_iter()
        .map(|peer| {
            peer.set_nonblocking(false).unwrap();
            Client::of(peer)
        })
        .collect();
    clients.iter_mut().for_each(|client| client.send(order::echo("x")));
    clients.iter_mut().for_each(|client| assert_eq!(client.recv(), order::echo("x")));
    assert!(lab.accept_queues().iter().all(|queue| queue.waiting == 0));
    assert!(queue_of(&lab.accept_queues(), blocked).lost >= full.lost, "a count never falls");
    drop((busy, clients));
    lab.holds(0);
    lab.finish();
}

#[test]
fn gauges_keep_no_listener_open_that_is_drained() {
    let lab = Lab::on_shards(2, no_time_limits());
    let (addr, control) = (lab.addr(), lab.running.control());
    assert_eq!(control.accept_queues().len(), 2);
    let reads = thread::spawn({
        let control = control.clone();
        move || while !control.accept_queues().is_empty() {}
    });
    let mut stays = lab.client();
    stays.send(order::gate("waits"));
    lab.parked(1);
    lab.running.shutdown();
    reads.join().unwrap();
    assert!(TcpStream::connect(addr).is_err(), "nothing listens any more");
    lab.shared.gate.open();
    assert_eq!(stays.recv(), order::gate("waits"));
    drop(stays);
    lab.ended();
}
