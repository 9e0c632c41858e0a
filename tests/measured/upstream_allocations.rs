//! A request to an upstream whose connections are idle allocates nothing for its choice of a
//! backend, for taking a connection and for giving it back.
//!
//! The allocator counts for the whole process, so there is one test in this file.

use std::io;
use std::net::TcpListener;
use std::sync::mpsc::sync_channel;
use std::task::{Context, Poll};

use ringserve::upstream::{Backend, Balance, Connection, Connections, IdleEvent, Outcome, Upstream};
use ringserve::{Server, Stream, stream};
use ringserve_tests::{SOON, alone, finish};
use stats_alloc::Region;

const CALLS: usize = 1000;

const PASSES: usize = 3;

/// A connection on which nothing happens.
struct Kept(#[expect(dead_code, reason = "it stays open")] Stream);

impl Connection for Kept {
    fn poll_idle(&mut self, _: &mut Context<'_>) -> Poll<IdleEvent> {
        Poll::Pending
    }
}

async fn calls(client: &Connections<Kept>) {
    for number in 0..CALLS {
        let call = client.call().idempotent();
        let mut call = if number % 2 == 0 { call } else { call.key(number.to_ne_bytes()) };
        let mut connection = call.take().await.expect("there are connections");
        connection.finish(Outcome::Answered);
        connection.give_back();
    }
}

#[test]
fn call_over_an_idle_connection_allocates_nothing() {
    if !alone(call_over_an_idle_connection_allocates_nothing) {
        return;
    }
    let listeners: Vec<TcpListener> = (0..10).map(|_| TcpListener::bind("127.0.0.1:0").unwrap()).collect();
    for balance in [Balance::PeakEwma, Balance::RoundRobin, Balance::Least] {
        for heavy in [1, 9] {
            let weighed = |(index, listener): (usize, &TcpListener)| {
                Backend::new(listener.local_addr().unwrap()).weight(if index == 0 { heavy } else { 1 })
            };
            let backends = listeners.iter().enumerate().map(weighed);
            let upstream = Upstream::new("counted", backends).balance(balance);
            let (counted, counts) = sync_channel(PASSES);
            let server = Server::bind("127.0.0.1:0").shards(1);
            let server = server.start(move |shard| {
                let setup = async |stream: Stream, _: &Backend| -> io::Result<Kept> { Ok(Kept(stream)) };
                let (client, counted) = (upstream.connections(shard, setup), counted.clone());
                shard.spawn(async move {
                    // All backends have a connection then.
                    calls(&client).await;
                    for _ in 0..PASSES {
                        let region = Region::new(crate::ALLOCATOR);
                        calls(&client).await;
                        let change = region.change();
                        let _ = counted.send(change.allocations + change.reallocations);
                    }
                });
                stream(async |_client: Stream| Ok::<_, io::Error>(()))
            });
            let what = format!("{balance:?}, {heavy}:1: allocations in {CALLS} calls");
            crate::a_pass_fits(
                &what,
                |&made| made == 0,
                || counts.recv_timeout(SOON).expect("the shard counts"),
            );
            drop(counts);
            finish(server.unwrap());
        }
    }
}
