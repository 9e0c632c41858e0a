//! Lines of members, and who receives them.

use super::*;

/// The lines that a member received of the others, each of which counts its lines.
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
    Sim::seeds(50).faults(Faults::all()).run(|sim| {
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
                    // Nothing comes twice later, and it is announced that a member leaves.
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

#[test]
fn lines_arrive_as_they_were_said() {
    Sim::seeds(50).faults(Faults::harmless()).run(|sim| {
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
