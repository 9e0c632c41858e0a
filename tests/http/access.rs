//! The access log of requests. The subscriber is the whole process's, so the test runs in its own.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use http_body_util::{BodyExt, Empty, Full};
use hyper::body::{Body, Bytes, Frame, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use ringserve::http::HttpOptions;
use ringserve::{ServerHandle, http};
use ringserve_tests::http::{Bodies, Sender, read_answer, read_chunked, with_http2};
use ringserve_tests::{Client, Logged, On, SOON, alone, eventually, no_time_limits};
use serde_json::Value;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// More bytes than the outbox and both kernels take.
const LARGE: usize = 12 << 20;

/// Answers `/large` with a body of [`LARGE`] bytes, `/pieces` with three pieces, whose length
/// another path declares correctly and `/more` too large, `/none` with 204; `/never` does not
/// answer, `/fail` fails, `/panic` panics; others greet.
async fn answer(request: Request<Incoming>) -> Result<Response<Bodies>, BoxError> {
    let full = |text: Vec<u8>| Full::new(Bytes::from(text)).map_err(|never| match never {}).boxed();
    Ok(match request.uri().path() {
        "/fail" => return Err("as it was told".into()),
        "/panic" => panic!("planted: a service that panics"),
        "/large" => Response::new(full(vec![b'.'; LARGE])),
        "/pieces" => Response::new(Three(3).boxed()),
        "/told" => Response::builder().header("content-length", 30).body(Three(3).boxed())?,
        "/more" => Response::builder().header("content-length", 31).body(Three(3).boxed())?,
        "/never" => std::future::pending().await,
        "/none" => Response::builder().status(StatusCode::NO_CONTENT).body(full(Vec::new()))?,
        _ => Response::new(full(b"hello".to_vec())),
    })
}

/// Pieces of ten bytes.
struct Three(usize);

impl Body for Three {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _task: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let left = self.0;
        self.0 = left.saturating_sub(1);
        Poll::Ready((left > 0).then(|| Ok(Frame::data(Bytes::from_static(b"0123456789")))))
    }
}

struct Rig {
    running: ServerHandle,
    lines: Logged,
    seen: usize,
}

impl Rig {
    fn client(&self) -> Client {
        Client::connect(self.running.local_addrs()[0])
    }

    fn asks(&self, client: &mut Client, request: &str) {
        client.write(format!("{request} HTTP/1.1\r\nhost: x\r\n\r\n").as_bytes());
    }

    /// The next line: the fields that a test can know, and all of it.
    fn next(&mut self) -> (String, Value) {
        self.seen += 1;
        let seen = self.seen;
        eventually("a request has its line", SOON, || self.lines.text().lines().count() >= seen);
        let text = self.lines.text();
        let line: Value = serde_json::from_str(text.lines().nth(seen - 1).unwrap()).unwrap();
        let field =
            |name: &str| line.get(name).map_or("-".to_owned(), |value| value.to_string().replace('"', ""));
        let said = ["version", "method", "path", "status", "bytes", "whole"].map(field).join(" ");
        (said, line)
    }

    #[track_caller]
    fn says(&mut self, wanted: &str) {
        let (said, line) = self.next();
        assert_eq!(said, wanted, "{line}");
    }
}

#[test]
fn each_request_has_one_line_once_its_answer_is_through() {
    if !alone(each_request_has_one_line_once_its_answer_is_through) {
        return;
    }
    let lines = Logged::default();
    let writer = lines.clone();
    let json = fmt::layer().json().flatten_event(true).with_writer(move || writer.clone());
    // The settings for the log of connections apply to that of requests.
    let accesses = Targets::new().with_target("ringserve::access", LevelFilter::INFO);
    tracing_subscriber::registry().with(json).with(accesses).init();
    let options = HttpOptions::default().response_timeout(Duration::from_millis(20));
    let options = options.rate_window(Duration::from_millis(20));
    let running = On::default()
        .server(no_time_limits())
        .start(move |_| http(service_fn(answer)).access_log(true).options(options.clone()));
    let mut rig = Rig { running: running.expect("the server starts"), lines, seen: 0 };

    let mut client = rig.client();
    rig.asks(&mut client, "GET /hello?token=secret");
    read_answer(&mut client);
    let (said, line) = rig.next();
    assert_eq!(said, "HTTP/1.1 GET /hello 200 5 true");
    let text = |name: &str| line[name].as_str().unwrap().to_owned();
    assert_eq!((text("target"), text("level")), ("ringserve::access::http".into(), "INFO".into()));
    assert_eq!((text("message"), text("peer")), ("answered".into(), client.local_addr().to_string()));
    assert!(text("id").contains('.') && line["shard"] == 0 && line.get("via").is_none(), "{line}");
    assert!(line["seconds"].as_f64().is_some_and(|seconds| seconds > 0.0 && seconds < 60.0), "{line}");
    rig.asks(&mut client, "POST /\u{85}\u{fc}");
    read_answer(&mut client);
    rig.says("HTTP/1.1 POST /%C2%85%C3%BC 200 5 true");
    rig.asks(&mut client, &format!("GET /{}", "x".repeat(3000)));
    read_answer(&mut client);
    rig.says(&format!("HTTP/1.1 GET /{} 200 5 true", "x".repeat(1023)));
    rig.asks(&mut client, "HEAD /hello");
    rig.says("HTTP/1.1 HEAD /hello 200 0 true");
    let mut client = rig.client();
    rig.asks(&mut client, "GET /none");
    rig.says("HTTP/1.1 GET /none 204 0 true");
    let mut client = rig.client();
    rig.asks(&mut client, "GET /pieces");
    read_chunked(&mut client);
    rig.says("HTTP/1.1 GET /pieces 200 30 true");
    rig.asks(&mut client, "GET /told");
    assert_eq!(read_answer(&mut client).1.len(), 30);
    rig.says("HTTP/1.1 GET /told 200 30 true");
    rig.asks(&mut client, "GET /more");
    client.read_to_end();
    rig.says("HTTP/1.1 GET /more 200 0 false");
    let mut client = rig.client();
    rig.asks(&mut client, "GET /fail");
    client.end();
    rig.says("HTTP/1.1 GET /fail - 0 false");
    let mut client = rig.client();
    rig.asks(&mut client, "GET /panic");
    client.read_to_end();
    rig.says("HTTP/1.1 GET /panic - 0 false");
    let mut client = rig.client();
    rig.asks(&mut client, "GET /never");
    client.end_after_all();
    rig.says("HTTP/1.1 GET /never 503 0 true");
    let mut client = rig.client();
    client.write(b"GET /no-host HTTP/1.1\r\n\r\n");
    client.end_after_all();
    rig.says("HTTP/1.1 GET /no-host 400 0 true");

    let mut client = rig.client();
    rig.asks(&mut client, "GET /large");
    client.read(1);
    client.reset();
    let (said, line) = rig.next();
    assert!(said.starts_with("HTTP/1.1 GET /large 200 ") && said.ends_with(" false"), "{said}");
    assert!(line["bytes"].as_u64().is_some_and(|bytes| bytes < LARGE as u64), "{line}");
    with_http2(rig.running.local_addrs()[0], async |mut sender: Sender| {
        let body = || Empty::new().map_err(|never| match never {}).boxed();
        let ask = Request::get("http://x/pieces").body(body()).unwrap();
        let answer = sender.send_request(ask).await.unwrap();
        assert_eq!(answer.into_body().collect().await.unwrap().to_bytes().len(), 30);
        // A stream that is reset.
        let ask = Request::get("http://x/large").body(body()).unwrap();
        drop(sender.send_request(ask).await.unwrap());
    });
    rig.says("HTTP/2.0 GET /pieces 200 30 true");
    let (said, _) = rig.next();
    assert!(said.starts_with("HTTP/2.0 GET /large 200 ") && said.ends_with(" false"), "{said}");
    ringserve_tests::finish(rig.running);
}
