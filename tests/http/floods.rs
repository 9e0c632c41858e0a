//! Load that HTTP peers can put on a server: bytes inside hyper, floods of frames.

use std::convert::Infallible;
use std::future::pending;
use std::io::Write;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response};
use ringserve::framing::FrameError;
use ringserve::http::HttpOptions;
use ringserve::{CloseReason, ServerHandle, http};
use ringserve_tests::Bounds;
use ringserve_tests::http::{frames, read_answer};
use ringserve_tests::{Client, On, SOON, eventually, no_time_limits, watch};

const LARGE: usize = 4 << 20;

/// Answers `/` with hello, `/large` with [`LARGE`] bytes; `/never` waits without end, `/read` reads
/// its body before it answers hello.
async fn answer(request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    let mut answer = Bytes::from_static(b"hello");
    match request.uri().path() {
        "/large" => answer = vec![b'.'; LARGE].into(),
        "/never" => pending().await,
        "/read" => _ = request.into_body().collect().await,
        _ => {}
    }
    Ok(Response::new(Full::new(answer)))
}

fn start(limits: Bounds, options: HttpOptions) -> ServerHandle {
    let server = On::default().server(limits).shards(1);
    server.start(move |_| http(service_fn(answer)).options(options.clone())).expect("the server starts")
}

/// A neighbour on a connection that was there before.
struct Neighbour(Client);

impl Neighbour {
    fn of(running: &ServerHandle) -> Neighbour {
        let mut neighbour = Neighbour(Client::connect(running.local_addrs()[0]));
        neighbour.is_served();
        neighbour
    }

    #[track_caller]
    fn is_served(&mut self) {
        self.0.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n");
        assert_eq!(read_answer(&mut self.0).1, b"hello");
    }
}

/// Limits under which a shard holds little.
fn little(held_bytes_max: usize) -> Bounds {
    no_time_limits()
        .frame_bytes_max(64 << 10)
        .outbox_bytes_high(64 << 10)
        .outbox_bytes_low(16 << 10)
        .outbox_bytes_max(256 << 10)
        .inbox_bytes_high(64 << 10)
        .held_bytes_max(held_bytes_max)
}

#[test]
fn response_inside_of_hyper_counts_as_held() {
    let running = start(little(LARGE / 2), HttpOptions::default());
    let mut neighbour = Neighbour::of(&running);
    for n in 1..=3 {
        let mut deaf = Client::with_small_window(running.local_addrs()[0]);
        deaf.write(b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n");
        watch::closed_for(&running, CloseReason::MemoryLimit, n);
        neighbour.is_served();
        deaf.reset();
    }
    drop(neighbour);
    ringserve_tests::finish(running);
}

#[test]
fn unread_bodies_inside_of_hyper_count_as_held() {
    const BODY: usize = 60 << 10;
    let options = HttpOptions::default().connection_window_bytes(1 << 16);
    let running = start(little(512 << 10), options);
    let mut neighbour = Neighbour::of(&running);
    let body: Vec<u8> = (0..4).flat_map(|_| frames::frame(0, 0, 1, &[b'x'; BODY / 4])).collect();
    let upload = [frames::PREFACE, frames::SETTINGS, &frames::request(1, false, "/never"), &body].concat();
    for round in 1..=3 {
        let mut uploads: Vec<Client> = (0..20).map(|_| Client::connect(running.local_addrs()[0])).collect();
        for client in &mut uploads {
            // The server may be gone before all is written.
            _ = client.stream.write_all(&upload);
        }
        // Eight of them fit. The bytes of the others no longer count once they are closed.
        let closed = || {
            let counters = running.stats_now().counters;
            counters.reasons().find(|(reason, _)| *reason == "memory_limit").map_or(0, |(_, count)| count)
        };
        eventually("those beyond it are closed", SOON, || closed() >= round * 10);
        eventually("the others stay", SOON, || (5..=10).contains(&(running.stats_now().connections - 1)));
        neighbour.is_served();
        drop(uploads);
        watch::holds(&running, 1);
    }
    drop(neighbour);
    ringserve_tests::finish(running);
}

#[test]
fn bodies_that_were_read_count_no_more() {
    let options = HttpOptions::default().connection_window_bytes(1 << 16);
    let running = start(little(512 << 10), options);
    let mut clients: Vec<Client> = (0..30).map(|_| Client::connect(running.local_addrs()[0])).collect();
    // Each leaves its connection open, and all together sent three times as many bytes as may be
    // held.
    for client in &mut clients {
        let mut upload = b"POST /read HTTP/1.1\r\nhost: x\r\ncontent-length: 50000\r\n\r\n".to_vec();
        upload.extend([b'x'; 50_000]);
        client.write(&upload);
        assert_eq!(read_answer(client).1, b"hello");
        client.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n");
        assert_eq!(read_answer(client).1, b"hello");
    }
    watch::holds(&running, 30);
    drop(clients);
    ringserve_tests::finish(running);
}

#[test]
fn one_fast_upload_does_not_shield_those_that_stop() {
    // Checked every 100 ms: 2000 bytes are enough for one, 42 000 for all.
    let options = HttpOptions::default()
        .body_bytes_per_second_min(20_000)
        .rate_window(Duration::from_millis(500))
        .response_timeout(Duration::from_millis(100));
    let running = start(no_time_limits(), options);
    let mut client = Client::connect(running.local_addrs()[0]);
    let stops: Vec<u8> = (0..20).flat_map(|n| frames::request(2 * n + 3, false, "/read")).collect();
    client.write(&[frames::PREFACE, frames::SETTINGS, &frames::request(1, false, "/read"), &stops].concat());
    let mut writer = client.stream.try_clone().unwrap();
    let answered = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (data, bound) = (frames::frame(0, 0, 1, &[b'x'; 1000]), Instant::now() + SOON);
            // The pause is the rate.
            while answered.load(SeqCst) == 0 && writer.write_all(&data).is_ok() {
                assert!(Instant::now() < bound, "the others wait for as long as one uploads");
                std::thread::park_timeout(Duration::from_millis(5));
            }
        });
        let mut answers = 0;
        while answers < 20 {
            let (kind, _, stream, _) = frames::next(&mut client);
            answers += usize::from(kind == 1 && stream > 1);
        }
        answered.store(answers, SeqCst);
    });
    drop((client, writer));
    ringserve_tests::finish(running);
}

#[test]
fn pings_whose_answers_are_not_read_end_their_connection() {
    let limits = no_time_limits().write_stall_timeout(Duration::from_millis(300));
    let running = start(limits, HttpOptions::default());
    let mut neighbour = Neighbour::of(&running);
    let mut client = Client::with_small_window(running.local_addrs()[0]);
    client.write(&[frames::PREFACE, frames::SETTINGS].concat());
    let (pings, bound) = (frames::PING.repeat(1000), Instant::now() + SOON);
    while client.stream.write_all(&pings).is_ok() {
        assert!(Instant::now() < bound, "the server takes pings for ever");
    }
    watch::closed_for(&running, CloseReason::WriteStallTimeout, 1);
    neighbour.is_served();
    drop((client, neighbour));
    ringserve_tests::finish(running);
}

#[test]
fn endless_continuations_end_their_connection() {
    // Bytes beyond the limit of a head are discarded for that long.
    let linger = Duration::from_millis(100);
    let running = start(no_time_limits().linger_timeout(linger), HttpOptions::default());
    let mut neighbour = Neighbour::of(&running);
    // Literal fields without indexing, of which hyper could keep as many as are sent.
    let field = [&b"\x00\x01x\x7f\xe1\x0e"[..], &[b'v'; 2000]].concat();
    for (n, piece) in [(1, field.repeat(8)), (2, b"\x82".repeat(10))] {
        let mut client = Client::connect(running.local_addrs()[0]);
        client.write(&[frames::PREFACE, frames::SETTINGS, &frames::frame(1, 0, 1, b"\x82\x86")].concat());
        let (frame, bound) = (frames::frame(9, 0, 1, &piece), Instant::now() + SOON);
        while client.stream.write_all(&frame).is_ok() {
            assert!(Instant::now() < bound, "the server takes a head for ever");
        }
        client.end_after_all();
        watch::closed_for(&running, CloseReason::BadFrame(FrameError::VarintOverflow), n);
        neighbour.is_served();
    }
    drop(neighbour);
    ringserve_tests::finish(running);
}
