//! Duties of a server to its services, by seed: an `open` that waits, accounts, and several
//! services of one server.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::convert::Infallible;
use std::rc::Rc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ringserve_server::framing::Lines;
use ringserve_server::limits::ConnLimits;
use ringserve_server::listen::{adopt, endpoints, tcp};
use ringserve_server::stats::Account;
use ringserve_server::sync::Mesh;
use ringserve_server::testing::{Faults, Sim, TestConn};
use ringserve_server::{
    CloseCx, Cx, Frame, Limits, MultiService, OpenCx, Refusal, Server, Service, Session, Shard,
};

use crate::Echo;

const SECOND: Duration = Duration::from_secs(1);

fn lines() -> Server<Lines> {
    Server::bind("10.0.0.1:7000").framing(Lines::default())
}

/// Lets peers in after a look-up that takes as long as their port says.
struct Doorman {
    takes: Duration,
    lets_in: bool,
}

/// The peer that was let in.
struct Guest {
    port: u16,
}

impl Session for Guest {}

impl Service for Doorman {
    type Session = Guest;
    type Error = Infallible;

    async fn open(&self, opening: &OpenCx<'_>) -> Result<Guest, Refusal> {
        opening.reply("a moment");
        opening.sleep(self.takes).await;
        opening.reply(if self.lets_in { "welcome" } else { "not today" });
        let addr = opening.peer().addr().ok_or_else(|| Refusal::new("no address"))?;
        if self.lets_in { Ok(Guest { port: addr.port() }) } else { Err(Refusal::new("planted")) }
    }

    async fn call(&self, cx: &Cx<'_, Guest>, _frame: Frame) -> Result<(), Infallible> {
        cx.reply(cx.session().port.to_string().as_str());
        Ok(())
    }

    fn close(&self, closed: &CloseCx<'_, Guest>) {
        assert_eq!(closed.peer().addr().map(|addr| addr.port()), Some(closed.session().port));
    }
}

#[test]
fn session_is_made_of_the_peer_after_a_wait() {
    let mut conn = TestConn::open(|_shard| Doorman { takes: 3 * SECOND, lets_in: true });
    assert_eq!(conn.replies(), [b"a moment".to_vec(), b"welcome".to_vec()]);
    let called = conn.call("who am I?");
    let port: u16 = std::str::from_utf8(&called.replies[0]).unwrap().parse().unwrap();
    assert!(port > 0 && !conn.is_closed());
}

#[test]
fn refusal_after_a_wait_closes_with_its_last_words() {
    let mut conn = TestConn::open(|_shard| Doorman { takes: 3 * SECOND, lets_in: false });
    assert!(conn.is_closed());
    assert_eq!((conn.replies().len(), conn.close_reason()), (2, None));
}

#[test]
fn open_that_never_ends_is_over_at_its_limit() {
    let mut conn = TestConn::open(|_shard| Doorman { takes: 3600 * SECOND, lets_in: true });
    assert!(conn.is_closed());
    assert_eq!((conn.replies(), conn.close_reason()), (vec![b"a moment".to_vec()], None));
}

#[test]
fn peers_that_are_let_in_late_hear_of_their_own_connection() {
    Sim::seeds(300).faults(Faults::harmless()).run(|sim| {
        let addr = sim.serve(lines(), |shard: &Shard| Doorman {
            takes: Duration::from_micros(shard.random() % 4_000_000),
            lets_in: true,
        });
        for n in 0..5 {
            sim.client(format!("c{n}"), async move |net| {
                let mut me = net.connect(addr).await?;
                // Sent before it is let in.
                me.send("who am I?\n").await?;
                let mut heard = Vec::new();
                while heard.len() < 3 {
                    heard.extend(me.line().await?);
                }
                let own = me.local_addr().expect("it is connected").port().to_string();
                assert_eq!(heard, ["a moment", "welcome", own.as_str()]);
                Ok(())
            });
        }
        sim.run_until_done();
    });
}

/// Echoes, says a word more to frames that ask for it, and keeps the accounts of connections that
/// ended.
struct Billing(Arc<Mutex<Vec<Account>>>);

impl Service for Billing {
    type Session = ();
    type Error = Infallible;

    const ACCOUNTS: bool = true;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Infallible> {
        if frame.starts_with(b"wait") {
            cx.sleep(SECOND).await;
            cx.write(b"and\n");
        }
        cx.reply(frame);
        Ok(())
    }

    fn close(&self, closed: &CloseCx<'_, ()>) {
        self.0.lock().unwrap().push(closed.account().expect("it is counted"));
    }
}

#[test]
fn account_has_every_byte_and_frame_of_its_connection() {
    let kept = Arc::new(Mutex::new(Vec::new()));
    Sim::seeds(200).faults(Faults::harmless()).run(move |sim| {
        kept.lock().unwrap().clear();
        let of_shards = kept.clone();
        // Alone, or beside a service without accounts.
        let addr = match sim.seed() % 2 {
            0 => sim.serve(lines(), move |_shard| Billing(of_shards.clone())),
            _ => {
                let billing = tcp("10.0.0.1:7000").framing(Lines::default());
                let server = Server::new().service(tcp("10.0.0.1:8000"), |_shard| Named("other"));
                sim.serve_several(server.service(billing, move |_shard| Billing(of_shards.clone())))[1]
            }
        };
        for n in 0..4_usize {
            sim.client(format!("c{n}"), async move |net| {
                let mut me = net.connect(addr).await?;
                for round in 0..=n {
                    let line = format!("{} {round}\n", if n == 3 { "wait" } else { "word" });
                    me.send(&line).await?;
                    assert!(me.line().await?.is_some());
                    if n == 3 {
                        assert!(me.line().await?.is_some());
                    }
                }
                me.finish()?;
                assert_eq!(me.closed().await?, b"");
                Ok(())
            });
        }
        sim.run_until_done();
        let mut accounts = std::mem::take(&mut *kept.lock().unwrap());
        accounts.sort_by_key(|account| account.frames_received);
        for (n, account) in accounts.iter().enumerate() {
            let rounds = n as u64 + 1;
            let more = if n == 3 { 4 * rounds } else { 0 };
            let bytes = 7 * rounds;
            assert_eq!((account.frames_received, account.frames_sent), (rounds, rounds));
            assert_eq!((account.bytes_received, account.bytes_sent), (bytes, bytes + more));
            assert!(n < 3 || account.duration >= 4 * SECOND, "{account:?}");
        }
        assert_eq!(accounts.len(), 4);
    });
}

/// Replies with its name.
struct Named(&'static str);

impl Service for Named {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Infallible> {
        cx.sleep(Duration::from_millis(frame.len() as u64)).await;
        cx.reply(self.0);
        Ok(())
    }
}

#[test]
fn services_of_one_server_are_reached_where_they_were_told() {
    Sim::seeds(200).faults(Faults::all()).run(|sim| {
        let chat = endpoints([tcp("10.0.0.1:7000"), tcp("10.0.0.1:7001")]).framing(Lines::default());
        let server = Server::new()
            .shards(2)
            .service(chat.name("chat"), |_shard| Named("chat"))
            .service(tcp("10.0.0.1:8000").framing(Lines::default()).name("admin"), |_shard| Named("admin"));
        let server = sim.start_several(server).unwrap();
        for (n, name) in ["chat", "chat", "admin"].into_iter().enumerate() {
            let addr = server.local_addrs()[n];
            sim.client(format!("c{n}"), async move |net| {
                let mut me = net.connect(addr).await?;
                for line in ["a\n", "bb\n", "ccc\n"] {
                    me.send(line).await?;
                    assert_eq!(me.line().await?.as_deref(), Some(name));
                }
                Ok(())
            });
        }
        sim.run_until_done();
        sim.finish();
        let stats = server.stats();
        let opened = |name| stats.service(name).unwrap().counters.opened;
        assert_eq!(opened("chat") + opened("admin"), stats.counters.opened);
        assert!(opened("admin") <= 1 && opened("chat") <= 2);
    });
}

#[test]
fn a_start_of_several_services_that_fails_names_the_service() {
    Sim::seeds(1).run(|sim| {
        let server = Server::new()
            .service(tcp("10.0.0.1:7000").name("chat"), |_shard| Named("chat"))
            .service(tcp("10.0.0.1:8000").name("admin"), |_shard| -> Result<Named, &str> { Err("planted") });
        let error = sim.start_several(server).unwrap_err();
        assert_eq!(error.to_string(), "service admin: no service for shard 0: planted");
        // What it listened at is free again.
        assert_eq!(sim.serve_several(Server::new().service(tcp("10.0.0.1:7000"), |_| Named("a"))).len(), 1);
    });
}

/// State that the services of a shard share: the shard, and the number of lines received.
struct Heard {
    shard: Shard,
    lines: Cell<u64>,
    dropped: Arc<AtomicUsize>,
}

impl Drop for Heard {
    fn drop(&mut self) {
        self.dropped.fetch_add(1, Ordering::Relaxed);
    }
}

/// Counts lines, and says how many the services of its shard heard.
struct Counts(Rc<Heard>);

impl Service for Counts {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, _line: Frame) -> Result<(), Infallible> {
        let Counts(heard) = self;
        assert_eq!(heard.shard.index(), cx.shard().index());
        heard.lines.set(heard.lines.get() + 1);
        cx.reply(format!("{} {}", cx.shard().index(), heard.lines.get()));
        Ok(())
    }
}

/// Counts on shards, at two addresses, by services that fail on the shard of this number.
fn counts(shards: usize, dropped: &Arc<AtomicUsize>, fails: Option<usize>) -> Server<MultiService> {
    let counts = || {
        let dropped = dropped.clone();
        move |shard: &Shard| {
            let made = shard.shared(|| {
                // Asked for while another one is made.
                assert_eq!(*shard.shared(|| 7), 7);
                Heard { shard: shard.clone(), lines: Cell::new(0), dropped: dropped.clone() }
            });
            if fails == Some(shard.index()) { Err("planted") } else { Ok(Counts(made)) }
        }
    };
    let at = |addr: &str| tcp(addr).framing(Lines::default());
    let server = Server::new().shards(shards);
    server.service(at("10.0.0.1:7000"), counts()).service(at("10.0.0.1:8000"), counts())
}

#[test]
fn services_of_a_shard_share_a_value_and_shards_do_not() {
    Sim::seeds(50).faults(Faults::harmless()).run(|sim| {
        let (shards, dropped) = (1 + sim.seed() as usize % 3, Arc::default());
        let server = sim.start_several(counts(shards, &dropped, None)).unwrap();
        let told: Rc<RefCell<Vec<String>>> = Rc::default();
        for n in 0..6 {
            let (addr, told) = (server.local_addrs()[n % 2], told.clone());
            sim.client(format!("c{n}"), async move |net| {
                let mut me = net.connect(addr).await?;
                for _ in 0..5 {
                    me.send("hello\n").await?;
                    let line = me.line().await?;
                    told.borrow_mut().extend(line);
                }
                Ok(())
            });
        }
        sim.run_until_done();
        sim.finish();
        assert_eq!(dropped.load(Ordering::Relaxed), shards, "values go with their shards");
        // Each shard counted its lines of both services in one row.
        let told: BTreeSet<String> = told.take().into_iter().collect();
        assert_eq!(told.len(), 30, "{told:?}");
        for line in &told {
            let (shard, count) = line.split_once(' ').unwrap();
            let before = count.parse::<u64>().unwrap() - 1;
            assert!(before == 0 || told.contains(&format!("{shard} {before}")), "{line} in {told:?}");
        }
    });
}

#[test]
fn shared_value_goes_with_a_start_that_fails() {
    Sim::seeds(10).run(|sim| {
        let dropped = Arc::default();
        let fails = sim.seed() as usize % 2;
        sim.start_several(counts(2, &dropped, Some(fails))).unwrap_err();
        sim.finish();
        assert_eq!(dropped.load(Ordering::Relaxed), 1 + fails);
    });
}

#[test]
fn servers_that_adopt_a_listener_answer_one_after_the_other() {
    // Of the socket its address is used, which the run then depends on.
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap();
    let answered = Rc::new(Cell::new(0));
    let count = answered.clone();
    Sim::seeds(50).run(move |sim| {
        let server = || {
            let endpoint = adopt(listener.try_clone().unwrap()).framing(Lines::default());
            Server::new().shards(2).service(endpoint, |_shard| Echo)
        };
        let old = sim.start_several(server()).unwrap();
        assert_eq!(old.addr(), addr);
        let client = |name: String| {
            let count = count.clone();
            sim.client(name, async move |net| {
                let mut me = net.connect(addr).await?;
                me.send("hello\n").await?;
                assert_eq!(me.line().await?, Some("hello".to_owned()));
                count.set(count.get() + 1);
                Ok(())
            });
        };
        client("before".to_owned());
        sim.run_until_done();
        // Once with another server that accepts meanwhile, once with one that comes later.
        let meanwhile = sim.random() % 2 == 0;
        let next = meanwhile.then(|| sim.start_several(server()).unwrap());
        old.drain();
        (0..5).for_each(|n| client(format!("during {n}")));
        sim.run_for(SECOND);
        assert!(old.is_done());
        (0..5).for_each(|n| client(format!("after {n}")));
        let next = next.unwrap_or_else(|| sim.start_several(server()).unwrap());
        sim.run_until_done();
        assert!(next.stats().counters.accepted >= 5);
    });
    assert_eq!(answered.get() % 11, 0, "every client of every seed is answered");
}

/// The events that a shard handled, in order.
#[derive(Clone, Default)]
struct Handled(Arc<Mutex<Vec<&'static str>>>);

impl Handled {
    fn note(&self, what: &'static str) {
        self.0.lock().unwrap().push(what);
    }
}

#[test]
fn mesh_is_read_beside_one_whose_handler_panics() {
    Sim::seeds(20).allow_panics(|said| said.starts_with("planted")).run(|sim| {
        let handled = Handled::default();
        let of_shards = handled.clone();
        sim.serve(lines().shards(1), move |shard: &Shard| {
            let (bad, good) = (Mesh::<()>::new(), Mesh::<()>::new());
            let [of_bad, of_good] = [of_shards.clone(), of_shards.clone()];
            bad.register(shard, move |_from, ()| {
                of_bad.note("bad");
                panic!("planted: a message panics");
            });
            good.register(shard, move |_from, ()| of_good.note("good"));
            shard.spawn(async move {
                (0..8).for_each(|_| bad.try_send(0, ()).unwrap());
                good.try_send(0, ()).unwrap();
            });
            Named("a")
        });
        sim.run_for(SECOND);
        let handled = handled.0.lock().unwrap();
        assert_eq!(handled[..2], ["bad", "good"], "both meshes are read in one turn");
        assert_eq!(handled.len(), 9, "no message is lost behind one that panics");
    });
}

/// Lets peers in after a moment, and says goodbye when a drain begins.
struct Polite;

impl Service for Polite {
    type Session = ();
    type Error = Infallible;

    async fn open(&self, opening: &OpenCx<'_>) -> Result<(), Refusal> {
        opening.sleep(3 * SECOND).await;
        Ok(())
    }

    async fn call(&self, cx: &Cx<'_, ()>, _frame: Frame) -> Result<(), Infallible> {
        cx.reply("answer");
        Ok(())
    }

    fn draining(&self, cx: &Cx<'_, ()>) {
        cx.reply("goodbye");
    }
}

#[test]
fn goodbye_comes_before_the_first_answer_of_a_late_open() {
    Sim::seeds(100).faults(Faults::harmless()).run(|sim| {
        let addr = sim.serve(lines(), |_shard| Polite);
        sim.client("me", async move |net| {
            let mut me = net.connect(addr).await?;
            // Sent before it is let in, and before the drain.
            me.send("what?\n").await?;
            assert_eq!(me.closed().await?, b"goodbye\nanswer\n");
            Ok(())
        });
        sim.run_for(SECOND);
        sim.drain();
        sim.run_until_done();
    });
}

/// Bounds a connection as its line says.
struct Bounds;

impl Service for Bounds {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Infallible> {
        let limits = match &frame[..] {
            b"brief" => ConnLimits::default().idle_timeout(2 * SECOND),
            b"patient" => ConnLimits::default().idle_timeout(None),
            _ => ConnLimits::default(),
        };
        cx.set_limits(&limits).expect("they are in range");
        cx.reply(frame);
        Ok(())
    }
}

#[test]
fn time_limits_of_one_connection_hold_from_its_call_on() {
    Sim::seeds(50).faults(Faults::harmless()).run(|sim| {
        let limits = Limits::default().idle_timeout(20 * SECOND);
        let addr = sim.serve(lines().limits(limits), |_shard| Bounds);
        for (line, least, most) in [("brief", 1, 10), ("hello", 15, 30), ("patient", 60, 60)] {
            sim.client(line, async move |net| {
                let mut me = net.connect(addr).await?;
                me.send(format!("{line}\n")).await?;
                assert_eq!(me.line().await?.as_deref(), Some(line));
                let began = net.now();
                // Patience ends first where the limit is none.
                let _ = net.timeout(60 * SECOND, me.closed()).await;
                let took = net.now() - began;
                assert!((least * SECOND..=most * SECOND).contains(&took), "{line}: closed after {took:?}");
                Ok(())
            });
        }
        sim.run_until_done();
    });
}
