//! Bounds of what a broker keeps, and the end of a server.

use super::*;

#[test]
fn filters_beyond_the_bound_are_refused() {
    Sim::seeds(20).faults(Faults::harmless()).run(|sim| {
        let addr = starts(sim, &["--session-bytes-max", "1000"]).addr();
        sim.client("all", async move |net| {
            for (version, refused) in [(5, 0x97), (4, 0x80)] {
                let (mut me, _) = Hello::new(version, &version.to_string()).connects(&net, addr).await?;
                // Each counts for 257 bytes, and there is room for a message beside three.
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
            // Each has 22 levels of 256 bytes, and about 44 letters.
            assert_eq!(codes.iter().filter(|code| **code == 1).count(), (1 << 20) / (22 * 256 + 44));
            assert_eq!(codes.iter().filter(|code| ![1, 0x97].contains(*code)).count(), 0);
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
        let addr = starts_on(sim, 1, &["--retained-bytes-max", "13000"]).addr();
        sim.client("all", async move |net| {
            let refused = async |version, topic: &str, payload: &str| {
                let (mut me, _) = Hello::new(version, "refused").connects(&net, addr).await?;
                let body = me.message(topic, payload, 1, &[]);
                me.stream.send(packet(0x33, &body)).await?;
                let goodbye =
                    if version == 5 { &b"\xE0\x12\x97\x10\x1F\0\x0DQuotaExceeded"[..] } else { b"" };
                assert_eq!(me.stream.closed().await?, goodbye, "{topic}");
                io::Result::Ok(())
            };
            let (mut me, _) = Hello::new(5, "five").connects(&net, addr).await?;
            // Each counts for 4 KiB, or for more.
            for (topic, payload) in [("a", "x"), ("b", "x"), ("c", "x"), ("a", "y")] {
                me.publishes(3, topic, payload).await?;
            }
            for version in [4, 5] {
                refused(version, "d", "x").await?;
                refused(version, "c", &"x".repeat(5000)).await?;
            }
            // Others are handed out, one of the same size is replaced, and one that is cleared
            // makes room.
            me.publishes(2, "d", "x").await?;
            me.publishes(3, "c", &"x".repeat(4000 - 128)).await?;
            me.publishes(3, "a", "").await?;
            me.publishes(3, "b", &"x".repeat(8000)).await?;
            refused(5, "d", "x").await?;
            me.publishes(3, "b", "").await?;
            me.publishes(3, "d", "x").await?;
            let (mut later, _) = Hello::new(4, "later").connects(&net, addr).await?;
            later.subscribes(&[("#", 1)]).await?;
            let mut topics = [later.hears().await?.topic, later.hears().await?.topic];
            topics.sort();
            assert_eq!(topics, ["c", "d"]);
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
fn filters_count_for_what_a_shard_keeps() {
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
            // A client that is refused, here for its will, takes nothing over.
            let hello = Hello::new(5, "c0").will(0, "will", &"x".repeat(4096));
            let mut stream = net.connect(addr).await?;
            stream.send(hello.bytes()).await?;
            assert_eq!(stream.closed().await?, [0x20, 3, 0, 0x95, 0]);
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
        let addr = starts(sim, &["--session-bytes-max", "3000"]).addr();
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
            // Each has a topic of 1 byte, a payload of 100, and 128 more; the filter counts for
            // 257.
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
fn retained_messages_wait_within_the_bound_of_the_session() {
    Sim::seeds(5).faults(Faults::harmless()).run(|sim| {
        let addr = starts(sim, &["--session-bytes-max", "40000"]).addr();
        sim.client("all", async move |net| {
            const MESSAGES: usize = 300;
            let (mut writer, _) = Hello::new(4, "writer").connects(&net, addr).await?;
            for n in 0..MESSAGES {
                writer.publishes(3, &format!("t/{n:04}"), &"x".repeat(100)).await?;
            }
            let (mut reader, _) = Hello::new(5, "reader").connects(&net, addr).await?;
            reader.subscribes(&[("t/+", 1)]).await?;
            // Those that are in flight count too.
            let fits = (40_000 - 2 * 256 - 3) / (128 + 6 + 100);
            for n in 0..fits {
                assert_eq!(reader.hears().await?.topic, format!("t/{n:04}"));
            }
            net.sleep(SECOND).await;
            reader.pings().await?;
            assert_eq!(reader.unread, []);
            // There is room again.
            reader.subscribes(&[("t/029+", 0), ("t/0299", 1)]).await?;
            assert_eq!(reader.hears().await?.topic, "t/0299");
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
            assert_eq!(reader.answer(0xE0).await?, [0x82], "without its name");
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
                let hello = Hello::new(version, &format!("c{n}")).will(8, "wills", "lost");
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
fn client_comes_back_to_a_shard_that_is_full() {
    Sim::seeds(20).faults(Faults::harmless()).run(|sim| {
        let addr = starts(sim, &["--sessions-bytes-max", "3000"]).addr();
        sim.client("all", async move |net| {
            let hello = Hello::new(4, "reader").kept().will(0, "will", &"x".repeat(800));
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
            // The filter counts for 257 bytes, and each message for 229.
            for n in 0..(3000 - 257) / 229 {
                assert_eq!(reader.hears().await?.payload.trim(), n.to_string());
            }
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn retained_messages_give_their_room_back_at_their_expiry() {
    Sim::seeds(20).faults(Faults::harmless()).run(|sim| {
        let shards = 1 + sim.seed() as usize % 3;
        let room = (shards * 13_000).to_string();
        let addr = starts_on(sim, shards, &["--retained-bytes-max", &room]).addr();
        sim.client("all", async move |net| {
            let (mut me, _) = Hello::new(5, "me").connects(&net, addr).await?;
            // Three on each shard at most, by turns with no end, with one, and with another one.
            let publish = async |me: &mut Client, topic: &str, seconds: Option<u32>| {
                let expiry = seconds.map(|seconds| [&[2][..], &seconds.to_be_bytes()].concat());
                let body = me.message(topic, "x", 1, &expiry.unwrap_or_default());
                me.stream.send(packet(0x33, &body)).await?;
                let (kind, _) = me.packet().await?;
                io::Result::Ok(kind == 0x40)
            };
            let mut kept = 0;
            for n in 0.. {
                if !publish(&mut me, &format!("t{n}"), Some(10 + n % 7)).await? {
                    break;
                }
                kept += 1;
            }
            assert!((3..=3 * shards).contains(&kept), "{kept} kept");
            net.sleep(60 * SECOND).await;
            // As many as before, on the same shards; of one that is published again the last end
            // counts.
            let (mut me, _) = Hello::new(5, "me").connects(&net, addr).await?;
            for n in 0..kept {
                assert!(publish(&mut me, &format!("t{n}"), Some(5)).await?, "t{n}");
                assert!(publish(&mut me, &format!("t{n}"), (n % 2 == 0).then_some(100)).await?, "t{n} again");
            }
            net.sleep(20 * SECOND).await;
            let (mut later, _) = Hello::new(5, "later").connects(&net, addr).await?;
            later.subscribes(&[("#", 1)]).await?;
            for _ in 0..kept {
                later.hears().await?;
            }
            net.sleep(100 * SECOND).await;
            for n in (0..kept).step_by(2) {
                assert!(publish(&mut me, &format!("t{n}"), None).await?, "t{n} at last");
            }
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn subscription_of_2000_filters_is_told_what_is_retained_once() {
    Sim::seeds(3).faults(Faults::harmless()).run(|sim| {
        let server = starts(sim, &["--session-bytes-max", "10000000"]);
        let addr = server.addr();
        sim.client("all", async move |net| {
            let (mut me, _) = Hello::new(4, "publisher").connects(&net, addr).await?;
            for n in 0..600 {
                me.publishes(1, &format!("t/{n:04}"), "x").await?;
            }
            me.pings().await?;
            net.sleep(SECOND).await;
            let (mut many, _) = Hello::new(5, "many").connects(&net, addr).await?;
            let turns = || -> u64 { server.stats().shards.iter().map(|shard| shard.driver.turns).sum() };
            let before = turns();
            let filters: Vec<String> = (0..2000).map(|n| format!("+/{n:04}")).collect();
            let asked: Vec<_> = filters.iter().map(|filter| (&**filter, 0)).collect();
            assert_eq!(many.subscribes(&asked).await?, vec![0; 2000]);
            let turns = turns() - before;
            // Each looks at 600 messages, in three parts.
            assert!(turns > 2000, "{turns} turns");
            let mut heard: Vec<String> = many.unread.drain(..).map(|heard| heard.topic).collect();
            heard.sort();
            assert!(
                heard.iter().eq(&(0..600).map(|n| format!("t/{n:04}")).collect::<Vec<_>>()),
                "{}",
                heard.len()
            );
            Ok(())
        });
        sim.run_until_done();
    });
}
