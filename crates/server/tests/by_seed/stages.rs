//! Stages of load that follow what a server is asked for, in simulations by seed.

use std::cell::Cell;
use std::convert::Infallible;
use std::rc::Rc;
use std::time::Duration;

use ringserve_server::admission::{Admission, RefusedBy};
use ringserve_server::framing::Lines;
use ringserve_server::limits::ServerLimits;
use ringserve_server::overload::{Load, Shed};
use ringserve_server::testing::{Sim, SimServer, compute};
use ringserve_server::{Cx, Frame, Limits, Server, Service};

use super::Echo;

const ADDR: &str = "10.0.0.1:7000";

/// The time that a call takes of its shard.
const CALL: Duration = Duration::from_micros(200);

/// The time that the busy word takes.
const WORD: Duration = Duration::from_micros(4);

/// The mean time for which clients wait that receive it: up to half as long more or less, as
/// clients should, so that they do not come again all at once.
const BACK_OFF: Duration = Duration::from_millis(100);

#[derive(Clone, Default)]
struct Computes {
    served: Rc<Cell<u64>>,
    shed: Rc<Cell<u64>>,
}

impl Service for Computes {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, line: Frame) -> Result<(), Infallible> {
        compute(CALL);
        self.served.set(self.served.get() + 1);
        cx.reply(line);
        Ok(())
    }

    fn shed(&self, cx: &Cx<'_, ()>, _line: &Frame, _load: Load) -> Shed {
        compute(WORD);
        self.shed.set(self.shed.get() + 1);
        cx.reply("busy");
        Shed::Answered
    }
}

/// Lets time pass, and notes when the load changes.
fn watch(sim: &Sim, running: &SimServer, time: Duration) -> Vec<(Duration, Load)> {
    let (until, mut load, mut changes) = (sim.now() + time, running.load(), Vec::new());
    while sim.now() < until {
        sim.run_for(Duration::from_millis(5));
        if running.load() != load {
            load = running.load();
            changes.push((sim.now(), load));
        }
    }
    changes
}

/// Clients that each ask for ten calls at a time until then, and wait for `pause` before they ask
/// again, or longer where they hear that the server is busy.
fn storm(sim: &Sim, clients: u32, pause: Duration, until: Duration) {
    for n in 0..clients {
        sim.client(format!("storm{n}"), async move |net| {
            let mut me = net.connect(ADDR).await?;
            let mut times = n;
            while net.now() < until {
                times += 1;
                me.send("work\n".repeat(10)).await?;
                let mut pause = pause;
                for _ in 0..10 {
                    let line = me.line().await?.expect("an answer");
                    assert!(line == "work" || line == "busy");
                    if line == "busy" {
                        pause = BACK_OFF / 2 + BACK_OFF * (times * 37 % 100) / 100;
                    }
                }
                net.sleep(pause).await;
            }
            Ok(())
        });
    }
}

#[test]
fn storm_is_shed_without_a_swing_and_leaves_no_trace() {
    Sim::seeds(6).run(|sim| {
        let computes = Computes::default();
        let made = computes.clone();
        let server = Server::bind(ADDR).framing(Lines::default());
        let running = sim.start(server, move |_shard| made.clone()).expect("the server starts");
        running.follow_load();
        // A twentieth of what it can do.
        let (calm, storms) = (20 * 10 * CALL, 10 * CALL);
        storm(sim, 1, calm, Duration::from_secs(2));
        assert_eq!(watch(sim, &running, Duration::from_secs(2)), [], "one client is no load");
        // Four times what it can do, by clients that back off.
        storm(sim, 200, storms, sim.now() + Duration::from_secs(7));
        let begun = sim.now();
        let changes = watch(sim, &running, Duration::from_secs(3));
        let stages: Vec<Load> = changes.iter().map(|(_, load)| *load).collect();
        assert_eq!(stages, [Load::Busy, Load::Shedding], "{changes:?}");
        assert!(changes[1].0 - begun <= Duration::from_millis(1000), "{changes:?}");
        let (served, shed) = (computes.served.get(), computes.shed.get());
        assert_eq!(watch(sim, &running, Duration::from_secs(3)), [], "no swing while the storm lasts");
        let (served, shed) = (computes.served.get() - served, computes.shed.get() - shed);
        assert!(served >= 15_000 * 6 / 10 && shed > 0, "{served} served and {shed} shed in three seconds");
        // The last of them are answered, and each stage is left within two seconds and some.
        sim.run_until_done();
        let changes = watch(sim, &running, Duration::from_secs(7));
        assert_eq!(running.load(), Load::Calm, "{changes:?}");
        assert!(changes.iter().all(|(_, load)| *load < Load::Shedding), "{changes:?}");
        let shed = computes.shed.get();
        storm(sim, 1, calm, sim.now() + Duration::from_secs(1));
        sim.run_until_done();
        assert_eq!(computes.shed.get(), shed);
    });
}

#[test]
fn full_table_refuses_newcomers_until_there_is_room() {
    Sim::seeds(15).run(|sim| {
        const TABLE: usize = 200;
        let limits = ServerLimits::default().connections_max(TABLE);
        let admission = Admission::default().shed_reply("busy\r\n");
        let server = Server::bind(ADDR).server_limits(limits).admission(admission).framing(Lines::default());
        let running = sim.start(server, |_shard| Echo).expect("the server starts");
        running.follow_load();
        let (leaves, served) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(0)));
        for n in 0..TABLE - 4 {
            let (leaves, served) = (leaves.clone(), served.clone());
            sim.client(format!("old{n}"), async move |net| {
                let mut me = net.connect(ADDR).await?;
                me.send("hello\n").await?;
                assert_eq!(me.line().await?.as_deref(), Some("hello"));
                served.set(served.get() + 1);
                while leaves.get() <= n {
                    net.sleep(Duration::from_millis(10)).await;
                }
                Ok(())
            });
        }
        watch(sim, &running, Duration::from_millis(500));
        assert_eq!((served.get(), running.load()), (TABLE - 4, Load::Refusing));
        let ask = |name: &str| {
            let heard = Rc::new(Cell::new(None));
            let says = heard.clone();
            sim.client(name, async move |net| {
                let mut me = net.connect(ADDR).await?;
                me.send("hello\n").await?;
                says.set(me.line().await?);
                Ok(())
            });
            heard
        };
        let refused = ask("refused");
        watch(sim, &running, Duration::from_millis(500));
        assert_eq!(refused.take().as_deref().map(str::trim_end), Some("busy"));
        // A tenth of them leaves: below what keeps new connections away, and not below what keeps
        // the stage.
        leaves.set(TABLE / 10);
        let changes = watch(sim, &running, Duration::from_secs(5));
        assert_eq!(changes, []);
        let let_in = ask("let in");
        watch(sim, &running, Duration::from_millis(500));
        assert_eq!(let_in.take().as_deref(), Some("hello"));
        assert_eq!(running.stats().counters.refused_by(RefusedBy::Load), 1);
        // All leave.
        leaves.set(TABLE);
        let changes = watch(sim, &running, Duration::from_secs(8));
        assert_eq!(running.load(), Load::Calm, "{changes:?}");
        assert!(changes.is_sorted_by(|before, after| before.1 > after.1), "{changes:?}");
        sim.run_until_done();
    });
}

#[test]
fn pause_of_accepting_is_full_for_as_long_as_it_lasts() {
    Sim::seeds(30).run(|sim| {
        let limits = ServerLimits::default().connections_max(20);
        let server = Server::bind(ADDR).server_limits(limits).framing(Lines::default());
        let running = sim.start(server, |_shard| Echo).expect("the server starts");
        running.follow_load();
        let leave_at = sim.now() + Duration::from_secs(20);
        for n in 0..24 {
            sim.client(format!("c{n}"), async move |net| {
                let mut me = net.connect(ADDR).await?;
                me.send("hello\n").await?;
                assert_eq!(me.line().await?.as_deref(), Some("hello"));
                net.sleep(leave_at.saturating_sub(net.now())).await;
                Ok(())
            });
        }
        let changes = watch(sim, &running, Duration::from_secs(19));
        assert_eq!(changes.last().map(|(_, load)| *load), Some(Load::Full), "{changes:?}");
        assert!(
            changes.len() <= 2 && changes.iter().all(|(at, _)| *at < Duration::from_secs(1)),
            "{changes:?}"
        );
        sim.run_until_done();
        watch(sim, &running, Duration::from_secs(10));
        assert_eq!(running.load(), Load::Calm);
    });
}

#[test]
fn rate_of_newcomers_rises_again_behind_a_pause_of_accepting() {
    Sim::seeds(10).run(|sim| {
        let limits = ServerLimits::default().connections_max(20);
        let admission = Admission::default().accept_rate(100, 1).slow_start(Duration::from_secs(10));
        let server = Server::bind(ADDR).server_limits(limits).admission(admission).framing(Lines::default());
        let running = sim.start(server, |_shard| Echo).expect("the server starts");
        running.follow_load();
        let leave_at = sim.now() + Duration::from_secs(20);
        let served = Rc::new(Cell::new(0));
        let comes = |name: String, leave_at: Duration| {
            let served = served.clone();
            sim.client(name, async move |net| {
                let mut me = net.connect(ADDR).await?;
                me.send("hello\n").await?;
                assert_eq!(me.line().await?.as_deref(), Some("hello"));
                served.set(served.get() + 1);
                net.sleep(leave_at.saturating_sub(net.now())).await;
                Ok(())
            });
        };
        (0..24).for_each(|n| comes(format!("old{n}"), leave_at));
        watch(sim, &running, Duration::from_secs(19));
        assert_eq!((served.get(), running.load()), (20, Load::Full));
        while running.load() == Load::Full {
            sim.run_for(Duration::from_millis(5));
        }
        assert_eq!(served.get(), 24);
        (0..60).for_each(|n| comes(format!("new{n}"), Duration::ZERO));
        sim.run_for(Duration::from_secs(1));
        let first = served.get() - 24;
        assert!((5..=20).contains(&first), "{first} of 60 in the first second, at a tenth of the rate");
        sim.run_until_done();
        assert_eq!(served.get(), 84);
    });
}

#[test]
fn memory_that_is_held_has_a_way_out() {
    Sim::seeds(15).run(|sim| {
        const HELD_MAX: usize = 4 << 20;
        let limits = ServerLimits::default().held_bytes_max(HELD_MAX);
        let server = Server::bind(ADDR)
            .limits(Limits::default().outbox_bytes_max(1 << 20))
            .server_limits(limits)
            .framing(Lines::default());
        let running = sim.start(server, |_shard| Echo).expect("the server starts");
        running.follow_load();
        // Half lines that fill 85 % of what may be held, and end after ten seconds.
        for n in 0..8 {
            sim.client(format!("half{n}"), async move |net| {
                let mut me = net.connect(ADDR).await?;
                me.send(vec![b'x'; HELD_MAX * 85 / 100 / 8]).await?;
                net.sleep(Duration::from_secs(10)).await;
                me.send("\n").await?;
                me.line().await?;
                Ok(())
            });
        }
        let changes = watch(sim, &running, Duration::from_secs(9));
        assert!(running.load() >= Load::Busy, "{changes:?}, {:?}", running.stats().shards[0].held_bytes);
        let settled = |(at, _): &(Duration, Load)| *at < Duration::from_secs(3);
        assert!(changes.iter().all(settled), "no swing while it lasts: {changes:?}");
        sim.run_until_done();
        watch(sim, &running, Duration::from_secs(10));
        assert_eq!(running.load(), Load::Calm);
    });
}
