//! Publish and subscribe: in simulations, by seed.

use std::cell::{Cell, RefCell};
use std::convert::Infallible;
use std::rc::Rc;
use std::time::{Duration, Instant};

use ringserve::framing::Lines;
use ringserve::service::{OpenCx, Refusal, Session};
use ringserve::sync::Mesh;
use ringserve::testing::{Faults, Sim, SimServer};
use ringserve::topics::listeners::{Listeners, LocalSubscriber};
use ringserve::{Cx, Frame, Server, Service};

const SECOND: Duration = Duration::from_secs(1);
const WAITING_BYTES_MAX: usize = 1 << 20;

/// `+topic` subscribes, `-topic` ends it, `-` ends all, `loud` has messages come in capital
/// letters, `topic text` publishes, `*t text` to each topic that begins so, `empty topic` a
/// thousand messages without a byte. `crowd count` subscribes that number of connections to one
/// topic, and leave one by one.
struct News {
    topics: Listeners<String, bool>,
    published: Mesh<String, usize>,
}

struct Reader(LocalSubscriber<String, bool>);
impl Session for Reader {}

impl Service for News {
    type Session = Reader;
    type Error = Infallible;

    async fn open(&self, opening: &OpenCx<'_>) -> Result<Reader, Refusal> {
        Ok(Reader(self.topics.subscriber(opening.local_handle(), false)))
    }

    async fn call(&self, cx: &Cx<'_, Reader>, line: Frame) -> Result<(), Infallible> {
        let (line, me) = (String::from_utf8_lossy(&line).into_owned(), &cx.session().0);
        let said = match line.split_at(1) {
            ("+", topic) => me.subscribe(topic.to_owned()).to_string(),
            ("-", "") => {
                me.unsubscribe_all();
                me.count().to_string()
            }
            ("-", topic) => me.unsubscribe(&topic.to_owned()).to_string(),
            _ if line.starts_with("crowd ") => self.crowd(cx, line[6..].parse().unwrap()),
            _ if line == "loud" => {
                me.set_form(true);
                format!("{} {:?}", me.form(), me.topics())
            }
            _ => {
                let told = self.published.ask_all(|_shard| line.clone()).await;
                told.into_iter().map(|told| told.unwrap_or(0)).sum::<usize>().to_string()
            }
        };
        cx.reply(format!("= {said}"));
        Ok(())
    }
}

impl News {
    /// The subscribers of a topic when all but each hundredth of these have left, and when all
    /// have.
    fn crowd(&self, cx: &Cx<'_, Reader>, count: usize) -> String {
        let topic = "crowd".to_owned();
        let subscriber = |_| self.topics.subscriber(cx.local_handle(), false);
        let (crowd, mut leave): (Vec<_>, Vec<_>) =
            (0..count).map(|n| (n, subscriber(n))).partition(|(n, _)| n % 100 == 0);
        let mut all: Vec<_> = crowd.iter().chain(&leave).collect();
        all.sort_by_key(|(n, _)| *n);
        assert!(all.iter().all(|(_, one)| one.subscribe(topic.clone()) && !one.subscribe(topic.clone())));
        let (began, mut at) = (Instant::now(), 0);
        // In an order that is none of those in which they came.
        while !leave.is_empty() {
            at = (at + 7919) % leave.len();
            leave.swap_remove(at);
        }
        assert!(began.elapsed() < SECOND, "{count} subscribers leave in {:?}", began.elapsed());
        let told = || self.topics.publish(&topic, |_| "heard");
        let left = told();
        assert!(crowd.iter().all(|(_, one)| one.unsubscribe(&topic) && !one.unsubscribe(&topic)));
        format!("{left} {}", told())
    }
}

/// The number of messages that were made.
type Made = Rc<Cell<usize>>;

/// The topics of each shard.
type All = Rc<RefCell<Vec<Listeners<String, bool>>>>;

fn starts(sim: &Sim, shards: usize) -> (SimServer, Made, All) {
    let (published, made) = (Mesh::<String, usize>::new(), Made::default());
    let (of_shards, all) = (made.clone(), All::default());
    let shared = all.clone();
    let server = Server::bind("10.0.0.1:7000").framing(Lines::default()).shards(shards);
    let server = sim.start(server, move |shard| {
        let topics = Listeners::new(shard, WAITING_BYTES_MAX);
        let (here, made) = (topics.clone(), of_shards.clone());
        published.register(shard, move |_from, line| {
            let (topic, text) = line.split_once(' ').unwrap();
            let message = |topic: &str, is_loud: bool| {
                made.set(made.get() + 1);
                let text = format!("{topic}: {text}");
                if is_loud { text.to_uppercase() } else { text }
            };
            if topic == "empty" {
                return (0..1000).map(|_| here.publish(&text.to_owned(), |_| "")).min().unwrap();
            }
            match topic.strip_prefix('*') {
                None => here.publish(&topic.to_owned(), |is_loud| message(topic, is_loud)),
                Some(start) => here.publish_where(
                    &start.to_owned()..,
                    |topic| topic.starts_with(start),
                    |topic, is_loud| message(topic, is_loud),
                ),
            }
        });
        shared.borrow_mut().push(topics.clone());
        News { topics, published: published.clone() }
    });
    (server.unwrap(), made, all)
}

#[test]
fn subscribers_of_all_shards_hear_messages_once_and_in_order() {
    Sim::seeds(50).faults(Faults::harmless()).run(|sim| {
        let shards = 1 + sim.seed() as usize % 4;
        let (server, made, topics) = starts(sim, shards);
        let (addr, count, ready) = (server.addr(), 1 + sim.random() % 6, Rc::new(Cell::new(0)));
        for n in 0..count {
            let ready = ready.clone();
            sim.client(format!("c{n}"), async move |net| {
                let mut me = net.connect(addr).await?;
                me.send("+news\n+news\n+new\n").await?;
                for said in ["= true", "= false", "= true"] {
                    assert_eq!(me.line().await?.as_deref(), Some(said));
                }
                if n % 2 == 1 {
                    me.send("loud\n").await?;
                    assert_eq!(me.line().await?.as_deref(), Some("= true [\"new\", \"news\"]"));
                }
                ready.set(ready.get() + 1);
                for message in 0..20 {
                    // Listeners of a range are in their order.
                    for topic in ["news", "new", "news"] {
                        let expected = format!("{topic}: a{message}");
                        let expected = if n % 2 == 1 { expected.to_uppercase() } else { expected };
                        assert_eq!(me.line().await?, Some(expected));
                    }
                }
                me.send("-other\n-news\n").await?;
                assert_eq!(me.line().await?.as_deref(), Some("= false"));
                assert_eq!(me.line().await?.as_deref(), Some("= true"));
                if net.random().is_multiple_of(2) {
                    me.send("-\n").await?;
                    assert_eq!(me.line().await?.as_deref(), Some("= 0"));
                }
                Ok(())
            });
        }
        sim.client("speaker", async move |net| {
            let mut me = net.connect(addr).await?;
            while ready.get() < count {
                net.sleep(SECOND).await;
            }
            made.set(0);
            for message in 0..20 {
                me.send(format!("news a{message}\n*n a{message}\nother a\n")).await?;
                for told in [count, 2 * count, 0] {
                    assert_eq!(me.line().await?, Some(format!("= {told}")));
                }
            }
            assert!(made.get() <= 20 * 3 * 2 * shards, "made {} times, once for each form", made.get());
            Ok(())
        });
        sim.run_until_done();
        // Those that ended with a topic hear nothing more, and topics without a subscriber take no
        // memory.
        assert!(sim.run_until(60 * SECOND, || server.stats().connections == 0));
        for topics in &*topics.borrow() {
            assert_eq!(format!("{topics:?}"), "Listeners { topics: 0, .. }");
        }
    });
}

#[test]
fn slow_subscriber_misses_nothing_until_too_much_waits() {
    Sim::seeds(20).faults(Faults::harmless()).run(|sim| {
        let (server, _, _) = starts(sim, 2);
        let (addr, ready) = (server.addr(), Rc::new(Cell::new(0)));
        sim.expect_losses();
        for name in ["slow", "deaf"] {
            let ready = ready.clone();
            sim.client(name, async move |net| {
                let mut me = net.connect(addr).await?;
                me.send(format!("+a\n+{name}\n")).await?;
                for _ in 0..2 {
                    assert_eq!(me.line().await?.as_deref(), Some("= true"));
                }
                ready.set(ready.get() + 1);
                if name == "deaf" {
                    net.sleep(900 * SECOND).await;
                    return Ok(());
                }
                net.sleep(60 * SECOND).await;
                for message in 0..60 {
                    let line = me.line().await?.unwrap();
                    let is_it = line.starts_with(&format!("a: {message} "));
                    assert!(is_it && line.len() > 20_000, "{:.20} where message {message} is next", line);
                }
                Ok(())
            });
        }
        sim.client("speaker", async move |net| {
            let mut me = net.connect(addr).await?;
            while ready.get() < 2 {
                net.sleep(SECOND).await;
            }
            // More than an outbox holds, and less than may wait beside it.
            for message in 0..60 {
                me.send(format!("a {message} {}\n", "m".repeat(20_000))).await?;
                assert_eq!(me.line().await?.as_deref(), Some("= 2"));
            }
            let (mut told, mut sent) = ("= 1".to_owned(), 0);
            while told == "= 1" {
                me.send(format!("deaf {}\n", "m".repeat(20_000))).await?;
                told = me.line().await?.unwrap();
                sent += 1;
                assert!(sent < 300, "6 MB wait for a peer that does not read");
                net.sleep(SECOND).await;
            }
            assert_eq!(told, "= 0");
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn messages_without_a_byte_have_a_bound_where_they_wait() {
    Sim::seeds(5).faults(Faults::harmless()).run(|sim| {
        let (server, _, _) = starts(sim, 1);
        let (addr, ready) = (server.addr(), Rc::new(Cell::new(false)));
        sim.expect_losses();
        let is_ready = ready.clone();
        sim.client("deaf", async move |net| {
            let mut me = net.connect(addr).await?;
            me.send("+deaf\n").await?;
            assert_eq!(me.line().await?.as_deref(), Some("= true"));
            is_ready.set(true);
            net.sleep(900 * SECOND).await;
            Ok(())
        });
        sim.client("speaker", async move |net| {
            let mut me = net.connect(addr).await?;
            while !ready.get() {
                net.sleep(SECOND).await;
            }
            // More than the outbox and the sockets hold.
            for _ in 0..50 {
                me.send(format!("deaf {}\n", "m".repeat(20_000))).await?;
                assert_eq!(me.line().await?.as_deref(), Some("= 1"));
            }
            let (mut told, mut sent) = ("= 1".to_owned(), 0);
            while told == "= 1" {
                me.send("empty deaf\n").await?;
                told = me.line().await?.unwrap();
                sent += 1;
                assert!(sent < 20, "20 000 messages wait for a peer that does not read");
            }
            assert_eq!(told, "= 0");
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn subscribers_of_one_topic_leave_without_a_search_among_all() {
    Sim::seeds(1).run(|sim| {
        let (server, _, _) = starts(sim, 1);
        let addr = server.addr();
        sim.client("me", async move |net| {
            let mut me = net.connect(addr).await?;
            me.send("crowd 20000\n").await?;
            for _ in 0..200 {
                assert_eq!(me.line().await?.as_deref(), Some("heard"));
            }
            assert_eq!(me.line().await?.as_deref(), Some("= 200 0"));
            Ok(())
        });
        sim.run_until_done();
    });
}
