//! Slow readers, members that vanish, and drains.

use super::*;

#[test]
fn slow_reader_is_told_how_many_lines_it_missed() {
    const LINES: usize = 600;
    let missed_some = Rc::new(Cell::new(0));
    let count = missed_some.clone();
    Sim::seeds(6).faults(Faults::harmless()).run(move |sim| {
        let server = starts(sim);
        let addr = server.addr();
        let (entered, said) = (Meeting::of(3), Meeting::of(3));
        let text = "z".repeat(3000);
        let numbered = move |line: &str| -> usize {
            let said = line.strip_prefix("ann: ").unwrap_or_else(|| panic!("{line}"));
            said.split(' ').next().unwrap().parse().unwrap()
        };
        let (here, done) = (entered.clone(), said.clone());
        sim.client("ann", async move |net| {
            let mut me = enters(&net, addr, "ann").await?;
            Meeting::new(&here).all(&net).await;
            for line in 0..LINES {
                me.send(format!("{line} {text}\n")).await?;
                net.sleep(Duration::from_millis(10)).await;
            }
            // There is room again: the number of missed lines comes before this.
            Meeting::new(&done).all(&net).await;
            net.sleep(60 * SECOND).await;
            me.send(format!("{LINES} is the last\n")).await?;
            net.sleep(60 * SECOND).await;
            Ok(())
        });
        // What was missed is not forgotten with a name or a room.
        let command = ["", "/name sloth\n", "/join lobby\n"][sim.seed() as usize % 3];
        for (name, waits, command) in [("bob", Duration::ZERO, ""), ("slow", 9 * SECOND, command)] {
            let (count, entered, said) = (count.clone(), entered.clone(), said.clone());
            sim.client(name, async move |net| {
                let mut me = enters(&net, addr, name).await?;
                Meeting::new(&entered).all(&net).await;
                net.sleep(waits).await;
                me.send(command).await?;
                Meeting::new(&said).comes();
                let (mut expected, mut missed) = (0, 0);
                while expected <= LINES {
                    let line = next(&mut me).await?;
                    if let Some(told) = line.strip_prefix("* you read too slowly and missed ") {
                        let told: usize = told.strip_suffix(" lines").expect("how many").parse()?;
                        assert!(told > 0 && missed == 0, "{line}, after {missed}");
                        missed = told;
                        count.set(count.get() + told);
                    } else if !line.starts_with("* ") {
                        assert_eq!(numbered(&line), expected + missed, "{missed} lines were missed");
                        (expected, missed) = (expected + missed + 1, 0);
                    }
                }
                Ok(())
            });
        }
        sim.run_until_done();
    });
    assert!(missed_some.get() > 0, "no line was missed: the test shows nothing");
}

#[test]
fn drain_says_whole_lines_and_ends_with_fin() {
    Sim::seeds(25).faults(Faults::harmless()).run(|sim| {
        let server = starts(sim);
        let addr = server.addr();
        let count = 2 + (sim.random() % 4) as usize;
        for n in 0..count {
            sim.client(format!("m{n}"), async move |net| {
                let mut me = enters(&net, addr, &format!("m{n}")).await?;
                let mut heard = BTreeMap::<String, usize>::new();
                let mut number = 0;
                loop {
                    number += 1;
                    // The server may have closed already.
                    if me.send(format!("{number}\n")).await.is_err() {
                        return Ok(());
                    }
                    net.sleep(Duration::from_millis(1 + net.random() % 50)).await;
                    while let Ok(line) = net.timeout(Duration::ZERO, me.line()).await {
                        let line = match line {
                            Ok(Some(line)) => line,
                            Ok(None) => return Ok(()),
                            // It closed with lines of this member unread.
                            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(()),
                            Err(error) => panic!("a line was cut: {error}"),
                        };
                        if let Some((who, number)) = line.split_once(": ") {
                            let number: usize = number.parse()?;
                            let last = heard.insert(who.to_owned(), number);
                            assert!(last.is_none_or(|last| last + 1 == number), "{line} after {last:?}");
                        }
                    }
                }
            });
        }
        // One that listens alone sees the end as it should be.
        let entered = Rc::new(Cell::new(false));
        let here = entered.clone();
        sim.client("listener", async move |net| {
            let mut me = enters(&net, addr, "listener").await?;
            here.set(true);
            let mut said_goodbye = false;
            while let Some(line) = me.line().await? {
                said_goodbye |= line == "* the server ends; goodbye";
                assert!(!said_goodbye || !line.ends_with(" left"), "{line}");
            }
            assert!(said_goodbye);
            Ok(())
        });
        assert!(sim.run_until(60 * SECOND, || entered.get()), "the listener enters");
        sim.run_for(SECOND + Duration::from_millis(sim.random() % 1000));
        sim.drain();
        sim.run_until_done();
        assert!(sim.run_until(60 * SECOND, || server.is_done()), "all shards end");
        assert_eq!(server.stats().connections, 0);
    });
}

#[test]
fn room_hears_of_members_that_reset_or_fall_silent() {
    Sim::seeds(50).faults(Faults::harmless()).run(|sim| {
        let addr = starts(sim).addr();
        let entered = Meeting::of(3);
        let here = entered.clone();
        sim.client("ann", async move |net| {
            let mut me = enters(&net, addr, "ann").await?;
            Meeting::new(&here).all(&net).await;
            awaits(&mut me, "* carl left").await?;
            let mut asked = 0;
            // An answer keeps ann, and bob receives nothing of it.
            while let Err(_elapsed) = net.timeout(3600 * SECOND, awaits(&mut me, "* bob left")).await {
                me.send("/who\n").await?;
                asked += 1;
                assert!(asked <= 4, "bob stays");
            }
            assert!(asked >= 3, "bob left after {asked} hours");
            Ok(())
        });
        for name in ["bob", "carl"] {
            let entered = entered.clone();
            sim.client(name, async move |net| {
                let mut me = enters(&net, addr, name).await?;
                Meeting::new(&entered).all(&net).await;
                match name {
                    "carl" => me.reset(),
                    _ => _ = me.closed().await?,
                }
                Ok(())
            });
        }
        sim.run_until_done();
    });
}

#[test]
fn member_that_misses_too_many_lines_is_reset() {
    Sim::seeds(2).faults(Faults::harmless()).run(|sim| {
        let addr = starts(sim).addr();
        let entered = Meeting::of(2);
        let here = entered.clone();
        sim.client("ann", async move |net| {
            let mut me = enters(&net, addr, "ann").await?;
            Meeting::new(&here).all(&net).await;
            let text = "z".repeat(3000);
            let mut said = 0;
            while let Err(_elapsed) = net.timeout(SECOND / 200, awaits(&mut me, "* mute left")).await {
                me.send(format!("{text}\n")).await?;
                said += 1;
                assert!(said < MISSED_MAX + 500, "mute stays");
            }
            // Where shards stand still for long, the limit for peers that read too slowly is the
            // first to end it, after 10 s.
            assert!(said > MISSED_MAX || net.now() > 10 * SECOND, "mute left after {said} lines");
            Ok(())
        });
        sim.client("mute", async move |net| {
            let mut me = enters(&net, addr, "mute").await?;
            Meeting::new(&entered).all(&net).await;
            net.sleep(29 * SECOND).await;
            assert_eq!(me.closed().await.unwrap_err().kind(), io::ErrorKind::ConnectionReset);
            Ok(())
        });
        sim.run_until_done();
    });
}
