//! Shutting down: requests that arrived are answered, and the server ends in time.

use std::convert::Infallible;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::thread;
use std::time::{Duration, Instant};

use ringserve::framing::LengthPrefix;
use ringserve::{CloseReason, Cx, Error, Frame, Service};
use ringserve_tests::client::{End, frame, frames};
use ringserve_tests::{Client, Lab, On, Puppet, SOON, Shared, eventually, no_time_limits, order, pattern};

#[test]
fn quiet_connections_are_closed_with_fin_and_the_port_is_free() {
    let lab = Lab::start(no_time_limits());
    let addr = lab.addr();
    let mut clients: Vec<Client> = (0..50).map(|_| lab.client()).collect();
    clients.iter_mut().for_each(|client| client.echoes(""));
    lab.running.shutdown();
    for mut client in clients {
        assert_eq!(client.end(), End::Fin);
    }
    let report = lab.ended();
    assert_eq!(report.counters.closed_for(CloseReason::Shutdown), 50);
    assert!(std::net::TcpStream::connect(addr).is_err(), "no listener is left");
}

#[test]
fn drain_under_load_cuts_no_reply_and_resets_no_peer() {
    let lab = Lab::start(no_time_limits().linger_timeout(Duration::from_secs(10)));
    let answered = AtomicU64::new(0);
    thread::scope(|scope| {
        let loads: Vec<_> = (0..20)
            .map(|n: usize| {
                let (client, answered) = (lab.client(), &answered);
                scope.spawn(move || load_until_fin(client, n, answered))
            })
            .collect();
        eventually("the load runs", SOON, || answered.load(SeqCst) >= 1_000);
        lab.running.shutdown();
        loads.into_iter().for_each(|load| load.join().unwrap());
    });
    let report = lab.ended();
    assert_eq!(report.counters.closed_for(CloseReason::Shutdown), 20, "{:?}", report.counters);
    let frames = report.counters.frames;
    assert_eq!(frames, answered.load(SeqCst), "a request without an answer before the FIN was not executed");
}

/// Asks for a few replies at a time, and checks each, until the server closes: with FIN, and not
/// within a reply.
fn load_until_fin(mut client: Client, n: usize, answered: &AtomicU64) {
    let payload = order::echo(pattern(n * 997));
    let wire = frame(&payload);
    let requests = wire.repeat(1 + n % 4);
    let mut reply = vec![0; wire.len()];
    while client.stream.write_all(&requests).is_ok() {
        for _ in 0..1 + n % 4 {
            let Some(whole) = client.read_whole_or_fin(&mut reply) else { return };
            assert!(whole == wire);
            answered.fetch_add(1, SeqCst);
        }
    }
    // The server has closed both ways, so its earlier bytes were read before.
    assert_eq!(client.end(), End::Fin);
}

#[test]
fn request_before_the_shutdown_is_answered() {
    let lab = Lab::start(no_time_limits());
    let mut clients: Vec<Client> = (0..50).map(|_| lab.client()).collect();
    lab.holds(50);
    clients.iter_mut().for_each(|client| client.write(&frame(order::echo("last")).repeat(20)));
    lab.running.shutdown();
    for mut client in clients {
        let (wire, end) = client.read_to_end();
        assert_eq!((frames(&wire).len(), end), (20, End::Fin));
    }
    lab.ended();
}

#[test]
fn a_slow_reader_gets_the_rest_of_its_reply_in_a_drain() {
    let lab = Lab::start(no_time_limits());
    let mut client = Client::with_small_window(lab.addr());
    client.send(order::reply(20_000_000));
    eventually("the reply is under way", SOON, || lab.stats().counters.sends > 0);
    lab.running.shutdown();
    assert!(client.recv() == pattern(20_000_000));
    assert_eq!(client.end(), End::Fin);
    drop(client);
    assert_eq!(lab.ended().counters.closed_for(CloseReason::Shutdown), 1);
}

#[test]
fn a_call_that_waits_is_finished_in_a_drain() {
    let lab = Lab::start(no_time_limits());
    let mut client = lab.client();
    client.write(&[frame(order::gate("")), frame(order::echo("2"))].concat());
    lab.parked(1);
    let mut quiet = lab.client();
    lab.holds(2);
    lab.running.shutdown();
    assert_eq!(quiet.end(), End::Fin);
    drop(quiet);
    assert!(client.is_silent());
    lab.shared.gate.open();
    assert_eq!([client.recv(), client.recv()], [order::gate(""), order::echo("2")]);
    assert_eq!(client.end(), End::Fin);
    drop(client);
    lab.ended();
}

#[test]
fn call_not_done_at_the_drain_limit_is_reset() {
    let lab = Lab::start(no_time_limits().drain_timeout(Duration::from_millis(300)));
    let mut waits = lab.client();
    waits.send(order::gate(""));
    lab.parked(1);
    let mut never_reads = Client::with_small_window(lab.addr());
    never_reads.send(order::replies(300, 100_000));
    let mut half = lab.client();
    half.write(&[0, 0, 0, 9, 1]);
    eventually("everything arrives", SOON, || lab.stats().counters.bytes_received == 5 + 15 + 5);
    let started = Instant::now();
    lab.running.shutdown();
    // Half a frame is not awaited.
    assert_eq!(half.end(), End::Fin);
    drop(half);
    assert_eq!(waits.end(), End::Reset);
    assert_eq!(never_reads.end_after_all(), End::Reset);
    let dropped = lab.shared.clone();
    let report = lab.ended();
    assert!(started.elapsed() >= Duration::from_millis(280), "not before the limit");
    assert_eq!(report.counters.closed_for(CloseReason::DrainTimeout), 2);
    assert_eq!(dropped.dropped.load(SeqCst), 1);
}

#[test]
fn a_connection_that_was_held_back_is_quiet_again() {
    let lab = Lab::start(no_time_limits());
    let mut client = lab.client();
    // Larger than a buffer, so that it is put together, and than the outbox's high mark.
    let payload = order::echo(pattern(400 << 10));
    assert_eq!(client.ask(&payload), payload);
    lab.running.shutdown();
    assert_eq!(client.end(), End::Fin);
    drop(client);
    assert_eq!(lab.ended().counters.closed_for(CloseReason::Shutdown), 1);
}

#[test]
fn force_resets_at_once_whatever_a_connection_does() {
    let lab = Lab::start(no_time_limits());
    let mut waits = lab.client();
    waits.send(order::gate(""));
    lab.parked(1);
    let mut never_reads = Client::with_small_window(lab.addr());
    never_reads.send(order::replies(300, 100_000));
    let mut quiet = lab.client();
    quiet.echoes("");
    eventually("everything arrives", SOON, || lab.stats().counters.frames == 3);
    lab.running.abort();
    assert_eq!(waits.end(), End::Reset);
    assert_eq!(quiet.end(), End::Reset);
    assert_eq!(never_reads.end_after_all(), End::Reset);
    assert_eq!(lab.ended().counters.closed_for(CloseReason::ServerAborted), 3);
}

#[test]
fn force_ends_a_drain_that_waits() {
    let lab = Lab::start(no_time_limits());
    let mut waits = lab.client();
    waits.send(order::gate(""));
    lab.parked(1);
    lab.running.shutdown();
    let mut quiet = lab.client_that_may_fail();
    lab.running.abort();
    assert_eq!(waits.end(), End::Reset);
    if let Some(quiet) = &mut quiet {
        quiet.end_after_all();
    }
    lab.ended();
}

#[test]
fn a_server_that_is_dropped_stops() {
    let lab = Lab::start(no_time_limits());
    let mut client = lab.client();
    client.echoes("");
    drop(lab.running);
    assert_eq!(client.end(), End::Reset);
    assert_eq!(lab.shared.closed.load(SeqCst), 1);
}

#[test]
fn a_report_from_two_threads_at_once_reaches_both() {
    let lab = Lab::start(no_time_limits());
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| (0..300).for_each(|_| assert_eq!(lab.stats().shards.len(), 1)));
        }
    });
    lab.finish();
}

/// Answers each frame, after a while in which its shard does nothing else.
struct Busy {
    shared: Arc<Shared>,
}

impl Service for Busy {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Infallible> {
        match &*frame {
            b"block" => self.shared.block.wait(),
            b"work" => {
                let until = Instant::now() + Duration::from_millis(5);
                while Instant::now() < until {}
            }
            _ => {}
        }
        cx.reply(frame);
        Ok(())
    }
}

#[test]
fn newcomers_that_were_queued_are_answered_by_a_busy_shard() {
    let shared = Arc::new(Shared::default());
    let for_shard = shared.clone();
    let server = On::default().server(no_time_limits()).framing(LengthPrefix::default());
    let running = server.start(move |_| Busy { shared: for_shard.clone() }).unwrap();
    let addr = running.local_addrs()[0];
    let mut old: Vec<Client> = (0..10).map(|_| Client::connect(addr)).collect();
    old.iter_mut().for_each(|client| assert_eq!(client.ask("hello"), b"hello"));
    let mut blocks = Client::connect(addr);
    blocks.send("block");
    eventually("the shard is blocked", SOON, || shared.block.came() == 1);
    old.iter_mut().for_each(|client| client.send("work"));
    let mut new: Vec<Client> = (0..10).map(|_| Client::connect(addr)).collect();
    new.iter_mut().for_each(|client| client.send("hello"));
    running.shutdown();
    shared.block.end();
    for client in &mut old {
        assert_eq!((client.recv(), client.end()), (b"work".to_vec(), End::Fin));
    }
    for client in &mut new {
        assert_eq!((client.recv(), client.end()), (b"hello".to_vec(), End::Fin));
    }
    drop((old, new, blocks));
    ringserve_tests::watch::ended(running);
}

#[test]
fn wait_gives_up_a_shard_that_a_call_blocks_and_ends_no_process() {
    let shared = Arc::<Shared>::default();
    let limits = no_time_limits().drain_timeout(Duration::from_millis(50));
    let puppet = shared.clone();
    let server = On::default().server(limits).framing(LengthPrefix::default());
    let running = server.start(move |_| Puppet::new(puppet.clone())).unwrap();
    let mut client = Client::connect(running.local_addrs()[0]);
    client.send(order::block());
    eventually("the shard is blocked", SOON, || shared.block.came() == 1);
    running.shutdown();
    assert!(matches!(running.wait(), Err(Error::Blocked { shard: 0 })));
    shared.block.end();
}
