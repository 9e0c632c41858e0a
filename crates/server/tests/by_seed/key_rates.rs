//! Keys that send faster than they may, over several connections and shards, by seed: against a
//! model of all that was served.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::convert::Infallible;
use std::rc::Rc;
use std::time::Duration;

use ringserve_server::admission::{KeyLimits, KeyRates};
use ringserve_server::framing::Lines;
use ringserve_server::middleware::{RateLimit, RateLimitError};
use ringserve_server::overload::{Load, Shed};
use ringserve_server::testing::{Faults, Sim, SimServer, TestConn};
use ringserve_server::{CloseReason, Cx, Frame, Server, Service, Shard};

/// Frames served for each key: the nanosecond, and the bytes.
type Served = HashMap<u8, Vec<(u64, usize)>>;

/// Says each line again. The key is its first byte, and there is none for `-`.
#[derive(Clone, Default)]
struct Keyed {
    served: Rc<RefCell<Served>>,
    shed: Rc<Cell<u64>>,
    /// Lines that it does not answer when they come too early.
    patient: &'static [u8],
}

impl Service for Keyed {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, line: Frame) -> Result<(), Infallible> {
        let now = cx.shard().now().as_nanos();
        self.served.borrow_mut().entry(line[0]).or_default().push((now, line.len()));
        cx.reply(line);
        Ok(())
    }

    fn shed(&self, cx: &Cx<'_, ()>, line: &Frame, load: Load) -> Shed {
        assert!(load >= Load::Shedding);
        if self.patient.contains(&line[0]) {
            return Shed::Serve;
        }
        self.shed.set(self.shed.get() + 1);
        cx.reply("slower");
        Shed::Answered
    }
}

fn key_of(_: &Cx<'_, ()>, line: &Frame) -> Option<u8> {
    line.first().copied().filter(|key| *key != b'-')
}

fn limited(
    service: Keyed,
    rates: &KeyRates,
) -> RateLimit<Keyed, impl Fn(&Cx<'_, ()>, &Frame) -> Option<u8> + use<>> {
    RateLimit::by_key(service, rates.clone(), key_of)
}

fn start(sim: &Sim, shards: usize, service: &Keyed, rates: &KeyRates) -> SimServer {
    let server = Server::bind("10.0.0.1:7000").framing(Lines::default()).shards(shards);
    let (service, rates) = (service.clone(), rates.clone());
    sim.start(server, move |_shard| limited(service.clone(), &rates)).expect("it starts")
}

/// Panics if in any time of `t` seconds a key was served more than `burst + per_second × t` of
/// frames, or of the bytes before the last frame.
fn check(served: &[(u64, usize)], frames: (u32, u32), bytes: (u64, u64)) {
    let mut served = served.to_vec();
    // Shards are stepped one behind the other, each at its own time.
    served.sort_unstable();
    for (from, (began, _)) in served.iter().enumerate() {
        let mut sum = 0;
        for (n, (at, len)) in served[from..].iter().enumerate() {
            // A call that waited may be some milliseconds late, and the next one on time.
            let seconds = (at - began) as f64 / 1e9 + 0.003;
            let most = f64::from(frames.1) + f64::from(frames.0) * seconds + 1e-6;
            assert!((n + 1) as f64 <= most, "{} frames in {seconds} s, {most} are allowed", n + 1);
            let most = bytes.1 as f64 + bytes.0 as f64 * seconds + 1e-6;
            assert!(
                (sum as f64) < most,
                "{sum} bytes and a frame in {seconds} s, {most} are allowed: {served:?}"
            );
            sum += len;
        }
    }
}

#[test]
fn connections_of_a_key_share_its_rate_on_all_shards() {
    Sim::seeds(if cfg!(debug_assertions) { 100 } else { 1000 }).faults(Faults::none()).run(|sim| {
        let draw = |below: u64| sim.random() % below;
        let frames = ([5, 40, 300][draw(3) as usize], [1, 10, 100][draw(3) as usize]);
        let bytes = ([100, 1000, 1 << 40][draw(3) as usize], [1, 500, 1 << 40][draw(3) as usize]);
        let limits = KeyLimits::default().frames(frames.0, frames.1).bytes(bytes.0, bytes.1);
        let rates = KeyRates::new(limits).expect("limits");
        let service = Keyed { patient: b"ab", ..Keyed::default() };
        let server = start(sim, 1 + draw(3) as usize, &service, &rates);
        let addr = server.addr();
        for n in 0..6 {
            sim.client(format!("c{n}"), async move |net| {
                let key = ["a", "b", "-"][n % 3];
                let mut me = net.connect(addr).await?;
                let line = format!("{key}{:>1$}", "", (net.random() % 30) as usize);
                for _ in 0..10 {
                    me.send(format!("{line}\n")).await?;
                    // Two connections send twenty frames of up to 31 bytes, in debt of one of them.
                    assert_eq!(me.line().await?.as_deref(), Some(&*line));
                }
                Ok(())
            });
        }
        sim.run_until_done();
        let served = service.served.borrow();
        for key in *b"ab" {
            assert_eq!(served[&key].len(), 20);
            check(&served[&key], frames, bytes);
        }
        let stats = rates.stats();
        assert!(stats.keys <= 2 && stats.sketched == 0, "{stats:?}");
        // What has no key is never held up, and what is served is not shed.
        let free = &served[&b'-'];
        assert!(free.len() == 20, "{free:?}");
        assert_eq!((service.shed.get(), server.stats().counters.frames_shed), (0, 0));
    });
}

#[test]
fn early_frames_are_answered_in_the_words_of_the_service() {
    Sim::seeds(50).faults(Faults::harmless()).run(|sim| {
        let rates = KeyRates::new(KeyLimits::default().frames(1, 3)).expect("limits");
        let service = Keyed::default();
        let server = start(sim, 2, &service, &rates);
        let addr = server.addr();
        for n in 0..2 {
            sim.client(format!("c{n}"), async move |net| {
                let mut me = net.connect(addr).await?;
                let mut busy = 0;
                for _ in 0..20 {
                    me.send("a\n-\n").await?;
                    busy += usize::from(me.line().await?.as_deref() == Some("slower"));
                    assert_eq!(me.line().await?.as_deref(), Some("-"));
                }
                assert!(busy > 0, "both have one rate");
                Ok(())
            });
        }
        sim.run_until_done();
        let (shed, served) = (service.shed.get(), service.served.borrow()[&b'a'].len() as u64);
        assert_eq!(shed + served, 40);
        check(&service.served.borrow()[&b'a'], (1, 3), (1 << 40, 1 << 40));
        assert_eq!((server.stats().counters.frames_shed, rates.stats().refused), (shed, shed));
    });
}

#[test]
fn calls_that_would_wait_for_too_long_end_and_block_no_key() {
    Sim::seeds(50).faults(Faults::none()).run(|sim| {
        let rates = KeyRates::new(KeyLimits::default().frames(1, 1)).expect("limits");
        let service = Keyed { patient: b"a", ..Keyed::default() };
        let (of_shard, made) = (rates.clone(), service.clone());
        let server = Server::bind("10.0.0.1:7000").framing(Lines::default()).shards(2);
        let wait_max = Duration::from_millis(2500);
        let server = sim
            .start(server, move |_shard| limited(made.clone(), &of_shard).wait_max(wait_max))
            .expect("it starts");
        let (addr, outcomes) = (server.addr(), Rc::new(RefCell::new(Vec::new())));
        for n in 0..30 {
            let outcomes = outcomes.clone();
            sim.client(format!("c{n}"), async move |net| {
                let mut me = net.connect(addr).await?;
                me.send("a\n").await?;
                let answered = me.line().await.is_ok_and(|line| line.is_some());
                outcomes.borrow_mut().push((answered, net.now()));
                Ok(())
            });
        }
        sim.client("later", async move |net| {
            net.sleep(Duration::from_secs(4)).await;
            let (mut me, began) = (net.connect(addr).await?, net.now());
            me.send("a\n").await?;
            assert_eq!(me.line().await?.as_deref(), Some("a"));
            assert!(net.now() - began < Duration::from_millis(100), "what was refused owes nothing");
            Ok(())
        });
        sim.run_until_done();
        let outcomes = outcomes.borrow();
        // At once, after a second, and after two.
        assert_eq!(outcomes.iter().filter(|(answered, _)| *answered).count(), 3);
        assert!(outcomes.iter().all(|(answered, at)| *answered || *at < Duration::from_millis(100)));
        check(&service.served.borrow()[&b'a'], (1, 1), (1 << 40, 1 << 40));
    });
}

#[test]
fn call_that_fails_for_its_key_is_an_error_of_the_handler() {
    let rates = KeyRates::new(KeyLimits::default().frames(1, 1)).expect("limits");
    let (of_shard, service) = (rates.clone(), Keyed { patient: b"a", ..Keyed::default() });
    let mut conn = TestConn::open(move |_shard| limited(service.clone(), &of_shard).wait_max(Duration::ZERO));
    assert_eq!(conn.call("a").replies, [b"a"]);
    let early = conn.call("a");
    let Err(RateLimitError::TooFast(after)) = early.result else { panic!("{early:?}") };
    assert!(after.time() <= Duration::from_secs(1) && after.time() > Duration::from_millis(900), "{after:?}");
    assert!(early.replies.is_empty() && conn.is_closed());
    assert_eq!(conn.close_reason(), Some(CloseReason::HandlerError));
}

/// Asks for a turn itself, and says when to come again.
struct Asks {
    shard: Shard,
    rates: KeyRates,
}

impl Service for Asks {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Infallible> {
        match self.rates.take(&self.shard, &*frame, 2, frame.len()) {
            Ok(()) => cx.reply("done"),
            Err(early) => cx.reply(early.time().as_millis().to_string()),
        }
        Ok(())
    }
}

#[test]
fn key_that_comes_again_when_it_was_told_is_served() {
    let rates = KeyRates::new(KeyLimits::default().frames(10, 3).bytes(100, 50)).expect("limits");
    let of_shard = rates.clone();
    let mut conn = TestConn::open(move |shard| Asks { shard: shard.clone(), rates: of_shard.clone() });
    assert_eq!(conn.call("me").replies, [b"done"]);
    assert_eq!(conn.call("me").replies, [b"done"], "one is left, and the other is owed");
    assert_eq!(conn.call("you").replies, [b"done"], "another key has its own");
    for _ in 0..3 {
        assert_eq!(conn.call("me").replies, [b"200"], "and a refusal takes nothing");
    }
    conn.pass(Duration::from_millis(200));
    assert_eq!(conn.call("me").replies, [b"done"]);
    conn.pass(Duration::from_secs(5));
    let long = "x".repeat(300);
    assert_eq!(conn.call(&long).replies, [b"done"]);
    conn.pass(Duration::from_secs(1));
    assert_eq!(conn.call(&long).replies, [b"1510"], "251 bytes are owed, of which a second gave 100");
    conn.pass(Duration::from_millis(1520));
    assert_eq!(conn.call(&long).replies, [b"done"]);
    assert_eq!((rates.stats().keys, rates.stats().refused), (3, 4));
}
