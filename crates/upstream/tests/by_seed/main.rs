//! Whole servers with clients of upstreams by seed, in virtual time, before backends that refuse,
//! stall, end and lie.

mod connections;
mod failing;
mod freshness;
mod hedging;
mod keys;
mod levels;
mod lifetimes;
mod names;
mod pools;
mod relays;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use ringserve::framing::Lines;
use ringserve::testing::{ClientStream, Net, Sim, SimServer};
use ringserve::upstream::{BackendStats, Exclusive, Request, Upstream};
use ringserve::{Cx, Frame, Server, Service};

const SECOND: Duration = Duration::from_secs(1);
const FRONT: &str = "10.0.0.1:7000";
const ADDRS: [&str; 4] = ["10.0.0.11:80", "10.0.0.12:80", "10.0.0.13:80", "10.0.0.14:80"];

/// Asks what its clients ask: `once 7`, or `again 7` for a question that may be asked twice.
struct Front {
    answers: Exclusive<Lines>,
}

impl Service for Front {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, question: Frame) -> Result<(), Infallible> {
        let request = Request::new(&question);
        let request = if question.starts_with(b"again") { request.idempotent() } else { request };
        // As in `again 7 key=a`.
        let key = question.windows(4).position(|bytes| bytes == b"key=").map(|at| &question[at..]);
        let request = key.map_or(request, |key| request.key(key));
        match self.answers.ask(request).await {
            Ok(answer) => cx.reply(answer),
            Err(error) => cx.reply(format!("no answer: {error}")),
        }
        Ok(())
    }
}

/// A front with a client on each shard.
fn front(sim: &Sim, upstream: &Upstream, shards: usize) -> SimServer {
    let (upstream, addr) = (upstream.clone(), FRONT.parse::<SocketAddr>().unwrap());
    let server = Server::bind(addr).framing(Lines::default()).shards(shards);
    let server =
        sim.start(server, move |shard| Front { answers: upstream.exclusive(shard, Lines::default()) });
    // The backends of the test begin to listen.
    sim.run_for(SECOND / 10);
    server.unwrap()
}

/// The behaviour of a backend with a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum Mode {
    /// It answers each line with the same one.
    #[default]
    Answers,
    /// No port is open.
    Refuses,
    /// It reads, and says nothing.
    Silent,
    /// It ends each connection that it accepted.
    ClosesAtOnce,
    /// It ends the connection of each question in place of an answer.
    Dies,
    /// It answers after this time.
    Slow(Duration),
    /// It answers, and ends the connection once nothing came for this time.
    ClosesIdle(Duration),
    /// The same, but it reads on after its end, and receives what comes.
    HalfCloses(Duration),
    /// It answers twice.
    Twice,
    /// It answers, and later begins another answer.
    Stray,
    /// It answers, and this time later once more.
    Again(Duration),
}

/// A backend, as its test sees it.
#[derive(Default)]
struct Backend {
    mode: Cell<Mode>,
    /// Connections that it has, and the most that it had.
    now: Cell<usize>,
    most: Cell<usize>,
    accepted: Cell<usize>,
    /// The number of times that each question was received.
    heard: RefCell<BTreeMap<String, u32>>,
}

impl Backend {
    fn start(sim: &Sim, addr: &'static str) -> Rc<Backend> {
        let backend = Rc::new(Backend::default());
        let this = backend.clone();
        sim.background(addr, async move |net| {
            loop {
                while this.mode.get() == Mode::Refuses {
                    net.sleep(SECOND / 5).await;
                }
                let mut listener = net.listen(addr)?;
                while this.mode.get() != Mode::Refuses {
                    if let Ok(stream) = net.timeout(SECOND / 5, listener.accept()).await {
                        net.spawn(this.clone().serve(net.clone(), stream));
                    }
                }
            }
        });
        backend
    }

    async fn serve(self: Rc<Backend>, net: Net, mut stream: ClientStream) {
        self.accepted.set(self.accepted.get() + 1);
        if self.mode.get() == Mode::ClosesAtOnce {
            return;
        }
        let _here = Here::new(&self);
        loop {
            let idle = match self.mode.get() {
                Mode::ClosesIdle(time) | Mode::HalfCloses(time) => time,
                _ => 10_000 * SECOND,
            };
            let Ok(next) = net.timeout(idle, stream.line()).await else {
                if let Mode::HalfCloses(_) = self.mode.get()
                    && stream.finish().is_ok()
                    && let Ok(Some(question)) = stream.line().await
                {
                    *self.heard.borrow_mut().entry(question).or_default() += 1;
                }
                return;
            };
            let Ok(Some(question)) = next else { return };
            *self.heard.borrow_mut().entry(question.clone()).or_default() += 1;
            match self.mode.get() {
                Mode::Dies | Mode::ClosesAtOnce => return,
                Mode::Silent => net.sleep(10_000 * SECOND).await,
                Mode::Slow(time) => net.sleep(time).await,
                _ => {}
            }
            let answer = if self.mode.get() == Mode::Twice { 2 } else { 1 };
            if stream.send(format!("{question}\n").repeat(answer)).await.is_err() {
                return;
            }
            if let Mode::Again(time) = self.mode.get() {
                net.sleep(time).await;
                let _ = stream.send("unasked\n").await;
            }
            if self.mode.get() == Mode::Stray {
                net.sleep(SECOND / 50).await;
                let _ = stream.send("once 9").await;
            }
        }
    }

    fn asked(&self) -> u32 {
        self.heard.borrow().values().sum()
    }
}

/// A connection of a backend.
struct Here(Rc<Backend>);

impl Here {
    fn new(backend: &Rc<Backend>) -> Here {
        backend.now.set(backend.now.get() + 1);
        backend.most.set(backend.most.get().max(backend.now.get()));
        Here(backend.clone())
    }
}

impl Drop for Here {
    fn drop(&mut self) {
        self.0.now.set(self.0.now.get() - 1);
    }
}

fn backends(sim: &Sim, count: usize) -> Vec<Rc<Backend>> {
    ADDRS[..count].iter().map(|addr| Backend::start(sim, addr)).collect()
}

fn upstream(count: usize) -> Upstream {
    Upstream::new("answers", ADDRS[..count].iter().copied())
}

/// Asks, and waits for what comes back.
async fn asks(me: &mut ClientStream, question: &str) -> io::Result<String> {
    me.send(format!("{question}\n")).await?;
    me.line().await?.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

fn sum(upstream: &Upstream, of: fn(&BackendStats) -> u64) -> u64 {
    upstream.stats().backends.iter().map(of).sum()
}

/// No question was heard twice but those that may be.
fn heard_once(backends: &[Rc<Backend>]) {
    let mut all: BTreeMap<String, u32> = BTreeMap::new();
    for backend in backends {
        for (question, times) in backend.heard.borrow().iter() {
            *all.entry(question.clone()).or_default() += times;
        }
    }
    let twice: Vec<_> =
        all.iter().filter(|(question, times)| question.starts_with("once") && **times > 1).collect();
    assert!(twice.is_empty(), "{twice:?}");
}
