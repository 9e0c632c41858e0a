//! Who is accepted, who waits, who is not let in.

use std::sync::atomic::Ordering::SeqCst;

use ringserve::CloseReason;
use ringserve::framing::LengthPrefix;

use ringserve_tests::client::End;
use ringserve_tests::{Client, Lab, On, SOON, eventually, no_time_limits, order};

pub fn a_peer_is_accepted_and_greeted(on: On) {
    let lab = Lab::on(on, no_time_limits());
    lab.shared.greet.store(true, SeqCst);
    assert_eq!(lab.client().recv(), b"hello");
    lab.finish();
}

fn address_is_right(on: On, at: &str) {
    let lab = Lab::of(on.site_at(at, no_time_limits()).framing(LengthPrefix::default()));
    for _ in 0..10 {
        let mut client = lab.client();
        client.echoes("");
        assert_eq!(lab.shared.peers.lock().unwrap().pop(), Some(Some(client.local_addr())));
    }
    lab.finish();
}

pub fn the_peers_address_is_right(on: On) {
    address_is_right(on, "127.0.0.1:0");
}

pub fn the_peers_address_is_right_on_ipv6(on: On) {
    address_is_right(on, "[::1]:0");
}

pub fn many_at_once_are_all_accepted(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let mut clients: Vec<Client> = (0..300).map(|_| lab.client()).collect();
    clients.iter_mut().for_each(|client| client.send(order::echo("")));
    clients.iter_mut().for_each(|client| assert_eq!(client.recv(), order::echo("")));
    lab.holds(300);
    drop(clients);
    lab.holds(0);
    assert_eq!(lab.finish().counters.accepted, 300);
}

pub fn peer_gone_before_accept_leaks_nothing(on: On) {
    let lab = Lab::on(on, no_time_limits());
    (0..100).for_each(|_| lab.client().reset());
    lab.client().echoes("");
    lab.holds(0);
    lab.finish();
}

fn at_most(on: On, connections_max: usize) -> Lab {
    Lab::on(on, no_time_limits().connections_max(connections_max))
}

pub fn peers_beyond_the_limit_wait(on: On) {
    let lab = at_most(on, 4);
    let mut first: Vec<Client> = (0..4).map(|_| lab.client()).collect();
    first.iter_mut().for_each(|client| client.echoes(""));
    let mut waiting: Vec<Client> = (0..8).map(|_| lab.client()).collect();
    waiting.iter_mut().for_each(|client| client.send(order::close()));
    eventually("accepting pauses", SOON, || lab.stats().counters.accept_paused >= 1);
    assert!(waiting.iter().all(Client::is_silent));
    assert_eq!(lab.stats().connections, 4);
    drop(first);
    for client in &mut waiting {
        assert_eq!((client.recv(), client.end()), (b"bye".to_vec(), End::Fin));
        client.finish_writing();
    }
    lab.closed_for(CloseReason::Closed, 8);
    let counters = lab.finish().counters;
    assert_eq!((counters.accepted, counters.refused), (12, 0));
}

pub fn peer_that_gives_up_waiting_leaves_nothing(on: On) {
    let lab = at_most(on, 1);
    let mut first = lab.client();
    first.echoes("");
    (0..10).for_each(|_| lab.client().reset());
    let mut last = lab.client();
    last.send(order::echo(""));
    drop(first);
    assert_eq!(last.recv(), order::echo(""));
    drop(last);
    lab.holds(0);
    lab.finish();
}

pub fn peer_not_admitted_is_closed(on: On) {
    let host = on.site(no_time_limits()).framing(LengthPrefix::default());
    let lab = Lab::of(host.admit(|peer| peer.addr().is_none()));
    (0..10).for_each(|_| assert_eq!(lab.client().end(), End::Fin));
    let counters = lab.finish().counters;
    assert_eq!((counters.accepted, counters.refused, counters.opened), (10, 10, 0));
}

pub fn refused_peer_hears_why(on: On) {
    let lab = Lab::on(on, no_time_limits());
    lab.shared.refuse.store(true, SeqCst);
    let mut client = lab.client();
    assert_eq!((client.recv(), client.end()), (b"no".to_vec(), End::Fin));
    drop(client);
    lab.closed_for(CloseReason::Refused, 1);
    assert_eq!(lab.shared.closed.load(SeqCst), 0);
    lab.finish();
}

pub fn newcomers_after_a_shutdown_see_an_end_at_once(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let mut waits = lab.client();
    waits.send(order::gate(""));
    lab.parked(1);
    lab.running.shutdown();
    // It may be queued still, and sees an end, while the server waits for a call.
    if let Some(mut late) = lab.client_that_may_fail() {
        late.end_after_all();
    }
    assert!(waits.is_silent());
    lab.shared.gate.open();
    assert_eq!((waits.recv(), waits.end()), (order::gate(""), End::Fin));
    drop(waits);
    let (net, addr) = (lab.net.clone(), lab.addr());
    assert!(lab.ended().counters.opened <= 2);
    assert!(net.connect(addr).is_err());
}
