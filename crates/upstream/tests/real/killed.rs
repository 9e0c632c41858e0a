//! One of two backends that ends under load, and comes back.

use std::convert::Infallible;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::thread;

use ringserve::framing::Lines;
use ringserve::upstream::{Exclusive, Multiplexed, Request, Upstream};
use ringserve::{Cx, Frame, Server, ServerHandle, Service};
use ringserve_tests::{SOON, eventually};

use super::Echo;

fn backend(addr: &str) -> ServerHandle {
    Server::bind(addr.parse::<SocketAddr>().unwrap())
        .framing(Lines::default())
        .shards(1)
        .start(|_shard| Echo)
        .unwrap()
}

fn addr(server: &ServerHandle) -> SocketAddr {
    server.listeners()[0].as_ip().unwrap()
}

/// Asks what may be asked twice, by one client or the other.
struct Front {
    alone: Exclusive<Lines>,
    shared: Multiplexed<Lines>,
}

impl Service for Front {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, line: Frame) -> Result<(), Infallible> {
        let request = Request::new(&line).idempotent();
        let answer = if line.starts_with(b"shared") {
            self.shared.ask(request).await.map(|answer| answer[8..].to_vec())
        } else {
            self.alone.ask(request).await.map(|answer| answer.to_vec())
        };
        cx.reply(answer.unwrap_or_else(|error| format!("no answer: {error}").into_bytes()));
        Ok(())
    }
}

/// A client that asks until it is to stop. Returns how many of its questions failed, of how many.
fn asks(front: SocketAddr, kind: &'static str, is_over: &AtomicBool) -> (u32, u32) {
    let mut client = BufReader::new(TcpStream::connect(front).unwrap());
    let (mut failed, mut asked) = (0, 0);
    while !is_over.load(SeqCst) {
        let question = format!("{kind} {asked}\n");
        client.get_mut().write_all(question.as_bytes()).unwrap();
        let mut answer = String::new();
        client.read_line(&mut answer).unwrap();
        failed += u32::from(answer != question);
        asked += 1;
    }
    (failed, asked)
}

#[test]
fn backend_that_ends_under_load_costs_no_question() {
    let (stays, mut ends) = (backend("127.0.0.1:0"), backend("127.0.0.1:0"));
    let at = addr(&ends);
    let upstream = Upstream::new("answers", [addr(&stays), at]);
    let of_shards = upstream.clone();
    let front = Server::bind("127.0.0.1:0").framing(Lines::default()).shards(2).upstream(&upstream);
    let front = front.start(move |shard| Front {
        alone: of_shards.exclusive(shard, Lines::default()),
        shared: of_shards.multiplexed(
            shard,
            Lines::default(),
            |answer| std::str::from_utf8(answer.get(..8)?).ok()?.trim().parse().ok(),
            |id, payload, out| {
                out.extend_from_slice(format!("{id:>8}").as_bytes());
                out.extend_from_slice(payload);
            },
        ),
    });
    let (front, is_over) = (front.unwrap(), Arc::new(AtomicBool::new(false)));
    let clients: Vec<_> = (0..8)
        .map(|client| {
            let (to, is_over) = (addr(&front), is_over.clone());
            let kind = if client % 2 == 0 { "shared" } else { "alone" };
            thread::spawn(move || asks(to, kind, &is_over))
        })
        .collect();
    let answers = || upstream.stats().backends.iter().map(|backend| backend.answers).sum::<u64>();
    let goes_on = |what: &str| {
        let before = answers();
        eventually(what, SOON, || answers() > before + 200);
    };
    for _ in 0..3 {
        goes_on("both answer");
        ends.abort();
        goes_on("the other one answers");
        ends.wait().unwrap();
        ends = backend(&at.to_string());
    }
    goes_on("both answer");
    is_over.store(true, SeqCst);
    for client in clients {
        let (failed, asked) = client.join().unwrap();
        assert_eq!(failed, 0, "of {asked}");
    }
    for server in [front, ends, stays] {
        server.abort();
        server.wait().unwrap();
    }
}
