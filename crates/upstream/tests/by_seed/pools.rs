//! Connections: how many there are, who gets one, and who waits.

use ringserve::testing::Faults;
use ringserve::upstream::PoolLimits;

use super::*;

#[test]
fn question_has_its_own_answer_whatever_breaks() {
    Sim::seeds(20).faults(Faults::harmless()).run(|sim| {
        let backends = backends(sim, 3);
        let upstream = upstream(3).answer_timeout(2 * SECOND).ejection(sim.seed() % 2 == 0);
        front(sim, &upstream, 1 + sim.seed() as usize % 3);
        for client in 0..6 {
            sim.client(format!("c{client}"), async move |net| {
                let mut me = net.connect(FRONT).await?;
                for n in 0..30 {
                    let kind = ["once", "again"][net.random() as usize % 2];
                    let question = format!("{kind} {client}.{n}");
                    let answer = asks(&mut me, &question).await?;
                    assert!(answer == question || answer.starts_with("no answer: "), "{question}: {answer}");
                    net.sleep(Duration::from_millis(net.random() % 100)).await;
                }
                Ok(())
            });
        }
        let modes = [
            Mode::Answers,
            Mode::Refuses,
            Mode::Silent,
            Mode::ClosesAtOnce,
            Mode::Dies,
            Mode::Slow(SECOND),
            Mode::ClosesIdle(SECOND / 50),
        ];
        for _ in 0..12 {
            sim.run_for(SECOND / 4);
            backends[sim.random() as usize % 3].mode.set(modes[sim.random() as usize % modes.len()]);
        }
        backends.iter().for_each(|backend| backend.mode.set(Mode::Answers));
        sim.run_until_done();
        heard_once(&backends);
        // The shards tell what they have in flight.
        sim.run_for(2 * SECOND);
        assert_eq!(sum(&upstream, |backend| backend.in_flight), 0);
    });
}

#[test]
fn connections_are_kept_and_bounded() {
    Sim::seeds(20).faults(Faults::harmless()).run(|sim| {
        let backends = backends(sim, 1);
        backends[0].mode.set(Mode::Slow(SECOND / 20));
        let limits = PoolLimits::default().connections_max(3).idle_max(2);
        let upstream = upstream(1).pool(limits);
        front(sim, &upstream, 1);
        for client in 0..12 {
            sim.client(format!("c{client}"), async move |net| {
                let mut me = net.connect(FRONT).await?;
                for n in 0..10 {
                    let question = format!("once {client}.{n}");
                    assert_eq!(asks(&mut me, &question).await?, question);
                }
                Ok(())
            });
        }
        sim.run_until_done();
        assert_eq!((backends[0].most.get(), backends[0].accepted.get()), (3, 3));
        assert_eq!(backends[0].asked(), 120);
        assert!(sim.run_until(SECOND, || backends[0].now.get() == 2), "two are kept");
        sim.run_for(62 * SECOND);
        assert_eq!(backends[0].now.get(), 0, "none is kept for more than a minute");
    });
}

#[test]
fn calls_beyond_the_queue_fail_at_once_and_those_in_it_in_time() {
    Sim::seeds(20).run(|sim| {
        let backends = backends(sim, 1);
        backends[0].mode.set(Mode::Silent);
        let limits = PoolLimits::default().connections_max(1).waiting_max(2).wait_max(3 * SECOND);
        let upstream = upstream(1).pool(limits);
        front(sim, &upstream, 1);
        let heard: Rc<RefCell<Vec<(u64, String)>>> = Rc::default();
        for client in 0..5 {
            let heard = heard.clone();
            sim.client(format!("c{client}"), async move |net| {
                net.sleep(SECOND + SECOND / 10 * client).await;
                let begun = net.now();
                let mut me = net.connect(FRONT).await?;
                let answer = asks(&mut me, "once 1").await?;
                heard.borrow_mut().push(((net.now() - begun).as_secs(), answer));
                Ok(())
            });
        }
        sim.run_until_done();
        let (full, late) = (
            "no answer: too many calls wait for a connection to the upstream",
            "no answer: the upstream was too late",
        );
        let wanted = [(0, full), (0, full), (3, late), (3, late), (10, late)];
        let heard: Vec<_> = heard.borrow().iter().map(|(time, answer)| (*time, answer.clone())).collect();
        assert_eq!(heard, wanted.map(|(time, answer)| (time, answer.to_owned())));
        assert_eq!(backends[0].asked(), 1);
        assert_eq!(sum(&upstream, |backend| backend.failures), 1, "who waited says nothing of the backend");
    });
}

#[test]
fn dropped_call_closes_its_connection_and_frees_its_place() {
    Sim::seeds(20).run(|sim| {
        let backends = backends(sim, 1);
        backends[0].mode.set(Mode::Silent);
        let upstream = upstream(1).pool(PoolLimits::default().connections_max(1)).answer_timeout(60 * SECOND);
        front(sim, &upstream, 1);
        sim.client("leaves", async move |net| {
            let mut me = net.connect(FRONT).await?;
            me.send("once 1\n").await?;
            net.sleep(2 * SECOND).await;
            me.reset();
            Ok(())
        });
        sim.client("stays", async move |net| {
            let mut me = net.connect(FRONT).await?;
            net.sleep(SECOND).await;
            assert_eq!(asks(&mut me, "once 2").await?, "once 2");
            Ok(())
        });
        sim.run_for(SECOND + SECOND / 2);
        backends[0].mode.set(Mode::Answers);
        sim.run_until_done();
        assert_eq!(backends[0].accepted.get(), 2);
    });
}

#[test]
fn backend_that_left_is_asked_no_more_and_one_that_came_is() {
    Sim::seeds(20).run(|sim| {
        let backends = backends(sim, 2);
        let upstream = upstream(1);
        front(sim, &upstream, 2);
        for client in 0..4 {
            sim.client(format!("c{client}"), async move |net| {
                let mut me = net.connect(FRONT).await?;
                for n in 0..100 {
                    let question = format!("once {client}.{n}");
                    assert_eq!(asks(&mut me, &question).await?, question);
                    net.sleep(SECOND / 10).await;
                }
                Ok(())
            });
        }
        sim.run_for(3 * SECOND);
        assert_eq!(backends[1].asked(), 0);
        upstream.set_backends([ADDRS[1]]);
        sim.run_for(2 * SECOND);
        let asked = backends[0].asked();
        assert_eq!(backends[0].now.get(), 0, "its connections are closed");
        sim.run_for(3 * SECOND);
        assert_eq!(backends[0].asked(), asked);
        assert!(backends[1].asked() > 0);
        upstream.set_backends(ADDRS[..2].iter().copied());
        upstream.drain(ADDRS[1]);
        sim.run_until_done();
        assert!(backends[0].asked() > asked);
        heard_once(&backends);
    });
}

#[test]
fn backend_without_progress_is_passed_over_at_once() {
    Sim::seeds(10).run(|sim| {
        let backends = backends(sim, 1);
        backends[0].mode.set(Mode::Silent);
        let limits = PoolLimits::default().connections_max(2).wait_max(2 * SECOND).failfast_after(2 * SECOND);
        let upstream = upstream(1).pool(limits).answer_timeout(30 * SECOND);
        front(sim, &upstream, 1);
        let waited: Rc<RefCell<Vec<Duration>>> = Rc::default();
        for client in 0..100 {
            let waited = waited.clone();
            sim.client(format!("c{client}"), async move |net| {
                net.sleep(SECOND / 10 * client).await;
                let begun = net.now();
                let mut me = net.connect(FRONT).await?;
                assert_eq!(asks(&mut me, "once 1").await?, "no answer: the upstream was too late");
                waited.borrow_mut().push(net.now() - begun);
                Ok(())
            });
        }
        sim.run_until_done();
        let long = waited.borrow().iter().filter(|time| **time > SECOND / 4).count();
        // Two are at the backend, some two seconds wait until nothing came of it, and then one at a
        // time.
        assert!((20..=30).contains(&long), "{long} of 100 waited");
    });
}

#[test]
fn backend_that_swallows_connects_is_passed_over_at_once() {
    Sim::seeds(10).run(|sim| {
        let _backends = backends(sim, 1);
        front(sim, &upstream(1).answer_timeout(30 * SECOND), 1);
        let ip = |addr: &str| addr.parse::<SocketAddr>().unwrap().ip();
        sim.partition(ip(FRONT), ip(ADDRS[0]));
        let waited: Rc<RefCell<Vec<Duration>>> = Rc::default();
        for client in 0..100 {
            let waited = waited.clone();
            sim.client(format!("c{client}"), async move |net| {
                net.sleep(SECOND / 10 * client).await;
                let begun = net.now();
                let mut me = net.connect(FRONT).await?;
                assert!(asks(&mut me, "once 1").await?.starts_with("no answer"));
                waited.borrow_mut().push(net.now() - begun);
                Ok(())
            });
        }
        sim.run_until_done();
        let long = waited.borrow().iter().filter(|time| **time > SECOND / 4).count();
        // Those of the first three seconds wait, and then one at a time.
        assert!((25..=40).contains(&long), "{long} of 100 waited");
    });
}

#[test]
fn idle_connections_to_all_backends_are_bounded() {
    Sim::seeds(10).faults(Faults::harmless()).run(|sim| {
        let backends = backends(sim, 3);
        backends.iter().for_each(|backend| backend.mode.set(Mode::Slow(SECOND / 5)));
        let upstream = upstream(3).pool(PoolLimits::default().idle_total_max(4));
        front(sim, &upstream, 1);
        for client in 0..20 {
            sim.client(format!("c{client}"), async move |net| {
                let mut me = net.connect(FRONT).await?;
                let question = format!("once {client}");
                assert_eq!(asks(&mut me, &question).await?, question);
                Ok(())
            });
        }
        sim.run_until_done();
        let open = || backends.iter().map(|backend| backend.now.get()).sum::<usize>();
        assert!(sim.run_until(SECOND, || open() <= 4), "{} are open", open());
        assert_eq!(open(), 4);
    });
}

#[test]
fn connections_are_warm_before_the_first_question() {
    Sim::seeds(10).run(|sim| {
        let backends = backends(sim, 2);
        let limits = PoolLimits::default().warm(2).idle_timeout(5 * SECOND);
        let upstream = upstream(2).pool(limits);
        front(sim, &upstream, 1);
        sim.run_for(2 * SECOND);
        let open = || backends.iter().map(|backend| backend.now.get()).collect::<Vec<_>>();
        assert_eq!(open(), [2, 2]);
        sim.client("c", async move |net| {
            let mut me = net.connect(FRONT).await?;
            for n in 0..10 {
                let question = format!("once {n}");
                assert_eq!(asks(&mut me, &question).await?, question);
            }
            Ok(())
        });
        sim.run_until_done();
        sim.run_for(60 * SECOND);
        assert_eq!(open(), [2, 2], "they stay");
        assert_eq!(backends.iter().map(|backend| backend.accepted.get()).sum::<usize>(), 4);
        upstream.drain(ADDRS[0]);
        sim.run_for(2 * SECOND);
        assert_eq!(open(), [0, 2]);
        // What a backend ends is made again.
        backends[1].mode.set(Mode::ClosesIdle(SECOND / 2));
        sim.reset(ADDRS[1].parse::<SocketAddr>().unwrap().ip());
        sim.expect_losses();
        assert!(sim.run_until(2 * SECOND, || backends[1].accepted.get() > 2));
    });
}
