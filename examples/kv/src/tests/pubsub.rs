//! Messages from client to client, over all shards.

use std::cell::Cell;
use std::rc::Rc;

use ringserve::testing::Faults;

use super::*;

#[test]
fn subscribers_of_all_shards_hear_each_message_once_in_order() {
    Sim::seeds(25).faults(Faults::harmless()).run(|sim| {
        let addr = starts(sim, &[]).addr();
        let (count, ready) = (1 + sim.random() % 6, Rc::new(Cell::new(0)));
        for n in 0..count {
            let ready = ready.clone();
            sim.client(format!("c{n}"), async move |net| {
                let mut me = Redis::connect(&net, addr).await?;
                if n % 2 == 1 {
                    assert!(me.ask("hello 3").await?.contains("\"proto\" :3"));
                }
                me.check(&[
                    ("subscribe news", "[\"subscribe\" \"news\" :1]"),
                    ("psubscribe n*s", "[\"psubscribe\" \"n*s\" :2]"),
                    ("subscribe news", "[\"subscribe\" \"news\" :2]"),
                ])
                .await?;
                ready.set(ready.get() + 1);
                for message in 0..20 {
                    assert_eq!(me.reply().await?, format!("[\"message\" \"news\" \"{message}\"]"));
                    assert_eq!(me.reply().await?, format!("[\"pmessage\" \"n*s\" \"news\" \"{message}\"]"));
                }
                me.check(&[
                    ("unsubscribe", "[\"unsubscribe\" \"news\" :1]"),
                    ("punsubscribe n*s none", "[\"punsubscribe\" \"n*s\" :0]"),
                ])
                .await?;
                assert_eq!(me.reply().await?, "[\"punsubscribe\" \"none\" :0]");
                me.check(&[("unsubscribe", "[\"unsubscribe\" nil :0]"), ("ping", "+PONG")]).await?;
                Ok(())
            });
        }
        sim.client("speaker", async move |net| {
            let mut me = Redis::connect(&net, addr).await?;
            while ready.get() < count {
                net.sleep(SECOND).await;
            }
            me.check(&[("publish other hello", ":0")]).await?;
            for message in 0..20 {
                assert_eq!(me.ask(&format!("publish news {message}")).await?, format!(":{}", 2 * count));
            }
            net.sleep(60 * SECOND).await;
            me.check(&[("publish news late", ":0")]).await?;
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn subscriber_of_version_2_does_nothing_else() {
    Sim::seeds(20).faults(Faults::harmless()).run(|sim| {
        let addr = starts(sim, &[]).addr();
        sim.client("me", async move |net| {
            let mut me = Redis::connect(&net, addr).await?;
            let refused = "-ERR Can't execute 'get': only (P|S)SUBSCRIBE / (P|S)UNSUBSCRIBE / PING / QUIT / RESET are allowed \
                           in this context";
            me.check(&[
                ("subscribe a", "[\"subscribe\" \"a\" :1]"),
                ("get k", refused),
                ("ping", "[\"pong\" \"\"]"),
                ("ping x", "[\"pong\" \"x\"]"),
                ("reset", "+RESET"),
                ("ping", "+PONG"),
                ("get k", "nil"),
            ])
            .await?;
            assert!(me.ask("hello 3").await?.contains("\"proto\" :3"));
            me.check(&[("subscribe a", "[\"subscribe\" \"a\" :1]"), ("get k", "nil"), ("ping", "+PONG")])
            .await?;
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn request_behind_a_subscription_is_refused_in_its_turn() {
    Sim::seeds(40).faults(Faults::harmless()).run(|sim| {
        let addr = starts(sim, &[]).addr();
        sim.client("me", async move |net| {
            let mut me = Redis::connect(&net, addr).await?;
            // Some of the keys are on other shards.
            let gets: String = (0..8).map(|n| format!("get k{n}\r\n")).collect();
            me.0.send(format!("{gets}subscribe a\r\n{gets}reset\r\n{gets}")).await?;
            for _ in 0..8 {
                assert_eq!(me.reply().await?, "nil");
            }
            assert_eq!(me.reply().await?, "[\"subscribe\" \"a\" :1]");
            for _ in 0..8 {
                let refused = me.reply().await?;
                assert!(refused.starts_with("-ERR Can't execute 'get'"), "{refused}");
            }
            assert_eq!(me.reply().await?, "+RESET");
            for _ in 0..8 {
                assert_eq!(me.reply().await?, "nil");
            }
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn subscriber_that_never_reads_is_cut_off_and_others_hear() {
    Sim::seeds(5).faults(Faults::harmless()).run(|sim| {
        let server = starts(sim, &[]);
        let (addr, ready) = (server.addr(), Rc::new(Cell::new(0)));
        sim.expect_losses();
        for name in ["deaf", "hears"] {
            let ready = ready.clone();
            sim.client(name, async move |net| {
                let mut me = Redis::connect(&net, addr).await?;
                me.check(&[("subscribe a", "[\"subscribe\" \"a\" :1]")]).await?;
                ready.set(ready.get() + 1);
                if name == "deaf" {
                    net.sleep(900 * SECOND).await;
                    return Ok(());
                }
                for _ in 0..200 {
                    assert!(me.reply().await?.len() > 100_000, "a message is whole");
                }
                Ok(())
            });
        }
        sim.client("speaker", async move |net| {
            let mut me = Redis::connect(&net, addr).await?;
            while ready.get() < 2 {
                net.sleep(SECOND).await;
            }
            let message = request(&["publish", "a", &"m".repeat(100_000)]);
            for n in 0..200 {
                me.0.send(message.clone()).await?;
                let heard = me.reply().await?;
                assert!(matches!(&heard[..], ":1" | ":2"), "{heard}");
                assert!(n < 150 || heard == ":1", "20 MB wait for who does not read");
                net.sleep(SECOND).await;
            }
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn names_of_channels_have_a_bound_and_give_their_room_back() {
    Sim::seeds(4).faults(Faults::harmless()).run(|sim| {
        let addr = starts(sim, &[]).addr();
        sim.client("me", async move |net| {
            let mut me = Redis::connect(&net, addr).await?;
            let long = |kind: &str, n: usize| request(&[kind, &format!("{n}{}", "x".repeat(900_000))]);
            for verb in ["subscribe", "unsubscribe", "subscribe"] {
                for n in 0..9 {
                    me.0.send(long(verb, n)).await?;
                    assert!(me.reply().await?.starts_with(&format!("[\"{verb}\" ")), "{verb} {n}");
                }
            }
            me.0.send(long("subscribe", 9)).await?;
            let refused = me.reply().await?;
            assert_eq!(refused, "-ERR too many channels and patterns, or too long ones");
            // Its end is an end of all of them, for each of the next ones.
            drop(me);
            for _ in 0..9 {
                let mut me = Redis::connect(&net, addr).await?;
                for n in 0..8 {
                    me.0.send(long("subscribe", n)).await?;
                    assert!(me.reply().await?.starts_with("[\"subscribe\" "), "{n}");
                }
                me.check(&[("reset", "+RESET")]).await?;
            }
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn patterns_have_a_bound_and_so_has_their_cost_for_a_message() {
    Sim::seeds(4).faults(Faults::harmless()).run(|sim| {
        let addr = starts(sim, &[]).addr();
        sim.client("me", async move |net| {
            let mut me = Redis::connect(&net, addr).await?;
            for verb in ["psubscribe", "keys"] {
                me.0.send(request(&[verb, &"a".repeat((64 << 10) + 1)])).await?;
                assert_eq!(me.reply().await?, "-ERR a pattern has at most 65536 bytes", "{verb}");
            }
            // The longest ones behind a star, until they are too many for a shard.
            let mut refused = 0;
            for n in 0..6 {
                me.0.send(request(&["psubscribe", &format!("*{n}{}*", "?".repeat(65_000))])).await?;
                refused += usize::from(me.reply().await?.starts_with("-ERR too many"));
            }
            assert_eq!(refused, 2, "each costs 1017 steps for a byte, of 4096");
            me.check(&[("reset", "+RESET"), ("publish news x", ":0")]).await?;
            Ok(())
        });
        sim.run_until_done();
    });
}
