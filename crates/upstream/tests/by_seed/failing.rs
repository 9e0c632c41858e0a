//! Backends that fail: who is asked instead, how often, and how they come back.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use ringserve::testing::Faults;
use ringserve::upstream::{Balance, Check, Health};

use super::*;

/// Clients that ask, one question after the other, until the time is over. Returns how many were
/// not answered.
fn asked_for(sim: &Sim, clients: u32, time: Duration, gap: Duration, kind: &'static str) -> Rc<Cell<u32>> {
    let (failed, round) = (Rc::new(Cell::new(0)), sim.now().as_millis());
    for client in 0..clients {
        let failed = failed.clone();
        sim.client(format!("c{round}.{client}"), async move |net| {
            let mut me = net.connect(FRONT).await?;
            let until = net.now() + time;
            let mut n = 0;
            while net.now() < until {
                n += 1;
                let question = format!("{kind} {round}.{client}.{n}");
                if asks(&mut me, &question).await? != question {
                    failed.set(failed.get() + 1);
                }
                net.sleep(gap).await;
            }
            Ok(())
        });
    }
    failed
}

#[test]
fn backend_that_refuses_costs_no_question() {
    Sim::seeds(4).faults(Faults::harmless()).run(|sim| {
        let backends = backends(sim, 3);
        let upstream = upstream(3);
        front(sim, &upstream, 2);
        backends[0].mode.set(Mode::Refuses);
        sim.run_for(SECOND);
        let failed = asked_for(sim, 6, 20 * SECOND, SECOND / 20, "once");
        sim.run_until_done();
        assert_eq!(failed.get(), 0);
        heard_once(&backends);
        let tried = upstream.stats().backends[0].connects_failed;
        assert!((1..=40).contains(&tried), "{tried} times");
    });
}

#[test]
fn backend_that_fails_at_once_is_hardly_asked_and_comes_back() {
    Sim::seeds(2).faults(Faults::harmless()).run(|sim| {
        let backends = backends(sim, 4);
        // What a failure counts for in the average is enough.
        let upstream = upstream(4).ejection(false);
        front(sim, &upstream, 3);
        backends[1].mode.set(Mode::ClosesAtOnce);
        let failed = asked_for(sim, 5, 10 * SECOND, SECOND / 10, "again");
        sim.run_until_done();
        // What it did not answer another one did, as far as the budget goes in the first quarter of
        // a second.
        assert!(failed.get() <= 4, "{} failed", failed.get());
        assert!(backends[1].accepted.get() <= 20, "{} times", backends[1].accepted.get());
        backends[1].mode.set(Mode::Answers);
        asked_for(sim, 5, 45 * SECOND, SECOND / 4, "again");
        sim.run_until_done();
        let before: Vec<u32> = backends.iter().map(|backend| backend.asked()).collect();
        asked_for(sim, 5, 15 * SECOND, SECOND / 5, "again");
        sim.run_until_done();
        let asked: Vec<u32> =
            backends.iter().zip(before).map(|(backend, before)| backend.asked() - before).collect();
        // Few requests and a network that delays some for long are no even shares.
        assert!(asked[1] * 8 > asked.iter().sum::<u32>() / 4, "{asked:?}");
    });
}

#[test]
fn half_of_the_backends_stay_however_many_fail() {
    Sim::seeds(3).faults(Faults::harmless()).run(|sim| {
        let backends = backends(sim, 4);
        let upstream = upstream(4);
        front(sim, &upstream, 1 + sim.seed() as usize % 4);
        backends.iter().for_each(|backend| backend.mode.set(Mode::ClosesAtOnce));
        asked_for(sim, 6, 60 * SECOND, SECOND / 5, "once");
        let mut most = 0;
        for _ in 0..600 {
            sim.run_for(SECOND / 10);
            let ejected = upstream.stats().backends.iter().filter(|backend| backend.is_ejected).count();
            most = most.max(ejected);
        }
        assert_eq!(most, 2);
        backends.iter().for_each(|backend| backend.mode.set(Mode::Answers));
        sim.run_until_done();
        sim.run_for(300 * SECOND);
        let failed = asked_for(sim, 6, 20 * SECOND, SECOND / 20, "once");
        sim.run_until_done();
        assert_eq!(failed.get(), 0, "all is well again");
        assert!(upstream.stats().backends.iter().all(|backend| !backend.is_ejected));
    });
}

#[test]
fn ejected_backend_is_tried_by_one_request_at_a_time() {
    Sim::seeds(6).run(|sim| {
        let backends = backends(sim, 2);
        let upstream = upstream(2).answer_timeout(2 * SECOND).balance(Balance::RoundRobin);
        front(sim, &upstream, 3);
        backends[0].mode.set(Mode::ClosesAtOnce);
        asked_for(sim, 8, 30 * SECOND, SECOND / 10, "once");
        assert!(sim.run_until(10 * SECOND, || upstream.stats().backends[0].is_ejected));
        // It is connected to, and so slow that all would meet there.
        backends[0].mode.set(Mode::Silent);
        sim.run_for(SECOND);
        let asked = backends[0].asked();
        assert!(sim.run_until(20 * SECOND, || backends[0].asked() > asked), "it is tried");
        sim.run_for(SECOND + SECOND / 2);
        assert_eq!(backends[0].asked(), asked + 1);
        backends[0].mode.set(Mode::Answers);
        sim.run_until_done();
        sim.run_for(60 * SECOND);
        asked_for(sim, 4, 5 * SECOND, SECOND / 10, "once");
        sim.run_until_done();
        assert!(!upstream.stats().backends[0].is_ejected);
    });
}

#[test]
fn only_backend_is_asked_whatever_it_does() {
    Sim::seeds(10).run(|sim| {
        let backends = backends(sim, 1);
        let upstream = upstream(1);
        front(sim, &upstream, 1);
        backends[0].mode.set(Mode::ClosesAtOnce);
        asked_for(sim, 1, 10 * SECOND, SECOND / 10, "once");
        sim.run_for(5 * SECOND);
        assert!(!upstream.stats().backends[0].is_ejected);
        backends[0].mode.set(Mode::Answers);
        let failed = asked_for(sim, 1, SECOND, SECOND / 10, "once");
        sim.run_until_done();
        assert_eq!(failed.get(), 0);
    });
}

#[test]
fn outage_is_not_multiplied_by_retries() {
    Sim::seeds(4).run(|sim| {
        let backends = backends(sim, 4);
        let upstream = upstream(4).ejection(sim.seed() % 2 == 0);
        front(sim, &upstream, 1 + sim.seed() as usize % 4);
        asked_for(sim, 20, 20 * SECOND, SECOND / 10, "again");
        sim.run_for(10 * SECOND);
        let (before, asked) =
            (upstream.stats().retries, backends.iter().map(|backend| backend.asked()).sum::<u32>());
        backends.iter().for_each(|backend| backend.mode.set(Mode::Dies));
        sim.run_for(5 * SECOND);
        let heard = backends.iter().map(|backend| backend.asked()).sum::<u32>() - asked;
        let retries = (upstream.stats().retries - before) as u32;
        let first = heard - retries;
        // With what a second and a quarter before had left.
        let budget = first / 5 + (200 / 5 + 10) * 5 / 4 + 5 * 10;
        assert!(heard > 100 && retries <= budget, "{heard} heard, {retries} retries, of {budget}");
        sim.run_until_done();
    });
}

#[test]
fn backend_whose_check_panics_is_checked_again() {
    Sim::seeds(6).allow_panics(|said| said.contains("planted")).run(|sim| {
        let _backends = backends(sim, 1);
        let attempts = Arc::new(AtomicUsize::new(0));
        let upstream = upstream(1).check(Check::connect().interval(SECOND)).transport(move |_| {
            assert!(attempts.fetch_add(1, SeqCst) > 0, "planted: no transport is made");
            Err(io::ErrorKind::Unsupported.into())
        });
        front(sim, &upstream, 1);
        assert!(sim.run_until(20 * SECOND, || upstream.stats().backends[0].health == Health::Down));
    });
}

#[test]
fn each_backend_is_checked_once_for_the_process() {
    Sim::seeds(6).run(|sim| {
        let backends = backends(sim, 3);
        let upstream = upstream(3).check(Check::connect().interval(SECOND));
        let server = front(sim, &upstream, 4);
        sim.run_for(60 * SECOND);
        for backend in &backends {
            let checks = backend.accepted.get();
            assert!((58..=61).contains(&checks), "{checks} in 60 s");
        }
        assert!(upstream.stats().backends.iter().all(|backend| backend.health == Health::Up));
        // A stall of ours is no failure of theirs.
        for _ in 0..10 {
            (0..4).for_each(|shard| server.stall(shard, 5 * SECOND));
            sim.run_for(7 * SECOND + Duration::from_millis(sim.random() % 1000));
            assert!(upstream.stats().backends.iter().all(|backend| backend.health == Health::Up));
        }
    });
}

#[test]
fn few_retries_are_made_and_bounded_on_64_shards() {
    Sim::seeds(1).run(|sim| {
        let backends = backends(sim, 2);
        let upstream = upstream(2).ejection(false);
        front(sim, &upstream, 64);
        // A hundred questions a second.
        asked_for(sim, 50, 20 * SECOND, SECOND / 2, "again");
        sim.run_for(10 * SECOND);
        let retries = upstream.stats().retries;
        backends.iter().for_each(|backend| backend.mode.set(Mode::Dies));
        sim.run_for(5 * SECOND);
        let retries = upstream.stats().retries - retries;
        // A fifth of 100, and 10 a second, with what a second and a quarter before had left.
        assert!((100..=30 * 5 + 38).contains(&retries), "{retries} in 5 s");
        backends.iter().for_each(|backend| backend.mode.set(Mode::Answers));
        sim.run_until_done();
    });
}

#[test]
fn backends_are_checked_once_by_64_shards_of_which_some_stall() {
    Sim::seeds(1).run(|sim| {
        let backends = backends(sim, 4);
        let upstream = upstream(4).check(Check::connect().interval(SECOND));
        let server = front(sim, &upstream, 64);
        sim.run_for(5 * SECOND);
        let before: Vec<usize> = backends.iter().map(|backend| backend.accepted.get()).collect();
        for _ in 0..5 {
            (0..64).filter(|_| sim.random() % 4 == 0).for_each(|shard| server.stall(shard, 3 * SECOND));
            sim.run_for(6 * SECOND);
            assert!(upstream.stats().backends.iter().all(|backend| backend.health == Health::Up));
        }
        for (backend, before) in backends.iter().zip(before) {
            let checks = backend.accepted.get() - before;
            assert!((12..=33).contains(&checks), "{checks} in 30 s");
        }
    });
}

#[test]
fn backend_that_is_down_is_not_asked_unless_few_are_left() {
    Sim::seeds(6).run(|sim| {
        let backends = backends(sim, 3);
        let check = Check::exchange("check\n", "check").interval(SECOND / 2);
        let upstream = upstream(3).check(check).ejection(false);
        front(sim, &upstream, 2);
        backends[0].mode.set(Mode::Silent);
        sim.run_for(10 * SECOND);
        let down = |upstream: &Upstream| {
            upstream.stats().backends.iter().filter(|backend| backend.health == Health::Down).count()
        };
        assert_eq!(down(&upstream), 1);
        let failed = asked_for(sim, 4, 10 * SECOND, SECOND / 10, "once");
        sim.run_until_done();
        assert_eq!((failed.get(), upstream.stats().panics), (0, 0));
        // Two of three are down: all are asked.
        backends[1].mode.set(Mode::Refuses);
        sim.run_for(10 * SECOND);
        assert_eq!(down(&upstream), 2);
        backends[0].mode.set(Mode::Answers);
        asked_for(sim, 4, SECOND / 4, SECOND / 20, "once");
        sim.run_until_done();
        assert!(upstream.stats().panics > 0);
    });
}

#[test]
fn drained_backends_do_not_count_for_the_half_that_stays() {
    Sim::seeds(6).run(|sim| {
        let backends = backends(sim, 4);
        let upstream = upstream(4);
        front(sim, &upstream, 2);
        assert!(upstream.drain(ADDRS[2]) && upstream.drain(ADDRS[3]));
        (0..2).for_each(|index| backends[index].mode.set(Mode::ClosesAtOnce));
        asked_for(sim, 6, 3 * SECOND, SECOND / 10, "once");
        sim.run_until_done();
        let ejected = upstream.stats().backends.iter().filter(|backend| backend.is_ejected).count();
        assert_eq!(ejected, 1);
    });
}

#[test]
fn ejected_backend_is_better_than_none() {
    Sim::seeds(6).run(|sim| {
        let backends = backends(sim, 2);
        let upstream = upstream(2).panic_below(0).balance(Balance::RoundRobin);
        front(sim, &upstream, 1);
        backends[0].mode.set(Mode::ClosesAtOnce);
        asked_for(sim, 4, 60 * SECOND, SECOND / 10, "again");
        assert!(sim.run_until(60 * SECOND, || upstream.stats().backends[0].is_ejected));
        backends[0].mode.set(Mode::Answers);
        upstream.drain(ADDRS[1]);
        let asked = backends[0].asked();
        sim.run_for(SECOND);
        assert!(backends[0].asked() > asked + 20, "it is asked at once");
        sim.run_until_done();
    });
}
