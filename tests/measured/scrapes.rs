//! Reading a server's state costs the same however many connections it has, and costs its shards
//! nothing.
//!
//! The connections are those of a scripted kernel: there are fewer descriptors than connections
//! here. A million on 53 shards, by hand: `cargo test --release -p ringserve-tests --test measured
//! scrapes::a_million -- --ignored --nocapture`.

#[path = "../../benches/support/scripted.rs"]
mod scripted;

use std::convert::Infallible;
use std::fmt;
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use ringserve::framing::Raw;
use ringserve::inspect::Query;
use ringserve::limits::{ServerLimits, StallOptions};
use ringserve::{Cx, Frame, Server, ServerControl, Service};
use ringserve_server::internals::start_on;
use ringserve_tests::alone;
use rustix::time::{ClockId, clock_gettime};
use stats_alloc::Region;

use self::scripted::{Script, Scripted};

/// Slots that a shard reads in a turn, for an inspection.
const PAGE: u64 = 4096;

/// A service whose connections never send anything.
struct Silent;

impl Service for Silent {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, _: &Cx<'_, ()>, _: Frame) -> Result<(), Infallible> {
        Ok(())
    }
}

/// A server with this many idle connections on each shard. It runs until the end of the process:
/// the script has no end.
fn idle_server(shards: u64, connections: u64) -> ServerControl {
    let (over, _never) = sync_channel(1);
    let (listener, frame, sends, rounds) = (0, Vec::new(), 0, 0);
    // The listener of a shard that never comes: so no round begins, and the others answer
    // questions.
    let script = Script { connections, listener, shards: shards + 1, frame, sends, rounds, over };
    let room = ServerLimits::default().connections_max((shards * connections).max(1000) as usize * 2);
    let server = Server::bind("127.0.0.1:0").shards(shards as usize).framing(Raw).server_limits(room);
    let drivers = Scripted::new(script).unwrap();
    let running = start_on(server.stalls(StallOptions::off()), drivers, |_| Silent).unwrap();
    let control = running.control();
    std::mem::forget(running);
    while control.stats_now().connections < (shards * connections) as usize {
        std::thread::yield_now();
    }
    control
}

/// The time for which this thread ran.
fn ran() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap()
}

/// Cost of one scrape.
#[derive(Clone, Copy)]
struct Scrape {
    time: Duration,
    bytes: usize,
    allocations: usize,
}

impl fmt::Debug for Scrape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}, {} bytes, {} allocations", self.time, self.bytes, self.allocations)
    }
}

fn scrape(control: &ServerControl) -> Scrape {
    let (region, began) = (Region::new(crate::ALLOCATOR), ran());
    let mut text = String::new();
    control.metrics().write_prometheus(&mut text);
    Scrape { time: ran() - began, bytes: text.len(), allocations: region.change().allocations }
}

#[test]
fn scrape_takes_the_same_with_few_and_with_many_connections() {
    if !alone(scrape_takes_the_same_with_few_and_with_many_connections) {
        return;
    }
    const MANY: u64 = 300_000;
    let servers = [idle_server(1, 10), idle_server(1, MANY)];
    let turns = |of: &ServerControl| of.stats_now().shards[0].driver.turns;
    let before = servers.each_ref().map(turns);
    // The fastest of each, in turn: other work of the machine is not counted.
    let mut least = servers.each_ref().map(scrape);
    for _ in 0..300 {
        for (least, server) in least.iter_mut().zip(&servers) {
            let now = scrape(server);
            *least = if now.time < least.time { now } else { *least };
        }
    }
    println!("{} connections: {:?}; {MANY}: {:?}", 10, least[0], least[1]);
    let [few, many] = least;
    // Numbers have more digits.
    assert!(many.bytes < few.bytes + 300 && many.allocations == few.allocations, "{least:?}");
    // A nanosecond for each connection would double it.
    assert!(many.time < few.time * 3 / 2, "{least:?}");
    let after = servers.each_ref().map(turns);
    for (before, after) in before.iter().zip(after) {
        // Each of both questions is one turn, and one in which its answer is published.
        assert!(after - before <= 4, "{} turns for 300 scrapes", after - before);
    }
    // Readings of each connection are made in pages, and other turns come between.
    let [_, many] = &servers;
    let before = turns(many);
    let found = many.inspect(Query::connections().within(Duration::from_secs(60)));
    assert_eq!((found.sums.connections, found.connections.len()), (MANY, 20));
    assert!(turns(many) - before >= MANY / PAGE, "{} turns", turns(many) - before);
}

/// A million on 53 shards.
#[test]
#[ignore = "it takes half a gigabyte, and tells times: cargo test --release -p ringserve-tests --test measured scrapes::a_million -- --ignored --nocapture"]
fn a_million() {
    for (shards, connections) in [(53, 10), (53, 18_868)] {
        let server = idle_server(shards, connections);
        let mut all: Vec<Scrape> = (0..200).map(|_| scrape(&server)).collect();
        all.sort_by_key(|scrape| scrape.time);
        println!("{} connections: median {:?}, longest {:?}", shards * connections, all[100], all[199].time);
        let began = server.stats_now().shards.iter().map(|shard| shard.driver.turns).sum::<u64>();
        let found = server.inspect(Query::connections().within(Duration::from_secs(60)));
        let turns = server.stats_now().shards.iter().map(|shard| shard.driver.turns).sum::<u64>() - began;
        println!("  an inspection looked at {} in {turns} turns", found.sums.connections);
    }
}
