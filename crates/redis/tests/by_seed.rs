//! Requests that ask several shards, replies in order: in simulations, by seed.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::convert::Infallible;
use std::io;
use std::rc::Rc;
use std::time::Duration;

use ringserve::framing::{FrameFields, Lines};
use ringserve::limits::ServerLimits;
use ringserve::scatter::{QuestionHandler, Questions, Replies, ReplyBuilder, Scatter};
use ringserve::sync::AskError;
use ringserve::testing::{ClientStream, Faults, Sim, SimServer};
use ringserve::{Cx, Frame, Limits, Server, Service, Shard};

const SECOND: Duration = Duration::from_secs(1);
/// The most that connections of a shard may hold.
const HELD_BYTES_MAX: usize = 16 << 20;
/// Bytes of a huge answer.
const HUGE: usize = 1 << 20;

/// A question about a word.
#[derive(Clone, Copy)]
enum Question {
    /// The number of times that it was asked for.
    Count,
    /// Many bytes of it.
    Long,
    /// Even more, for which there has to be memory.
    Huge,
    Panic,
}

/// Words, each on the shard that its last byte names.
struct Words {
    counts: RefCell<HashMap<Vec<u8>, u32>>,
    answered: Rc<Cell<u32>>,
}

impl QuestionHandler for Words {
    type Question = Question;
    type Merged = Vec<u8>;

    fn answer(&self, question: Question, parts: FrameFields<'_>, out: &mut Vec<u8>) {
        self.answered.set(self.answered.get() + 1);
        let word = parts.get(0);
        match question {
            Question::Count => {
                let mut counts = self.counts.borrow_mut();
                let count = counts.entry(word.to_vec()).or_default();
                *count += 1;
                out.extend_from_slice(format!(" {}={count}", word.escape_ascii()).as_bytes());
            }
            Question::Long => out.extend(word.iter().cycle().take(50_000)),
            Question::Huge => out.resize(out.len() + HUGE, word[0]),
            Question::Panic => panic!("planted: an answer"),
        }
    }

    fn large_bytes(&self, question: Question, _: FrameFields<'_>) -> usize {
        if matches!(question, Question::Huge) { HUGE } else { 0 }
    }

    fn failed(&self, shard: usize, why: AskError, out: &mut Vec<u8>) {
        let why = match why {
            AskError::Full => "Full",
            AskError::Gone => "Gone",
            AskError::NoMemory => "NoMemory",
            _ => "Unanswered",
        };
        out.extend_from_slice(format!(" {shard}!{why}").as_bytes());
    }
}

/// `count`, `long`, `huge` and `panic` ask for the words behind them, the first letter of `merged`
/// for all at once; `here` and `shard` reply by themselves. The handlers of `late` and `never`,
/// which ask like `count`, look at what is left of them 5 s later, and not at all. Those of even
/// length go along with earlier ones where they may. A time limit on the rest of a request makes it
/// be dropped.
struct Asks {
    scatter: Scatter<Words>,
    shard: Shard,
    limit: Option<Duration>,
}

impl Service for Asks {
    type Session = Replies<Words>;
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, Replies<Words>>, line: Frame) -> Result<(), Infallible> {
        let mut words = line.split(|byte| *byte == b' ');
        let verb = words.next().unwrap_or_default();
        let question = match verb {
            b"count" | b"late" | b"never" => Some((Question::Count, false)),
            b"merged" => Some((Question::Count, true)),
            b"long" => Some((Question::Long, false)),
            b"huge" => Some((Question::Huge, false)),
            b"panic" => Some((Question::Panic, false)),
            _ => None,
        };
        let ask = |mut asking: ReplyBuilder<'_, Words>, (question, is_merged)| {
            asking.put(verb);
            if is_merged {
                asking.merge(words.clone().count());
            }
            for word in words.clone() {
                let span = [(0, word.len() as u32)];
                let shard = usize::from(*word.last().unwrap()) % self.scatter.shards();
                asking.ask(shard, question, FrameFields::new(word, &span));
            }
            asking.put(b"\n");
        };
        if let Some(question) = question
            && line.len().is_multiple_of(2)
            && let Some(asking) = self.scatter.along(cx.session())
        {
            ask(asking, question);
            return Ok(());
        }
        let begin = || match (question, verb) {
            (Some(question), _) => ask(self.scatter.asking(cx.session()), question),
            (None, b"shard") => cx.reply(self.shard.index().to_string()),
            (None, _) => cx.reply("here"),
        };
        let rest = self.scatter.in_turn(cx, cx.session(), question.is_some(), begin);
        if matches!(verb, b"late" | b"never") {
            self.shard.sleep(5 * SECOND).await;
        }
        match self.limit {
            _ if verb == b"never" => drop(rest),
            Some(limit) => drop(self.shard.timeout(limit, rest).await),
            None => rest.await,
        }
        Ok(())
    }
}

struct Lab {
    server: SimServer,
    answered: Rc<Cell<u32>>,
}

fn starts(sim: &Sim, shards: usize, questions_max: usize, limit: Option<Duration>) -> Lab {
    starts_with(sim, shards, questions_max, limit, 2 + sim.seed() as u16 % 3)
}

/// With a number of calls of one connection at the same time.
fn starts_with(sim: &Sim, shards: usize, questions_max: usize, limit: Option<Duration>, calls: u16) -> Lab {
    let limits = Limits::default().calls_in_flight_max(calls).handler_timeout(None);
    let limits = limits.outbox_bytes_max(HELD_BYTES_MAX / 2);
    let of_server = ServerLimits::default().held_bytes_max(HELD_BYTES_MAX);
    let server = Server::bind("10.0.0.1:7000").framing(Lines::default()).limits(limits);
    let server = server.server_limits(of_server).shards(shards);
    let (questions, answered) = (Questions::with_capacity(questions_max), Rc::new(Cell::new(0)));
    let shared = answered.clone();
    let server = sim.start(server, move |shard| {
        let words = Words { counts: RefCell::default(), answered: shared.clone() };
        let scatter = Scatter::new(shard, &questions, Rc::new(words));
        Asks { scatter, shard: shard.clone(), limit }
    });
    Lab { server: server.unwrap(), answered }
}

async fn hears(me: &mut ClientStream, expected: &str) -> io::Result<()> {
    let line = me.line().await?.ok_or(io::ErrorKind::UnexpectedEof)?;
    assert!(line == expected, "{:.200} where {:.200} is right", line, expected);
    Ok(())
}

#[test]
fn replies_come_in_the_order_of_their_requests() {
    Sim::seeds(75).faults(Faults::harmless()).run(|sim| {
        let addr = starts(sim, 1 + sim.seed() as usize % 4, 1000, None).server.addr();
        for n in 0..1 + sim.random() % 4 {
            sim.client(format!("c{n}"), async move |net| {
                let mut me = net.connect(addr).await?;
                let mut counts = HashMap::<String, u32>::new();
                for _ in 0..1 + net.random() % 20 {
                    let (mut sent, mut expected) = (String::new(), Vec::new());
                    for _ in 0..net.random() % 30 {
                        if net.random().is_multiple_of(6) {
                            sent += "here\n";
                            expected.push("here".to_owned());
                            continue;
                        }
                        let verb = ["count", "merged"][net.random() as usize % 2];
                        let (mut ask, mut reply) = (verb.to_owned(), verb.to_owned());
                        for _ in 0..net.random() % 5 {
                            let word = format!("c{n}:{}", net.random() % 9);
                            let count = counts.entry(word.clone()).or_default();
                            *count += 1;
                            ask += &format!(" {word}");
                            reply += &format!(" {word}={count}");
                        }
                        sent += &(ask + "\n");
                        expected.push(reply);
                    }
                    me.send(sent).await?;
                    for reply in expected {
                        hears(&mut me, &reply).await?;
                    }
                }
                Ok(())
            });
        }
        sim.run_until_done();
    });
}

/// Beyond what a connection may have waiting, in all ways to begin a request, with others between
/// that reply by themselves.
#[test]
fn replies_of_long_pipelines_come_in_order() {
    Sim::seeds(30).faults(Faults::harmless()).run(|sim| {
        let addr = starts(sim, 1 + sim.seed() as usize % 4, 1000, None).server.addr();
        for n in 0..1 + sim.random() % 2 {
            sim.client(format!("c{n}"), async move |net| {
                let mut me = net.connect(addr).await?;
                let (mut counts, mut sent, mut expected) =
                    (HashMap::<String, u32>::new(), String::new(), Vec::new());
                let own = [1, 20, 1000][net.random() as usize % 3];
                for _ in 0..600 {
                    if net.random().is_multiple_of(own) {
                        sent += "here\n";
                        expected.push("here".to_owned());
                        continue;
                    }
                    let verb = ["count", "merged"][net.random() as usize % 2];
                    let word =
                        format!("{}{n}:{}", "w".repeat(net.random() as usize % 1500), net.random() % 9);
                    let count = counts.entry(word.clone()).or_default();
                    *count += 1;
                    expected.push(format!("{verb} {word}={count}"));
                    sent += &format!("{verb} {word}\n");
                }
                me.send(sent).await?;
                for reply in expected {
                    hears(&mut me, &reply).await?;
                }
                Ok(())
            });
        }
        sim.run_until_done();
    });
}

/// While what is asked is under way, as much more waits. So a batch is never a question alone,
/// however long a pipeline is.
#[test]
fn pipeline_of_any_length_is_asked_in_large_batches() {
    const REQUESTS: usize = 7000;
    Sim::seeds(5).faults(Faults::none()).run(|sim| {
        let lab = starts(sim, 2, 1000, None);
        sim.client("me", async move |net| {
            let mut me = connects(&net, &lab.server).await?;
            let words = (0..40).map(|n| format!(" {}", n % 10)).collect::<String>();
            let all: String = (0..REQUESTS).map(|n| format!("count {}\n", n % 10)).collect();
            me.send(format!("long{words}\n{all}")).await?;
            // The requests are there, behind a reply that is not read.
            net.sleep(5 * SECOND).await;
            let turns = || lab.server.stats().shards[1].driver.turns;
            let before = turns();
            assert_eq!(me.exactly(4).await?, b"long");
            me.exactly(40 * 50_000 + 1).await?;
            for n in 0..REQUESTS {
                hears(&mut me, &format!("count {}={}", n % 10, n / 10 + 1)).await?;
            }
            let turns = turns() - before;
            assert!(turns < 1000, "{turns} turns of the other shard for {REQUESTS} requests");
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn replies_of_pipelined_requests_leave_in_one_send() {
    Sim::seeds(20).run(|sim| {
        let lab = starts(sim, 2, 1000, None);
        sim.client("me", async move |net| {
            let mut me = connects(&net, &lab.server).await?;
            let sends = || lab.server.stats().counters.sends;
            let before = sends();
            me.send("here\ncount 0\ncount 1\ncount 0\nhere\n").await?;
            for reply in ["here", "count 0=1", "count 1=1", "count 0=2"] {
                hears(&mut me, reply).await?;
            }
            assert_eq!(sends() - before, 1, "the reply before the first question leaves with its answer");
            hears(&mut me, "here").await?;
            Ok(())
        });
        sim.run_until_done();
    });
}

/// A shard that sleeps has to be woken, so shards that talk look once more before they sleep; and
/// no more often, which would be for nothing.
#[test]
fn shards_that_talk_look_once_more_before_they_sleep() {
    const QUESTIONS: u64 = 50;
    Sim::seeds(20).faults(Faults::none()).run(|sim| {
        let lab = starts(sim, 2, 1000, None);
        sim.client("me", async move |net| {
            let mut me = connects(&net, &lab.server).await?;
            let turns = || [0, 1].map(|shard: usize| lab.server.stats().shards[shard].driver.turns);
            let before = turns();
            for n in 1..=QUESTIONS {
                me.send("count 1\n").await?;
                hears(&mut me, &format!("count 1={n}")).await?;
                // After a turn that took long the CPU is kept for 100 ms.
                net.sleep(SECOND / 5).await;
            }
            let [asker, other] = [0, 1].map(|shard| turns()[shard] - before[shard]);
            // Without a second look 416 and 102; of the asker up to 428 if it takes none behind its
            // questions.
            assert!((440..500).contains(&asker), "{asker} turns of the asker");
            assert!((250..350).contains(&other), "{other} turns of the other shard");
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn reader_that_is_slow_gets_all_and_holds_back_its_questions() {
    Sim::seeds(5).faults(Faults::harmless()).run(|sim| {
        let lab = starts(sim, 2, 1000, None);
        let (addr, answered) = (lab.server.addr(), lab.answered.clone());
        sim.client("slow", async move |net| {
            let mut me = net.connect(addr).await?;
            let words: Vec<String> = (0..300).map(|n| format!("w{n:03}")).collect();
            me.send(format!("long {}\nhere\n", words.join(" "))).await?;
            net.sleep(5 * SECOND).await;
            assert!(answered.get() < 60, "{} answers for a peer that does not read", answered.get());
            // Others go on meanwhile.
            let mut other = net.connect(addr).await?;
            other.send("count a b\n").await?;
            hears(&mut other, "count a=1 b=1").await?;
            assert_eq!(me.exactly(4).await?, b"long");
            for word in words {
                let text = me.exactly(50_000).await?;
                assert!(text.chunks(4).all(|chunk| chunk == word.as_bytes()), "{word}");
            }
            hears(&mut me, "").await?;
            hears(&mut me, "here").await?;
            Ok(())
        });
        sim.run_until_done();
    });
}

/// Wherever they are made: at the connection's shard behind other requests, or at another one.
#[test]
fn huge_answers_are_made_where_there_is_memory_for_them() {
    const MOST: u32 = (HELD_BYTES_MAX / 4 * 3 / HUGE) as u32;
    Sim::seeds(4).faults(Faults::harmless()).run(|sim| {
        let lab = starts(sim, 2, 1000, None);
        let is_over = Rc::new(Cell::new(false));
        sim.expect_losses();
        for n in 0..4 * MOST {
            let (server, is_over) = (lab.server.addr(), is_over.clone());
            sim.client(format!("deaf{n}"), async move |net| {
                let mut me = net.connect(server).await?;
                me.send(["huge 1 0 1\n", "huge 0 1\n", "here\nhuge 0\n"][n as usize % 3]).await?;
                while !is_over.get() {
                    net.sleep(SECOND).await;
                }
                Ok(())
            });
        }
        let (addr, answered) = (lab.server.addr(), lab.answered.clone());
        sim.client("honest", async move |net| {
            net.sleep(SECOND).await;
            assert!((MOST..=2 * MOST).contains(&answered.get()), "{} answers", answered.get());
            let mut me = net.connect(addr).await?;
            for n in 0..3 {
                me.send("huge a b\ncount a\n").await?;
                assert_eq!(me.exactly(4).await?, b"huge");
                // Where peers that read nothing are found later than it waits, there is none.
                for word in [b"a", b"b"] {
                    let first = me.exactly(1).await?;
                    if first == b" " {
                        assert_eq!(me.exactly(10).await?[1..], *b"!NoMemory");
                        continue;
                    }
                    assert_eq!(first, word);
                    assert!(me.exactly(HUGE - 1).await? == vec![word[0]; HUGE - 1]);
                }
                hears(&mut me, "").await?;
                hears(&mut me, &format!("count a={}", n + 1)).await?;
            }
            is_over.set(true);
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn what_waits_behind_a_peer_that_reads_nothing_counts_as_held() {
    Sim::seeds(10).faults(Faults::harmless()).run(|sim| {
        let lab = starts(sim, 2, 1000, None);
        sim.expect_losses();
        sim.client("deaf", async move |net| {
            let mut me = connects(&net, &lab.server).await?;
            let words = "w".repeat(5000);
            let counts = format!("count {words}0 {words}1\n").repeat(10);
            me.send(format!("long{}\n{counts}", " 0 1".repeat(40))).await?;
            net.sleep(5 * SECOND).await;
            let held = lab.server.stats().shards[0].held_bytes;
            // An outbox and a piece, and behind them answers and the questions of those that count.
            let least = Limits::default().outbox_bytes_high + 64 * 1024 + 100_000;
            assert!(held > least, "{held} bytes are held, and there are more than {least}");
            Ok(())
        });
        sim.run_until_done();
    });
}

/// A connection to shard 0.
async fn connects(net: &ringserve::testing::Net, lab: &SimServer) -> io::Result<ClientStream> {
    loop {
        let mut me = net.connect(lab.addr()).await?;
        me.send("shard\n").await?;
        if me.line().await?.as_deref() == Some("0") {
            return Ok(me);
        }
    }
}

#[test]
fn full_shard_fails_its_questions_alone() {
    Sim::seeds(40).faults(Faults::harmless()).run(|sim| {
        let lab = starts(sim, 2, 1, None);
        sim.client("me", async move |net| {
            let mut waits = connects(&net, &lab.server).await?;
            let mut me = connects(&net, &lab.server).await?;
            lab.server.stall(1, 40 * SECOND);
            waits.send("count 1 1\n").await?;
            net.sleep(5 * SECOND).await;
            me.send("count 0 1 2\nmerged 0 1\nhere\n").await?;
            hears(&mut me, "count 0=1 1!Full 2=1").await?;
            hears(&mut me, "merged 0=2 1!Full").await?;
            hears(&mut me, "here").await?;
            hears(&mut waits, "count 1=1 1=2").await?;
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn request_that_is_dropped_takes_its_replies_along() {
    Sim::seeds(40).faults(Faults::harmless()).run(|sim| {
        let lab = starts(sim, 2, 1000, Some(10 * SECOND));
        sim.client("me", async move |net| {
            let mut me = connects(&net, &lab.server).await?;
            me.send("count 0 1\n").await?;
            hears(&mut me, "count 0=1 1=1").await?;
            lab.server.stall(1, 40 * SECOND);
            me.send("shard\ncount 0 1\nhere\n").await?;
            net.sleep(30 * SECOND).await;
            // It waited for the answers, and leaves without them.
            hears(&mut me, "0").await?;
            me.send("count 0\n").await?;
            // The second one had its turn when the first one was given up, or was given up with it.
            let line = me.line().await?.unwrap();
            if line == "here" {
                hears(&mut me, "count 0=3").await?;
            } else {
                assert_eq!(line, "count 0=3");
            }
            net.sleep(30 * SECOND).await;
            me.send("count 0 1\n").await?;
            hears(&mut me, "count 0=4 1=3").await?;
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn request_dropped_before_it_asks_leaves_nothing_behind() {
    Sim::seeds(40).run(|sim| {
        // Its time is over as it is looked at for the first time.
        let lab = starts(sim, 2, 1000, Some(Duration::ZERO));
        sim.client("me", async move |net| {
            let mut me = connects(&net, &lab.server).await?;
            me.send("shard\ncount 0 1\n").await?;
            hears(&mut me, "0").await?;
            net.sleep(SECOND).await;
            me.send("here\ncount 0\nhere\n").await?;
            hears(&mut me, "here").await?;
            hears(&mut me, "here").await?;
            Ok(())
        });
        sim.run_until_done();
    });
}

/// Replies are handed over to the call that has the turn next. It takes them along where it never
/// looks: later requests do not wait for them, and no reply comes behind its time.
#[test]
fn request_dropped_before_its_turn_takes_what_it_was_left() {
    Sim::seeds(20).run(|sim| {
        let lab = starts_with(sim, 2, 1000, None, 6);
        sim.client("me", async move |net| {
            let mut me = connects(&net, &lab.server).await?;
            // More than one round of answers, behind which another request waits.
            let long = " 0 1".repeat(14);
            me.send(format!("count 1\nhere\nlong{long}\nnever 1\n")).await?;
            for line in ["count 1=1", "here"] {
                hears(&mut me, line).await?;
            }
            assert_eq!(me.exactly(4).await?, b"long");
            net.sleep(30 * SECOND).await;
            me.send("here\ncount 1\n").await?;
            let mut rounds = me.line().await?.unwrap();
            assert!(rounds.len() < 28 * 50_000, "all answers came: nothing was handed over");
            rounds.retain(|letter| !"01".contains(letter));
            assert_eq!(rounds, "here", "the rest of the answers comes late");
            hears(&mut me, "count 1=2").await?;
            Ok(())
        });
        sim.run_until_done();
    });
}

/// A request that went along waits for others that may, and for none whose handler does something
/// else.
#[test]
fn nothing_turns_while_a_handler_does_not_look_at_its_request() {
    Sim::seeds(20).faults(Faults::none()).run(|sim| {
        let lab = starts_with(sim, 2, 1000, None, 6);
        sim.client("me", async move |net| {
            let mut me = connects(&net, &lab.server).await?;
            lab.server.stall(1, 2 * SECOND);
            me.send("count 0 1\nhere\ncount 1\ncount 1\nlate 1\n").await?;
            for line in ["count 0=1 1=1", "here"] {
                hears(&mut me, line).await?;
            }
            lab.server.stall(1, 2 * SECOND);
            let turns = || lab.server.stats().shards[0].driver.turns;
            let before = turns();
            for line in ["count 1=2", "count 1=3", "late 1=4"] {
                hears(&mut me, line).await?;
            }
            let turns = turns() - before;
            assert!(turns < 100, "{turns} turns");
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn answer_that_panics_fails_its_batch_alone() {
    Sim::seeds(40).faults(Faults::harmless()).allow_panics(|said| said.starts_with("planted")).run(|sim| {
        let lab = starts(sim, 3, 1000, None);
        sim.client("me", async move |net| {
            let mut me = connects(&net, &lab.server).await?;
            me.send("count 0 2\npanic 1\nmerged 0 1 2\nhere\n").await?;
            hears(&mut me, "count 0=1 2=1").await?;
            hears(&mut me, "panic 1!Unanswered").await?;
            // With the panic in one batch, or not.
            let line = me.line().await?.unwrap();
            assert!(["merged 0=2 1!Unanswered 2=2", "merged 0=2 1=1 2=2"].contains(&&*line), "{line}");
            hears(&mut me, "here").await?;
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn own_requests_behind_long_answers_keep_their_order() {
    Sim::seeds(10).faults(Faults::harmless()).run(|sim| {
        let lab = starts(sim, 2, 1000, None);
        sim.client("me", async move |net| {
            let mut me = connects(&net, &lab.server).await?;
            // More than an answer of each shard holds: the rest waits for the next rounds, in which
            // the other shard is slow.
            me.send(format!("long{}\n", " 0 1".repeat(14))).await?;
            assert_eq!(me.exactly(4).await?, b"long");
            let mut heard = 0;
            for (until, say) in
                [(8, None), (12, Some("count ga0\n")), (20, None), (24, Some("count hb0\n")), (28, None)]
            {
                for word in heard..until {
                    let text = me.exactly(50_000).await?;
                    assert!(text.iter().all(|byte| *byte == b"01"[word % 2]), "answer {word}");
                }
                heard = until;
                match say {
                    Some(say) => me.send(say).await?,
                    None => lab.server.stall(1, SECOND),
                }
            }
            for line in ["", "count ga0=1", "count hb0=1"] {
                hears(&mut me, line).await?;
            }
            Ok(())
        });
        sim.run_until_done();
    });
}
