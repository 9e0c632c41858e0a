//! The client beside a real redis-server: the one that `REDIS_SERVER` names, or that of the path.
//! Without one the tests say so and pass.

use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use ringserve::framing::Lines;
use ringserve::redis::{RedisClient, RedisError, RedisOptions, Value};
use ringserve::resp::Version;
use ringserve::upstream::Upstream;
use ringserve::{Cx, Frame, Server, Service, Shard};
use ringserve_tests::{SOON, eventually, finish};

/// A running redis-server, which keeps nothing on disk.
struct Store {
    child: Child,
    port: u16,
}

impl Store {
    /// Starts one. `None` where there is none.
    fn start() -> Option<Store> {
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port();
        Store::start_at(port)
    }

    fn start_at(port: u16) -> Option<Store> {
        let program = std::env::var("REDIS_SERVER").unwrap_or_else(|_| "redis-server".to_owned());
        let port_text = port.to_string();
        let args = ["--port", &port_text, "--bind", "127.0.0.1", "--save", "", "--requirepass", "secret"];
        match Command::new(&program).args(args).stdout(Stdio::null()).spawn() {
            Ok(child) => {
                let to = (Ipv4Addr::LOCALHOST, port);
                eventually("redis-server listens", SOON, || TcpStream::connect(to).is_ok());
                Some(Store { child, port })
            }
            Err(error) => {
                eprintln!("skipped: {program} does not start ({error})");
                None
            }
        }
    }

    fn upstream(&self) -> Upstream {
        Upstream::new("redis", [format!("127.0.0.1:{}", self.port)])
    }

    fn stop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

struct Idle;

impl Service for Idle {
    type Session = ();
    type Error = std::convert::Infallible;

    async fn call(&self, _cx: &Cx<'_, ()>, _frame: Frame) -> Result<(), Self::Error> {
        Ok(())
    }
}

/// Runs code on the shard of a server, with a client, and returns what it returns.
fn on_shard<T: Send + 'static, C>(upstream: Upstream, options: RedisOptions, code: C) -> T
where
    C: AsyncFn(Shard, RedisClient) -> T + Send + Sync + 'static,
{
    let (done, result) = mpsc::channel();
    let code = Arc::new(code);
    let server = Server::bind((Ipv4Addr::LOCALHOST, 0)).framing(Lines::default()).shards(1);
    let server = server
        .start(move |shard| {
            let redis = RedisClient::new(&upstream, shard, options.clone());
            let (code, done, on) = (code.clone(), done.clone(), shard.clone());
            shard.spawn(async move { done.send(code(on, redis).await) });
            Idle
        })
        .unwrap();
    let result = result.recv_timeout(3 * SOON).expect("the code on the shard comes to its end");
    finish(server);
    result
}

#[test]
fn commands_have_their_replies_in_both_versions() {
    let Some(store) = Store::start() else { return };
    for version in [Version::Two, Version::Three] {
        let options = RedisOptions::default().password("secret").database(3).version(version);
        on_shard(store.upstream(), options, async move |shard, redis| {
            redis.command(["DEL", "a", "h", "list", "large"]).await.unwrap();
            assert_eq!(redis.command(["SET", "a", "1"]).await.unwrap().value(), Value::Bytes(b"OK"));
            assert_eq!(redis.command(["INCR", "a"]).await.unwrap().value().integer(), Some(2));
            assert_eq!(redis.query(["GET", "a"]).await.unwrap().value(), Value::Bytes(b"2"));
            assert_eq!(redis.query(["GET", "none"]).await.unwrap().value(), Value::Null);
            redis.command(["HSET", "h", "k", "v"]).await.unwrap();
            let pair = (Value::Bytes(b"k"), Value::Bytes(b"v"));
            let expected = match version {
                Version::Two => Value::Array(vec![pair.0, pair.1]),
                Version::Three => Value::Map(vec![pair]),
            };
            assert_eq!(redis.query(["HGETALL", "h"]).await.unwrap().value(), expected);
            let wrong = redis.command(["LPUSH", "a", "x"]).await.unwrap_err();
            assert!(matches!(&wrong, RedisError::Refused(text) if text.starts_with("WRONGTYPE")), "{wrong}");
            // A string of several receive buffers.
            let large = vec![b'x'; 1 << 20];
            redis.command([&b"SET"[..], b"large", &large]).await.unwrap();
            assert_eq!(redis.query(["GET", "large"]).await.unwrap().value(), Value::Bytes(&large));
            // Nothing is sent without a word: Redis would not reply.
            let none: [&str; 0] = [];
            assert!(redis.command(none).await.is_err());
            // Each of many at once has its own reply.
            let asked: Vec<_> = (0..500u32)
                .map(|n| {
                    let redis = redis.clone();
                    shard.spawn(async move {
                        let text = n.to_string();
                        let reply = redis.query(["ECHO", &text]).await.unwrap();
                        assert_eq!(reply.value(), Value::Bytes(text.as_bytes()));
                    })
                })
                .collect();
            for one in asked {
                one.await.unwrap();
            }
        });
    }
}

#[test]
fn wrong_password_is_said() {
    let Some(store) = Store::start() else { return };
    let options = RedisOptions::default().password("wrong");
    let error = on_shard(store.upstream(), options, async |_, redis| {
        redis.query(["PING"]).await.unwrap_err().to_string()
    });
    assert!(error.contains("WRONGPASS"), "{error}");
}

#[test]
fn restarted_server_costs_a_reader_nothing_but_time() {
    let Some(mut store) = Store::start() else { return };
    let (asked, is_back) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let (count, ends, upstream) = (asked.clone(), is_back.clone(), store.upstream());
    let running = std::thread::spawn(move || {
        on_shard(upstream, RedisOptions::default().password("secret"), async move |shard, redis| {
            let mut behind = 0;
            while behind < 1000 {
                let text = count.load(SeqCst).to_string();
                match redis.query(["ECHO", &text]).await {
                    Ok(reply) => {
                        assert_eq!(
                            reply.value(),
                            Value::Bytes(text.as_bytes()),
                            "the reply to another command"
                        );
                        behind += u64::from(ends.load(SeqCst));
                    }
                    // While there is no server.
                    Err(_) => shard.sleep(Duration::from_millis(1)).await,
                }
                count.fetch_add(1, SeqCst);
            }
        });
    });
    eventually("commands are answered", SOON, || asked.load(SeqCst) > 1000);
    store.stop();
    let _again = Store::start_at(store.port).unwrap();
    is_back.store(true, SeqCst);
    running.join().unwrap();
}
