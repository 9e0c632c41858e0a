//! Watching a server that runs, and its end.

use std::io::{self, Write};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use ringserve::stats::ServerStats;
use ringserve::{CloseReason, ServerHandle};
use tracing_subscriber::filter::LevelFilter;

use crate::{SOON, eventually};

/// Waits until exactly `count` connections ended for `reason`.
#[track_caller]
pub fn closed_for(running: &ServerHandle, reason: CloseReason, count: u64) {
    let what = format!("{count} connections end as {}", reason.name());
    let last = report_when(running, &what, |report| report.counters.closed_for(reason) >= count);
    assert_eq!(last.counters.closed_for(reason), count, "{what}");
}

/// Waits until the server holds `connections`.
#[track_caller]
pub fn holds(running: &ServerHandle, connections: usize) {
    report_when(running, &format!("the server holds {connections}"), |report| {
        report.connections == connections
    });
}

/// Waits until the server holds `connections` to upstreams, those on their way included.
#[track_caller]
pub fn holds_upstreams(running: &ServerHandle, connections: usize) {
    report_when(running, &format!("the server holds {connections} to upstreams"), |report| {
        report.upstreams.connections == connections
    });
}

/// Waits until `count` connections to upstreams ended for `reason`.
#[track_caller]
pub fn upstreams_closed_for(running: &ServerHandle, reason: CloseReason, count: u64) {
    report_when(running, &format!("{count} upstreams end as {}", reason.name()), |report| {
        report.upstreams.counters.closed_for(reason) == count
    });
}

/// Waits until every shard began and ended a turn: what was known to one before has been acted on.
/// The first report may end a turn that began earlier.
#[track_caller]
pub fn a_turn_passes(running: &ServerHandle) {
    for _ in 0..2 {
        eventually("every shard answers", SOON, || running.stats_now().stale_shards().next().is_none());
    }
}

/// The first report of which that is true. Panics with the last one if it does not come.
#[track_caller]
fn report_when(running: &ServerHandle, what: &str, so: impl Fn(&ServerStats) -> bool) -> ServerStats {
    let (mut last, started) = (ServerStats::default(), Instant::now());
    eventually(what, SOON + SOON, || {
        last = running.stats_now();
        let is_so = so(&last);
        assert!(is_so || started.elapsed() < SOON, "it did not happen that {what}: {last:?}");
        is_so
    });
    last
}

/// Shuts down, waits, and checks what every server leaves behind: nothing.
#[track_caller]
pub fn finish(running: ServerHandle) -> ServerStats {
    running.shutdown();
    ended(running)
}

/// Waits for the end that was asked for, and checks that nothing is left.
#[track_caller]
pub fn ended(running: ServerHandle) -> ServerStats {
    let report = running.wait().expect("every shard ends in order");
    nothing_left(&report);
    report
}

/// The end of every server: no connection, no receive buffer in use, and as many closes as opens.
#[track_caller]
fn nothing_left(report: &ServerStats) {
    assert_eq!(report.connections, 0, "connections left: {report:?}");
    assert_eq!(report.upstreams.connections, 0, "connections to upstreams left: {report:?}");
    let ups = &report.upstreams.counters;
    assert_eq!(ups.opened, ups.closed, "of upstreams, opened and closed differ: {ups:?}");
    let counters = &report.counters;
    assert_eq!(counters.opened, counters.closed, "opened and closed differ: {counters:?}");
    let by_reason: u64 = counters.reasons().map(|(_, count)| count).sum();
    assert_eq!(by_reason, counters.closed, "every close has one reason: {counters:?}");
    for shard in &report.shards {
        let buffers = shard.buffers;
        assert_eq!(buffers.leased, 0, "a receive buffer is still leased: {buffers:?}");
        assert_eq!(buffers.total, buffers.free + buffers.with_kernel, "buffers do not add up: {buffers:?}");
    }
}

/// The log of this process.
#[derive(Clone, Default)]
pub struct Logged(Arc<Mutex<Vec<u8>>>);

impl Logged {
    /// Collects all lines of this level and above, from now on.
    pub fn from(level: LevelFilter) -> Logged {
        let logged = Logged::default();
        let writer = logged.clone();
        tracing_subscriber::fmt()
            .with_ansi(false)
            .with_max_level(level)
            .with_writer(move || writer.clone())
            .init();
        logged
    }

    pub fn text(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().clone()).unwrap()
    }

    /// The lines logged since the last call.
    pub fn take(&self) -> String {
        String::from_utf8(std::mem::take(&mut *self.0.lock().unwrap())).unwrap()
    }
}

impl Write for Logged {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
