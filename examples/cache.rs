//! Remembers the answers of an upstream: lines are questions, and each shard asks the upstream only
//! what it does not know.
//!
//!     cargo run --release --example echo -- --listen 127.0.0.1:8000
//!     cargo run --release --example cache -- --upstream 127.0.0.1:8000
//!     printf 'hello\nhello\n' | nc -N 127.0.0.1 7000
//!
//! Each shard keeps connections to the upstream that no question uses, and asks again if a kept one
//! turns out to be dead. The upstream is trusted to send one line for each question: an unsolicited
//! line closes its connection.

use std::cell::RefCell;
use std::collections::HashMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use clap::Parser;
use ringserve::framing::Lines;
use ringserve::log::LogOptions;
use ringserve::server::Driver;
use ringserve::upstream::{Exclusive, Request, Upstream};
use ringserve::{Cx, Frame, Server, Service, Shard};

/// A cache of lines in front of an upstream.
#[derive(Parser)]
struct Args {
    /// Address and port to listen on; port 0 finds a free one.
    #[arg(long, default_value = "127.0.0.1:7000", value_name = "ADDR:PORT")]
    listen: SocketAddr,
    /// A server to ask: an address or a name with a port, or unix:PATH; may be given several times.
    #[arg(long, required = true, value_name = "UPSTREAM")]
    upstream: Vec<String>,
    /// Answers that a shard remembers; it forgets all of them when there would be more.
    #[arg(long, default_value_t = 10_000, value_name = "N")]
    answers_max: usize,
    /// Shards; by default one for each CPU.
    #[arg(long, value_name = "N")]
    shards: Option<usize>,
    /// auto, io_uring or epoll.
    #[arg(long, default_value_t, value_name = "NAME")]
    driver: Driver,
}

/// The most bytes of a question, and of an answer.
const LINE_BYTES_MAX: usize = 1024;
/// The time that the upstream may take.
const ANSWER_TIME: Duration = Duration::from_secs(2);
/// Answers by question.
type Answers = HashMap<Box<[u8]>, Rc<[u8]>>;

struct Cache {
    answers_max: usize,
    answers: RefCell<Answers>,
    upstream: Exclusive<Lines>,
}

impl Cache {
    fn new(args: &Args, upstream: &Upstream, shard: &Shard) -> Cache {
        Cache {
            answers_max: args.answers_max,
            answers: RefCell::default(),
            upstream: upstream.exclusive(shard, Lines::default()).frame_bytes_max(LINE_BYTES_MAX),
        }
    }
}

impl Service for Cache {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, question: Frame) -> Result<(), Infallible> {
        let known = self.answers.borrow().get(&*question).cloned();
        if let Some(answer) = known {
            cx.reply(&answer);
            return Ok(());
        }
        match self.upstream.ask(Request::new(&question).idempotent().timeout(ANSWER_TIME)).await {
            Ok(answer) => {
                cx.reply(&answer);
                let mut answers = self.answers.borrow_mut();
                if answers.len() >= self.answers_max {
                    answers.clear();
                }
                answers.insert(question[..].into(), answer[..].into());
            }
            Err(error) => cx.reply(format!("no answer: {error}")),
        }
        Ok(())
    }
}

fn main() -> Result<(), ringserve::Error> {
    ringserve::log::init(LogOptions::default())?;
    let args = Args::parse();
    let framing = Lines::default().bytes_max(LINE_BYTES_MAX);
    let server = Server::bind(args.listen).framing(framing).driver(args.driver).shards(args.shards);
    let upstream = Upstream::new("upstream", args.upstream.clone());
    server.upstream(&upstream).serve(move |shard| Cache::new(&args, &upstream, shard))
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::io;

    use ringserve::testing::{ClientListener, ClientResult, ClientStream, Faults, Net, Sim};

    use super::*;

    const ADDR: &str = "10.0.0.1:7000";
    const UPSTREAM: &str = "10.0.0.2:9000";

    fn serve(sim: &Sim) {
        let args =
            Args::parse_from(["cache", "--listen", ADDR, "--upstream", UPSTREAM, "--answers-max", "5"]);
        let framing = Lines::default().bytes_max(LINE_BYTES_MAX);
        let upstream = Upstream::new("upstream", args.upstream.clone());
        let server = Server::bind(args.listen).framing(framing).shards(1);
        sim.serve(server, move |shard| Cache::new(&args, &upstream, shard));
    }

    /// A simulated upstream that calls `answer` for each question; it ends the connection if there
    /// is none.
    fn upstream(sim: &Sim, answer: impl AsyncFn(&Net, &str) -> Option<String> + 'static) {
        let answer = Rc::new(answer);
        sim.background("upstream", async move |net| {
            let mut listener: ClientListener = net.listen(UPSTREAM)?;
            loop {
                let (mut stream, answer, net_of_it) = (listener.accept().await, answer.clone(), net.clone());
                net.spawn(async move {
                    while let Ok(Some(question)) = stream.line().await {
                        match answer(&net_of_it, &question).await {
                            Some(answer) if stream.send(&answer).await.is_ok() => {}
                            _ => return,
                        }
                    }
                });
            }
        });
    }

    async fn ask(me: &mut ClientStream, question: &str) -> io::Result<String> {
        me.send(format!("{question}\n")).await?;
        Ok(me.line().await?.expect("an answer"))
    }

    #[test]
    fn answer_is_asked_for_once() {
        Sim::seeds(100).faults(Faults::harmless()).run(|sim| {
            let asked: Rc<Cell<u32>> = Rc::default();
            let count = asked.clone();
            upstream(sim, async move |_net, question| {
                count.set(count.get() + 1);
                Some(format!("{question}!\n"))
            });
            serve(sim);
            sim.client("one", async |net: Net| -> ClientResult {
                net.sleep(Duration::from_secs(1)).await;
                let mut me = net.connect(ADDR).await?;
                for question in ["a", "b", "a", "a", "b"] {
                    assert_eq!(ask(&mut me, question).await?, format!("{question}!"));
                }
                Ok(())
            });
            sim.run_until_done();
            assert_eq!(asked.get(), 2);
        });
    }

    #[test]
    fn upstream_that_is_slow_or_dies_spoils_no_later_answer() {
        Sim::seeds(100).faults(Faults::harmless()).run(|sim| {
            upstream(sim, async |net, question| {
                let late = if question.starts_with("slow") { 3 * ANSWER_TIME } else { Duration::ZERO };
                net.sleep(late).await;
                (!question.starts_with("die")).then(|| format!("{question}!\n"))
            });
            serve(sim);
            for client in 0..3 {
                sim.client(format!("c{client}"), async move |net: Net| {
                    net.sleep(Duration::from_secs(1)).await;
                    let mut me = net.connect(ADDR).await?;
                    for n in 0..20 {
                        let kind = ["ask", "ask", "slow", "die"][net.random() as usize % 4];
                        let question = format!("{kind} {client} {n}");
                        let expected = match kind {
                            "slow" => "no answer: the upstream was too late".to_owned(),
                            "die" => {
                                "no answer: the upstream ended the connection before its answer".to_owned()
                            }
                            _ => format!("{question}!"),
                        };
                        assert_eq!(ask(&mut me, &question).await?, expected);
                    }
                    Ok(())
                });
            }
            sim.run_until_done();
        });
    }

    #[test]
    fn question_on_a_kept_connection_that_died_is_asked_once_more() {
        Sim::seeds(30).faults(Faults::harmless()).run(|sim| {
            sim.background("upstream", async move |net| {
                let mut listener: ClientListener = net.listen(UPSTREAM)?;
                loop {
                    let mut stream = listener.accept().await;
                    net.spawn(async move {
                        if let Ok(Some(question)) = stream.line().await {
                            let _ = stream.send(format!("{question}!\n")).await;
                        }
                        // One answer, and the end.
                    });
                }
            });
            serve(sim);
            sim.client("one", async |net: Net| -> ClientResult {
                for question in ["a", "b", "c", "d"] {
                    // By now the end has come.
                    net.sleep(Duration::from_secs(60)).await;
                    let mut me = net.connect(ADDR).await?;
                    assert_eq!(ask(&mut me, question).await?, format!("{question}!"));
                }
                Ok(())
            });
            sim.run_until_done();
        });
    }

    #[test]
    fn answer_that_is_too_long_is_none() {
        Sim::seeds(10).run(|sim| {
            upstream(sim, async |_net, question| Some(format!("{}\n", question.repeat(1000))));
            serve(sim);
            sim.client("one", async |net: Net| {
                net.sleep(Duration::from_secs(1)).await;
                let mut me = net.connect(ADDR).await?;
                let no_answer =
                    "no answer: a frame of at least 1025 bytes is larger than frame_bytes_max, 1024";
                assert_eq!(ask(&mut me, "hello").await?, no_answer);
                assert_eq!(ask(&mut me, "a").await?, "a".repeat(1000));
                Ok(())
            });
            sim.run_until_done();
        });
    }
}
