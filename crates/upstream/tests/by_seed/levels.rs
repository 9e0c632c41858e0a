//! Backends that are asked before others: by priority, by zone, and a part of many by each shard.

use ringserve::testing::Faults;
use ringserve::upstream::{Backend as Address, Balance, Check, PoolLimits};

use super::*;

/// Clients that ask, each many times. Returns how often each backend was asked.
fn asked_of(sim: &Sim, backends: &[Rc<Backend>], clients: u32, each: u32) -> Vec<u32> {
    let before: Vec<u32> = backends.iter().map(|backend| backend.asked()).collect();
    // No two rounds have the same time.
    sim.run_for(SECOND / 1000);
    let round = sim.now().as_nanos();
    for client in 0..clients {
        sim.client(format!("c{round}.{client}"), async move |net| {
            let mut me = net.connect(FRONT).await?;
            for n in 0..each {
                let question = format!("once {round}.{client}.{n}");
                assert_eq!(asks(&mut me, &question).await?, question);
            }
            Ok(())
        });
    }
    sim.run_until_done();
    backends.iter().zip(before).map(|(backend, before)| backend.asked() - before).collect()
}

#[test]
fn later_backends_are_asked_as_far_as_the_first_do_not_do() {
    Sim::seeds(4).faults(Faults::harmless()).run(|sim| {
        let backends = backends(sim, 3);
        let late = |index: usize| Address::new(ADDRS[index]).priority(u16::from(index == 2));
        let upstream =
            Upstream::new("answers", (0..3).map(late)).check(Check::connect().interval(SECOND / 2));
        let upstream = upstream.balance([Balance::PeakEwma, Balance::RoundRobin][sim.seed() as usize % 2]);
        front(sim, &upstream, 2);
        sim.run_for(2 * SECOND);
        let asked = asked_of(sim, &backends, 4, 50);
        assert!(asked[0] > 20 && asked[1] > 20 && asked[2] == 0, "{asked:?}");
        // One of two is enough for seven tenths.
        backends[0].mode.set(Mode::Refuses);
        sim.run_for(10 * SECOND);
        let asked = asked_of(sim, &backends, 4, 100);
        assert!(asked[0] == 0 && (60..180).contains(&asked[2]), "{asked:?}");
        backends[1].mode.set(Mode::Refuses);
        sim.run_for(10 * SECOND);
        let asked = asked_of(sim, &backends, 4, 20);
        assert_eq!((asked[2], upstream.stats().panics), (80, 0), "what is left is enough");
        backends.iter().for_each(|backend| backend.mode.set(Mode::Answers));
        sim.run_for(60 * SECOND);
        let asked = asked_of(sim, &backends, 4, 20);
        assert_eq!((asked[0] + asked[1], asked[2]), (80, 0));
        heard_once(&backends);
    });
}

#[test]
fn later_backend_is_asked_at_once_where_the_first_one_is_lost() {
    Sim::seeds(10).run(|sim| {
        let backends = backends(sim, 2);
        let late = |index: usize| Address::new(ADDRS[index]).priority(index as u16);
        let upstream = Upstream::new("answers", (0..2).map(late)).ejection(false);
        front(sim, &upstream, 1);
        backends[0].mode.set(Mode::Refuses);
        sim.run_for(SECOND);
        assert_eq!(asked_of(sim, &backends, 2, 10), [0, 20], "none fails");
    });
}

#[test]
fn backends_of_the_own_zone_are_asked_first() {
    Sim::seeds(4).faults(Faults::harmless()).run(|sim| {
        let backends = backends(sim, 4);
        let zones = ["here", "there", "there", "here"];
        let zoned = |index: usize| Address::new(ADDRS[index]).zone(zones[index]);
        let all = Upstream::new("answers", (0..4).map(zoned)).check(Check::connect().interval(SECOND / 2));
        let is_zoned = sim.seed() % 2 == 0;
        let upstream = if is_zoned { all.zone("here") } else { all };
        front(sim, &upstream, 2);
        sim.run_for(2 * SECOND);
        let asked = asked_of(sim, &backends, 4, 50);
        assert_eq!(asked[1] + asked[2] == 0, is_zoned, "{asked:?}");
        backends[0].mode.set(Mode::Refuses);
        backends[3].mode.set(Mode::Refuses);
        sim.run_for(10 * SECOND);
        let asked = asked_of(sim, &backends, 4, 10);
        assert_eq!(asked[1] + asked[2], 40, "others are better than none");
    });
}

#[test]
fn each_shard_asks_a_part_of_many_backends() {
    const MANY: usize = 40;
    Sim::seeds(3).run(|sim| {
        let addrs: Vec<&'static str> =
            (0..MANY).map(|n| &*Box::leak(format!("10.0.1.{n}:80").into_boxed_str())).collect();
        let backends: Vec<_> = addrs.iter().map(|addr| Backend::start(sim, addr)).collect();
        let is_on = sim.seed() % 3 != 0;
        // One connection for each shard that asks a backend.
        let limits = PoolLimits::default().connections_max(1).idle_total_max(1000);
        let upstream = Upstream::new("answers", addrs.iter().copied()).pool(limits).subset(is_on);
        front(sim, &upstream.balance(Balance::RoundRobin), 8);
        let asked = asked_of(sim, &backends, 64, 40);
        assert!(asked.iter().all(|asked| *asked > 0), "{asked:?}");
        let most = backends.iter().map(|backend| backend.most.get()).max();
        assert_eq!(most.is_some_and(|most| most <= 4), is_on, "{most:?} shards at a backend");
        // Of a shard whose part is lost, others are asked.
        backends[..30].iter().for_each(|backend| backend.mode.set(Mode::Refuses));
        sim.expect_losses();
        (0..30).for_each(|n| sim.reset([10, 0, 1, n].into()));
        sim.run_for(SECOND);
        let asked = asked_of(sim, &backends, 16, 10);
        assert_eq!(asked[30..].iter().sum::<u32>(), 160);
    });
}
