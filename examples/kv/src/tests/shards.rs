//! Shards that are full, and shards that end.

use std::cell::Cell;
use std::rc::Rc;

use ringserve::testing::Faults;

use super::*;

/// A server of two shards with room for that many requests to each, and names of keys by their
/// shards.
fn two_shards(sim: &Sim, requests_max: usize) -> (SimServer, [String; 2]) {
    let args = Args::parse_from(["kv"]);
    let keyer = keyer_of(sim.random(), sim.random());
    let server = args.server(ADDR.parse().unwrap()).shards(2);
    let server = sim
        .start(
            server,
            service(keyer.clone(), args.request_bytes_max as usize, requests_max, |age| UNIX_START + age),
        )
        .unwrap();
    let store = store::Store::new(keyer, || 0, || Duration::ZERO, (0, 2), 0);
    let key_of = |shard| {
        let mut names = (0..).map(|n| format!("key:{n}"));
        names.find(|name| store.owner(name.as_bytes()) == shard).unwrap()
    };
    (server, [key_of(0), key_of(1)])
}

/// A connection to that shard.
async fn connect_to(shard: usize, net: &Net, addr: SocketAddr) -> io::Result<Redis> {
    loop {
        let mut me = Redis::connect(net, addr).await?;
        if me.ask("info server").await?.contains(&format!("\r\nshard:{shard}\r\n")) {
            return Ok(me);
        }
    }
}

#[test]
fn shard_without_room_refuses_its_part_and_others_do_theirs() {
    Sim::seeds(30).faults(Faults::harmless()).run(|sim| {
        let (server, [own, far]) = two_shards(sim, 1);
        sim.client("me", async move |net| {
            let mut waits = connect_to(0, &net, server.addr()).await?;
            let mut me = connect_to(0, &net, server.addr()).await?;
            me.check(&[("dbsize", ":0")]).await?;
            server.stall(1, 40 * SECOND);
            waits.0.send(format!("set {far} 1\r\n")).await?;
            // It has the one place of the mailbox by then.
            net.sleep(5 * SECOND).await;
            let full = "-TRYAGAIN shard 1 has too many requests waiting";
            me.check(&[
                (&format!("get {far}"), full),
                (&format!("mset {far} 2 {own} 2"), full),
                (&format!("get {own}"), "\"2\""),
                ("dbsize", full),
            ])
            .await?;
            assert_eq!(waits.reply().await?, "+OK");
            me.check(&[(&format!("get {far}"), "\"1\""), ("dbsize", ":2")]).await?;
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn what_follows_quit_is_not_done_where_quit_waits() {
    Sim::seeds(40).faults(Faults::harmless()).run(|sim| {
        let (server, [near, far]) = two_shards(sim, REQUESTS_MAX);
        sim.client("me", async move |net| {
            let mut me = connect_to(0, &net, server.addr()).await?;
            me.0.send(format!("get {far}\r\nquit\r\nset {near} stolen\r\n")).await?;
            assert_eq!((me.reply().await?, me.reply().await?), ("nil".into(), "+OK".into()));
            assert_eq!(me.0.closed().await?, b"");
            connect_to(0, &net, server.addr()).await?.check(&[(&format!("get {near}"), "nil")]).await?;
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn questions_to_a_shard_that_ends_get_an_error() {
    let lost = Rc::new(Cell::new(0));
    let count = lost.clone();
    Sim::seeds(30).faults(Faults::harmless()).run(move |sim| {
        let (server, [_, far]) = two_shards(sim, REQUESTS_MAX);
        let (other, lost, asks) = (server.clone(), count.clone(), Rc::new(Cell::new(false)));
        let is_asked = asks.clone();
        sim.client("me", async move |net| {
            let mut me = connect_to(0, &net, other.addr()).await?;
            me.check(&[(&format!("set {far} 1"), "+OK")]).await?;
            other.stall(1, 40 * SECOND);
            let lines = [format!("get {far}"), format!("mget {far}"), "keys *".into(), "dbsize".into()];
            me.0.send(lines.join("\r\n") + "\r\n").await?;
            // The first one waits in the mailbox by then, and the shard ends with it.
            net.sleep(5 * SECOND).await;
            asks.set(true);
            for line in lines {
                match me.reply().await?.trim_matches(['[', ']']) {
                    "-ERR shard 1 gave no answer" => lost.set(lost.get() + 1),
                    "-ERR shard 1 has ended" => {}
                    "\"1\"" if line.contains("get") => {}
                    // It was answered before the shard stood still.
                    other => assert!(!line.contains("get") && !other.starts_with('-'), "{line}: {other}"),
                }
            }
            Ok(())
        });
        sim.run_until(340 * SECOND, || is_asked.get());
        server.break_driver(1);
        sim.run_until_done();
    });
    assert!(lost.get() > 0, "no shard ended with a question");
}
