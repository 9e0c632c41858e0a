//! Remembers what an upstream answers: lines are questions, and each shard asks the upstream only what it does not know.
//!
//!     cargo run --release --example echo -- --listen 127.0.0.1:8000
//!     cargo run --release --example cache -- --upstream 127.0.0.1:8000
//!     printf 'hello\nhello\n' | nc -N 127.0.0.1 7000
//!
//! A shard keeps connections to the upstream that no question uses. One that is given up in the middle of a question is dropped with
//! it, so a late answer meets no later question. The upstream is trusted to send one line for each. A question on a kept connection
//! that turns out to be dead is asked once more.

use std::cell::RefCell;
use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use clap::Parser;
use ringserve::framing::Lines;
use ringserve::log::LogOptions;
use ringserve::net::Framed;
use ringserve::{Cx, Driver, Frame, Server, Service, Shard};

/// A cache of lines in front of an upstream.
#[derive(Parser)]
struct Args {
    /// Address and port to listen on; port 0 finds a free one.
    #[arg(long, default_value = "127.0.0.1:7000", value_name = "ADDR:PORT")]
    listen: SocketAddr,
    /// The upstream: an address or a name with a port, or unix:PATH.
    #[arg(long, value_name = "UPSTREAM")]
    upstream: String,
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

/// Bytes of a question, and of an answer.
const LINE_BYTES_MAX: usize = 1024;
/// How long the upstream may take.
const ANSWER_TIME: Duration = Duration::from_secs(2);
/// Connections that a shard keeps.
const KEPT_MAX: usize = 16;

type Upstream = Framed<Lines>;

/// What was answered, by question.
type Answers = HashMap<Box<[u8]>, Rc<[u8]>>;

struct Cache {
    upstream: String,
    answers_max: usize,
    answers: RefCell<Answers>,
    kept: RefCell<Vec<Upstream>>,
}

impl Cache {
    fn new(args: &Args) -> Cache {
        Cache {
            upstream: args.upstream.clone(),
            answers_max: args.answers_max,
            answers: RefCell::default(),
            kept: RefCell::default(),
        }
    }

    async fn ask(&self, shard: &Shard, question: &[u8]) -> io::Result<Frame> {
        let kept = self.kept.borrow_mut().pop();
        if let Some(upstream) = kept
            && let Ok(answer) = self.ask_over(upstream, question).await
        {
            return Ok(answer);
        }
        let lines = Lines::default();
        let upstream = shard.connect(&*self.upstream).await?.framed(lines).frame_bytes_max(LINE_BYTES_MAX);
        self.ask_over(upstream, question).await
    }

    async fn ask_over(&self, mut upstream: Upstream, question: &[u8]) -> io::Result<Frame> {
        upstream.send(question).await?;
        let answer = upstream.next().await.ok_or(io::ErrorKind::UnexpectedEof)??;
        if self.kept.borrow().len() < KEPT_MAX {
            self.kept.borrow_mut().push(upstream);
        }
        Ok(answer)
    }
}

impl Service for Cache {
    type Session = ();
    type Error = io::Error;

    async fn call(&self, cx: &Cx<'_, ()>, question: Frame) -> Result<(), io::Error> {
        let known = self.answers.borrow().get(&*question).cloned();
        if let Some(answer) = known {
            cx.reply(&answer);
            return Ok(());
        }
        match cx.timeout(ANSWER_TIME, self.ask(cx.shard(), &question)).await {
            Ok(Ok(answer)) => {
                cx.reply(&answer);
                let mut answers = self.answers.borrow_mut();
                if answers.len() >= self.answers_max {
                    answers.clear();
                }
                answers.insert(question[..].into(), answer[..].into());
            }
            Ok(Err(error)) => cx.reply(format!("no answer: {error}")),
            Err(_elapsed) => cx.reply("no answer: too late"),
        }
        Ok(())
    }
}

fn main() -> Result<(), ringserve::Error> {
    ringserve::log::init(LogOptions::default())?;
    let args = Args::parse();
    let framing = Lines::default().bytes_max(LINE_BYTES_MAX);
    let server = Server::bind(args.listen).framing(framing).driver(args.driver).shards(args.shards);
    server.serve(move |_shard| Cache::new(&args))
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use ringserve::testing::{ClientListener, ClientResult, ClientStream, Faults, Net, Sim};

    use super::*;

    const ADDR: &str = "10.0.0.1:7000";
    const UPSTREAM: &str = "10.0.0.2:9000";

    fn serve(sim: &Sim) {
        let args =
            Args::parse_from(["cache", "--listen", ADDR, "--upstream", UPSTREAM, "--answers-max", "5"]);
        let framing = Lines::default().bytes_max(LINE_BYTES_MAX);
        sim.serve(Server::bind(args.listen).framing(framing).shards(1), move |_shard| Cache::new(&args));
    }

    /// What the upstream does with each question; it ends the connection where there is no answer.
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
                            "slow" => "no answer: too late".to_owned(),
                            "die" => "no answer: unexpected end of file".to_owned(),
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
