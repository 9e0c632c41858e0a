//! Answers that take a while, a deadline for each, and an end that cuts no answer off.
//!
//!     cargo run --release --example graceful_shutdown
//!     nc 127.0.0.1 7000          type 100, 1500 and 60000, then Ctrl-C in the server's terminal
//!
//! A line is a number of milliseconds: the time that its answer takes. An answer that takes longer
//! than the deadline is given up, and `too late` comes in its place. Four requests of a connection
//! may be pending at once, so answers name their requests.
//!
//! SIGTERM or Ctrl-C begins the end: no further connection is accepted, requests that arrived are
//! answered, each of these answers includes a goodbye, and connections close when they are owed
//! nothing. Those that are not done when the drain is over are reset. Then the program reports how
//! many requests it answered, and why its connections ended.

use std::collections::BTreeMap;
use std::io::{Write as _, stdout};
use std::net::SocketAddr;
use std::num::ParseIntError;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use clap::Parser;
use ringserve::framing::Lines;
use ringserve::limits::ServerLimits;
use ringserve::log::LogOptions;
use ringserve::server::Driver;
use ringserve::service::CloseCx;
use ringserve::{Cx, Frame, Limits, Server, Service};

/// A server that takes its time to answer, and shuts down gracefully.
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
    /// Milliseconds after which an answer is given up.
    #[arg(long, default_value_t = 2_000, value_name = "MS")]
    deadline: u64,
    /// Milliseconds that connections get to finish.
    #[arg(long, default_value_t = 10_000, value_name = "MS")]
    drain: u64,
}

/// Counters of all shards. Written once for each request and each end, so that shards do not get in
/// each other's way.
#[derive(Default)]
struct Report {
    answered: AtomicU64,
    too_late: AtomicU64,
    ends: Mutex<BTreeMap<&'static str, u64>>,
}

struct Patient {
    deadline: Duration,
    report: Arc<Report>,
}

impl Patient {
    /// A stand-in for a query, a file, another server.
    async fn work(&self, cx: &Cx<'_, ()>, time: Duration) -> String {
        cx.sleep(time).await;
        format!("done after {} ms", time.as_millis())
    }
}

impl Service for Patient {
    type Session = ();
    type Error = ParseIntError;

    async fn call(&self, cx: &Cx<'_, ()>, line: Frame) -> Result<(), ParseIntError> {
        let request = String::from_utf8_lossy(&line).trim().to_owned();
        let time = Duration::from_millis(request.parse()?);
        // Dropped when the time is over, whatever it waits for.
        let answer = match cx.timeout(self.deadline, self.work(cx, time)).await {
            Ok(answer) => {
                self.report.answered.fetch_add(1, Relaxed);
                answer
            }
            Err(_elapsed) => {
                self.report.too_late.fetch_add(1, Relaxed);
                "too late".to_owned()
            }
        };
        let goodbye = if cx.is_draining() { "; goodbye" } else { "" };
        cx.reply(format!("{request}: {answer}{goodbye}").as_bytes());
        Ok(())
    }

    fn close(&self, closed: &CloseCx<'_, ()>) {
        let mut ends = self.report.ends.lock().unwrap_or_else(PoisonError::into_inner);
        *ends.entry(closed.reason().name()).or_default() += 1;
    }
}

fn main() -> Result<(), ringserve::Error> {
    ringserve::log::init(LogOptions::default())?;
    let args = Args::parse();
    let limits = Limits::default().calls_in_flight_max(4);
    let server_limits = ServerLimits::default().drain_timeout(Duration::from_millis(args.drain));
    let mut server = Server::bind(args.listen)
        .driver(args.driver)
        .limits(limits)
        .server_limits(server_limits)
        .framing(Lines::default());
    if let Some(shards) = args.shards {
        server = server.shards(shards);
    }
    let report = Arc::new(Report::default());
    let (deadline, of_all) = (Duration::from_millis(args.deadline), report.clone());
    server.serve(move |_shard| Patient { deadline, report: of_all.clone() })?;

    let (answered, too_late) = (report.answered.load(Relaxed), report.too_late.load(Relaxed));
    // Not `println!`, which panics if nothing reads.
    let _ = writeln!(stdout(), "{answered} requests answered, {too_late} too late");
    for (reason, count) in report.ends.lock().unwrap_or_else(PoisonError::into_inner).iter() {
        let _ = writeln!(stdout(), "{count} connections ended: {reason}");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use ringserve::testing::{Faults, Sim};

    use super::*;

    #[test]
    fn drain_cuts_no_answer_off() {
        Sim::seeds(100).faults(Faults::harmless()).run(|sim| {
            let report = Arc::new(Report::default());
            let limits = Limits::default().calls_in_flight_max(4);
            let server_limits = ServerLimits::default().drain_timeout(Duration::from_secs(60));
            let server = Server::bind("10.0.0.1:7000")
                .limits(limits)
                .server_limits(server_limits)
                .framing(Lines::default());
            let of_all = report.clone();
            let addr = sim.serve(server.shards(1 + sim.seed() as usize % 3), move |_shard| Patient {
                deadline: Duration::from_secs(20),
                report: of_all.clone(),
            });
            for n in 0..3 {
                sim.client(format!("c{n}"), async move |net| {
                    let mut me = net.connect(addr).await?;
                    // In the order in which they are done, since four are pending at once.
                    me.send("15000\n100\n60000\n2000\n").await?;
                    for (request, answer) in [
                        ("100", "done after 100 ms"),
                        ("2000", "done after 2000 ms"),
                        ("15000", "done after 15000 ms; goodbye"),
                        ("60000", "too late; goodbye"),
                    ] {
                        assert_eq!(me.line().await?, Some(format!("{request}: {answer}")));
                    }
                    assert_eq!(me.closed().await?, b"");
                    Ok(())
                });
            }
            sim.run_for(Duration::from_secs(10));
            sim.drain();
            sim.run_until_done();
            assert_eq!((report.answered.load(Relaxed), report.too_late.load(Relaxed)), (9, 3));
        });
    }
}
