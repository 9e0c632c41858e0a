//! Services around services that keep something for each connection: alone, and in simulations by
//! seed.

use std::cell::{Cell, RefCell};
use std::convert::Infallible;
use std::ptr;
use std::rc::Rc;
use std::time::Duration;

use ringserve_server::framing::{FrameError, Lines};
use ringserve_server::middleware::{AdaptiveLimit, Gradient2};
use ringserve_server::testing::{Faults, Sim, TestConn};
use ringserve_server::{CloseCx, Cx, Failure, Frame, Limits, OpenCx, Refusal, Server, Service, Session};

/// Counts the calls of each connection, answers the one after `calls_max` with "enough", and
/// closes.
struct Allowance<S> {
    service: S,
    calls_max: u64,
    seen: Rc<Seen>,
}

/// The part that a connection used of its allowance, and the session of the service inside.
struct Used<T> {
    calls: Cell<u64>,
    inner: T,
}

impl<T: Session> Session for Used<T> {}

/// The counts of all layers together.
#[derive(Default)]
struct Seen {
    opened: Cell<u64>,
    closed: Cell<u64>,
    refused: Cell<u64>,
}

fn add_one(count: &Cell<u64>) {
    count.set(count.get() + 1);
}

impl<S: Service> Allowance<S> {
    fn new(service: S, calls_max: u64, seen: &Rc<Seen>) -> Allowance<S> {
        Allowance { service, calls_max, seen: seen.clone() }
    }
}

impl<S: Service> Service for Allowance<S> {
    type Session = Used<S::Session>;
    type Error = S::Error;
    const ACCOUNTS: bool = S::ACCOUNTS;

    async fn open(&self, opening: &OpenCx<'_>) -> Result<Self::Session, Refusal> {
        let inner = self.service.open(opening).await?;
        add_one(&self.seen.opened);
        Ok(Used { calls: Cell::new(0), inner })
    }

    async fn call(&self, cx: &Cx<'_, Self::Session>, frame: Frame) -> Result<(), S::Error> {
        let used = cx.session();
        if used.calls.get() == self.calls_max {
            add_one(&self.seen.refused);
            cx.reply("enough");
            cx.close();
            return Ok(());
        }
        add_one(&used.calls);
        let inside = cx.map_session(|used| &used.inner);
        assert_eq!((inside.id(), inside.peer()), (cx.id(), cx.peer()));
        assert!(ptr::eq(inside.session(), &used.inner));
        self.service.call(&inside, frame).await
    }

    fn malformed(&self, cx: &Cx<'_, Self::Session>, error: &FrameError) {
        self.service.malformed(&cx.map_session(|used| &used.inner), error);
    }

    fn failed(&self, cx: &Cx<'_, Self::Session>, failure: &Failure<'_, S::Error>) {
        self.service.failed(&cx.map_session(|used| &used.inner), failure);
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
        assert!(closed.session().calls.get() <= self.calls_max);
        add_one(&self.seen.closed);
        let inside = closed.map_session(|used| &used.inner);
        assert_eq!((inside.id(), inside.peer()), (closed.id(), closed.peer()));
        assert_eq!((inside.reason(), inside.account()), (closed.reason(), closed.account()));
        self.service.close(&inside);
    }
}

/// Adds up what each connection sends, a number in each frame, and answers with the sum, after a
/// while for odd numbers.
#[derive(Clone, Default)]
struct Sums {
    /// The calls and the sum of each connection that ended.
    ended: Rc<RefCell<Vec<(u64, u64)>>>,
}

/// Made by `open` alone.
struct Sum {
    calls: Cell<u64>,
    sum: Cell<u64>,
}

impl Session for Sum {}

impl Service for Sums {
    type Session = Sum;
    type Error = Infallible;
    const ACCOUNTS: bool = true;

    async fn open(&self, opening: &OpenCx<'_>) -> Result<Sum, Refusal> {
        match opening.shard().random() % 8 {
            0 => return Err(Refusal::new("as it was drawn")),
            1..4 => opening.sleep(Duration::from_millis(opening.shard().random() % 3000)).await,
            _ => {}
        }
        Ok(Sum { calls: Cell::new(0), sum: Cell::new(0) })
    }

    async fn call(&self, cx: &Cx<'_, Sum>, frame: Frame) -> Result<(), Infallible> {
        let number: u64 = String::from_utf8_lossy(&frame).parse().expect("a number");
        let before = cx.session();
        if number % 2 == 1 {
            cx.sleep(Duration::from_millis(cx.shard().random() % 3000)).await;
        }
        cx.ready().await;
        assert!(ptr::eq(cx.session(), before), "also after a wait");
        add_one(&cx.session().calls);
        cx.session().sum.set(cx.session().sum.get() + number);
        cx.reply(cx.session().sum.get().to_string());
        Ok(())
    }

    fn malformed(&self, cx: &Cx<'_, Sum>, _error: &FrameError) {
        cx.reply(format!("malformed after {}", cx.session().sum.get()));
    }

    fn draining(&self, cx: &Cx<'_, Sum>) {
        cx.reply(format!("goodbye at {}", cx.session().sum.get()));
    }

    fn close(&self, closed: &CloseCx<'_, Sum>) {
        assert!(closed.account().is_some(), "the account of the connection");
        self.ended.borrow_mut().push((closed.session().calls.get(), closed.session().sum.get()));
    }
}

fn lines() -> Server<Lines> {
    Server::bind("10.0.0.1:7000").framing(Lines::default())
}

/// Says hello from a task of the connection, a second after each frame.
struct Greets;

impl Service for Greets {
    type Session = Cell<u64>;
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, Cell<u64>>, frame: Frame) -> Result<(), Infallible> {
        add_one(cx.session());
        cx.reply(frame);
        let (handle, shard, calls) = (cx.local_handle(), cx.shard().clone(), cx.session().get());
        cx.spawn_on_connection(async move {
            shard.sleep(Duration::from_secs(1)).await;
            handle.push(format!("hello {calls}").as_bytes()).expect("the connection is open");
        })
        .expect("few tasks");
        Ok(())
    }
}

#[test]
fn projected_cx_has_the_tasks_and_handles_of_its_connection() {
    let seen = Rc::new(Seen::default());
    let for_layer = seen.clone();
    let mut conn = TestConn::open(move |_shard| Allowance::new(Greets, 2, &for_layer));
    assert_eq!(conn.call("a").replies, [b"a"]);
    conn.pass(Duration::from_secs(2));
    assert_eq!(conn.replies(), [b"hello 1"]);
    assert_eq!(conn.call("b").replies, [b"b"]);
    // The task that would say hello ends with the connection.
    assert_eq!(conn.call("c").replies, [b"enough"]);
    assert!(conn.is_closed());
    assert_eq!((seen.opened.get(), seen.refused.get(), seen.closed.get()), (1, 1, 1));
    conn.pass(Duration::from_secs(2));
    assert!(conn.replies().is_empty());
}

#[test]
fn layers_keep_their_sessions_around_calls_that_wait() {
    let (calls, refusals) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(0)));
    let (all_calls, all_refusals) = (calls.clone(), refusals.clone());
    Sim::seeds(150).faults(Faults::all()).run(move |sim| {
        let (sums, outer, inner) = (Sums::default(), Rc::new(Seen::default()), Rc::new(Seen::default()));
        let (service, seen) = (sums.clone(), (outer.clone(), inner.clone()));
        let addr = sim.serve(lines().shards(2), move |_shard| {
            Allowance::new(Allowance::new(service.clone(), 8, &seen.1), 6, &seen.0)
        });
        for n in 0..6 {
            sim.client(format!("c{n}"), async move |net| {
                let mut me = net.connect(addr).await?;
                // The last ones send more than they may.
                let (mut sum, numbers) = (0, (0..n + 3).map(|_| net.random() % 100).collect::<Vec<_>>());
                let text: String = numbers.iter().map(|number| format!("{number}\n")).collect();
                me.send(text).await?;
                for number in numbers.iter().take(6) {
                    sum += number;
                    match me.line().await? {
                        Some(line) => assert_eq!(line, sum.to_string()),
                        None => return Ok(()),
                    }
                }
                if numbers.len() > 6 {
                    assert_eq!(me.line().await?.as_deref(), Some("enough"));
                }
                Ok(())
            });
        }
        sim.run_until_done();
        sim.finish();
        assert_eq!((outer.opened.get(), inner.opened.get()), (outer.closed.get(), inner.closed.get()));
        assert_eq!(outer.opened.get(), inner.opened.get());
        let ended = sums.ended.borrow();
        assert_eq!(ended.len() as u64, outer.closed.get(), "each is closed for every layer");
        assert!(ended.iter().all(|(calls, _)| *calls <= 6), "{ended:?}");
        assert_eq!(inner.refused.get(), 0, "the outer one refuses first");
        all_calls.set(all_calls.get() + ended.iter().map(|(calls, _)| calls).sum::<u64>());
        all_refusals.set(all_refusals.get() + outer.refused.get());
    });
    assert!(calls.get() > 1000 && refusals.get() > 100, "{} calls, {} refused", calls.get(), refusals.get());
}

#[test]
fn hooks_of_a_service_inside_have_its_own_session() {
    Sim::seeds(50).run(|sim| {
        let seen = Rc::new(Seen::default());
        let server = lines().limits(Limits::default().frame_bytes_max(64));
        let addr = sim.serve(server, move |_shard| Allowance::new(Sums::default(), 10, &seen));
        let answered = Rc::new(Cell::new(0));
        for name in ["stays", "breaks"] {
            let answered = answered.clone();
            sim.client(name, async move |net| {
                let mut me = net.connect(addr).await?;
                me.send("7\n").await?;
                let line = me.line().await?;
                answered.set(answered.get() + 1);
                if line.is_none() {
                    // It was refused.
                    return Ok(());
                }
                assert_eq!(line.as_deref(), Some("7"));
                if name == "breaks" {
                    me.send("x".repeat(100)).await?;
                    assert_eq!(me.line().await?.as_deref(), Some("malformed after 7"));
                } else {
                    assert_eq!(me.line().await?.as_deref(), Some("goodbye at 7"));
                }
                assert_eq!(me.line().await?, None);
                Ok(())
            });
        }
        assert!(sim.run_until(Duration::from_secs(60), || answered.get() == 2));
        sim.run_for(Duration::from_secs(1));
        sim.drain();
        sim.run_until_done();
    });
}

/// A database that does `AT_ONCE` questions at the same time, each in 10 ms, and has the others
/// wait in a queue.
#[derive(Clone, Default)]
struct Database {
    asked: Rc<Cell<usize>>,
    most: Rc<Cell<usize>>,
}

const AT_ONCE: usize = 30;

impl Service for Database {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Infallible> {
        self.asked.set(self.asked.get() + 1);
        self.most.set(self.most.get().max(self.asked.get()));
        let rounds = self.asked.get().div_ceil(AT_ONCE) as u32;
        cx.sleep(rounds * Duration::from_millis(10)).await;
        self.asked.set(self.asked.get() - 1);
        cx.reply(frame);
        Ok(())
    }
}

#[test]
fn adaptive_limit_stays_near_what_the_database_does_at_once() {
    Sim::seeds(1).run(|sim| {
        let database = Database::default();
        let behind = database.clone();
        let server = Server::bind("10.0.0.1:7000").framing(Lines::default()).shards(1);
        let addr =
            sim.serve(server, move |_shard| AdaptiveLimit::new(behind.clone(), Gradient2::within(5, 500)));
        for n in 0..200 {
            sim.client(format!("c{n}"), async move |net| {
                let mut me = net.connect(addr).await?;
                for _ in 0..60 {
                    me.send("question\n").await?;
                    assert_eq!(me.line().await?.as_deref(), Some("question"));
                }
                Ok(())
            });
        }
        sim.run_until_done();
        sim.finish();
        let most = database.most.get();
        assert!((AT_ONCE..4 * AT_ONCE).contains(&most), "{most} at once, of 200 that ask");
    });
}
