//! Stopped HTTP servers, in virtual time: requests that arrived meanwhile are answered, whatever
//! limits are over by then.

use std::convert::Infallible;
use std::time::Duration;

use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response};
use ringserve::testing::{Faults, Sim};
use ringserve::{CloseReason, Server, http};

const ADDR: &str = "10.0.0.1:80";
const CLIENTS: usize = 100;

async fn echo(request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    let asked = request.into_body().collect().await.map(|body| body.to_bytes());
    Ok(Response::new(Full::new(asked.unwrap_or_default())))
}

#[test]
fn requests_that_came_while_the_shard_stood_still_are_answered() {
    Sim::seeds(10).faults(Faults::none()).run(|sim| {
        let running = sim.start(Server::bind(ADDR).shards(1), |_shard| http(service_fn(echo)));
        let running = running.expect("the server starts");
        for n in 0..CLIENTS {
            sim.client(format!("{n}"), async move |net| {
                let mut me = net.connect(ADDR).await?;
                let body = format!("hello {n}");
                let ask =
                    format!("POST / HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}", body.len());
                // Some ask for the first time, or are in the middle of it.
                let said = [0, ask.len(), ask.len() / 2][n % 3];
                me.send(&ask[..said]).await?;
                if said == ask.len() {
                    while me.line().await?.is_some_and(|line| !line.is_empty()) {}
                    me.exactly(body.len()).await?;
                }
                net.sleep(Duration::from_secs(20)).await;
                me.send(&ask[said % ask.len()..]).await?;
                while !me.line().await?.expect("an answer").is_empty() {}
                assert_eq!(me.exactly(body.len()).await?, body.as_bytes());
                Ok(())
            });
        }
        sim.run_for(Duration::from_secs(1));
        running.stall(0, Duration::from_secs(50));
        sim.run_until_done();
        assert_eq!(running.stats().counters.closed_for(CloseReason::Closed), 0);
    });
}

#[test]
fn time_for_a_head_begins_when_it_is_waited_for() {
    Sim::seeds(10).faults(Faults::none()).run(|sim| {
        let running = sim.start(Server::bind(ADDR).shards(1), |shard| {
            let shard = shard.clone();
            http(service_fn(move |request: Request<Incoming>| {
                let shard = shard.clone();
                async move {
                    if request.uri().path() == "/slow" {
                        shard.sleep(Duration::from_secs(40)).await;
                    }
                    Ok::<_, Infallible>(Response::new(String::new()))
                }
            }))
        });
        let running = running.expect("the server starts");
        // Each time, 25 s of the 30 are over before the head is complete.
        for path in ["/", "/slow"] {
            sim.client(path, async move |net| {
                let mut me = net.connect(ADDR).await?;
                let ask = format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n");
                for pause in [0, 25, 25, 25] {
                    me.send(&ask[..5]).await?;
                    net.sleep(Duration::from_secs(pause)).await;
                    me.send(&ask[5..]).await?;
                    while !me.line().await?.expect("an answer").is_empty() {}
                }
                let answered = net.now();
                me.send(&ask[..5]).await?;
                assert_eq!(me.closed().await?, b"");
                let waited = net.now() - answered;
                let wanted = Duration::from_secs(30)..Duration::from_secs(31);
                assert!(wanted.contains(&waited), "it was closed after {waited:?}");
                Ok(())
            });
        }
        sim.run_until_done();
        assert_eq!(running.stats().counters.closed_for(CloseReason::HandlerError), 0);
    });
}
