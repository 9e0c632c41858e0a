//! The server stops, whatever its connections do.

use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use ringserve::CloseReason;
use ringserve::stats::ServerStats;

use ringserve_tests::client::{End, frame};
use ringserve_tests::{Client, Lab, On, SOON, eventually, no_time_limits, order, pattern};

#[track_caller]
fn ended_for(report: &ServerStats, reason: CloseReason, count: u64) {
    assert_eq!(report.counters.closed_for(reason), count, "{:?}", report.counters);
}

fn receiving(on: On) -> (Lab, Client) {
    let lab = Lab::on(on, no_time_limits());
    let mut client = lab.client();
    client.echoes("");
    (lab, client)
}

/// Most of the reply waits for the peer.
fn sending(on: On) -> (Lab, Client) {
    let lab = Lab::on(on, no_time_limits());
    let mut client = lab.client_with_small_window();
    client.send(order::reply(20_000_000));
    eventually("the reply is under way", SOON, || lab.stats().counters.sends > 0);
    (lab, client)
}

fn waiting(on: On) -> (Lab, Client) {
    let lab = Lab::on(on, no_time_limits());
    let mut client = lab.client();
    client.send(order::gate(""));
    lab.parked(1);
    (lab, client)
}

fn lingering(on: On, linger: Duration) -> (Lab, Client) {
    let lab = Lab::on(on, no_time_limits().linger_timeout(linger));
    let mut client = lab.client();
    assert_eq!((client.ask(order::close()), client.end()), (b"bye".to_vec(), End::Fin));
    assert_eq!(lab.stats().connections, 1);
    (lab, client)
}

pub fn shutdown_while_receiving(on: On) {
    let (lab, mut client) = receiving(on);
    lab.running.shutdown();
    assert_eq!(client.end(), End::Fin);
    drop(client);
    ended_for(&lab.ended(), CloseReason::Shutdown, 1);
}

pub fn shutdown_in_the_middle_of_a_frame(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let mut client = lab.client();
    client.write(&[frame(order::echo("whole")), frame(order::echo("hello"))[..7].to_vec()].concat());
    eventually("it arrives", SOON, || lab.stats().counters.bytes_received == 17);
    lab.running.shutdown();
    assert_eq!((client.recv(), client.end()), (order::echo("whole"), End::Fin));
    drop(client);
    ended_for(&lab.ended(), CloseReason::Shutdown, 1);
}

pub fn shutdown_while_sending(on: On) {
    let (lab, mut client) = sending(on);
    lab.running.shutdown();
    assert!(client.recv() == pattern(20_000_000));
    assert_eq!(client.end(), End::Fin);
    drop(client);
    ended_for(&lab.ended(), CloseReason::Shutdown, 1);
}

pub fn shutdown_while_a_call_waits(on: On) {
    let (lab, mut client) = waiting(on);
    lab.running.shutdown();
    assert!(client.is_silent());
    lab.shared.gate.open();
    assert_eq!((client.recv(), client.end()), (order::gate(""), End::Fin));
    drop(client);
    ended_for(&lab.ended(), CloseReason::Shutdown, 1);
}

pub fn shutdown_while_lingering(on: On) {
    let (lab, client) = lingering(on, SOON);
    lab.running.shutdown();
    drop(client);
    ended_for(&lab.ended(), CloseReason::Closed, 1);
}

pub fn shutdown_while_others_wait_for_a_slot(on: On) {
    let lab = Lab::on(on, no_time_limits().connections_max(1));
    let mut client = lab.client();
    client.echoes("");
    let mut others: Vec<Client> = (0..10).map(|_| lab.client()).collect();
    lab.running.shutdown();
    assert_eq!(client.end(), End::Fin);
    drop(client);
    lab.ended();
    for other in &mut others {
        other.end_after_all();
    }
}

pub fn shutdown_with_requests_on_the_way(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let mut clients: Vec<Client> = (0..30).map(|_| lab.client()).collect();
    lab.holds(30);
    clients.iter_mut().for_each(|client| client.write(&frame(order::echo("")).repeat(10)));
    lab.running.shutdown();
    for mut client in clients {
        (0..10).for_each(|_| assert_eq!(client.recv(), order::echo("")));
        assert_eq!(client.end(), End::Fin);
    }
    ended_for(&lab.ended(), CloseReason::Shutdown, 30);
}

pub fn shutdown_while_a_client_asks_on_and_on(on: On) {
    let limits = no_time_limits().calls_in_flight_max(4).linger_timeout(SOON).drain_spread(Duration::ZERO);
    let lab = Lab::on(on, limits);
    let (mut client, mut quiet) = (lab.client(), lab.client());
    client.write(&[frame(order::gate("1")), frame(order::gate("2"))].concat());
    lab.parked(2);
    quiet.echoes("");
    lab.running.shutdown();
    // A quiet connection is closed once the shard has taken in what had arrived. What comes later
    // begins no call.
    assert_eq!(quiet.end(), End::Fin);
    client.write(&frame(order::echo("late")).repeat(200));
    lab.shared.gate.open();
    assert_eq!([client.recv(), client.recv()], [order::gate("1"), order::gate("2")]);
    assert_eq!(client.end(), End::Fin);
    client.write(&frame(order::echo("late")).repeat(200));
    drop((client, quiet));
    ended_for(&lab.ended(), CloseReason::Shutdown, 2);
}

pub fn shutdown_turns_newcomers_away_and_answers_those_queued(on: On) {
    let lab = Lab::on(on, no_time_limits());
    let (mut busy, mut waits) = (lab.client(), lab.client());
    waits.send(order::gate(""));
    lab.parked(1);
    busy.send(order::block());
    eventually("the shard is blocked", SOON, || lab.shared.block.came() == 1);
    // They connect, and ask, while the shard does not look.
    let mut queued: Vec<Client> = (0..5).map(|_| lab.client()).collect();
    queued.iter_mut().for_each(|client| client.send(order::echo("queued")));
    let mut silent = lab.client();
    lab.running.shutdown();
    lab.shared.block.end();
    assert_eq!((busy.recv(), busy.end()), (b"|".to_vec(), End::Fin));
    for client in &mut queued {
        assert_eq!((client.recv(), client.end()), (order::echo("queued"), End::Fin));
    }
    assert_eq!(silent.end(), End::Fin);
    // Long before the call that waits is done, and the server is.
    eventually("newcomers are turned away", SOON, || lab.client_that_may_fail().is_none());
    assert!(waits.is_silent());
    lab.shared.gate.open();
    assert_eq!((waits.recv(), waits.end()), (order::gate(""), End::Fin));
    drop((busy, queued, silent, waits));
    ended_for(&lab.ended(), CloseReason::Shutdown, 8);
}

pub fn shutdown_after_a_delay(on: On) {
    // Long enough for what is asked within it on a machine that does other things too.
    let drain_delay = Duration::from_secs(2);
    let lab = Lab::on(on, no_time_limits().drain_delay(drain_delay));
    let mut client = lab.client();
    client.echoes("");
    let started = std::time::Instant::now();
    lab.running.shutdown();
    // The server goes on, and knows that it shuts down.
    eventually("the shard hears of it", SOON, || client.ask(order::draining()) == b"draining");
    let mut newcomer = lab.client();
    assert_eq!(
        (newcomer.ask(order::echo("")), client.ask(order::echo(""))),
        (order::echo(""), order::echo(""))
    );
    assert_eq!((client.end(), newcomer.end()), (End::Fin, End::Fin));
    assert!(started.elapsed() >= drain_delay, "the delay is cut short");
    drop((client, newcomer));
    ended_for(&lab.ended(), CloseReason::Shutdown, 2);
}

pub fn force_in_a_delay(on: On) {
    let lab = Lab::on(on, no_time_limits().drain_delay(Duration::from_secs(3600)));
    let mut client = lab.client();
    client.echoes("");
    lab.running.shutdown();
    eventually("the shard hears of it", SOON, || client.ask(order::draining()) == b"draining");
    lab.running.abort();
    assert_eq!(client.end(), End::Reset);
    ended_for(&lab.ended(), CloseReason::ServerAborted, 1);
}

pub fn force_while_receiving(on: On) {
    let (lab, mut client) = receiving(on);
    lab.running.abort();
    assert_eq!(client.end(), End::Reset);
    ended_for(&lab.ended(), CloseReason::ServerAborted, 1);
}

pub fn force_while_sending(on: On) {
    let (lab, mut client) = sending(on);
    lab.running.abort();
    assert_eq!(client.end_after_all(), End::Reset);
    ended_for(&lab.ended(), CloseReason::ServerAborted, 1);
}

pub fn force_while_receiving_is_paused(on: On) {
    let (lab, mut client) = waiting(on);
    client.write_until_stuck(&vec![0; 32 << 20], Duration::from_millis(50));
    assert!(lab.stats().counters.receives_paused >= 1);
    lab.running.abort();
    assert_eq!(client.end_after_all(), End::Reset);
    ended_for(&lab.ended(), CloseReason::ServerAborted, 1);
}

pub fn force_while_a_call_waits(on: On) {
    let (lab, mut client) = waiting(on);
    let shared = lab.shared.clone();
    lab.running.abort();
    assert_eq!(client.end(), End::Reset);
    ended_for(&lab.ended(), CloseReason::ServerAborted, 1);
    assert_eq!(shared.dropped.load(SeqCst), 1);
}

pub fn force_while_lingering(on: On) {
    let (lab, client) = lingering(on, Duration::from_secs(3600));
    lab.running.abort();
    // It had ended before; the abort only cuts its waiting short.
    ended_for(&lab.ended(), CloseReason::Closed, 1);
    drop(client);
}

pub fn force_while_short_of_buffers(on: On) {
    let limits = no_time_limits().receive_buffer_bytes(64).receive_bytes_max(256);
    let lab = Lab::on(on, limits);
    let mut clients: Vec<Client> = (0..20).map(|_| lab.client()).collect();
    for client in &mut clients {
        client.send(order::keep("ept"));
        assert_eq!(client.recv(), b"4");
        client.write_until_stuck(&frame(order::echo_of(1000)).repeat(20), Duration::from_millis(10));
    }
    lab.running.abort();
    clients.iter_mut().for_each(|client| assert_eq!(client.end_after_all(), End::Reset));
    ended_for(&lab.ended(), CloseReason::ServerAborted, 20);
}

pub fn force_in_a_drain(on: On) {
    let (lab, mut client) = waiting(on);
    lab.running.shutdown();
    assert!(client.is_silent());
    lab.running.abort();
    assert_eq!(client.end(), End::Reset);
    ended_for(&lab.ended(), CloseReason::ServerAborted, 1);
}

pub fn dropped_while_busy(on: On) {
    let (lab, mut client) = sending(on);
    let mut other = lab.client();
    other.echoes("");
    drop(lab.running);
    assert_eq!((client.end_after_all(), other.end()), (End::Reset, End::Reset));
    assert_eq!(lab.shared.opened.load(SeqCst), lab.shared.closed.load(SeqCst));
}
