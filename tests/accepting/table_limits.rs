//! `connections_max`: peers that come later wait, and none is dropped.

use ringserve::CloseReason;
use ringserve_tests::client::{End, frame};
use ringserve_tests::{Client, Lab, SOON, eventually, no_time_limits, order};

fn at_most(connections_max: usize) -> Lab {
    Lab::start(no_time_limits().connections_max(connections_max))
}

#[test]
fn peer_beyond_the_limit_is_served_once_a_slot_is_free() {
    let lab = at_most(10);
    let mut first: Vec<Client> = (0..10).map(|_| lab.client()).collect();
    first.iter_mut().for_each(|client| client.echoes(""));
    let mut waiting: Vec<Client> = (0..40).map(|_| lab.client()).collect();
    waiting.iter_mut().for_each(|client| client.send(order::echo("waited")));
    eventually("accepting pauses", SOON, || lab.stats().counters.accept_paused >= 1);
    first.iter_mut().for_each(|client| client.echoes(""));
    assert!(waiting.iter().all(Client::is_silent));
    assert_eq!(lab.stats().connections, 10);
    // Ten at a time, in whatever order the kernel hands them out; no peer is left out.
    drop(first);
    eventually("all that waited are served", SOON, || {
        waiting.retain_mut(|client| {
            if client.is_silent() {
                return true;
            }
            assert_eq!(client.recv(), order::echo("waited"));
            false
        });
        assert!(lab.stats().connections <= 10);
        waiting.is_empty()
    });
    lab.closed_for(CloseReason::PeerClosed, 50);
    let report = lab.finish();
    assert_eq!((report.counters.accepted, report.counters.refused), (50, 0));
}

#[test]
fn a_limit_of_one_serves_one_after_the_other() {
    let lab = at_most(1);
    let mut clients: Vec<Client> = (0..20).map(|_| lab.client()).collect();
    clients.iter_mut().for_each(|client| {
        client.write(&[frame(order::echo("")), frame(order::close())].concat());
        client.finish_writing();
    });
    for mut client in clients {
        assert_eq!([client.recv(), client.recv()], [order::echo(""), b"bye".to_vec()]);
        assert_eq!(client.end(), End::Fin);
    }
    lab.closed_for(CloseReason::Closed, 20);
    lab.finish();
}

#[test]
fn peer_that_waits_may_give_up() {
    let lab = at_most(2);
    let mut first = [lab.client(), lab.client()];
    first.iter_mut().for_each(|client| client.echoes(""));
    let (gives_up, mut waits): (Vec<Client>, Vec<Client>) =
        ((0..10).map(|_| lab.client()).collect(), (0..10).map(|_| lab.client()).collect());
    gives_up.into_iter().for_each(Client::reset);
    waits.iter_mut().for_each(|client| client.send(order::close()));
    drop(first);
    for mut client in waits {
        assert_eq!(client.recv(), b"bye");
    }
    lab.holds(0);
    lab.finish();
}

#[test]
fn slots_used_again_and_again_stay_apart() {
    let lab = at_most(3);
    for n in 0..300 {
        let mut client = lab.client();
        let text = order::echo(n.to_string());
        client.gets_back(text);
        if n % 3 == 0 {
            client.reset();
        }
    }
    lab.holds(0);
    let report = lab.finish();
    assert_eq!(report.counters.opened, 300);
}

#[test]
fn a_server_that_is_full_shuts_down_with_others_waiting() {
    let lab = at_most(2);
    let mut first = [lab.client(), lab.client()];
    first.iter_mut().for_each(|client| client.echoes(""));
    let mut waiting: Vec<Client> = (0..20).map(|_| lab.client()).collect();
    eventually("accepting pauses", SOON, || lab.stats().counters.accept_paused >= 1);
    lab.running.shutdown();
    first.iter_mut().for_each(|client| assert_eq!(client.end(), End::Fin));
    drop(first);
    lab.ended();
    // They were never served; what they see is an end, not silence.
    waiting.iter_mut().for_each(|client| {
        client.end_after_all();
    });
}

#[test]
fn peer_not_admitted_is_closed_and_holds_no_slot() {
    let server = ringserve_tests::On::default().server(no_time_limits().connections_max(2));
    let lab = Lab::of(server.framing(ringserve::framing::LengthPrefix::default()).admit(|_| false));
    for _ in 0..20 {
        lab.client().end_after_all();
    }
    let report = lab.finish();
    assert_eq!((report.counters.refused, report.counters.opened), (20, 0));
}
