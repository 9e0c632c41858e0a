//! Serves HTTP/1.1 and HTTP/2 with hyper: short answers, uploads and downloads that stream.
//!
//!     cargo run --release -p example-http
//!     curl http://127.0.0.1:8080/
//!     curl http://127.0.0.1:8080/echo -d hello
//!     curl http://127.0.0.1:8080/bytes/1000000000 --limit-rate 1M -o /dev/null
//!     curl http://127.0.0.1:8080/length -T FILE -H 'expect: 100-continue'
//!     curl --http2-prior-knowledge --head http://127.0.0.1:8080/json

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use clap::Parser;
use http_body_util::{BodyExt, Either, Full};
use hyper::body::{Body, Bytes, Frame, Incoming, SizeHint};
use hyper::header::{CONTENT_LENGTH, CONTENT_TYPE, HeaderValue};
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use ringserve::http::HttpOptions;
use ringserve::log::LogOptions;
use ringserve::server::Driver;
use ringserve::{Server, http};

/// An HTTP server: GET and HEAD of /, /json, and /bytes/N for N bytes; POST /echo, and /upload or
/// /length to count bytes.
#[derive(Parser)]
struct Args {
    /// Address and port to listen on; port 0 finds a free one.
    #[arg(long, default_value = "127.0.0.1:8080", value_name = "ADDR:PORT")]
    listen: SocketAddr,
    /// Shards; by default one for each CPU.
    #[arg(long, value_name = "N")]
    shards: Option<usize>,
    /// Seconds over which rates of bodies are measured and for idle connections of HTTP/2, twice as
    /// many for answers; by default the framework's.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=3600))]
    patience: Option<u64>,
    /// auto, io_uring or epoll.
    #[arg(long, default_value_t, value_name = "NAME")]
    driver: Driver,
}

/// A body that is available at once, the peer's own body, or one that is made as it is sent.
type Answer = Response<Either<Full<Bytes>, Either<Echo, Made>>>;

async fn answer(mut request: Request<Incoming>) -> Result<Answer, hyper::Error> {
    if request.method() == Method::HEAD {
        *request.method_mut() = Method::GET;
        return Ok(head_of(answer_whole(request).await?));
    }
    answer_whole(request).await
}

/// The same answer without its body: hyper leaves that out with HTTP/1.1 alone.
fn head_of(answer: Answer) -> Answer {
    let (mut head, body) = answer.into_parts();
    if let Some(len) = body.size_hint().exact() {
        head.headers.insert(CONTENT_LENGTH, len.into());
    }
    Response::from_parts(head, Either::Left(Full::default()))
}

async fn answer_whole(request: Request<Incoming>) -> Result<Answer, hyper::Error> {
    Ok(match (request.method(), request.uri().path()) {
        (&Method::GET, "/") => text("hello\n"),
        (&Method::GET, "/json") => {
            let mut answer = text("{\"message\":\"hello\"}\n");
            answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
            answer
        }
        (&Method::POST, "/echo") => {
            // A client that waits for 100 is asked to go on when its body is read before the answer
            // begins, and not after that.
            let mut rest = request.into_body();
            let first = rest.frame().await.transpose()?;
            Response::new(Either::Right(Either::Left(Echo { first, rest })))
        }
        (&Method::POST | &Method::PUT, "/upload" | "/length") => {
            text(format!("{} bytes\n", length(request.into_body()).await?))
        }
        (&Method::GET, path) => match path.strip_prefix("/bytes/").and_then(|len| len.parse().ok()) {
            Some(left) => Response::new(Either::Right(Either::Right(Made { left }))),
            None => status(StatusCode::NOT_FOUND),
        },
        _ => status(StatusCode::NOT_FOUND),
    })
}

fn text(text: impl Into<Bytes>) -> Answer {
    Response::new(Either::Left(Full::new(text.into())))
}

fn status(status: StatusCode) -> Answer {
    let mut answer = text(format!("{status}\n"));
    *answer.status_mut() = status;
    answer
}

/// Reads a body to its end and keeps none of it.
async fn length(mut body: Incoming) -> Result<u64, hyper::Error> {
    let mut length = 0;
    while let Some(frame) = body.frame().await {
        length += frame?.data_ref().map_or(0, |data| data.len() as u64);
    }
    Ok(length)
}

/// The client's body, read as fast as the client takes it back.
struct Echo {
    first: Option<Frame<Bytes>>,
    rest: Incoming,
}

impl Body for Echo {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        task: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        match self.first.take() {
            Some(first) => Poll::Ready(Some(Ok(first))),
            None => Pin::new(&mut self.rest).poll_frame(task),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.first.is_none() && self.rest.is_end_stream()
    }
}

/// A body of `left` bytes that are made only when there is room for them.
struct Made {
    left: u64,
}

static PIECE: [u8; 16 << 10] = [b'.'; 16 << 10];

impl Body for Made {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _task: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if self.left == 0 {
            return Poll::Ready(None);
        }
        let len = self.left.min(PIECE.len() as u64);
        self.left -= len;
        Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(&PIECE[..len as usize])))))
    }

    fn is_end_stream(&self) -> bool {
        self.left == 0
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left)
    }
}

fn main() -> Result<(), ringserve::Error> {
    ringserve::log::init(LogOptions::default())?;
    let args = Args::parse();
    let mut server = Server::bind(args.listen).driver(args.driver);
    if let Some(shards) = args.shards {
        server = server.shards(shards);
    }
    let mut options = HttpOptions::default();
    if let Some(patience) = args.patience.map(Duration::from_secs) {
        options.rate_window = patience;
        (options.response_timeout, options.http2_idle_timeout) = (Some(patience * 2), Some(patience));
    }
    server.serve(move |_shard| http(service_fn(answer)).options(options.clone()))
}

#[cfg(test)]
mod tests {
    use ringserve::testing::{Faults, Sim};

    use super::*;

    #[test]
    fn each_request_of_a_connection_is_answered_in_its_place() {
        Sim::seeds(50).faults(Faults::all()).run(|sim| {
            let server = Server::bind("10.0.0.1:8080").shards(1 + sim.seed() as usize % 3);
            let addr = sim.serve(server, |_shard| http(service_fn(answer)));
            for n in 0..3 {
                sim.client(format!("c{n}"), async move |net| {
                    let mut me = net.connect(addr).await?;
                    let upload = "u".repeat(net.random() as usize % 20_000);
                    let len = net.random() as usize % 200_000;
                    let head = |method: &str, path: &str, len: usize| {
                        format!("{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len}\r\n\r\n")
                    };
                    let cases = [
                        (head("GET", "/", 0), "200", "hello\n".to_owned()),
                        (head("POST", "/echo", upload.len()) + &upload, "200", upload.clone()),
                        (head("GET", "/none", 0), "404", "404 Not Found\n".to_owned()),
                        (
                            head("PUT", "/length", upload.len()) + &upload,
                            "200",
                            format!("{} bytes\n", upload.len()),
                        ),
                        (head("GET", &format!("/bytes/{len}"), 0), "200", ".".repeat(len)),
                    ];
                    for (request, status, body) in cases {
                        me.send(request).await?;
                        let line = me.line().await?.ok_or("a status")?;
                        assert!(line.starts_with(&format!("HTTP/1.1 {status} ")), "{line}");
                        let (mut len, mut chunked) = (None, false);
                        loop {
                            let line = me.line().await?.ok_or("a header")?;
                            match line.split_once(": ") {
                                Some(("content-length", value)) => len = Some(value.parse::<usize>()?),
                                Some(("transfer-encoding", value)) => chunked = value == "chunked",
                                Some(_) => {}
                                None => break assert_eq!(line, ""),
                            }
                        }
                        let mut got = Vec::new();
                        match len {
                            Some(len) => got = me.exactly(len).await?,
                            None => {
                                assert!(chunked, "a body has a length or pieces");
                                loop {
                                    let line = me.line().await?.ok_or("a length")?;
                                    let len = usize::from_str_radix(&line, 16)?;
                                    got.extend(me.exactly(len).await?);
                                    assert_eq!(me.exactly(2).await?, b"\r\n");
                                    if len == 0 {
                                        break;
                                    }
                                }
                            }
                        }
                        assert!(got == body.as_bytes(), "the body of {} bytes", body.len());
                        net.sleep(Duration::from_millis(net.random() % 3000)).await;
                    }
                    me.finish()?;
                    assert_eq!(me.closed().await?, b"");
                    Ok(())
                });
            }
            sim.run_until_done();
        });
    }

    #[test]
    fn client_that_waits_for_100_is_told_to_go_on() {
        Sim::seeds(20).run(|sim| {
            let server = Server::bind("10.0.0.1:8080").shards(1);
            let addr = sim.serve(server, |_shard| http(service_fn(answer)));
            for path in ["/echo", "/length"] {
                sim.client(path, async move |net| {
                    let mut me = net.connect(addr).await?;
                    let head = "HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 5\r\n\r\n";
                    me.send(format!("POST {path} {head}")).await?;
                    assert_eq!(me.line().await?.as_deref(), Some("HTTP/1.1 100 Continue"));
                    assert_eq!(me.line().await?.as_deref(), Some(""));
                    me.send("hello").await?;
                    me.finish()?;
                    let answer = String::from_utf8(me.closed().await?)?;
                    let is_whole = answer.starts_with("HTTP/1.1 200 ")
                        && answer.contains(if path == "/echo" { "hello" } else { "5 bytes" });
                    assert!(is_whole, "{answer}");
                    Ok(())
                });
            }
            sim.run_until_done();
        });
    }

    #[test]
    fn head_is_answered_as_get_without_a_body() {
        Sim::seeds(20).run(|sim| {
            let server = Server::bind("10.0.0.1:8080").shards(1);
            let addr = sim.serve(server, |_shard| http(service_fn(answer)));
            sim.client("me", async move |net| {
                for (path, status, len) in
                    [("/", 200, 6), ("/bytes/1000000", 200, 1_000_000), ("/none", 404, 14)]
                {
                    let mut me = net.connect(addr).await?;
                    me.send(format!("HEAD {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")).await?;
                    let answer = String::from_utf8(me.closed().await?)?;
                    assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{answer}");
                    assert!(answer.contains(&format!("content-length: {len}\r\n")), "{answer}");
                    assert!(answer.ends_with("\r\n\r\n"), "{answer}");
                }
                Ok(())
            });
            sim.run_until_done();
        });
    }
}
