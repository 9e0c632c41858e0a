//! Services around a service: a timeout, a bound on calls in flight, counts; and the same kind of stack made of tower's
//! layers.
//!
//!     cargo run --release -p example-middleware
//!     nc 127.0.0.1 7000          # 100: done after 100 ms; 60000: too long; fail: fails; counts: what was counted
//!
//!     cargo run --release -p example-middleware -- --tower --at-once 1
//!     nc 127.0.0.1 7000          # twice: while 5000 is under way in one, the other is told "busy"

use std::fmt;
use std::io::IsTerminal;
use std::net::SocketAddr;
use std::time::Duration;

use clap::Parser;
use ringserve::framing::Lines;
use ringserve::middleware::{Calls, ConcurrencyLimit, Observe, TimeLimit};
use ringserve::tower::{Request, Tower};
use ringserve::{Cx, Driver, Frame, Server, Service, Shard};
use tower::{BoxError, ServiceBuilder, ServiceExt, service_fn};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

/// A server that waits as many milliseconds as a line says.
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
    /// Calls in flight on a shard; further ones wait, or with --tower are told that it is busy.
    #[arg(long, default_value_t = 100, value_name = "N")]
    at_once: usize,
    /// Milliseconds a call may take.
    #[arg(long, default_value_t = 10_000, value_name = "MS")]
    timeout: u64,
    /// Layers of tower instead.
    #[arg(long)]
    tower: bool,
}

/// What is wrong with a line.
#[derive(Debug)]
struct Failed;

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("told to fail")
    }
}

impl std::error::Error for Failed {}

/// Waits as long as a line says. What it says then is the answer.
async fn work(shard: &Shard, line: &[u8]) -> Result<String, Failed> {
    let line = String::from_utf8_lossy(line);
    if line == "fail" {
        return Err(Failed);
    }
    let Ok(millis) = line.parse() else { return Ok(format!("{line}: done")) };
    shard.sleep(Duration::from_millis(millis)).await;
    Ok(format!("{line}: done after {millis} ms"))
}

/// The service inside, which knows nothing of what is around it.
struct Work {
    calls: Calls,
}

impl Service for Work {
    type Session = ();
    type Error = Failed;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Failed> {
        if &*frame == b"counts" {
            cx.reply(&counts(&self.calls));
            return Ok(());
        }
        cx.reply(&work(cx.shard(), &frame).await?);
        Ok(())
    }
}

/// Of all shards, and from any thread.
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

/// Layers of tower's around a function. They need no runtime. A call that finds no place is answered, not closed.
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
    let log = EnvFilter::builder().with_default_directive(LevelFilter::INFO.into()).from_env_lossy();
    let color = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    tracing_subscriber::fmt().with_env_filter(log).with_target(false).with_ansi(color).init();
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
        let time = Duration::from_millis(args.timeout);
        server.serve(move |_shard| {
            let limited = ConcurrencyLimit::new(Work { calls: calls.clone() }, at_once);
            Observe::new(TimeLimit::new(limited, time), calls.on_shard())
        })?;
    }
    println!("{}", counts(&seen));
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
