//! What an idle connection costs: memory of the server's process and of the kernel, and CPU time.

mod holder;
mod holders;
mod memory;
mod progress;
mod slabs;
mod split;

use std::io;
use std::thread::sleep;
use std::time::{Duration, Instant};

use self::holders::{Holders, Start, Task};
use self::memory::{Kernel, anonymous_bytes, tcp_sockets};
use self::progress::Progress;
use self::slabs::Slabs;
use crate::child::Child;
use crate::schedstat::Schedstat;
use crate::servers::Server;
use crate::table::Table;

pub(crate) use self::holder::{Plan as HolderPlan, run as hold};
pub(crate) use self::split::Sources;

/// Connections that are open before counting starts, so that tables and pools have their first chunks.
pub(crate) const FROM: usize = 1000;

/// As many for each shard, since the kernel does not spread them evenly.
pub(crate) const FROM_PER_SHARD: usize = 50;

/// Memory of the kernel and the server for a connection with both its ends, rounded up: 11 800 bytes were measured.
const PAIR_BYTES: u64 = 13 * 1024;

/// Memory that the machine keeps: what else runs there must not be ended for want of it.
const RESERVE_BYTES: u64 = 2 << 30;

/// How long the kernel may take to free the sockets of one server, before the next one is measured.
const GONE_MAX: Duration = Duration::from_secs(60);

/// What to measure.
pub(crate) struct Plan {
    /// Servers, and with how many shards.
    pub(crate) servers: Vec<(&'static Server, usize)>,
    pub(crate) connections: usize,
    pub(crate) bytes: usize,
    pub(crate) cpu: Option<usize>,
    pub(crate) seconds: u64,
    /// Connections that one process holds at most.
    pub(crate) per_process: usize,
    pub(crate) slabs: bool,
}

/// Connections that are open before counting starts.
pub(crate) fn counted_from(shards: usize) -> usize {
    FROM.max(FROM_PER_SHARD * shards)
}

/// Prints a row for each server.
pub(crate) fn run(plan: &Plan) -> io::Result<()> {
    enough_memory(plan.connections, Kernel::now()?.available)?;
    let mut table = Table::new(&[
        "server",
        "shards",
        "connections",
        "user bytes",
        "kernel bytes, both ends",
        "opened in s",
        "connections/s",
        "idle CPU µs/s",
    ]);
    for &(server, shards) in &plan.servers {
        let sockets = tcp_sockets()?;
        let row = one_server(plan, server, shards)
            .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", server.name)))?;
        table.row(row);
        wait_until_gone(sockets + plan.connections as u64 / 100)?;
    }
    print!("{}", table.render());
    Ok(())
}

/// Refuses what the machine cannot hold, before anything is opened.
fn enough_memory(connections: usize, available: u64) -> io::Result<()> {
    let needed = connections as u64 * PAIR_BYTES + RESERVE_BYTES;
    if needed <= available {
        return Ok(());
    }
    let most = available.saturating_sub(RESERVE_BYTES) / PAIR_BYTES;
    Err(io::Error::other(format!(
        "--connections {connections} needs about {} MiB, with {} KiB for the two ends of a connection and {} MiB left for the rest \
         of the machine, and MemAvailable is {} MiB; ask for {most} or fewer",
        needed >> 20,
        PAIR_BYTES >> 10,
        RESERVE_BYTES >> 20,
        available >> 20,
    )))
}

fn one_server(plan: &Plan, server: &Server, shards: usize) -> io::Result<Vec<String>> {
    let start = Kernel::now()?;
    let child = Child::start_sized(server, plan.cpu, shards)?;
    let from = counted_from(shards);
    let mut holders = Holders::start(&Start {
        server: child.address,
        processes: split::parts(plan.connections, plan.per_process),
        connections: plan.connections,
        connections_each: split::connections_each()?,
        bytes: plan.bytes,
    })?;
    let slabs = || if plan.slabs { Slabs::now().map(Some) } else { Ok(None) };
    let enough_left = || match Kernel::now()?.left_since(start) {
        left if left >= RESERVE_BYTES => Ok(()),
        left => Err(io::Error::other(format!(
            "stopped, since {} MiB of memory are left; ask for fewer --connections",
            left >> 20
        ))),
    };

    holders.run(Task::Hold(from), |_| enough_left())?;
    let before = (anonymous_bytes(child.pid())?, Kernel::now()?, slabs()?);
    let mut progress = Progress::new(server.name, "open", from, plan.connections);
    holders.run(Task::Hold(plan.connections), |done| {
        progress.at(done);
        enough_left()
    })?;
    let opening = progress.took();

    let busy = Schedstat::of_process(child.pid())?;
    sleep(Duration::from_secs(plan.seconds));
    let idle = Schedstat::of_process(child.pid())?.since(busy).cpu_ns;
    let after = (anonymous_bytes(child.pid())?, Kernel::now()?, slabs()?);

    let mut progress = Progress::new(server.name, "answered again", 0, plan.connections);
    holders.run(Task::Check, |done| {
        progress.at(done);
        Ok(())
    })?;
    eprintln!(
        "{}: all {} connections answered again in {:.1} s",
        server.name,
        plan.connections,
        progress.took().as_secs_f64()
    );

    let counted = plan.connections - from;
    let each = |before: u64, after: u64| after.saturating_sub(before) as f64 / counted as f64;
    eprintln!(
        "{}: {} -> {} bytes of anonymous memory; of the kernel's, for each connection: slab {:.0}, stacks and tables {:.0}, socket \
         buffers {:.0}; MemAvailable, sockets' inodes counted as used, fell by {:.0}",
        server.name,
        before.0,
        after.0,
        each(before.1.slab, after.1.slab),
        each(before.1.others, after.1.others),
        each(before.1.buffers, after.1.buffers),
        each(after.1.left_since(start), before.1.left_since(start)),
    );
    if let (Some(before), Some(after)) = (&before.2, &after.2) {
        for (cache, bytes) in after.growth(before) {
            eprintln!(
                "{}: slab {cache}: {:.0} for each connection",
                server.name,
                bytes as f64 / counted as f64
            );
        }
    }
    Ok(vec![
        server.name.to_owned(),
        shards.to_string(),
        plan.connections.to_string(),
        format!("{:.0}", each(before.0, after.0)),
        format!("{:.0}", each(before.1.used(), after.1.used())),
        format!("{:.1}", opening.as_secs_f64()),
        format!("{:.0}", counted as f64 / opening.as_secs_f64()),
        format!("{:.0}", idle as f64 / 1000.0 / plan.seconds as f64),
    ])
}

/// Waits until the machine has `sockets` TCP sockets or fewer, so that one server's do not count as another's.
fn wait_until_gone(sockets: u64) -> io::Result<()> {
    let began = Instant::now();
    while tcp_sockets()? > sockets {
        if began.elapsed() > GONE_MAX {
            eprintln!(
                "warning: the machine has more than {sockets} TCP sockets still; the kernel bytes of the next server may be too few"
            );
            break;
        }
        sleep(Duration::from_millis(50));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_refused_with_what_does() {
        let available = RESERVE_BYTES + 1000 * PAIR_BYTES;
        assert!(enough_memory(1000, available).is_ok());
        let why = enough_memory(1001, available).unwrap_err().to_string();
        assert!(why.contains("--connections 1001") && why.ends_with("ask for 1000 or fewer"), "{why}");
        assert!(enough_memory(1, 0).unwrap_err().to_string().ends_with("ask for 0 or fewer"));
    }
}
