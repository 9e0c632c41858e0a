//! Replies: their order, their length, and the end of a connection.

use std::cell::Cell;
use std::rc::Rc;

use ringserve::CloseReason;
use ringserve::testing::Faults;

use super::*;

#[test]
fn long_values_of_all_shards_reach_a_slow_reader_whole() {
    Sim::seeds(30).faults(Faults::harmless()).run(|sim| {
        let server = starts(sim, &[]);
        let addr = server.addr();
        let value = |key: usize| char::from(b'a' + key as u8).to_string().repeat(60_000 + 7 * key);
        sim.client("me", async move |net| {
            let mut me = Redis::connect(&net, addr).await?;
            for key in 0..10 {
                me.0.send(request(&["set", &format!("k{key}"), &value(key)])).await?;
                assert_eq!(me.reply().await?, "+OK");
            }
            let order: Vec<usize> = (0..40).map(|_| net.random() as usize % 11).collect();
            let names: Vec<String> = order.iter().map(|key| format!("k{key}")).collect();
            me.0.send(format!("mget {}\r\nstrlen k3\r\nget k4\r\nping\r\n", names.join(" "))).await?;
            // Others are served meanwhile.
            net.sleep(Duration::from_millis(net.random() % 10_000)).await;
            let mut other = Redis::connect(&net, addr).await?;
            other.check(&[("exists k0 k1 k2 k9 k10", ":4"), ("echo here", "\"here\"")]).await?;
            assert_eq!(me.0.line().await?.as_deref(), Some("*40"));
            for key in order {
                let expected = if key == 10 { "nil".to_owned() } else { format!("\"{}\"", value(key)) };
                assert!(me.reply().await? == expected, "the value of k{key}");
                net.sleep(Duration::from_millis(net.random() % 100)).await;
            }
            assert_eq!(me.reply().await?, format!(":{}", 60_021));
            assert!(me.reply().await? == format!("\"{}\"", value(4)));
            assert_eq!(me.reply().await?, "+PONG");
            Ok(())
        });
        sim.run_until_done();
    });
}

/// Of any shard: it is copied where it lies, and again where the client is.
#[test]
fn large_values_are_copied_as_there_is_memory_for_them() {
    const HELD_BYTES_MAX: usize = 16 << 20;
    const VALUE_BYTES: usize = 1_000_000;
    Sim::seeds(10).faults(Faults::harmless()).run(|sim| {
        let limits = Limits::default().frame_bytes_max(2 << 20).outbox_bytes_max(8 << 20);
        let limits = limits.calls_in_flight_max(2).handler_timeout(None).idle_timeout(None);
        let of_server = ServerLimits::default().held_bytes_max(HELD_BYTES_MAX);
        let shards = 2 + sim.seed() as usize % 3;
        let args = Args::parse_from(["kv"]);
        let server =
            args.server(ADDR.parse().unwrap()).limits(limits).server_limits(of_server).shards(shards);
        let keyer = keyer_of(sim.random(), sim.random());
        let server =
            sim.start(server, service(keyer, 2 << 20, REQUESTS_MAX, |age| UNIX_START + age)).unwrap();
        let (addr, is_there, is_over) = (server.addr(), Rc::new(Cell::new(false)), Rc::new(Cell::new(false)));
        sim.expect_losses();
        for n in 0..25 * shards {
            let (is_there, is_over) = (is_there.clone(), is_over.clone());
            sim.client(format!("deaf{n}"), async move |net| {
                let mut me = Redis::connect(&net, addr).await?;
                while !is_there.get() {
                    net.sleep(SECOND / 100).await;
                }
                let asks = ["get k0", "mget k1 k2 k3", "ping\r\ngetrange k3 0 -1", "set k2 v get"][n % 4];
                me.0.send(format!("{asks}\r\n")).await?;
                while !is_over.get() {
                    net.sleep(SECOND).await;
                }
                Ok(())
            });
        }
        sim.client("me", async move |net| {
            let mut me = Redis::connect(&net, addr).await?;
            for key in 0..4 {
                me.0.send(request(&["set", &format!("k{key}"), &"v".repeat(VALUE_BYTES)])).await?;
                assert_eq!(me.reply().await?, "+OK");
            }
            is_there.set(true);
            // No client is closed before it is found which read nothing: no more is copied than
            // there is memory for.
            for _ in 0..15 {
                net.sleep(SECOND / 10).await;
                assert_eq!(server.stats().counters.closed_for(CloseReason::MemoryLimit), 0);
                assert_eq!(me.ask("ping").await?, "+PONG");
            }
            let held: usize = server.stats().shards.iter().map(|shard| shard.held_bytes).sum();
            assert!(
                held > shards * HELD_BYTES_MAX / 4,
                "{held} bytes held of {shards} times {HELD_BYTES_MAX}"
            );
            // A client that reads has its answer, or the error that there is no memory.
            net.sleep(10 * SECOND).await;
            me.0.send("mget k0 k1 k3\r\n").await?;
            assert_eq!(me.0.line().await?.as_deref(), Some("*3"));
            let value = format!("\"{}\"", "v".repeat(VALUE_BYTES));
            for _ in 0..3 {
                let reply = me.reply().await?;
                assert!(reply == value || reply == "-TRYAGAIN memory is used up", "{reply:.60}");
            }
            is_over.set(true);
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn client_that_never_reads_is_held_back_and_ended() {
    Sim::seeds(20).faults(Faults::harmless()).run(|sim| {
        let server = starts(sim, &[]);
        let addr = server.addr();
        sim.expect_losses();
        sim.client("deaf", async move |net| {
            let mut me = Redis::connect(&net, addr).await?;
            me.0.send(request(&["set", "k", &"v".repeat(50_000)])).await?;
            assert_eq!(me.reply().await?, "+OK");
            // 200 MB of replies, if all were made.
            let asks = async {
                for _ in 0..4000 {
                    me.0.send("get k\r\n").await?;
                }
                io::Result::Ok(())
            };
            // Held back: the stream takes no more. It ends after a while without a byte taken.
            let _ = net.timeout(SECOND, asks).await;
            net.sleep(600 * SECOND).await;
            match me.0.closed().await {
                Ok(bytes) => assert!(bytes.len() < 8 << 20, "{} bytes were kept", bytes.len()),
                Err(error) => assert_eq!(error.kind(), io::ErrorKind::ConnectionReset),
            }
            Ok(())
        });
        sim.client("other", async move |net| {
            let mut me = Redis::connect(&net, addr).await?;
            for _ in 0..20 {
                net.sleep(60 * SECOND).await;
                me.check(&[("ping", "+PONG")]).await?;
            }
            Ok(())
        });
        sim.run_until_done();
        assert!(sim.run_until(60 * SECOND, || server.stats().connections == 0), "the connections are gone");
    });
}

#[test]
fn drain_answers_what_arrived_and_ends_with_fin() {
    Sim::seeds(40).faults(Faults::harmless()).run(|sim| {
        let server = starts(sim, &[]);
        let addr = server.addr();
        for n in 0..1 + sim.random() % 5 {
            sim.client(format!("c{n}"), async move |net| {
                let mut me = Redis::connect(&net, addr).await?;
                let mut expected = 0;
                loop {
                    let count = 1 + net.random() % 4;
                    let names: Vec<String> = (0..6).map(|key| format!("k{n}:{key}")).collect();
                    let asks = format!("incr c{n}\r\nmget {}\r\n", names.join(" "));
                    if me.0.send(asks.repeat(count as usize)).await.is_err() {
                        return Ok(());
                    }
                    for _ in 0..count {
                        for place in 0..2 {
                            let reply = match me.reply().await {
                                // Between two replies, since each is whole.
                                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                                    assert_eq!(me.0.closed().await?, b"");
                                    return Ok(());
                                }
                                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(()),
                                reply => reply?,
                            };
                            // The shard of a key may have ended before.
                            if reply.contains("-ERR shard ") {
                                expected += u64::from(place == 0);
                                continue;
                            }
                            if place == 1 {
                                assert_eq!(reply, "[nil nil nil nil nil nil]");
                                continue;
                            }
                            expected += 1;
                            assert_eq!(reply, format!(":{expected}"));
                        }
                    }
                    net.sleep(Duration::from_millis(net.random() % 20)).await;
                }
            });
        }
        sim.client("idle", async move |net| {
            let mut me = Redis::connect(&net, addr).await?;
            me.check(&[("ping", "+PONG")]).await?;
            assert_eq!(me.0.closed().await?, b"");
            Ok(())
        });
        sim.run_for(SECOND + Duration::from_millis(sim.random() % 1000));
        sim.drain();
        sim.run_until_done();
        assert!(sim.run_until(60 * SECOND, || server.is_done()), "all shards end");
    });
}
