//! Spans of chosen connections, and nothing of others.
//!
//! The subscriber is the whole process's, so each test runs in its own.

use ringserve::framing::LengthPrefix;
use ringserve::{CloseReason, Error, Server};
use ringserve_tests::{Client, Lab, Logged, On, SOON, alone, eventually, no_time_limits, order};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt::format::FmtSpan;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, fmt};

/// Collects the starts and ends of spans, and the events in them.
fn subscribe() -> Logged {
    let traced = Logged::default();
    let writer = traced.clone();
    let spans = Targets::new().with_target("ringserve::trace", LevelFilter::INFO);
    let text = fmt::layer()
        .with_ansi(false)
        .without_time()
        .with_span_events(FmtSpan::NEW | FmtSpan::CLOSE)
        .with_writer(move || writer.clone());
    tracing_subscriber::registry().with(text.with_filter(spans)).init();
    traced
}

fn lab(server: Server) -> Lab {
    Lab::of(server.framing(LengthPrefix::default()))
}

/// The lines of a connection.
fn lines_of(traced: &Logged, client: &Client) -> Vec<String> {
    let peer = format!("peer={}", client.local_addr());
    traced.text().lines().filter(|line| line.contains(&peer)).map(str::to_owned).collect()
}

#[test]
fn one_in_four_connections_has_a_span_from_accept_to_end() {
    if !alone(one_in_four_connections_has_a_span_from_accept_to_end) {
        return;
    }
    let traced = subscribe();
    let lab = lab(On::default().server(no_time_limits()).trace_one_in(4));
    let mut clients: Vec<Client> = (0..8)
        .map(|_| {
            let mut client = lab.client();
            client.echoes("text");
            client
        })
        .collect();
    clients.iter_mut().for_each(|client| client.echoes("text"));
    clients.iter().for_each(Client::finish_writing);
    lab.closed_for(CloseReason::PeerClosed, 8);
    eventually("the spans end", SOON, || traced.text().matches(": close").count() == 2);
    for (n, client) in clients.iter().enumerate() {
        let lines = lines_of(&traced, client);
        if n % 4 < 3 {
            assert!(lines.is_empty(), "connection {n} has none: {lines:?}");
            continue;
        }
        let count = |what: &str| lines.iter().filter(|line| line.contains(what)).count();
        assert_eq!((count(": new"), count(": close")), (1, 1), "{lines:#?}");
        assert_eq!((count("frame bytes=9"), count("send bytes=9")), (2, 2), "{lines:#?}");
        assert_eq!(count("ended reason=peer_closed"), 1, "{lines:#?}");
        assert!(lines.iter().all(|line| line.contains("connection{shard=0 service=\"")), "{lines:#?}");
    }
    // The place of a chosen connection belongs to another one now.
    drop(clients);
    lab.holds(0);
    let before = traced.text().lines().count();
    let mut later = lab.client();
    later.echoes("text");
    assert_eq!(traced.text().lines().count(), before, "{}", traced.text());
    drop(later);
    lab.finish();
}

#[test]
fn peer_that_was_named_has_a_span_with_its_pauses() {
    if !alone(peer_that_was_named_has_a_span_with_its_pauses) {
        return;
    }
    let traced = subscribe();
    let lab = lab(On::default().server(no_time_limits()).trace_peer("10.0.0.0/8").trace_peer("127.0.0.1"));
    let mut client = lab.client_with_small_window();
    let wire = ringserve_tests::client::frame(order::echo_of(10_000)).repeat(3000);
    client.write_until_stuck(&wire, std::time::Duration::from_millis(200));
    eventually("it is paused", SOON, || traced.text().contains("receiving paused"));
    assert!(traced.text().contains("frame bytes=10004"), "{}", traced.text());
    drop(client);
    lab.abort();
    assert!(traced.text().contains("ended reason="), "its span ends");

    let traced_before = traced.text().len();
    let other = self::lab(On::default().server(no_time_limits()).trace_peer("10.0.0.0/8"));
    other.client().echoes("text");
    other.finish();
    assert_eq!(traced.text().len(), traced_before, "another peer has none");
}

#[test]
fn text_that_is_no_network_is_an_error_of_the_start() {
    for text in ["10.0.0.0/33", "localhost", ""] {
        let server = On::default().server(no_time_limits()).trace_peer("127.0.0.1").trace_peer(text);
        let started = server
            .framing(LengthPrefix::default())
            .start(|_| ringserve_tests::Puppet::new(Default::default()));
        let error = started.expect_err("it is no network");
        assert!(matches!(&error, Error::Trace(named) if named == text), "{error}");
        assert!(error.to_string().contains("no network whose connections could be traced"), "{error}");
    }
}
