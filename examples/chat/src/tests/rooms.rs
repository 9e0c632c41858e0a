//! Rooms, names and commands.

use super::*;

/// A member that walks through rooms under its own names, and what it knows of the others.
struct Walker {
    me: usize,
    room: String,
    /// The name of each other member in the room, and the number of its last line there.
    others: BTreeMap<usize, (String, Option<usize>)>,
}

impl Walker {
    /// Names are `m2v5`: the fifth of member 2.
    fn number(name: &str) -> Option<usize> {
        name.strip_prefix('m')?.split_once('v')?.0.parse().ok()
    }

    fn take(&mut self, line: &str) {
        if let Some(room) = line.strip_prefix("* you are in ").and_then(|line| line.strip_suffix(" now")) {
            self.room = room.to_owned();
            self.others.clear();
            return;
        }
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["*", "you", "are", "called", name, "now"] => assert_eq!(Walker::number(name), Some(self.me)),
            ["*", old, "is", "called", new, "now"] => {
                let Some(who) = Walker::number(new) else { panic!("{line}") };
                assert_ne!(who, self.me, "{line}");
                if let Some((known, _)) = self.others.get(&who) {
                    assert_eq!(known, old, "{line}");
                }
                let last = self.others.get(&who).and_then(|(_, last)| *last);
                self.others.insert(who, (new.to_owned(), last));
            }
            ["*", name, "came"] => {
                if let Some(who) = Walker::number(name) {
                    assert_ne!(who, self.me, "{line}");
                    let before = self.others.insert(who, (name.to_owned(), None));
                    assert!(before.is_none(), "{line}, and is here");
                }
            }
            ["*", name, "left"] => {
                if let Some(who) = Walker::number(name) {
                    assert_ne!(who, self.me, "{line}");
                    let known = self.others.remove(&who);
                    assert!(known.is_none_or(|(known, _)| known == name), "{line}");
                }
            }
            [name, room, number] => {
                let name = name.strip_suffix(':').expect("who says it");
                let (who, number) = (Walker::number(name).expect("a name"), number.parse().unwrap());
                assert_ne!(who, self.me, "{line}");
                assert_eq!(room, self.room, "{line}");
                if let Some((known, last)) = self.others.get(&who) {
                    assert_eq!(known, name, "{line}");
                    assert!(last.is_none_or(|last| last + 1 == number), "{line} after {last:?}");
                }
                self.others.insert(who, (name.to_owned(), Some(number)));
            }
            _ => panic!("{line}"),
        }
    }
}

#[test]
fn rooms_and_names_hold_while_members_walk_about() {
    const ROOMS: [&str; 3] = ["lobby", "kitchen", "attic"];
    Sim::seeds(50).faults(Faults::all()).run(|sim| {
        let addr = starts(sim).addr();
        let count = 2 + (sim.random() % 4) as usize;
        for n in 0..count {
            sim.client(format!("m{n}"), async move |net| {
                let mut me = enters(&net, addr, &format!("m{n}v0")).await?;
                let mut walker = Walker { me: n, room: "lobby".into(), others: BTreeMap::new() };
                let (mut room, mut said) = ("lobby", BTreeMap::<&str, usize>::new());
                for step in 1..40 {
                    let line = match net.random() % 8 {
                        0 => {
                            let others: Vec<_> = ROOMS.iter().filter(|other| **other != room).collect();
                            room = others[net.random() as usize % others.len()];
                            format!("/join {room}\n")
                        }
                        1 => format!("/name m{n}v{step}\n"),
                        _ => {
                            let number = said.entry(room).or_default();
                            *number += 1;
                            format!("{room} {number}\n")
                        }
                    };
                    me.send(line).await?;
                    while let Ok(line) =
                        net.timeout(Duration::from_millis(net.random() % 20), next(&mut me)).await
                    {
                        walker.take(&line?);
                    }
                }
                me.send("/quit\n").await?;
                loop {
                    match next(&mut me).await?.as_str() {
                        "* goodbye" => break,
                        line => walker.take(line),
                    }
                }
                assert_eq!(walker.room, room, "each /join was answered");
                assert_eq!(me.closed().await?, b"");
                Ok(())
            });
        }
        sim.run_until_done();
    });
}

#[test]
fn member_is_told_what_happens_in_its_room_and_nothing_else() {
    Sim::seeds(50).faults(Faults::harmless()).run(|sim| {
        let addr = starts(sim).addr();
        let (entered, left) = (Meeting::of(2), Meeting::of(2));
        let (here, gone) = (entered.clone(), left.clone());
        sim.client("ann", async move |net| {
            let mut me = enters(&net, addr, "ann").await?;
            Meeting::new(&here).all(&net).await;
            let came = next(&mut me).await?;
            let guest =
                came.strip_prefix("* ").and_then(|came| came.strip_suffix(" came")).expect("who came");
            assert!(guest.starts_with("guest-"), "{came}");
            assert_eq!(next(&mut me).await?, format!("* {guest} is called bob now"));
            for line in [
                "bob: hello",
                "* bob left",
                "* bob came",
                "bob: back",
                "* bob is called rob now",
                "* rob left",
            ] {
                assert_eq!(next(&mut me).await?, line);
            }
            Meeting::new(&gone).all(&net).await;
            net.sleep(60 * SECOND).await;
            asks(&mut me, "/who", "* ann is in lobby").await?;
            Ok(())
        });
        sim.client("bob", async move |net| {
            Meeting::new(&entered).all(&net).await;
            let mut me = enters(&net, addr, "bob").await?;
            me.send("hello\n").await?;
            asks(&mut me, "/join kitchen", "* you are in kitchen now").await?;
            me.send("heard in the lobby by mistake\n").await?;
            // People listen for longer than they talk.
            net.sleep(3600 * SECOND).await;
            asks(&mut me, "/join lobby", "* you are in lobby now").await?;
            me.send("back\n").await?;
            asks(&mut me, "/name rob", "* you are called rob now").await?;
            me.finish()?;
            assert_eq!(me.closed().await?, b"");
            Meeting::new(&left).comes();
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn commands_do_what_they_say() {
    Sim::seeds(50).faults(Faults::harmless()).run(|sim| {
        let addr = starts(sim).addr();
        sim.client("ann", async move |net| {
            let mut me = enters(&net, addr, "ann").await?;
            let help = format!("* {HELP}; names are short and have no spaces");
            let (longest, longer) = ("x".repeat(32), "x".repeat(33));
            for bad in [
                "/name",
                "/name ",
                "/name a b",
                "/name a:b",
                "/join",
                "/join a/b",
                "/who me",
                "/quit now",
                "/",
                "/nam x",
                "/NAME x",
            ] {
                asks(&mut me, bad, &help).await?;
            }
            for command in ["name", "join"] {
                asks(&mut me, &format!("/{command} {longer}"), &help).await?;
                // The limit is one of bytes.
                asks(&mut me, &format!("/{command} {}", "é".repeat(17)), &help).await?;
            }
            asks(&mut me, "/who", "* ann is in lobby").await?;
            asks(&mut me, &format!("/name {longest}"), &format!("* you are called {longest} now")).await?;
            asks(&mut me, &format!("/join {longest}"), &format!("* you are in {longest} now")).await?;
            asks(&mut me, "/who", &format!("* {longest} is in {longest}")).await?;
            asks(&mut me, "/name Zoë_1-2  \r", "* you are called Zoë_1-2 now").await?;
            asks(&mut me, "/leave", "* you are in lobby now").await?;
            // A member receives no line that it sent, and an empty one is none.
            asks(&mut me, "hello\n\n\r\n/who ", "* Zoë_1-2 is in lobby").await?;
            asks(&mut me, "/join lobby", "* you are in lobby now").await?;
            asks(&mut me, "/who", "* Zoë_1-2 is in lobby").await?;
            me.send("/quit\n/who\n").await?;
            assert_eq!(next(&mut me).await?, "* goodbye");
            // What comes behind that is not obeyed. It may not have been read either.
            if let Ok(rest) = me.closed().await {
                assert_eq!(rest, b"");
            }
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn who_tells_the_members_of_all_shards() {
    Sim::seeds(50).faults(Faults::harmless()).run(|sim| {
        let addr = starts(sim).addr();
        let count = 3 + (sim.random() % 10) as usize;
        let (entered, asked) = (Meeting::of(count), Meeting::of(count));
        for n in 0..count {
            let (entered, asked) = (entered.clone(), asked.clone());
            sim.client(format!("m{n}"), async move |net| {
                let room = |n: usize| if n.is_multiple_of(3) { "attic" } else { "lobby" };
                let mut me = enters(&net, addr, &format!("m{n}")).await?;
                if n.is_multiple_of(3) {
                    me.send("/join attic\n").await?;
                    awaits(&mut me, "* you are in attic now").await?;
                }
                Meeting::new(&entered).all(&net).await;
                me.send("/who\n").await?;
                let mut expected: BTreeSet<String> = (0..count)
                    .filter(|other| room(*other) == room(n))
                    .map(|other| format!("* m{other} is in {}", room(n)))
                    .collect();
                while !expected.is_empty() {
                    let line = next(&mut me).await?;
                    assert!(expected.remove(&line) || !line.contains(" is in "), "{line}");
                }
                Meeting::new(&asked).all(&net).await;
                // Members that left in whatever way are listed no longer.
                if n > 0 {
                    match n % 4 {
                        0 => me.reset(),
                        1 => drop(me),
                        2 => {
                            me.finish()?;
                            me.closed().await?;
                        }
                        _ => {
                            me.send("/quit\n").await?;
                            awaits(&mut me, "* goodbye").await?;
                            assert_eq!(me.closed().await?, b"");
                        }
                    }
                    return Ok(());
                }
                let mut left = BTreeSet::new();
                while left.len() < (count - 1) / 3 {
                    let line = next(&mut me).await?;
                    assert!(line.ends_with(" left") && left.insert(line.clone()), "{line}");
                }
                net.sleep(SECOND).await;
                me.send("/who\n").await?;
                assert_eq!(next(&mut me).await?, "* m0 is in attic");
                me.send("/join lobby\n/who\n/quit\n").await?;
                assert_eq!(next(&mut me).await?, "* you are in lobby now");
                awaits(&mut me, "* goodbye").await?;
                let rest = me.closed().await?;
                assert!(rest.is_empty() || rest == b"* m0 is in lobby\n", "{rest:?}");
                Ok(())
            });
        }
        sim.run_until_done();
    });
}

#[test]
fn metrics_are_those_of_all_shards() {
    Sim::seeds(15).faults(Faults::harmless()).run(|sim| {
        let server = starts(sim);
        let (addr, http) = (server.addr(), server.addr_of("http"));
        let entered = Meeting::of(5);
        let done = Meeting::of(5);
        for (n, room) in ["lobby", "lobby", "attic", "attic"].into_iter().enumerate() {
            let (entered, done) = (entered.clone(), done.clone());
            sim.client(format!("m{n}"), async move |net| {
                let mut me = enters(&net, addr, &format!("m{n}")).await?;
                me.send(format!("/join {room}\n")).await?;
                awaits(&mut me, &format!("* you are in {room} now")).await?;
                Meeting::new(&entered).all(&net).await;
                Meeting::new(&done).all(&net).await;
                Ok(())
            });
        }
        sim.client("prometheus", async move |net| {
            Meeting::new(&entered).all(&net).await;
            for expected in ["chat_rooms 2\n", "chat_members 4\n", "chat_lines_missed_total 0\n"] {
                let mut me = net.connect(http).await?;
                me.send("GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await?;
                let page = String::from_utf8(me.closed().await?)?;
                assert!(page.starts_with("HTTP/1.1 200 "), "{page}");
                assert!(page.contains(expected), "{expected} is not in {page}");
                drop(me);
                // The server learns of the end.
                net.sleep(10 * SECOND).await;
            }
            Meeting::new(&done).comes();
            Ok(())
        });
        sim.run_until_done();
    });
}
