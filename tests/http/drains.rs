//! Drains of HTTP servers, in simulations by seed.

use std::cell::Cell;
use std::convert::Infallible;
use std::io;
use std::rc::Rc;
use std::time::Duration;

use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response};
use ringserve::limits::ServerLimits;
use ringserve::testing::{ClientStream, Faults, Net, Sim, SimServer};
use ringserve::{CloseReason, Server, http};
use ringserve_tests::http::frames::{PREFACE, SETTINGS, SETTINGS_ACK, frame, request};

const ADDR: &str = "10.0.0.1:80";
const GOAWAY: u8 = 7;
const PING: u8 = 6;

/// Answers with the received body, for `/slow` after a second.
fn start(sim: &Sim, limits: ServerLimits) -> SimServer {
    let server = Server::bind(ADDR).shards(1).server_limits(limits);
    let running = sim.start(server, move |shard| {
        let shard = shard.clone();
        http(service_fn(move |request: Request<Incoming>| {
            let shard = shard.clone();
            async move {
                if request.uri().path() == "/slow" {
                    shard.sleep(Duration::from_secs(1)).await;
                }
                let asked = request.into_body().collect().await.expect("a body").to_bytes();
                Ok::<_, Infallible>(Response::new(Full::new(Bytes::from(
                    [b"you said ", &asked[..]].concat(),
                ))))
            }
        }))
    });
    running.expect("the server starts")
}

fn post(path: &str, body: &str) -> String {
    format!("POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

/// The body of one answer, and whether it is marked as the last one. `None` at the end.
async fn answer(me: &mut ClientStream) -> io::Result<Option<(bool, String)>> {
    let (mut closes, mut len, mut is_first) = (false, 0, true);
    while let Some(line) = me.line().await? {
        if is_first {
            assert_eq!(line, "HTTP/1.1 200 OK");
            is_first = false;
        } else if line == "connection: close" {
            closes = true;
        } else if let Some(value) = line.strip_prefix("content-length: ") {
            len = value.parse().expect("a length");
        } else if line.is_empty() {
            let body = me.exactly(len).await?;
            return Ok(Some((closes, String::from_utf8(body).expect("text"))));
        }
    }
    assert!(is_first, "a head without an end");
    Ok(None)
}

async fn ask(me: &mut ClientStream, body: &str) -> io::Result<Option<(bool, String)>> {
    me.send(post("/", body)).await?;
    answer(me).await
}

fn said(body: &str) -> String {
    format!("you said {body}")
}

/// Runs a server with one client, and `test` at the same time.
fn each_seed<C>(limits: ServerLimits, client: C, then: impl Fn(&Sim, &SimServer))
where
    C: AsyncFn(&Net, &mut ClientStream) -> io::Result<()> + Copy + 'static,
{
    Sim::seeds(20).faults(Faults::none()).run(|sim| {
        let running = start(sim, limits.clone());
        sim.client("one", async move |net| {
            let mut me = net.connect(ADDR).await?;
            client(&net, &mut me).await?;
            Ok(())
        });
        then(sim, &running);
        sim.run_until_done();
        let counters = running.stats().counters;
        assert_eq!(counters.closed_for(CloseReason::DrainTimeout), 0, "{counters:?}");
        assert_eq!(counters.closed_for(CloseReason::HandlerError), 0, "{counters:?}");
    });
}

#[test]
fn requests_that_had_arrived_before_the_order_are_answered() {
    // Another handler holds the shard; a request comes, and then the order.
    each_seed(
        ServerLimits::default(),
        async |net, me| {
            assert_eq!(ask(me, "first").await?, Some((false, said("first"))));
            net.sleep(Duration::from_millis(300)).await;
            // In pieces, of which the second one begins in the middle of a request.
            let both = [post("/", "second"), post("/", "third"), post("/slow", "fourth")].concat();
            let (head, tail) = both.split_at(both.len() / 2);
            me.send(head).await?;
            net.sleep(Duration::from_millis(20)).await;
            me.send(tail).await?;
            for (body, closes) in [("second", false), ("third", false), ("fourth", true)] {
                assert_eq!(answer(me).await?, Some((closes, said(body))));
            }
            assert_eq!(answer(me).await?, None);
            Ok(())
        },
        |sim, running| {
            sim.run_for(Duration::from_millis(250));
            running.stall(0, Duration::from_millis(600));
            sim.run_for(Duration::from_millis(300));
            running.drain();
        },
    );
}

#[test]
fn kept_connection_answers_and_says_that_it_ends() {
    each_seed(
        ServerLimits::default(),
        async |net, me| {
            assert_eq!(ask(me, "first").await?, Some((false, said("first"))));
            net.sleep(Duration::from_millis(700)).await;
            // The order came 300 to 400 ms ago.
            assert_eq!(ask(me, "second").await?, Some((true, said("second"))));
            assert_eq!(answer(me).await?, None);
            Ok(())
        },
        |sim, running| {
            sim.run_for(Duration::from_millis(350));
            running.drain();
        },
    );
}

#[test]
fn quiet_connections_end_one_by_one_after_half_a_second() {
    const CLIENTS: u64 = 50;
    Sim::seeds(10).faults(Faults::none()).run(|sim| {
        let limits = ServerLimits::default().drain_spread(Duration::from_secs(5));
        let running = start(sim, limits);
        let order = Duration::from_millis(500);
        let ends = Rc::new(Cell::new([0; 5]));
        for n in 0..CLIENTS {
            let ends = ends.clone();
            sim.client(format!("{n}"), async move |net| {
                let mut me = net.connect(ADDR).await?;
                // Half of them have sent nothing yet.
                if n % 2 == 0 {
                    assert!(ask(&mut me, "here").await?.is_some());
                }
                assert_eq!(me.closed().await?, b"");
                let after = net.now() - order;
                assert!(after >= Duration::from_millis(500), "{after:?}");
                let mut counts = ends.get();
                counts[after.as_secs() as usize] += 1;
                ends.set(counts);
                Ok(())
            });
        }
        sim.run_for(order);
        running.drain();
        sim.run_until_done();
        assert!(ends.get().iter().all(|count| *count <= CLIENTS / 2), "{:?}", ends.get());
    });
}

/// The next frame of the server: kind, flags, stream.
async fn next(me: &mut ClientStream) -> io::Result<(u8, u8, u32)> {
    let head = me.exactly(9).await?;
    let len = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
    me.exactly(len).await?;
    Ok((head[3], head[4], u32::from_be_bytes(head[5..9].try_into().expect("four"))))
}

async fn until(me: &mut ClientStream, kind: u8, flag: u8) -> io::Result<()> {
    loop {
        let (of, flags, _) = next(me).await?;
        if of == kind && flags & flag == flag {
            return Ok(());
        }
    }
}

#[test]
fn silent_peer_of_http_2_is_closed_two_seconds_after_goaway() {
    each_seed(
        ServerLimits::default(),
        async |net, me| {
            me.send([PREFACE, SETTINGS, SETTINGS_ACK, &request(1, true, "/")].concat()).await?;
            until(me, 0, 1).await?;
            // It sends nothing from now on, not even an answer to the PING.
            until(me, GOAWAY, 0).await?;
            let told = net.now();
            until(me, PING, 0).await?;
            me.closed().await?;
            let after = net.now() - told;
            assert!(after < Duration::from_millis(2100), "{after:?}");
            Ok(())
        },
        |sim, running| {
            sim.run_for(Duration::from_millis(500));
            running.drain();
        },
    );
}

#[test]
fn stream_of_http_2_is_answered_before_the_close() {
    each_seed(
        ServerLimits::default(),
        async |net, me| {
            me.send([PREFACE, SETTINGS, SETTINGS_ACK, &request(1, false, "/")].concat()).await?;
            until(me, GOAWAY, 0).await?;
            until(me, PING, 0).await?;
            net.sleep(Duration::from_secs(5)).await;
            me.send(frame(0, 1, 1, b"late")).await?;
            until(me, 0, 1).await?;
            let answered = net.now();
            me.closed().await?;
            assert!(net.now() - answered < Duration::from_secs(1));
            Ok(())
        },
        |sim, running| {
            sim.run_for(Duration::from_millis(500));
            running.drain();
        },
    );
}
