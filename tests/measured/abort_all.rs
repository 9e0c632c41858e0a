//! An abort of as many connections as a ring holds here.

use std::time::Instant;

use ringserve::CloseReason;
use ringserve_tests::crowd;
use ringserve_tests::{Lab, alone, no_time_limits};

#[test]
#[ignore = "the child process of the other test here, which starts it; alone, with a server at that address: echo 127.0.0.1:7000 | RINGSERVE_TEST_CHILD=1 cargo test -p ringserve-tests --test measured abort_all::child_holds_connections -- --exact --ignored --nocapture"]
fn child_holds_connections() {
    crowd::hold(&[0]);
}

#[test]
fn an_abort_ends_eighteen_thousand_connections_at_once() {
    if !alone(an_abort_ends_eighteen_thousand_connections_at_once) {
        return;
    }
    let lab = Lab::start(no_time_limits());
    let Some((mut child, connections)) = crowd::of(&lab, child_holds_connections, 1) else { return };
    let started = Instant::now();
    let report = lab.abort();
    eprintln!("{connections} connections were aborted in {:?}", started.elapsed());
    assert_eq!(report.counters.closed_for(CloseReason::ServerAborted), connections as u64);
    // At most the cancel of the accept.
    assert!(report.shards[0].driver.cancels <= 1, "{:?}", report.shards[0].driver);
    child.say("done");
}
