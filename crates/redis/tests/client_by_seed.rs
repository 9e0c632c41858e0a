//! The client on simulated servers, before a Redis that splits its replies, refuses, ends and comes
//! back.

use std::cell::Cell;
use std::convert::Infallible;
use std::io;
use std::rc::Rc;
use std::time::Duration;

use ringserve::framing::Lines;
use ringserve::redis::{RedisClient, RedisError, RedisOptions, ReplyFrames, Value};
use ringserve::testing::{ClientStream, Net, Sim};
use ringserve::upstream::{Upstream, UpstreamError};
use ringserve::{Cx, Frame, Server, Service, Shard};

const SECOND: Duration = Duration::from_secs(1);
const ADDR: &str = "10.0.0.11:6379";

struct Idle;

impl Service for Idle {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, _cx: &Cx<'_, ()>, _frame: Frame) -> Result<(), Infallible> {
        Ok(())
    }
}

/// A Redis that knows AUTH and ECHO, and whose connections now and then end or receive what no
/// command asked for.
struct Store {
    ends_one_in: u64,
    pushes_one_in: u64,
    sets: Cell<u32>,
}

impl Store {
    fn start(sim: &Sim, ends_one_in: u64, pushes_one_in: u64) -> Rc<Store> {
        let store = Rc::new(Store { ends_one_in, pushes_one_in, sets: Cell::new(0) });
        let this = store.clone();
        sim.background("redis", async move |net| {
            let mut listener = net.listen(ADDR)?;
            loop {
                let stream = listener.accept().await;
                net.spawn(this.clone().serve(net.clone(), stream));
            }
        });
        store
    }

    async fn serve(self: Rc<Store>, net: Net, mut stream: ClientStream) {
        let mut is_in = false;
        loop {
            let Some(args) = command(&mut stream).await else { return };
            let args: Vec<&str> = args.iter().map(String::as_str).collect();
            let reply = match args[..] {
                // As Redis does.
                [] => continue,
                ["AUTH", "secret"] => {
                    is_in = true;
                    "+OK\r\n".to_owned()
                }
                ["AUTH", _] => "-WRONGPASS invalid password\r\n".to_owned(),
                _ if !is_in => "-NOAUTH Authentication required.\r\n".to_owned(),
                ["ECHO", text] => format!("*2\r\n:1\r\n${}\r\n{text}\r\n", text.len()),
                ["SET", ..] => {
                    self.sets.set(self.sets.get() + 1);
                    "+OK\r\n".to_owned()
                }
                _ => "-ERR unknown command\r\n".to_owned(),
            };
            if is_in && net.random().is_multiple_of(self.ends_one_in) {
                return;
            }
            let reply = match is_in && net.random().is_multiple_of(self.pushes_one_in) {
                true => format!(">1\r\n+invalidate\r\n{reply}"),
                false => reply,
            };
            for piece in reply.as_bytes().chunks(1 + net.random() as usize % 12) {
                if stream.send(piece).await.is_err() {
                    return;
                }
            }
        }
    }
}

/// Reads a command. `None` at the end of the connection.
async fn command(stream: &mut ClientStream) -> Option<Vec<String>> {
    let count: usize = stream.line().await.ok()??.strip_prefix('*')?.parse().ok()?;
    let mut args = Vec::new();
    for _ in 0..count {
        stream.line().await.ok()??;
        args.push(stream.line().await.ok()??);
    }
    Some(args)
}

fn run<C>(sim: &Sim, options: RedisOptions, code: C)
where
    C: AsyncFn(Shard, RedisClient) + 'static,
{
    run_with(sim, move |redis, shard| RedisClient::new(redis, shard, options.clone()), code);
}

/// Runs code with a client on a shard, until it is done.
fn run_with<A: 'static, C>(sim: &Sim, make: impl Fn(&Upstream, &Shard) -> A + Send + Sync + 'static, code: C)
where
    C: AsyncFn(Shard, A) + 'static,
{
    let (code, is_done, redis) = (Rc::new(code), Rc::new(Cell::new(false)), Upstream::new("redis", [ADDR]));
    let done = is_done.clone();
    let server = Server::bind("10.0.0.1:7000").framing(Lines::default());
    sim.serve(server, move |shard| {
        let client = make(&redis, shard);
        let (code, done, on) = (code.clone(), done.clone(), shard.clone());
        shard.spawn(async move {
            on.sleep(SECOND).await;
            code(on, client).await;
            done.set(true);
        });
        Idle
    });
    assert!(sim.run_until(3600 * SECOND, || is_done.get()), "the code of the test does not end");
}

#[test]
fn each_command_has_its_reply_and_is_sent_once() {
    Sim::seeds(40).run(|sim| {
        let store = Store::start(
            sim,
            [1_000_000, 30][sim.random() as usize % 2],
            [1_000_000, 40][sim.random() as usize % 2],
        );
        let sent = Rc::new(Cell::new(0));
        let count = sent.clone();
        run(sim, RedisOptions::default().password("secret"), async move |shard, redis| {
            let left = Rc::new(Cell::new(10));
            for asker in 0..10 {
                let (redis, on, left, count) = (redis.clone(), shard.clone(), left.clone(), count.clone());
                shard.spawn(async move {
                    for n in 0..20 {
                        let text = format!("{asker}.{n}");
                        if let Ok(Ok(reply)) = on.timeout(5 * SECOND, redis.query(["ECHO", &text])).await {
                            let expected =
                                Value::Array(vec![Value::Integer(1), Value::Bytes(text.as_bytes())]);
                            assert_eq!(reply.value(), expected);
                        }
                        count.set(count.get() + 1);
                        let _ = redis.command(["SET", "a", &text]).await;
                    }
                    left.set(left.get() - 1);
                });
            }
            while left.get() > 0 {
                shard.sleep(SECOND).await;
            }
        });
        assert!(store.sets.get() <= sent.get(), "{} of {} are carried out", store.sets.get(), sent.get());
    });
}

#[test]
fn server_that_refuses_says_why() {
    Sim::seeds(10).run(|sim| {
        Store::start(sim, 1_000_000, 1_000_000);
        run(sim, RedisOptions::default().password("wrong"), async |_, redis| {
            let error = redis.query(["ECHO", "a"]).await.unwrap_err().to_string();
            assert!(error.contains("WRONGPASS"), "{error}");
        });
    });
    Sim::seeds(10).run(|sim| {
        Store::start(sim, 1_000_000, 1_000_000);
        run(sim, RedisOptions::default(), async |_, redis| {
            let error = redis.query(["ECHO", "a"]).await.unwrap_err();
            assert!(matches!(&error, RedisError::Refused(text) if text.starts_with("NOAUTH")), "{error}");
        });
    });
}

#[test]
fn command_without_a_word_takes_no_reply() {
    Sim::seeds(10).run(|sim| {
        Store::start(sim, 1_000_000, 1_000_000);
        run(sim, RedisOptions::default().password("secret"), async |shard, redis| {
            let none: [&str; 0] = [];
            let asking = redis.clone();
            let asked = shard.spawn(async move { asking.query(none).await.map(drop) });
            let reply = redis.query(["ECHO", "mine"]).await.unwrap();
            assert_eq!(reply.value(), Value::Array(vec![Value::Integer(1), Value::Bytes(b"mine")]));
            for refused in [asked.await.unwrap(), redis.command(none).await.map(drop)] {
                let Err(RedisError::Upstream(UpstreamError::Failed(error))) = refused else {
                    panic!("it was asked")
                };
                assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
            }
        });
    });
}

#[test]
fn payload_without_a_reply_is_not_sent() {
    Sim::seeds(10).run(|sim| {
        Store::start(sim, 1_000_000, 1_000_000);
        let make = |redis: &Upstream, shard: &Shard| redis.pipelined(shard, ReplyFrames::default());
        run_with(sim, make, async move |shard, redis| {
            let login = "*2\r\n$4\r\nAUTH\r\n$6\r\nsecret\r\n";
            assert_eq!(&redis.ask(login).await.unwrap()[..], b"+OK\r\n");
            for payload in ["", "*0\r\n"] {
                let asking = redis.clone();
                let asked = shard.spawn(async move { asking.ask(payload).await.map(drop) });
                let reply = redis.ask("*2\r\n$3\r\nSET\r\n$1\r\na\r\n").await.unwrap();
                assert_eq!(&reply[..], b"+OK\r\n");
                let Err(UpstreamError::Failed(error)) = asked.await.unwrap() else { panic!("it was asked") };
                assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
            }
        });
    });
}
