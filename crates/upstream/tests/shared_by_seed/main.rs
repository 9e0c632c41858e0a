//! Clients whose calls share connections, on whole servers by seed, before backends that are slow,
//! lie, end and come back.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use ringserve::framing::Lines;
use ringserve::net::Framed;
use ringserve::testing::{ClientStream, Faults, Net, Sim};
use ringserve::upstream::{Balance, Hedge, Multiplexed, Names, Pipelined, Request, Upstream, UpstreamError};
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

    fn connections_max(self, connections: usize) -> Asks {
        match self {
            Asks::InOrder(client) => Asks::InOrder(client.connections_max(connections)),
            Asks::ById(client) => Asks::ById(client.connections_max(connections)),
        }
    }

    fn setup(self, setup: impl AsyncFn(&mut Framed<Lines>) -> io::Result<()> + 'static) -> Asks {
        match self {
            Asks::InOrder(client) => Asks::InOrder(client.setup(setup)),
            Asks::ById(client) => Asks::ById(client.setup(setup)),
        }
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
    /// One question at a time is asked, so that an answer too many is one to no question. Between
    /// two others it looks like the answer to the next one, without ids.
    is_asked_alone: Cell<bool>,
    answers_twice: Cell<bool>,
    accepted: Cell<usize>,
    /// The times that each question was heard, by its kind and number.
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
            // Without its id.
            let kind = if question.contains("again ") { "again" } else { "once" };
            *self.heard.borrow_mut().entry(format!("{kind} {number}")).or_default() += 1;
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

/// The times that each question was heard, by all backends together.
fn heard(backends: &[Rc<Backend>]) -> BTreeMap<String, u32> {
    let mut all = BTreeMap::new();
    for backend in backends {
        for (question, times) in &*backend.heard.borrow() {
            *all.entry(question.clone()).or_default() += times;
        }
    }
    all
}

/// Runs code with a client on a shard, until it is done.
fn run<C>(sim: &Sim, upstream: &Upstream, by_id: bool, code: C)
where
    C: AsyncFn(Shard, Asks) + 'static,
{
    let is_done = begin(sim, upstream, by_id, code);
    assert!(sim.run_until(3600 * SECOND, || is_done.get()), "the code of the test does not end");
}

/// Begins code with a client on a shard. What it returns is true once that is done.
fn begin<C>(sim: &Sim, upstream: &Upstream, by_id: bool, code: C) -> Rc<Cell<bool>>
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
    is_done
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
        let most = |question: &str| if question.starts_with("again") { 3 } else { 1 };
        let heard = heard(&backends);
        assert!(heard.iter().all(|(question, times)| *times <= most(question)), "{heard:?}");
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
        let heard = heard(&backends);
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

#[test]
fn shared_connections_follow_the_addresses_of_a_name() {
    Sim::seeds(20).faults(Faults::harmless()).run(|sim| {
        let ip = |addr: &str| addr.parse::<SocketAddr>().unwrap().ip();
        let backends = ADDRS.map(|addr| Backend::start(sim, addr));
        sim.name("answers.internal", [ip(ADDRS[0])]);
        // The first question comes before the first answer, and waits for it.
        sim.name_takes("answers.internal", 2 * SECOND);
        let names = Names::new("answers.internal:80").refresh(5 * SECOND);
        let (upstream, by_id) = (Upstream::names("answers", names), sim.seed().is_multiple_of(2));
        let is_moved = Rc::new(Cell::new(false));
        let goes_on = is_moved.clone();
        let is_done = begin(sim, &upstream, by_id, async move |shard, asks| {
            assert_eq!(asks.ask(Request::new("once 1")).await.unwrap(), "answer 1");
            while !goes_on.get() {
                shard.sleep(SECOND).await;
            }
            assert_eq!(asks.ask(Request::new("once 2")).await.unwrap(), "answer 2");
        });
        sim.run_for(4 * SECOND);
        sim.name("answers.internal", [ip(ADDRS[1])]);
        sim.run_for(10 * SECOND);
        is_moved.set(true);
        assert!(sim.run_until(10 * SECOND, || is_done.get()), "the code of the test does not end");
        assert_eq!(backends.map(|backend| backend.heard.borrow().len()), [1, 1]);
    });
}

/// Teaches the client that backends end idle connections after 300 ms.
async fn learn(shard: &Shard, asks: &Asks) {
    for n in 0..4 {
        let question = format!("once learn.{n}");
        assert_eq!(asks.ask(Request::new(&question)).await.unwrap(), format!("answer learn.{n}"));
        shard.sleep(400 * MILLI).await;
    }
}

#[test]
fn connection_about_to_end_makes_room_for_another_one() {
    Sim::seeds(20).run(|sim| {
        let backend = Backend::start(sim, ADDRS[0]);
        backend.ends_idle.set(true);
        let by_id = sim.seed().is_multiple_of(2);
        run(sim, &upstream(1), by_id, async |shard, asks| {
            let asks = asks.connections_max(1);
            learn(&shard, &asks).await;
            for n in 0..20 {
                let question = format!("once {n}");
                assert_eq!(asks.ask(Request::new(&question)).await.unwrap(), format!("answer {n}"));
                // The last tenth of the time in which it is idle.
                shard.sleep(MILLI * (250 + shard.random() % 60) as u32).await;
            }
        });
        assert!(heard(&[backend]).values().all(|times| *times == 1));
    });
}

#[test]
fn time_learned_for_shared_connections_is_forgotten() {
    Sim::seeds(20).run(|sim| {
        let backend = Backend::start(sim, ADDRS[0]);
        backend.ends_idle.set(true);
        let (by_id, keeps) = (sim.seed().is_multiple_of(2), backend.clone());
        run(sim, &upstream(1), by_id, async move |shard, asks| {
            learn(&shard, &asks).await;
            keeps.ends_idle.set(false);
            for n in 0..100 {
                if n == 20 {
                    keeps.accepted.set(0);
                }
                let question = format!("once {n}");
                assert_eq!(asks.ask(Request::new(&question)).await.unwrap(), format!("answer {n}"));
                shard.sleep(290 * MILLI).await;
            }
        });
        assert_eq!(backend.accepted.get(), 0, "connections are made though all are kept");
    });
}

#[test]
fn quiet_shard_says_what_it_has() {
    Sim::seeds(20).faults(Faults::harmless()).run(|sim| {
        let backend = Backend::start(sim, ADDRS[0]);
        backend.slow.set(true);
        let (by_id, upstream) = (sim.seed().is_multiple_of(2), upstream(1).answer_timeout(20 * SECOND));
        let stats = upstream.clone();
        run(sim, &upstream, by_id, async move |shard, asks| {
            let left = Rc::new(Cell::new(11));
            for n in 0..11 {
                let (asks, left) = (asks.clone(), left.clone());
                shard.spawn(async move {
                    let question = format!("once {n}");
                    assert_eq!(asks.ask(Request::new(&question)).await.unwrap(), format!("answer {n}"));
                    left.set(left.get() - 1);
                });
                shard.sleep(2 * MILLI).await;
            }
            while left.get() > 0 {
                shard.sleep(MILLI).await;
            }
            shard.sleep(2 * SECOND).await;
            let told = &stats.stats().backends[0];
            assert_eq!((told.requests, told.answers, told.in_flight), (11, 11, 0));
            assert_eq!((told.connections, told.idle), (1, 1));
        });
    });
}

#[test]
fn setup_that_panics_is_a_failed_attempt() {
    Sim::seeds(20).allow_panics(|said| said.contains("planted")).run(|sim| {
        let _backend = Backend::start(sim, ADDRS[0]);
        let by_id = sim.seed().is_multiple_of(2);
        run(sim, &upstream(1), by_id, async |_shard, asks| {
            let attempts = Cell::new(0);
            let asks = asks.setup(async move |_: &mut Framed<Lines>| {
                attempts.set(attempts.get() + 1);
                assert!(attempts.get() > 1, "planted: a setup panics");
                Ok(())
            });
            let failed = asks.ask(Request::new("once 1")).await;
            assert!(matches!(failed, Err(UpstreamError::Failed(_))), "{failed:?}");
            assert_eq!(asks.ask(Request::new("once 2")).await.unwrap(), "answer 2");
        });
    });
}

#[test]
fn id_that_panics_ends_the_connection() {
    Sim::seeds(20).allow_panics(|said| said.contains("planted")).run(|sim| {
        let backend = Backend::start(sim, ADDRS[0]);
        let upstream = upstream(1);
        let (stats, addr) = (upstream.clone(), "10.0.0.1:7000".parse::<SocketAddr>().unwrap());
        let is_done = Rc::new(Cell::new(false));
        let done = is_done.clone();
        sim.serve(Server::bind(addr).framing(Lines::default()), move |shard| {
            let id = |answer: &Frame| {
                let text = String::from_utf8(answer.to_vec()).unwrap();
                assert!(!text.ends_with(" 1"), "planted: an id panics");
                text.split(' ').next()?.parse().ok()
            };
            let write = |id: u64, payload: &[u8], out: &mut Vec<u8>| {
                assert!(payload != b"once 3", "planted: a question panics");
                out.extend_from_slice(format!("{id} ").as_bytes());
                out.extend_from_slice(payload);
            };
            let asks = upstream.multiplexed(shard, Lines::default(), id, write);
            let (on, stats, done) = (shard.clone(), stats.clone(), done.clone());
            shard.spawn(async move {
                on.sleep(SECOND).await;
                let failed = asks.ask(Request::new("once 1")).await;
                assert!(matches!(failed, Err(UpstreamError::Failed(_))), "{failed:?}");
                assert!(asks.ask(Request::new("once 2")).await.is_ok());
                let asking = asks.clone();
                assert!(on.spawn(async move { asking.ask("once 3").await.map(drop) }).await.is_err());
                on.sleep(2 * SECOND).await;
                let told = &stats.stats().backends[0];
                assert_eq!(
                    (told.connections, told.idle),
                    (1, 1),
                    "a question that was not asked is under way"
                );
                done.set(true);
            });
            Idle
        });
        assert!(sim.run_until(60 * SECOND, || is_done.get()), "the code of the test does not end");
        assert_eq!(backend.accepted.get(), 2);
    });
}

#[test]
fn equal_keys_meet_on_shared_connections() {
    Sim::seeds(10).faults(Faults::harmless()).run(|sim| {
        let backends = ADDRS.map(|addr| Backend::start(sim, addr));
        let by_id = sim.seed().is_multiple_of(2);
        run(sim, &upstream(2), by_id, async |_shard, asks| {
            for n in 0..80 {
                let question = format!("once {n}");
                let request = Request::new(&question).key(format!("tenant {}", n % 8));
                assert_eq!(asks.ask(request).await.unwrap(), format!("answer {n}"));
            }
        });
        let mut places = BTreeMap::<u32, Vec<usize>>::new();
        for (place, backend) in backends.iter().enumerate() {
            for question in backend.heard.borrow().keys() {
                let number: u32 = question[5..].parse().unwrap();
                places.entry(number % 8).or_default().push(place);
            }
        }
        assert!(places.values().all(|places| places.iter().all(|place| *place == places[0])), "{places:?}");
        assert!(backends.iter().all(|backend| !backend.heard.borrow().is_empty()));
    });
}

#[test]
fn late_answer_is_had_from_a_second_backend() {
    Sim::seeds(10).run(|sim| {
        let backends: Vec<_> = ADDRS.iter().map(|addr| Backend::start(sim, addr)).collect();
        let upstream = upstream(2).balance(Balance::RoundRobin).hedge(Hedge::default().budget_of(100));
        let (by_id, stats, silent) = (sim.seed().is_multiple_of(2), upstream.clone(), backends[0].clone());
        backends.iter().for_each(|backend| backend.slow.set(true));
        run(sim, &upstream, by_id, async move |shard, asks| {
            for n in 0..200 {
                asks.ask(Request::new(&format!("again {n}")).idempotent()).await.unwrap();
            }
            silent.is_silent.set(true);
            for n in 200..220 {
                let (question, begun) = (format!("again {n}"), shard.now());
                let answer = asks.ask(Request::new(&question).idempotent()).await;
                assert_eq!(answer.unwrap(), format!("answer {n}"));
                assert!(shard.now() - begun < SECOND, "it waits for one that says nothing");
            }
            assert!(stats.stats().hedges > 0);
        });
    });
}
