//! Topics at their bounds: logs that are too short, mailboxes that are full, messages without a
//! frame, and forms that panic.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use ringserve::topics::{EntryView, Gap, Lines};

use super::*;

impl News {
    /// Reads a topic long after its messages came. Returns the bytes of the log behind that.
    pub(super) async fn late_reader(&self, cx: &Cx<'_, Reader>, topic: &str, count: usize) -> String {
        let shard = self.topics.shard();
        let mut feed = self.topics.reader(topic, self.form, Since::Newest).await.unwrap();
        for n in 0..count {
            self.topics.publish(topic, format!("{topic} late {n}")).unwrap();
        }
        shard.sleep(5 * SECOND).await;
        for _ in 0..count {
            cx.reply(feed.next().await);
        }
        shard.sleep(5 * SECOND).await;
        let figures = self.topics.figures();
        figures.iter().filter(|of| &*of.topic == topic).map(|of| of.log_bytes).sum::<usize>().to_string()
    }

    /// Messages that tasks get which read a topic, each all of them.
    pub(super) async fn many_readers(&self, topic: &str, feeds: usize, count: usize) -> String {
        let (shard, got) = (self.topics.shard(), Rc::new(Cell::new(0)));
        for _ in 0..feeds {
            let mut feed = self.topics.reader(topic, self.form, Since::Newest).await.unwrap();
            let got = got.clone();
            shard.spawn(async move {
                for n in 0..count {
                    let text = feed.next().await;
                    assert!(text.ends_with(format!(" many {n}").as_bytes()), "{text:?} is not number {n}");
                    got.set(got.get() + 1);
                }
            });
        }
        for n in 0..count {
            self.topics.publish(topic, format!("{topic} many {n}")).unwrap();
            shard.sleep(SECOND).await;
        }
        got.get().to_string()
    }
}

/// Lines, which count the gaps of the topic `deaf` and panic where a message says `boom`.
#[derive(Default)]
struct Watched {
    gaps: Arc<AtomicUsize>,
}

impl Form for Watched {
    fn entry(&self, entry: &EntryView<'_>, out: &mut Vec<u8>) {
        assert!(!entry.payload.ends_with(b"boom"), "planted: boom");
        Lines.entry(entry, out);
    }

    fn gap(&self, topic: &str, gap: Gap, out: &mut Vec<u8>) {
        self.gaps.fetch_add(usize::from(topic == "deaf"), Ordering::Relaxed);
        Lines.gap(topic, gap, out);
    }
}

/// Has all clients end, within a time that is short for a simulation whose sweeps never end.
fn all_end(sim: &Sim, ended: &Cell<usize>, clients: usize) {
    let has_ended = sim.run_until(3600 * SECOND, || ended.get() == clients);
    assert!(has_ended, "{} of {clients} clients have what they wait for", ended.get());
    sim.run_until_done();
}

#[test]
fn cursor_older_than_the_log_brings_a_gap_and_no_reset() {
    Sim::seeds(20).faults(Faults::harmless()).run(|sim| {
        let ended = Rc::new(Cell::new(0));
        let (server, _, _) = starts(sim, 1 + sim.seed() as usize % 3, TopicOptions::new(History::last(8)));
        let (addr, oracle) = (server.addr(), Oracle::default());
        let end = ended.clone();
        sim.client("me", async move |net| {
            for slow in ["queue", "cut", "skip", "latest"] {
                let (mut me, mut seen) = (net.connect(addr).await?, Seen::default());
                let began = ask!(me, seen, oracle, true, "+a skip newest");
                assert_eq!(ask!(me, seen, oracle, true, "-a"), "true");
                assert_eq!(ask!(me, seen, oracle, true, "*a 30"), "30");
                net.sleep(5 * SECOND).await;
                let (mut me, is_whole) = (net.connect(addr).await?, slow != "latest");
                assert_eq!(ask!(me, seen, oracle, true, "+a {slow} {began}"), began);
                seen.last.insert("a".into(), began.parse().unwrap());
                while seen.texts.last().is_none_or(|(_, text)| text != "a burst 29") {
                    seen.take(&me.line().await?.expect("there is more"), &oracle, is_whole);
                }
                let all = if is_whole { 8 } else { 1 };
                assert_eq!((seen.missed, seen.gaps, seen.texts.len()), (22, 0, all), "{slow}");
                assert_eq!(ask!(me, seen, oracle, is_whole, "a a q 1"), "ok");
                while seen.texts.last().is_none_or(|(_, text)| text != "a q 1") {
                    seen.take(&me.line().await?.expect("it goes on"), &oracle, is_whole);
                }
                assert_eq!(seen.missed, 22, "a gap is reported once");
            }
            end.set(1);
            Ok(())
        });
        all_end(sim, &ended, 1);
    });
}

#[test]
fn reader_that_is_late_misses_nothing_without_history() {
    Sim::seeds(20).faults(Faults::harmless()).run(|sim| {
        let ended = Rc::new(Cell::new(0));
        let (server, _, _) = starts(sim, 1 + sim.seed() as usize % 3, TopicOptions::new(History::none()));
        let (addr, oracle) = (server.addr(), Oracle::default());
        let end = ended.clone();
        sim.client("me", async move |net| {
            let (mut me, mut seen) = (net.connect(addr).await?, Seen::default());
            me.send("~a 100\n").await?;
            for n in 0..100 {
                let line = me.line().await?.expect("a message");
                assert!(line.ends_with(&format!(" late {n}")), "{line} is not number {n}");
            }
            assert_eq!(me.line().await?.as_deref(), Some("= 0"), "read messages are not kept");
            // And each of many readers gets all.
            assert_eq!(ask!(me, seen, oracle, true, "%b 300 3"), "900");
            end.set(1);
            Ok(())
        });
        all_end(sim, &ended, 1);
    });
}

#[test]
fn last_of_a_burst_reaches_shards_whose_mailbox_was_full() {
    // More than wait for a shard.
    const BURST: u64 = 17_000;
    Sim::seeds(6).run(|sim| {
        let (server, _, _) = starts(sim, 3, TopicOptions::new(History::last(100)));
        let (addr, oracle) = (server.addr(), Rc::new(Oracle::default()));
        let (ready, accepted) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(None::<u64>)));
        let counts: [Rc<Cell<u64>>; 6] = Default::default();
        for (n, count) in counts.iter().enumerate() {
            let (oracle, ready, accepted) = (oracle.clone(), ready.clone(), accepted.clone());
            let count = count.clone();
            sim.client(format!("m{n}"), async move |net| {
                let (mut me, mut seen) = (net.connect(addr).await?, Seen::default());
                let cursor = ask!(me, seen, oracle, true, "+a skip newest");
                seen.last.insert("a".into(), cursor.parse().unwrap());
                ready.set(ready.get() + 1);
                if n == 0 {
                    while ready.get() < 6 {
                        net.sleep(SECOND).await;
                    }
                    accepted.set(ask!(me, seen, oracle, true, "*a {BURST}").parse().ok());
                }
                // Until the simulation ends.
                count.set(seen.missed + seen.texts.len() as u64);
                while let Some(line) = me.line().await? {
                    seen.take(&line, &oracle, true);
                    count.set(seen.missed + seen.texts.len() as u64);
                }
                Ok(())
            });
        }
        let all_know =
            || accepted.get().is_some_and(|accepted: u64| counts.iter().all(|count| count.get() == accepted));
        let knows = sim.run_until(600 * SECOND, all_know);
        assert!(knows, "{counts:?} of {accepted:?} messages are known");
    });
}

#[test]
fn message_without_a_frame_is_skipped_and_counted() {
    Sim::seeds(20).faults(Faults::harmless()).run(|sim| {
        let options = TopicOptions::new(History::last(10));
        let ended = Rc::new(Cell::new(0));
        let (server, _, all) = starts(sim, 1 + sim.seed() as usize % 3, options);
        let (addr, oracle) = (server.addr(), Oracle::default());
        let end = ended.clone();
        sim.client("me", async move |net| {
            let (mut me, mut seen) = (net.connect(addr).await?, Seen::default());
            let (mut other, mut unseen) = (net.connect(addr).await?, Seen::default());
            let cursor = ask!(me, seen, oracle, true, "+a queue newest");
            seen.last.insert("a".into(), cursor.parse().unwrap());
            for text in ["a p 1", "a p|2", "a p 3"] {
                assert_eq!(ask!(other, unseen, oracle, true, "a {text}"), "ok");
            }
            for _ in 0..2 {
                seen.take(&me.line().await?.expect("it goes on"), &oracle, false);
            }
            let texts: Vec<_> = seen.texts.iter().map(|(_, text)| &**text).collect();
            assert_eq!(texts, ["a p 1", "a p 3"]);
            end.set(1);
            Ok(())
        });
        all_end(sim, &ended, 1);
        let all = all.borrow();
        let unframed = all.iter().flat_map(ShardTopics::figures).map(|topic| topic.unframed).sum::<u64>();
        assert_eq!(unframed, 1);
    });
}

#[test]
fn form_that_panics_costs_its_message_alone() {
    let planted = |said: &str| said.starts_with("planted");
    Sim::seeds(20).faults(Faults::harmless()).allow_panics(planted).run(|sim| {
        let options = TopicOptions::new(History::last(10));
        let ended = Rc::new(Cell::new(0));
        let (server, _, all) = starts_with(sim, 1, options, Watched::default(), 1 << 18);
        let (addr, oracle) = (server.addr(), Oracle::default());
        let end = ended.clone();
        sim.client("me", async move |net| {
            let (mut me, mut seen) = (net.connect(addr).await?, Seen::default());
            let cursor = ask!(me, seen, oracle, true, "+a queue newest");
            seen.last.insert("a".into(), cursor.parse().unwrap());
            let (mut late, mut of_late) = (net.connect(addr).await?, Seen::default());
            for text in ["a p 1", "a p boom", "a p 3"] {
                assert_eq!(ask!(late, of_late, oracle, true, "a {text}"), "ok");
            }
            let cursor = cursor.parse::<Cursor>().unwrap();
            of_late.last.insert("a".into(), cursor);
            // A member that waits for its turn, and not for the pass.
            ask!(late, of_late, oracle, false, "+a queue {cursor}");
            for (me, seen) in [(&mut me, &mut seen), (&mut late, &mut of_late)] {
                while seen.texts.len() < 2 {
                    seen.take(&me.line().await?.expect("it goes on"), &oracle, false);
                }
                let texts: Vec<_> = seen.texts.iter().map(|(_, text)| &**text).collect();
                assert_eq!(texts, ["a p 1", "a p 3"]);
            }
            end.set(1);
            Ok(())
        });
        all_end(sim, &ended, 1);
        assert_eq!(all.borrow()[0].figures()[0].unframed, 2);
    });
}

#[test]
fn room_of_one_member_moves_no_other() {
    let waits = AtomicUsize::new(0);
    Sim::seeds(3).faults(Faults::harmless()).run(|sim| {
        let form = Watched::default();
        let gaps = form.gaps.clone();
        let (server, _, all) = starts_with(sim, 1, TopicOptions::new(History::last(4)), form, 1 << 15);
        let (addr, ready, oracle) = (server.addr(), Rc::new(Cell::new(0)), Rc::new(Oracle::default()));
        sim.expect_losses();
        for (name, is_deaf) in [("deaf", true), ("reads", false)] {
            let (ready, oracle) = (ready.clone(), oracle.clone());
            sim.client(name, async move |net| {
                let (mut me, mut seen) = (net.connect(addr).await?, Seen::default());
                let cursor = ask!(me, seen, oracle, true, "+{name} skip newest");
                seen.last.insert(name.into(), cursor.parse().unwrap());
                ready.set(ready.get() + 1);
                if is_deaf {
                    net.sleep(900 * SECOND).await;
                    return Ok(());
                }
                while seen.texts.last().is_none_or(|(_, text)| !text.contains(" p 299 ")) {
                    seen.take(&me.line().await?.expect("there is more"), &oracle, true);
                    net.sleep(SECOND / 7).await;
                }
                Ok(())
            });
        }
        let spoken = oracle.clone();
        sim.client("speaker", async move |net| {
            let (mut me, mut seen) = (net.connect(addr).await?, Seen::default());
            while ready.get() < 2 {
                net.sleep(SECOND).await;
            }
            for (topic, messages) in [("deaf", 150), ("reads", 300)] {
                for n in 0..messages {
                    let long = "m".repeat(20_000);
                    assert_eq!(ask!(me, seen, spoken, true, "{topic} {topic} p {n} {long}"), "ok");
                    net.sleep(SECOND / 10).await;
                }
            }
            Ok(())
        });
        sim.run_until_done();
        let waited = all.borrow()[0].figures().iter().any(|of| &*of.topic == "reads" && of.skipped > 0);
        waits.fetch_add(usize::from(waited), Ordering::Relaxed);
        let gaps = gaps.load(Ordering::Relaxed);
        assert!(gaps <= 3, "{gaps} looks at a member that has no room");
    });
    assert!(waits.into_inner() > 0, "the member that reads never waited");
}

#[test]
fn unused_topics_make_room_for_new_ones() {
    Sim::seeds(20).faults(Faults::harmless()).run(|sim| {
        let options = TopicOptions::new(History::last(10)).topics_max(10).connection_topics_max(10);
        let ended = Rc::new(Cell::new(0));
        let (server, outside, all) = starts(sim, 1, options);
        let (addr, oracle) = (server.addr(), Oracle::default());
        let end = ended.clone();
        sim.client("me", async move |net| {
            let (mut me, mut seen) = (net.connect(addr).await?, Seen::default());
            for topic in ["a", "b"] {
                let cursor = ask!(me, seen, oracle, true, "+{topic} skip newest");
                seen.last.insert(topic.into(), cursor.parse().unwrap());
            }
            for n in 0..100 {
                assert_eq!(ask!(me, seen, oracle, true, "free{n} x"), "ok", "number {n}");
            }
            assert_eq!(ask!(me, seen, oracle, true, "a a p 1"), "ok");
            while seen.texts.is_empty() {
                seen.take(&me.line().await?.expect("it is a member"), &oracle, true);
            }
            // The newest ones are there.
            let retained = ask!(me, seen, oracle, true, "+free99 skip retained");
            assert!(retained.ends_with("-0"), "{retained}");
            assert_eq!(me.line().await?.map(|line| line.ends_with(" x")), Some(true));
            for n in 0..7 {
                ask!(me, seen, oracle, true, "+own{n} skip newest");
            }
            assert_eq!(ask!(me, seen, oracle, true, "more x"), "the shard of the topic is full");
            for n in 0..5 {
                outside.publish(&format!("more{n}"), "x").unwrap();
            }
            net.sleep(SECOND).await;
            end.set(1);
            Ok(())
        });
        all_end(sim, &ended, 1);
        let figures = all.borrow()[0].figures();
        assert!(figures.iter().filter(|of| &*of.topic != "other").count() <= 10);
        assert_eq!(figures.iter().map(|of| of.refused).sum::<u64>(), 5);
    });
}
