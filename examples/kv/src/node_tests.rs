use std::cell::Cell;
use std::collections::VecDeque;
use std::pin::pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use proptest::prelude::*;

use super::*;
use crate::resp;
use crate::session::{Listed, Session};

/// Messages on their way between the shards of one test, in order for each pair.
type Way = Rc<RefCell<VecDeque<(usize, Message)>>>;

struct Line {
    way: Way,
    /// True once the other shards ended.
    ended: Rc<Cell<bool>>,
    /// Messages that fit.
    room: usize,
}

impl Post for Line {
    fn send(&self, to: usize, message: Message) -> Result<(), SendError<Message>> {
        if self.ended.get() {
            return Err(SendError::Gone(message));
        }
        let mut way = self.way.borrow_mut();
        if way.len() >= self.room {
            return Err(SendError::Full(message));
        }
        way.push_back((to, message));
        Ok(())
    }
}

struct Lab {
    nodes: Vec<Node<Line>>,
    way: Way,
    ended: Rc<Cell<bool>>,
}

impl Lab {
    fn new(shards: usize, room: usize) -> Lab {
        let (keyer, way, ended) = (Keyer::default(), Way::default(), Rc::<Cell<bool>>::default());
        let node = |index| {
            let line = Line { way: way.clone(), ended: ended.clone(), room };
            Node::new(Place { index, shards }, keyer, 1 << 20, Clock::Stopped, line)
        };
        Lab { nodes: (0..shards).map(node).collect(), way, ended }
    }

    /// Keys that this shard owns.
    fn keys_of(&self, shard: usize) -> impl Iterator<Item = String> {
        let keyer = *self.nodes[0].keyer();
        let shards = self.nodes.len();
        let owned = move |name: &String| keyer.key(name.as_bytes()).owner(shards) == shard;
        (0..).map(|n| format!("key:{n}")).filter(owned)
    }

    /// The reply to a line that arrives at shard `at`.
    fn ask(&self, at: usize, line: &str) -> String {
        let request = resp::request_of_line(line.as_bytes());
        let command = commands::find(line.split(' ').next().unwrap_or_default().as_bytes()).unwrap();
        let node = &self.nodes[at];
        let reply = match Plan::of(command, &request, node.place(), node.keyer()) {
            None => node.work(Work { request, protocol: Protocol::Resp2, skip: 0 }).bytes,
            Some(plan) => {
                let mut reply = Vec::new();
                let write = async |piece: &[u8]| reply.extend_from_slice(piece);
                self.run(node.ask_all(plan, Protocol::Resp2, write));
                reply
            }
        };
        String::from_utf8(reply).unwrap().trim_end().replace("\r\n", " ")
    }

    fn run<T>(&self, future: impl Future<Output = T>) -> T {
        let mut future = pin!(future);
        loop {
            if let Poll::Ready(done) = future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                return done;
            }
            let next = self.way.borrow_mut().pop_front();
            let (to, message) = next.expect("a call waits, and no message is on its way");
            self.nodes[to].receive(message);
        }
    }
}

#[test]
fn keys_are_found_from_every_shard() {
    let lab = Lab::new(3, 100);
    for n in 0..50 {
        assert_eq!(lab.ask(n % 3, &format!("set key:{n} {n}")), "+OK");
    }
    for n in 0..50 {
        assert_eq!(lab.ask((n + 1) % 3, &format!("incr key:{n}")), format!(":{}", n + 1));
    }
    assert!(lab.nodes.iter().all(|node| node.store().len() > 0), "each shard owns some");
    assert_eq!(lab.ask(1, "mget key:5 none key:7 key:5"), "*4 $1 6 $-1 $1 8 $1 6");
    assert_eq!(lab.ask(2, "dbsize"), ":50");
    assert_eq!(lab.ask(0, "scan 1 count x"), "-ERR value is not an integer or out of range");
    assert_eq!(lab.ask(0, "mset a 1 b"), "-ERR wrong number of arguments for 'mset' command");
    assert_eq!(lab.ask(0, "flushall sync"), "+OK");
    assert_eq!(lab.ask(0, "keys *"), "*0");
}

#[test]
fn a_shard_that_is_behind_is_not_waited_for() {
    let lab = Lab::new(2, 0);
    let replies: Vec<String> = (0..20).map(|n| lab.ask(0, &format!("get key:{n}"))).collect();
    assert!(replies.iter().any(|reply| reply == "$-1"), "those of this shard are answered");
    assert!(replies.iter().any(|reply| reply == "-TRYAGAIN shard 1 has too many requests waiting"));
}

#[test]
fn shards_behind_one_that_is_full_are_asked_too() {
    let lab = Lab::new(3, 0);
    let (far, own) = (lab.keys_of(0).next().unwrap(), lab.keys_of(2).next().unwrap());
    let reply = lab.ask(2, &format!("mset {far} 1 {own} 2"));
    assert_eq!(reply, "-TRYAGAIN shard 0 has too many requests waiting");
    assert_eq!(lab.ask(2, &format!("get {own}")), "$1 2");
}

#[test]
fn shard_that_ended_is_an_error_and_no_hang() {
    let lab = Lab::new(2, 100);
    let there = lab.keys_of(1).next().unwrap();
    // It ends with the question in its mailbox.
    let request = resp::request_of_line(format!("get {there}").as_bytes());
    let plan = Plan::forward(1, &request);
    let mut reply = Vec::new();
    {
        let write = async |piece: &[u8]| reply.extend_from_slice(piece);
        let mut asking = pin!(lab.nodes[0].ask_all(plan, Protocol::Resp2, write));
        let mut poll = || asking.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        assert!(poll().is_pending());
        lab.way.borrow_mut().clear();
        assert!(poll().is_ready());
    }
    assert_eq!(reply, b"-ERR shard 1 gave no answer\r\n");
    // It ended before.
    lab.ended.set(true);
    for line in
        [format!("get {there}"), format!("mget {there}"), "keys *".into(), "dbsize".into(), "scan 1".into()]
    {
        assert_eq!(lab.ask(0, &line), "-ERR shard 1 has ended", "{line}");
    }
    assert_eq!(lab.run(lab.nodes[0].all_figures()), Err(Unanswered::Ended(1)));
    assert_eq!(lab.run(lab.nodes[0].all_clients(1)), Err(Unanswered::Ended(1)));
}

#[test]
fn long_values_of_other_shards_come_in_pieces() {
    let lab = Lab::new(3, 100);
    // Two keys of each shard, so that a value which comes twice shows.
    let keys: Vec<String> = (0..6).map(|n| lab.keys_of(n % 3).nth(n / 3).unwrap()).collect();
    let letters = ["a", "b", "c", "d", "e", "f"];
    for (key, letter) in keys.iter().zip(letters) {
        assert_eq!(lab.ask(0, &format!("set {key} {}", letter.repeat(100_000))), "+OK");
    }
    // 80 values of 100 kB: 8 MB, of which a shard sends 300 kB at once.
    let order: Vec<usize> = (0..80).map(|n| (n * n + n / 7) % 6).collect();
    let line = order.iter().fold("mget".to_owned(), |line, key| format!("{line} {}", keys[*key]));
    let expected: Vec<&str> = order.iter().map(|key| letters[*key]).collect();
    let request = resp::request_of_line(line.as_bytes());
    let node = &lab.nodes[0];
    let plan = Plan::of(commands::Command::MGet, &request, node.place(), node.keyer()).unwrap();
    let (mut reply, mut longest) = (Vec::new(), 0);
    lab.run(node.ask_all(plan, Protocol::Resp2, async |piece| {
        longest = longest.max(piece.len());
        reply.extend_from_slice(piece);
    }));
    let reply = String::from_utf8(reply).unwrap();
    let values: Vec<&str> =
        reply.split("\r\n").filter(|value| value.len() == 100_000).map(|value| &value[..1]).collect();
    assert!(reply.starts_with("*80\r\n$100000\r\n"));
    assert_eq!(values, expected);
    assert!(longest < 3 * 400_000, "{longest} bytes at once");
}

#[test]
fn info_tells_the_sum_of_all_shards() {
    let lab = Lab::new(3, 100);
    for n in 0..30 {
        lab.ask(0, &format!("set key:{n} v"));
        lab.ask(1, &format!("expire key:{} 100", n / 2));
    }
    for (n, node) in lab.nodes.iter().enumerate() {
        node.counts().open.set(n as u64 + 1);
        node.counts().opened.set(10 * (n as u64 + 1));
        node.counts().commands.set(100 * (n as u64 + 1));
    }
    for node in &lab.nodes {
        let expected = Figures { open: 6, opened: 60, commands: 600, keys: 30, ending: 15, expired: 0 };
        assert_eq!(lab.run(node.all_figures()), Ok(expected));
    }
}

#[test]
fn client_list_tells_the_connections_of_all_shards() {
    let lab = Lab::new(3, 100);
    let sessions: Vec<Session> = (0..9).map(|_| Session::default()).collect();
    for (n, session) in sessions.iter().enumerate() {
        lab.nodes[n % 3].clients().open(session, n as u64 + 1, format!("192.0.2.1:{n}"), Duration::ZERO);
    }
    lab.nodes[1].clients().close(&sessions[4]);
    let lines = lab.run(lab.nodes[2].all_clients(3)).unwrap();
    let ids: Vec<u64> = lines.iter().map(|line| line.id).collect();
    assert_eq!(ids, [1, 2, 3, 4, 6, 7, 8, 9]);
    assert!(lines[3].text.starts_with("id=4 addr=192.0.2.1:3 name= age=0 "), "{lines:?}");
    let asks: Vec<bool> = lines.iter().map(|line| line.text.contains(" cmd=client")).collect();
    assert_eq!(asks.iter().position(|asks| *asks), Some(2), "{lines:?}");
    assert_eq!(asks.iter().filter(|asks| **asks).count(), 1);
    assert_eq!(Listed::Ids(vec![9, 2, 77]).text(&lines), [&lines[1].text[..], &lines[7].text].concat());
    assert_eq!(Listed::None.text(&lines), "");
}

fn any_line() -> impl Strategy<Value = String> {
    let key = (0..12u8).prop_map(|key| format!("key:{key}"));
    let keys = prop::collection::vec(key.clone(), 1..6).prop_map(|keys| keys.join(" "));
    prop_oneof![
        (key.clone(), 0..99u8).prop_map(|(key, value)| format!("set {key} {value}")),
        (key.clone(), prop::sample::select(&["get", "incr", "strlen", "ttl", "type"]))
            .prop_map(|(key, command)| format!("{command} {key}")),
        (keys, prop::sample::select(&["mget", "del", "exists"]))
            .prop_map(|(keys, name)| format!("{name} {keys}")),
        prop::collection::vec((key, 0..99u8), 1..5).prop_map(|pairs| {
            pairs.iter().fold("mset".to_owned(), |line, (key, value)| format!("{line} {key} {value}"))
        }),
        Just("dbsize".to_owned()),
        Just("flushall".to_owned()),
    ]
}

/// All keys, in order, as SCAN finds them.
fn scanned(lab: &Lab) -> Vec<String> {
    let (mut cursor, mut keys) = ("0".to_owned(), Vec::new());
    loop {
        let reply = lab.ask(0, &format!("scan {cursor} count 3"));
        let words: Vec<&str> = reply.split(' ').collect();
        cursor = words[2].to_owned();
        keys.extend(words.iter().filter(|word| word.starts_with("key:")).map(|word| word.to_string()));
        if cursor == "0" {
            keys.sort();
            return keys;
        }
    }
}

proptest! {
    #[test]
    fn several_shards_answer_as_one_does(lines in prop::collection::vec((any_line(), 0..4usize), 0..60)) {
        let (one, four) = (Lab::new(1, 100), Lab::new(4, 100));
        for (line, at) in lines {
            prop_assert_eq!(four.ask(at, &line), one.ask(0, &line), "{}", line);
        }
        prop_assert_eq!(scanned(&four), scanned(&one));
    }
}
