//! Receivers of messages: fan-out over shards, options of subscriptions, retained messages, slow
//! readers.

use super::*;

#[test]
fn each_subscriber_on_every_shard_hears_each_message_in_order() {
    const MESSAGES: usize = 30;
    Sim::seeds(15).faults(Faults::harmless()).run(|sim| {
        let addr = starts(sim, &[]).addr();
        let (publishers, subscribers) = (2, 3 + sim.random() as usize % 6);
        let subscribed = Steps::default();
        for n in 0..subscribers {
            let subscribed = subscribed.clone();
            sim.client(format!("s{n}"), async move |net| {
                let hello = Hello::new(if n % 2 == 0 { 5 } else { 4 }, &format!("s{n}"));
                let (mut me, _) = hello.connects(&net, addr).await?;
                let filter = ["news/#", "news/+", "#"][n % 3];
                assert_eq!(me.subscribes(&[(filter, 1)]).await?, [1]);
                subscribed.done();
                let mut last = BTreeMap::<(String, u8), usize>::new();
                for _ in 0..publishers * MESSAGES {
                    let heard = me.hears().await?;
                    assert!(!heard.retain && !heard.dup);
                    let number: usize = heard.payload.parse()?;
                    let before = last.insert((heard.topic.clone(), heard.qos), number);
                    assert!(before.is_none_or(|before| before < number), "{heard:?} after {before:?}");
                }
                me.pings().await?;
                assert_eq!(me.unread, [], "each message comes once");
                Ok(())
            });
        }
        for n in 0..publishers {
            let subscribed = subscribed.clone();
            sim.client(format!("p{n}"), async move |net| {
                let (mut me, _) =
                    Hello::new(if n == 0 { 4 } else { 5 }, &format!("p{n}")).connects(&net, addr).await?;
                subscribed.reach(&net, subscribers).await;
                for message in 0..MESSAGES {
                    let flags = if net.random().is_multiple_of(2) { 0 } else { 2 };
                    assert_eq!(me.publishes(flags, &format!("news/{n}"), &message.to_string()).await?, 0);
                }
                // QoS 0 has no answer: the end of the connection must not overtake it.
                me.pings().await?;
                me.disconnects().await?;
                Ok(())
            });
        }
        sim.run_until_done();
    });
}

#[test]
fn retained_message_comes_to_each_later_subscriber_once() {
    Sim::seeds(30).faults(Faults::harmless()).run(|sim| {
        let addr = starts(sim, &[]).addr();
        sim.client("all", async move |net| {
            let (mut writer, _) = Hello::new(4, "writer").connects(&net, addr).await?;
            for (flags, topic, payload) in [
                (3, "a/x", "1"),
                (3, "a/x", "2"),
                (1, "a/y", "zero"),
                (3, "a/z", "gone"),
                (3, "a/z", ""),
                (2, "a/n", "no"),
            ] {
                writer.publishes(flags, topic, payload).await?;
            }
            writer.pings().await?;
            // A message of QoS 0 to other shards takes a moment.
            net.sleep(SECOND).await;
            for (n, version, options, expected) in [
                (0, 4, 1, vec![("a/x", "2", 1), ("a/y", "zero", 0)]),
                (1, 5, 0, vec![("a/x", "2", 0), ("a/y", "zero", 0)]),
                // Retain handling: for new subscriptions, and never.
                (2, 5, 0x11, vec![("a/x", "2", 1), ("a/y", "zero", 0)]),
                (3, 5, 0x21, vec![]),
            ] {
                let (mut me, _) = Hello::new(version, &format!("reader{n}")).connects(&net, addr).await?;
                for round in 0..2 {
                    assert_eq!(me.subscribes(&[("a/#", options)]).await?, [options & 1]);
                    let expected = if round == 1 && options & 0x10 != 0 { &[][..] } else { &expected };
                    let mut heard = Vec::new();
                    while heard.len() < expected.len() {
                        let next = me.hears().await?;
                        assert!(next.retain && !next.dup, "{next:?}");
                        heard.push((next.topic, next.payload, next.qos));
                    }
                    heard.sort();
                    let heard: Vec<_> =
                        heard.iter().map(|(topic, text, qos)| (&**topic, &**text, *qos)).collect();
                    assert_eq!(heard, expected, "round {round} with options {options:#x}");
                }
                net.sleep(SECOND).await;
                me.pings().await?;
                assert_eq!(me.unread, []);
                // A message that comes as it is published has no retain flag, unless the client
                // asks for that.
                me.subscribes(&[("live", if version == 5 { 8 } else { 0 }), ("live/plain", 0)]).await?;
                me.publishes(1, if n == 0 { "live/plain" } else { "live" }, "x").await?;
                assert_eq!(me.hears().await?.retain, n > 0);
                writer.publishes(3, "live", "").await?;
            }
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn retained_messages_agree_on_all_shards_at_last() {
    Sim::seeds(20).faults(Faults::harmless()).run(|sim| {
        let addr = starts(sim, &[]).addr();
        let written = Steps::default();
        for n in 0..3 {
            let written = written.clone();
            sim.client(format!("w{n}"), async move |net| {
                let (mut me, _) = Hello::new(4, &format!("w{n}")).connects(&net, addr).await?;
                for step in 0..20 {
                    let payload =
                        if net.random().is_multiple_of(3) { String::new() } else { format!("{n} {step}") };
                    me.publishes(1 + 2 * (net.random() % 2) as u8, "last", &payload).await?;
                }
                me.pings().await?;
                written.done();
                Ok(())
            });
        }
        let seen = Rc::new(RefCell::new(Vec::new()));
        for n in 0..6 {
            let (written, seen) = (written.clone(), seen.clone());
            sim.client(format!("r{n}"), async move |net| {
                written.reach(&net, 3).await;
                net.sleep(10 * SECOND).await;
                let (mut me, _) = Hello::new(4, &format!("r{n}")).connects(&net, addr).await?;
                me.subscribes(&[("last", 0)]).await?;
                net.sleep(10 * SECOND).await;
                me.pings().await?;
                seen.borrow_mut().push(me.unread.first().map(|heard| heard.payload.clone()));
                Ok(())
            });
        }
        sim.run_until_done();
        let seen = seen.borrow();
        assert!(seen.iter().all(|payload| payload == &seen[0]), "{seen:?}");
    });
}

#[test]
fn publisher_with_no_local_does_not_hear_itself() {
    Sim::seeds(40).faults(Faults::harmless()).run(|sim| {
        let addr = starts(sim, &[]).addr();
        sim.client("ann", async move |net| {
            let (mut me, _) = Hello::new(5, "ann").connects(&net, addr).await?;
            me.subscribes(&[("room", 4), ("room/qos1", 5), ("other", 0)]).await?;
            me.publishes(0, "room", "mine").await?;
            me.publishes(2, "room/qos1", "mine").await?;
            me.publishes(0, "other", "theirs").await?;
            assert_eq!(me.hears().await?.topic, "other");
            assert_eq!(me.unsubscribes("other").await?, [0]);
            assert_eq!(me.unsubscribes("other").await?, [0x11], "there is none any more");
            me.publishes(2, "other", "unheard").await?;
            me.pings().await?;
            assert_eq!(me.unread, []);
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn properties_are_passed_on_and_lifetimes_count_down() {
    Sim::seeds(40).faults(Faults::harmless()).run(|sim| {
        let addr = starts(sim, &[]).addr();
        sim.client("ann", async move |net| {
            let hello = Hello::new(5, "reader").kept();
            let (mut reader, _) = hello.connects(&net, addr).await?;
            reader.subscribes(&[("t", 1)]).await?;
            let (mut old, _) = Hello::new(4, "old").connects(&net, addr).await?;
            old.subscribes(&[("t", 0)]).await?;
            let (mut writer, _) = Hello::new(5, "writer").connects(&net, addr).await?;
            let user = [&[0x26][..], &text("key"), &text("value")].concat();
            let lifetime = |seconds: u32| [&[0x02][..], &seconds.to_be_bytes()].concat();
            for (seconds, payload) in [(100, "kept"), (5, "short-lived")] {
                reader = {
                    drop(reader);
                    net.sleep(SECOND).await;
                    let properties = [&user[..], &lifetime(seconds), &user].concat();
                    let body = writer.message("t", payload, 1, &properties);
                    writer.stream.send(packet(0x32, &body)).await?;
                    writer.answer(0x40).await?;
                    assert_eq!(old.hears().await?.payload, payload);
                    net.sleep(20 * SECOND).await;
                    hello.connects(&net, addr).await?.0
                };
            }
            let heard = reader.hears().await?;
            assert_eq!(heard.payload, "kept");
            let (expiry, rest) = heard.properties.split_at(5);
            assert_eq!((expiry[0], rest), (0x02, &[&user[..], &user].concat()[..]));
            let left = u32::from_be_bytes(expiry[1..].try_into().unwrap());
            assert!((1..=80).contains(&left), "{left} of 100 s are left after 20 s and more");
            net.sleep(SECOND).await;
            reader.pings().await?;
            assert_eq!(reader.unread, [], "what is over is not sent");
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn slow_reader_misses_qos_0_and_slows_none_down() {
    const MESSAGES: usize = 800;
    let missed_some = Cell::new(0);
    Sim::seeds(4).faults(Faults::harmless()).run(|sim| {
        let addr = starts(sim, &["--session-bytes-max", "1000000"]).addr();
        let (subscribed, published, missed) = (Steps::default(), Steps::default(), Steps::default());
        for name in ["quick", "slow"] {
            let (subscribed, published, missed) = (subscribed.clone(), published.clone(), missed.clone());
            sim.client(name, async move |net| {
                let (mut me, _) = Hello::new(4, name).connects(&net, addr).await?;
                me.subscribes(&[("t", 0), ("end", 1)]).await?;
                subscribed.done();
                if name == "slow" {
                    published.reach(&net, 1).await;
                }
                let (mut count, mut last) = (0, None);
                loop {
                    let heard = me.hears().await?;
                    if heard.topic == "end" {
                        break;
                    }
                    let number: usize = heard.payload.split(' ').next().unwrap().parse()?;
                    assert!(last < Some(number), "{number} after {last:?}");
                    (count, last) = (count + 1, Some(number));
                }
                if name == "quick" {
                    assert_eq!(count, MESSAGES);
                } else {
                    (count..MESSAGES).for_each(|_| missed.done());
                }
                Ok(())
            });
        }
        sim.client("writer", async move |net| {
            let (mut me, _) = Hello::new(4, "writer").connects(&net, addr).await?;
            subscribed.reach(&net, 2).await;
            let text = "z".repeat(4000);
            for n in 0..MESSAGES {
                me.publishes(0, "t", &format!("{n} {text}")).await?;
                net.sleep(Duration::from_millis(10)).await;
            }
            published.done();
            net.sleep(60 * SECOND).await;
            me.publishes(2, "end", "").await?;
            Ok(())
        });
        sim.run_until_done();
        missed_some.set(missed_some.get() + missed.0.get());
    });
    assert!(missed_some.get() > 0, "no message was missed: the test shows nothing");
}
