//! Figures that shards publish, by seed: they are those of the last turn, once the shards had a
//! moment.

use std::cell::Cell;
use std::convert::Infallible;
use std::rc::Rc;
use std::time::Duration;

use ringserve_server::framing::Lines;
use ringserve_server::limits::ServerLimits;
use ringserve_server::stats::ConnStats;
use ringserve_server::testing::{Faults, Sim};
use ringserve_server::{Cx, Frame, Server, Service};

/// Figures are published each tenth of it.
const SECOND: Duration = Duration::from_secs(1);

/// Answers with what its server published.
struct Counts;

impl Service for Counts {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, line: Frame) -> Result<(), Infallible> {
        let stats = cx.shard().server().stats();
        assert_eq!(stats.stale_shards().count(), 0, "no turn takes time here");
        match &*line {
            b"newcomers" => {
                let each =
                    stats.shards.iter().map(|shard| (shard.accepted_waiting, shard.accepted_waiting_by));
                let (mut newcomers, mut at_limit) = (0, 0);
                for (waiting, by) in each {
                    assert_eq!((waiting, by.rate, by.postponed), (by.limit + by.behind, 0, 0));
                    (newcomers, at_limit) = (newcomers + waiting, at_limit + by.limit);
                }
                assert_eq!(newcomers > 0, at_limit > 0, "the first one of a queue waits for a place");
                let ConnStats { accepted, opened, .. } = stats.counters;
                cx.reply(format!("{newcomers} {}", accepted - opened));
            }
            b"count" => cx.reply(format!("{} {}", stats.counters.frames, stats.connections)),
            _ => cx.reply(line),
        }
        Ok(())
    }
}

#[test]
fn resting_shards_have_published_all_that_they_did() {
    Sim::seeds(100).faults(Faults::harmless()).run(|sim| {
        let server = Server::bind("10.0.0.1:7000").shards(3).framing(Lines::default());
        let server = sim.start(server, |_shard| Counts).unwrap();
        let addr = server.addr();
        sim.client("asks", async move |net| {
            let mut all = Vec::new();
            let mut frames = 0;
            for n in 0..8 {
                let mut me = net.connect(addr).await?;
                for _ in 0..=n {
                    me.send("x\n").await?;
                    assert_eq!(me.line().await?.as_deref(), Some("x"));
                    frames += 1;
                }
                all.push(me);
                // Once in a while longer than figures are kept back.
                net.sleep(SECOND / 50 * n).await;
            }
            for round in 0..3 {
                net.sleep(SECOND).await;
                all[0].send("count\n").await?;
                let told = all[0].line().await?;
                assert_eq!(told, Some(format!("{} {}", frames + round, all.len())));
            }
            Ok(())
        });
        sim.run_until_done();
        sim.finish();
    });
}

#[test]
fn newcomers_of_a_burst_are_told_while_they_wait() {
    const PEERS: u64 = 12;
    let most = Rc::new(Cell::new(0));
    let seen = most.clone();
    Sim::seeds(30).faults(Faults::none()).run(move |sim| {
        let server = Server::bind("10.0.0.1:7000").shards(2).framing(Lines::default());
        let server = server.server_limits(ServerLimits::default().connections_max(3));
        let addr = sim.serve(server, |_shard| Counts);
        // Each place goes from peer to peer, and all of them came at once.
        for n in 0..PEERS {
            let most = seen.clone();
            sim.client(format!("peer {n}"), async move |net| {
                let mut me = net.connect(addr).await?;
                me.send("x\n").await?;
                assert_eq!(me.line().await?.as_deref(), Some("x"));
                net.sleep(SECOND).await;
                me.send("newcomers\n").await?;
                let told = me.line().await?.unwrap_or_default();
                let (waiting, unopened) = told.split_once(' ').unwrap();
                assert_eq!(waiting, unopened);
                most.set(most.get().max(waiting.parse::<u64>()?));
                Ok(())
            });
        }
        sim.run_until_done();
        sim.finish();
    });
    assert!(most.get() > 0, "a burst comes with more than there are places");
}
