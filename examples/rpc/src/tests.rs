//! Whole servers by seed, with the database in memory.

use std::cell::Cell;
use std::io;

use ringserve::testing::{ClientStream, Faults, Sim, SimServer};

use super::*;

const ADDR: &str = "10.0.0.1:7000";

fn serve(sim: &Sim, options: &[&str]) -> SimServer {
    let always = ["rpc", "--listen", ADDR, "--user", "ann:secret", "--user", "bob:other"];
    let args = Args::parse_from(always.iter().chain(options));
    let rpc = Rpc::new(&args).expect("the database opens");
    let server = server(&args).shards(1 + sim.seed() as usize % 3);
    sim.start(server, move |_shard| rpc.clone()).expect("the server starts")
}

fn seeds() -> ringserve::testing::Seeds {
    Sim::seeds(100).faults(Faults::harmless())
}

/// Sends these together.
async fn send(me: &mut ClientStream, requests: &[Value]) -> io::Result<()> {
    let mut frames = Vec::new();
    for request in requests {
        let payload = request.to_string();
        frames.extend_from_slice(&(payload.len() as u32).to_be_bytes());
        frames.extend_from_slice(payload.as_bytes());
    }
    me.send(frames).await
}

async fn hear(me: &mut ClientStream) -> io::Result<Value> {
    let length = me.exactly(4).await?;
    let length = u32::from_be_bytes(length.try_into().expect("four bytes")) as usize;
    Ok(serde_json::from_slice(&me.exactly(length).await?).expect("a reply is JSON"))
}

fn login(id: u64, token: &str) -> Value {
    json!({ "id": id, "method": "login", "token": token })
}

fn put(id: u64, key: &str, value: &str) -> Value {
    json!({ "id": id, "method": "put", "key": key, "value": value })
}

fn get(id: u64, key: &str) -> Value {
    json!({ "id": id, "method": "get", "key": key })
}

fn wait(id: u64, millis: u64) -> Value {
    json!({ "id": id, "method": "wait", "millis": millis })
}

#[test]
fn requests_run_side_by_side_and_replies_have_their_ids() {
    seeds().run(|sim| {
        serve(sim, &["--timeout", "100000"]);
        sim.client("ann", async |net| {
            let mut me = net.connect(ADDR).await?;
            // Larger than what a stranger may send, and sent together with the login.
            let large = "x".repeat(2000);
            send(&mut me, &[login(1, "secret"), wait(2, 80_000), put(3, "a", &large), get(4, "a")]).await?;
            send(&mut me, &[get(5, "b")]).await?;
            for (id, result) in [(1, json!("ann")), (3, json!(true)), (4, json!(large)), (5, json!(null))] {
                assert_eq!(hear(&mut me).await?, json!({ "id": id, "result": result }));
            }
            assert_eq!(hear(&mut me).await?, json!({ "id": 2, "result": 80_000 }));
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn users_see_their_own_keys_on_every_shard() {
    seeds().run(|sim| {
        serve(sim, &[]);
        for (user, token) in [("ann", "secret"), ("bob", "other")] {
            sim.client(user, async move |net| {
                for turn in 0..3 {
                    let mut me = net.connect(ADDR).await?;
                    send(&mut me, &[login(0, token), get(1, "name"), put(2, "name", user)]).await?;
                    assert_eq!(hear(&mut me).await?, json!({ "id": 0, "result": user }));
                    let before = if turn == 0 { json!(null) } else { json!(user) };
                    assert_eq!(hear(&mut me).await?, json!({ "id": 1, "result": before }));
                    assert_eq!(hear(&mut me).await?, json!({ "id": 2, "result": true }));
                }
                Ok(())
            });
        }
        sim.run_until_done();
    });
}

#[test]
fn first_error_of_a_stranger_ends_its_connection() {
    seeds().run(|sim| {
        let server = serve(sim, &[]);
        for (n, (request, id, error)) in [
            (put(7, "a", "1"), json!(7), "log in first"),
            (login(8, "guess"), json!(8), "no such token"),
            (json!({ "id": 9, "method": "fly" }), json!(9), "unknown variant"),
            (json!({ "method": "login", "token": "secret" }), json!(null), "missing field `id`"),
            (login(10, &"x".repeat(STRANGER_FRAME_BYTES_MAX)), json!(null), "512"),
        ]
        .into_iter()
        .enumerate()
        {
            sim.client(format!("c{n}"), async move |net| {
                let mut me = net.connect(ADDR).await?;
                // What comes behind the error is not done.
                send(&mut me, &[request.clone(), login(1, "secret"), put(2, "a", "2")]).await?;
                let reply = hear(&mut me).await?;
                assert_eq!(reply["id"], id, "{reply}");
                assert!(reply["error"].as_str().is_some_and(|said| said.contains(error)), "{reply}");
                assert_eq!(me.closed().await?, b"");
                Ok(())
            });
        }
        sim.client("silent", async |net| {
            let mut me = net.connect(ADDR).await?;
            assert_eq!(me.closed().await?, b"");
            assert!((LOGIN_TIME..2 * LOGIN_TIME).contains(&net.now()), "{:?}", net.now());
            Ok(())
        });
        sim.run_until_done();
        assert_eq!(server.stats().blocking.done, 0);
    });
}

#[test]
fn errors_of_a_user_are_replies() {
    seeds().run(|sim| {
        serve(sim, &["--timeout", "5000"]);
        sim.client("ann", async |net| {
            let mut me = net.connect(ADDR).await?;
            send(&mut me, &[login(0, "secret")]).await?;
            assert_eq!(hear(&mut me).await?["result"], "ann");
            for (request, id, error) in [
                (wait(1, 60_000), json!(1), "too late"),
                (login(2, "secret"), json!(2), "logged in already"),
                (json!({ "id": 3, "method": "get" }), json!(3), "missing field `key`"),
                (json!("hello"), json!(null), "invalid type"),
            ] {
                send(&mut me, &[request]).await?;
                let reply = hear(&mut me).await?;
                assert_eq!(reply["id"], id, "{reply}");
                assert!(reply["error"].as_str().is_some_and(|said| said.contains(error)), "{reply}");
            }
            send(&mut me, &[wait(4, 1000)]).await?;
            assert_eq!(hear(&mut me).await?, json!({ "id": 4, "result": 1000 }));
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn queries_that_find_no_place_are_told_that_it_is_busy() {
    let refused = Cell::new(0);
    seeds().run(|sim| {
        let server = serve(sim, &["--queries-max", "1"]);
        sim.client("ann", async |net| {
            let mut me = net.connect(ADDR).await?;
            let puts: Vec<_> = (1..20).map(|id| put(id, "a", "1")).collect();
            send(&mut me, &[&[login(0, "secret")], &puts[..]].concat()).await?;
            assert_eq!(hear(&mut me).await?["result"], "ann");
            let (mut done, mut busy) = (0, 0);
            for _ in 1..20 {
                let reply = hear(&mut me).await?;
                let count = if reply["result"] == true { &mut done } else { &mut busy };
                assert!(reply["result"] == true || reply["error"] == "busy", "{reply}");
                *count += 1;
            }
            assert!(done >= 2, "one runs and one waits: {done} done, {busy} busy");
            send(&mut me, &[get(20, "a")]).await?;
            assert_eq!(hear(&mut me).await?, json!({ "id": 20, "result": "1" }));
            Ok(())
        });
        sim.run_until_done();
        let blocking = server.stats().blocking;
        assert_eq!(blocking.done + blocking.refused, 20, "{blocking:?}");
        refused.set(refused.get() + blocking.refused);
    });
    assert!(refused.get() > 0, "no seed was busy");
}
