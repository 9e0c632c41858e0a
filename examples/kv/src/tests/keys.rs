//! All keys together, over all shards.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use ringserve::testing::Faults;

use super::*;

/// The words of a reply that is an array of strings.
fn strings(reply: &str) -> BTreeSet<String> {
    let inner = reply.strip_prefix('[').and_then(|reply| reply.strip_suffix(']')).expect("an array");
    let words: Vec<String> = inner.split_whitespace().map(|word| word.trim_matches('"').to_owned()).collect();
    let set: BTreeSet<String> = words.iter().cloned().collect();
    assert_eq!(set.len(), words.len(), "twice: {reply}");
    set
}

/// Everything that SCAN tells, in whatever order, perhaps twice.
async fn scan(me: &mut Redis, options: &str, mut between: impl AsyncFnMut()) -> io::Result<BTreeSet<String>> {
    let (mut cursor, mut seen) = ("0".to_owned(), BTreeSet::new());
    for round in 0.. {
        let reply = me.ask(&format!("scan {cursor} {options}")).await?;
        let (next, keys) = reply[1..reply.len() - 1].split_once(' ').expect("a cursor and keys");
        cursor = next.trim_matches('"').to_owned();
        seen.extend(strings(keys));
        if cursor == "0" {
            break;
        }
        assert!(round < 1000, "the scan does not end");
        between().await;
    }
    Ok(seen)
}

#[test]
fn keys_scan_and_dbsize_tell_all_keys_of_all_shards() {
    Sim::seeds(40).faults(Faults::harmless()).run(|sim| {
        let addr = starts(sim, &[]).addr();
        let count = sim.random() % 80;
        sim.client("me", async move |net| {
            let mut me = Redis::connect(&net, addr).await?;
            let (mut stay, mut end) = (BTreeSet::new(), BTreeSet::new());
            for n in 0..count {
                let key = format!("{}:{n}", ["one", "two"][n as usize % 2]);
                if net.random() % 3 == 0 {
                    me.check(&[(&format!("set {key} v ex 7200"), "+OK")]).await?;
                    end.insert(key);
                } else {
                    me.check(&[(&format!("set {key} v"), "+OK")]).await?;
                    stay.insert(key);
                }
            }
            let all: BTreeSet<String> = stay.union(&end).cloned().collect();
            let of_two = |keys: &BTreeSet<String>| -> BTreeSet<String> {
                keys.iter().filter(|key| key.starts_with("two")).cloned().collect()
            };
            let size = net.random() % 20 + 1;
            assert_eq!(me.ask("dbsize").await?, format!(":{count}"));
            assert_eq!(strings(&me.ask("keys *").await?), all);
            assert_eq!(strings(&me.ask("keys t?[a-o]:*").await?), of_two(&all));
            assert_eq!(scan(&mut me, &format!("count {size}"), async || ()).await?, all);
            assert_eq!(scan(&mut me, "match two:* type string", async || ()).await?, of_two(&all));
            assert_eq!(scan(&mut me, "type list", async || ()).await?, BTreeSet::new());
            // An hour before their end they are there, and behind it they are not.
            net.sleep(3600 * SECOND).await;
            assert_eq!(strings(&me.ask("keys *").await?), all);
            net.sleep(3600 * SECOND).await;
            assert_eq!(strings(&me.ask("keys *").await?), stay);
            assert_eq!(scan(&mut me, "", async || ()).await?, stay);
            for key in &end {
                me.check(&[(&format!("exists {key}"), ":0"), (&format!("ttl {key}"), ":-2")]).await?;
            }
            assert_eq!(me.ask("dbsize").await?, format!(":{}", stay.len()));
            // What stays during a scan is seen, whatever else comes and goes.
            let mut other = Redis::connect(&net, addr).await?;
            let kept: BTreeSet<String> = stay.iter().filter(|key| key.starts_with("one")).cloned().collect();
            let mut going = stay.difference(&kept).cloned().collect::<Vec<_>>();
            let mut number = 0;
            let options = format!("count {size}");
            let seen = scan(&mut me, &options, async || {
                number += 1;
                other.ask(&format!("set new:{number} v")).await.unwrap();
                if let Some(key) = going.pop() {
                    other.check(&[(&format!("del {key}"), ":1")]).await.unwrap();
                }
            });
            let seen = seen.await?;
            assert!(seen.is_superset(&kept), "{:?} were not seen", kept.difference(&seen));
            let flush = ["flushall", "flushdb async", "FLUSHALL SYNC"][net.random() as usize % 3];
            me.check(&[(flush, "+OK"), ("dbsize", ":0"), ("keys *", "[]"), ("get one:0", "nil")]).await?;
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn answers_of_keys_that_nobody_reads_count_as_held() {
    const HELD_BYTES_MAX: usize = 24 << 20;
    Sim::seeds(4).faults(Faults::harmless()).run(|sim| {
        let args = Args::parse_from(["kv"]);
        let limits = Limits::default().frame_bytes_max(1 << 20).outbox_bytes_max(2 << 20);
        let limits = limits.calls_in_flight_max(2).handler_timeout(None).idle_timeout(None);
        let of_server = ServerLimits::default().held_bytes_max(HELD_BYTES_MAX);
        let shards = 1 + sim.seed() as usize % 4;
        let server =
            args.server(ADDR.parse().unwrap()).limits(limits).server_limits(of_server).shards(shards);
        let keyer = keyer_of(sim.random(), sim.random());
        let server =
            sim.start(server, service(keyer, 1 << 20, REQUESTS_MAX, |age| UNIX_START + age)).unwrap();
        let addr = server.addr();
        let (answers, asked) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(false)));
        sim.expect_losses();
        for n in 0..6 {
            let (answers, asked) = (answers.clone(), asked.clone());
            sim.client(format!("deaf{n}"), async move |net| {
                while !asked.get() {
                    net.sleep(SECOND).await;
                }
                let mut me = Redis::connect(&net, addr).await?;
                me.0.send("keys *\r\n").await?;
                net.sleep(15 * SECOND).await;
                // Before the limits for peers that take nothing end it. A reply without its end was
                // cut off, and is not held.
                match me.reply().await {
                    Ok(reply) if reply.starts_with('[') => answers.set(answers.get() + 1),
                    Ok(reply) => assert_eq!(reply, "-TRYAGAIN memory is used up"),
                    Err(_) => {}
                }
                Ok(())
            });
        }
        sim.client("me", async move |net| {
            let mut me = Redis::connect(&net, addr).await?;
            for n in 0..18 {
                me.0.send(request(&["set", &format!("{n}{}", "k".repeat(900_000)), "v"])).await?;
                assert_eq!(me.reply().await?, "+OK");
            }
            asked.set(true);
            for _ in 0..60 {
                net.sleep(SECOND).await;
                me.check(&[("ping", "+PONG"), ("get none", "nil"), ("dbsize", ":18")]).await?;
            }
            Ok(())
        });
        sim.run_until_done();
        assert!(answers.get() <= shards, "{} answers of 16 MB on {shards} shards", answers.get());
    });
}

#[test]
fn keys_that_end_give_their_memory_back_as_others_come() {
    Sim::seeds(10).faults(Faults::harmless()).run(|sim| {
        let addr = starts(sim, &[]).addr();
        sim.client("me", async move |net| {
            let mut me = Redis::connect(&net, addr).await?;
            for round in 0..30 {
                let sets: Vec<String> = (0..50).map(|n| format!("set k:{round}:{n} v ex 100\r\n")).collect();
                me.0.send(sets.concat()).await?;
                for _ in sets {
                    assert_eq!(me.reply().await?, "+OK");
                }
                net.sleep(60 * SECOND).await;
            }
            let size: usize = me.ask("dbsize").await?[1..].parse()?;
            assert!((50..400).contains(&size), "{size} keys of 1500, of which 50 to 100 live");
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn ends_are_told_by_a_clock_that_is_cut_to_milliseconds_once() {
    Sim::seeds(30).faults(Faults::harmless()).run(|sim| {
        let addr = starts(sim, &[]).addr();
        sim.client("me", async move |net| {
            let mut me = Redis::connect(&net, addr).await?;
            let end = UNIX_START.as_millis() + 3_600_000;
            me.check(&[(&format!("set k v pxat {end}"), "+OK")]).await?;
            for _ in 0..20 {
                net.sleep(Duration::from_micros(net.random() % 10_000)).await;
                let sent = (UNIX_START + net.now()).as_millis();
                let left: u128 = me.ask("pttl k").await?[1..].parse()?;
                let told = sent..=(UNIX_START + net.now()).as_millis();
                assert!(told.contains(&(end - left)), "{} of {told:?}", end - left);
            }
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn wall_clock_that_is_set_moves_no_key_that_is_there() {
    Sim::seeds(30).faults(Faults::harmless()).run(|sim| {
        let set_by = Arc::new(AtomicU64::new(0));
        let (keyer, hours) = (keyer_of(sim.random(), sim.random()), set_by.clone());
        let wall = move |age| UNIX_START + age + 3600 * SECOND * hours.load(Relaxed) as u32;
        let server =
            Args::parse_from(["kv"]).server(ADDR.parse().unwrap()).shards(1 + sim.seed() as usize % 4);
        let addr = sim.start(server, service(keyer, 1 << 20, REQUESTS_MAX, wall)).unwrap().addr();
        sim.client("me", async move |net| {
            let mut me = Redis::connect(&net, addr).await?;
            for hours in 0..3 {
                set_by.store(hours, Relaxed);
                let now = UNIX_START.as_secs() + 3600 * hours + net.now().as_secs();
                let told = me.ask("time").await?;
                let seconds: u64 = told[1..].split('"').nth(1).expect("seconds").parse()?;
                assert!((now..=now + 2).contains(&seconds), "{told} at {now}");
                me.check(&[
                    (&format!("set span:{hours} v ex 5000"), "+OK"),
                    (&format!("set point:{hours} v exat {}", now + 5000), "+OK"),
                    (&format!("set over:{hours} v exat {}", now - 1), "+OK"),
                    (&format!("exists over:{hours}"), ":0"),
                ])
                .await?;
            }
            for (name, hours) in
                [("span", 0), ("point", 0), ("span", 1), ("point", 1), ("span", 2), ("point", 2)]
            {
                let left: u64 = me.ask(&format!("ttl {name}:{hours}")).await?[1..].parse()?;
                assert!((4990..=5001).contains(&left), "{name}:{hours} has {left} s");
            }
            net.sleep(5010 * SECOND).await;
            me.check(&[("dbsize", ":0")]).await?;
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn increments_of_all_connections_count_once() {
    Sim::seeds(40).faults(Faults::all()).run(|sim| {
        let addr = starts(sim, &[]).addr();
        let (sent, answered) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(0)));
        for n in 0..2 + sim.random() % 5 {
            let (sent, answered) = (sent.clone(), answered.clone());
            sim.client(format!("c{n}"), async move |net| {
                let mut me = Redis::connect(&net, addr).await?;
                for _ in 0..10 {
                    let count = 1 + net.random() % 5;
                    sent.set(sent.get() + count);
                    let (mut last, mut others) = (0, 0);
                    me.0.send("incr shared\r\nincr other\r\n".repeat(count as usize)).await?;
                    for _ in 0..count {
                        for last in [&mut last, &mut others] {
                            let reply = me.reply().await?;
                            let value: u64 = reply.strip_prefix(':').expect("a number").parse()?;
                            assert!(value > *last, "{value} after {last}");
                            *last = value;
                        }
                        answered.set(answered.get() + 1);
                    }
                    assert!(last <= sent.get(), "{last} of {} sent", sent.get());
                }
                Ok(())
            });
        }
        sim.run_until_done();
        sim.client("last", async move |net| {
            // What was sent is worked on by now.
            net.sleep(60 * SECOND).await;
            let mut me = Redis::connect(&net, addr).await?;
            for key in ["shared", "other"] {
                let value: u64 = me.ask(&format!("get {key}")).await?.trim_matches('"').parse().unwrap_or(0);
                let range = answered.get()..=sent.get();
                assert!(range.contains(&value), "{value} counts of {range:?}");
            }
            Ok(())
        });
        sim.run_until_done();
    });
}
