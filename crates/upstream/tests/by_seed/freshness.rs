//! Connections that the backend ended are not used.

use ringserve::testing::Faults;
use ringserve::upstream::PoolLimits;

use super::*;

#[test]
fn connection_that_ended_before_the_question_is_not_used() {
    Sim::seeds(8).faults(Faults::harmless()).run(|sim| {
        let backends = backends(sim, 1);
        backends[0].mode.set(Mode::ClosesIdle(5 * SECOND));
        let upstream = upstream(1);
        front(sim, &upstream, 1);
        for client in 0..3 {
            sim.client(format!("c{client}"), async move |net| {
                let mut me = net.connect(FRONT).await?;
                for n in 0..50 {
                    let question = format!("once {client}.{n}");
                    assert_eq!(asks(&mut me, &question).await?, question);
                    // Its end has come by then, or will not come for a while.
                    net.sleep(Duration::from_millis([10, 20_000][net.random() as usize % 2])).await;
                }
                Ok(())
            });
        }
        sim.run_until_done();
        heard_once(&backends);
        sim.run_for(2 * SECOND);
        assert_eq!(sum(&upstream, |backend| backend.lost), 0);
        assert_eq!(sum(&upstream, |backend| backend.requests), 150);
    });
}

#[test]
fn connection_that_ended_is_closed_at_once() {
    Sim::seeds(10).run(|sim| {
        let backends = backends(sim, 1);
        backends[0].mode.set(Mode::HalfCloses(SECOND));
        front(sim, &upstream(1), 1);
        sim.client("c", async move |net| {
            let mut me = net.connect(FRONT).await?;
            assert_eq!(asks(&mut me, "once 1").await?, "once 1");
            Ok(())
        });
        sim.run_until_done();
        assert_eq!(backends[0].now.get(), 1, "it is kept");
        sim.run_for(SECOND + SECOND / 2);
        assert_eq!(backends[0].now.get(), 0);
    });
}

#[test]
fn question_that_races_with_the_end_is_heard_once_at_most() {
    Sim::seeds(30).run(|sim| {
        let backends = backends(sim, 2);
        let time = SECOND / 50;
        let mode = if sim.seed() % 2 == 0 { Mode::ClosesIdle(time) } else { Mode::HalfCloses(time) };
        backends.iter().for_each(|backend| backend.mode.set(mode));
        let upstream = upstream(2);
        front(sim, &upstream, 1);
        let lost = Rc::new(Cell::new(0));
        for client in 0..4 {
            let lost = lost.clone();
            sim.client(format!("c{client}"), async move |net| {
                let mut me = net.connect(FRONT).await?;
                for n in 0..60 {
                    let question = format!("once {client}.{n}");
                    let answer = asks(&mut me, &question).await?;
                    if answer != question {
                        assert_eq!(answer, "no answer: the upstream ended the connection before its answer");
                        lost.set(lost.get() + 1);
                    }
                    net.sleep(Duration::from_micros(19_000 + net.random() % 2_000)).await;
                }
                Ok(())
            });
        }
        sim.run_until_done();
        heard_once(&backends);
        assert_eq!(sum(&upstream, |backend| backend.lost), lost.get());
        assert_eq!(sum(&upstream, |backend| backend.failures), 0, "a race is no failure");
    });
}

#[test]
fn question_that_may_be_asked_twice_survives_the_race() {
    Sim::seeds(30).faults(Faults::harmless()).run(|sim| {
        let backends = backends(sim, 1);
        backends[0].mode.set(Mode::ClosesIdle(2 * SECOND));
        let upstream = upstream(1);
        front(sim, &upstream, 1);
        sim.client("c", async move |net| {
            let mut me = net.connect(FRONT).await?;
            for n in 0..12 {
                let question = format!("again {n}");
                assert_eq!(asks(&mut me, &question).await?, question);
                net.sleep(Duration::from_millis(1_900 + net.random() % 200)).await;
            }
            Ok(())
        });
        sim.run_until_done();
    });
}

#[test]
fn time_that_a_backend_keeps_connections_is_learned() {
    Sim::seeds(6).faults(Faults::harmless()).run(|sim| {
        let backends = backends(sim, 1);
        backends[0].mode.set(Mode::ClosesIdle(5 * SECOND));
        let upstream = upstream(1);
        front(sim, &upstream, 1);
        sim.client("c", async move |net| {
            let mut me = net.connect(FRONT).await?;
            // Three ends teach it.
            for n in 0..4 {
                assert_eq!(asks(&mut me, &format!("once {n}")).await?, format!("once {n}"));
                net.sleep(6 * SECOND).await;
            }
            // From then on no question meets the end on its way.
            for n in 4..200 {
                let question = format!("once {n}");
                assert_eq!(asks(&mut me, &question).await?, question);
                net.sleep(5 * SECOND - SECOND / 10 + Duration::from_millis(net.random() % 200)).await;
            }
            Ok(())
        });
        sim.run_until_done();
        heard_once(&backends);
    });
}

#[test]
fn connection_that_is_not_lent_any_more_makes_room_at_the_bound() {
    Sim::seeds(6).faults(Faults::harmless()).run(|sim| {
        let backends = backends(sim, 1);
        backends[0].mode.set(Mode::ClosesIdle(5 * SECOND));
        let upstream = upstream(1).pool(PoolLimits::default().connections_max(1));
        front(sim, &upstream, 1);
        sim.client("c", async move |net| {
            let mut me = net.connect(FRONT).await?;
            for n in 0..20 {
                assert_eq!(asks(&mut me, &format!("once {n}")).await?, format!("once {n}"));
                // Three ends teach it. Then its only connection is too old when the next question
                // comes.
                net.sleep(if n < 4 { 6 * SECOND } else { 5 * SECOND - SECOND / 4 }).await;
            }
            Ok(())
        });
        sim.run_until_done();
        heard_once(&backends);
    });
}

#[test]
fn connection_with_an_answer_too_many_is_closed() {
    Sim::seeds(20).faults(Faults::harmless()).run(|sim| {
        let backends = backends(sim, 1);
        let stray = sim.seed() % 2 == 0;
        backends[0].mode.set(if stray { Mode::Stray } else { Mode::Twice });
        let upstream = upstream(1);
        front(sim, &upstream, 1);
        sim.client("c", async move |net| {
            let mut me = net.connect(FRONT).await?;
            for n in 0..20 {
                let question = format!("once {n}");
                assert_eq!(asks(&mut me, &question).await?, question);
                net.sleep(SECOND).await;
            }
            Ok(())
        });
        sim.run_until_done();
        sim.run_for(SECOND);
        assert_eq!((backends[0].accepted.get(), sum(&upstream, |backend| backend.stray)), (20, 20));
    });
}

#[test]
fn answer_before_the_question_left_is_the_answer_to_none() {
    let unsent = Rc::new(Cell::new(0));
    let count = unsent.clone();
    Sim::seeds(60).run(move |sim| {
        let backends = backends(sim, 1);
        backends[0].mode.set(Mode::Again(SECOND / 100));
        let upstream = upstream(1).answer_timeout(SECOND);
        front(sim, &upstream, 1);
        for client in 0..3 {
            sim.client(format!("c{client}"), async move |net| {
                let mut me = net.connect(FRONT).await?;
                for n in 0..60 {
                    asks(&mut me, &format!("once {client}.{n}")).await?;
                    net.sleep(Duration::from_micros(9_600 + net.random() % 800)).await;
                }
                Ok(())
            });
        }
        sim.run_until_done();
        count.set(count.get() + sum(&upstream, |backend| backend.unsent));
    });
    assert!(unsent.get() > 0, "it did not come to that");
}
