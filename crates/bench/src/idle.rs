//! What an idle connection costs: memory of the server's process, and CPU time.

use std::fs;
use std::io;
use std::thread::sleep;
use std::time::Duration;

use crate::child::Child;
use crate::schedstat::Schedstat;
use crate::servers::Server;
use crate::steps::{Load, Shape};
use crate::table::Table;

/// Connections that are open before counting starts, so that tables and pools have their first chunks.
const FROM: usize = 1000;

/// What to measure.
pub(crate) struct Plan {
    pub(crate) servers: Vec<&'static Server>,
    pub(crate) connections: usize,
    pub(crate) bytes: usize,
    pub(crate) cpu: usize,
    pub(crate) seconds: u64,
}

/// Prints a row for each server.
pub(crate) fn run(plan: &Plan) -> io::Result<()> {
    let mut table = Table::new(&["server", "connections", "bytes/connection", "idle CPU µs/s"]);
    for server in &plan.servers {
        let child = Child::start(server, plan.cpu, true)?;
        let shape = Shape { bytes: plan.bytes, pipeline: 1, lines: true };
        let mut load = Load::connect(child.address, 0, shape)?;
        load.grow(FROM, 1)?;
        let before = anonymous_bytes(child.pid())?;
        load.grow(plan.connections, 1)?;
        let after = anonymous_bytes(child.pid())?;
        let busy = Schedstat::of_process(child.pid())?;
        sleep(Duration::from_secs(plan.seconds));
        let idle = Schedstat::of_process(child.pid())?.since(busy).cpu_ns;
        let each = after.saturating_sub(before) as f64 / (plan.connections - FROM) as f64;
        table.row(vec![
            server.name.to_owned(),
            plan.connections.to_string(),
            format!("{each:.0}"),
            format!("{:.0}", idle as f64 / 1000.0 / plan.seconds as f64),
        ]);
        eprintln!("{}: {} -> {} bytes of anonymous memory", server.name, before, after);
    }
    print!("{}", table.render());
    Ok(())
}

/// `RssAnon` of a process.
fn anonymous_bytes(pid: u32) -> io::Result<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let kib = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kib.map(|kib| kib * 1024).ok_or_else(|| io::Error::other("no RssAnon in /proc/PID/status"))
}
