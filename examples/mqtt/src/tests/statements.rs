//! Statements of the standard that no other test is about. `STANDARD.md` has all of them.

use super::*;

/// The messages of a client until nothing more comes: topic, payload, and whether it is retained.
async fn all_heard(net: &Net, me: &mut Client) -> io::Result<Vec<(String, String, bool)>> {
    net.sleep(SECOND).await;
    me.pings().await?;
    let mut heard: Vec<_> =
        me.unread.drain(..).map(|heard| (heard.topic, heard.payload, heard.retain)).collect();
    heard.sort();
    Ok(heard)
}

#[test]
fn what_follows_a_refused_connect_is_not_read() {
    Sim::seeds(20).faults(Faults::harmless()).run(|sim| {
        let addr = starts(sim, &[]).addr();
        sim.client("all", async move |net| {
            let (mut me, _) = Hello::new(5, "me").connects(&net, addr).await?;
            me.subscribes(&[("#", 0)]).await?;
            for hello in [
                packet(0x10, b"\0\x04MQTT\x06\x02\0\0\0\x01x"),
                packet(0x10, b"\0\x04MQTT\x05\x03\0\0\0\0\x01x"),
            ] {
                let mut bad = net.connect(addr).await?;
                bad.send([hello, packet(0x30, b"\0\x01t\0x")].concat()).await?;
                assert_eq!(bad.closed().await?[0], 0x20);
            }
            assert_eq!(all_heard(&net, &mut me).await?, []);
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn topics_are_compared_byte_by_byte() {
    Sim::seeds(20).faults(Faults::harmless()).run(|sim| {
        let addr = starts(sim, &[]).addr();
        sim.client("all", async move |net| {
            let (mut me, _) = Hello::new(4, "me").connects(&net, addr).await?;
            // A mark of byte order, letters with an accent inside and behind them, and in both
            // cases.
            let topics = ["\u{FEFF}a", "a", "A", "\u{E9}", "e\u{301}", "/a", "a/", " a"];
            for topic in topics {
                assert_eq!(me.subscribes(&[(topic, 0)]).await?, [0]);
                for other in topics {
                    me.publishes(0, other, "x").await?;
                }
                assert_eq!(all_heard(&net, &mut me).await?, [(topic.to_owned(), "x".to_owned(), false)]);
                me.unsubscribes(topic).await?;
            }
            // What is unsubscribed is the same filter, and not one that matches it.
            me.subscribes(&[("a/+", 0)]).await?;
            for other in ["a/#", "a/b", "+/+", "A/+"] {
                me.unsubscribes(other).await?;
            }
            me.publishes(0, "a/b", "x").await?;
            assert_eq!(all_heard(&net, &mut me).await?.len(), 1);
            me.unsubscribes("a/+").await?;
            me.publishes(0, "a/b", "x").await?;
            assert_eq!(all_heard(&net, &mut me).await?, []);
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn wildcards_match_no_topic_of_the_server() {
    Sim::seeds(10).faults(Faults::harmless()).run(|sim| {
        let addr = starts(sim, &[]).addr();
        sim.client("all", async move |net| {
            let (mut me, _) = Hello::new(4, "me").connects(&net, addr).await?;
            me.subscribes(&[("#", 0), ("+/x", 0)]).await?;
            me.publishes(0, "$SYS/x", "x").await?;
            assert_eq!(all_heard(&net, &mut me).await?, []);
            me.subscribes(&[("$SYS/+", 0)]).await?;
            me.publishes(0, "$SYS/x", "x").await?;
            assert_eq!(all_heard(&net, &mut me).await?.len(), 1);
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn message_that_is_sent_again_is_a_first_one_to_others() {
    Sim::seeds(20).faults(Faults::harmless()).run(|sim| {
        let addr = starts(sim, &[]).addr();
        sim.client("all", async move |net| {
            let (mut me, _) = Hello::new(4, "me").connects(&net, addr).await?;
            me.subscribes(&[("t", 1)]).await?;
            me.publishes(2, "t", "once").await?;
            // With DUP, under the same id.
            let body = [&text("t")[..], &me.last_id.to_be_bytes(), b"again"].concat();
            me.stream.send(packet(0x3A, &body)).await?;
            assert_eq!(me.answer(0x40).await?[..2], me.last_id.to_be_bytes());
            for payload in ["once", "again"] {
                let heard = me.hears().await?;
                assert_eq!((&*heard.payload, heard.dup, heard.qos), (payload, false, 1));
            }
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn empty_retained_message_is_heard_and_not_kept() {
    Sim::seeds(20).faults(Faults::harmless()).run(|sim| {
        let addr = starts(sim, &[]).addr();
        let version = if sim.seed().is_multiple_of(2) { 4 } else { 5 };
        sim.client("all", async move |net| {
            let (mut me, _) = Hello::new(version, "me").connects(&net, addr).await?;
            me.subscribes(&[("t", 1)]).await?;
            let empty = ("t".to_owned(), String::new(), false);
            for flags in [1, 3] {
                me.publishes(flags, "t", "").await?;
                assert_eq!(all_heard(&net, &mut me).await?, std::slice::from_ref(&empty));
            }
            // QoS 0 in the place of QoS 1, and one that is not retained in the place of none.
            me.publishes(3, "t", "one").await?;
            me.publishes(1, "t", "zero").await?;
            me.publishes(2, "t", "").await?;
            all_heard(&net, &mut me).await?;
            me.subscribes(&[("t", 1)]).await?;
            assert_eq!(all_heard(&net, &mut me).await?, [("t".to_owned(), "zero".to_owned(), true)]);
            // It outlives the session of its publisher.
            me.disconnects().await?;
            let (mut me, _) = Hello::new(version, "later").connects(&net, addr).await?;
            me.subscribes(&[("+", 0)]).await?;
            assert_eq!(all_heard(&net, &mut me).await?.len(), 1);
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn filters_that_overlap_bring_the_highest_qos_too() {
    Sim::seeds(20).faults(Faults::harmless()).run(|sim| {
        let addr = starts(sim, &[]).addr();
        sim.client("all", async move |net| {
            let (mut me, _) = Hello::new(4, "me").connects(&net, addr).await?;
            me.subscribes(&[("t/#", 0), ("t/+", 1), ("t/x", 0)]).await?;
            me.publishes(2, "t/x", "x").await?;
            let mut heard = Vec::new();
            for _ in 0..3 {
                heard.push(me.hears().await?.qos);
            }
            heard.sort();
            assert_eq!(heard, [0, 0, 1]);
            // The same filter once more takes the place of the first.
            me.unsubscribes("t/#").await?;
            me.unsubscribes("t/+").await?;
            me.subscribes(&[("t/x", 1)]).await?;
            me.publishes(2, "t/x", "y").await?;
            assert_eq!(me.hears().await?.qos, 1);
            me.pings().await?;
            assert_eq!(me.unread, []);
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn goodbye_that_is_none_publishes_the_will() {
    Sim::seeds(20).faults(Faults::harmless()).run(|sim| {
        let addr = starts(sim, &[]).addr();
        sim.client("all", async move |net| {
            let (mut heir, _) = Hello::new(5, "heir").connects(&net, addr).await?;
            heir.subscribes(&[("wills/#", 0)]).await?;
            for (n, goodbye) in [(1, packet(0xE0, &[0, 5, 0x11, 0, 0, 0, 9])), (2, vec![0xE1, 0])] {
                let hello = Hello::new(5, &n.to_string()).will(0, &format!("wills/{n}"), "lost");
                let (mut me, _) = hello.connects(&net, addr).await?;
                me.stream.send(goodbye).await?;
                assert_eq!(me.answer(0xE0).await?[0], 0x82);
                me.stream.closed().await?;
                assert_eq!(heir.hears().await?.topic, format!("wills/{n}"));
            }
            Ok(())
        });
        sim.run_until_done();
    });
}
