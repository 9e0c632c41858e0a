//! Faults of NATS, and of others who use it, one at a time.

use std::io;
use std::rc::Rc;
use std::time::Duration;

use ringserve::testing::{ClientStream, Faults, Net, Sim, SimServer};
use ringserve_topics_nats::BridgeMonitor;

use crate::broker::Broker;
use crate::by_seed::{Seen, ask, seen, starts};

const SECOND: Duration = Duration::from_secs(1);
const NODES: [&str; 2] = ["10.0.0.1:7000", "10.0.0.2:7000"];

type Nodes = [(SimServer, BridgeMonitor); 2];

/// Two nodes, whose history has this number of entries, and a broker.
fn nodes(sim: &Sim, entries: usize, is_stream: bool) -> (Rc<Broker>, Nodes) {
    let broker = Broker::start(sim);
    (broker, NODES.map(|addr| starts(sim, addr, entries, is_stream)))
}

/// A member of the topic `news` on a node, and what it got.
struct Member {
    net: Net,
    stream: ClientStream,
    all: Vec<Seen>,
}

impl Member {
    async fn new(net: &Net, node: &str, since: &str) -> io::Result<Member> {
        let stream = net.connect(node).await?;
        let mut member = Member { net: net.clone(), stream, all: Vec::new() };
        let said = member.ask(&format!("+news{since}")).await?;
        assert!(said.contains('-'), "{said} is no cursor");
        Ok(member)
    }

    async fn ask(&mut self, text: &str) -> io::Result<String> {
        ask(&self.net, &mut self.stream, &mut self.all, text).await
    }

    /// Reads up to this message, and returns all texts.
    async fn until(&mut self, text: &str) -> io::Result<Vec<String>> {
        while !self.all.iter().any(|seen| matches!(seen, Seen::Message(_, said) if said == text)) {
            self.all.push(seen(&self.stream.line().await?.expect("there is more")));
        }
        let said = std::mem::take(&mut self.all).into_iter().map(|seen| match seen {
            Seen::Message(_, text) => text,
            Seen::Gap => "(gap)".to_owned(),
        });
        Ok(said.collect())
    }
}

#[test]
fn topic_without_members_is_left_at_nats() {
    Sim::seeds(4).faults(Faults::harmless()).run(|sim| {
        let is_stream = sim.seed().is_multiple_of(2);
        let (broker, _nodes) = nodes(sim, 10, is_stream);
        let subject = if is_stream { "push.live.news" } else { "push.t.news" };
        sim.client("member", async move |net| {
            let mut member = Member::new(&net, NODES[0], "").await?;
            net.sleep(5 * SECOND).await;
            assert!(broker.subjects().contains(subject));
            assert_eq!(member.ask("-news").await?, "true");
            net.sleep(60 * SECOND).await;
            assert!(!broker.subjects().contains(subject), "it has no member");
            let mut member = Member::new(&net, NODES[0], "").await?;
            net.sleep(5 * SECOND).await;
            assert!(broker.subjects().contains(subject), "it is back");
            assert_eq!(member.ask("!news again").await?, "ok");
            assert_eq!(member.until("again").await?, ["again"]);
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn fields_that_others_write_stop_no_topic() {
    Sim::seeds(4).faults(Faults::harmless()).run(|sim| {
        let (broker, _nodes) = nodes(sim, 100, true);
        sim.client("member", async move |net| {
            let mut member = Member::new(&net, NODES[0], "").await?;
            let forged = [
                "Ringserve-Key: 50%\r\n",
                "Nats-Subject: push.t.other\r\nNats-Last-Sequence: 77\r\n",
                "Nats-Sequence: 18446744073709551615\r\nNats-Stream: other\r\n",
                "Nats-Sequence: 0\r\n",
            ];
            for (n, fields) in forged.into_iter().enumerate() {
                broker.publish(&net, "push.t.news", &format!("NATS/1.0\r\n{fields}\r\n"), &format!("{n}"));
            }
            assert_eq!(member.ask("!news end").await?, "ok");
            assert_eq!(member.until("end").await?, ["0", "1", "2", "3", "end"]);
            let mut other = Member::new(&net, NODES[1], " retained").await?;
            assert_eq!(other.until("end").await?, ["end"]);
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn numbers_that_go_back_are_a_gap() {
    Sim::seeds(6).faults(Faults::harmless()).run(|sim| {
        let (broker, _nodes) = nodes(sim, 100, true);
        sim.client("member", async move |net| {
            let mut member = Member::new(&net, NODES[0], "").await?;
            for n in 0..6 {
                assert_eq!(member.ask(&format!("!news {n}")).await?, "ok");
            }
            assert_eq!(member.until("5").await?, ["0", "1", "2", "3", "4", "5"]);
            broker.lose(3);
            broker.cut();
            net.sleep(10 * SECOND).await;
            for text in ["new 3", "new 4", "end"] {
                assert_eq!(member.ask(&format!("!news {text}")).await?, "ok");
            }
            assert_eq!(member.until("end").await?, ["(gap)", "new 3", "new 4", "end"]);
            let mut other = Member::new(&net, NODES[0], " retained").await?;
            assert_eq!(other.until("end").await?, ["end"]);
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn inbox_that_is_refused_stops_no_node() {
    Sim::seeds(4).faults(Faults::harmless()).run(|sim| {
        let (broker, _nodes) = nodes(sim, 10, false);
        broker.script.refuses.replace("_INBOX");
        sim.client("member", async move |net| {
            net.sleep(5 * SECOND).await;
            let mut member = Member::new(&net, NODES[0], "").await?;
            let mut publisher = Member::new(&net, NODES[1], "").await?;
            net.sleep(5 * SECOND).await;
            assert_eq!(publisher.ask("news text").await?, "ok");
            assert_eq!(member.until("text").await?, ["text"]);
            broker.cut();
            net.sleep(20 * SECOND).await;
            assert_eq!(publisher.ask("news end").await?, "ok");
            assert_eq!(member.until("end").await?, ["(gap)", "end"]);
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn subject_that_is_refused_is_read_now_and_then() {
    Sim::seeds(4).faults(Faults::harmless()).run(|sim| {
        let (broker, nodes) = nodes(sim, 10, true);
        broker.script.refuses.replace("push.live");
        let monitor = nodes[0].1.clone();
        sim.client("member", async move |net| {
            let mut member = Member::new(&net, NODES[0], "").await?;
            assert_eq!(member.ask("!news text").await?, "ok");
            assert_eq!(member.until("text").await?, ["text"]);
            net.sleep(30 * SECOND).await;
            let asked = monitor.stats().catch_ups;
            assert!(asked < 30, "it asked {asked} times");
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn subject_that_is_refused_is_told_to_members() {
    Sim::seeds(4).faults(Faults::harmless()).run(|sim| {
        let (broker, _nodes) = nodes(sim, 10, false);
        broker.script.refuses.replace("push.t");
        sim.client("member", async move |net| {
            let mut member = Member::new(&net, NODES[0], "").await?;
            net.sleep(10 * SECOND).await;
            assert_eq!(member.ask("news end").await?, "ok");
            assert_eq!(member.until("end").await?, ["(gap)", "end"]);
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn messages_of_other_topics_make_no_gap() {
    Sim::seeds(4).faults(Faults::harmless()).run(|sim| {
        let (broker, _nodes) = nodes(sim, 1, true);
        broker.script.has_bound.set(true);
        sim.client("member", async move |net| {
            let mut member = Member::new(&net, NODES[0], "").await?;
            for n in 0..100 {
                broker.publish(&net, "push.t.other", "", &format!("{n}"));
                net.sleep(SECOND).await;
            }
            assert_eq!(member.ask("!news end").await?, "ok");
            assert_eq!(member.until("end").await?, ["end"]);
            Ok(())
        });
        sim.run_until_done();
    });
}
