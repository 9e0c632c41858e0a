//! HTTP requests that a server sheds, in simulations by seed.

use std::cell::Cell;
use std::convert::Infallible;
use std::io;
use std::rc::Rc;
use std::time::Duration;

use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http2;
use hyper::header::RETRY_AFTER;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use ringserve::admission::Admission;
use ringserve::http::SHED_REPLY;
use ringserve::overload::Load;
use ringserve::testing::{ClientStream, Faults, Net, Sim, SimServer};
use ringserve::{Server, http};

const REQUESTS: usize = 40;

/// Counts of answers: by the service, and in its place.
#[derive(Clone, Default)]
struct Counts {
    served: Rc<Cell<u64>>,
    busy: Rc<Cell<u64>>,
}

/// Answers with the path; all requests may be shed except those for `/health`.
fn start(sim: &Sim, counts: &Counts) -> SimServer {
    let served = counts.served.clone();
    let server = Server::bind("10.0.0.1:80").shards(2);
    let running = sim.start(server, move |shard| {
        let (served, shard) = (served.clone(), shard.clone());
        let answer = service_fn(move |request: Request<Incoming>| {
            served.set(served.get() + 1);
            let (shard, path) = (shard.clone(), request.uri().path().to_owned());
            async move {
                shard.sleep(Duration::from_millis(shard.random() % 3)).await;
                let asked = request.into_body().collect().await.expect("a body").to_bytes();
                Ok::<_, Infallible>(Response::new(Full::new(Bytes::from([path.as_bytes(), &asked].concat()))))
            }
        });
        http(answer).shed(|request| request.uri().path() != "/health")
    });
    running.expect("the server starts")
}

/// Checks that each answer is one of the two, and both were counted.
fn check(counts: &Counts, path: &str, status: StatusCode, retry_after: Option<&str>, body: &[u8]) {
    let which = match status {
        StatusCode::OK => {
            assert_eq!((retry_after, body), (None, path.as_bytes()));
            return;
        }
        StatusCode::SERVICE_UNAVAILABLE => &counts.busy,
        status => panic!("{status}"),
    };
    assert!(path != "/health" && body.is_empty());
    let seconds: u64 = retry_after.and_then(|text| text.parse().ok()).expect("a number of seconds");
    assert!((1..=4).contains(&seconds));
    which.set(which.get() + 1);
}

fn finish(sim: &Sim, running: &SimServer, counts: &Counts, all: u64) {
    for (load, share) in [(Load::Shedding, 0.5), (Load::Busy, 1.0), (Load::Full, 0.5), (Load::Calm, 0.0)] {
        running.set_load(load, share);
        sim.run_for(Duration::from_millis(sim.random() % 60));
    }
    sim.run_until_done();
    sim.finish();
    assert_eq!(running.stats().counters.frames_shed, counts.busy.get());
    assert_eq!(counts.served.get() + counts.busy.get(), all);
}

/// Head and body of one HTTP/1.1 answer.
async fn answer(me: &mut ClientStream) -> io::Result<(StatusCode, Option<String>, Vec<u8>)> {
    let (mut status, mut retry_after, mut len) = (StatusCode::OK, None, 0);
    while let Some(line) = me.line().await? {
        if let Some(code) = line.strip_prefix("HTTP/1.1 ") {
            status = code[..3].parse().expect("a status");
        } else if let Some((name, value)) = line.split_once(": ") {
            match name {
                "retry-after" => retry_after = Some(value.to_owned()),
                "content-length" => len = value.parse().expect("a length"),
                "connection" => panic!("the connection stays, and the server says {value}"),
                _ => {}
            }
        } else {
            return Ok((status, retry_after, me.exactly(len).await?));
        }
    }
    Err(io::ErrorKind::UnexpectedEof.into())
}

async fn ask(net: &Net, counts: &Counts) -> io::Result<()> {
    let mut me = net.connect("10.0.0.1:80").await?;
    for n in 0..REQUESTS {
        let path = if n % 8 == 0 { "/health".to_owned() } else { format!("/{n}") };
        me.send(format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n")).await?;
        let (status, retry_after, body) = answer(&mut me).await?;
        check(counts, &path, status, retry_after.as_deref(), &body);
        net.sleep(Duration::from_millis(net.random() % 5)).await;
    }
    Ok(())
}

#[test]
fn shed_request_has_503_and_its_connection_stays() {
    let shed = Cell::new(0);
    Sim::seeds(40).faults(Faults::harmless()).run(|sim| {
        let counts = Counts::default();
        let running = start(sim, &counts);
        for n in 0..3 {
            let counts = counts.clone();
            sim.client(format!("c{n}"), async move |net| ask(&net, &counts).await.map_err(Into::into));
        }
        finish(sim, &running, &counts, 3 * REQUESTS as u64);
        shed.set(shed.get() + counts.busy.get());
    });
    assert!(shed.get() > 100, "{}", shed.get());
}

/// Runs a hyper connection on the simulation.
#[derive(Clone)]
struct OnNet(Net);

impl<F: Future<Output = ()> + 'static> hyper::rt::Executor<F> for OnNet {
    fn execute(&self, future: F) {
        self.0.spawn(future);
    }
}

#[test]
fn shed_stream_of_http2_ends_alone() {
    let shed = Cell::new(0);
    Sim::seeds(40).faults(Faults::harmless()).run(|sim| {
        let counts = Counts::default();
        let running = start(sim, &counts);
        for n in 0..2 {
            let counts = counts.clone();
            sim.client(format!("c{n}"), async move |net| {
                let io = TokioIo::new(net.connect("10.0.0.1:80").await?);
                let builder = http2::Builder::new(OnNet(net.clone()));
                let (mut sender, connection) = builder.handshake(io).await?;
                net.spawn(async { connection.await.expect("the server keeps the connection") });
                for n in 0..REQUESTS {
                    let path = if n % 8 == 0 { "/health".to_owned() } else { format!("/{n}") };
                    let request = Request::get(format!("http://x{path}"));
                    sender.ready().await?;
                    let answer = sender.send_request(request.body(Full::new(Bytes::new()))?).await?;
                    let (head, body) = answer.into_parts();
                    let retry_after =
                        head.headers.get(RETRY_AFTER).map(|value| value.to_str()).transpose()?;
                    let body = body.collect().await?.to_bytes();
                    check(&counts, &path, head.status, retry_after, &body);
                    net.sleep(Duration::from_millis(net.random() % 5)).await;
                }
                Ok(())
            });
        }
        finish(sim, &running, &counts, 2 * REQUESTS as u64);
        shed.set(shed.get() + counts.busy.get());
    });
    assert!(shed.get() > 100, "{}", shed.get());
}

#[test]
fn refused_client_of_http_is_told_in_its_protocol() {
    Sim::seeds(40).faults(Faults::harmless()).run(|sim| {
        let admission = Admission::default().shed_reply(SHED_REPLY);
        let server = Server::bind("10.0.0.1:80").admission(admission);
        let answer =
            || service_fn(async |_| Ok::<_, Infallible>(Response::new(Full::new(Bytes::from("hello")))));
        let running = sim.start(server, move |_shard| http(answer())).expect("the server starts");
        running.set_load(Load::Refusing, 0.0);
        sim.client("refused", async |net| {
            let mut me = net.connect("10.0.0.1:80").await?;
            me.send("GET / HTTP/1.1\r\nhost: x\r\n\r\n").await?;
            let answer = String::from_utf8(me.closed().await?)?;
            assert!(answer.starts_with("HTTP/1.1 503 ") && answer.ends_with("\r\n\r\n"), "{answer}");
            assert!(
                answer.contains("\r\nretry-after: 2\r\n") && answer.contains("\r\nconnection: close\r\n")
            );
            Ok(())
        });
        sim.run_until_done();
    });
}
