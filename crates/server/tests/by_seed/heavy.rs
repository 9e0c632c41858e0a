//! Peers that hold memory of the server, up to its limit, in simulations by seed.

use std::cell::{Cell, RefCell};
use std::convert::Infallible;
use std::rc::Rc;
use std::time::Duration;

use ringserve_server::framing::Lines;
use ringserve_server::limits::ServerLimits;
use ringserve_server::testing::{Faults, Sim};
use ringserve_server::{CloseCx, CloseReason, Cx, Frame, Limits, Server, Service};

const HELD_MAX: usize = 4 << 20;
const LIGHT: usize = 24 << 10;
const HEAVY: usize = 700 << 10;

/// Says each line again; a number gives that many bytes. Notes who was closed for the memory that
/// it held, by the first word of its first line.
#[derive(Clone, Default)]
struct Giver(Rc<RefCell<Vec<String>>>);

impl Service for Giver {
    type Session = RefCell<String>;
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, RefCell<String>>, line: Frame) -> Result<(), Infallible> {
        let text = String::from_utf8_lossy(&line).into_owned();
        let (name, rest) = text.split_once(' ').unwrap_or((&text, ""));
        cx.session().replace(name.to_owned());
        match rest.parse() {
            Ok(bytes) => cx.reply(vec![b'x'; bytes]),
            Err(_) => cx.reply(line),
        }
        Ok(())
    }

    fn close(&self, closed: &CloseCx<'_, RefCell<String>>) {
        if closed.reason() == CloseReason::MemoryLimit {
            self.0.borrow_mut().push(closed.session().borrow().clone());
        }
    }
}

/// Has a number of peers each make the server hold `bytes`, one after the other within `time`:
/// every second one by a reply that it does not read, the others by a line that does not end.
fn hold(sim: &Sim, name: &'static str, peers: usize, bytes: usize, time: Duration) {
    for n in 0..peers {
        sim.background(format!("{name}{n}"), async move |net| {
            net.sleep(time * n as u32 / peers as u32).await;
            let mut me = net.connect("10.0.0.1:7000").await?;
            if n % 2 == 0 {
                me.send(format!("{name} {bytes}\n")).await?;
                net.sleep(Duration::from_secs(3600)).await;
            }
            me.send(format!("{name} begins\n")).await?;
            me.line().await?;
            for _ in 0..bytes / 4096 {
                me.send([b'x'; 4096]).await?;
            }
            net.sleep(Duration::from_secs(3600)).await;
            Ok(())
        });
    }
}

#[test]
fn heaviest_go_at_the_memory_limit_and_no_innocent() {
    Sim::seeds(6).faults(Faults::harmless()).run(|sim| {
        let giver = Giver::default();
        let made = giver.clone();
        let limits = Limits::default().outbox_bytes_max(1 << 20).write_stall_timeout(None).idle_timeout(None);
        let server = Server::bind("10.0.0.1:7000")
            .limits(limits)
            .server_limits(ServerLimits::default().held_bytes_max(HELD_MAX))
            .framing(Lines::default());
        let running = sim.start(server, move |_shard| made.clone()).expect("the server starts");
        // Half of what may be held, in small pieces.
        hold(sim, "light", 60, LIGHT, Duration::from_secs(1));
        sim.run_for(Duration::from_secs(2));
        assert!(giver.0.borrow().is_empty());
        let held = running.stats().shards[0].held_bytes;
        assert!((HELD_MAX / 5..HELD_MAX / 4 * 3).contains(&held), "{held}");
        // More than twice as much as there is room for, of which each keeps its part for longer
        // than an answer takes; and some that want nothing but answers, at times large ones.
        hold(sim, "heavy", 12, HEAVY, Duration::from_secs(6));
        let answers = Rc::new(Cell::new(0));
        for n in 0..6 {
            let answers = answers.clone();
            sim.client(format!("innocent{n}"), async move |net| {
                let mut me = net.connect("10.0.0.1:7000").await?;
                for round in 0..60 {
                    let line = format!("innocent {n}.{round} {}", "y".repeat(net.random() as usize % 2000));
                    me.send(format!("{line}\n")).await?;
                    assert_eq!(me.line().await?, Some(line));
                    if round % 10 == n {
                        me.send("innocent 300000\n").await?;
                        assert_eq!(me.exactly(300_001).await?.len(), 300_001);
                    }
                    answers.set(answers.get() + 1);
                    net.sleep(Duration::from_millis(net.random() % 250)).await;
                }
                Ok(())
            });
        }
        sim.run_until_done();
        assert_eq!(answers.get(), 360);
        let closed = giver.0.borrow();
        assert!(closed.len() >= 6, "{} of 12 heavy ones", closed.len());
        assert!(closed.iter().all(|name| name == "heavy"), "{closed:?}");
        let held = running.stats().shards[0].held_bytes;
        assert!(held <= HELD_MAX, "{held}");
    });
}
