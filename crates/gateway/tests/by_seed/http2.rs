//! Backends that speak HTTP/2.

use http_body_util::BodyExt;
use ringserve::http::hyper::body::Incoming;
use ringserve::http::hyper::header::{COOKIE, HOST};
use ringserve::http::hyper::service::service_fn;
use ringserve::http::hyper::{Error, Request, Response, Version};
use ringserve::http::{HttpOptions, HttpVersions};
use ringserve::testing::Faults;
use ringserve_gateway::UpstreamProtocol;

use super::*;

/// A server of HTTP/2 that says what it was asked.
fn echo(sim: &Sim, addr: &'static str) -> SimServer {
    async fn answer(request: Request<Incoming>) -> Result<Response<String>, Error> {
        assert_eq!(request.version(), Version::HTTP_2);
        assert!(!request.headers().contains_key(HOST));
        let (parts, body) = request.into_parts();
        let body = body.collect().await?.to_bytes();
        let cookies = parts.headers.get_all(COOKIE).iter().count();
        let text = format!("{} {} {cookies} {}", parts.method, parts.uri, body.len());
        Ok(Response::new(text))
    }
    let options = HttpOptions::default().versions(HttpVersions::Http2);
    let server = Server::bind(addr).shards(1);
    sim.start(server, move |_| http(service_fn(answer)).options(options.clone())).expect("it starts")
}

fn http2_upstream(backends: usize) -> HttpUpstream {
    upstream(backends).protocol(UpstreamProtocol::Http2)
}

#[test]
fn requests_of_http1_reach_backends_of_http2() {
    Sim::seeds(3).run(|sim| {
        let _backend = echo(sim, ADDRS[0]);
        start(sim, &all_to(&http2_upstream(1)));
        sim.client("one", async move |net| {
            let mut me = net.connect(FRONT).await?;
            assert_eq!(ask(&mut me, get("/a?b")).await?.text(), "GET http://a.b/a?b 0 0");
            let put = "PUT /c HTTP/1.1\r\nhost: a.b\r\ncookie: a=1\r\ncookie: b=2\r\ntransfer-encoding: chunked\r\n\r\n";
            let put = format!("{put}5\r\nhello\r\n3\r\nyou\r\n0\r\n\r\n");
            assert_eq!(ask(&mut me, put).await?.text(), "PUT http://a.b/c 1 8");
            let long = "x".repeat(100_000);
            assert_eq!(ask(&mut me, post("/d", &long)).await?.text(), "POST http://a.b/d 0 100000");
            Ok(())
        });
        sim.run_until_done();
    });
}

const PREFACE: usize = 24;
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const GOAWAY: u8 = 7;

fn frame(kind: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let len = u32::try_from(payload.len()).expect("a length");
    let mut frame = len.to_be_bytes()[1..].to_vec();
    frame.extend([kind, 0]);
    frame.extend(stream.to_be_bytes());
    frame.extend(payload);
    frame
}

/// A backend that answers the head of each request with one frame, and counts them.
fn answers_with_a_frame(
    sim: &Sim,
    addr: &'static str,
    answer: impl Fn(u32) -> Vec<u8> + 'static,
) -> Rc<Cell<usize>> {
    let asked = Rc::new(Cell::new(0));
    let (count, answer) = (asked.clone(), Rc::new(answer));
    sim.background(addr, async move |net| {
        let mut listener = net.listen(addr)?;
        loop {
            let mut stream = listener.accept().await;
            let (count, answer) = (count.clone(), answer.clone());
            net.spawn(async move {
                _ = async {
                    stream.exactly(PREFACE).await?;
                    stream.send(frame(SETTINGS, 0, &[])).await?;
                    loop {
                        let head = stream.exactly(9).await?;
                        let len =
                            usize::from(head[0]) << 16 | usize::from(head[1]) << 8 | usize::from(head[2]);
                        stream.exactly(len).await?;
                        if head[3] == HEADERS {
                            count.set(count.get() + 1);
                            let number = u32::from_be_bytes([head[5], head[6], head[7], head[8]]);
                            stream.send(answer(number)).await?;
                        }
                    }
                    #[expect(unreachable_code, reason = "it names the type")]
                    Ok::<_, io::Error>(())
                }
                .await;
            });
        }
    });
    asked
}

#[test]
fn post_that_a_backend_of_http2_refuses_goes_elsewhere() {
    const REFUSED_STREAM: [u8; 4] = 7u32.to_be_bytes();
    // No stream was looked at, no error.
    const GONE: [u8; 8] = [0; 8];
    let refuses = |number| frame(RST_STREAM, number, &REFUSED_STREAM);
    let goes = |_| frame(GOAWAY, 0, &GONE);
    let all: [fn(u32) -> Vec<u8>; 2] = [refuses, goes];
    for answer in all {
        Sim::seeds(3).faults(Faults::none()).run(move |sim| {
            let refused = answers_with_a_frame(sim, ADDRS[0], answer);
            let _backend = echo(sim, ADDRS[1]);
            start(sim, &all_to(&http2_upstream(2)));
            sim.client("one", async move |net| {
                let mut me = net.connect(FRONT).await?;
                while refused.get() == 0 {
                    assert_eq!(ask(&mut me, post("/", "x")).await?.text(), "POST http://a.b/ 0 1");
                }
                Ok(())
            });
            sim.run_until_done();
        });
    }
}

#[test]
fn post_that_a_backend_of_http2_resets_is_asked_once() {
    const INTERNAL_ERROR: [u8; 4] = 2u32.to_be_bytes();
    Sim::seeds(5).run(|sim| {
        let asked = ADDRS
            .map(|addr| answers_with_a_frame(sim, addr, |number| frame(RST_STREAM, number, &INTERNAL_ERROR)));
        start(sim, &all_to(&http2_upstream(2)));
        sim.client("one", async move |net| {
            let mut me = net.connect(FRONT).await?;
            assert_eq!(ask(&mut me, post("/", "x")).await?.status, 502);
            assert_eq!(asked.iter().map(|count| count.get()).sum::<usize>(), 1);
            Ok(())
        });
        sim.run_until_done();
    });
}

/// Speaks HTTP/2 and asks for `/` with a body, of which nothing is sent.
async fn begin_post(me: &mut ClientStream) -> io::Result<()> {
    const END_HEADERS: u8 = 4;
    // POST, http, / and an authority, by their numbers in the static table (RFC 7541, A).
    let mut head = frame(HEADERS, 1, b"\x83\x86\x84\x41\x03a.b");
    head[4] = END_HEADERS;
    me.send(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await?;
    me.send(frame(SETTINGS, 0, &[])).await?;
    me.send(head).await
}

/// The first bytes of an answer's body.
async fn data(me: &mut ClientStream) -> io::Result<Vec<u8>> {
    loop {
        let head = me.exactly(9).await?;
        let len = usize::from(head[0]) << 16 | usize::from(head[1]) << 8 | usize::from(head[2]);
        let payload = me.exactly(len).await?;
        if head[3] == DATA {
            return Ok(payload);
        }
    }
}

#[test]
fn slow_upload_of_http2_is_408() {
    Sim::seeds(3).faults(Faults::none()).run(|sim| {
        Backend::start(sim, ADDRS[0], says_its_target);
        let web = upstream(1);
        let routes = all_to(&web);
        let server = Server::bind(FRONT).shards(1);
        let options = HttpOptions::default().response_timeout(None);
        let started =
            sim.start(server, move |shard| http(Gateway::new(&routes, shard)).options(options.clone()));
        let _server = started.expect("it starts");
        sim.client("one", async move |net| {
            let mut me = net.connect(FRONT).await?;
            let began = net.now();
            begin_post(&mut me).await?;
            for _ in 0..3 {
                me.send(frame(DATA, 1, b"x")).await?;
                net.sleep(9 * SECOND).await;
            }
            let answer = data(&mut me).await?;
            assert!(answer.starts_with(b"408 "), "{}", String::from_utf8_lossy(&answer));
            let took = net.now() - began;
            assert!(took >= 29 * SECOND && took < 32 * SECOND, "{took:?}");
            assert_eq!(web.upstream().stats().backends[0].failures, 0);
            Ok(())
        });
        sim.run_until_done();
    });
}
