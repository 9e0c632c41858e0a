//! Sessions: what outlives a connection, QoS 1 over connections that are lost, take-over.

use std::collections::BTreeSet;

use super::*;

#[test]
fn acknowledged_messages_survive_connections_that_are_lost() {
    const MESSAGES: usize = 40;
    Sim::seeds(15).faults(Faults::all()).run(|sim| {
        let addr = starts(sim, &[]).addr();
        let version = if sim.seed().is_multiple_of(2) { 4 } else { 5 };
        let (subscribed, published) = (Steps::default(), Steps::default());
        let acknowledged = Rc::new(RefCell::new(BTreeSet::new()));
        let (ready, sent) = (subscribed.clone(), acknowledged.clone());
        let done = published.clone();
        sim.client("writer", async move |net| {
            ready.reach(&net, 1).await;
            let mut number = 0;
            while number < MESSAGES {
                let Ok((mut me, _)) = Hello::new(version, "writer").connects(&net, addr).await else {
                    net.sleep(SECOND).await;
                    continue;
                };
                // One that has no answer is published again, on the next connection.
                while number < MESSAGES && me.publishes(2, "t", &number.to_string()).await.is_ok() {
                    sent.borrow_mut().insert(number);
                    number += 1;
                    net.sleep(Duration::from_millis(net.random() % 100)).await;
                }
            }
            done.done();
            Ok(())
        });
        sim.client("reader", async move |net| {
            let (mut heard, mut was_there) = (BTreeSet::new(), false);
            loop {
                let hello = Hello::new(version, "reader").kept();
                let Ok((mut me, is_present)) = hello.connects(&net, addr).await else {
                    net.sleep(SECOND).await;
                    continue;
                };
                assert!(is_present || !was_there, "the session is lost");
                if !was_there && me.subscribes(&[("t", 1)]).await.is_err() {
                    continue;
                }
                was_there = true;
                subscribed.done();
                for _ in 0..5 + net.random() % 20 {
                    let wait = 20 * SECOND;
                    match net.timeout(wait, me.next()).await {
                        Ok(Ok(next)) => {
                            heard.insert(next.payload.parse::<usize>()?);
                            // Some are heard, and their acknowledgement is lost.
                            if !net.random().is_multiple_of(8) && me.acknowledges(next.id).await.is_err() {
                                break;
                            }
                        }
                        Ok(Err(_)) => break,
                        Err(_) if published.0.get() > 0 && heard.is_superset(&acknowledged.borrow()) => {
                            return Ok(());
                        }
                        Err(_) => break,
                    }
                }
                if net.random().is_multiple_of(2) {
                    me.stream.reset();
                }
                assert!(net.now() < 40_000 * SECOND, "{:?} never came", &*acknowledged.borrow() - &heard);
            }
        });
        sim.run_until_done();
    });
}

#[test]
fn kept_session_sends_what_came_until_it_is_acknowledged() {
    Sim::seeds(30).faults(Faults::harmless()).run(|sim| {
        let addr = starts(sim, &[]).addr();
        let version = if sim.seed().is_multiple_of(2) { 4 } else { 5 };
        sim.client("both", async move |net| {
            let hello = Hello::new(version, "reader").kept();
            let (mut reader, is_present) = hello.connects(&net, addr).await?;
            assert!(!is_present);
            reader.subscribes(&[("t/+", 1), ("z", 0)]).await?;
            reader.disconnects().await?;
            // The home of the session learns of the end.
            net.sleep(SECOND).await;
            let (mut writer, _) = Hello::new(version, "writer").connects(&net, addr).await?;
            for n in 0..5 {
                assert_eq!(writer.publishes(2, &format!("t/{n}"), &n.to_string()).await?, 0);
                writer.publishes(0, &format!("t/{n}"), "not kept").await?;
            }
            writer.publishes(2, "z", "not kept").await?;

            let (mut reader, is_present) = hello.connects(&net, addr).await?;
            assert!(is_present);
            let mut first = Vec::new();
            for n in 0..5 {
                let heard = reader.next().await?;
                assert_eq!((&*heard.payload, heard.qos, heard.dup), (&*n.to_string(), 1, false));
                first.push(heard.id);
            }
            reader.acknowledges(first[1]).await?;
            reader.acknowledges(first[3]).await?;
            reader.pings().await?;
            // The acknowledgements of a client elsewhere are on their way.
            net.sleep(SECOND).await;
            reader.stream.reset();
            let (mut reader, is_present) = hello.connects(&net, addr).await?;
            assert!(is_present);
            for n in [0, 2, 4] {
                let heard = reader.hears().await?;
                assert_eq!((&*heard.payload, heard.id, heard.dup), (&*n.to_string(), first[n], true));
            }
            writer.publishes(2, "t/new", "new").await?;
            let heard = reader.hears().await?;
            assert_eq!((&*heard.payload, heard.dup), ("new", false));
            // The filters are there too, with both QoS.
            writer.publishes(0, "z", "zero").await?;
            assert_eq!(reader.hears().await?.payload, "zero");
            reader.pings().await?;
            assert_eq!(reader.unread, []);
            reader.disconnects().await?;

            // A clean session begins with nothing.
            let (mut reader, is_present) = Hello::new(version, "reader").connects(&net, addr).await?;
            assert!(!is_present);
            writer.publishes(2, "t/0", "unheard").await?;
            writer.publishes(0, "z", "unheard").await?;
            writer.pings().await?;
            net.sleep(SECOND).await;
            reader.pings().await?;
            assert_eq!(reader.unread, []);
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn session_ends_when_its_time_is_over() {
    Sim::seeds(40).faults(Faults::harmless()).run(|sim| {
        let addr = starts(sim, &[]).addr();
        let version = if sim.seed().is_multiple_of(2) { 4 } else { 5 };
        sim.client("ann", async move |net| {
            let hello = Hello::new(version, "ann").kept();
            // In version 3.1.1 it is the longest time.
            let expiry = if version == 5 { 3600 } else { 86_400 };
            for (rests, expected) in
                [(expiry / 2, true), (expiry / 2, true), (expiry * 3 / 2, false), (20, true)]
            {
                let (mut me, _) = hello.connects(&net, addr).await?;
                me.subscribes(&[("t", 1)]).await?;
                me.disconnects().await?;
                net.sleep(rests * SECOND).await;
                let (me, is_present) = hello.connects(&net, addr).await?;
                assert_eq!(is_present, expected, "after {rests} s");
                me.disconnects().await?;
            }
            if version == 5 {
                // A DISCONNECT may shorten it.
                let (mut me, is_present) = hello.connects(&net, addr).await?;
                assert!(is_present);
                me.stream.send(packet(0xE0, &[0, 5, 0x11, 0, 0, 0, 0])).await?;
                me.stream.closed().await?;
                net.sleep(SECOND).await;
                assert!(!hello.connects(&net, addr).await?.1);
                // And not begin one: this one ends with its connection, and what asks for another
                // end is no goodbye.
                let short = Hello { properties: vec![], ..hello.clone() };
                let (mut me, _) = short.connects(&net, addr).await?;
                me.stream.send(packet(0xE0, &[0, 5, 0x11, 0, 0, 0, 9])).await?;
                assert_eq!(me.answer(0xE0).await?[0], 0x82);
                me.stream.closed().await?;
                net.sleep(SECOND).await;
                assert!(!hello.connects(&net, addr).await?.1);
            }
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn client_id_is_taken_over_by_the_latest_connection() {
    Sim::seeds(50).faults(Faults::harmless()).run(|sim| {
        let addr = starts(sim, &[]).addr();
        sim.client("all", async move |net| {
            let hello = Hello::new(5, "same").kept();
            let (mut last, _) = hello.connects(&net, addr).await?;
            last.subscribes(&[("t", 1), ("z", 0)]).await?;
            for _ in 0..6 {
                let (next, is_present) = hello.connects(&net, addr).await?;
                assert!(is_present);
                assert_eq!(last.answer(0xE0).await?[0], 0x8E, "session taken over");
                assert_eq!(last.stream.closed().await?, b"");
                last = next;
            }
            let (mut writer, _) = Hello::new(4, "writer").connects(&net, addr).await?;
            writer.publishes(2, "t", "one").await?;
            writer.publishes(2, "z", "two").await?;
            let mut heard = [last.hears().await?.payload, last.hears().await?.payload];
            heard.sort();
            assert_eq!(heard, ["one", "two"], "the last connection hears it");
            last.pings().await?;
            assert_eq!(last.unread, []);
            Ok(())
        });
        // Many at once: one of them is left.
        let left = Steps::default();
        for n in 0..5 {
            let left = left.clone();
            sim.client(format!("c{n}"), async move |net| {
                let hello = Hello::new([4, 5][n % 2], "crowd");
                let Ok((mut me, _)) = hello.connects(&net, addr).await else { return Ok(()) };
                if net.timeout(600 * SECOND, me.packet()).await.is_err() {
                    me.pings().await?;
                    left.done();
                }
                Ok(())
            });
        }
        sim.run_until_done();
        assert_eq!(left.0.get(), 1, "connections of one client id");
    });
}

#[test]
fn no_more_is_in_flight_than_the_client_takes() {
    Sim::seeds(40).faults(Faults::harmless()).run(|sim| {
        let addr = starts(sim, &[]).addr();
        sim.client("both", async move |net| {
            let receive_max = 1 + (net.random() % 5) as usize;
            let properties = [&[0x21][..], &(receive_max as u16).to_be_bytes()].concat();
            let (mut reader, _) =
                Hello { properties, ..Hello::new(5, "reader") }.connects(&net, addr).await?;
            reader.subscribes(&[("t", 1)]).await?;
            let (mut writer, _) = Hello::new(4, "writer").connects(&net, addr).await?;
            for n in 0..20 {
                writer.publishes(2, "t", &n.to_string()).await?;
            }
            for first in (0..20).step_by(receive_max) {
                net.sleep(SECOND).await;
                reader.pings().await?;
                let expected: Vec<_> = (first..20.min(first + receive_max)).map(|n| n.to_string()).collect();
                let heard: Vec<_> = reader.unread.drain(..).collect();
                assert_eq!(heard.iter().map(|heard| heard.payload.clone()).collect::<Vec<_>>(), expected);
                for heard in heard {
                    reader.acknowledges(heard.id).await?;
                }
            }
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn client_that_is_gone_before_its_answer_leaves_no_session() {
    Sim::seeds(30).faults(Faults::harmless()).run(|sim| {
        let addr = starts(sim, &["--sessions-max", "2"]).addr();
        sim.client("all", async move |net| {
            for n in 0..40 {
                let mut stream = net.connect(addr).await?;
                stream.send(Hello::new(4, &format!("gone{n}")).bytes()).await?;
                net.sleep(Duration::from_micros(net.random() % 2000)).await;
                stream.reset();
            }
            net.sleep(60 * SECOND).await;
            // As many as each shard has room for, whichever of them is their home.
            let mut there = Vec::new();
            for n in 0..2 {
                there.push(Hello::new(4, &format!("later{n}")).connects(&net, addr).await?);
            }
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn acknowledgement_of_what_was_not_sent_counts_for_nothing() {
    const MESSAGES: usize = 20;
    const BYTES: usize = 100_000;
    Sim::seeds(10).faults(Faults::harmless()).run(|sim| {
        let addr = starts(sim, &["--session-bytes-max", "4000000"]).addr();
        sim.client("both", async move |net| {
            let hello = Hello::new(4, "reader").kept();
            let (mut reader, _) = hello.connects(&net, addr).await?;
            reader.subscribes(&[("t", 1)]).await?;
            let (mut writer, _) = Hello::new(4, "writer").connects(&net, addr).await?;
            for _ in 0..MESSAGES {
                writer.publishes(2, "t", &"x".repeat(BYTES)).await?;
            }
            // It reads little, and acknowledges all that is to come.
            for id in 1..=MESSAGES as u16 {
                reader.acknowledges(id).await?;
            }
            let mut read = 0;
            while read < 4 * BYTES {
                read += reader.stream.some().await?.len();
            }
            net.sleep(SECOND).await;
            reader.stream.reset();
            let (mut reader, is_present) = hello.connects(&net, addr).await?;
            assert!(is_present);
            net.sleep(SECOND).await;
            let mut left = 0;
            while net.timeout(10 * SECOND, reader.hears()).await.is_ok_and(|heard| heard.is_ok()) {
                left += 1;
            }
            assert!(left >= 5, "{left} of {MESSAGES} messages are left");
            Ok(())
        });
        sim.run_until_done();
    });
}
