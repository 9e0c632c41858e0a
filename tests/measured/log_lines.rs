//! Log lines about connections: one for each that fails, with its peer, and the message of a panic.
//!
//! The subscriber is the whole process's, so there is one test in this file.

use std::time::Duration;

use ringserve::framing::LengthPrefix;
use ringserve::{CloseReason, Cx, Frame, ServerHandle, Service, Stream, stream};
use ringserve_tests::Bounds;
use ringserve_tests::client::frame;
use ringserve_tests::{Client, Logged, On, SOON, alone, eventually, no_time_limits, watch};
use tracing_subscriber::filter::LevelFilter;

/// Lines of the connection of `client` that contain `what`.
fn lines_of(logged: &Logged, client: &Client, what: &str) -> Vec<String> {
    let peer = format!("peer={}", client.stream.local_addr().unwrap());
    logged
        .text()
        .lines()
        .filter(|line| line.contains(what) && line.contains(&peer))
        .map(str::to_owned)
        .collect()
}

#[track_caller]
fn one_line(logged: &Logged, client: &Client, what: &str) -> String {
    eventually("it is logged", SOON, || !lines_of(logged, client, what).is_empty());
    let lines = lines_of(logged, client, what);
    assert_eq!(lines.len(), 1, "{lines:?}");
    lines[0].clone()
}

struct Fails;

impl Service for Fails {
    type Session = ();
    type Error = &'static str;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), &'static str> {
        match frame[0] {
            b'x' => panic!("planted: {}", String::from_utf8_lossy(&frame)),
            b'X' => {
                cx.sleep(Duration::from_millis(1)).await;
                panic!("planted late");
            }
            b't' => {
                let _ = cx.spawn_named::<()>("rotten", async { panic!("planted in a task") }).await;
                cx.spawn_on_connection(async { panic!("planted in its task") }).expect("there is room");
                Ok(())
            }
            _ => {
                cx.sleep(Duration::from_millis(20)).await;
                // The other calls fail while it leaves.
                cx.reply(b"failed");
                Err("planted error")
            }
        }
    }
}

fn frames(limits: Bounds) -> ServerHandle {
    let server = On::default().server(limits).framing(LengthPrefix::default());
    server.start(|_| Fails).expect("the server starts")
}

#[test]
fn each_failed_connection_has_one_line_that_names_it() {
    if !alone(each_failed_connection_has_one_line_that_names_it) {
        return;
    }
    let logged = Logged::from(LevelFilter::DEBUG);
    // No limit of time is set.
    let running = frames(no_time_limits().calls_in_flight_max(4).first_frame_timeout(None));
    let connect = || Client::connect(running.local_addrs()[0]);

    let mut fails = connect();
    fails.write(&frame(b"fail").repeat(4));
    watch::closed_for(&running, CloseReason::HandlerError, 1);
    let line = one_line(&logged, &fails, "handler failed, connection closed");
    assert!(line.contains(" INFO ") && line.contains("error=planted error"), "{line}");
    assert!(line.contains(" id="), "{line}");
    let failed = logged.text().matches("handler failed, connection closed").count();
    assert_eq!(failed, 1, "of four calls that fail together");

    for (said, panic) in [(&b"x1 of 1"[..], "panic=planted: x1 of 1"), (b"X", "panic=planted late")] {
        let mut client = connect();
        client.write(&frame(said));
        let line = one_line(&logged, &client, "user code panicked; its connection is closed");
        assert!(line.contains("ERROR") && line.contains(" id=") && line.contains(panic), "{line}");
        assert!(line.contains("place=\"call\""), "{line}");
    }
    let mut client = connect();
    client.write(&frame(b"tasks"));
    let line = one_line(&logged, &client, "user code panicked; its connection is closed");
    assert!(line.contains("place=\"task\"") && line.contains("panic=planted in its task"), "{line}");
    let text = logged.text();
    let named: Vec<&str> = text.lines().filter(|line| line.contains("a task on a shard panicked")).collect();
    assert_eq!(named.len(), 1, "{named:?}");
    assert!(named[0].contains("task=\"rotten\" panic=planted in a task"), "{named:?}");
    watch::closed_for(&running, CloseReason::HandlerPanicked, 3);
    ringserve_tests::finish(running);

    let streams = On::default().server(no_time_limits()).start(|_| {
        stream(async |mut stream: Stream| {
            let read = stream.read_frame().await;
            assert!(read.is_err(), "planted in a stream");
        })
    });
    let streams = streams.expect("the server starts");
    let mut client = Client::connect(streams.local_addrs()[0]);
    client.write(b"?");
    let line = one_line(&logged, &client, "user code panicked; its connection is closed");
    assert!(line.contains(" id=") && line.contains("panic=planted in a stream"), "{line}");
    ringserve_tests::finish(streams);

    let text = logged.text();
    let odd: Vec<&str> =
        text.lines().filter(|line| line.contains("Some(") || line.contains("within off")).collect();
    assert!(odd.is_empty(), "{odd:#?}");
    assert!(text.contains("times: first frame off, idle off"), "{text}");
}
