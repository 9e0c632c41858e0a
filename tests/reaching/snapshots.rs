//! Figures that shards publish: they follow the events, and no reader waits for a shard.

use std::time::{Duration, Instant};

use ringserve::stats::ServerStats;
use ringserve_tests::{Lab, SOON, eventually, no_time_limits, order};

/// The bound for the delay of published figures, plus the delay of a test's thread.
const LATE: Duration = Duration::from_millis(100);

#[test]
fn last_figures_of_a_shard_that_rests_are_published() {
    let lab = Lab::start(no_time_limits());
    let mut client = lab.client();
    for round in 1..=3 {
        // Faster than figures are published: those of the last one remain for the shard when it
        // rests.
        (0..20).for_each(|_| client.echoes("x"));
        eventually("what was counted is published", SOON, || {
            lab.running.stats().counters.frames == 20 * round
        });
    }
    drop(client);
    eventually("the end is published", SOON, || lab.running.stats().counters.closed == 1);
    let ended = lab.finish();
    assert_eq!((ended.counters.frames, ended.counters.closed), (60, 1));
}

#[test]
fn figures_of_a_blocked_shard_come_at_once_with_a_mark() {
    let lab = Lab::on_shards(2, no_time_limits());
    let control = lab.running.control();
    let mut busy = lab.client();
    let blocked: usize = busy.ask_text(order::shard()).parse().unwrap();
    eventually("it is published", SOON, || lab.running.stats().shards[blocked].counters.frames == 1);
    assert_eq!(lab.running.stats().stale_shards().count(), 0);
    busy.send(order::block());
    eventually("the shard is blocked", SOON, || lab.shared.block.came() == 1);
    let read = || {
        let started = Instant::now();
        let stats = lab.running.stats();
        assert!(started.elapsed() < LATE, "it took {:?}", started.elapsed());
        stats
    };
    let of = |stats: &ServerStats| stats.shards[blocked].counters.frames;
    assert_eq!(of(&read()), 1, "its figures are those from before");
    eventually("the shard is marked", SOON, || read().stale_shards().eq([blocked]));
    assert_eq!((read().shards.len(), of(&read())), (2, 1));
    lab.shared.block.end();
    busy.recv();
    eventually("the mark is gone", SOON, || {
        let stats = read();
        stats.stale_shards().count() == 0 && of(&stats) == 2
    });
    drop(busy);
    lab.finish();
    assert_eq!(control.stats().counters.frames, 2, "those of shards that ended stay");
}

#[test]
fn figures_of_all_shards_are_there_while_they_work() {
    let lab = Lab::on_shards(2, no_time_limits());
    let mut clients: Vec<_> = (0..8).map(|_| lab.client()).collect();
    let mut last = ServerStats::default();
    for _ in 0..200 {
        clients.iter_mut().for_each(|client| client.echoes("x"));
        let stats = lab.running.stats();
        assert!(stats.counters.frames >= last.counters.frames, "no figure falls");
        assert!(stats.counters.opened >= last.counters.opened && stats.driver_turns() >= last.driver_turns());
        last = stats;
    }
    drop(clients);
    lab.finish();
}

trait Turns {
    fn driver_turns(&self) -> u64;
}

impl Turns for ServerStats {
    fn driver_turns(&self) -> u64 {
        self.shards.iter().map(|shard| shard.driver.turns).sum()
    }
}
