//! Connections after a 101, or streams after a 2xx to CONNECT, in a service, by
//! `hyper::upgrade::on`.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::time::Duration;

use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper::{Method, Request, Response, StatusCode, Version};
use hyper_util::rt::TokioIo;
use ringserve::http::HttpOptions;
use ringserve::{CloseReason, ServerHandle, Shard, http};
use ringserve_tests::client::End;
use ringserve_tests::http::{Sender, read_answer, with_http2};
use ringserve_tests::{Bounds, Client, On, SOON, eventually, no_time_limits, pattern, watch};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::Semaphore;

const UPGRADE: &str = "HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: bytes\r\n\r\n";
const CONNECT: &str = "CONNECT far:80 HTTP/1.1\r\nhost: far:80\r\n\r\n";
const BRIEF: Duration = Duration::from_millis(50);
/// Far more than the outbox and both kernels take at once.
const LARGE: usize = 12 << 20;

/// Counts of tunnels: those that are open, that ended in order, and that failed.
#[derive(Default)]
struct Seen {
    open: AtomicUsize,
    ended: AtomicUsize,
    failed: AtomicUsize,
}

struct Rig {
    running: ServerHandle,
    seen: Arc<Seen>,
    gate: Arc<Semaphore>,
}

impl Rig {
    fn start(limits: Bounds, options: HttpOptions) -> Rig {
        let (seen, gate) = (Arc::new(Seen::default()), Arc::new(Semaphore::new(0)));
        let shared = (seen.clone(), gate.clone());
        let running = On::default().server(limits).start(move |shard| {
            let (shard, shared) = (shard.clone(), shared.clone());
            http(service_fn(move |request| answer(request, shard.clone(), shared.clone())))
                .options(options.clone())
        });
        Rig { running: running.expect("the server starts"), seen, gate }
    }

    fn client(&self) -> Client {
        Client::connect(self.running.local_addrs()[0])
    }

    /// Asks for a tunnel, with the first bytes after the request.
    fn opens(&self, path: &str, first: &[u8]) -> Client {
        let mut client = self.client();
        client.write(&[format!("GET {path} {UPGRADE}").as_bytes(), first].concat());
        let head = read_head(&mut client);
        assert!(head.starts_with("HTTP/1.1 101 "), "{head}");
        client
    }

    fn counts(&self) -> (usize, usize, usize) {
        (self.seen.open.load(SeqCst), self.seen.ended.load(SeqCst), self.seen.failed.load(SeqCst))
    }

    fn held(&self) -> usize {
        self.running.stats_now().shards[0].held_bytes
    }

    fn come_to(&self, counts: (usize, usize, usize)) {
        eventually(&format!("tunnels come to {counts:?}"), SOON, || self.counts() == counts);
    }
}

fn read_head(client: &mut Client) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.extend(client.read(1));
    }
    String::from_utf8(head).unwrap()
}

/// Sends received bytes back for `/echo` and CONNECT, on another thread for `/elsewhere`; `/gate`
/// reads nothing until the test opens it; `/large` sends [`LARGE`] bytes; `/refused` takes the
/// upgrade and answers 200, `/late` once the test opens the gate.
async fn answer(
    mut request: Request<Incoming>,
    shard: Shard,
    (seen, gate): (Arc<Seen>, Arc<Semaphore>),
) -> Result<Response<String>, hyper::Error> {
    let path = request.uri().path().to_owned();
    let upgrade = hyper::upgrade::on(&mut request);
    let mut response = Response::new(String::new());
    if path == "/late" {
        gate.acquire().await.unwrap().forget();
    }
    let runs = run(upgrade, path.clone(), seen, gate);
    match &*path {
        "/elsewhere" => {
            std::thread::spawn(move || {
                tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(runs);
            });
        }
        _ => drop(shard.spawn(runs)),
    }
    *response.status_mut() = match (request.method(), &*path) {
        (_, "/refused" | "/late") | (&Method::CONNECT, _) => StatusCode::OK,
        _ => StatusCode::SWITCHING_PROTOCOLS,
    };
    Ok(response)
}

async fn run(upgrade: OnUpgrade, path: String, seen: Arc<Seen>, gate: Arc<Semaphore>) {
    let Ok(upgraded) = upgrade.await else {
        seen.failed.fetch_add(1, SeqCst);
        return;
    };
    seen.open.fetch_add(1, SeqCst);
    let ran = match &*path {
        "/gate" => {
            gate.acquire().await.unwrap().forget();
            echo(upgraded).await
        }
        "/large" => large(upgraded).await,
        _ => echo(upgraded).await,
    };
    seen.open.fetch_sub(1, SeqCst);
    if ran.is_ok() { &seen.ended } else { &seen.failed }.fetch_add(1, SeqCst);
}

async fn echo(upgraded: Upgraded) -> std::io::Result<()> {
    let (mut reader, mut writer) = tokio::io::split(TokioIo::new(upgraded));
    tokio::io::copy(&mut reader, &mut writer).await?;
    writer.write_all(b"over").await?;
    writer.shutdown().await
}

async fn large(upgraded: Upgraded) -> std::io::Result<()> {
    let mut io = TokioIo::new(upgraded);
    io.write_all(&pattern(LARGE)).await?;
    io.shutdown().await
}

#[test]
fn bytes_pass_both_ways_behind_a_101_and_a_connect() {
    let rig = Rig::start(no_time_limits(), HttpOptions::default());
    for path in ["/echo", "/elsewhere"] {
        let mut client = rig.opens(path, b"first");
        assert_eq!(client.read(5), b"first", "{path}");
        client.write(b"and then");
        assert_eq!(client.read(8), b"and then", "{path}");
        let sent = pattern(LARGE);
        let mut writer = client.stream.try_clone().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| std::io::Write::write_all(&mut writer, &sent).unwrap());
            assert!(client.read(LARGE) == sent, "{path}");
        });
        client.finish_writing();
        assert_eq!(client.read_to_end(), (b"over".to_vec(), End::Fin), "{path}");
    }
    rig.come_to((0, 2, 0));
    let mut client = rig.client();
    client.write(&[CONNECT.as_bytes(), b"first"].concat());
    let head = read_head(&mut client);
    assert!(head.starts_with("HTTP/1.1 200 ") && !head.contains("content-length"), "{head}");
    assert_eq!(client.read(5), b"first");
    client.finish_writing();
    assert_eq!(client.read_to_end(), (b"over".to_vec(), End::Fin));
    rig.come_to((0, 3, 0));
    ringserve_tests::finish(rig.running);
}

#[test]
fn tunnel_of_http_2_outlives_the_time_of_a_request() {
    let options = HttpOptions::default().request_timeout(BRIEF).response_timeout(BRIEF).rate_window(BRIEF);
    let rig = Rig::start(no_time_limits(), options);
    with_http2(rig.running.local_addrs()[0], async |mut sender: Sender| {
        let nothing = || http_body_util::Empty::new().map_err(|never| match never {}).boxed();
        let request = Request::builder().method(Method::CONNECT).uri("far:80").version(Version::HTTP_2);
        let answer = sender.send_request(request.body(nothing()).unwrap()).await.unwrap();
        assert_eq!(answer.status(), StatusCode::OK);
        let mut io = TokioIo::new(hyper::upgrade::on(answer).await.unwrap());
        for _ in 0..5 {
            io.write_all(b"hello").await.unwrap();
            let mut heard = [0; 5];
            io.read_exact(&mut heard).await.unwrap();
            assert_eq!(&heard, b"hello");
            // A concurrent request has taken as long as one may.
            let late = Request::get("http://far/late").version(Version::HTTP_2).body(nothing()).unwrap();
            let status = sender.send_request(late).await.unwrap().status();
            assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
        }
        io.shutdown().await.unwrap();
        let mut rest = Vec::new();
        io.read_to_end(&mut rest).await.unwrap();
        assert_eq!(rest, b"over");
    });
    rig.come_to((0, 1, 0));
    ringserve_tests::finish(rig.running);
}

#[test]
fn tunnel_that_is_not_read_holds_its_peer_back() {
    let limits = no_time_limits().inbox_bytes_high(64 << 10);
    let rig = Rig::start(limits, HttpOptions::default());
    let mut client = rig.opens("/gate", b"");
    rig.come_to((1, 0, 0));
    let sent = pattern(LARGE);
    let taken = client.write_until_stuck(&sent, 10 * BRIEF);
    assert!(taken < LARGE, "all was taken");
    eventually("what is not read counts", SOON, || rig.held() >= 64 << 10);
    rig.gate.add_permits(1);
    let mut writer = client.stream.try_clone().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| std::io::Write::write_all(&mut writer, &sent[taken..]).unwrap());
        assert!(client.read(LARGE) == sent);
    });
    eventually("nothing is held", SOON, || rig.held() == 0);
    client.finish_writing();
    assert_eq!(client.read_to_end(), (b"over".to_vec(), End::Fin));
    rig.come_to((0, 1, 0));
    // A client that reads nothing holds the service back.
    let mut client = rig.opens("/large", b"");
    rig.come_to((1, 1, 0));
    assert!(client.read(LARGE) == pattern(LARGE));
    assert_eq!(client.end(), End::Fin);
    rig.come_to((0, 2, 0));
    ringserve_tests::finish(rig.running);
}

#[test]
fn service_hears_that_its_tunnel_broke_and_a_drain_waits_for_it() {
    let rig = Rig::start(no_time_limits().drain_timeout(SOON), HttpOptions::default());
    for path in ["/echo", "/elsewhere"] {
        let mut client = rig.opens(path, b"x");
        assert_eq!(client.read(1), b"x");
        client.reset();
    }
    rig.come_to((0, 0, 2));
    watch::closed_for(&rig.running, CloseReason::PeerReset, 2);
    let mut kept = rig.opens("/echo", b"");
    rig.running.shutdown();
    kept.write(b"still here");
    assert_eq!(kept.read(10), b"still here");
    kept.finish_writing();
    assert_eq!(kept.read_to_end(), (b"over".to_vec(), End::Fin));
    watch::ended(rig.running);
    assert_eq!(rig.seen.ended.load(SeqCst), 1);
}

#[test]
fn upgrade_that_waits_for_its_answer_counts() {
    let rig = Rig::start(no_time_limits(), HttpOptions::default());
    let mut client = rig.client();
    client.write(format!("GET /late {UPGRADE}").as_bytes());
    eventually("what it holds counts", SOON, || rig.held() >= 16 << 10);
    rig.gate.add_permits(1);
    assert!(read_answer(&mut client).0.starts_with("HTTP/1.1 200 "));
    eventually("it holds nothing", SOON, || rig.held() < 16 << 10);
    drop(client);
    ringserve_tests::finish(rig.running);
}

#[test]
fn upgrade_that_is_answered_otherwise_fails_alone() {
    let rig = Rig::start(no_time_limits(), HttpOptions::default());
    let mut client = rig.client();
    for count in 1..3 {
        client.write(format!("GET /refused {UPGRADE}").as_bytes());
        assert!(read_answer(&mut client).0.starts_with("HTTP/1.1 200 "));
        rig.come_to((0, 0, count));
    }
    drop(client);
    ringserve_tests::finish(rig.running);
}
