//! What a broker keeps at most, and the end of a server.

use super::*;

#[test]
fn filters_beyond_the_bound_are_refused() {
    Sim::seeds(20).faults(Faults::harmless()).run(|sim| {
        let addr = starts(sim, &["--filters-max", "3"]).addr();
        sim.client("all", async move |net| {
            for (version, refused) in [(5, 0x97), (4, 0x80)] {
                let (mut me, _) = Hello::new(version, &version.to_string()).connects(&net, addr).await?;
                assert_eq!(me.subscribes(&[("a", 0), ("b", 1)]).await?, [0, 1]);
                assert_eq!(
                    me.subscribes(&[("c", 1), ("d", 0), ("a", 1), ("e", 1)]).await?,
                    [1, refused, 1, refused]
                );
                me.unsubscribes("b").await?;
                assert_eq!(me.subscribes(&[("d", 0), ("e", 0)]).await?, [0, refused]);
                me.publishes(2, "e", "unheard").await?;
                me.publishes(2, "d", "heard").await?;
                assert_eq!(me.hears().await?.payload, "heard");
                me.disconnects().await?;
            }
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn huge_subscription_harms_none() {
    Sim::seeds(5).faults(Faults::harmless()).run(|sim| {
        let addr = starts(sim, &[]).addr();
        sim.client("all", async move |net| {
            let filters: Vec<String> = (0..4000).map(|n| format!("{}/{n}", "+/".repeat(20))).collect();
            let asked: Vec<_> = filters.iter().map(|filter| (&**filter, 1)).collect();
            let (mut me, _) = Hello::new(5, "huge").connects(&net, addr).await?;
            let codes = me.subscribes(&asked).await?;
            assert_eq!(codes.iter().filter(|code| **code == 1).count(), 100);
            assert_eq!(codes.iter().filter(|code| **code == 0x97).count(), 3900);
            let (mut other, _) = Hello::new(4, "other").connects(&net, addr).await?;
            other.publishes(2, &format!("{}/99", "x/".repeat(20)), "deep").await?;
            assert_eq!(me.hears().await?.payload, "deep");
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn retained_messages_beyond_the_bound_are_refused() {
    Sim::seeds(20).faults(Faults::harmless()).run(|sim| {
        let addr = starts(sim, &["--retained-bytes-max", "1000"]).addr();
        sim.client("all", async move |net| {
            let (mut me, _) = Hello::new(5, "five").connects(&net, addr).await?;
            let payload = "x".repeat(300);
            for (topic, code) in [("a", 0), ("b", 0), ("c", 0x97), ("a", 0), ("c", 0x97)] {
                assert_eq!(me.publishes(3, topic, &payload).await?, code, "{topic}");
            }
            // Others are handed out, and one that is cleared makes room.
            assert_eq!(me.publishes(2, "c", &payload).await?, 0);
            me.publishes(3, "a", "").await?;
            assert_eq!(me.publishes(3, "b", "short").await?, 0);
            assert_eq!(me.publishes(3, "c", &payload).await?, 0);
            // Without an acknowledgement the connection ends.
            me.publishes(1, "e", &"x".repeat(1000)).await?;
            assert_eq!(me.answer(0xE0).await?[0], 0x97);
            let (mut me, _) = Hello::new(4, "three").connects(&net, addr).await?;
            let body = me.message("e", &"x".repeat(1000), 1, &[]);
            me.stream.send(packet(0x33, &body)).await?;
            assert_eq!(me.stream.closed().await?, b"");
            // A will is published all the same, and is not retained.
            let (mut heir, _) = Hello::new(4, "heir").connects(&net, addr).await?;
            heir.subscribes(&[("will", 1)]).await?;
            let hello = Hello::new(4, "lost").will(0x28, 0, "will", &"x".repeat(1000));
            hello.connects(&net, addr).await?.0.stream.reset();
            assert_eq!(heir.hears().await?.qos, 1);
            let (mut later, _) = Hello::new(4, "later").connects(&net, addr).await?;
            later.subscribes(&[("will", 1)]).await?;
            net.sleep(SECOND).await;
            later.pings().await?;
            assert_eq!(later.unread, []);
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn sessions_beyond_the_bound_are_refused() {
    Sim::seeds(20).faults(Faults::harmless()).run(|sim| {
        let addr = starts(sim, &["--sessions-max", "2"]).addr();
        sim.client("all", async move |net| {
            let (mut there, mut refused) = (Vec::new(), 0);
            for n in 0..30 {
                let mut stream = net.connect(addr).await?;
                let version = if n % 2 == 0 { 4 } else { 5 };
                stream.send(Hello::new(version, &format!("c{n}")).bytes()).await?;
                let head = stream.exactly(2).await?;
                let body = stream.exactly(head[1].into()).await?;
                match (version, body[1]) {
                    (_, 0) => there.push(stream),
                    (4, 3) | (5, 0x97) => {
                        refused += 1;
                        assert_eq!(stream.closed().await?, b"");
                    }
                    other => panic!("{other:?}"),
                }
            }
            assert!(there.len() >= 2 && refused >= 30 - 4 * 2, "{} are there", there.len());
            drop(there);
            net.sleep(60 * SECOND).await;
            Hello::new(5, "later").connects(&net, addr).await?;
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn filters_and_wills_count_for_what_a_shard_keeps() {
    Sim::seeds(10).faults(Faults::harmless()).run(|sim| {
        let addr = starts(sim, &["--sessions-bytes-max", "10000"]).addr();
        sim.client("all", async move |net| {
            // On up to four shards: more than all of them keep.
            let (mut there, mut refused) = (Vec::new(), 0);
            for n in 0..20 {
                let (mut me, _) = Hello::new(5, &format!("c{n}")).connects(&net, addr).await?;
                refused += usize::from(me.subscribes(&[("a/b/c/d/e/f/g/h/i/j/k/l", 0)]).await? == [0x97]);
                there.push(me);
            }
            assert!((20 - 12..=17).contains(&refused), "{refused} of 20 filters are refused");
            let hello = Hello::new(5, "will").will(0, 0, "will", &"x".repeat(12_000));
            let mut stream = net.connect(addr).await?;
            stream.send(hello.bytes()).await?;
            assert_eq!(stream.closed().await?, [0x20, 3, 0, 0x97, 0]);
            // A client that is refused takes nothing over.
            let mut stream = net.connect(addr).await?;
            stream.send(Hello { id: "c0".into(), ..hello }.bytes()).await?;
            assert_eq!(stream.closed().await?, [0x20, 3, 0, 0x97, 0]);
            there[0].pings().await?;
            drop(there);
            net.sleep(60 * SECOND).await;
            for n in 0..3 {
                let (mut me, _) = Hello::new(5, &format!("c{n}")).connects(&net, addr).await?;
                assert_eq!(
                    me.subscribes(&[("a/b/c/d/e/f/g/h/i/j/k/l", 0)]).await?,
                    [0],
                    "there is room again"
                );
                me.disconnects().await?;
                net.sleep(SECOND).await;
            }
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn messages_that_wait_are_bounded_and_the_first_ones_stay() {
    Sim::seeds(20).faults(Faults::harmless()).run(|sim| {
        let addr = starts(sim, &["--session-bytes-max", "3000", "--packet-bytes-max", "1024"]).addr();
        sim.client("all", async move |net| {
            let hello = Hello::new(4, "reader").kept();
            let (mut reader, _) = hello.connects(&net, addr).await?;
            reader.subscribes(&[("t", 1)]).await?;
            reader.disconnects().await?;
            net.sleep(SECOND).await;
            let (mut writer, _) = Hello::new(4, "writer").connects(&net, addr).await?;
            for n in 0..30 {
                assert_eq!(writer.publishes(2, "t", &format!("{n:100}")).await?, 0);
            }
            let (mut reader, _) = hello.connects(&net, addr).await?;
            // Each has a topic of 1 byte, a payload of 100, and 128 more; the filter counts for 257.
            for n in 0..(3000 - 257) / 229 {
                assert_eq!(reader.hears().await?.payload.trim(), n.to_string());
            }
            net.sleep(SECOND).await;
            // There is room again.
            writer.publishes(2, "t", "later").await?;
            assert_eq!(reader.hears().await?.payload, "later");
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn many_retained_messages_come_as_the_client_acknowledges() {
    Sim::seeds(10).faults(Faults::harmless()).run(|sim| {
        let addr = starts(sim, &["--session-bytes-max", "4000", "--packet-bytes-max", "1024"]).addr();
        sim.client("all", async move |net| {
            const MESSAGES: usize = 300;
            let (mut writer, _) = Hello::new(4, "writer").connects(&net, addr).await?;
            for n in 0..MESSAGES {
                writer.publishes(3 - 2 * (n % 2) as u8, &format!("t/{n:04}"), &"x".repeat(100)).await?;
            }
            writer.pings().await?;
            net.sleep(10 * SECOND).await;
            let (mut reader, _) = Hello::new(5, "reader").connects(&net, addr).await?;
            reader.subscribes(&[("t/+", 1)]).await?;
            let mut topics = Vec::new();
            for _ in 0..MESSAGES {
                topics.push(reader.hears().await?.topic);
            }
            topics.sort();
            assert_eq!(topics, (0..MESSAGES).map(|n| format!("t/{n:04}")).collect::<Vec<_>>());
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn subscriptions_without_end_are_refused() {
    Sim::seeds(10).faults(Faults::harmless()).run(|sim| {
        let addr = starts(
            sim,
            &["--session-bytes-max", "3000", "--packet-bytes-max", "1024", "--filters-max", "50"],
        )
        .addr();
        sim.client("all", async move |net| {
            let (mut writer, _) = Hello::new(4, "writer").connects(&net, addr).await?;
            for n in 0..30 {
                writer.publishes(3, &format!("t/{n}"), &"x".repeat(100)).await?;
            }
            // It acknowledges nothing, so the retained messages of the first one never end.
            let (mut me, _) = Hello::new(5, "greedy").connects(&net, addr).await?;
            for n in 0..100 {
                assert_eq!(me.subscribes(&[("t/+", 1)]).await?, [1], "{n}");
                // The first one is looked after.
                net.sleep(SECOND * u32::from(n == 0)).await;
            }
            me.stream
                .send(packet(0x82, &[&[0, 1, 0][..], &text("t/+"), &[1], &text("t/+"), &[1]].concat()))
                .await?;
            me.answer(0x90).await?;
            assert_eq!(me.answer(0xE0).await?[0], 0x97);
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn client_is_sent_no_packet_larger_than_it_takes() {
    Sim::seeds(20).faults(Faults::harmless()).run(|sim| {
        let addr = starts(sim, &[]).addr();
        sim.client("all", async move |net| {
            let properties = b"\x27\0\0\0\x32".to_vec();
            let (mut reader, _) =
                Hello { properties, ..Hello::new(5, "reader") }.connects(&net, addr).await?;
            reader.subscribes(&[("t", 1)]).await?;
            let (mut writer, _) = Hello::new(4, "writer").connects(&net, addr).await?;
            for n in 0..200 {
                let payload = if n % 10 == 0 { n.to_string() } else { "x".repeat(60) };
                writer.publishes(2 * (n % 3 == 0) as u8, "t", &payload).await?;
            }
            // With 6 bytes before its text it is as large as may be; 8 are before that of QoS 1.
            writer.publishes(0, "t", &"x".repeat(44)).await?;
            writer.publishes(2, "t", &"x".repeat(42)).await?;
            writer.publishes(2, "t", "end").await?;
            let mut heard = 0;
            while reader.hears().await?.payload != "end" {
                heard += 1;
            }
            reader.pings().await?;
            assert_eq!((heard, reader.unread.len()), (22, 0));
            reader.stream.send([0x20, 0]).await?;
            assert_eq!(reader.answer(0xE0).await?[..], b"\x82\x10\x1F\0\x0DProtocolError"[..]);
            let properties = b"\x27\0\0\0\x10".to_vec();
            let (mut short, _) = Hello { properties, ..Hello::new(5, "short") }.connects(&net, addr).await?;
            short.stream.send([0x20, 0]).await?;
            assert_eq!(short.answer(0xE0).await?, [0x82], "without its name");
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn clients_are_told_of_the_end_and_no_will_is_published() {
    Sim::seeds(40).faults(Faults::harmless()).run(|sim| {
        let server = starts(sim, &[]);
        let addr = server.addr();
        let connected = Steps::default();
        for n in 0..6 {
            let connected = connected.clone();
            sim.client(format!("c{n}"), async move |net| {
                let version = 4 + n % 2;
                let hello = Hello::new(version, &format!("c{n}")).will(8, 0, "wills", "lost");
                let (mut me, _) = hello.connects(&net, addr).await?;
                me.subscribes(&[("wills", 1)]).await?;
                connected.done();
                let goodbye = me.stream.closed().await?;
                assert_eq!(goodbye.get(2), (version == 5).then_some(&0x8B));
                Ok(())
            });
        }
        assert!(sim.run_until(600 * SECOND, || connected.0.get() == 6), "all connect");
        sim.drain();
        sim.run_until_done();
        assert!(sim.run_until(60 * SECOND, || server.is_done()), "all shards end");
    });
}

#[test]
fn client_that_acknowledges_nothing_is_seldom_looked_after() {
    Sim::seeds(10).run(|sim| {
        let server = starts(
            sim,
            &["--session-bytes-max", "3000", "--packet-bytes-max", "1024", "--filters-max", "50"],
        );
        let (addr, asked) = (server.addr(), Steps::default());
        let done = asked.clone();
        sim.client("all", async move |net| {
            let (mut writer, _) = Hello::new(4, "writer").connects(&net, addr).await?;
            for n in 0..30 {
                writer.publishes(3, &format!("t/{n}"), &"x".repeat(100)).await?;
            }
            let (mut me, _) = Hello::new(5, "greedy").connects(&net, addr).await?;
            assert_eq!(me.subscribes(&[("t/+", 1)]).await?, [1]);
            net.sleep(10 * SECOND).await;
            done.done();
            net.sleep(200 * SECOND).await;
            Ok(())
        });
        assert!(sim.run_until(600 * SECOND, || asked.0.get() == 1));
        let turns = || server.stats().shards.iter().map(|shard| shard.driver.turns).sum::<u64>();
        let before = turns();
        sim.run_for(100 * SECOND);
        let more = turns() - before;
        assert!(more < 5000, "{more} turns in 100 s");
        sim.run_until_done();
    });
}

#[test]
fn client_comes_back_to_a_shard_that_is_full() {
    Sim::seeds(20).faults(Faults::harmless()).run(|sim| {
        let addr = starts(sim, &["--sessions-bytes-max", "3000"]).addr();
        sim.client("all", async move |net| {
            let hello = Hello::new(4, "reader").kept().will(0, 0, "will", &"x".repeat(800));
            let (mut reader, _) = hello.connects(&net, addr).await?;
            reader.subscribes(&[("t", 1)]).await?;
            reader.disconnects().await?;
            net.sleep(SECOND).await;
            let (mut writer, _) = Hello::new(4, "writer").connects(&net, addr).await?;
            for n in 0..30 {
                writer.publishes(2, "t", &format!("{n:100}")).await?;
            }
            let (mut reader, is_present) = hello.connects(&net, addr).await?;
            assert!(is_present);
            // The will counts for 932 bytes, the filter for 257, and each message for 229.
            for n in 0..(3000 - 932 - 257) / 229 {
                assert_eq!(reader.hears().await?.payload.trim(), n.to_string());
            }
            Ok(())
        });
        sim.run_until_done();
    });
}
