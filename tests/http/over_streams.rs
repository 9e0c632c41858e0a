//! hyper 1.x on a server of streams: HTTP/1.1 and HTTP/2.

use std::cell::Cell;
use std::convert::Infallible;
use std::io::{Read, Write};
use std::pin::Pin;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::task::{Context, Poll};
use std::thread;
use std::time::Duration;

use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Bytes, Frame, Incoming};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use ringserve::{CloseReason, Shard, Stream};
use ringserve_tests::client::End;
use ringserve_tests::http::{Bodies, read_answer, read_chunked, with_http2};
use ringserve_tests::{Client, SOON, Streams, eventually, no_time_limits, pattern};

/// The way in which hyper spawns on a shard.
#[derive(Clone)]
struct OnShard(Shard);

impl<F: Future<Output = ()> + 'static> hyper::rt::Executor<F> for OnShard {
    fn execute(&self, future: F) {
        self.0.spawn(future);
    }
}

/// A body whose bytes are made on demand.
struct Counted {
    made: usize,
    len: usize,
}

const PIECE: usize = ringserve_tests::PERIOD / 4;

/// Length of a body that reports how many of its bytes were made.
const TELLS: usize = 1 << 30;
static MADE: AtomicUsize = AtomicUsize::new(0);

impl Body for Counted {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _task: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let piece = PIECE.min(self.len - self.made);
        if piece == 0 {
            return Poll::Ready(None);
        }
        let from = self.made % ringserve_tests::PERIOD;
        self.made += piece;
        if self.len == TELLS {
            MADE.store(self.made, SeqCst);
        }
        Poll::Ready(Some(Ok(Frame::data(Bytes::from(pattern(from + piece)).slice(from..)))))
    }
}

type Answer = Response<Bodies>;

fn whole(bytes: impl Into<Bytes>) -> Answer {
    Response::new(Full::new(bytes.into()).map_err(|never| match never {}).boxed())
}

/// Answers `/hello`, `/echo`, `/length`, and `/N` with N bytes.
async fn answer(request: Request<Incoming>) -> Result<Answer, hyper::Error> {
    let path = request.uri().path()[1..].to_owned();
    Ok(match (request.method(), path.as_str()) {
        (&Method::GET, "hello") => whole("hello"),
        (&Method::POST, "echo") => Response::new(request.into_body().boxed()),
        (&Method::POST, "length") => {
            let mut body = request.into_body();
            let mut len = 0;
            while let Some(frame) = body.frame().await {
                len += frame?.data_ref().map_or(0, Bytes::len);
            }
            whole(len.to_string())
        }
        (&Method::GET, "panic") => panic!("planted: a handler that panics"),
        (&Method::GET, len) if len.parse::<usize>().is_ok() => {
            let body = Counted { made: 0, len: len.parse().unwrap() };
            Response::new(body.map_err(|never| match never {}).boxed())
        }
        _ => {
            let mut answer = whole("no");
            *answer.status_mut() = StatusCode::NOT_FOUND;
            answer
        }
    })
}

fn http1() -> Streams {
    Streams::start(no_time_limits(), |_| {
        async |stream: Stream| {
            let drain = stream.draining();
            let io = TokioIo::new(stream);
            let mut connection = std::pin::pin!(
                hyper::server::conn::http1::Builder::new().serve_connection(io, service_fn(answer))
            );
            tokio::select! {
                done = connection.as_mut() => return done,
                () = drain => connection.as_mut().graceful_shutdown(),
            }
            connection.await
        }
    })
}

fn http2() -> Streams {
    Streams::start(no_time_limits(), |shard| {
        let shard = shard.clone();
        async move |stream: Stream| {
            let drain = stream.draining();
            let builder = hyper::server::conn::http2::Builder::new(OnShard(shard.clone()));
            let mut connection =
                std::pin::pin!(builder.serve_connection(TokioIo::new(stream), service_fn(answer)));
            tokio::select! {
                done = connection.as_mut() => return done,
                () = drain => connection.as_mut().graceful_shutdown(),
            }
            connection.await
        }
    })
}

#[test]
fn http_1_keeps_connections_alive_and_answers_pipelines() {
    let server = http1();
    let mut client = server.client();
    for _ in 0..3 {
        client.write(b"GET /hello HTTP/1.1\r\nhost: x\r\n\r\n");
        let (head, body) = read_answer(&mut client);
        assert!(head.starts_with("HTTP/1.1 200 OK"), "{head}");
        assert_eq!(body, b"hello");
    }
    client.write(&b"GET /hello HTTP/1.1\r\nhost: x\r\n\r\n".repeat(100));
    (0..100).for_each(|_| assert_eq!(read_answer(&mut client).1, b"hello"));
    // One byte at a time.
    b"GET /hello HTTP/1.1\r\nhost: x\r\n\r\n".iter().for_each(|byte| client.write(&[*byte]));
    assert_eq!(read_answer(&mut client).1, b"hello");
    client.write(b"GET /hello HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
    read_answer(&mut client);
    assert_eq!(client.end(), End::Fin);
    drop(client);
    server.holds(0);
    server.finish();
}

#[test]
fn http_1_takes_uploads_in_chunks_and_of_known_length() {
    const LEN: usize = 4 << 20;
    let server = http1();
    let client = server.client();
    let bytes = pattern(LEN);
    for path in ["echo", "length"] {
        thread::scope(|scope| {
            let mut writer = client.stream.try_clone().unwrap();
            let bytes = &bytes;
            scope.spawn(move || {
                write!(writer, "POST /{path} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
                    .unwrap();
                for piece in bytes.chunks(10_007) {
                    write!(writer, "{:x}\r\n", piece.len()).unwrap();
                    writer.write_all(piece).unwrap();
                    writer.write_all(b"\r\n").unwrap();
                }
                writer.write_all(b"0\r\n\r\n").unwrap();
            });
            let mut reader = Client::of(client.stream.try_clone().unwrap());
            if path == "echo" {
                assert!(read_chunked(&mut reader) == *bytes);
            } else {
                assert_eq!(read_answer(&mut reader).1, LEN.to_string().as_bytes());
            }
        });
    }
    thread::scope(|scope| {
        let mut writer = client.stream.try_clone().unwrap();
        let bytes = &bytes;
        scope.spawn(move || {
            write!(writer, "POST /length HTTP/1.1\r\nhost: x\r\ncontent-length: {LEN}\r\n\r\n").unwrap();
            writer.write_all(bytes).unwrap();
        });
        let mut reader = Client::of(client.stream.try_clone().unwrap());
        assert_eq!(read_answer(&mut reader).1, LEN.to_string().as_bytes());
    });
    drop(client);
    server.finish();
}

#[test]
fn http_1_makes_a_large_answer_as_fast_as_it_is_read() {
    let server = http1();
    let mut client = Client::with_small_window(server.addr());
    client.write(format!("GET /{TELLS} HTTP/1.1\r\nhost: x\r\n\r\n").as_bytes());
    let mut made = 0;
    eventually("no more of it is made", SOON, || {
        let now = MADE.load(SeqCst);
        thread::park_timeout(Duration::from_millis(100));
        now > 0 && std::mem::replace(&mut made, now) == now
    });
    assert!(made < 16 << 20, "{made} bytes made for a peer that reads nothing");
    let mut some = vec![0; 8 << 20];
    client.stream.read_exact(&mut some).unwrap();
    drop(client);
    server.closed_for(CloseReason::PeerReset, 1);
    server.finish();
}

#[test]
fn a_drain_ends_connections_that_wait_for_a_request_at_once() {
    let server = http1();
    let mut idle = server.client();
    idle.write(b"GET /hello HTTP/1.1\r\nhost: x\r\n\r\n");
    read_answer(&mut idle);
    server.running.shutdown();
    assert_eq!(idle.end(), End::Fin);
    drop(idle);
    let report = server.finish();
    assert_eq!(report.counters.closed_for(CloseReason::Closed), 1, "{:?}", report.counters);
}

#[test]
fn a_handler_that_panics_ends_its_connection_only() {
    let server = http1();
    let mut canary = server.client();
    let mut client = server.client();
    client.write(b"GET /panic HTTP/1.1\r\nhost: x\r\n\r\n");
    assert_eq!(client.end(), End::Reset);
    server.closed_for(CloseReason::HandlerPanicked, 1);
    canary.write(b"GET /hello HTTP/1.1\r\nhost: x\r\n\r\n");
    assert_eq!(read_answer(&mut canary).1, b"hello");
    drop(canary);
    server.finish();
}

fn request(method: Method, path: &str, body: Bytes) -> Request<Bodies> {
    let body = Full::new(body).map_err(|never| match never {}).boxed();
    Request::builder().method(method).uri(format!("http://x/{path}")).body(body).unwrap()
}

#[test]
fn http_2_answers_many_requests_of_a_connection_at_once() {
    let server = http2();
    with_http2(server.addr(), async |sender| {
        let mut answers = tokio::task::JoinSet::new();
        for n in 0..100 {
            let mut sender = sender.clone();
            answers.spawn(async move {
                let body = Bytes::from(pattern(n * 1000));
                let answer = match n % 3 {
                    0 => sender.send_request(request(Method::GET, "hello", Bytes::new())),
                    1 => sender.send_request(request(Method::POST, "echo", body.clone())),
                    _ => sender.send_request(request(Method::POST, "length", body.clone())),
                };
                let answer = answer.await.unwrap().into_body().collect().await.unwrap().to_bytes();
                match n % 3 {
                    0 => assert_eq!(answer, "hello"),
                    1 => assert!(answer == body),
                    _ => assert_eq!(answer, (n * 1000).to_string()),
                }
            });
        }
        assert!(answers.join_all().await.len() == 100);
    });
    server.holds(0);
    server.finish();
}

#[test]
fn http_2_streams_much_both_ways() {
    let server = http2();
    with_http2(server.addr(), async |mut sender| {
        let body = Bytes::from(pattern(8 << 20));
        let answer = sender.send_request(request(Method::POST, "echo", body.clone())).await.unwrap();
        assert!(answer.into_body().collect().await.unwrap().to_bytes() == body);
        let answer = sender.send_request(request(Method::GET, "16000000", Bytes::new())).await.unwrap();
        assert!(answer.into_body().collect().await.unwrap().to_bytes() == pattern(16_000_000));
        let answer = sender.send_request(request(Method::GET, "nothing", Bytes::new())).await.unwrap();
        assert_eq!(answer.status(), StatusCode::NOT_FOUND);
    });
    server.finish();
}

#[test]
fn http_2_is_told_of_a_drain_and_ends() {
    let server = http2();
    // While it is kept the client does not end the connection: the server's GOAWAY does, which is
    // waited for.
    let kept = Cell::new(None);
    with_http2(server.addr(), async |mut sender| {
        let answer = sender.send_request(request(Method::GET, "hello", Bytes::new())).await.unwrap();
        assert_eq!(answer.into_body().collect().await.unwrap().to_bytes(), "hello");
        server.running.shutdown();
        kept.set(Some(sender));
    });
    server.finish();
}
