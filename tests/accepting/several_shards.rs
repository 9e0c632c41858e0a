//! Limits that all shards share, and connections that move to shards with room.

use std::sync::atomic::Ordering::SeqCst;
use std::thread;
use std::time::{Duration, Instant};

use ringserve::CloseReason;
use ringserve::framing::LengthPrefix;
use ringserve::net::SocketOptions;
use ringserve_tests::client::{End, frame};
use ringserve_tests::{Client, Lab, On, Random, SOON, eventually, no_time_limits, on_epoll, order, pattern};

fn at_most(connections_max: usize, shards: usize) -> Lab {
    Lab::on_shards(shards, no_time_limits().connections_max(connections_max))
}

/// Connections that are all served at once.
#[track_caller]
fn served(lab: &Lab, count: usize) -> Vec<Client> {
    let mut clients: Vec<Client> = (0..count).map(|_| lab.client()).collect();
    clients.iter_mut().for_each(|client| client.send(order::echo("")));
    clients.iter_mut().for_each(|client| assert_eq!(client.recv(), order::echo("")));
    clients
}

#[test]
fn each_shard_has_its_number_and_knows_how_many_there_are() {
    let lab = at_most(100, 4);
    let mut seen = [0; 4];
    for _ in 0..60 {
        let shard: usize = lab.client().ask_text(order::shard()).parse().unwrap();
        seen[shard] += 1;
    }
    assert!(seen.iter().all(|count| *count > 0), "the kernel spreads them: {seen:?}");
    assert_eq!(lab.finish().shards.len(), 4);
}

#[test]
fn limit_counts_all_shards_and_peers_beyond_it_wait() {
    let lab = at_most(40, 4);
    let mut clients = served(&lab, 40);
    let mut waits = lab.client();
    waits.send(order::echo("41"));
    clients.iter_mut().for_each(|client| client.echoes(""));
    assert!(waits.is_silent());
    assert_eq!(lab.stats().connections, 40);
    drop(clients.pop());
    assert_eq!(waits.recv(), order::echo("41"));
    assert_eq!(lab.stats().connections, 40);
    drop((clients, waits));
    lab.holds(0);
    let counters = lab.finish().counters;
    assert_eq!((counters.opened, counters.refused), (41, 0));
}

#[test]
fn place_that_one_shard_gives_back_another_may_take() {
    let lab = at_most(8, 4);
    // The next peer lands on any shard, and the free place was another one's.
    let mut clients = served(&lab, 8);
    let mut random = Random::new(3);
    for _ in 0..100 {
        drop(clients.swap_remove(random.below(8) as usize));
        clients.extend(served(&lab, 1));
    }
    assert_eq!(lab.stats().connections, 8);
    drop(clients);
    lab.holds(0);
    assert_eq!(lab.finish().counters.opened, 108);
}

/// A server whose shards hold four connections each with io_uring, and where one of them is full.
/// With epoll each could hold them all.
fn one_is_full() -> (Lab, String, Vec<Client>) {
    let lab = at_most(16, 16);
    let mut first = lab.client();
    let shard = first.ask_text(order::shard());
    let mut clients = vec![first];
    for _ in 0..10_000 {
        if clients.len() == 4 {
            return (lab, shard, clients);
        }
        let mut client = lab.client();
        if client.ask_text(order::shard()) == shard {
            clients.push(client);
        }
    }
    panic!("the kernel leaves out a shard");
}

#[test]
fn peer_at_a_full_shard_is_served_by_another_one() {
    let (lab, full, mut clients) = one_is_full();
    let payload = order::echo(pattern(50_000));
    let mut came = 0;
    // On average one of sixteen lands there.
    while lab.stats().counters.handed_off < 5 {
        let mut client = lab.client();
        let shard = client.ask_text(order::shard());
        assert!(shard != full || on_epoll(), "there are four already");
        assert!(client.ask(&payload) == payload);
        let peer = lab.shared.peers.lock().unwrap().pop();
        assert_eq!(peer, Some(Some(client.local_addr())), "it keeps its address");
        came += 1;
        assert!(came < 10_000, "{:?}", lab.stats().counters);
        if on_epoll() && came > 200 {
            break;
        }
    }
    clients.iter_mut().for_each(|client| assert_eq!(client.ask_text(order::shard()), full));
    drop(clients);
    lab.holds(0);
    let counters = lab.finish().counters;
    assert_eq!((counters.accepted, counters.refused), (counters.opened, 0));
}

#[test]
fn all_are_served_at_once_however_the_kernel_spreads_them() {
    let lab = at_most(16, 16);
    for wave in 1..=10 {
        let mut clients = served(&lab, 16);
        let report = lab.stats();
        assert_eq!((report.connections, report.counters.opened), (16, 17 * wave - 1));
        if !on_epoll() {
            assert!(report.shards.iter().all(|shard| shard.connections <= 4));
        }
        let mut waits = lab.client();
        waits.send(order::echo(""));
        clients.iter_mut().for_each(|client| client.echoes(""));
        assert!(waits.is_silent());
        drop(clients);
        assert_eq!(waits.recv(), order::echo(""));
        drop(waits);
        lab.holds(0);
    }
    assert_eq!(lab.shared.open_most.load(SeqCst), 16);
    lab.finish();
}

/// Connects until several wait at one shard that cannot accept, and the others are gone again.
fn wait_at_one_shard(lab: &Lab) -> (Client, Vec<Client>) {
    let mut blocks = lab.client();
    blocks.send(order::block());
    eventually("the shard is blocked", SOON, || lab.shared.block.came() == 1);
    let mut waiting: Vec<Client> = Vec::new();
    let started = Instant::now();
    while waiting.len() < 8 {
        assert!(started.elapsed() < SOON, "the kernel leaves out a shard");
        let mut client = lab.client();
        client.send(order::shard());
        // A peer that answers is not at that shard; one that does not may be late, and is checked
        // again.
        client.stream.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        if client.stream.peek(&mut [0]).is_err() {
            client.stream.set_read_timeout(Some(SOON)).unwrap();
            waiting.push(client);
        }
        waiting.retain(Client::is_silent);
    }
    (blocks, waiting)
}

#[test]
fn all_that_came_to_a_full_shard_at_once_are_served_elsewhere() {
    let lab = at_most(16, 16);
    let (mut blocks, mut waiting) = wait_at_one_shard(&lab);
    lab.shared.block.end();
    assert_eq!(blocks.recv(), order::block());
    // Those that are served stay, so no peer waits for one of them to leave.
    waiting.iter_mut().for_each(|client| {
        client.recv();
    });
    waiting.iter_mut().for_each(|client| client.echoes(""));
    drop((blocks, waiting));
    lab.finish();
}

#[test]
fn more_than_there_is_room_for_are_all_served_in_time() {
    const CLIENTS: usize = 400;
    let lab = at_most(32, 8);
    let addr = lab.addr();
    thread::scope(|scope| {
        for part in 0..4 {
            scope.spawn(move || {
                let mut random = Random::new(part + 1);
                let mut open: Vec<Client> = Vec::new();
                for n in 0..CLIENTS / 4 {
                    let mut client = Client::connect(addr);
                    client.send(order::echo(n.to_string()));
                    // Four threads hold up to twelve each, which is more than there is room for.
                    open.push(client);
                    // Served peers make room for others; if all wait, others hold the places.
                    let started = Instant::now();
                    while open.len() == 12 {
                        assert!(started.elapsed() < SOON, "no peer is served any more");
                        thread::yield_now();
                        for mut client in open.extract_if(.., |client| !client.is_silent()) {
                            assert_eq!(client.recv()[0], b'e');
                            if random.below(2) == 0 { client.reset() } else { drop(client) }
                        }
                    }
                }
                open.iter().for_each(Client::finish_writing);
                for mut client in open {
                    assert_eq!(client.recv()[0], b'e');
                    assert_eq!(client.end(), End::Fin);
                }
            });
        }
    });
    let most = lab.shared.open_most.load(SeqCst);
    assert!((24..=32).contains(&most), "{most} at once");
    lab.holds(0);
    let report = lab.finish();
    assert_eq!((report.counters.opened, report.counters.refused), (CLIENTS as u64, 0));
}

#[test]
fn a_shutdown_finds_those_that_wait_and_those_on_their_way() {
    let lab = at_most(16, 4);
    let mut clients = served(&lab, 16);
    let mut waiting: Vec<Client> = (0..30).map(|_| lab.client()).collect();
    waiting.iter_mut().for_each(|client| client.send(order::echo("")));
    clients[0].write(&frame(order::echo("")).repeat(100));
    lab.running.shutdown();
    (0..100).for_each(|_| assert_eq!(clients[0].recv(), order::echo("")));
    clients.iter_mut().for_each(|client| assert_eq!(client.end(), End::Fin));
    drop(clients);
    let report = lab.ended();
    assert_eq!(report.counters.closed_for(CloseReason::Shutdown), report.counters.opened);
    waiting.iter_mut().for_each(|client| {
        client.end_after_all();
    });
}

#[test]
fn a_full_server_that_waits_for_room_does_next_to_nothing() {
    let lab = at_most(16, 4);
    let mut clients = served(&lab, 16);
    let waiting: Vec<Client> = (0..8).map(|_| lab.client()).collect();
    let turns = || lab.stats().shards.iter().map(|shard| shard.driver.turns).sum::<u64>();
    let (before, started) = (turns(), Instant::now());
    clients[0].gets_back(order::sleep(1000));
    // Each shard checks ten times per second whether another one has room.
    let seconds = started.elapsed().as_secs() + 1;
    let turns = turns() - before;
    assert!(turns < 4 * 15 * seconds + 30, "{turns} turns in {seconds} s");
    drop((clients, waiting));
    lab.abort();
}

#[test]
fn peers_without_an_address_stay_where_the_kernel_put_them() {
    let sockets = SocketOptions::default().peer_address(false);
    let server = On::default().server(no_time_limits()).shards(2).sockets(sockets);
    let lab = Lab::of(server.framing(LengthPrefix::default()));
    // Of one shard's connections all stay, of the other's none: the first one is far ahead.
    let mut clients = served(&lab, 200);
    let shards: Vec<String> = clients.iter_mut().map(|client| client.ask_text(order::shard())).collect();
    let first = shards[0].clone();
    let mut kept = Vec::new();
    for (client, shard) in clients.into_iter().zip(shards) {
        if shard == first {
            kept.push(client);
        }
    }
    lab.holds(kept.len());
    kept.extend(served(&lab, 100));
    assert_eq!(lab.stats().counters.handed_off, 0);
    assert!(lab.shared.peers.lock().unwrap().iter().all(Option::is_none));
    drop(kept);
    lab.finish();
}
