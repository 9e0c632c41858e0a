//! Servers of HTTP, by `start_http`.

mod common;

use std::cell::Cell;
use std::future::{pending, ready};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use common::client::End;
use common::http::{Bodies, Sender, frames, read_answer, with_http2};
use common::{Client, On, SOON, eventually, no_time_limits, watch};
use http_body_util::{BodyExt, Empty, Full, Limited};
use hyper::body::{Body, Bytes, Frame, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response, Version};
use ringserve::http::{Http, HttpOptions, HttpVersions};
use ringserve::{CloseReason, Limits, Running, Stream};
use tokio::sync::Semaphore;

const GET: &[u8] = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n";
/// Far above what the outbox and both kernels take of an answer at once.
const LARGE: usize = 12 << 20;
/// Short, since tests wait until it is over.
const BRIEF: Duration = Duration::from_millis(50);

/// What the handlers share with the test.
#[derive(Default)]
struct Handlers {
    inside: AtomicUsize,
    most: AtomicUsize,
    dropped: AtomicUsize,
}

struct Inside(Arc<Handlers>);

impl Drop for Inside {
    fn drop(&mut self) {
        self.0.inside.fetch_sub(1, SeqCst);
        self.0.dropped.fetch_add(1, SeqCst);
    }
}

struct Rig {
    running: Running,
    handlers: Arc<Handlers>,
    gate: Arc<Semaphore>,
}

type BoxError = Box<dyn std::error::Error + Send + Sync>;

impl Rig {
    fn start(options: HttpOptions) -> Rig {
        Rig::start_with(no_time_limits(), options)
    }

    fn start_with(limits: Limits, options: HttpOptions) -> Rig {
        let (handlers, gate) = (Arc::new(Handlers::default()), Arc::new(Semaphore::new(0)));
        let (shared, open) = (handlers.clone(), gate.clone());
        let running = On::default().server(limits).start_http_with(options, move |_| {
            let (shared, open) = (shared.clone(), open.clone());
            service_fn(move |request| answer(request, shared.clone(), open.clone()))
        });
        Rig { running: running.expect("the server starts"), handlers, gate }
    }

    fn client(&self) -> Client {
        Client::connect(self.running.local_addrs()[0])
    }

    fn with_http2<F: Future<Output = ()>>(&self, test: impl FnOnce(Sender) -> F) {
        with_http2(self.running.local_addrs()[0], test);
    }

    /// Sends bytes, and waits until the server has them.
    fn takes_in(&self, client: &mut Client, bytes: &[u8]) {
        let before = self.running.report().counters.bytes_received;
        client.write(bytes);
        eventually("the bytes arrive", SOON, || {
            self.running.report().counters.bytes_received == before + bytes.len() as u64
        });
    }

    fn waits_inside(&self, count: usize) {
        eventually("handlers wait", SOON, || self.handlers.inside.load(SeqCst) == count);
    }
}

/// `/` says its version, `/gate` waits until the test opens it, `/never` for ever, `/fail` fails, `/limited` takes ten bytes,
/// `/large` sends [`LARGE`] bytes, `/pieces` as many in pieces, `/counted` fewer, `/echo` sends back, `/read` reads all and then waits as `/gate`.
async fn answer(
    request: Request<Incoming>,
    handlers: Arc<Handlers>,
    gate: Arc<Semaphore>,
) -> Result<Response<Bodies>, BoxError> {
    let mut answer = Bytes::from(format!("{:?}", request.version()));
    let inside = handlers.inside.fetch_add(1, SeqCst) + 1;
    handlers.most.fetch_max(inside, SeqCst);
    let _inside = Inside(handlers);
    match request.uri().path() {
        "/gate" => gate.acquire().await?.forget(),
        "/never" => pending().await,
        "/fail" => return Err("as it was told".into()),
        "/limited" => _ = Limited::new(request.into_body(), 10).collect().await?,
        "/echo" => return Ok(Response::new(request.into_body().boxed())),
        path @ ("/pieces" | "/counted") => {
            let count = path == "/counted";
            let pieces = Pieces(if count { COUNTED } else { LARGE } / PIECE).map_frame(move |piece| {
                MADE.fetch_add(count.into(), SeqCst);
                piece
            });
            return Ok(Response::new(pieces.map_err(|never| match never {}).boxed()));
        }
        "/read" => {
            request.into_body().collect().await?;
            gate.acquire().await?.forget();
        }
        "/large" => answer = vec![b'.'; LARGE].into(),
        _ => {}
    }
    Ok(Response::new(Full::new(answer).map_err(|never| match never {}).boxed()))
}

const PIECE: usize = 16 << 10;

/// A body that comes in pieces of one size.
struct Pieces(usize);

/// Bytes of `/counted`, and the pieces of it that were made.
const COUNTED: usize = 1 << 20;
static MADE: AtomicUsize = AtomicUsize::new(0);

impl Body for Pieces {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _task: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let left = self.0;
        self.0 = left.saturating_sub(1);
        Poll::Ready((left > 0).then(|| Ok(Frame::data(Bytes::from_static(&[b'.'; PIECE])))))
    }
}

fn get(path: &str) -> Request<Bodies> {
    let body = Empty::new().map_err(|never| match never {}).boxed();
    Request::get(format!("http://x{path}")).body(body).unwrap()
}

async fn ask(sender: &mut Sender, path: &str) -> Bytes {
    let answer = sender.send_request(get(path)).await.unwrap();
    assert_eq!(answer.version(), Version::HTTP_2);
    answer.into_body().collect().await.unwrap().to_bytes()
}

#[test]
fn both_protocols_are_told_by_their_first_bytes() {
    let rig = Rig::start(HttpOptions::default());
    let mut client = rig.client();
    client.write(&GET.repeat(20));
    (0..20).for_each(|_| assert_eq!(read_answer(&mut client).1, b"HTTP/1.1"));
    // A head that begins as the preface does, and comes in two pieces, of which the first is looked at alone.
    let mut slow = rig.client();
    rig.takes_in(&mut slow, b"PRI * HT");
    slow.write(b"TP/1.1\r\nhost: x\r\n\r\n");
    assert_eq!(read_answer(&mut slow).1, b"HTTP/1.1");
    rig.with_http2(async |mut sender| {
        for _ in 0..20 {
            assert_eq!(ask(&mut sender, "/").await, "HTTP/2.0");
        }
    });
    let mut slow = rig.client();
    for piece in frames::PREFACE.chunks(7) {
        rig.takes_in(&mut slow, piece);
    }
    // SETTINGS, with the number of streams.
    slow.write(b"\0\0\0\x04\0\0\0\0\0");
    let head = slow.read(9);
    assert_eq!((head[3], &head[5..]), (4, &[0; 4][..]));
    drop((client, slow));
    common::finish(rig.running);
}

#[test]
fn a_peer_that_does_not_say_what_it_speaks_is_closed() {
    let rig = Rig::start(HttpOptions { header_read: Some(BRIEF), ..HttpOptions::default() });
    let mut silent = rig.client();
    let mut half = rig.client();
    half.write(&frames::PREFACE[..20]);
    assert_eq!((silent.end(), half.end()), (End::Fin, End::Fin));
    drop((silent, half));
    let report = common::finish(rig.running);
    assert_eq!(report.counters.closed_for(CloseReason::HandlerError), 0, "{:?}", report.counters);
}

#[test]
fn the_head_of_a_request_has_to_come_in_time() {
    let rig = Rig::start(HttpOptions { header_read: Some(BRIEF), ..HttpOptions::default() });
    let mut client = rig.client();
    for _ in 0..3 {
        client.write(GET);
        assert_eq!(read_answer(&mut client).1, b"HTTP/1.1");
    }
    // Kept alive, and not used.
    assert_eq!(client.end(), End::Fin);
    let mut client = rig.client();
    client.write(&GET[..GET.len() - 1]);
    assert_eq!(client.end_after_all(), End::Fin);
    // A handler may take longer.
    let mut client = rig.client();
    client.write(b"GET /gate HTTP/1.1\r\nhost: x\r\n\r\n");
    rig.waits_inside(1);
    let mut other = rig.client();
    assert_eq!(other.end(), End::Fin);
    rig.gate.add_permits(1);
    assert_eq!(read_answer(&mut client).1, b"HTTP/1.1");
    drop((client, other));
    let report = common::finish(rig.running);
    assert_eq!(report.counters.closed_for(CloseReason::HandlerError), 0, "{:?}", report.counters);
}

#[test]
fn what_is_too_large_is_answered_and_counted() {
    let options = HttpOptions { header_bytes_max: 4096, headers_max: 10, ..HttpOptions::default() };
    let rig = Rig::start(options);
    let mut client = rig.client();
    // What fits goes through.
    client.write(format!("GET / HTTP/1.1\r\nhost: x\r\nbig: {}\r\n\r\n", "b".repeat(4000)).as_bytes());
    assert_eq!(read_answer(&mut client).1, b"HTTP/1.1");
    let big = format!("GET / HTTP/1.1\r\nhost: x\r\nbig: {}\r\n\r\n", "b".repeat(5000));
    let many = format!("GET / HTTP/1.1\r\n{}\r\n", "many: x\r\n".repeat(11));
    for (n, request) in [big, many].iter().enumerate() {
        let mut client = rig.client();
        client.write(request.as_bytes());
        let (head, _) = read_answer(&mut client);
        assert!(head.starts_with("HTTP/1.1 431 "), "{head}");
        assert_eq!(client.end(), End::Fin);
        watch::closed_for(&rig.running, CloseReason::HandlerError, n as u64 + 1);
    }
    rig.with_http2(async |mut sender| {
        let mut request = get("/");
        request.headers_mut().insert("big", "b".repeat(5000).parse().unwrap());
        assert_eq!(sender.send_request(request).await.unwrap().status(), 431);
        assert_eq!(ask(&mut sender, "/").await, "HTTP/2.0");
    });
    drop(client);
    common::finish(rig.running);
}

#[test]
fn nonsense_is_answered_and_counted_and_the_errors_of_services_too() {
    let rig = Rig::start(HttpOptions::default());
    let mut client = rig.client();
    client.write(b"nonsense\r\n\r\n");
    let (head, _) = read_answer(&mut client);
    assert!(head.starts_with("HTTP/1.1 400 "), "{head}");
    assert_eq!(client.end(), End::Fin);
    watch::closed_for(&rig.running, CloseReason::HandlerError, 1);
    let mut client = rig.client();
    client.write(b"GET /fail HTTP/1.1\r\nhost: x\r\n\r\n");
    assert_eq!(client.end(), End::Fin);
    watch::closed_for(&rig.running, CloseReason::HandlerError, 2);
    let mut client = rig.client();
    client.write(b"POST /limited HTTP/1.1\r\nhost: x\r\ncontent-length: 11\r\n\r\nhello hello");
    assert_eq!(client.end_after_all(), End::Fin);
    watch::closed_for(&rig.running, CloseReason::HandlerError, 3);
    // Of HTTP/2 that stream alone ends.
    rig.with_http2(async |mut sender| {
        assert!(sender.send_request(get("/fail")).await.is_err());
        assert_eq!(ask(&mut sender, "/").await, "HTTP/2.0");
    });
    // DATA that belongs to no stream.
    let mut client = rig.client();
    client.write(&[frames::PREFACE, b"\0\0\0\x04\0\0\0\0\0", b"\0\0\x01\0\0\0\0\0\0x"].concat());
    client.end_after_all();
    watch::closed_for(&rig.running, CloseReason::HandlerError, 4);
    drop(client);
    common::finish(rig.running);
}

#[test]
fn half_closed_peer_gets_every_answer_whole() {
    let rig = Rig::start(HttpOptions::default());
    let mut client = rig.client();
    // FIN is there long before the answers are: the first waits, and those behind it are pipelined.
    let requests: [&[u8]; 3] =
        [b"GET /gate HTTP/1.1\r\nhost: x\r\n\r\n", b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n", GET];
    client.write(&requests.concat());
    client.finish_writing();
    rig.waits_inside(1);
    // Another connection's answer: the FIN was seen by then.
    let mut other = rig.client();
    other.write(GET);
    read_answer(&mut other);
    rig.gate.add_permits(1);
    assert_eq!(read_answer(&mut client).1, b"HTTP/1.1");
    assert_eq!(read_answer(&mut client).1.len(), LARGE);
    assert_eq!(read_answer(&mut client).1, b"HTTP/1.1");
    assert_eq!(client.end(), End::Fin);
    drop((client, other));
    let report = common::finish(rig.running);
    assert_eq!(report.counters.closed_for(CloseReason::HandlerError), 0, "{:?}", report.counters);
}

#[test]
fn half_closed_peer_that_reads_nothing_is_closed() {
    let limits = Limits { write_stalled: Some(BRIEF), ..no_time_limits() };
    let rig = Rig::start_with(limits, HttpOptions::default());
    let mut client = Client::with_small_window(rig.running.local_addrs()[0]);
    client.write(b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n");
    client.finish_writing();
    watch::closed_for(&rig.running, CloseReason::WriteStalled, 1);
    drop(client);
    common::finish(rig.running);
}

#[test]
fn a_peer_that_vanishes_is_no_failure() {
    let rig = Rig::start(HttpOptions::default());
    // In the middle of a head, of a body, and while it waits; with a reset, and with FIN where that does not only mean that
    // no request follows.
    let requests: [(&[u8], bool); 4] = [
        (b"GET / HT", true),
        (b"POST /limited HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nhell", true),
        (b"GET /never HTTP/1.1\r\nhost: x\r\n\r\n", false),
        (frames::PREFACE, true),
    ];
    for (request, ends_by_fin) in requests {
        if ends_by_fin {
            let mut client = rig.client();
            client.write(request);
            watch::holds(&rig.running, 1);
            drop(client);
            watch::holds(&rig.running, 0);
        }
        let mut client = rig.client();
        client.write(request);
        watch::holds(&rig.running, 1);
        client.reset();
        watch::holds(&rig.running, 0);
    }
    assert_eq!(rig.handlers.inside.load(SeqCst), 0, "whoever waits for a peer that is gone is dropped");
    let report = common::finish(rig.running);
    let ends = &report.counters;
    assert_eq!(ends.closed_for(CloseReason::HandlerError), 0, "{ends:?}");
    // Also one that leaves with FIN resets, if it did not read what came just before.
    assert!(ends.closed_for(CloseReason::PeerReset) >= 3, "{ends:?}");
}

#[test]
fn a_drain_answers_what_was_asked_and_ends_the_rest() {
    let rig = Rig::start(HttpOptions::default());
    let (mut idle, mut fresh, mut half) = (rig.client(), rig.client(), rig.client());
    idle.write(GET);
    read_answer(&mut idle);
    half.write(&frames::PREFACE[..10]);
    let mut busy = rig.client();
    busy.write(b"GET /gate HTTP/1.1\r\nhost: x\r\n\r\n");
    rig.waits_inside(1);
    watch::holds(&rig.running, 4);
    rig.running.shutdown();
    assert_eq!((idle.end(), fresh.end(), half.end()), (End::Fin, End::Fin, End::Fin));
    assert_eq!(rig.handlers.inside.load(SeqCst), 1);
    rig.gate.add_permits(1);
    let (head, body) = read_answer(&mut busy);
    assert!(head.contains("connection: close\r\n"), "{head}");
    assert_eq!((body.as_slice(), busy.end()), (&b"HTTP/1.1"[..], End::Fin));
    drop((idle, fresh, half, busy));
    let report = common::finish(rig.running);
    assert_eq!(report.counters.closed_for(CloseReason::HandlerError), 0, "{:?}", report.counters);
}

#[test]
fn a_drain_finishes_the_streams_of_http_2() {
    let rig = Rig::start(HttpOptions::default());
    // While it is kept the client does not end the connection: the server's GOAWAY does, and that is waited for.
    let kept = Cell::new(None);
    rig.with_http2(async |mut sender| {
        let answer = sender.send_request(get("/gate"));
        let answer = tokio::spawn(answer);
        while rig.handlers.inside.load(SeqCst) == 0 {
            tokio::task::yield_now().await;
        }
        rig.running.shutdown();
        rig.gate.add_permits(1);
        assert_eq!(
            answer.await.unwrap().unwrap().into_body().collect().await.unwrap().to_bytes(),
            "HTTP/2.0"
        );
        kept.set(Some(sender));
    });
    common::finish(rig.running);
}

#[test]
fn no_more_streams_than_allowed_are_served_at_once() {
    let rig = Rig::start(HttpOptions { streams_max: 3, ..HttpOptions::default() });
    rig.with_http2(async |mut sender| {
        // The bound is known from here on.
        ask(&mut sender, "/").await;
        let mut answers = tokio::task::JoinSet::new();
        for _ in 0..10 {
            let mut sender = sender.clone();
            answers.spawn(async move { ask(&mut sender, "/gate").await });
        }
        for n in 0..10 {
            while rig.handlers.inside.load(SeqCst) < 3.min(10 - n) {
                tokio::task::yield_now().await;
            }
            rig.gate.add_permits(1);
            assert_eq!(answers.join_next().await.unwrap().unwrap(), "HTTP/2.0");
        }
    });
    assert_eq!(rig.handlers.most.load(SeqCst), 3);
    common::finish(rig.running);
}

#[test]
fn requests_of_http_2_are_dropped_with_their_connection() {
    let rig = Rig::start(HttpOptions::default());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let stream = tokio::net::TcpStream::connect(rig.running.local_addrs()[0]).await.unwrap();
        let builder = hyper::client::conn::http2::Builder::new(hyper_util::rt::TokioExecutor::new());
        let io = hyper_util::rt::TokioIo::new(stream);
        let (mut sender, connection) = builder.handshake::<_, Bodies>(io).await.unwrap();
        let connection = tokio::spawn(connection);
        let _answers: Vec<_> = (0..5).map(|_| tokio::spawn(sender.send_request(get("/never")))).collect();
        while rig.handlers.inside.load(SeqCst) < 5 {
            tokio::task::yield_now().await;
        }
        connection.abort();
    });
    drop(runtime);
    rig.waits_inside(0);
    assert_eq!(rig.handlers.dropped.load(SeqCst), 5);
    watch::holds(&rig.running, 0);
    common::finish(rig.running);
}

#[test]
fn a_silent_peer_of_http_2_is_pinged_and_closed() {
    let options = HttpOptions { ping: Some(BRIEF), ping_answer: BRIEF, ..HttpOptions::default() };
    let rig = Rig::start(options);
    let mut silent = rig.client();
    silent.write(&[frames::PREFACE, b"\0\0\0\x04\0\0\0\0\0"].concat());
    let (frames, end) = silent.read_to_end();
    let is_ping = |head: &[u8]| head == b"\0\0\x08\x06\0\0\0\0\0";
    assert!(frames.windows(9).any(is_ping), "{frames:?}");
    assert_eq!(end, End::Fin);
    // One that answers stays, and is asked again and again.
    let mut answers = rig.client();
    answers.write(&[frames::PREFACE, b"\0\0\0\x04\0\0\0\0\0"].concat());
    let mut pings = 0;
    while pings < 5 {
        let head = answers.read(9);
        let len = usize::from(head[1]) << 8 | usize::from(head[2]);
        let payload = answers.read(len);
        if is_ping(&head) {
            pings += 1;
            answers.write(&[b"\0\0\x08\x06\x01\0\0\0\0", &payload[..]].concat());
        }
    }
    drop((silent, answers));
    common::finish(rig.running);
}

#[test]
fn one_protocol_alone_can_be_spoken() {
    let rig = Rig::start(HttpOptions { versions: HttpVersions::Http2, ..HttpOptions::default() });
    let mut client = rig.client();
    client.write(GET);
    assert_eq!(client.end(), End::Fin);
    watch::closed_for(&rig.running, CloseReason::HandlerError, 1);
    rig.with_http2(async |mut sender| assert_eq!(ask(&mut sender, "/").await, "HTTP/2.0"));
    common::finish(rig.running);
    let rig = Rig::start(HttpOptions { versions: HttpVersions::Http1, ..HttpOptions::default() });
    let mut client = rig.client();
    client.write(frames::PREFACE);
    client.end_after_all();
    watch::closed_for(&rig.running, CloseReason::HandlerError, 1);
    let mut client = rig.client();
    client.write(GET);
    assert_eq!(read_answer(&mut client).1, b"HTTP/1.1");
    drop(client);
    common::finish(rig.running);
}

#[test]
fn a_shard_has_one_service_and_a_connection_can_have_its_own() {
    let server = On::default().server(no_time_limits());
    let running = server.start_stream(|shard| {
        let http = Http::new(shard, &HttpOptions { date: false, ..HttpOptions::default() });
        let requests = Rc::new(Cell::new(0));
        async move |stream: Stream| {
            let (peer, requests) = (stream.peer(), requests.clone());
            let answer = move |_: Request<Incoming>| {
                requests.set(requests.get() + 1);
                ready(Ok::<_, BoxError>(Response::new(format!("{peer} {}", requests.get()))))
            };
            http.serve(stream, service_fn(answer)).await
        }
    });
    let running = running.expect("the server starts");
    let mut clients: Vec<Client> = (0..3).map(|_| Client::connect(running.local_addrs()[0])).collect();
    for (n, client) in clients.iter_mut().enumerate() {
        client.write(GET);
        let (head, body) = read_answer(client);
        assert_eq!(String::from_utf8(body).unwrap(), format!("{} {}", client.local_addr(), n + 1));
        assert!(!head.contains("date:"), "{head}");
    }
    drop(clients);
    common::finish(running);
}

/// Options under which a rate is measured over a short time.
fn brief_window() -> HttpOptions {
    HttpOptions { rate_window: BRIEF, ..HttpOptions::default() }
}

/// Sends `bytes` again and again, with a pause behind each time, until the server ends the connection or does not within a
/// bound. Returns what it sent.
fn drip(client: &mut Client, bytes: &[u8], pause: Duration) -> (Vec<u8>, End) {
    let mut writer = client.stream.try_clone().unwrap();
    let bound = Instant::now() + SOON;
    std::thread::scope(|scope| {
        scope.spawn(move || {
            // The pause is the attack.
            while std::io::Write::write_all(&mut writer, bytes).is_ok() && Instant::now() < bound {
                std::thread::park_timeout(pause);
            }
        });
        let all = client.read_to_end();
        assert!(Instant::now() < bound, "the server ends a connection that drips");
        all
    })
}

const POST: &str = "HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n";

#[test]
fn dripping_request_body_is_answered_with_408() {
    let rig = Rig::start(brief_window());
    let mut neighbour = rig.client();
    let mut client = rig.client();
    client.write(format!("POST /read {POST}").as_bytes());
    let (answer, _) = drip(&mut client, b"x", BRIEF / 3);
    assert!(answer.starts_with(b"HTTP/1.1 408 "), "{}", String::from_utf8_lossy(&answer));
    watch::closed_for(&rig.running, CloseReason::HandlerError, 1);
    assert_eq!(rig.handlers.inside.load(SeqCst), 0, "the service is dropped");
    neighbour.write(GET);
    assert_eq!(read_answer(&mut neighbour).1, b"HTTP/1.1");
    drop((client, neighbour));
    common::finish(rig.running);
}

#[test]
fn dripping_body_that_is_echoed_ends_its_connection() {
    let rig = Rig::start(brief_window());
    let mut client = rig.client();
    client.write(format!("POST /echo {POST}").as_bytes());
    let (answer, end) = drip(&mut client, b"x", BRIEF / 3);
    assert!(answer.starts_with(b"HTTP/1.1 200 "), "{}", String::from_utf8_lossy(&answer));
    assert_eq!(end, End::Reset);
    watch::closed_for(&rig.running, CloseReason::HandlerError, 1);
    drop(client);
    common::finish(rig.running);
}

#[test]
fn slow_service_is_no_slow_body() {
    let rig = Rig::start(brief_window());
    let mut client = rig.client();
    let mut other = rig.client();
    // The body is there whole, and the service takes its time; on another connection it reads nothing.
    client.write(b"POST /read HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nhello");
    other.write(b"POST /gate HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nhell");
    rig.waits_inside(2);
    // Another peer's end tells that windows went by.
    let mut slow = rig.client();
    slow.write(format!("POST /read {POST}").as_bytes());
    assert!(slow.read_to_end().0.starts_with(b"HTTP/1.1 408 "));
    rig.gate.add_permits(2);
    assert_eq!(read_answer(&mut client).1, b"HTTP/1.1");
    assert_eq!(read_answer(&mut other).1, b"HTTP/1.1");
    drop((client, other, slow));
    common::finish(rig.running);
}

#[test]
fn response_that_is_taken_byte_by_byte_ends() {
    let rig = Rig::start(HttpOptions { body_bytes_per_second_min: 64 << 20, ..brief_window() });
    let mut client = Client::with_small_window(rig.running.local_addrs()[0]);
    client.write(b"GET /large HTTP/1.1\r\nhost: x\r\n\r\n");
    // A little at a time, below the rate but never without a byte.
    let mut ended = false;
    for _ in 0..10_000 {
        let mut some = [0; 4096];
        match std::io::Read::read(&mut client.stream, &mut some) {
            Ok(0) | Err(_) => {
                ended = true;
                break;
            }
            Ok(_) => std::thread::park_timeout(Duration::from_millis(1)),
        }
    }
    assert!(ended, "it was sent whole");
    watch::closed_for(&rig.running, CloseReason::HandlerError, 1);
    drop(client);
    common::finish(rig.running);
}

#[test]
fn late_service_is_answered_with_503() {
    let rig = Rig::start(HttpOptions { answer: Some(BRIEF), ..HttpOptions::default() });
    let mut client = rig.client();
    client.write(b"GET /never HTTP/1.1\r\nhost: x\r\n\r\n");
    let (head, _) = read_answer(&mut client);
    assert!(head.starts_with("HTTP/1.1 503 ") && head.contains("connection: close\r\n"), "{head}");
    assert_eq!(client.end(), End::Fin);
    watch::closed_for(&rig.running, CloseReason::HandlerError, 1);
    // A client that is gone with a FIN, which could be a half close.
    let mut client = rig.client();
    client.write(b"GET /never HTTP/1.1\r\nhost: x\r\n\r\n");
    drop(client);
    watch::holds(&rig.running, 0);
    assert_eq!(rig.handlers.inside.load(SeqCst), 0);
    rig.with_http2(async |mut sender| {
        assert_eq!(sender.send_request(get("/never")).await.unwrap().status(), 503);
        assert_eq!(ask(&mut sender, "/").await, "HTTP/2.0");
    });
    // A body of HTTP/2 that never comes.
    let mut client = rig.client();
    client.write(&[frames::PREFACE, frames::SETTINGS, &frames::request(1, false, "/read")].concat());
    rig.waits_inside(1);
    rig.waits_inside(0);
    drop(client);
    common::finish(rig.running);
}

#[test]
fn request_ends_in_time_whatever_it_waits_for() {
    let rig = Rig::start(HttpOptions { request: Some(BRIEF), ..HttpOptions::default() });
    let mut client = rig.client();
    client.write(b"GET /never HTTP/1.1\r\nhost: x\r\n\r\n");
    assert!(read_answer(&mut client).0.starts_with("HTTP/1.1 503 "));
    // The response began.
    let mut client = rig.client();
    client.write(format!("POST /echo {POST}hello").as_bytes());
    assert_eq!(client.end_after_all(), End::Reset);
    // Of HTTP/2 that stream alone ends.
    let mut client = rig.client();
    let data = frames::frame(0, 0, 1, b"hello");
    client.write(&[frames::PREFACE, frames::SETTINGS, &frames::request(1, false, "/echo"), &data].concat());
    assert_eq!(reset_stream(&mut client), 1);
    client.write(&frames::request(3, true, "/"));
    assert_eq!(answered_stream(&mut client), 3);
    drop(client);
    common::finish(rig.running);
}

/// The stream of the next RST_STREAM.
fn reset_stream(client: &mut Client) -> u32 {
    loop {
        let (kind, _, stream, _) = frames::next(client);
        if kind == 3 {
            return stream;
        }
    }
}

/// The stream of the next HEADERS.
fn answered_stream(client: &mut Client) -> u32 {
    loop {
        let (kind, _, stream, _) = frames::next(client);
        if kind == 1 {
            return stream;
        }
    }
}

#[test]
fn stream_with_a_closed_window_is_reset() {
    let rig = Rig::start(brief_window());
    let mut client = rig.client();
    client.write(&[frames::PREFACE, frames::CLOSED, &frames::request(1, true, "/pieces")].concat());
    assert_eq!(reset_stream(&mut client), 1);
    // The others are served.
    client.write(&[frames::SETTINGS, &frames::request(3, true, "/never")[..]].concat());
    rig.waits_inside(1);
    drop(client);
    common::finish(rig.running);
}

#[test]
fn connection_whose_streams_hyper_cannot_reset_is_closed() {
    let rig = Rig::start(brief_window());
    let mut client = rig.client();
    // With a window of 1 byte hyper takes the whole body, and no task is left that could reset the stream.
    client.write(&[frames::PREFACE, frames::ONE_BYTE, &frames::request(1, true, "/large")].concat());
    assert_eq!(client.end_after_all(), End::Reset);
    watch::closed_for(&rig.running, CloseReason::HandlerError, 1);
    drop(client);
    common::finish(rig.running);
}

#[test]
fn pings_do_not_keep_a_connection_without_requests() {
    let rig = Rig::start(HttpOptions { http2_idle: Some(BRIEF), ..brief_window() });
    let mut client = rig.client();
    client.write(&[frames::PREFACE, frames::SETTINGS, &frames::request(1, true, "/gate")].concat());
    rig.waits_inside(1);
    // Neither ends while a request runs: another connection's end tells that the time went by.
    for (attack, kept) in [(frames::PING, false), (frames::SETTINGS, false), (frames::SETTINGS_ACK, true)] {
        let mut idle = rig.client();
        idle.write(&[frames::PREFACE, frames::SETTINGS].concat());
        // An acknowledgement that was not asked for is an error, so that client sends nothing at all.
        let (bytes, _) = if kept { idle.read_to_end() } else { drip(&mut idle, attack, BRIEF / 10) };
        let goaway = frames::split(&bytes).iter().any(|frame| frame.0 == 7);
        assert!(goaway, "it is told to end");
    }
    rig.gate.add_permits(1);
    assert_eq!(answered_stream(&mut client), 1);
    drop(client);
    common::finish(rig.running);
}

#[test]
fn rapid_resets_and_continuations_end_their_connection() {
    let rig = Rig::start(HttpOptions { pending_resets_max: 5, ..HttpOptions::default() });
    let mut neighbour = rig.client();
    let mut resets = [frames::PREFACE, frames::SETTINGS].concat();
    for stream in (1..2001).step_by(2) {
        resets.extend(frames::request(stream, true, "/never"));
        resets.extend(frames::frame(3, 0, stream, &8u32.to_be_bytes()));
    }
    // No END_HEADERS, and then pieces of a head without end.
    let mut endless = [frames::PREFACE, frames::SETTINGS, &frames::frame(1, 0, 1, b"\x82\x86")].concat();
    for _ in 0..1000 {
        endless.extend(frames::frame(9, 0, 1, b"\x82"));
    }
    for (n, attack) in [resets, endless].iter().enumerate() {
        let mut client = rig.client();
        // The server may be gone before all is written.
        _ = std::io::Write::write_all(&mut client.stream, attack);
        client.end_after_all();
        watch::closed_for(&rig.running, CloseReason::HandlerError, n as u64 + 1);
        neighbour.write(GET);
        assert_eq!(read_answer(&mut neighbour).1, b"HTTP/1.1");
    }
    rig.waits_inside(0);
    drop(neighbour);
    common::finish(rig.running);
}

#[test]
fn options_out_of_range_are_refused_at_the_start() {
    let defaults = HttpOptions::default;
    for (name, options) in [
        ("header_bytes_max", HttpOptions { header_bytes_max: 65 << 10, ..defaults() }),
        ("buffer_bytes_max", HttpOptions { buffer_bytes_max: 8191, header_bytes_max: 1, ..defaults() }),
        ("rate_window", HttpOptions { rate_window: Duration::from_millis(9), ..defaults() }),
        ("answer", HttpOptions { answer: Some(Duration::ZERO), ..defaults() }),
        ("body_bytes_per_second_min", HttpOptions { body_bytes_per_second_min: usize::MAX, ..defaults() }),
    ] {
        let service =
            |_: &ringserve::Shard| service_fn(|_| ready(Ok::<_, BoxError>(Response::new(String::new()))));
        let error = On::default().server(no_time_limits()).start_http_with(options, service).err();
        let error = error.expect("it is refused").to_string();
        assert!(error.contains(&format!("{name} is ")), "{error}");
    }
}

#[test]
fn streams_of_a_connection_share_what_is_kept_for_sending() {
    const STREAMS: u32 = 20;
    let rig = Rig::start(HttpOptions { connection_send_bytes_max: 64 << 10, ..HttpOptions::default() });
    let mut client = Client::with_small_window(rig.running.local_addrs()[0]);
    // Windows without a bound, and a peer that reads nothing.
    let open = [&[0, 4][..], &i32::MAX.to_be_bytes()].concat();
    let settings = frames::frame(4, 0, 0, &open);
    let update = frames::frame(8, 0, 0, &(i32::MAX as u32 - 65_535).to_be_bytes());
    client.write(&[frames::PREFACE, &settings, &update].concat());
    for stream in 0..STREAMS {
        client.write(&frames::request(2 * stream + 1, true, "/counted"));
    }
    let mut made = 0;
    eventually("no more is made", SOON, || {
        std::thread::park_timeout(BRIEF);
        let now = MADE.load(SeqCst);
        now > 0 && std::mem::replace(&mut made, now) == now
    });
    // 64 KiB, the outbox, what the kernels take, and a piece or two for each stream; 400 KiB for each would be 500 pieces.
    assert!(made < 300, "{made} pieces of 16 KiB");
    // And none stays behind when the peer reads.
    let (mut ended, mut bytes) = (0, 0);
    while ended < STREAMS {
        let (kind, flags, _, payload) = frames::next(&mut client);
        if kind == 0 {
            bytes += payload.len();
            ended += u32::from(flags & 1);
        }
    }
    assert_eq!(bytes, COUNTED * STREAMS as usize);
    drop(client);
    common::finish(rig.running);
}
