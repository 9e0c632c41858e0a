//! Things that begin and end with clients, servers and backends.

use ringserve::limits::{ConnLimits, ServerLimits};
use ringserve::testing::Faults;
use ringserve::upstream::{Balance, Check, Health, PoolLimits};
use ringserve::{Stream, stream};

use super::*;

#[test]
fn client_that_is_dropped_checks_no_backend() {
    Sim::seeds(6).run(|sim| {
        let backends = backends(sim, 2);
        let upstream = upstream(2).check(Check::connect().interval(SECOND / 2));
        let (of_front, addr) = (upstream.clone(), FRONT.parse::<SocketAddr>().unwrap());
        // A client of the upstream for each connection, which is more than it takes.
        let server = sim.start(Server::bind(addr), move |_shard| {
            let upstream = of_front.clone();
            stream(async move |mut client: Stream| -> Result<(), Box<dyn std::error::Error>> {
                let relay = upstream.relay(client.shard());
                relay.connect(&client).await?.copy(&mut client).await?;
                Ok(())
            })
        });
        let _server = server.unwrap();
        sim.run_for(SECOND / 10);
        for client in 0..4 {
            sim.client(format!("c{client}"), async move |net| {
                let mut me = net.connect(FRONT).await?;
                net.sleep(5 * SECOND).await;
                assert_eq!(asks(&mut me, "once 1").await?, "once 1");
                Ok(())
            });
        }
        sim.run_until_done();
        let checked = || backends.iter().map(|backend| backend.accepted.get()).sum::<usize>();
        assert!(checked() > 8, "they are checked as long as there is a client");
        sim.run_for(2 * SECOND);
        let before = checked();
        sim.run_for(10 * SECOND);
        assert_eq!(checked(), before);
    });
}

#[test]
fn later_server_does_not_wait_by_the_clock_of_an_earlier_one() {
    // A seed may run twice, to compare the runs.
    let used: Rc<RefCell<Vec<Upstream>>> = Rc::default();
    let asks_often = |sim: &Sim, count: usize| {
        sim.client("c", async move |net| {
            let mut me = net.connect(FRONT).await?;
            for n in 0..count {
                asks(&mut me, &format!("again {n}")).await?;
                net.sleep(SECOND / 10).await;
            }
            Ok(())
        });
        sim.run_until_done();
    };
    let after = used.clone();
    Sim::seeds(1).run(move |sim| {
        let backends = backends(sim, 2);
        let upstream = upstream(2).balance(Balance::RoundRobin);
        let _front = front(sim, &upstream, 1);
        sim.run_for(600 * SECOND);
        backends[0].mode.set(Mode::ClosesAtOnce);
        asks_often(sim, 20);
        assert!(upstream.stats().backends[0].is_ejected);
        after.borrow_mut().push(upstream);
    });
    Sim::seeds(1).run(move |sim| {
        let upstream = used.borrow_mut().pop().unwrap();
        let _backends = backends(sim, 2);
        let _front = front(sim, &upstream, 1);
        asks_often(sim, 20);
        assert!(!upstream.stats().backends[0].is_ejected, "it was tried, and works");
    });
}

#[test]
fn idle_connections_of_a_backend_that_left_end_at_once() {
    Sim::seeds(10).faults(Faults::harmless()).run(|sim| {
        let backends = backends(sim, 2);
        let upstream = upstream(1).answer_timeout(60 * SECOND);
        let _front = front(sim, &upstream, 1);
        backends[0].mode.set(Mode::Slow(SECOND));
        for client in 0..3 {
            sim.client(format!("c{client}"), async move |net| {
                let mut me = net.connect(FRONT).await?;
                assert_eq!(asks(&mut me, "once 1").await?, "once 1");
                Ok(())
            });
        }
        sim.run_until_done();
        assert_eq!(backends[0].now.get(), 3);
        backends[0].mode.set(Mode::Slow(20 * SECOND));
        sim.client("slow", async move |net| {
            let mut me = net.connect(FRONT).await?;
            assert_eq!(asks(&mut me, "once 2").await?, "once 2");
            Ok(())
        });
        sim.run_for(2 * SECOND);
        upstream.set_backends([ADDRS[1]]);
        sim.run_for(3 * SECOND);
        assert_eq!(backends[0].now.get(), 1, "the one that is in use");
        sim.run_until_done();
    });
}

#[test]
fn connection_that_nobody_awaits_counts_as_slow_if_it_fails() {
    Sim::seeds(6).run(|sim| {
        let backends = backends(sim, 2);
        // It accepts, and does not say what its protocol begins with.
        backends[0].mode.set(Mode::Silent);
        let limits = PoolLimits::default().wait_max(SECOND / 5).connections_max(1);
        let upstream = upstream(2).pool(limits).connect_timeout(SECOND).ejection(false);
        let _front = connections::greeting_front(sim, &upstream);
        let waited = Rc::new(Cell::new(0));
        let count = waited.clone();
        sim.client("c", async move |net| {
            let mut me = net.connect(FRONT).await?;
            for n in 0..50 {
                let (question, begun) = (format!("once {n}"), net.now());
                assert_eq!(asks(&mut me, &question).await?, question);
                count.set(count.get() + u32::from(net.now() - begun >= SECOND / 5));
                net.sleep(SECOND / 10).await;
            }
            Ok(())
        });
        sim.run_until_done();
        assert!(waited.get() <= 12, "{} of 50 waited", waited.get());
    });
}

#[test]
fn pools_and_checks_go_on_until_connections_end() {
    Sim::seeds(10).run(|sim| {
        let backends = backends(sim, 2);
        let upstream = upstream(2).check(Check::exchange("check\n", "check").interval(SECOND / 2));
        let (of_front, addr) = (upstream.clone(), FRONT.parse::<SocketAddr>().unwrap());
        let limits = ServerLimits::default().drain_delay(20 * SECOND);
        let server = Server::bind(addr).framing(Lines::default()).shards(1).server_limits(limits);
        let server =
            sim.start(server, move |shard| Front { answers: of_front.exclusive(shard, Lines::default()) });
        let server = server.unwrap();
        sim.run_for(2 * SECOND);
        server.drain();
        let checks = |upstream: &Upstream| upstream.stats().backends[0].health;
        sim.client("c", async move |net| {
            let mut me = net.connect(FRONT).await?;
            for n in 0..20 {
                let question = format!("once {n}");
                assert_eq!(asks(&mut me, &question).await?, question);
                net.sleep(SECOND / 5).await;
            }
            Ok(())
        });
        sim.run_for(5 * SECOND);
        let connects = sum(&upstream, |backend| backend.connects);
        assert!(connects <= 2, "{connects} connections are made for questions one by one");
        backends[0].mode.set(Mode::Silent);
        sim.run_for(5 * SECOND);
        assert_eq!(checks(&upstream), Health::Down);
        sim.run_until_done();
    });
}

#[test]
fn connection_has_the_limits_of_its_upstream() {
    Sim::seeds(5).run(|sim| {
        let backends = backends(sim, 1);
        let limits = ConnLimits::default().idle_timeout(2 * SECOND);
        front(sim, &upstream(1).connection_limits(limits), 1);
        sim.client("c", async move |net| {
            let mut me = net.connect(FRONT).await?;
            assert_eq!(asks(&mut me, "once 1").await?, "once 1");
            Ok(())
        });
        sim.run_until_done();
        sim.run_for(SECOND);
        assert_eq!(backends[0].now.get(), 1, "it is kept");
        sim.run_for(2 * SECOND);
        assert_eq!(backends[0].now.get(), 0, "it was idle for as long as it may be");
    });
}

#[test]
fn limits_that_contradict_are_the_error_of_each_connection() {
    Sim::seeds(2).run(|sim| {
        let backends = backends(sim, 1);
        let limits = ConnLimits::default().frame_bytes_max(0);
        front(sim, &upstream(1).connection_limits(limits), 1);
        sim.client("c", async move |net| {
            let mut me = net.connect(FRONT).await?;
            let answer = asks(&mut me, "once 1").await?;
            assert!(answer.starts_with("no answer: ") && answer.contains("frame_bytes_max"), "{answer}");
            Ok(())
        });
        sim.run_until_done();
        assert_eq!(backends[0].asked(), 0);
    });
}
