//! Each time limit closes the connections that it covers, with its own reason, and no other
//! connection notices.

use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use ringserve::CloseReason;
use ringserve::limits::IdleActivity;
use ringserve_tests::client::{End, frame};
use ringserve_tests::{Client, Lab, SOON, eventually, no_time_limits, order, pattern};

const SHORT: Option<Duration> = Some(Duration::from_millis(200));

/// Keeps asking until the server counted `count` closes for `reason`; every answer must be right.
#[track_caller]
fn asks_until_closed(lab: &Lab, canary: &mut Client, reason: CloseReason, count: u64) {
    let started = Instant::now();
    while lab.stats().counters.closed_for(reason) < count {
        canary.echoes("canary");
        assert!(started.elapsed() < ringserve_tests::SOON, "{:?}", lab.stats().counters);
    }
}

#[test]
fn silent_peers_are_closed_at_the_first_frame_limit() {
    let lab = Lab::start(no_time_limits().first_frame_timeout(SHORT));
    let started = Instant::now();
    let mut canary = lab.client();
    canary.echoes("");
    let clients: Vec<Client> = (0..100).map(|_| lab.client()).collect();
    asks_until_closed(&lab, &mut canary, CloseReason::FirstFrameTimeout, 100);
    assert!(started.elapsed() >= Duration::from_millis(180), "not before the limit");
    for mut client in clients {
        assert_eq!(client.end(), End::Fin);
    }
    lab.holds(1);
    lab.finish();
}

#[test]
fn slow_sender_of_one_frame_meets_the_first_frame_limit() {
    let lab = Lab::start(no_time_limits().first_frame_timeout(SHORT).idle_timeout(SHORT));
    let mut canary = lab.client();
    let mut clients: Vec<Client> = (0..20).map(|_| lab.client()).collect();
    let wire = frame([0; 10_000]);
    let started = Instant::now();
    // One byte now and then: never idle, and never a frame.
    for byte in wire {
        canary.echoes("canary");
        for client in &mut clients {
            let _ = std::io::Write::write(&mut client.stream, &[byte]);
        }
        if lab.stats().counters.closed_for(CloseReason::FirstFrameTimeout) == 20 {
            break;
        }
        assert!(started.elapsed() < ringserve_tests::SOON);
    }
    lab.closed_for(CloseReason::FirstFrameTimeout, 20);
    lab.finish();
}

#[test]
fn idle_peers_are_closed_at_the_idle_limit() {
    let lab = Lab::start(no_time_limits().idle_timeout(SHORT));
    let mut canary = lab.client();
    let mut clients: Vec<Client> = (0..100).map(|_| lab.client()).collect();
    clients.iter_mut().for_each(|client| client.echoes(""));
    asks_until_closed(&lab, &mut canary, CloseReason::IdleTimeout, 100);
    for mut client in clients {
        assert_eq!(client.end(), End::Fin);
    }
    lab.holds(1);
    lab.finish();
}

#[test]
fn a_call_that_waits_is_not_idle() {
    let lab = Lab::start(no_time_limits().idle_timeout(SHORT));
    let mut waits = lab.client();
    waits.send(order::gate(""));
    lab.parked(1);
    let mut idle = lab.client();
    // When this one is closed as idle, the other one's time would be over too.
    assert_eq!(idle.end(), End::Fin);
    drop(idle);
    lab.closed_for(CloseReason::IdleTimeout, 1);
    lab.shared.gate.open();
    assert_eq!(waits.recv(), order::gate(""));
    assert_eq!(waits.end(), End::Fin);
    drop(waits);
    lab.closed_for(CloseReason::IdleTimeout, 2);
    lab.finish();
}

#[test]
fn a_listener_is_idle_where_received_bytes_alone_count() {
    let limits = no_time_limits().idle_timeout(SHORT).idle_counts(IdleActivity::Received);
    let lab = Lab::start(limits);
    let (mut listens, mut talks) = (lab.reached("it"), lab.client());
    let (handle, started) = (lab.shared.handle("it"), Instant::now());
    // Each sends or receives all the time; one of them only receives.
    while handle.push("tick").is_ok() && listens.read_whole_or_fin(&mut [0; 8]).is_some() {
        talks.echoes("");
        assert!(started.elapsed() < ringserve_tests::SOON, "the listener is still there");
    }
    lab.closed_for(CloseReason::IdleTimeout, 1);
    talks.echoes("");
    drop((listens, talks));
    lab.finish();
}

#[test]
fn talker_without_answers_is_idle_if_sent_bytes_alone_count() {
    let lab = Lab::start(no_time_limits().idle_timeout(SHORT).idle_counts(IdleActivity::Sent));
    let (mut talks, mut asks) = (lab.reached("it"), lab.client());
    let started = Instant::now();
    // Each sends all the time; one of them only pieces of a frame, to which there is no answer yet.
    talks.write(&[0, 1, 0, 0]);
    while talks.is_silent() {
        talks.write(&[0]);
        asks.echoes("");
        assert!(started.elapsed() < ringserve_tests::SOON, "the talker is still there");
    }
    assert_eq!(talks.end(), End::Fin);
    lab.closed_for(CloseReason::IdleTimeout, 1);
    asks.echoes("");
    drop((talks, asks));
    lab.finish();
}

#[test]
fn half_received_frame_does_not_count_as_use() {
    let lab = Lab::start(no_time_limits().idle_timeout(SHORT));
    let mut client = lab.client();
    client.echoes("");
    client.write(&[0, 0, 1, 0, 1, 2, 3]);
    assert_eq!(client.end(), End::Fin);
    drop(client);
    lab.closed_for(CloseReason::IdleTimeout, 1);
    lab.finish();
}

#[test]
fn limit_that_is_off_closes_no_connection() {
    let lab = Lab::start(no_time_limits().first_frame_timeout(SHORT));
    let mut quiet = lab.client();
    quiet.echoes("");
    // A second one's limit passes; the first one has no limit left.
    assert_eq!(lab.client().end(), End::Fin);
    assert_eq!(lab.client().end(), End::Fin);
    quiet.echoes("alive");
    lab.closed_for(CloseReason::FirstFrameTimeout, 2);
    lab.finish();
}

#[test]
fn call_that_waits_too_long_is_closed_after_queued_replies() {
    let lab = Lab::start(no_time_limits().handler_timeout(SHORT));
    let mut canary = lab.client();
    let mut clients: Vec<Client> = (0..10)
        .map(|n| {
            let mut client = Client::with_small_window(lab.addr());
            assert_eq!(client.ask(order::reach(n.to_string())), b"reached");
            client.send(order::reply_then_gate(3_000_000));
            client
        })
        .collect();
    // Their time is over before they read: they still get everything that they are owed.
    for n in 0..10 {
        let handle = lab.shared.handle(&n.to_string());
        eventually("its time is over", SOON, || handle.is_gone());
    }
    assert_eq!(lab.stats().counters.closed, 0);
    for client in &mut clients {
        let (wire, end) = client.read_to_end();
        assert!(wire == frame(pattern(3_000_000)), "{} bytes came", wire.len());
        assert_eq!(end, End::Fin);
    }
    drop(clients);
    asks_until_closed(&lab, &mut canary, CloseReason::HandlerTimeout, 10);
    eventually("the calls are dropped", SOON, || lab.shared.dropped.load(SeqCst) == 10);
    lab.finish();
}

#[test]
fn call_done_in_time_restarts_the_time_of_the_next_one() {
    let time = Duration::from_millis(400);
    let lab = Lab::start(no_time_limits().handler_timeout(time));
    let mut client = lab.client();
    let started = Instant::now();
    // Together they take longer than one may, and sleep most of the time.
    for n in 0..8 {
        client.gets_back(order::sleep_and(100, n.to_string()));
    }
    assert!(started.elapsed() > time);
    client.send(order::gate(""));
    assert_eq!(client.end(), End::Fin);
    drop(client);
    lab.closed_for(CloseReason::HandlerTimeout, 1);
    lab.finish();
}

#[test]
fn half_frame_below_the_rate_is_closed_and_one_above_lives() {
    // Measured over 10 s: 100 bytes in that time are enough.
    let lab = Lab::start(no_time_limits().read_bytes_per_second_min(10));
    let (mut fast, mut quiet, mut waits, mut slow) = (lab.client(), lab.client(), lab.client(), lab.client());
    quiet.echoes("");
    let wire = frame(order::echo_of(100_000));
    let (begin, mut rest) = wire.split_at(10);
    fast.write(begin);
    // While its call waits the server does not look at later bytes.
    waits.write(&[frame(order::gate("")), begin.to_vec()].concat());
    lab.parked(1);
    slow.write(begin);
    let started = Instant::now();
    let mut drops = 0;
    // The window of the slow one began last, so the fast one's is over too when the slow one is
    // closed.
    while lab.stats().counters.closed_for(CloseReason::ReadTooSlow) == 0 {
        assert!(started.elapsed() < 2 * SOON, "{:?}", lab.stats().counters);
        let (byte, more) = rest.split_at(1);
        fast.write(byte);
        rest = more;
        // A byte now and then, as from a peer that wants to keep the connection.
        if started.elapsed() > Duration::from_secs(drops) {
            let _ = std::io::Write::write(&mut slow.stream, b"e");
            drops += 1;
        }
        assert!(rest.len() > 1_000, "a byte at a time it would take longer");
        std::thread::park_timeout(Duration::from_millis(1));
    }
    assert!(started.elapsed() >= Duration::from_secs(10));
    assert_eq!(slow.end_after_all(), End::Fin);
    fast.write(rest);
    assert_eq!(fast.recv(), wire[4..]);
    assert_eq!(quiet.ask(order::echo("")), order::echo(""), "between frames no peer is slow");
    lab.shared.gate.open();
    assert_eq!(waits.recv(), order::gate(""));
    waits.write(&wire[10..]);
    assert_eq!(waits.recv(), wire[4..]);
    drop(slow);
    lab.closed_for(CloseReason::ReadTooSlow, 1);
    lab.finish();
}

#[test]
fn half_frame_that_cannot_be_finished_is_not_too_slow() {
    let lab = Lab::start(no_time_limits().read_bytes_per_second_min(240));
    let mut client = lab.reached("it");
    assert_eq!(client.ask(order::hold_open()), b"held");
    client.write(&frame(b"half of it")[..9]);
    client.finish_writing();
    assert_eq!(client.recv(), b"ended");
    let mut slow = lab.client();
    slow.write(&frame(b"half of it")[..9]);
    eventually("one that could go on is closed", 2 * SOON, || {
        lab.stats().counters.closed_for(CloseReason::ReadTooSlow) >= 1
    });
    let handle = lab.shared.handle("it");
    assert_eq!(handle.push("still here"), Ok(()));
    assert_eq!(client.recv(), b"still here");
    handle.close();
    assert_eq!(client.end(), End::Fin);
    drop((client, slow));
    lab.closed_for(CloseReason::ReadTooSlow, 1);
    lab.finish();
}

#[test]
fn limits_that_contradict_each_other_do_not_start() {
    let limits = no_time_limits().outbox_bytes_low(10).outbox_bytes_high(5);
    let server = ringserve_tests::On::default().server(limits);
    let error = server.start(|_| ringserve_tests::Puppet::new(Default::default())).unwrap_err();
    assert!(error.to_string().starts_with("limits: Limits::outbox_bytes_low is 10"), "{error}");
}
