//! Several calls of one connection that wait at once.

use std::collections::HashSet;
use std::sync::atomic::Ordering::SeqCst;

use ringserve::CloseReason;
use ringserve_tests::client::{End, frame};
use ringserve_tests::{Client, Lab, Random, SOON, eventually, no_time_limits, order};

fn up_to(calls_in_flight_max: u16) -> Lab {
    Lab::start(no_time_limits().calls_in_flight_max(calls_in_flight_max))
}

fn send_all(client: &mut Client, texts: &[&str]) {
    client.write(&texts.iter().flat_map(|text| frame(text.as_bytes())).collect::<Vec<u8>>());
}

#[test]
fn replies_come_in_the_order_in_which_calls_are_done() {
    let lab = up_to(8);
    let mut client = lab.client();
    for round in 1..=20 {
        send_all(&mut client, &["g1", "g2", "g3", "g4"]);
        lab.at_doors(4 * round);
        for name in ["3", "1", "4", "2"] {
            assert!(client.is_silent());
            lab.shared.doors.open(name);
            assert_eq!(client.recv(), order::door(name));
        }
    }
    lab.finish();
}

#[test]
fn a_frame_beyond_the_limit_waits_until_a_call_is_done() {
    let lab = up_to(4);
    let mut client = lab.client();
    send_all(&mut client, &["g1", "g2", "g3", "g4", "g5", "e6", "g7"]);
    lab.at_doors(4);
    let mut other = lab.client();
    (0..50).for_each(|_| other.echoes(""));
    assert_eq!(lab.shared.doors.came(), 4);
    assert!(client.is_silent(), "not even one that would not wait is handed over");
    lab.shared.doors.open("3");
    assert_eq!(client.recv(), order::door("3"));
    lab.at_doors(5);
    assert!(client.is_silent());
    lab.shared.doors.open("5");
    // Its place goes to a call that is done at once, and then to the next.
    assert_eq!([client.recv(), client.recv()], [order::door("5"), order::echo("6")]);
    lab.at_doors(6);
    for name in ["7", "1", "2", "4"] {
        lab.shared.doors.open(name);
        assert_eq!(client.recv(), order::door(name));
    }
    lab.finish();
}

#[test]
fn limit_of_one_lets_nothing_pass_a_call_that_waits() {
    let lab = up_to(1);
    let mut client = lab.client();
    send_all(&mut client, &["g1", "g2"]);
    lab.at_doors(1);
    lab.shared.doors.open("2");
    let mut other = lab.client();
    (0..50).for_each(|_| other.gets_back(order::thread_wakes("")));
    assert!(client.is_silent());
    lab.shared.doors.open("1");
    assert_eq!([client.recv(), client.recv()], [b"g1", b"g2"]);
    lab.finish();
}

#[test]
fn all_calls_are_dropped_when_their_connection_ends() {
    let lab = up_to(16);
    let names: Vec<String> = (0..16).map(|n| format!("g{n}")).collect();
    let texts: Vec<&str> = names.iter().map(String::as_str).collect();
    for round in 1..=10 {
        let mut client = lab.reached("it");
        send_all(&mut client, &texts);
        lab.at_doors(16 * round);
        if round % 2 == 0 {
            client.reset();
        } else {
            lab.shared.handle("it").close();
            assert_eq!(client.end(), End::Fin);
        }
        let dropped = || lab.shared.dropped.load(SeqCst) == 16 * round;
        eventually("all of them are dropped", SOON, dropped);
    }
    lab.closed_for(CloseReason::PeerReset, 5);
    lab.finish();
}

#[test]
fn half_closed_peer_gets_the_replies_of_all_that_wait() {
    let lab = up_to(8);
    let mut client = lab.client();
    send_all(&mut client, &["g1", "g2", "g3", "e4"]);
    client.finish_writing();
    lab.at_doors(3);
    assert_eq!(client.recv(), order::echo("4"));
    let mut other = lab.client();
    (0..50).for_each(|_| other.gets_back(order::thread_wakes("")));
    for name in ["2", "3", "1"] {
        lab.shared.doors.open(name);
        assert_eq!(client.recv(), order::door(name));
    }
    assert_eq!(client.end(), End::Fin);
    lab.closed_for(CloseReason::PeerClosed, 1);
    assert_eq!(lab.shared.dropped.load(SeqCst), 0);
    drop(other);
    lab.finish();
}

#[test]
fn a_shutdown_waits_for_all_that_wait() {
    let lab = up_to(8);
    let mut client = lab.client();
    send_all(&mut client, &["g1", "g2", "g3"]);
    lab.at_doors(3);
    lab.running.shutdown();
    for name in ["2", "3", "1"] {
        lab.shared.doors.open(name);
        assert_eq!(client.recv(), order::door(name));
    }
    assert_eq!(client.end(), End::Fin);
    drop(client);
    assert_eq!(lab.ended().counters.closed_for(CloseReason::Shutdown), 1);
}

#[test]
fn one_that_panics_ends_the_connection_with_all_others() {
    let lab = up_to(8);
    let mut client = lab.client();
    send_all(&mut client, &["g1", "X", "g2"]);
    lab.at_doors(2);
    lab.parked(1);
    lab.shared.gate.open();
    assert_eq!(client.end(), End::Reset);
    lab.closed_for(CloseReason::HandlerPanicked, 1);
    eventually("the others are dropped", SOON, || lab.shared.dropped.load(SeqCst) >= 2);
    lab.client().gets_back(order::thread_wakes(""));
    lab.finish();
}

#[test]
fn one_that_fails_ends_the_connection_with_all_others() {
    let lab = up_to(8);
    let mut client = lab.client();
    send_all(&mut client, &["g1", "F", "g2"]);
    lab.at_doors(2);
    lab.parked(1);
    lab.shared.gate.open();
    assert_eq!(client.end(), End::Fin);
    drop(client);
    lab.closed_for(CloseReason::HandlerError, 1);
    eventually("the others are dropped", SOON, || lab.shared.dropped.load(SeqCst) == 2);
    lab.finish();
}

#[test]
fn those_that_fail_together_end_the_connection_with_all_others() {
    let lab = up_to(8);
    for (round, (fails, end)) in (1..).zip([("F", End::Fin), ("X", End::Reset)].repeat(5)) {
        let mut client = lab.client();
        send_all(&mut client, &["g1", fails, fails, fails]);
        lab.at_doors(round);
        lab.parked(3 * round);
        lab.shared.gate.open();
        assert_eq!(client.end(), end);
        drop(client);
        // All except the one that failed first.
        let dropped = || lab.shared.dropped.load(SeqCst) == 3 * round;
        eventually("the others are dropped", SOON, dropped);
        lab.shared.gate.close();
    }
    lab.finish();
}

#[test]
fn many_in_flight_on_many_connections_are_each_answered_once() {
    const CLIENTS: usize = 20;
    const CALLS: usize = 600;
    let lab = up_to(16);
    let mut random = Random::new(7);
    let mut clients: Vec<Client> = (0..CLIENTS).map(|_| lab.client()).collect();
    let mut kinds = || ["t", "S1,", "e", "w", "S3,"][random.below(5) as usize];
    let texts: Vec<Vec<String>> =
        (0..CLIENTS).map(|client| (0..CALLS).map(|n| format!("{}{client}.{n}", kinds())).collect()).collect();
    for (client, texts) in clients.iter_mut().zip(&texts) {
        client.write(&texts.iter().flat_map(|text| frame(text.as_bytes())).collect::<Vec<u8>>());
        client.finish_writing();
    }
    for (client, texts) in clients.iter_mut().zip(&texts) {
        let (wire, end) = client.read_to_end();
        let replies = ringserve_tests::client::frames(&wire);
        assert_eq!((replies.len(), end), (CALLS, End::Fin));
        let once: HashSet<&[u8]> = replies.iter().map(Vec::as_slice).collect();
        assert!(once == texts.iter().map(|text| text.as_bytes()).collect());
    }
    lab.closed_for(CloseReason::PeerClosed, CLIENTS as u64);
    lab.finish();
}

#[test]
fn two_that_wait_for_room_both_go_on() {
    let lab = Lab::start(no_time_limits().calls_in_flight_max(2));
    let mut client = lab.client();
    let len = 8 << 20;
    client.send(order::stream(len));
    client.send(order::stream(len));
    client.read(2 * len);
    lab.finish();
}
