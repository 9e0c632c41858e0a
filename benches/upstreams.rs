//! Runs the part of a request to an upstream that is the pool's own a given number of times, for
//! tools that count instructions: the choice of one of ten backends, taking an idle connection to
//! it, and giving that back. `scripts/instructions` runs it under callgrind. Nothing is sent.

use std::convert::Infallible;
use std::io;
use std::net::TcpListener;
use std::sync::mpsc::sync_channel;
use std::task::{Context, Poll};

use ringserve::limits::StallOptions;
use ringserve::server::Driver;
use ringserve::upstream::{Backend, Balance, Connection, Connections, IdleEvent, Outcome, Upstream};
use ringserve::{Cx, Frame, Server, Service, Stream};

fn main() {
    let mut args = std::env::args().skip(1).filter(|arg| arg != "--bench");
    let number = |text: String| text.parse::<u64>().ok();
    let (Some(case), Some(calls)) = (args.next(), args.next().and_then(number)) else {
        // `cargo bench` runs every benchmark, and passes no case.
        if std::env::args().any(|arg| arg == "--bench") {
            return;
        }
        return println!("usage: upstreams CASE CALLS, where CASE is pool, weighed or keyed");
    };
    // The kernel accepts for them, and nothing else happens.
    let listeners: Vec<TcpListener> =
        (0..10).map(|_| TcpListener::bind("127.0.0.1:0").expect("a port is free")).collect();
    let weight = |index: usize| if case == "weighed" && index == 0 { 9 } else { 1 };
    let backends = listeners.iter().enumerate().map(|(index, listener)| {
        Backend::new(listener.local_addr().expect("it is bound")).weight(weight(index))
    });
    let upstream = Upstream::new("bench", backends).balance(match case.as_str() {
        "pool" | "weighed" | "keyed" => Balance::PeakEwma,
        other => panic!("there is no case {other}"),
    });
    let (over, all_over) = sync_channel(0);
    let server = Server::bind("127.0.0.1:0").shards(1).driver(Driver::Epoll).stalls(StallOptions::off());
    // The server stays until the end of the process.
    let _running = server
        .start(move |shard| {
            let setup = async |stream: Stream, _: &Backend| -> io::Result<Kept> { Ok(Kept(stream)) };
            let (client, is_keyed, over) =
                (upstream.connections(shard, setup), case == "keyed", over.clone());
            shard.spawn(async move {
                for number in 0..1000 + calls {
                    call(&client, number, is_keyed).await;
                }
                over.send(()).expect("the main thread waits");
            });
            Quiet
        })
        .expect("the server starts");
    all_over.recv().expect("the shard runs");
    std::process::exit(0);
}

/// A connection on which nothing happens.
struct Kept(#[expect(dead_code, reason = "it stays open")] Stream);

impl Connection for Kept {
    fn poll_idle(&mut self, _: &mut Context<'_>) -> Poll<IdleEvent> {
        Poll::Pending
    }
}

async fn call(client: &Connections<Kept>, number: u64, is_keyed: bool) {
    let mut call = client.call();
    if is_keyed {
        call = call.key(number.to_ne_bytes());
    }
    let mut connection = call.take().await.expect("there are connections");
    connection.finish(Outcome::Answered);
    connection.give_back();
}

struct Quiet;

impl Service for Quiet {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, _cx: &Cx<'_, ()>, _frame: Frame) -> Result<(), Infallible> {
        Ok(())
    }
}
