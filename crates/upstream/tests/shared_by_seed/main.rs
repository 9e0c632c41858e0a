//! Clients whose calls share connections, on whole servers by seed, before backends that are slow, lie, end and come back.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::rc::Rc;
use std::time::Duration;

use ringserve::framing::Lines;
use ringserve::testing::{ClientStream, Faults, Net, Sim};
use ringserve::upstream::{Multiplexed, Pipelined, Request, Upstream, UpstreamError};
use ringserve::{Cx, Frame, Server, Service, Shard};

const SECOND: Duration = Duration::from_secs(1);
const MILLI: Duration = Duration::from_millis(1);
const ADDRS: [&str; 2] = ["10.0.0.11:80", "10.0.0.12:80"];

struct Idle;

impl Service for Idle {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, _cx: &Cx<'_, ()>, _frame: Frame) -> Result<(), Infallible> {
        Ok(())
    }
}

/// A client of one of the two kinds.
#[derive(Clone)]
enum Asks {
    InOrder(Pipelined<Lines>),
    ById(Multiplexed<Lines>),
}

impl Asks {
    fn new(upstream: &Upstream, shard: &Shard, by_id: bool) -> Asks {
        if !by_id {
            return Asks::InOrder(upstream.pipelined(shard, Lines::default()));
        }
        let id = |answer: &Frame| std::str::from_utf8(answer).ok()?.split(' ').next()?.parse().ok();
        let write = |id: u64, payload: &[u8], out: &mut Vec<u8>| {
            out.extend_from_slice(format!("{id} ").as_bytes());
            out.extend_from_slice(payload);
        };
        // So few that they begin again all the time.
        Asks::ById(upstream.multiplexed(shard, Lines::default(), id, write).id_max(40))
    }

    /// Asks, and returns the answer without its id.
    async fn ask(&self, request: Request<'_>) -> Result<String, UpstreamError> {
        let text = |answer: Frame| String::from_utf8(answer.to_vec()).unwrap();
        match self {
            Asks::InOrder(client) => client.ask(request).await.map(text),
            Asks::ById(client) => {
                let answer = text(client.ask(request).await?);
                Ok(answer.split_once(' ').unwrap().1.to_owned())
            }
        }
    }
}

/// A backend, and the faults that it has.
#[derive(Default)]
struct Backend {
    /// Of 100 questions, those where it does something bad.
    evil: Cell<u64>,
    is_down: Cell<bool>,
    is_silent: Cell<bool>,
    ends_idle: Cell<bool>,
    slow: Cell<bool>,
    /// One question at a time is asked, so that an answer too many is one to no question. Between two others it looks like the answer to the
    /// next one, without ids.
    is_asked_alone: Cell<bool>,
    answers_twice: Cell<bool>,
    accepted: Cell<usize>,
    heard: RefCell<BTreeMap<String, u32>>,
}

impl Backend {
    fn start(sim: &Sim, addr: &'static str) -> Rc<Backend> {
        let backend = Rc::new(Backend::default());
        let this = backend.clone();
        sim.background(addr, async move |net| {
            loop {
                while this.is_down.get() {
                    net.sleep(20 * MILLI).await;
                }
                let mut listener = net.listen(addr)?;
                while !this.is_down.get() {
                    if let Ok(stream) = net.timeout(20 * MILLI, listener.accept()).await {
                        this.accepted.set(this.accepted.get() + 1);
                        net.spawn(this.clone().serve(net.clone(), stream));
                    }
                }
            }
        });
        backend
    }

    async fn serve(self: Rc<Backend>, net: Net, mut stream: ClientStream) {
        loop {
            let idle = if self.ends_idle.get() { 300 * MILLI } else { 10_000 * SECOND };
            let Ok(Ok(Some(question))) = net.timeout(idle, stream.line()).await else { return };
            let number = question.rsplit(' ').next().unwrap().to_owned();
            *self.heard.borrow_mut().entry(number.clone()).or_default() += 1;
            if self.is_silent.get() {
                continue;
            }
            if self.slow.get() {
                net.sleep(MILLI * (net.random() % 400) as u32).await;
            }
            let id = question.split_once(' ').filter(|(id, _)| id.parse::<u64>().is_ok()).map(|(id, _)| id);
            let prefix = id.map_or(String::new(), |id| format!("{id} "));
            let answer = format!("{prefix}answer {number}\n");
            let is_evil = net.random() % 100 < self.evil.get();
            let said = match net.random() % 6 {
                _ if self.answers_twice.get() => answer.repeat(2),
                _ if !is_evil => answer,
                0 if id.is_some() || self.is_asked_alone.get() => answer.repeat(2),
                0 => answer,
                1 if id.is_some() => format!("99999 answer {number}\n"),
                1 | 2 => return,
                3 => {
                    stream.reset();
                    return;
                }
                4 if id.is_some() => "nonsense\n".to_owned(),
                4 => answer,
                _ => {
                    let _ = stream.send(&answer[..answer.len() / 2]).await;
                    return;
                }
            };
            if stream.send(said).await.is_err() || self.is_down.get() {
                return;
            }
        }
    }
}

/// Runs code with a client on a shard, until it is done.
fn run<C>(sim: &Sim, upstream: &Upstream, by_id: bool, code: C)
where
    C: AsyncFn(Shard, Asks) + 'static,
{
    let (code, is_done, upstream) = (Rc::new(code), Rc::new(Cell::new(false)), upstream.clone());
    let done = is_done.clone();
    let server = Server::bind("10.0.0.1:7000").framing(Lines::default());
    sim.serve(server, move |shard| {
        let asks = Asks::new(&upstream, shard, by_id);
        let (code, done, on) = (code.clone(), done.clone(), shard.clone());
        shard.spawn(async move {
            on.sleep(SECOND).await;
            code(on, asks).await;
            done.set(true);
        });
        Idle
    });
    assert!(sim.run_until(3600 * SECOND, || is_done.get()), "the code of the test does not end");
}

fn upstream(count: usize) -> Upstream {
    Upstream::new("answers", ADDRS[..count].iter().copied()).answer_timeout(2 * SECOND)
}

/// Asks much at once, drops some calls, and returns how many were answered.
async fn load(shard: &Shard, asks: &Asks, askers: u64, each: u64) -> u64 {
    let (left, answered) = (Rc::new(Cell::new(askers)), Rc::new(Cell::new(0)));
    for asker in 0..askers {
        let (asks, on, left, answered) = (asks.clone(), shard.clone(), left.clone(), answered.clone());
        shard.spawn(async move {
            for n in 0..each {
                let (number, again) = (format!("{asker}.{n}"), on.random().is_multiple_of(2));
                let question = format!("{} {number}", if again { "again" } else { "once" });
                let request = Request::new(&question);
                let request = if again { request.idempotent() } else { request };
                // A caller that leaves.
                let patience = if on.random().is_multiple_of(5) { 5 * MILLI } else { 60 * SECOND };
                if let Ok(Ok(answer)) = on.timeout(patience, asks.ask(request)).await {
                    assert_eq!(answer, format!("answer {number}"));
                    answered.set(answered.get() + 1);
                }
                if on.random().is_multiple_of(4) {
                    on.sleep(MILLI * (on.random() % 600) as u32).await;
                }
            }
            left.set(left.get() - 1);
        });
    }
    while left.get() > 0 {
        shard.sleep(SECOND).await;
    }
    answered.get()
}

#[test]
fn each_answer_is_that_of_its_question() {
    Sim::seeds(60).run(|sim| {
        let backends: Vec<_> = ADDRS.iter().map(|addr| Backend::start(sim, addr)).collect();
        for backend in &backends {
            backend.evil.set([0, 2, 10][sim.random() as usize % 3]);
            backend.slow.set(sim.random().is_multiple_of(2));
            backend.ends_idle.set(sim.random().is_multiple_of(2));
        }
        let (restarted, by_id) = (backends[0].clone(), sim.seed().is_multiple_of(2));
        sim.background("restarts", async move |net| {
            loop {
                net.sleep(MILLI * (net.random() % 3000) as u32).await;
                restarted.is_down.set(!restarted.is_down.get());
            }
        });
        run(sim, &upstream(2), by_id, async |shard, asks| {
            let answered = load(&shard, &asks, 12, 20).await;
            assert!(answered > 0, "none of 240 is answered");
        });
        let mut heard = BTreeMap::<String, u32>::new();
        for backend in &backends {
            for (number, times) in &*backend.heard.borrow() {
                *heard.entry(number.clone()).or_default() += times;
            }
        }
        // Tries of what may be asked twice are bounded, those of others are one: the load tells them apart by what it asked.
        assert!(heard.values().all(|times| *times <= 3), "{heard:?}");
    });
}

#[test]
fn question_that_is_asked_once_is_heard_once() {
    Sim::seeds(40).run(|sim| {
        let backends: Vec<_> = ADDRS.iter().map(|addr| Backend::start(sim, addr)).collect();
        backends.iter().for_each(|backend| {
            backend.evil.set(10);
            backend.is_asked_alone.set(true);
            backend.ends_idle.set(true);
        });
        let by_id = sim.seed().is_multiple_of(2);
        run(sim, &upstream(2), by_id, async |shard, asks| {
            for n in 0..100 {
                let question = format!("once {n}");
                if let Ok(answer) = asks.ask(Request::new(&question)).await {
                    assert_eq!(answer, format!("answer {n}"));
                }
                shard.sleep(MILLI * [0, 295, 305][shard.random() as usize % 3]).await;
            }
        });
        let mut heard = BTreeMap::<String, u32>::new();
        for backend in &backends {
            for (number, times) in &*backend.heard.borrow() {
                *heard.entry(number.clone()).or_default() += times;
            }
        }
        assert!(heard.values().all(|times| *times == 1), "{heard:?}");
    });
}

#[test]
fn dropped_calls_of_a_silent_backend_end_its_connection() {
    Sim::seeds(20).faults(Faults::harmless()).run(|sim| {
        let backend = Backend::start(sim, ADDRS[0]);
        backend.is_silent.set(true);
        let (by_id, silent) = (sim.seed().is_multiple_of(2), backend.clone());
        run(sim, &upstream(1), by_id, async move |shard, asks| {
            for n in 0..5 {
                let question = format!("once {n}");
                let asked = asks.ask(Request::new(&question));
                assert!(shard.timeout(100 * MILLI, asked).await.is_err());
            }
            assert_eq!(silent.accepted.get(), 1, "a caller that leaves costs no connection");
            silent.is_silent.set(false);
            shard.sleep(4 * SECOND).await;
            assert_eq!(asks.ask(Request::new("once 9")).await.unwrap(), "answer 9");
            assert_eq!(silent.accepted.get(), 2, "answers that are owed for too long end theirs");
        });
        assert_eq!(backend.heard.borrow().len(), 6);
    });
}

#[test]
fn one_connection_carries_many_questions() {
    Sim::seeds(20).faults(Faults::harmless()).run(|sim| {
        let backend = Backend::start(sim, ADDRS[0]);
        let by_id = sim.seed().is_multiple_of(2);
        run(sim, &upstream(1), by_id, async |shard, asks| {
            let done = Rc::new(Cell::new(0));
            for n in 0..30 {
                let (asks, done) = (asks.clone(), done.clone());
                shard.spawn(async move {
                    let question = format!("once {n}");
                    assert_eq!(asks.ask(Request::new(&question)).await.unwrap(), format!("answer {n}"));
                    done.set(done.get() + 1);
                });
            }
            while done.get() < 30 {
                shard.sleep(MILLI).await;
            }
        });
        assert_eq!(backend.accepted.get(), 1);
    });
}

#[test]
fn dead_connection_is_one_failure_and_one_attempt() {
    Sim::seeds(20).faults(Faults::harmless()).run(|sim| {
        let backends: Vec<_> = ADDRS.iter().map(|addr| Backend::start(sim, addr)).collect();
        backends[0].evil.set(0);
        let (by_id, upstream, dies) = (sim.seed().is_multiple_of(2), upstream(2), backends[0].clone());
        let stats = upstream.clone();
        run(sim, &upstream, by_id, async move |shard, asks| {
            dies.is_down.set(true);
            shard.sleep(SECOND).await;
            for round in 0..3 {
                let done = Rc::new(Cell::new(0));
                for n in 0..20 {
                    let (asks, done) = (asks.clone(), done.clone());
                    shard.spawn(async move {
                        let question = format!("again {round}.{n}");
                        let asked = asks.ask(Request::new(&question).idempotent()).await;
                        assert_eq!(asked.unwrap(), format!("answer {round}.{n}"));
                        done.set(done.get() + 1);
                    });
                }
                while done.get() < 20 {
                    shard.sleep(MILLI).await;
                }
            }
            let refused: u64 = stats.stats().backends.iter().map(|backend| backend.connects_failed).sum();
            assert!(refused <= 5, "{refused} attempts for 60 questions");
        });
    });
}

#[test]
fn answer_too_many_ends_its_connection() {
    Sim::seeds(20).faults(Faults::harmless()).run(|sim| {
        let backend = Backend::start(sim, ADDRS[0]);
        let (by_id, upstream, twice) = (sim.seed().is_multiple_of(2), upstream(1), backend.clone());
        twice.answers_twice.set(true);
        let stats = upstream.clone();
        run(sim, &upstream, by_id, async move |shard, asks| {
            assert_eq!(asks.ask(Request::new("once 1")).await.unwrap(), "answer 1");
            shard.sleep(SECOND).await;
            assert_eq!(stats.stats().backends[0].stray, 1);
            twice.answers_twice.set(false);
            assert_eq!(asks.ask(Request::new("once 2")).await.unwrap(), "answer 2");
        });
        assert_eq!(backend.accepted.get(), 2);
    });
}
