//! Connections that are refused behind last words, in simulations by seed.

use std::cell::Cell;
use std::io;
use std::rc::Rc;
use std::time::Duration;

use ringserve_server::Server;
use ringserve_server::admission::{Admission, RefusedBy};
use ringserve_server::framing::Lines;
use ringserve_server::limits::ServerLimits;
use ringserve_server::listen::ProxyProtocol;
use ringserve_server::overload::Load;
use ringserve_server::testing::{ClientStream, Net, Sim};

use super::Echo;

const ADDR: &str = "10.0.0.1:7000";
const WORDS: &str = "-BUSY try again";

fn server(admission: Admission) -> Server<Lines> {
    let admission = admission.shed_reply(format!("{WORDS}\r\n"));
    Server::bind(ADDR).admission(admission).framing(Lines::default())
}

/// The fate of a connection whose peer asked first.
enum Heard {
    /// It is served.
    Answer(ClientStream),
    Words,
}

/// Connects, asks at once, and reads either the answer or the words, whole, and then the end.
async fn ask(net: &Net) -> io::Result<Heard> {
    let mut me = net.connect(ADDR).await?;
    // More than a receive buffer, of which nothing is read: a close with unread bytes would reset,
    // and destroy the words.
    let line = "x".repeat(1 + net.random() as usize % 3000);
    me.send(format!("{line}\n")).await?;
    let heard = me.line().await?.ok_or(io::ErrorKind::UnexpectedEof)?;
    if heard.trim_end() != WORDS {
        assert_eq!(heard, line);
        return Ok(Heard::Answer(me));
    }
    assert!(me.closed().await?.is_empty());
    Ok(Heard::Words)
}

/// Those that were served, and those that heard the words.
#[derive(Clone, Default)]
struct Counts(Rc<Cell<(u64, u64)>>);

impl Counts {
    fn add(&self, heard: &Heard) {
        let (served, refused) = self.0.get();
        self.0.set(match heard {
            Heard::Answer(_) => (served + 1, refused),
            Heard::Words => (served, refused + 1),
        });
    }

    /// Lets time pass until that many peers heard something.
    fn wait_for(&self, sim: &Sim, peers: u64) {
        while self.0.get().0 + self.0.get().1 < peers {
            sim.run_for(Duration::from_millis(1));
        }
    }
}

#[test]
fn peer_beyond_its_count_hears_why() {
    Sim::seeds(100).run(|sim| {
        let running = sim.start(server(Admission::default().per_address(2)).shards(2), |_shard| Echo);
        let running = running.expect("the server starts");
        let counts = Counts::default();
        let heard = counts.clone();
        sim.client("greedy", async move |net| {
            let mut kept = Vec::new();
            for _ in 0..10 {
                let one = ask(&net).await?;
                heard.add(&one);
                kept.push(one);
            }
            Ok(())
        });
        sim.run_until_done();
        sim.finish();
        assert_eq!(counts.0.get(), (2, 8));
        assert_eq!(running.stats().counters.refused_by(RefusedBy::AddressCount), 8);
    });
}

#[test]
fn newcomer_hears_of_the_load_and_others_go_on() {
    Sim::seeds(100).run(|sim| {
        let last = Rc::new(Cell::new(0));
        let running = sim.start(server(Admission::default()).shards(2), |_shard| Echo);
        let running = running.expect("the server starts");
        let (before, during, after) = (Counts::default(), Counts::default(), Counts::default());
        let (heard, goes_on) = (before.clone(), last.clone());
        sim.client("old", async move |net| {
            let mut old = ask(&net).await?;
            heard.add(&old);
            let Heard::Answer(me) = &mut old else { panic!("refused while the load is calm") };
            for n in 0..40 {
                me.send(format!("{n}\n")).await?;
                assert_eq!(me.line().await?, Some(n.to_string()));
                goes_on.set(n);
                net.sleep(Duration::from_millis(10)).await;
            }
            Ok(())
        });
        before.wait_for(sim, 1);
        running.set_load(Load::Refusing, 0.0);
        for n in 0..10 {
            let heard = during.clone();
            sim.client(format!("new{n}"), async move |net| {
                heard.add(&ask(&net).await?);
                Ok(())
            });
        }
        during.wait_for(sim, 10);
        running.set_load(Load::Calm, 0.0);
        let heard = after.clone();
        sim.client("later", async move |net| {
            heard.add(&ask(&net).await?);
            Ok(())
        });
        sim.run_until_done();
        sim.finish();
        assert_eq!((before.0.get(), during.0.get(), after.0.get()), ((1, 0), (0, 10), (1, 0)));
        assert_eq!(last.get(), 39);
        assert_eq!(running.stats().counters.refused_by(RefusedBy::Load), 10);
    });
}

/// The most that hear last words at once: a sixteenth of the table.
const PARTING: usize = 20;

#[test]
fn peer_that_does_not_leave_keeps_no_place_for_long() {
    Sim::seeds(60).run(|sim| {
        let limits = ServerLimits::default().connections_max(16 * PARTING);
        // Each counts once, however often it is put off.
        let admission = Admission::default().connection_rate(1, 5 * PARTING as u32);
        let running = sim.start(server(admission).server_limits(limits), |_shard| Echo);
        let running = running.expect("the server starts");
        running.set_load(Load::Refusing, 0.0);
        let counts = Counts::default();
        for n in 0..5 * PARTING {
            let counts = counts.clone();
            sim.client(format!("c{n}"), async move |net| {
                let mut me = net.connect(ADDR).await?;
                // Sends on and on, and does not close.
                me.send("hello\n").await?;
                let heard = me.line().await?;
                let is_refused = heard.as_deref().is_some_and(|heard| heard.trim_end() == WORDS);
                assert!(is_refused || heard.as_deref() == Some("hello"), "{heard:?}");
                let heard = if is_refused { Heard::Words } else { Heard::Answer(me) };
                counts.add(&heard);
                net.sleep(Duration::from_secs(20)).await;
                Ok(())
            });
        }
        for _ in 0..100 {
            sim.run_for(Duration::from_millis(5));
            let connections = running.stats().connections;
            assert!(connections <= PARTING, "{connections} connections have a place");
        }
        // 200 ms for each twenty.
        let (served, refused) = counts.0.get();
        assert!(served == 0 && (2 * PARTING as u64..=4 * PARTING as u64).contains(&refused), "{refused}");
        // None was closed without a word: the others waited, and are let in.
        running.set_load(Load::Calm, 0.0);
        sim.run_until_done();
        sim.finish();
        let (served, refused) = counts.0.get();
        assert_eq!(served + refused, 5 * PARTING as u64);
        assert!(served >= PARTING as u64, "{served}");
        assert_eq!(running.stats().counters.refused_by(RefusedBy::Load), refused);
        assert_eq!(running.stats().counters.refused_by(RefusedBy::ConnectionRate), 0);
    });
}

#[test]
fn client_behind_a_proxy_that_does_not_leave_is_gone_soon() {
    Sim::seeds(60).run(|sim| {
        let admission = Admission::default().per_address(1);
        let server = server(admission).shards(1).proxy_protocol(ProxyProtocol::from(["10.128.0.0/9"]));
        let running = sim.start(server, |_shard| Echo).expect("the server starts");
        let counts = Counts::default();
        for n in 0..5 {
            let counts = counts.clone();
            sim.client(format!("c{n}"), async move |net| {
                let mut me = net.connect(ADDR).await?;
                me.send("PROXY TCP4 192.0.2.1 198.51.100.7 56324 443\r\nhello\n").await?;
                let heard = me.line().await?.expect("an answer, or the words");
                let (served, refused) = counts.0.get();
                let is_refused = heard.trim_end() == WORDS;
                counts.0.set((served + u64::from(!is_refused), refused + u64::from(is_refused)));
                // It does not close.
                net.sleep(Duration::from_secs(20)).await;
                drop(me);
                Ok(())
            });
        }
        counts.wait_for(sim, 5);
        assert_eq!(counts.0.get(), (1, 4));
        // 200 ms and what the network takes; other connections have two seconds.
        sim.run_for(Duration::from_millis(500));
        assert_eq!(running.stats().connections, 1);
        sim.run_until_done();
        sim.finish();
        assert_eq!(running.stats().counters.refused_by(RefusedBy::AddressCount), 4);
    });
}

#[test]
fn reply_that_is_no_reply_is_refused_at_the_start() {
    for (reply, said) in [(0, "shed_reply has 0 bytes"), (1025, "shed_reply has 1025 bytes")] {
        let server =
            Server::bind("127.0.0.1:0").admission(Admission::default().shed_reply(vec![b'x'; reply]));
        let error = server.start(|_shard| Echo).expect_err("the server does not start").to_string();
        assert!(error.contains(said), "{error}");
    }
}
