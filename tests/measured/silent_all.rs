//! As many connections as a ring holds here, which fall silent together, and close together.

use std::time::Duration;

use ringserve::CloseReason;
use ringserve_tests::crowd::{self, Cpu};
use ringserve_tests::{Lab, SOON, alone, eventually, no_time_limits, on_epoll};

/// Half a frame: its receive is probed within seconds.
#[test]
#[ignore = "the child process of the other test here, which starts it; alone, with a server at that address: echo 127.0.0.1:7000 | RINGSERVE_TEST_CHILD=1 cargo test -p ringserve-tests --test measured silent_all::child_holds_connections -- --exact --ignored --nocapture"]
fn child_holds_connections() {
    crowd::hold(&[0, 0]);
}

#[test]
fn silent_crowd_is_probed_and_closed_without_cancels() {
    if !alone(silent_crowd_is_probed_and_closed_without_cancels) {
        return;
    }
    // Its peers do not close, so each waits until this is over.
    let lab = Lab::start(no_time_limits().linger_timeout(Duration::from_secs(2)));
    let Some((mut child, connections)) = crowd::of(&lab, child_holds_connections, 2) else { return };
    let report = || {
        // Rarely, since each costs the shard a turn.
        std::thread::park_timeout(Duration::from_millis(100));
        lab.stats()
    };
    let driver = || report().shards[0].driver;
    let began = Cpu::now();
    if !on_epoll() {
        eventually("each is looked at", SOON, || driver().probes >= connections as u64);
    }
    let probed = Cpu::now();
    began.print_each(probed, connections, "a probe");
    let stats = driver();
    let armed = [stats.probes, stats.receives_armed - stats.receives_parked];
    let probes = if on_epoll() { 0 } else { connections as u64 };
    assert_eq!(
        (armed, stats.cancels),
        ([probes, connections as u64], 0),
        "each is looked at once, and none armed again"
    );
    lab.running.shutdown();
    // The last reading before the shard is gone.
    let mut closed = probed;
    eventually("all are closed", SOON, || {
        let left = report().connections;
        let now = Cpu::now();
        closed = if left > 0 { now } else { closed };
        left == 0
    });
    probed.print_each(closed, connections, "a close");
    let report = lab.ended();
    assert_eq!(report.counters.closed_for(CloseReason::Shutdown), connections as u64);
    assert!(report.shards[0].driver.cancels <= 1, "{:?}", report.shards[0].driver);
    child.say("done");
}
