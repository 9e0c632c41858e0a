//! A server with an admin endpoint, and a few commands that cause something to be seen there.
//!
//!     cargo run --release -p example-admin
//!     xdg-open http://127.0.0.1:9000
//!     nc 127.0.0.1 7000          type hello, wait 5000, block 3000
//!
//! `wait 5000` answers after five seconds and holds up only its own connection: the page shows it
//! as a call that waits. `block 3000` sleeps as no handler should: the whole shard stands still,
//! and the page names the call. `flood 10` sends ten megabytes: a peer that does not read them is
//! among the largest outboxes.
//!
//!     curl http://127.0.0.1:9000/metrics
//!     curl -X POST -H 'X-Ringserve: 1' -d 'info,ringserve=debug' http://127.0.0.1:9000/log-level
//!     curl -X POST -H 'X-Ringserve: 1' http://127.0.0.1:9000/drain
//!
//! `--probes 0.0.0.0:9001` answers `/healthz` and `/readyz` there, without a token, and nothing
//! else. `--keep FILE` keeps orders on who is let in across restarts.
//!
//! The program adds to the endpoint: counters that each shard counts for itself
//! (`lively_lines_total`), a collector that is called at each scrape (`lively_floods_allowed`), and
//! a path that shows and sets whether floods are allowed:
//!
//!     curl http://127.0.0.1:9000/metrics | grep lively
//!     curl http://127.0.0.1:9000/lively/floods
//!     curl -X POST -H 'X-Ringserve: 1' -d off http://127.0.0.1:9000/lively/floods

use std::convert::Infallible;
use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use clap::Parser;
use ringserve::admin::{Admin, AdminAnswer, AdminRoute};
use ringserve::admission::Admission;
use ringserve::framing::Lines;
use ringserve::log::LogOptions;
use ringserve::metrics::prometheus_client::collector::Collector;
use ringserve::metrics::prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use ringserve::metrics::prometheus_client::metrics::gauge::ConstGauge;
use ringserve::metrics::{Counter, Counters, Figures};
use ringserve::server::Driver;
use ringserve::{Cx, Frame, Server, Service};

/// Lines that are sent back, and an admin endpoint. If RINGSERVE_ADMIN_TOKEN is set, requests there
/// must have that token, or, only to read, that of RINGSERVE_ADMIN_READ_TOKEN.
#[derive(Parser)]
struct Args {
    /// Address and port to listen on; port 0 finds a free one.
    #[arg(long, default_value = "127.0.0.1:7000", value_name = "ADDR:PORT")]
    listen: SocketAddr,
    /// Place of the admin endpoint: an address and a port, or unix:PATH.
    #[arg(long, default_value = "127.0.0.1:9000", value_name = "PLACE")]
    admin: String,
    /// A further place, at which it answers only /healthz and /readyz.
    #[arg(long, value_name = "PLACE")]
    probes: Option<String>,
    /// A file that keeps orders on who is let in across restarts.
    #[arg(long, value_name = "FILE")]
    keep: Option<PathBuf>,
    /// Shards; by default one for each CPU.
    #[arg(long, value_name = "N")]
    shards: Option<usize>,
    /// auto, io_uring or epoll.
    #[arg(long, default_value_t, value_name = "NAME")]
    driver: Driver,
}

/// The request that a line makes.
#[derive(Debug, PartialEq, Eq)]
enum Wish {
    Echo,
    Wait(Duration),
    Block(Duration),
    Flood { megabytes: u64 },
}

/// The longest wait. The framework ends calls after a minute.
const MILLIS_MAX: u64 = 30_000;

/// The most megabytes sent for a line.
const MEGABYTES_MAX: u64 = 1000;

impl Wish {
    fn of(line: &[u8]) -> Wish {
        let text = String::from_utf8_lossy(line);
        let number = |name: &str, max| {
            let number = text.strip_prefix(name)?.trim().parse::<u64>().ok()?;
            Some(number.min(max))
        };
        if let Some(millis) = number("wait ", MILLIS_MAX) {
            Wish::Wait(Duration::from_millis(millis))
        } else if let Some(millis) = number("block ", MILLIS_MAX) {
            Wish::Block(Duration::from_millis(millis))
        } else if let Some(megabytes) = number("flood ", MEGABYTES_MAX) {
            Wish::Flood { megabytes }
        } else {
            Wish::Echo
        }
    }
}

/// Counters of one shard's lines, by their requests.
struct Heard {
    echo: Counter,
    wait: Counter,
    block: Counter,
    flood: Counter,
}

impl Heard {
    /// Handles for the shard that calls this.
    fn of(lines: &Counters<1>) -> Heard {
        let of = |wish| lines.with([wish]);
        Heard { echo: of("echo"), wait: of("wait"), block: of("block"), flood: of("flood") }
    }

    fn of_wish(&self, wish: &Wish) -> &Counter {
        match wish {
            Wish::Echo => &self.echo,
            Wish::Wait(_) => &self.wait,
            Wish::Block(_) => &self.block,
            Wish::Flood { .. } => &self.flood,
        }
    }
}

/// Whether floods are allowed: read by all shards, and set at the endpoint.
#[derive(Clone, Debug)]
struct Floods(Arc<AtomicBool>);

impl Floods {
    fn are_allowed(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// The path that shows and sets this.
    fn routes(&self) -> [AdminRoute; 2] {
        let (shown, set) = (self.clone(), self.clone());
        let word = |allowed| if allowed { "on\n" } else { "off\n" };
        let get = AdminRoute::get("/lively/floods", move |_request| word(shown.are_allowed()));
        let post = AdminRoute::post("/lively/floods", move |request| match request.body() {
            body @ (b"on" | b"off") => {
                set.0.store(body == b"on", Ordering::Relaxed);
                AdminAnswer::from(word(body == b"on"))
            }
            _ => AdminAnswer::error(400, "send on or off"),
        });
        [get.about("whether floods are allowed"), post.about("allows floods, or not: on or off")]
    }
}

impl Collector for Floods {
    fn encode(&self, mut to: DescriptorEncoder<'_>) -> fmt::Result {
        let gauge = ConstGauge::new(u64::from(self.are_allowed()));
        let help = "1 if floods are allowed";
        gauge.encode(to.encode_descriptor("lively_floods_allowed", help, None, gauge.metric_type())?)
    }
}

struct Lively {
    heard: Heard,
    floods: Floods,
}

impl Service for Lively {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, line: Frame) -> Result<(), Infallible> {
        let wish = Wish::of(&line);
        self.heard.of_wish(&wish).add(1);
        match wish {
            Wish::Flood { .. } if !self.floods.are_allowed() => {}
            Wish::Echo => {}
            Wish::Wait(time) => cx.sleep(time).await,
            // Wrong on purpose, to be seen on the page.
            Wish::Block(time) => std::thread::sleep(time),
            Wish::Flood { megabytes } => {
                for _ in 0..megabytes * 16 {
                    cx.reply(&[b'.'; (1 << 16) - 1][..]);
                    cx.ready().await;
                }
            }
        }
        cx.reply(line);
        Ok(())
    }
}

fn main() -> Result<(), ringserve::Error> {
    ringserve::log::init(LogOptions::default())?;
    let args = Args::parse();
    let mut admin = Admin::new(args.admin);
    if let Ok(token) = std::env::var("RINGSERVE_ADMIN_TOKEN") {
        admin = admin.token(token);
    }
    if let Ok(token) = std::env::var("RINGSERVE_ADMIN_READ_TOKEN") {
        admin = admin.read_token(token);
    }
    if let Some(probes) = args.probes {
        admin = admin.probes(probes);
    }
    if let Some(file) = args.keep {
        admin = admin.keep_admission(file);
    }
    let (figures, floods) = (Figures::default(), Floods(Arc::new(AtomicBool::new(true))));
    let lines = figures.counter("lively_lines", "Lines by what they ask for", ["wish"]);
    admin = admin.figures(&figures).collector(floods.clone());
    for route in floods.routes() {
        admin = admin.route(route);
    }
    let mut server = Server::bind(args.listen).driver(args.driver).framing(Lines::default()).admin(admin);
    // Limits that are not set now may be set at the endpoint.
    server = server.admission(Admission::default().adjustable());
    if let Some(shards) = args.shards {
        server = server.shards(shards);
    }
    server.serve(move |_shard| Lively { heard: Heard::of(&lines), floods: floods.clone() })
}

#[cfg(test)]
mod tests {
    use ringserve::testing::{Faults, Sim};

    use super::*;

    #[test]
    fn lines_are_read_as_wishes() {
        assert_eq!(Wish::of(b"wait 50"), Wish::Wait(Duration::from_millis(50)));
        assert_eq!(Wish::of(b"block 99999999"), Wish::Block(Duration::from_secs(30)));
        assert_eq!(Wish::of(b"flood 2"), Wish::Flood { megabytes: 2 });
        for line in ["hello", "wait", "wait for me", "flood -1", "\u{fffd}"] {
            assert_eq!(Wish::of(line.as_bytes()), Wish::Echo, "{line}");
        }
    }

    #[test]
    fn each_line_is_answered_and_floods_come_whole() {
        Sim::seeds(50).faults(Faults::harmless()).run(|sim| {
            let server = Server::bind("10.0.0.1:7000").framing(Lines::default()).admin("127.0.0.1:9000");
            let (figures, floods) = (Figures::default(), Floods(Arc::new(AtomicBool::new(true))));
            let lines = figures.counter("lively_lines", "Lines by what they ask for", ["wish"]);
            let service =
                move |_: &ringserve::Shard| Lively { heard: Heard::of(&lines), floods: floods.clone() };
            let addr = sim.serve(server.shards(1 + sim.seed() as usize % 3), service);
            sim.client("reader", async move |net| {
                let mut me = net.connect(addr).await?;
                me.send("hello\nwait 2000\nflood 1\n").await?;
                assert_eq!(me.line().await?, Some("hello".to_owned()));
                assert_eq!(me.line().await?, Some("wait 2000".to_owned()));
                for _ in 0..16 {
                    assert_eq!(me.line().await?.map(|line| line.len()), Some((1 << 16) - 1));
                }
                assert_eq!(me.line().await?, Some("flood 1".to_owned()));
                Ok(())
            });
            sim.run_until_done();
            let mut text = String::new();
            figures.write_prometheus(&mut text);
            for line in ["{wish=\"echo\"} 1\n", "{wish=\"wait\"} 1\n", "{wish=\"flood\"} 1\n"] {
                assert!(text.contains(&format!("lively_lines_total{line}")), "{line} is not in {text}");
            }
        });
    }
}
