//! `ringserve::testing`: what it runs, what it finds, and what it says.

use std::cell::Cell;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use ringserve_server::framing::Lines;
use ringserve_server::limits::ServerLimits;
use ringserve_server::testing::{ClientResult, Faults, Sim, TestConn};
use ringserve_server::{CloseReason, Cx, Frame, Limits, OpenCx, Refusal, Server, Service, with_heads};

use crate::Echo;

const SECOND: Duration = Duration::from_secs(1);
const HOUR: Duration = Duration::from_secs(3600);

fn lines() -> Server<Lines> {
    Server::bind("10.0.0.1:7000").framing(Lines::default())
}

/// The message of a test that fails.
#[track_caller]
fn failure(test: impl FnOnce()) -> String {
    let panic = catch_unwind(AssertUnwindSafe(test)).expect_err("the test fails");
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned())).expect("it says why")
}

#[test]
fn lines_come_back_with_all_faults() {
    let heard = Rc::new(Cell::new(0));
    let count = heard.clone();
    Sim::seeds(200).faults(Faults::all()).run(move |sim| {
        let addr = sim.serve(lines().shards(2), |_shard| Echo);
        for n in 0..5 {
            let count = count.clone();
            sim.client(format!("c{n}"), async move |net| {
                let mut me = net.connect(addr).await?;
                for round in 0..10 {
                    me.send(format!("hello {n} {round}\n")).await?;
                    assert_eq!(me.line().await?, Some(format!("hello {n} {round}")));
                    count.set(count.get() + 1);
                }
                me.finish()?;
                assert_eq!(me.closed().await?, b"");
                Ok(())
            });
        }
        sim.run_until_done();
    });
    assert!(heard.get() > 200 * 50 / 2, "{} of 10000", heard.get());
}

/// Answers heartbeats.
struct Beats;

impl Service for Beats {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, _cx: &Cx<'_, ()>, _frame: Frame) -> Result<(), Infallible> {
        Ok(())
    }

    fn heartbeat(&self, cx: &Cx<'_, ()>) {
        cx.reply("ping");
    }
}

/// Connections that are asked every 30 s, for an hour; a thousand where the code is optimized.
#[test]
fn hour_of_heartbeats_is_asked_and_answered() {
    let connections = if cfg!(debug_assertions) { 50 } else { 1000 };
    let beats = Rc::new(Cell::new(0_u64));
    let count = beats.clone();
    let limits = Limits::default().heartbeat_interval(Some(30 * SECOND)).first_frame_timeout(None);
    Sim::seeds(1).run(move |sim| {
        let server = lines().shards(2).limits(limits.clone());
        let server = sim.start(server, |_shard| Beats).unwrap();
        for n in 0..connections {
            let (count, addr) = (count.clone(), server.addr());
            sim.client(format!("c{n}"), async move |net| {
                let mut me = net.connect(addr).await?;
                while me.line().await?.is_some() {
                    count.set(count.get() + 1);
                    me.send("pong\n").await?;
                }
                Ok(())
            });
        }
        sim.run_for(HOUR);
        assert_eq!(server.stats().connections, connections);
    });
    let expected = connections as u64 * 120 * 2;
    assert!((expected * 9 / 10..=expected).contains(&beats.get()), "{} beats in two runs", beats.get());
}

#[test]
fn silent_day_takes_few_steps() {
    Sim::seeds(1).run(|sim| {
        let addr = sim.serve(lines().shards(4), |_shard| Echo);
        sim.client("quiet", async move |net| {
            let mut me = net.connect(addr).await?;
            me.send("hello\n").await?;
            assert_eq!(me.line().await?.as_deref(), Some("hello"));
            net.sleep(24 * HOUR).await;
            Ok(())
        });
        sim.run_for(24 * HOUR);
    });
}

#[test]
fn upstream_that_is_silent_for_an_hour_is_not_idle() {
    Sim::seeds(1).run(|sim| {
        sim.client("upstream", async |net| {
            let mut server = net.listen("10.0.0.9:80")?.accept().await;
            net.sleep(HOUR).await;
            server.send("late").await?;
            assert_eq!(server.closed().await?, b"heard");
            Ok(())
        });
        // The upstream listens.
        sim.run_for(SECOND);
        let limits = Limits::default().first_frame_timeout(Some(SECOND)).idle_timeout(Some(SECOND));
        sim.serve(lines().shards(1).limits(limits), |shard| {
            let own = shard.clone();
            shard.spawn(async move {
                let mut upstream = own.connect(SocketAddr::from(([10, 0, 0, 9], 80))).await.unwrap();
                let bytes = upstream.read_frame().await.unwrap().expect("it is open");
                assert_eq!(&*bytes, b"late");
                upstream.write_all(b"heard").await.unwrap();
            });
            Echo
        });
        sim.run_until_done();
    });
}

/// One client of an echo server of one shard.
fn one_client(
    sim: &Sim,
    code: impl AsyncFnOnce(ringserve_server::testing::ClientStream) -> ClientResult + 'static,
) {
    let addr = sim.serve(lines(), |_shard| Echo);
    sim.client("me", async move |net| code(net.connect(addr).await?).await);
}

#[test]
fn client_that_panics_is_named_with_its_seed_and_its_events() {
    let text = failure(|| {
        Sim::seeds(10).from(5).run(|sim| {
            one_client(sim, async |mut me| {
                me.send("hello\n").await?;
                let line = me.line().await?;
                assert_eq!(line.as_deref(), Some("good bye"), "planted");
                Ok(())
            });
            sim.run_until_done();
        });
    });
    assert!(
        text.starts_with("seed 5: client me panicked: assertion `left == right` failed: planted"),
        "{text}"
    );
    for part in [
        "tests/by_seed/testing.rs:",
        "the last events of the connection of 10.128.0.0:",
        "connects to 10.0.0.1:7000",
        "sends 6 bytes \"hello\\n\"",
        "shard 0: open",
        "shard 0: call with 5 bytes \"hello\"",
        "reads 5 bytes \"hello\"",
        "again: RINGSERVE_SEED=5 cargo test testing::client_that_panics_is_named_with_its_seed_and_its_events",
    ] {
        assert!(text.contains(part), "{part} is not in\n{text}");
    }
}

#[test]
fn client_that_waits_for_ever_is_named() {
    let text = failure(|| {
        Sim::seeds(1).run(|sim| {
            let limits = Limits::default().first_frame_timeout(None).idle_timeout(None);
            let addr = sim.serve(lines().limits(limits), |_shard| Echo);
            sim.client("patient", async move |net| {
                let mut me = net.connect(addr).await?;
                me.line().await?;
                Ok(())
            });
            sim.run_until_done();
        });
    });
    assert!(text.contains("nothing can happen any more, and a client still waits"), "{text}");
    assert!(text.contains("client patient waits for a line on the connection of 10.128.0.0:"), "{text}");
}

#[test]
fn run_without_end_is_named() {
    let text = failure(|| {
        Sim::seeds(1).steps_max(10_000).run(|sim| {
            sim.client("restless", async |net| {
                loop {
                    net.sleep(SECOND).await;
                }
            });
            sim.run_until_done();
        });
    });
    assert!(text.contains("the run does not end: 10000 steps"), "{text}");
    assert!(text.contains("client restless waits for"), "{text}");
}

/// Replies with what `with` makes.
struct Replies<F>(F);

impl<F: Fn(&Cx<'_, ()>) -> String + 'static> Service for Replies<F> {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, _frame: Frame) -> Result<(), Infallible> {
        cx.reply(self.0(cx).as_str());
        Ok(())
    }
}

/// Asks once for what `with` makes.
fn asks_once<F: Fn(&Cx<'_, ()>) -> String + Clone + 'static>(sim: &Sim, with: F) {
    let addr = sim.serve(lines(), move |_shard| Replies(with.clone()));
    sim.client("me", async move |net| {
        let mut me = net.connect(addr).await?;
        me.send("what?\n").await?;
        me.line().await?.expect("an answer");
        Ok(())
    });
    sim.run_until_done();
}

#[test]
fn service_that_reads_the_systems_clock_is_found_and_named() {
    let nanos = || std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos();
    let text = failure(|| Sim::seeds(1).run(|sim| asks_once(sim, move |_| nanos().to_string())));
    assert!(text.contains("a second run of the same seed did something else"), "{text}");
    assert!(text.contains("the system's clock (ask Shard::now and Net::now)"), "{text}");
}

#[test]
fn clock_and_chance_of_a_shard_are_the_seeds() {
    Sim::seeds(1).run(|sim| asks_once(sim, |cx| format!("{:?} {}", cx.shard().now(), cx.shard().random())));
}

/// Waits until a waker is woken that `wakes` is given.
async fn woken_by(wakes: impl FnOnce(std::task::Waker)) {
    let mut wakes = Some(wakes);
    std::future::poll_fn(|task| match wakes.take() {
        Some(wakes) => {
            wakes(task.waker().clone());
            std::task::Poll::Pending
        }
        None => std::task::Poll::Ready(()),
    })
    .await;
}

/// Lets a thread wake the call, on request.
struct Threaded(Arc<Mutex<Option<mpsc::Receiver<()>>>>, mpsc::Sender<()>);

impl Service for Threaded {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, _frame: Frame) -> Result<(), Infallible> {
        let (go, done) = (self.0.lock().unwrap().take(), self.1.clone());
        woken_by(|waker| {
            std::thread::spawn(move || {
                go.unwrap().recv().unwrap();
                waker.wake();
                done.send(()).unwrap();
            });
        })
        .await;
        cx.reply("woken");
        Ok(())
    }
}

#[test]
fn service_with_a_thread_of_its_own_is_named() {
    let text = failure(|| {
        Sim::seeds(1).run(|sim| {
            let ((go, waits), (done, woken)) = (mpsc::channel(), mpsc::channel());
            let waits = Arc::new(Mutex::new(Some(waits)));
            let addr = sim.serve(lines(), move |_shard| Threaded(waits.clone(), done.clone()));
            sim.client("me", async move |net| {
                let mut me = net.connect(addr).await?;
                me.send("what?\n").await?;
                net.sleep(SECOND).await;
                go.send(())?;
                woken.recv()?;
                me.line().await?;
                Ok(())
            });
            sim.run_until_done();
        });
    });
    assert!(text.contains("a thread of the program woke something"), "{text}");
}

/// Has a thread wake the call in the middle of its turn.
struct Joined;

impl Service for Joined {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, _frame: Frame) -> Result<(), Infallible> {
        woken_by(|waker| std::thread::spawn(move || waker.wake()).join().unwrap()).await;
        cx.reply("woken");
        Ok(())
    }
}

#[test]
fn thread_that_wakes_a_shard_in_its_turn_is_named() {
    let text = failure(|| {
        Sim::seeds(1).run(|sim| {
            let addr = sim.serve(lines(), |_shard| Joined);
            sim.client("me", async move |net| {
                let mut me = net.connect(addr).await?;
                me.send("what?\n").await?;
                me.line().await?;
                Ok(())
            });
            sim.run_until_done();
        });
    });
    assert!(text.contains("a thread of the program woke something"), "{text}");
}

#[test]
fn service_panic_fails_the_run_unless_it_is_expected() {
    let run = |seeds: ringserve_server::testing::Seeds| {
        seeds.run(|sim| {
            let addr =
                sim.serve(lines(), |_shard| Replies(|_: &Cx<'_, ()>| panic!("planted: a call panics")));
            sim.client("me", async move |net| {
                let mut me = net.connect(addr).await?;
                me.send("what?\n").await?;
                let end = me.closed().await;
                assert_eq!(end.unwrap_err().kind(), std::io::ErrorKind::ConnectionReset);
                Ok(())
            });
            sim.run_until_done();
        });
    };
    let text = failure(|| run(Sim::seeds(1)));
    assert!(
        text.contains(
            "the service panicked: planted: a call panics (crates/server/tests/by_seed/testing.rs:"
        ),
        "{text}"
    );
    run(Sim::seeds(1).allow_panics(|said| said.starts_with("planted")));
}

#[test]
fn test_whose_clients_never_succeed_shows_nothing() {
    let text = failure(|| {
        Sim::seeds(3).run(|sim| {
            sim.reset("10.0.0.1".parse().unwrap());
            sim.client("me", async |_net| Err("planted".into()));
        });
    });
    assert!(text.contains("no client of any seed came to a good end"), "{text}");
}

#[test]
fn client_error_without_a_cause_fails_the_run() {
    let text = failure(|| {
        Sim::seeds(1).run(|sim| {
            sim.client("me", async |net| {
                net.connect("10.0.0.9:1").await?;
                Ok(())
            });
            sim.run_until_done();
        });
    });
    assert!(text.contains("client me ended with an error, though nothing cost a connection"), "{text}");
    assert!(text.contains("refused"), "{text}");
}

#[test]
fn factory_that_fails_leaves_nothing() {
    Sim::seeds(6).run(|sim| {
        let failing = sim.seed() as usize % 3;
        let start =
            sim.start(
                lines().shards(3),
                move |shard| {
                    if shard.index() == failing { Err("planted") } else { Ok(Echo) }
                },
            );
        assert!(start.unwrap_err().to_string().contains("planted"));
        let addr = sim.serve(lines(), |_shard| Echo);
        assert_eq!(addr.port(), 7000, "the port is free again");
    });
}

#[test]
fn broken_driver_ends_its_shard_and_drains_the_others() {
    Sim::seeds(20).run(|sim| {
        let server = sim.start(lines().shards(3), |_shard| Echo).unwrap();
        for n in 0..6 {
            let addr = server.addr();
            sim.client(format!("c{n}"), async move |net| {
                let mut me = net.connect(addr).await?;
                me.closed().await?;
                Ok(())
            });
        }
        sim.run_for(SECOND);
        server.break_driver(1);
        sim.run_until_done();
        assert!(sim.run_until(60 * SECOND, || server.is_done()), "all shards end");
    });
}

#[test]
fn partition_holds_bytes_back_until_it_heals() {
    Sim::seeds(10).run(|sim| {
        let addr = sim.serve(lines(), |_shard| Echo);
        let host = sim.client("me", async move |net| {
            let mut me = net.connect(addr).await?;
            net.sleep(2 * SECOND).await;
            let sent = net.now();
            me.send("hello\n").await?;
            assert_eq!(me.line().await?.as_deref(), Some("hello"));
            assert!(net.now() - sent >= 3 * SECOND, "{:?}", net.now() - sent);
            Ok(())
        });
        sim.run_for(SECOND);
        sim.partition(host, addr.ip());
        sim.run_for(4 * SECOND);
        sim.heal(host, addr.ip());
        sim.run_until_done();
    });
}

#[test]
fn call_is_awaited_and_its_replies_are_told_apart() {
    let mut conn = TestConn::open(|_shard| Echo);
    for payload in ["one", "", "three"] {
        let called = conn.call(payload);
        assert_eq!(called.result, Ok(()));
        assert_eq!(called.replies, [payload.as_bytes()]);
    }
    assert!(!conn.is_closed());
}

/// Greets, sleeps, writes beside a reply, and closes at a word.
struct Manners;

impl Service for Manners {
    type Session = Cell<u32>;
    type Error = String;

    async fn open(&self, opening: &OpenCx<'_>) -> Result<Cell<u32>, Refusal> {
        opening.reply("welcome");
        Ok(Cell::default())
    }

    async fn call(&self, cx: &Cx<'_, Cell<u32>>, frame: Frame) -> Result<(), String> {
        cx.session().set(cx.session().get() + 1);
        match &frame[..] {
            b"sleep" => cx.sleep(20 * SECOND).await,
            b"quit" => cx.close(),
            b"hang" => std::future::pending().await,
            b"panic" => panic!("planted: {}", cx.session().get()),
            other => return Err(format!("{} is unknown", String::from_utf8_lossy(other))),
        }
        cx.write(b"raw");
        cx.reply("done");
        Ok(())
    }
}

/// Replies with what it takes from the framing, and the words behind it.
struct Heads;

impl Service<Option<&'static str>> for Heads {
    type Session = Cell<u32>;
    type Error = &'static str;

    async fn call(
        &self,
        cx: &Cx<'_, Cell<u32>>,
        frame: Frame<Option<&'static str>>,
    ) -> Result<(), &'static str> {
        cx.sleep(SECOND).await;
        cx.session().set(cx.session().get() + 1);
        let head = frame.head().ok_or("no head")?;
        cx.reply(format!("{} {head} {}", cx.session().get(), String::from_utf8_lossy(&frame)));
        Ok(())
    }
}

#[test]
fn call_alone_has_the_head_that_it_is_given() {
    let mut conn = TestConn::open(|_shard| with_heads(Heads));
    assert_eq!(conn.call_with_head("a", Some("one")).replies, [b"1 one a"]);
    assert_eq!(conn.call_with_head("", Some("two")).replies, [b"2 two "]);
    assert_eq!(conn.call("b").result, Err("no head"), "without one it is the default");
    assert!(conn.is_closed());
}

#[test]
fn call_that_sleeps_takes_virtual_time_alone() {
    let mut conn = TestConn::open(|_shard| Manners);
    assert_eq!(conn.replies(), [b"welcome"]);
    let called = conn.call("sleep");
    assert_eq!((called.result, called.replies), (Ok(()), vec![b"raw".to_vec(), b"done".to_vec()]));
    assert_eq!(conn.call("fly").result, Err("fly is unknown".to_owned()));
    assert_eq!(conn.close_reason(), Some(CloseReason::HandlerError));
}

#[test]
fn call_that_closes_says_so() {
    let mut conn = TestConn::open(|_shard| Manners);
    assert_eq!(conn.call("quit").result, Ok(()));
    assert!(conn.is_closed());
    let text = failure(|| drop(conn.call("again")));
    assert!(text.contains("the connection is closed"), "{text}");
}

#[test]
fn call_that_panics_or_hangs_fails_its_test() {
    let text = failure(|| drop(TestConn::open(|_shard| Manners).call("panic")));
    assert!(text.contains("the service panicked: planted: 1"), "{text}");
    let limits_off = failure(|| drop(TestConn::open(|_shard| Manners).call("hang")));
    assert!(limits_off.contains("the call"), "{limits_off}");
}

/// Answers a word after a minute.
struct Slow;

impl Service for Slow {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Infallible> {
        if &frame[..] == b"slowly" {
            cx.sleep(60 * SECOND).await;
            cx.reply("done");
        }
        Ok(())
    }
}

/// A look whether memory can be given back was due in the middle of a drain, and was due in each
/// turn from then on.
#[test]
fn drain_that_waits_for_a_call_does_not_spin() {
    let limits = Limits::default().handler_timeout(None);
    let server_limits = ServerLimits::default()
        .drain_timeout(100 * SECOND)
        .receive_buffer_bytes(512)
        .receive_bytes_max(8 << 20);
    Sim::seeds(5).steps_max(10_000).run(move |sim| {
        let addr =
            sim.serve(lines().limits(limits.clone()).server_limits(server_limits.clone()), |_shard| Slow);
        sim.client("me", async move |net| {
            let mut me = net.connect(addr).await?;
            // More receive buffers than a shard keeps.
            me.send("x".repeat(200_000)).await?;
            me.send("\nslowly\n").await?;
            assert_eq!(me.line().await?.as_deref(), Some("done"));
            Ok(())
        });
        sim.run_for(SECOND);
        sim.drain();
        sim.run_until_done();
        assert!(sim.now() > 60 * SECOND);
    });
}
