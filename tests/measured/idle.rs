//! Idleness of a server with nothing to do, with connections or without.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use ringserve_tests::Bounds;
use ringserve_tests::{Client, Lab, SOON, alone, eventually, order};

const QUIET: Duration = Duration::from_secs(10);

/// Number of times that the shard's thread was put to sleep.
fn sleeps() -> u64 {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap().flatten();
    let shards = tasks.filter(|task| {
        std::fs::read_to_string(task.path().join("comm")).is_ok_and(|name| name.trim() == "ringserve-0")
    });
    shards
        .map(|task| {
            let status = std::fs::read_to_string(task.path().join("status")).unwrap();
            let line = status.lines().find(|line| line.starts_with("voluntary_ctxt_switches")).unwrap();
            line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap()
        })
        .sum()
}

#[test]
fn a_server_with_idle_connections_wakes_up_for_nothing() {
    if !alone(a_server_with_idle_connections_wakes_up_for_nothing) {
        return;
    }
    // With the default limits.
    let lab = Lab::start(Bounds::default());
    let mut clients: Vec<Client> = (0..200).map(|_| lab.client()).collect();
    clients[..100].iter_mut().for_each(|client| client.echoes(""));
    let mut waits = lab.client();
    waits.send(order::gate(""));
    lab.parked(1);
    lab.holds(201);
    // No peer ever sends: these are waits for events that must not happen.
    let (never, nothing) = channel::<()>();
    let wait = |time| assert_eq!(nothing.recv_timeout(time), Err(RecvTimeoutError::Timeout));
    let rests_for = |time: Duration| {
        let mut slept = sleeps();
        eventually("the shard rests", SOON, || {
            wait(time);
            std::mem::replace(&mut slept, sleeps()) == slept
        });
        slept
    };
    // It checks once, a second later, whether the connection whose call waits was reset.
    rests_for(Duration::from_millis(1500));
    let before = lab.stats().shards[0].driver;
    // It falls asleep after its answer.
    let slept = rests_for(Duration::from_millis(50));
    // Reading the figures wakes no shard either.
    (0..1000).for_each(|_| assert_eq!(lab.running.stats().connections, 201));
    wait(QUIET);
    drop(never);
    // The wheel of timers may turn its third level in that time, which it does every 68 s. And 10 s
    // after its reply each peer is checked for the limit on slow takers: in one step of the wheel,
    // or in two; the second one's counts are published a tenth of a second later.
    let woke = sleeps() - slept;
    assert!(woke <= 4, "the shard's thread woke up {woke} times");
    let after = lab.stats().shards[0].driver;
    // The turn that rested, and the one that answers.
    let turns = after.turns - before.turns;
    assert!(turns <= 2 + woke, "{turns} turns in {QUIET:?}: before {before:?}, after {after:?}");
    clients.pop().unwrap().echoes("alive");
    lab.abort();
}
