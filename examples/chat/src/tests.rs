//! Whole chats by seed, in virtual time.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::time::Duration;

use ringserve::testing::{ClientStream, Faults, Net, Sim, SimServer};

use super::{Args, HELP, MISSED_MAX, server};
use clap::Parser;

const SECOND: Duration = Duration::from_secs(1);

/// In this time each line comes, whatever the network does.
const SOON: Duration = Duration::from_secs(600);

const LINE_BYTES_MAX: usize = 4096;

/// A chat on one to four shards.
fn starts(sim: &Sim) -> SimServer {
    let args = Args::parse_from(["chat", "--listen", "10.0.0.1:7000", "--http", "10.0.0.1:9000"]);
    sim.start_several(server(&args).shards(1 + sim.seed() as usize % 4)).unwrap()
}

async fn next(me: &mut ClientStream) -> io::Result<String> {
    me.line().await?.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

/// Reads up to a line.
async fn awaits(me: &mut ClientStream, wanted: &str) -> io::Result<()> {
    while next(me).await? != wanted {}
    Ok(())
}

async fn asks(me: &mut ClientStream, line: &str, answer: &str) -> io::Result<()> {
    me.send(format!("{line}\n")).await?;
    assert_eq!(next(me).await?, answer, "{line}");
    Ok(())
}

/// Connects, and is called `name` from then on.
async fn enters(net: &Net, addr: SocketAddr, name: &str) -> io::Result<ClientStream> {
    let mut me = net.connect(addr).await?;
    let greeting = next(&mut me).await?;
    assert!(greeting.starts_with("* you are guest-"), "{greeting}");
    assert!(greeting.ends_with(", in lobby; /name X, /join ROOM, /leave, /who, /quit"), "{greeting}");
    me.send(format!("/name {name}\n")).await?;
    awaits(&mut me, &format!("* you are called {name} now")).await?;
    Ok(me)
}

/// Where members wait for each other. One that gives up is waited for no more.
struct Meeting {
    missing: Rc<Cell<usize>>,
    is_there: bool,
}

impl Meeting {
    fn of(count: usize) -> Rc<Cell<usize>> {
        Rc::new(Cell::new(count))
    }

    fn new(missing: &Rc<Cell<usize>>) -> Meeting {
        Meeting { missing: missing.clone(), is_there: false }
    }

    fn comes(&mut self) {
        if !std::mem::replace(&mut self.is_there, true) {
            self.missing.set(self.missing.get() - 1);
        }
    }

    async fn all(&mut self, net: &Net) {
        self.comes();
        while self.missing.get() > 0 {
            net.sleep(Duration::from_millis(10)).await;
        }
    }
}

impl Drop for Meeting {
    fn drop(&mut self) {
        self.comes();
    }
}

/// What a member heard of the others, each of which counts its lines.
struct Heard {
    me: usize,
    lines: BTreeMap<usize, usize>,
    left: BTreeSet<usize>,
}

impl Heard {
    fn take(&mut self, line: &str) {
        if let Some((who, said)) = line.strip_prefix('m').and_then(|line| line.split_once(": line ")) {
            let who: usize = who.parse().expect("a name");
            assert_ne!(who, self.me, "a member hears itself: {line}");
            assert!(!self.left.contains(&who), "{line}, after it left");
            let expected = self.lines.entry(who).or_default();
            assert_eq!(said.parse(), Ok(*expected), "m{} hears {line}", self.me);
            *expected += 1;
        } else if let Some(who) = line.strip_prefix("* m").and_then(|line| line.strip_suffix(" left")) {
            assert!(self.left.insert(who.parse().expect("a name")), "left twice: {line}");
        } else {
            assert!(line.starts_with("* guest-") || line.starts_with("* m"), "{line}");
        }
    }
}

#[test]
fn each_line_reaches_each_other_member_once_in_order() {
    const LINES: usize = 20;
    Sim::seeds(200).faults(Faults::all()).run(|sim| {
        let addr = starts(sim).addr();
        let count = 2 + (sim.random() % 5) as usize;
        let missing = Meeting::of(count);
        let here = Rc::new(RefCell::new(BTreeSet::new()));
        for n in 0..count {
            let (missing, here) = (missing.clone(), here.clone());
            sim.client(format!("m{n}"), async move |net| {
                let mut meeting = Meeting::new(&missing);
                let talks = async {
                    let mut me = enters(&net, addr, &format!("m{n}")).await?;
                    here.borrow_mut().insert(n);
                    meeting.all(&net).await;
                    let mut heard = Heard { me: n, lines: BTreeMap::new(), left: BTreeSet::new() };
                    for line in 0..LINES {
                        me.send(format!("line {line}\n")).await?;
                        while let Ok(line) =
                            net.timeout(Duration::from_millis(net.random() % 4), next(&mut me)).await
                        {
                            heard.take(&line?);
                        }
                    }
                    let said_all = net.now();
                    let is_owed = |heard: &Heard| {
                        let others = here.borrow();
                        let mut others = others.iter().filter(|who| **who != n && !heard.left.contains(who));
                        others.any(|who| heard.lines.get(who).is_none_or(|lines| *lines < LINES))
                    };
                    while is_owed(&heard) {
                        if let Ok(line) = net.timeout(SECOND, next(&mut me)).await {
                            heard.take(&line?);
                        }
                        assert!(net.now() - said_all < SOON, "m{n} heard {:?}", heard.lines);
                    }
                    // Nothing comes twice later, and a member that leaves is told of.
                    net.sleep(60 * SECOND).await;
                    me.send("/quit\n").await?;
                    loop {
                        match next(&mut me).await?.as_str() {
                            "* goodbye" => break,
                            line => heard.take(line),
                        }
                    }
                    assert_eq!(me.closed().await?, b"");
                    io::Result::Ok(())
                };
                let done = talks.await;
                here.borrow_mut().remove(&n);
                Ok(done?)
            });
        }
        sim.run_until_done();
    });
}

/// A member that walks through rooms under names of its own, and what it knows of the others.
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
    Sim::seeds(200).faults(Faults::all()).run(|sim| {
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
    Sim::seeds(100).faults(Faults::harmless()).run(|sim| {
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
    Sim::seeds(100).faults(Faults::harmless()).run(|sim| {
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
            // A member hears none of its own lines, and an empty one is none.
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
fn lines_arrive_as_they_were_said() {
    Sim::seeds(100).faults(Faults::harmless()).run(|sim| {
        let addr = starts(sim).addr();
        let missing = Meeting::of(2);
        let longest = "y".repeat(LINE_BYTES_MAX - 1);
        let (others, said) = (missing.clone(), longest.clone());
        sim.client("ann", async move |net| {
            let mut me = enters(&net, addr, "ann").await?;
            Meeting::new(&others).all(&net).await;
            me.send(b"  two  spaces \n\n \r\nno /who here\n\xff\n").await?;
            me.send(format!("{said}\n")).await?;
            me.send(format!("{said}too long\n")).await?;
            // What is too long ends the connection.
            match me.closed().await {
                Ok(rest) => assert!(!String::from_utf8_lossy(&rest).contains("goodbye")),
                Err(error) => assert_eq!(error.kind(), io::ErrorKind::ConnectionReset),
            }
            Ok(())
        });
        sim.client("bob", async move |net| {
            let mut me = enters(&net, addr, "bob").await?;
            Meeting::new(&missing).all(&net).await;
            let mut line = next(&mut me).await?;
            while line.starts_with("* ") {
                line = next(&mut me).await?;
            }
            assert_eq!(line, "ann:   two  spaces ");
            assert_eq!(next(&mut me).await?, "ann:  ");
            assert_eq!(next(&mut me).await?, "ann: no /who here");
            assert_eq!(next(&mut me).await?, "ann: \u{fffd}");
            assert_eq!(next(&mut me).await?, format!("ann: {longest}"));
            assert_eq!(next(&mut me).await?, "* ann left");
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn who_tells_the_members_of_all_shards() {
    Sim::seeds(100).faults(Faults::harmless()).run(|sim| {
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
                // Members that left in whatever way are told no more.
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
fn slow_reader_is_told_how_many_lines_it_missed() {
    const LINES: usize = 600;
    let missed_some = Rc::new(Cell::new(0));
    let count = missed_some.clone();
    Sim::seeds(12).faults(Faults::harmless()).run(move |sim| {
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
            // There is room again: what was missed is told before this.
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
    Sim::seeds(100).faults(Faults::harmless()).run(|sim| {
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
            // An answer keeps ann, and bob hears nothing of it.
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
    Sim::seeds(5).faults(Faults::harmless()).run(|sim| {
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
            // Where shards stand still for long, the limit for peers that read too slowly is the first to end it, after 10 s.
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

#[test]
fn metrics_are_those_of_all_shards() {
    Sim::seeds(30).faults(Faults::harmless()).run(|sim| {
        let server = starts(sim);
        let (addr, http) = (server.addr(), server.local_addrs()[1]);
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
                // The server hears of the end.
                net.sleep(10 * SECOND).await;
            }
            Meeting::new(&done).comes();
            Ok(())
        });
        sim.run_until_done();
    });
}
