//! The access log: one line for each connection that ended, of the services that have one.
//!
//! The subscriber is the whole process's, so the test runs in its own.

use ringserve::listen::{endpoints, tcp};
use ringserve::stream;
use ringserve::{CloseReason, Cx, Frame, Server, Service, Stream, framing::Lines};
use ringserve_tests::{Client, Logged, SOON, alone, eventually, watch};
use serde_json::Value;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, fmt};

/// Collects lines of the access log as JSON, and all other lines.
fn subscribe() -> (Logged, Logged) {
    let (access, rest) = (Logged::default(), Logged::default());
    let (to_access, to_rest) = (access.clone(), rest.clone());
    let accesses = Targets::new().with_target("ringserve::access", LevelFilter::INFO);
    let others =
        Targets::new().with_default(LevelFilter::INFO).with_target("ringserve::access", LevelFilter::OFF);
    let json = fmt::layer().json().flatten_event(true).with_writer(move || to_access.clone());
    let text = fmt::layer().with_ansi(false).with_writer(move || to_rest.clone());
    tracing_subscriber::registry().with(json.with_filter(accesses)).with(text.with_filter(others)).init();
    (access, rest)
}

struct Echo;

impl Service for Echo {
    type Session = ();
    type Error = &'static str;

    async fn call(&self, cx: &Cx<'_, ()>, line: Frame) -> Result<(), &'static str> {
        match &*line {
            b"fail" => Err("planted"),
            _ => {
                cx.reply(line);
                Ok(())
            }
        }
    }
}

#[test]
fn each_connection_that_ended_has_one_line_of_json() {
    if !alone(each_connection_that_ended_has_one_line_of_json) {
        return;
    }
    let (access, rest) = subscribe();
    let server = Server::new()
        .shards(1)
        .pin(false)
        .access_log(true)
        .service(tcp("127.0.0.1:0").framing(Lines::default()).name("echo"), |_shard| Echo)
        .service(tcp("127.0.0.1:0").framing(Lines::default()).name("silent").access_log(false), |_shard| Echo)
        .service(endpoints(tcp("127.0.0.1:0")).name("streams"), |_shard| {
            stream(async |mut stream: Stream| {
                while let Some(bytes) = stream.read_frame().await? {
                    stream.write_all(&bytes).await?;
                }
                std::io::Result::Ok(())
            })
        });
    let running = server.start().expect("it starts");
    let connect = |service: usize| Client::connect(running.local_addrs()[service]);

    let mut echo = connect(0);
    let echoes = |client: &mut Client, line: &str| {
        client.write(line.as_bytes());
        assert_eq!(client.read(line.len()), line.as_bytes());
    };
    let mut expected = Vec::new();
    (0..3).for_each(|_| echoes(&mut echo, "hello\n"));
    expected.push((
        echo.local_addr().to_string(),
        "echo",
        0,
        (18, 18..=18),
        Some((3, 3)),
        "peer_closed",
        "peer",
    ));
    echo.finish_writing();
    watch::closed_for(&running, CloseReason::PeerClosed, 1);

    let mut fails = connect(0);
    fails.write(b"fail\n");
    expected.push((
        fails.local_addr().to_string(),
        "echo",
        0,
        (5, 0..=0),
        Some((1, 0)),
        "handler_error",
        "service",
    ));
    watch::closed_for(&running, CloseReason::HandlerError, 1);

    let mut unheard = connect(1);
    echoes(&mut unheard, "not to be seen\n");
    unheard.finish_writing();
    watch::closed_for(&running, CloseReason::PeerClosed, 2);

    let mut streams = connect(2);
    echoes(&mut streams, "bytes");
    expected.push((streams.local_addr().to_string(), "streams", 2, (5, 5..=5), None, "peer_closed", "peer"));
    streams.finish_writing();
    watch::closed_for(&running, CloseReason::PeerClosed, 3);

    // The end of its last send may not have been reported.
    let mut cut = connect(0);
    echoes(&mut cut, "x\n");
    expected.push((
        cut.local_addr().to_string(),
        "echo",
        0,
        (2, 0..=2),
        Some((1, 1)),
        "server_aborted",
        "server",
    ));
    running.abort();
    watch::ended(running);

    eventually("they are written", SOON, || access.text().lines().count() == expected.len());
    for (line, expected) in access.text().lines().zip(expected) {
        let line: Value = serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
        let text = |field: &str| line[field].as_str().unwrap_or_else(|| panic!("no {field} in {line}"));
        let number = |field: &str| line[field].as_u64().unwrap_or_else(|| panic!("no {field} in {line}"));
        let (peer, service, listener, bytes, frames, reason, closed_by) = expected;
        assert_eq!((text("target"), text("level"), text("message")), ("ringserve::access", "INFO", "closed"));
        assert_eq!(
            (text("peer"), text("service"), number("listener")),
            (&*peer, service, listener),
            "{line}"
        );
        assert_eq!(number("bytes_in"), bytes.0, "{line}");
        assert!(bytes.1.contains(&number("bytes_out")), "{line}");
        if let Some(frames) = frames {
            assert_eq!((number("frames_in"), number("frames_out")), frames, "{line}");
        }
        assert_eq!((text("reason"), text("closed_by"), number("shard")), (reason, closed_by, 0), "{line}");
        let seconds = line["seconds"].as_f64().expect("a number");
        assert!(seconds > 0.0 && seconds < 60.0, "{line}");
        assert!(text("id").contains('.') && line.get("via").is_none(), "{line}");
    }
    assert!(!rest.text().contains("ringserve::access"), "{}", rest.text());
    assert!(rest.text().contains("listening on"), "{}", rest.text());
}
