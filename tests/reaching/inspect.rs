//! Single connections of a server as others see them: from its own handlers, and if shards do not
//! answer.

use std::convert::Infallible;
use std::time::{Duration, Instant};

use ringserve::framing::Lines;
use ringserve::inspect::{By, Query};
use ringserve::{Cx, Frame, Server, Service};
use ringserve_tests::{Client, Lab, SOON, eventually, no_time_limits, order};

#[test]
fn blocked_shard_is_named_and_the_others_answer() {
    let lab = Lab::on_shards(2, no_time_limits());
    let control = lab.running.control();
    let mut busy = lab.client();
    let blocked: usize = busy.ask_text(order::shard()).parse().unwrap();
    let mut other = lab.client();
    while other.ask_text(order::shard()) == blocked.to_string() {
        other = lab.client();
    }
    busy.send(order::block());
    eventually("the shard is blocked", SOON, || lab.shared.block.came() == 1);
    let started = Instant::now();
    let answer = control.inspect(Query::connections().limit(1000).within(Duration::from_millis(100)));
    let took = started.elapsed();
    assert!(took >= Duration::from_millis(100) && took < Duration::from_secs(5), "it took {took:?}");
    assert_eq!(answer.silent_shards, [blocked]);
    assert!(answer.connections.iter().all(|conn| conn.shard == 1 - blocked), "{answer:?}");
    assert!(answer.connections.iter().any(|conn| conn.peer == Some(other.local_addr())), "{answer:?}");
    lab.shared.block.end();
    busy.recv();
    let answer = control.inspect(Query::connections().limit(1000).within(SOON));
    assert!(answer.silent_shards.is_empty());
    assert!(answer.connections.iter().any(|conn| conn.peer == Some(busy.local_addr())), "{answer:?}");
    drop((busy, other));
    lab.finish();
}

#[test]
fn inspection_returns_a_thousand_connections_at_most() {
    let lab = Lab::on_shards(2, no_time_limits());
    let mut clients: Vec<Client> = (0..1010).map(|_| lab.client()).collect();
    clients.iter_mut().for_each(|client| client.echoes("x"));
    let control = lab.running.control();
    let found = |limit: usize| {
        let answer = control.inspect(Query::connections().by(By::Age).limit(limit).within(SOON));
        assert!(answer.silent_shards.is_empty());
        answer.connections
    };
    assert_eq!((found(0).len(), found(7).len(), found(1_000_000).len()), (1, 7, 1000));
    let oldest = found(1_000_000);
    assert!(oldest.is_sorted_by(|one, next| one.age >= next.age));
    drop(clients);
    lab.abort();
}

#[test]
fn many_inspections_at_once_are_all_answered() {
    let lab = Lab::on_shards(2, no_time_limits());
    let mut clients: Vec<Client> = (0..10).map(|_| lab.client()).collect();
    clients.iter_mut().for_each(|client| client.echoes("x"));
    let control = lab.running.control();
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..50 {
                    let answer = control.inspect(Query::connections().page(1).within(SOON));
                    assert_eq!((answer.connections.len(), answer.silent_shards.len()), (10, 0));
                }
            });
        }
        (0..500).for_each(|n| clients[n % 10].echoes("x"));
    });
    // Nothing is searched for a query that was given up, and nothing waits for it.
    (0..1000).for_each(|_| drop(control.inspecting(Query::connections().page(1))));
    clients[0].echoes("x");
    drop(clients);
    lab.finish();
}

/// Reports how many connections its server has: first by a wait that must not block the shard, then
/// without blocking.
struct Looks;

impl Service for Looks {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, _frame: Frame) -> Result<(), Infallible> {
        let server = cx.shard().server();
        let at_once = server.inspect(Query::connections());
        let inspecting = server.inspecting(Query::calls_waiting());
        let in_time = cx.timeout(SOON, inspecting.done()).await.is_ok();
        let waiting = inspecting.answer();
        cx.reply(format!(
            "{} silent; in time: {in_time}, {} call waits, {} silent",
            at_once.silent_shards.len(),
            waiting.connections.len(),
            waiting.silent_shards.len()
        ));
        Ok(())
    }
}

#[test]
fn handler_inspects_its_own_server_without_blocking() {
    let server = Server::bind("127.0.0.1:0").shards(1).pin(false).framing(Lines::default());
    let running = server.start(|_shard| Looks).expect("it starts");
    let mut client = Client::connect(running.local_addrs()[0]);
    let started = Instant::now();
    client.write(b"?\n");
    let expected = b"1 silent; in time: true, 1 call waits, 0 silent\n";
    assert_eq!(String::from_utf8_lossy(&client.read(expected.len())), String::from_utf8_lossy(expected));
    assert!(started.elapsed() < Duration::from_millis(900), "it took {:?}", started.elapsed());
    drop(client);
    ringserve_tests::finish(running);
}
