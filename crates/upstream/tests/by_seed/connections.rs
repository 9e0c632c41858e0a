//! Connections of any protocol: their setup, who is asked where one is not to be had, and their
//! tries.

use std::task::{Context, Poll};

use ringserve::net::Framed;
use ringserve::testing::Faults;
use ringserve::upstream::{
    Backend as Address, Balance, Connection, Connections, IdleEvent, Outcome, PoolLimits, UpstreamError,
};
use ringserve::{Shard, Stream};

use super::*;

/// A connection whose protocol is written by hand: a greeting, and then lines.
struct Plain {
    stream: Stream,
    is_greeted: bool,
}

impl Connection for Plain {
    fn poll_idle(&mut self, task: &mut Context<'_>) -> Poll<IdleEvent> {
        match self.stream.poll_read_frame(task) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(Ok(Some(_))) => Poll::Ready(IdleEvent::Stray),
            Poll::Ready(_) => Poll::Ready(IdleEvent::Ended),
        }
    }
}

impl Plain {
    async fn exchange(&mut self, question: &[u8]) -> Result<Vec<u8>, Outcome> {
        self.stream.queue(question);
        self.stream.queue(b"\n");
        let mut answer = Vec::new();
        while answer.last() != Some(&b'\n') {
            match self.stream.read_frame().await {
                Ok(Some(bytes)) => answer.extend_from_slice(&bytes),
                Ok(None) | Err(_) => return Err(Outcome::Lost),
            }
        }
        answer.pop();
        Ok(answer)
    }
}

/// Asks as [`Front`] does, over connections whose protocol is written by hand.
struct PlainFront(Connections<Plain>);

impl PlainFront {
    fn new(upstream: &Upstream, shard: &Shard) -> PlainFront {
        PlainFront(upstream.connections(
            shard,
            async |stream: Stream, backend: &Address| -> io::Result<Plain> {
                assert!(ADDRS.contains(&backend.name()));
                let mut plain = Plain { stream, is_greeted: false };
                let greeting = plain.exchange(b"hello").await;
                plain.is_greeted = greeting.is_ok_and(|answer| answer == b"hello");
                if plain.is_greeted { Ok(plain) } else { Err(io::ErrorKind::PermissionDenied.into()) }
            },
        ))
    }

    async fn ask(&self, shard: &Shard, question: &[u8]) -> Result<Vec<u8>, UpstreamError> {
        let call = self.0.call();
        let mut call = if question.starts_with(b"again") { call.idempotent() } else { call };
        loop {
            let mut plain = call.take().await?;
            assert!(plain.is_greeted);
            let asked = shard.timeout(call.left(), plain.exchange(question)).await;
            match asked.unwrap_or(Err(Outcome::TimedOut)) {
                Ok(answer) => {
                    plain.finish(Outcome::Answered);
                    plain.give_back();
                    return Ok(answer);
                }
                Err(outcome) => call.retry(&mut plain, outcome)?,
            }
        }
    }
}

impl Service for PlainFront {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, question: Frame) -> Result<(), Infallible> {
        match self.ask(cx.shard(), &question).await {
            Ok(answer) => cx.reply(answer),
            Err(error) => cx.reply(format!("no answer: {error}")),
        }
        Ok(())
    }
}

#[test]
fn protocol_by_hand_has_its_own_answers_whatever_breaks() {
    Sim::seeds(20).faults(Faults::harmless()).run(|sim| {
        let backends = backends(sim, 3);
        let upstream = upstream(3).answer_timeout(2 * SECOND);
        let (of_front, addr) = (upstream.clone(), FRONT.parse::<SocketAddr>().unwrap());
        let server = Server::bind(addr).framing(Lines::default()).shards(2);
        let _server = sim.start(server, move |shard| PlainFront::new(&of_front, shard)).unwrap();
        sim.run_for(SECOND / 10);
        for client in 0..4 {
            sim.client(format!("c{client}"), async move |net| {
                let mut me = net.connect(FRONT).await?;
                for n in 0..30 {
                    let kind = ["once", "again"][net.random() as usize % 2];
                    let question = format!("{kind} {client}.{n}");
                    let answer = asks(&mut me, &question).await?;
                    assert!(answer == question || answer.starts_with("no answer: "), "{question}: {answer}");
                    net.sleep(Duration::from_millis(net.random() % 100)).await;
                }
                Ok(())
            });
        }
        let modes = [Mode::Answers, Mode::Refuses, Mode::Silent, Mode::Dies, Mode::ClosesIdle(SECOND / 50)];
        for _ in 0..12 {
            sim.run_for(SECOND / 4);
            backends[sim.random() as usize % 3].mode.set(modes[sim.random() as usize % modes.len()]);
        }
        backends.iter().for_each(|backend| backend.mode.set(Mode::Answers));
        sim.run_until_done();
        heard_once(&backends);
        sim.run_for(2 * SECOND);
        assert_eq!(sum(&upstream, |backend| backend.in_flight), 0);
    });
}

/// A front that greets its backends.
pub(super) fn greeting_front(sim: &Sim, upstream: &Upstream) -> SimServer {
    let (upstream, addr) = (upstream.clone(), FRONT.parse::<SocketAddr>().unwrap());
    let server = Server::bind(addr).framing(Lines::default());
    let server = sim.start(server, move |shard| {
        let answers = upstream.exclusive(shard, Lines::default());
        let answers = answers.setup(async |connection: &mut Framed<Lines>| {
            connection.queue(b"hello").map_err(io::Error::other)?;
            match connection.next().await {
                Some(Ok(answer)) if *answer == *b"hello" => Ok(()),
                _ => Err(io::ErrorKind::PermissionDenied.into()),
            }
        });
        Front { answers }
    });
    sim.run_for(SECOND / 10);
    server.unwrap()
}

#[test]
fn connection_is_set_up_once_before_its_questions() {
    Sim::seeds(10).faults(Faults::harmless()).run(|sim| {
        let backends = backends(sim, 1);
        let upstream = upstream(1);
        let _front = greeting_front(sim, &upstream);
        for client in 0..3 {
            sim.client(format!("c{client}"), async move |net| {
                let mut me = net.connect(FRONT).await?;
                for n in 0..10 {
                    let question = format!("once {client}.{n}");
                    assert_eq!(asks(&mut me, &question).await?, question);
                }
                Ok(())
            });
        }
        sim.run_until_done();
        // One for which no question is left may still be without its greeting.
        sim.run_for(SECOND);
        let greeted = backends[0].heard.borrow().get("hello").copied();
        assert_eq!(greeted, Some(backends[0].accepted.get() as u32));
        assert_eq!(backends[0].asked(), 30 + backends[0].accepted.get() as u32);
        // One whose answer overtakes the end of its send is not kept.
        let closed = sum(&upstream, |backend| backend.stray);
        assert!(backends[0].accepted.get() as u64 <= 3 + closed);
    });
}

#[test]
fn setup_that_hangs_or_fails_is_a_failed_connection() {
    for mode in [Mode::Silent, Mode::Dies] {
        Sim::seeds(5).run(|sim| {
            let backends = backends(sim, 2);
            backends[0].mode.set(mode);
            let upstream = upstream(2).connect_timeout(SECOND / 2);
            let _front = greeting_front(sim, &upstream);
            sim.client("c", async move |net| {
                let mut me = net.connect(FRONT).await?;
                for n in 0..10 {
                    let (question, begun) = (format!("once {n}"), net.now());
                    assert_eq!(asks(&mut me, &question).await?, question);
                    assert!(net.now() - begun < SECOND, "a setup has the time of a connection");
                    net.sleep(4 * SECOND).await;
                }
                Ok(())
            });
            sim.run_until_done();
            let stats = &upstream.stats().backends[0];
            assert!(stats.connects_failed > 0 && stats.failures > 0);
            assert_eq!((stats.connects, stats.lost), (0, 0));
        });
    }
}

#[test]
fn call_without_room_at_a_backend_is_for_another_one() {
    Sim::seeds(20).run(|sim| {
        let backends = backends(sim, 2);
        let limits = PoolLimits::default().connections_max(1).waiting_max(1).wait_max(SECOND);
        let upstream = upstream(2).pool(limits).balance(Balance::RoundRobin).answer_timeout(9 * SECOND);
        front(sim, &upstream, 1);
        sim.client("warms", async move |net| {
            let mut me = net.connect(FRONT).await?;
            for n in 0..8 {
                asks(&mut me, &format!("once warm.{n}")).await?;
            }
            Ok(())
        });
        sim.run_until_done();
        backends[0].mode.set(Mode::Silent);
        let failed = Rc::new(Cell::new(0));
        for client in 0..12 {
            let failed = failed.clone();
            sim.client(format!("c{client}"), async move |net| {
                net.sleep(SECOND / 20 * client).await;
                let (question, begun) = (format!("once {client}"), net.now());
                let mut me = net.connect(FRONT).await?;
                if asks(&mut me, &question).await? != question {
                    failed.set(failed.get() + 1);
                } else {
                    assert!(net.now() - begun < SECOND + SECOND / 2);
                }
                Ok(())
            });
        }
        sim.run_until_done();
        assert_eq!(failed.get(), 1, "the one that reached the silent backend");
    });
}

/// A connection that panics when it is looked at, once.
struct Bomb {
    plain: Plain,
    is_armed: Rc<Cell<bool>>,
}

impl Connection for Bomb {
    fn poll_idle(&mut self, task: &mut Context<'_>) -> Poll<IdleEvent> {
        assert!(!self.is_armed.take(), "planted: an idle connection panics");
        self.plain.poll_idle(task)
    }
}

#[test]
fn connection_that_panics_costs_no_other_one() {
    Sim::seeds(10).allow_panics(|said| said.contains("planted")).run(|sim| {
        let backends = backends(sim, 1);
        backends[0].mode.set(Mode::ClosesIdle(2 * SECOND));
        let (upstream, is_done) = (upstream(1), Rc::new(Cell::new(false)));
        let (done, stats, addr) = (is_done.clone(), upstream.clone(), FRONT.parse::<SocketAddr>().unwrap());
        sim.serve(Server::bind(addr).framing(Lines::default()), move |shard| {
            let (is_armed, may_begin) = (Rc::new(Cell::new(false)), Cell::new(false));
            let armed = is_armed.clone();
            let client = upstream.connections(shard, async move |stream: Stream, _: &Address| {
                assert!(may_begin.replace(true), "planted: a setup panics");
                Ok(Bomb { plain: Plain { stream, is_greeted: true }, is_armed: armed.clone() })
            });
            let (on, done, stats) = (shard.clone(), done.clone(), stats.clone());
            shard.spawn(async move {
                on.sleep(SECOND / 2).await;
                let begun = on.now();
                let failed = client.call().take().await.map(drop);
                assert!(matches!(failed, Err(UpstreamError::Failed(_))), "{failed:?}");
                assert!(on.now() - begun < SECOND, "a call waits for what panicked");
                client.call().take().await.unwrap().give_back();
                is_armed.set(true);
                on.sleep(2 * SECOND).await;
                assert!(!is_armed.get());
                client.call().take().await.unwrap().give_back();
                on.sleep(5 * SECOND).await;
                assert_eq!(
                    stats.stats().backends[0].connections,
                    0,
                    "none sees the end of an idle connection"
                );
                done.set(true);
            });
            PlainFront::new(&upstream, shard)
        });
        assert!(sim.run_until(60 * SECOND, || is_done.get()), "the code of the test does not end");
    });
}
