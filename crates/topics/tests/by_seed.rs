//! Topics in simulations, by seed: what members of any shard get, however slowly they read, and
//! while others come and go.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::convert::Infallible;
use std::io::ErrorKind;
use std::rc::Rc;
use std::time::Duration;

use ringserve::framing::Delimiter;
use ringserve::service::{OpenCx, Refusal, Session};
use ringserve::testing::{Faults, Sim, SimServer};
use ringserve::topics::{
    self, Cursor, Form, FormId, History, ShardTopics, Since, Slow, Subscriber, TopicOptions, Topics,
};
use ringserve::{Cx, Frame, Limits, Server, Service};

const SECOND: Duration = Duration::from_secs(1);

/// `+topic slow since` subscribes, `-topic` ends it, `-` ends all, `topic text` publishes,
/// `topic#key text` under a key, `?topic` counts the members, `@topic` names them, `<topic since
/// count` reads a feed, `^count` makes the connection that many members, which leave one by one.
/// `*topic count` publishes as many messages in one turn; for `~` and `%` see `edges`. Each `|` of
/// a text is published as the end of a line.
struct News {
    topics: ShardTopics,
    form: FormId,
}

struct Reader(Subscriber);
impl Session for Reader {}

impl Service for News {
    type Session = Reader;
    type Error = Infallible;

    async fn open(&self, opening: &OpenCx<'_>) -> Result<Reader, Refusal> {
        let subscriber = self.topics.subscriber(opening.local_handle(), self.form);
        subscriber.set_shown(Some(format!("c{}", opening.id().slot()).into()));
        Ok(Reader(subscriber))
    }

    async fn call(&self, cx: &Cx<'_, Reader>, line: Frame) -> Result<(), Infallible> {
        let (line, me) = (String::from_utf8_lossy(&line).into_owned(), &cx.session().0);
        let words: Vec<&str> = line.splitn(3, ' ').collect();
        let said = match (line.get(..1).unwrap_or_default(), &*words) {
            ("+", [topic, slow, since]) => {
                let subscribed = me.subscribe(&topic[1..], since_of(since), slow_of(slow)).await;
                subscribed.map_or_else(|error| error.to_string(), |cursor| cursor.to_string())
            }
            ("-", ["-"]) => {
                me.unsubscribe_all();
                me.count().to_string()
            }
            ("-", [topic]) => me.unsubscribe(&topic[1..]).to_string(),
            ("^", [count]) => self.crowd(cx, count[1..].parse().unwrap()).await,
            ("?", [topic]) => format!("{:?}", self.topics.count(&topic[1..]).await),
            ("@", [topic]) => {
                let mut names = Vec::new();
                for shard in 0..self.topics.shard().count() {
                    names.extend(self.topics.members(&topic[1..], shard, 0).await.unwrap());
                }
                names.len().to_string()
            }
            ("<", [topic, since, count]) => {
                let mut feed = self.topics.reader(&topic[1..], self.form, since_of(since)).await.unwrap();
                for _ in 0..count.parse().unwrap() {
                    cx.reply(feed.next().await);
                }
                feed.cursor().to_string()
            }
            ("*", [topic, count]) => {
                let publish = |n| self.topics.publish(&topic[1..], format!("{} burst {n}", &topic[1..]));
                (0..count.parse().unwrap()).filter(|n: &u32| publish(*n).is_ok()).count().to_string()
            }
            ("~", [topic, count]) => self.late_reader(cx, &topic[1..], count.parse().unwrap()).await,
            ("%", [topic, feeds, count]) => {
                self.many_readers(&topic[1..], feeds.parse().unwrap(), count.parse().unwrap()).await
            }
            (_, [topic, text @ ..]) => {
                let text = text.join(" ").replace('|', "\n");
                let published = match topic.split_once('#') {
                    None => self.topics.publish(topic, text),
                    Some((topic, key)) => self.topics.publish_keyed(topic, key, text),
                };
                published.map_or_else(|error| error.to_string(), |()| "ok".into())
            }
            _ => "what?".into(),
        };
        cx.reply(format!("= {said}"));
        Ok(())
    }
}

impl News {
    /// The most deliveries of a page, and what all members get before and after most of them leave.
    async fn crowd(&self, cx: &Cx<'_, Reader>, count: usize) -> String {
        let shard = self.topics.shard();
        let mut crowd = Vec::new();
        for _ in 0..count {
            let one = self.topics.subscriber(cx.local_handle(), self.form);
            one.subscribe("crowd", Since::Newest, Slow::Queue).await.unwrap();
            crowd.push(one);
        }
        let deliveries = |topics: &ShardTopics| {
            let figures = topics.figures();
            figures.iter().find(|of| &*of.topic == "crowd").map_or(0, |of| of.deliveries)
        };
        let (most, before) = (Rc::new(Cell::new(0)), Cell::new(deliveries(&self.topics)));
        let (seen, topics, awaited) = (most.clone(), self.topics.clone(), Rc::new(Cell::new(count as u64)));
        let until = awaited.clone();
        // It has a page of each turn, as topics have, until all have the message: a shard with a
        // page is never idle, and the time of a simulation stands still meanwhile.
        let watch = shard.pages(move |_page| {
            let now = deliveries(&topics);
            seen.set(seen.get().max(now - before.replace(now)));
            now < until.get()
        });
        watch.ask();
        self.topics.publish("crowd", "crowd p 0").unwrap();
        let told = |from: u64| async move {
            for _ in 0..30 {
                shard.sleep(SECOND / 10).await;
            }
            deliveries(&self.topics) - from
        };
        let all = told(0).await;
        let mut at = 0;
        // In an order that is none of those in which they came.
        while crowd.len() > count / 10 {
            at = (at + 7919) % crowd.len();
            crowd.swap_remove(at);
        }
        awaited.set(all + crowd.len() as u64);
        watch.ask();
        self.topics.publish("crowd", "crowd p 1").unwrap();
        let rest = told(all).await;
        drop(crowd);
        format!("{} {all} {rest}", most.get())
    }
}

fn since_of(word: &str) -> Since {
    match word {
        "newest" => Since::Newest,
        "retained" => Since::Retained,
        cursor => Since::Cursor(cursor.parse().unwrap()),
    }
}

fn slow_of(word: &str) -> Slow {
    match word {
        "skip" => Slow::Skip,
        "latest" => Slow::Latest,
        "queue" => Slow::Queue,
        "cut" => Slow::Cut { behind: 20, within: 600 * SECOND },
        "late" => Slow::Cut { behind: u64::MAX, within: 5 * SECOND },
        _ => panic!("{word}"),
    }
}

type All = Rc<RefCell<Vec<ShardTopics>>>;

fn starts(sim: &Sim, shards: usize, options: TopicOptions) -> (SimServer, Topics, All) {
    starts_with(sim, shards, options, topics::Lines, Limits::default().outbox_bytes_high)
}

fn starts_with(
    sim: &Sim,
    shards: usize,
    options: TopicOptions,
    form: impl Form,
    bytes: usize,
) -> (SimServer, Topics, All) {
    let topics = Topics::new(options);
    let (form, all, outside) = (topics.form(form), All::default(), topics.clone());
    let shared = all.clone();
    // Peers that do not read are the affair of topics here.
    let limits = Limits::default().outbox_bytes_high(bytes).outbox_bytes_low(bytes / 4);
    let limits = limits.write_stall_timeout(None).write_bytes_per_second_min(0).idle_timeout(None);
    // As lines are, but that a message with the end of a line in it has no frame.
    let server = Server::bind("10.0.0.1:7000").framing(Delimiter::new("\n")).limits(limits).shards(shards);
    let server = sim.start(server, move |shard| {
        let topics = topics.register(shard);
        shared.borrow_mut().push(topics.clone());
        News { topics, form }
    });
    (server.unwrap(), outside, all)
}

/// The messages that a member got, and the conditions that they meet.
#[derive(Default)]
struct Seen {
    last: HashMap<String, Cursor>,
    missed: u64,
    gaps: usize,
    texts: Vec<(String, String)>,
}

impl Seen {
    /// Takes a line in. `is_whole` is false where messages may be left out without a word.
    fn take(&mut self, line: &str, oracle: &Oracle, is_whole: bool) {
        let words: Vec<&str> = line.splitn(3, ' ').collect();
        let [topic, cursor, text] = words[..] else { panic!("{line:?} is no message") };
        let last = self.last.get_mut(topic).unwrap_or_else(|| panic!("{line:?} is of another topic"));
        match (cursor, text.strip_prefix("missed ")) {
            ("!", Some(count)) => {
                let count: u64 = count.parse().unwrap();
                assert!(count > 0, "{line:?}");
                (last.seq, self.missed) = (last.seq + count, self.missed + count);
            }
            ("!", None) => self.gaps += 1,
            _ => {
                let cursor: Cursor = cursor.parse().unwrap();
                assert_eq!(cursor.epoch, last.epoch, "{line:?}");
                let is_next = if is_whole { cursor.seq == last.seq + 1 } else { cursor.seq > last.seq };
                assert!(is_next, "{line:.60?} behind {last}");
                *last = cursor;
                oracle.saw(topic, cursor, text);
                self.texts.push((topic.into(), text.into()));
            }
        }
    }
}

/// The messages as all members see them.
#[derive(Default)]
struct Oracle {
    texts: RefCell<BTreeMap<(String, u64, u64), String>>,
}

impl Oracle {
    fn saw(&self, topic: &str, Cursor { epoch, seq }: Cursor, text: &str) {
        let mut texts = self.texts.borrow_mut();
        let known = texts.entry((topic.into(), epoch, seq)).or_insert_with(|| text.into());
        assert_eq!(known, text, "message {seq} of {topic} is not the same for all");
        assert!(text.starts_with(topic), "{text:.60?} is none of {topic}");
    }

    /// Messages of each publisher are in its order.
    fn check(&self) {
        let mut last = BTreeMap::new();
        for ((topic, ..), text) in &*self.texts.borrow() {
            let mut words = text.split(' ').skip(1);
            let (by, number) = (words.next().unwrap(), words.next().unwrap().parse::<u64>().unwrap());
            let before = last.insert((topic.clone(), by.to_owned()), number);
            assert!(before.is_none_or(|before| before < number), "{text:.60?} behind {before:?}");
        }
    }
}

/// The answer to what was asked, with the messages before it taken in.
macro_rules! ask {
    ($me:ident, $seen:expr, $oracle:expr, $whole:expr, $($text:tt)*) => {{
        $me.send(format!($($text)*) + "\n").await?;
        loop {
            let line = $me.line().await?.expect("the server answers");
            match line.strip_prefix("= ") {
                Some(said) => break said.to_owned(),
                None => $seen.take(&line, &$oracle, $whole),
            }
        }
    }};
}

// Behind the macro that it uses.
#[path = "by_seed/edges.rs"]
mod edges;

#[test]
fn members_of_all_shards_get_messages_once_and_in_order() {
    Sim::seeds(20).faults(Faults::harmless()).run(|sim| {
        let shards = 1 + sim.seed() as usize % 4;
        let history = if sim.seed().is_multiple_of(2) { History::none() } else { History::last(1000) };
        let (server, outside, all) = starts(sim, shards, TopicOptions::new(history));
        let (addr, members, publishers) = (server.addr(), 1 + sim.random() % 6, 1 + sim.random() % 3);
        let (oracle, ready, ended) =
            (Rc::new(Oracle::default()), Rc::new(Cell::new(0)), Rc::new(Cell::new(0)));
        for n in 0..members {
            let (oracle, ready, outside) = (oracle.clone(), ready.clone(), outside.clone());
            let ended = ended.clone();
            sim.client(format!("m{n}"), async move |net| {
                let (mut me, mut seen) = (net.connect(addr).await?, Seen::default());
                for topic in ["a", "b.c"] {
                    let cursor = ask!(me, seen, oracle, true, "+{topic} skip newest");
                    seen.last.insert(topic.into(), cursor.parse().unwrap());
                    assert_eq!(ask!(me, seen, oracle, true, "+{topic} skip newest"), "subscribed already");
                }
                ready.set(ready.get() + 1);
                if n == 0 {
                    while ready.get() < members {
                        net.sleep(SECOND).await;
                    }
                    let counted = ask!(me, seen, oracle, true, "?a");
                    assert_eq!(counted, format!("Ok({members})"));
                    assert_eq!(ask!(me, seen, oracle, true, "@a"), members.to_string());
                    // A thread beside the shards publishes too.
                    outside.publish("a", "a outside 1").unwrap();
                }
                let all = 2 * publishers as usize * 30 + 1;
                while seen.texts.len() < all {
                    let line = me.line().await?.expect("there is more");
                    seen.take(&line, &oracle, true);
                }
                assert_eq!((seen.missed, seen.gaps), (0, 0));
                assert_eq!(ask!(me, seen, oracle, true, "-a"), "true");
                assert_eq!(ask!(me, seen, oracle, true, "-a"), "false");
                if net.random().is_multiple_of(2) {
                    assert_eq!(ask!(me, seen, oracle, true, "-"), "0");
                }
                ended.set(ended.get() + 1);
                Ok(())
            });
        }
        for n in 0..publishers {
            let (oracle, ready) = (oracle.clone(), ready.clone());
            sim.client(format!("p{n}"), async move |net| {
                let (mut me, mut seen) = (net.connect(addr).await?, Seen::default());
                while ready.get() < members {
                    net.sleep(SECOND).await;
                }
                for message in 0..30 {
                    for topic in ["a", "b.c"] {
                        assert_eq!(ask!(me, seen, oracle, true, "{topic} {topic} p{n} {message}"), "ok");
                    }
                    assert_eq!(ask!(me, seen, oracle, true, "unheard unheard p{n} {message}"), "ok");
                }
                Ok(())
            });
        }
        sim.run_until_done();
        assert_eq!(ended.get(), members);
        oracle.check();
        if history == History::none() {
            let is_gone = || all.borrow().iter().all(|topics| format!("{topics:?}").contains("topics: 0"));
            assert!(sim.run_until(60 * SECOND, is_gone), "topics without a member take no memory");
        }
    });
}

#[test]
fn slow_member_gets_the_rest_and_is_told_what_it_missed() {
    Sim::seeds(20).faults(Faults::harmless()).run(|sim| {
        let (server, _, all) = starts(sim, 1 + sim.seed() as usize % 3, TopicOptions::new(History::last(8)));
        let (addr, ready, oracle) = (server.addr(), Rc::new(Cell::new(0)), Rc::new(Oracle::default()));
        // How many messages the member has that reads at once.
        let read = Rc::new(Cell::new(0));
        for (name, slow) in [("skips", "skip"), ("latest", "latest"), ("reads", "skip")] {
            let (ready, oracle, read) = (ready.clone(), oracle.clone(), read.clone());
            sim.client(name, async move |net| {
                let (mut me, mut seen) = (net.connect(addr).await?, Seen::default());
                let cursor = ask!(me, seen, oracle, true, "+a {slow} newest");
                seen.last.insert("a".into(), cursor.parse().unwrap());
                ready.set(ready.get() + 1);
                let mut keys = BTreeSet::new();
                if name != "reads" {
                    // Less than the time after which a server takes a peer for dead.
                    net.sleep(20 * SECOND).await;
                }
                while seen.texts.last().is_none_or(|(_, text)| !text.contains("p 149 ")) {
                    let line = me.line().await?.expect("there is more");
                    seen.take(&line, &oracle, slow == "skip");
                    if name == "reads" {
                        read.set(seen.texts.len());
                    }
                    if let Some((_, text)) = seen.texts.last() {
                        keys.insert(text.split(' ').nth(3).unwrap().to_owned());
                    }
                }
                assert_eq!(seen.gaps, 0);
                match name {
                    "reads" => assert_eq!((seen.missed, seen.texts.len()), (0, 150)),
                    "skips" => {
                        assert!(seen.missed > 0, "150 messages of 20 KB wait nowhere");
                        assert_eq!(seen.missed as usize + seen.texts.len(), 150);
                    }
                    _ => {
                        assert!(seen.texts.len() < 150);
                        // The last five messages have five keys.
                        assert_eq!(keys.len(), 5);
                        let last: Vec<u64> = seen.texts[seen.texts.len() - 5..]
                            .iter()
                            .map(|(_, text)| text.split(' ').nth(2).unwrap().parse().unwrap())
                            .collect();
                        assert_eq!(last, [145, 146, 147, 148, 149]);
                    }
                }
                Ok(())
            });
        }
        let spoken = oracle.clone();
        sim.client("speaker", async move |net| {
            let (mut me, mut seen) = (net.connect(addr).await?, Seen::default());
            while ready.get() < 3 {
                net.sleep(SECOND).await;
            }
            for message in 0..150 {
                let (key, long) = (message % 5, "m".repeat(20_000));
                assert_eq!(ask!(me, seen, spoken, true, "a#{key} a p {message} {key} {long}"), "ok");
                // The log of eight never drops one that it has not got, however slow the network
                // is.
                while read.get() + 6 < message {
                    net.sleep(SECOND / 100).await;
                }
                net.sleep(SECOND / 10).await;
            }
            Ok(())
        });
        sim.run_until_done();
        oracle.check();
        for topics in &*all.borrow() {
            for figures in topics.figures() {
                assert!(figures.log_bytes <= 8 * 20_300, "{figures:?}");
            }
        }
    });
}

#[test]
fn members_that_must_miss_nothing_are_reset_when_they_would() {
    Sim::seeds(20).faults(Faults::harmless()).run(|sim| {
        let (server, _, all) = starts(sim, 1 + sim.seed() as usize % 3, TopicOptions::new(History::last(60)));
        let (addr, ready, oracle) = (server.addr(), Rc::new(Cell::new(0)), Rc::new(Oracle::default()));
        let reset = Rc::new(Cell::new(0));
        sim.expect_losses();
        for slow in ["queue", "cut", "late"] {
            let (ready, oracle, resets) = (ready.clone(), oracle.clone(), reset.clone());
            sim.client(slow, async move |net| {
                let (mut me, mut seen) = (net.connect(addr).await?, Seen::default());
                let cursor = ask!(me, seen, oracle, true, "+a {slow} newest");
                seen.last.insert("a".into(), cursor.parse().unwrap());
                ready.set(ready.get() + 1);
                net.sleep(900 * SECOND).await;
                loop {
                    match me.line().await {
                        Ok(Some(line)) => seen.take(&line, &oracle, true),
                        Err(error) if error.kind() == ErrorKind::ConnectionReset => break,
                        end => panic!("{end:?} where a reset is due"),
                    }
                }
                resets.set(resets.get() + 1);
                Ok(())
            });
        }
        let spoken = oracle.clone();
        let figures = move || -> u64 {
            all.borrow().iter().flat_map(ShardTopics::figures).map(|topic| topic.cut).sum()
        };
        sim.client("speaker", async move |net| {
            let (mut me, mut seen) = (net.connect(addr).await?, Seen::default());
            while ready.get() < 3 {
                net.sleep(SECOND).await;
            }
            for message in 0..300 {
                assert_eq!(ask!(me, seen, spoken, true, "a a p {message} {}", "m".repeat(20_000)), "ok");
                net.sleep(SECOND / 5).await;
                if figures() == 3 {
                    assert!(message > 20, "none is cut before it is behind");
                    return Ok(());
                }
            }
            panic!("6 MB wait for peers that do not read: {} of 3 are cut", figures());
        });
        sim.run_until_done();
        assert_eq!(reset.get(), 3);
    });
}

#[test]
fn client_that_comes_back_gets_what_it_missed_or_a_gap() {
    Sim::seeds(20).faults(Faults::harmless()).run(|sim| {
        let is_kept = sim.seed().is_multiple_of(2);
        let history = if is_kept { History::last(10_000) } else { History::last(3) };
        let (server, _, _) = starts(sim, 1 + sim.seed() as usize % 4, TopicOptions::new(history));
        let (addr, ready, oracle) = (server.addr(), Rc::new(Cell::new(0)), Rc::new(Oracle::default()));
        for n in 0..3 {
            let (ready, oracle) = (ready.clone(), oracle.clone());
            sim.client(format!("m{n}"), async move |net| {
                let mut seen = Seen::default();
                let mut since = "newest".to_owned();
                'comes: loop {
                    let mut me = net.connect(addr).await?;
                    let cursor = ask!(me, seen, oracle, true, "+a skip {since}");
                    if since == "newest" {
                        seen.last.insert("a".into(), cursor.parse().unwrap());
                        ready.set(ready.get() + 1);
                    }
                    for _ in 0..1 + net.random() % 40 {
                        let line = me.line().await?.expect("there is more");
                        seen.take(&line, &oracle, true);
                        since = seen.last["a"].to_string();
                        if seen.texts.last().is_some_and(|(_, text)| text == "a p 99") {
                            break 'comes;
                        }
                    }
                    drop(me);
                    net.sleep(SECOND / 100 * (net.random() % 100) as u32).await;
                }
                assert_eq!(seen.missed as usize + seen.texts.len(), 100);
                assert!(!is_kept || seen.missed == 0, "all of it was kept");
                assert_eq!(seen.gaps, 0);
                // A cursor of another life of the topic.
                let mut me = net.connect(addr).await?;
                ask!(me, seen, oracle, true, "+a skip 1-{:x}", net.random());
                while seen.gaps == 0 {
                    let line = me.line().await?.expect("a gap");
                    seen.take(&line, &oracle, true);
                }
                Ok(())
            });
        }
        let spoken = oracle.clone();
        sim.client("speaker", async move |net| {
            let (mut me, mut seen) = (net.connect(addr).await?, Seen::default());
            while ready.get() < 3 {
                net.sleep(SECOND).await;
            }
            for message in 0..100 {
                assert_eq!(ask!(me, seen, spoken, true, "a a p {message}"), "ok");
                net.sleep(SECOND / 20).await;
            }
            let mut feed = Seen::default();
            if is_kept {
                // The newest one is the retained value.
                let cursor = ask!(me, feed, spoken, true, "+a skip retained").parse::<Cursor>().unwrap();
                feed.last.insert("a".into(), cursor);
                feed.take(&me.line().await?.unwrap(), &spoken, true);
                assert_eq!(feed.texts[0].1, "a p 99");
                // And a feed reads all.
                let first = Cursor { seq: 0, ..cursor };
                feed.last.insert("a".into(), first);
                let end = ask!(me, feed, spoken, true, "<a {first} 100");
                assert_eq!((feed.texts.len(), end), (101, Cursor { seq: 100, ..cursor }.to_string()));
            }
            Ok(())
        });
        sim.run_until_done();
        oracle.check();
    });
}

#[test]
fn bounds_of_topics_and_members_hold() {
    Sim::seeds(20).faults(Faults::harmless()).run(|sim| {
        let options = TopicOptions::new(History::last(10)).topics_max(40).connection_topics_max(3);
        let options = options.log_bytes_max(50_000).message_bytes_max(2000).joins_per_second_max(30);
        let (server, _, all) = starts(sim, 1 + sim.seed() as usize % 3, options);
        let (addr, oracle) = (server.addr(), Oracle::default());
        sim.client("stranger", async move |net| {
            let (mut me, mut seen) = (net.connect(addr).await?, Seen::default());
            for name in ["a*", ">", "a..b", "é", &"x".repeat(1 << 16)] {
                assert_eq!(ask!(me, seen, oracle, true, "+{name} skip newest"), "no name of a topic");
                assert_eq!(ask!(me, seen, oracle, true, "{name} x"), "no name of a topic");
            }
            for n in 0..5 {
                let said = ask!(me, seen, oracle, true, "+t{n} skip newest");
                assert_eq!(said == "too many topics of a connection", n >= 3, "{n}: {said}");
            }
            assert_eq!(ask!(me, seen, oracle, true, "t0 {}", "x".repeat(2001)), "the message is too large");
            ask!(me, seen, oracle, true, "-");
            let said = ask!(me, seen, oracle, true, "+fast skip newest");
            assert!(!said.contains("too many"), "{said}");
            ask!(me, seen, oracle, true, "-");
            // All at once, so that they are of one second or two.
            me.send("+fast skip newest\n-\n".repeat(100)).await?;
            let mut refused = 0;
            for _ in 0..200 {
                refused += usize::from(me.line().await?.unwrap() == "= too many subscriptions in a second");
            }
            assert!(refused >= 40, "{refused} of 100 joins are refused");
            ask!(me, seen, oracle, true, "-");
            net.sleep(2 * SECOND).await;
            // One after the other, each of which is kept.
            for n in 0..300 {
                let said = ask!(me, seen, oracle, true, "u{n} {}", "x".repeat(1900));
                assert!(said == "ok" || said.contains("full"), "{said}");
            }
            // What another shard keeps of a topic counts here too from the subscription on.
            for n in 297..300 {
                ask!(me, seen, oracle, true, "+u{n} skip newest");
            }
            Ok(())
        });
        sim.run_until_done();
        for topics in &*all.borrow() {
            let bytes: usize = topics.figures().iter().map(|topic| topic.log_bytes).sum();
            assert!(bytes <= 50_000, "{bytes} bytes are kept");
            assert!(topics.figures().iter().filter(|of| &*of.topic != "other").count() <= 40);
        }
    });
}

#[test]
fn page_is_bounded_and_members_leave_in_any_order() {
    Sim::seeds(50).faults(Faults::harmless()).run(|sim| {
        let options = TopicOptions::new(History::none());
        let (server, _, all) = starts(sim, 1 + sim.seed() as usize % 2, options);
        let addr = server.addr();
        sim.client("me", async move |net| {
            let mut me = net.connect(addr).await?;
            me.send("^500\n").await?;
            let mut counts = [0; 2];
            let said = loop {
                let line = me.line().await?.unwrap();
                match line.split(' ').next_back() {
                    _ if line.starts_with('=') => break line,
                    Some(message) => counts[message.parse::<usize>().unwrap()] += 1,
                    None => {}
                }
            };
            assert_eq!(counts, [500, 50]);
            let most: u64 = said.split(' ').nth(1).unwrap().parse().unwrap();
            assert!(said.ends_with(" 500 50") && most <= 128, "{said}");
            Ok(())
        });
        sim.run_until_done();
        let is_gone = || all.borrow().iter().all(|topics| format!("{topics:?}").contains("topics: 0"));
        assert!(sim.run_until(60 * SECOND, is_gone), "members that left are counted");
    });
}
