//! Nodes on whole servers by seed, in virtual time, with a NATS that splits, drops, lies, ends and
//! comes back.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::io;
use std::rc::Rc;
use std::time::Duration;

use ringserve::framing::Lines;
use ringserve::testing::{ClientStream, Net, Sim, SimServer};
use ringserve::topics::{Cursor, History, TopicOptions, Topics};
use ringserve::{Limits, Server};
use ringserve_nats::NatsOptions;
use ringserve_topics_nats::{BridgeMonitor, NatsBridge};

use crate::broker::{ADDR, Broker};
use crate::service::factory;

const SECOND: Duration = Duration::from_secs(1);
const MILLI: Duration = Duration::from_millis(1);
const NODES: [&str; 3] = ["10.0.0.1:7000", "10.0.0.2:7000", "10.0.0.3:7000"];

/// A node, with a bridge over a stream or without.
pub fn starts(sim: &Sim, addr: &str, entries: usize, is_stream: bool) -> (SimServer, BridgeMonitor) {
    let topics = Topics::new(TopicOptions::new(History::last(entries)));
    let options = NatsOptions::new(ADDR).reconnect_max(SECOND);
    let bridge = match is_stream {
        true => NatsBridge::stream(options, "push"),
        false => NatsBridge::live(options, "push"),
    };
    let monitor = bridge.monitor();
    topics.bridge(bridge);
    let limits = Limits::default().idle_timeout(None);
    let shards = 1 + sim.random() as usize % 3;
    let server = Server::bind(addr).framing(Lines::default()).limits(limits).shards(shards);
    (sim.start(server, factory(&topics)).unwrap(), monitor)
}

/// Does something bad to NATS now and then, for this many steps, and behaves from there on.
fn misbehaves(sim: &Sim, broker: &Rc<Broker>, steps: u64, forgets: bool) -> Rc<Cell<bool>> {
    let (broker, is_over) = (broker.clone(), Rc::new(Cell::new(false)));
    let over = is_over.clone();
    broker.script.piece.set([0, 7, 60][sim.random() as usize % 3]);
    broker.script.loses.set([0, 5, 20][sim.random() as usize % 3]);
    broker.script.lies.set([0, 4, 10][sim.random() as usize % 3]);
    sim.background("trouble", async move |net| {
        for _ in 0..steps {
            net.sleep(MILLI * (net.random() % 400) as u32).await;
            match net.random() % 16 {
                0 => broker.cut(),
                1 => broker.say("garbage\r\n"),
                2 => broker.say("MSG push.live.news 1 10\r\nshort\r\n"),
                3 => broker.say("-ERR 'Stale Connection'\r\n"),
                4 => broker.say("MSG push.live.news 2 1\r\nx\r\n"),
                5 => {
                    broker.script.is_down.set(true);
                    broker.cut();
                    net.sleep(MILLI * (net.random() % 4000) as u32).await;
                    broker.script.is_down.set(false);
                }
                6 => {
                    broker.script.is_plain.set(true);
                    net.sleep(MILLI * (net.random() % 6000) as u32).await;
                    broker.script.is_plain.set(false);
                }
                7 if forgets => {
                    broker.forget();
                    broker.cut();
                }
                _ => {}
            }
        }
        broker.script.loses.set(0);
        broker.script.lies.set(0);
        // Half a message may be on its way still.
        broker.cut();
        over.set(true);
        Ok(())
    });
    is_over
}

/// An event that a client saw: messages, and reports of a gap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Seen {
    Message(Cursor, String),
    Gap,
}

pub fn seen(line: &str) -> Seen {
    let words: Vec<&str> = line.splitn(3, ' ').collect();
    assert_eq!(words[0], "news", "{line:?} is of another topic");
    match words[1] {
        "!" => Seen::Gap,
        cursor => Seen::Message(cursor.parse().unwrap(), words[2].to_owned()),
    }
}

/// Asks until the answer is none of those of a bridge without a broker; what comes before it is
/// seen.
pub async fn ask(net: &Net, me: &mut ClientStream, all: &mut Vec<Seen>, text: &str) -> io::Result<String> {
    loop {
        me.send(format!("{text}\n")).await?;
        let said = loop {
            let line = me.line().await?.expect("the server answers");
            match line.strip_prefix("= ") {
                Some(said) => break said.to_owned(),
                None => all.push(seen(&line)),
            }
        };
        if said != "Disconnected" {
            return Ok(said);
        }
        net.sleep(SECOND / 2).await;
    }
}

/// A client that moves from node to node with its cursor, until it sees the last message.
async fn member(net: Net, moves: u64, is_member: Rc<Cell<usize>>) -> io::Result<(Cursor, Vec<Seen>)> {
    let (mut begun, mut all) = (None, Vec::new());
    loop {
        let node = NODES[net.random() as usize % NODES.len()];
        let mut me = net.connect(node).await?;
        let last = all.iter().rev().find_map(|seen| match seen {
            Seen::Message(cursor, _) => Some(*cursor),
            Seen::Gap => None,
        });
        let since = last.or(begun).map_or(String::new(), |cursor: Cursor| format!(" {cursor}"));
        let said = ask(&net, &mut me, &mut all, &format!("+news{since}")).await?;
        if begun.is_none() {
            begun = Some(said.parse().unwrap());
            is_member.set(is_member.get() + 1);
        }
        loop {
            let line = me.line().await?.expect("there is more");
            all.push(seen(&line));
            if line.ends_with(" end") {
                return Ok((begun.expect("it is a member"), all));
            }
            if moves > 0 && net.random().is_multiple_of(moves) {
                break;
            }
        }
        net.sleep(MILLI * (net.random() % 2000) as u32).await;
    }
}

/// Publishes on any node, while members come and go, and says the last message once all is well.
fn publishes(sim: &Sim, count: u64, ready: Rc<Cell<usize>>, members: usize, is_over: Rc<Cell<bool>>) {
    sim.client("publisher", async move |net| {
        while ready.get() < members {
            net.sleep(SECOND / 4).await;
        }
        for n in 0..count {
            let node = NODES[net.random() as usize % NODES.len()];
            let mut me = net.connect(node).await?;
            let how = if net.random().is_multiple_of(3) { "news" } else { "!news" };
            ask(&net, &mut me, &mut Vec::new(), &format!("{how} text {n}")).await?;
            net.sleep(MILLI * (net.random() % 200) as u32).await;
        }
        while !is_over.get() {
            net.sleep(SECOND).await;
        }
        // In its last moments NATS may have dropped what was on its way.
        net.sleep(10 * SECOND).await;
        let mut me = net.connect(NODES[0]).await?;
        while ask(&net, &mut me, &mut Vec::new(), "!news end").await? != "ok" {}
        Ok(())
    });
}

fn campaign(sim: &Sim, entries: usize, forgets: bool) -> (Rc<Broker>, Vec<(Cursor, Vec<Seen>)>) {
    let broker = Broker::start(sim);
    let nodes = NODES.map(|addr| starts(sim, addr, entries, true));
    let is_over = misbehaves(sim, &broker, 60, forgets);
    let (ready, members) = (Rc::new(Cell::new(0)), 4);
    let results = Rc::new(RefCell::new(Vec::new()));
    for n in 0..members {
        let (results, ready) = (results.clone(), ready.clone());
        sim.client(format!("m{n}"), async move |net| {
            let moves = [0, 4, 12][net.random() as usize % 3];
            let result = member(net.clone(), moves, ready).await?;
            results.borrow_mut().push(result);
            Ok(())
        });
    }
    publishes(sim, 60, ready, members, is_over);
    sim.run_until_done();
    drop(nodes);
    let results = results.take();
    assert_eq!(results.len(), members);
    (broker, results)
}

#[test]
fn members_miss_nothing_that_the_stream_keeps() {
    Sim::seeds(6).run(|sim| {
        let (broker, results) = campaign(sim, 1000, false);
        let taken = broker.taken.borrow();
        for (begun, all) in results {
            let expected: Vec<(u64, &str)> = taken
                .iter()
                .filter(|kept| kept.subject == "push.t.news" && kept.seq > begun.seq)
                .map(|kept| (kept.seq, &*kept.payload))
                .collect();
            let got: Vec<(u64, &str)> = all
                .iter()
                .map(|seen| match seen {
                    Seen::Message(cursor, text) => (cursor.seq, &**text),
                    Seen::Gap => panic!("a gap is told where the stream has all: {all:?}"),
                })
                .collect();
            assert_eq!(got, expected, "each message comes once, in the order of the stream");
        }
    });
}

#[test]
fn what_is_missing_is_told() {
    Sim::seeds(6).run(|sim| {
        let forgets = sim.seed().is_multiple_of(2);
        let (broker, results) = campaign(sim, if forgets { 1000 } else { 4 }, forgets);
        let taken = broker.taken.borrow();
        for (begun, all) in results {
            let (mut next, mut may_miss) = (0, forgets || begun.seq > 0);
            for seen in &all {
                let Seen::Message(cursor, text) = seen else {
                    may_miss = true;
                    continue;
                };
                // A stream that was made again gives numbers again, and may take a message once
                // more.
                let is_it = |place: &usize| {
                    let kept = &taken[*place];
                    (kept.epoch, kept.seq, &kept.payload) == (cursor.epoch, cursor.seq, text)
                };
                let place = (next..taken.len()).find(is_it);
                let place = place.unwrap_or_else(|| panic!("{text} comes twice, or is none: {all:?}"));
                assert!(place == next || may_miss, "{text} is not what follows: {all:?}");
                (next, may_miss) = (place + 1, false);
            }
        }
    });
}

#[test]
fn live_messages_are_missing_at_gaps_alone() {
    Sim::seeds(6).run(|sim| {
        let broker = Broker::start(sim);
        let nodes = NODES.map(|addr| starts(sim, addr, 1000, false));
        let is_over = misbehaves(sim, &broker, 40, false);
        broker.script.loses.set(0);
        let ready = Rc::new(Cell::new(0));
        for (n, node) in NODES.into_iter().enumerate() {
            let (ready, is_over, broker) = (ready.clone(), is_over.clone(), broker.clone());
            sim.client(format!("m{n}"), async move |net| {
                let (mut me, mut all) = (net.connect(node).await?, Vec::new());
                ask(&net, &mut me, &mut all, "+news").await?;
                // What comes before NATS knows of it is no loss.
                while !broker.subjects().contains("push.t.news") {
                    net.sleep(SECOND).await;
                }
                net.sleep(3 * SECOND).await;
                ready.set(ready.get() + 1);
                while ready.get() < NODES.len() {
                    net.sleep(SECOND).await;
                }
                let mut mine = net.connect(node).await?;
                for text in 0..30 {
                    ask(&net, &mut mine, &mut Vec::new(), &format!("news {n} {text}")).await?;
                    net.sleep(MILLI * (net.random() % 300) as u32).await;
                }
                while !is_over.get() {
                    net.sleep(SECOND).await;
                }
                net.sleep(10 * SECOND).await;
                ask(&net, &mut mine, &mut Vec::new(), &format!("news {n} 30")).await?;
                let mut next: BTreeMap<String, u64> = BTreeMap::new();
                let mut may_miss: BTreeMap<String, bool> = BTreeMap::new();
                let (mut ended, mut gaps) = (0, 0);
                while ended < NODES.len() {
                    if all.is_empty() {
                        all.push(seen(&me.line().await?.expect("there is more")));
                    }
                    match all.remove(0) {
                        Seen::Gap => {
                            gaps += 1;
                            may_miss.values_mut().for_each(|may| *may = true);
                        }
                        Seen::Message(_, text) => {
                            let (by, number) = text.split_once(' ').unwrap();
                            let number: u64 = number.parse().unwrap();
                            ended += usize::from(number == 30);
                            let expected = next.insert(by.into(), number + 1).unwrap_or(0);
                            // A loss at the other end is reported there.
                            let may = may_miss.insert(by.into(), false).unwrap_or(true);
                            let is_own = by == n.to_string();
                            assert!(number >= expected, "{text} comes twice, or late");
                            assert!(!is_own || number == expected, "{text} of this node is missing");
                            assert!(number == expected || may || !is_own, "{text} is missing");
                        }
                    }
                }
                assert!(gaps > 0, "a connection that was cut is a gap");
                Ok(())
            });
        }
        sim.run_until_done();
        drop(nodes);
    });
}
