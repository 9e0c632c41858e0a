//! Services around a service: a timeout, a bound on calls in flight, counts, and a layer of this
//! program that counts the lines of each connection; and the same kind of stack made of tower's
//! layers.
//!
//!     cargo run --release -p example-middleware
//!     nc 127.0.0.1 7000          # 100: done after 100 ms; 60000: too long; fail: fails; counts: what was counted
//!
//!     cargo run --release -p example-middleware -- --tower --at-once 1
//!     nc 127.0.0.1 7000          # twice: while 5000 is pending in one, the other gets "busy"

use std::cell::Cell;
use std::fmt;
use std::io::{Write as _, stdout};
use std::net::SocketAddr;
use std::time::Duration;

use clap::Parser;
use ringserve::framing::{FrameError, Lines};
use ringserve::log::LogOptions;
use ringserve::middleware::{Calls, ConcurrencyLimit, Observe, TimeLimit};
use ringserve::server::Driver;
use ringserve::service::{CloseCx, Failure, OpenCx, Refusal, Session};
use ringserve::tower::{Request, Tower};
use ringserve::{Cx, Frame, Server, Service, Shard};
use tower::{BoxError, ServiceBuilder, ServiceExt, service_fn};

/// A server that waits as many milliseconds as a line names.
#[derive(Parser)]
struct Args {
    /// Address and port to listen on; port 0 finds a free one.
    #[arg(long, default_value = "127.0.0.1:7000", value_name = "ADDR:PORT")]
    listen: SocketAddr,
    /// Shards; by default one for each CPU.
    #[arg(long, value_name = "N")]
    shards: Option<usize>,
    /// auto, io_uring or epoll.
    #[arg(long, default_value_t, value_name = "NAME")]
    driver: Driver,
    /// Calls in flight on a shard; further ones wait, or with --tower are answered that it is busy.
    #[arg(long, default_value_t = 100, value_name = "N")]
    at_once: usize,
    /// Lines of a connection that are answered; the next one closes it. Not with --tower.
    #[arg(long, default_value_t = 1000, value_name = "N")]
    lines: u32,
    /// Milliseconds a call may take.
    #[arg(long, default_value_t = 10_000, value_name = "MS")]
    timeout: u64,
    /// Use layers of tower instead.
    #[arg(long)]
    tower: bool,
}

/// The error of a line.
#[derive(Debug)]
struct Failed;

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("told to fail")
    }
}

impl std::error::Error for Failed {}

/// Waits as long as a line names. Returns the answer.
async fn work(shard: &Shard, line: &[u8]) -> Result<String, Failed> {
    let line = String::from_utf8_lossy(line);
    if line == "fail" {
        return Err(Failed);
    }
    let Ok(millis) = line.parse() else { return Ok(format!("{line}: done")) };
    shard.sleep(Duration::from_millis(millis)).await;
    Ok(format!("{line}: done after {millis} ms"))
}

/// The inner service, which knows nothing of the layers around it.
struct Work {
    calls: Calls,
}

impl Service for Work {
    type Session = ();
    type Error = Failed;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Failed> {
        if &*frame == b"counts" {
            cx.reply(counts(&self.calls));
            return Ok(());
        }
        cx.reply(&work(cx.shard(), &frame).await?);
        Ok(())
    }
}

/// Answers `calls_max` calls of each connection, refuses the next one, and closes.
struct Allowance<S> {
    service: S,
    calls_max: u32,
}

/// The used part of a connection's allowance, and the session of the inner service.
struct Used<T> {
    calls: Cell<u32>,
    inner: T,
}

impl<T: Session> Session for Used<T> {}

impl<S: Service> Service for Allowance<S> {
    type Session = Used<S::Session>;
    type Error = S::Error;
    const ACCOUNTS: bool = S::ACCOUNTS;

    async fn open(&self, opening: &OpenCx<'_>) -> Result<Self::Session, Refusal> {
        Ok(Used { calls: Cell::new(0), inner: self.service.open(opening).await? })
    }

    async fn call(&self, cx: &Cx<'_, Self::Session>, frame: Frame) -> Result<(), S::Error> {
        let used = cx.session();
        if used.calls.get() == self.calls_max {
            cx.reply("enough");
            cx.close();
            return Ok(());
        }
        used.calls.set(used.calls.get() + 1);
        self.service.call(&cx.map_session(|used| &used.inner), frame).await
    }

    fn failed(&self, cx: &Cx<'_, Self::Session>, failure: &Failure<'_, S::Error>) {
        self.service.failed(&cx.map_session(|used| &used.inner), failure);
    }

    fn malformed(&self, cx: &Cx<'_, Self::Session>, error: &FrameError) {
        self.service.malformed(&cx.map_session(|used| &used.inner), error);
    }

    fn draining(&self, cx: &Cx<'_, Self::Session>) {
        self.service.draining(&cx.map_session(|used| &used.inner));
    }

    fn heartbeat(&self, cx: &Cx<'_, Self::Session>) {
        self.service.heartbeat(&cx.map_session(|used| &used.inner));
    }

    fn input_ended(&self, cx: &Cx<'_, Self::Session>) {
        self.service.input_ended(&cx.map_session(|used| &used.inner));
    }

    fn close(&self, closed: &CloseCx<'_, Self::Session>) {
        self.service.close(&closed.map_session(|used| &used.inner));
    }
}

/// The counts of all shards, from any thread.
fn counts(calls: &Calls) -> String {
    let counts = calls.counts();
    format!(
        "{} begun, {} done, {} failed, {} dropped, {} in flight, {} had to wait, {} of them too long",
        counts.begun,
        counts.done,
        counts.failed,
        counts.dropped,
        counts.in_flight(),
        counts.waited,
        counts.slow
    )
}

/// Layers of tower's around a function. They need no runtime. A call that finds no place is
/// answered, and its connection stays open.
fn of_tower(shard: &Shard, at_once: usize) -> impl Service<Session = (), Error = BoxError> + use<> {
    let shard = shard.clone();
    let worker = service_fn(move |request: Request| {
        let shard = shard.clone();
        async move { work(&shard, &request.frame).await }
    });
    let layers = ServiceBuilder::new().load_shed().concurrency_limit(at_once);
    let stack = layers.map_response(|answer: String| format!("{answer}, by tower")).service(worker);
    Tower::new(stack.map_result(|answer: Result<String, BoxError>| match answer {
        Err(error) if error.is::<tower::load_shed::error::Overloaded>() => Ok("busy".to_owned()),
        answer => answer,
    }))
}

fn main() -> Result<(), ringserve::Error> {
    ringserve::log::init(LogOptions::default())?;
    let args = Args::parse();
    let mut server = Server::bind(args.listen).framing(Lines::default()).driver(args.driver);
    if let Some(shards) = args.shards {
        server = server.shards(shards);
    }
    // One is for the shards, the other for the reports.
    let calls = Calls::default().slower_than(Duration::from_secs(1));
    let seen = calls.clone();
    let at_once = args.at_once;
    if args.tower {
        server.serve(move |shard| Observe::new(of_tower(shard, at_once), calls.on_shard()))?;
    } else {
        let (time, calls_max) = (Duration::from_millis(args.timeout), args.lines);
        server.serve(move |_shard| {
            let limited = ConcurrencyLimit::new(Work { calls: calls.clone() }, at_once);
            let allowance = Allowance { service: limited, calls_max };
            Observe::new(TimeLimit::new(allowance, time), calls.on_shard())
        })?;
    }
    // Not `println!`, which panics if nothing reads.
    let _ = writeln!(stdout(), "{}", counts(&seen));
    Ok(())
}

#[cfg(test)]
mod tests {
    use ringserve::testing::{Faults, Sim};

    use super::*;

    #[test]
    fn calls_wait_for_a_place_and_end_in_time() {
        Sim::seeds(100).faults(Faults::harmless()).run(|sim| {
            let calls = Calls::default().slower_than(Duration::from_secs(1));
            let of_all = calls.clone();
            let addr = sim.serve(Server::bind("10.0.0.1:7000").framing(Lines::default()), move |_shard| {
                let limited = ConcurrencyLimit::new(Work { calls: of_all.clone() }, 1);
                Observe::new(TimeLimit::new(limited, Duration::from_secs(10)), of_all.on_shard())
            });
            for n in 0..3 {
                sim.client(format!("c{n}"), async move |net| {
                    let mut me = net.connect(addr).await?;
                    me.send("2000\nhello\n").await?;
                    assert_eq!(me.line().await?.as_deref(), Some("2000: done after 2000 ms"));
                    // One call of the shard is under way at a time.
                    assert_eq!(me.line().await?.as_deref(), Some("hello: done"));
                    net.sleep(Duration::from_secs(60)).await;
                    let sent = net.now();
                    me.send(if n == 0 { "60000\n" } else { "fail\n" }).await?;
                    // Neither is answered, and both end their connection.
                    assert_eq!(me.line().await.unwrap_or_default(), None);
                    assert!(net.now() - sent < Duration::from_secs(40));
                    Ok(())
                });
            }
            sim.run_until_done();
            let counts = calls.counts();
            assert_eq!((counts.begun, counts.done, counts.in_flight()), (9, 6, 0), "{counts:?}");
        });
    }

    #[test]
    fn connection_that_used_its_allowance_is_refused() {
        Sim::seeds(50).faults(Faults::harmless()).run(|sim| {
            let server = Server::bind("10.0.0.1:7000").framing(Lines::default());
            let calls = Calls::default();
            let addr = sim.serve(server, move |_shard| Allowance {
                service: Work { calls: calls.clone() },
                calls_max: 2,
            });
            for n in 0..3 {
                sim.client(format!("c{n}"), async move |net| {
                    let mut me = net.connect(addr).await?;
                    me.send("a\nb\nc\nd\n").await?;
                    for answer in ["a: done", "b: done", "enough"] {
                        assert_eq!(me.line().await?.as_deref(), Some(answer));
                    }
                    assert_eq!(me.line().await?, None);
                    Ok(())
                });
            }
            sim.run_until_done();
        });
    }

    #[test]
    fn tower_answers_busy_where_there_is_no_place() {
        Sim::seeds(100).faults(Faults::harmless()).run(|sim| {
            let server = Server::bind("10.0.0.1:7000").framing(Lines::default());
            let addr = sim.serve(server, |shard| of_tower(shard, 1));
            sim.client("first", async move |net| {
                let mut me = net.connect(addr).await?;
                me.send("60000\n").await?;
                assert_eq!(me.line().await?.as_deref(), Some("60000: done after 60000 ms, by tower"));
                Ok(())
            });
            sim.client("second", async move |net| {
                net.sleep(Duration::from_secs(20)).await;
                let mut me = net.connect(addr).await?;
                me.send("hello\n").await?;
                assert_eq!(me.line().await?.as_deref(), Some("busy"));
                net.sleep(Duration::from_secs(60)).await;
                me.send("hello\n").await?;
                assert_eq!(me.line().await?.as_deref(), Some("hello: done, by tower"));
                Ok(())
            });
            sim.run_until_done();
        });
    }
}
