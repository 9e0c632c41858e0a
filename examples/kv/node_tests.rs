use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use proptest::prelude::*;

use super::*;
use crate::inline;

/// Messages on their way between the shards of one test, in order for each pair.
type Way = Rc<RefCell<VecDeque<(usize, usize, Message)>>>;

struct Line {
    from: usize,
    way: Way,
    /// Messages that fit.
    room: usize,
}

impl Post for Line {
    fn send(&self, to: usize, message: Message) -> Result<(), SendError<Message>> {
        let mut way = self.way.borrow_mut();
        if way.len() >= self.room {
            return Err(SendError::Full(message));
        }
        way.push_back((self.from, to, message));
        Ok(())
    }
}

struct Lab {
    nodes: Vec<Node<Line>>,
    way: Way,
}

impl Lab {
    fn new(shards: usize, room: usize) -> Lab {
        let (keyer, way) = (Keyer::default(), Way::default());
        let node = |index| {
            let line = Line { from: index, way: way.clone(), room };
            Node::new(Place { index, shards }, keyer, 1 << 20, line)
        };
        Lab { nodes: (0..shards).map(node).collect(), way }
    }

    /// The reply to a line that arrives at shard `at`.
    fn ask(&self, at: usize, line: &str) -> String {
        let request = inline::to_array(line.as_bytes());
        let command = commands::find(line.split(' ').next().unwrap_or_default().as_bytes()).unwrap();
        let node = &self.nodes[at];
        let reply = match Plan::of(command, &request, node.place(), node.keyer()) {
            None => node.work(&request, Protocol::Resp2),
            Some(plan) => self.run(node.ask_all(plan, Protocol::Resp2)),
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
            let (from, to, message) = next.expect("somebody waits, and nothing is on its way");
            self.nodes[to].receive(from, message);
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
    assert!(replies.iter().any(|reply| reply == "-TRYAGAIN shard 1, which owns a key, is behind"));
}

#[derive(Default)]
struct Wakes(AtomicUsize);

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn an_answer_that_finds_the_way_full_is_sent_by_the_courier() {
    let way = Way::default();
    let line = Line { from: 1, way: way.clone(), room: 1 };
    let node = Rc::new(Node::new(Place { index: 1, shards: 2 }, Keyer::default(), 1 << 20, line));
    let wakes = Arc::<Wakes>::default();
    let waker = wakes.clone().into();
    let mut courier = pin!(node.clone().courier());
    let mut poll = || assert!(courier.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    poll();

    let pending = Rc::<Pending>::default();
    for _ in 0..2 {
        let slot = pending.ask().id();
        let request = inline::to_array(b"get key");
        node.receive(0, Message::Ask { request, protocol: Protocol::Resp2, slot });
    }
    assert_eq!(
        (way.borrow().len(), wakes.0.load(Ordering::Relaxed)),
        (1, 1),
        "one is sent, one wakes the courier"
    );
    poll();
    assert_eq!(wakes.0.load(Ordering::Relaxed), 2, "still full: again in the next turn");
    way.borrow_mut().clear();
    poll();
    assert_eq!(
        (way.borrow().len(), wakes.0.load(Ordering::Relaxed)),
        (1, 2),
        "it is sent, and the courier rests"
    );
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
