//! Bytes both ways, and what a relay says of its backends.

use ringserve::testing::Faults;
use ringserve::upstream::Backend as Address;
use ringserve::{Stream, stream};

use super::*;

fn relay(sim: &Sim, upstream: &Upstream, shards: usize) {
    let (upstream, addr) = (upstream.clone(), FRONT.parse::<SocketAddr>().unwrap());
    let server = Server::bind(addr).shards(shards);
    let server = sim.start(server, move |shard| {
        let relay = upstream.relay(shard);
        stream(async move |mut client: Stream| -> Result<(), Box<dyn std::error::Error>> {
            relay.connect(&client).await?.copy(&mut client).await?;
            Ok(())
        })
    });
    server.unwrap();
    sim.run_for(SECOND / 10);
}

/// Clients that ask once, each on its connection. Returns how many were not answered.
fn come(sim: &Sim, clients: u32, over: Duration) -> Rc<Cell<u32>> {
    let failed = Rc::new(Cell::new(0));
    for client in 0..clients {
        let failed = failed.clone();
        sim.client(format!("c{client}"), async move |net| {
            net.sleep(over / clients * client).await;
            let mut me = net.connect(FRONT).await?;
            let question = format!("once {client}");
            if asks(&mut me, &question).await.ok() != Some(question) {
                failed.set(failed.get() + 1);
            }
            Ok(())
        });
    }
    failed
}

#[test]
fn backend_that_closes_at_once_costs_few_clients() {
    Sim::seeds(6).run(|sim| {
        let backends = backends(sim, 3);
        let upstream = upstream(3);
        relay(sim, &upstream, 1 + sim.seed() as usize % 4);
        backends[1].mode.set(Mode::ClosesAtOnce);
        let failed = come(sim, 400, 20 * SECOND);
        sim.expect_losses();
        sim.run_until_done();
        // It was 140 of 400 before there was an ejection.
        assert!(failed.get() <= 20, "{} of 400", failed.get());
        assert!(upstream.stats().backends[1].is_ejected);
        heard_once(&backends);
    });
}

#[test]
fn place_is_given_back_however_the_client_ends() {
    Sim::seeds(20).faults(Faults::all()).run(|sim| {
        let backends = backends(sim, 3);
        let upstream = upstream(3);
        relay(sim, &upstream, 1 + sim.seed() as usize % 4);
        come(sim, 30, 2 * SECOND);
        let modes = [Mode::Answers, Mode::Refuses, Mode::Silent, Mode::ClosesAtOnce, Mode::Dies];
        for _ in 0..10 {
            sim.run_for(SECOND / 4);
            backends[sim.random() as usize % 3].mode.set(modes[sim.random() as usize % modes.len()]);
            if sim.random().is_multiple_of(4) {
                sim.reset([10, 0, 0, 11 + (sim.random() % 3) as u8].into());
            }
        }
        sim.expect_losses();
        (11..14).for_each(|last| sim.reset([10, 0, 0, last].into()));
        sim.run_for(60 * SECOND);
        assert_eq!(sum(&upstream, |backend| backend.in_flight), 0);
    });
}

#[test]
fn client_that_sends_and_ends_says_nothing_of_its_backend() {
    Sim::seeds(20).faults(Faults::harmless()).run(|sim| {
        // It reads, and ends behind its client: a log takes lines so.
        let backends = backends(sim, 2);
        backends.iter().for_each(|backend| backend.mode.set(Mode::Dies));
        let upstream = upstream(2);
        relay(sim, &upstream, 2);
        for client in 0..20 {
            sim.client(format!("c{client}"), async move |net| {
                let mut me = net.connect(FRONT).await?;
                me.send("a line without an end").await?;
                me.finish()?;
                assert_eq!(me.closed().await?, b"");
                Ok(())
            });
        }
        sim.run_until_done();
        sim.run_for(SECOND);
        assert_eq!(sum(&upstream, |backend| backend.failures), 0);
    });
}

#[test]
fn idle_backends_have_their_shares_of_the_connections() {
    Sim::seeds(3).run(|sim| {
        let backends = backends(sim, 2);
        let unequal = [Address::new(ADDRS[0]).weight(9), Address::new(ADDRS[1])];
        let upstream = Upstream::new("answers", unequal);
        relay(sim, &upstream, 1 + sim.seed() as usize % 2);
        // One is over before the next one comes.
        let failed = come(sim, 600, 60 * SECOND);
        sim.run_until_done();
        assert_eq!(failed.get(), 0);
        let share = f64::from(backends[1].asked()) / 600.0;
        assert!((0.05..0.16).contains(&share), "{share} of a tenth");
    });
}

#[test]
fn silent_client_does_not_keep_others_from_a_trial() {
    Sim::seeds(10).run(|sim| {
        let backends = backends(sim, 2);
        let upstream = upstream(2).connect_timeout(SECOND);
        relay(sim, &upstream, 1);
        backends[0].mode.set(Mode::ClosesAtOnce);
        let _failed = come(sim, 40, 4 * SECOND);
        sim.run_until_done();
        assert!(upstream.stats().backends[0].is_ejected);
        backends[0].mode.set(Mode::Answers);
        sim.run_for(10 * SECOND);
        // The first one is the trial of the backend, and says nothing for long.
        for client in 0..3 {
            sim.client(format!("silent{client}"), async move |net| {
                let mut me = net.connect(FRONT).await?;
                net.sleep(30 * SECOND).await;
                asks(&mut me, "once s").await?;
                Ok(())
            });
        }
        sim.run_for(SECOND / 2);
        assert!(upstream.stats().backends[0].is_ejected && backends[0].now.get() == 1);
        sim.run_for(SECOND);
        sim.client("speaks", async move |net| {
            let mut me = net.connect(FRONT).await?;
            assert_eq!(asks(&mut me, "once 1").await?, "once 1");
            Ok(())
        });
        sim.run_for(SECOND);
        assert!(!upstream.stats().backends[0].is_ejected);
        sim.run_until_done();
    });
}
