//! The cost of an idle connection: memory of the server's process and of the kernel, and CPU time.

mod holder;
mod holders;
mod memory;
mod page;
mod progress;
mod reading;
mod slabs;
mod split;

use std::net::SocketAddr;
use std::thread::sleep;
use std::time::{Duration, Instant};
use std::{fs, io};

use self::holders::{Holders, Start, Task};
use self::memory::{Kernel, tcp_sockets};
use self::page::Page;
use self::progress::Progress;
use self::reading::Reading;
use crate::child::Child;
use crate::load::Target;
use crate::schedstat::Schedstat;
use crate::table::Table;
use crate::wire::Layer;

pub(crate) use self::holder::{Plan as HolderPlan, run as hold};
pub(crate) use self::split::Sources;

/// Connections that are open before counting starts, so that tables and pools have their first
/// chunks.
pub(crate) const FROM: usize = 1000;

/// The same per shard, since the kernel does not spread them evenly.
pub(crate) const FROM_PER_SHARD: usize = 50;

/// Memory of the kernel and the server for a connection with both its ends, rounded up: 9300 bytes
/// were measured with ringserve at a million.
const PAIR_BYTES: u64 = 9728;

/// Memory that the machine keeps, so that other programs are not ended for lack of it.
const RESERVE_BYTES: u64 = 2 << 30;

/// Time limit for the kernel to free the sockets of a server: it frees 19 000 per second. Other
/// programs may open some meanwhile.
const GONE_MAX: Duration = Duration::from_secs(10);

/// The plan of a measurement.
pub(crate) struct Plan {
    /// Servers to be started, with their numbers of shards.
    pub(crate) servers: Vec<(Target, usize)>,
    pub(crate) connections: usize,
    pub(crate) bytes: usize,
    pub(crate) cpu: Option<usize>,
    /// Time between the last connection and the measurement.
    pub(crate) settle: Duration,
    pub(crate) seconds: u64,
    /// The most connections of one process.
    pub(crate) per_process: usize,
    pub(crate) slabs: bool,
    pub(crate) drop_caches: bool,
    pub(crate) layer: Layer,
}

/// Connections that are open before counting starts.
pub(crate) fn counted_from(shards: usize) -> usize {
    FROM.max(FROM_PER_SHARD * shards)
}

/// Prints a row for each server.
pub(crate) fn run(plan: &Plan) -> io::Result<()> {
    enough_memory(plan.connections, Kernel::now()?.available)?;
    if !rustix::process::geteuid().is_root() {
        enough_open_files(plan.connections, &fs::read_to_string("/proc/sys/fs/file-nr")?)?;
    }
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
    let mut failed = Vec::new();
    for (server, shards) in &plan.servers {
        match one_server(plan, server, *shards) {
            Ok(row) => table.row(row),
            Err(error) => {
                eprintln!("{}: {error}", server.name());
                failed.push(server.name());
            }
        }
    }
    print!("{}", table.render());
    if !failed.is_empty() {
        return Err(io::Error::other(format!("not measured, for the reasons above: {}", failed.join(", "))));
    }
    Ok(())
}

/// Refuses connections for which the machine has no memory, before any is opened.
fn enough_memory(connections: usize, available: u64) -> io::Result<()> {
    let needed = connections as u64 * PAIR_BYTES + RESERVE_BYTES;
    if needed <= available {
        return Ok(());
    }
    let most = available.saturating_sub(RESERVE_BYTES) / PAIR_BYTES;
    Err(io::Error::other(format!(
        "--connections {connections} needs about {} MiB, with {} bytes for the two ends of a connection and {} MiB left for the rest \
         of the machine, and MemAvailable is {} MiB; ask for {most} or fewer",
        needed >> 20,
        PAIR_BYTES,
        RESERVE_BYTES >> 20,
        available >> 20,
    )))
}

/// Refuses more connections than the whole machine may have open files, which limits all users
/// except root. `file_nr` has the open ones, 0, and the limit.
fn enough_open_files(connections: usize, file_nr: &str) -> io::Result<()> {
    let mut numbers = file_nr.split_ascii_whitespace().map(str::parse::<u64>);
    let (Some(Ok(open)), _, Some(Ok(max))) = (numbers.next(), numbers.next(), numbers.next()) else {
        return Err(io::Error::other(format!("/proc/sys/fs/file-nr reads {file_nr:?}, not three numbers")));
    };
    let needed = open + 2 * connections as u64;
    if needed <= max {
        return Ok(());
    }
    Err(io::Error::other(format!(
        "--connections {connections}: with both ends of each the machine would have {needed} open files, and fs.file-max is {max}; \
         raise it (sysctl -w fs.file-max={needed}), ask for {} or fewer, or be root",
        max.saturating_sub(open) / 2
    )))
}

fn start(plan: &Plan, server: &Target, shards: usize) -> io::Result<Child> {
    match server {
        Target::Known(server) => Child::start_sized(server.name, plan.cpu, shards),
        Target::Program { name, path, mode } => Child::start_program(name, path, mode, plan.cpu),
        Target::Running { .. } => Err(io::Error::other("what it costs is seen from its start on")),
    }
}

fn one_server(plan: &Plan, server: &Target, shards: usize) -> io::Result<Vec<String>> {
    let name = server.name();
    let before_start = Kernel::now()?;
    let child = start(plan, server, shards)?;
    let from = counted_from(shards);
    let mut holders = Holders::start(&Start {
        server: child.address,
        processes: split::parts(plan.connections, plan.per_process),
        connections: plan.connections,
        connections_each: split::connections_each()?,
        bytes: plan.bytes,
        layer: plan.layer,
    })?;
    let enough_left = || match Kernel::now()?.left_since(before_start) {
        left if left >= RESERVE_BYTES => Ok(()),
        left => Err(io::Error::other(format!(
            "stopped, since {} MiB of memory are left; ask for fewer --connections",
            left >> 20
        ))),
    };

    holders.run(Task::Hold(from), |_| enough_left())?;
    let before = Reading::now(plan, child.pid())?;
    let mut progress = Progress::new(&name, "open", from, plan.connections);
    holders.run(Task::Hold(plan.connections), |done| {
        progress.at(done);
        enough_left()
    })?;
    let opening = progress.took();

    sleep(plan.settle);
    let busy = Schedstat::of_process(child.pid())?;
    sleep(Duration::from_secs(plan.seconds));
    let idle = Schedstat::of_process(child.pid())?.since(busy).cpu_ns;
    let after = Reading::now(plan, child.pid())?;
    if let Some(admin) = child.admin {
        watch_page(plan, &name, child.pid(), admin)?;
    }

    let mut progress = Progress::new(&name, "answered again", 0, plan.connections);
    let answered = holders.run(Task::Check, |done| {
        progress.at(done);
        enough_left()
    })?;
    if answered != plan.connections {
        return Err(io::Error::other(format!(
            "{answered} of {} connections answered again",
            plan.connections
        )));
    }
    eprintln!(
        "{name}: all {} connections answered again in {:.1} s",
        plan.connections,
        progress.took().as_secs_f64()
    );

    let counted = plan.connections - from;
    after.explain(&name, &before, counted);
    let (user, kernel) = after.growth(&before, counted);
    end(child, holders, plan.connections)?;
    Ok(vec![
        name,
        shards.to_string(),
        plan.connections.to_string(),
        format!("{user:.0}"),
        format!("{kernel:.0}"),
        format!("{:.1}", opening.as_secs_f64()),
        format!("{:.0}", counted as f64 / opening.as_secs_f64()),
        format!("{:.0}", idle as f64 / 1000.0 / plan.seconds as f64),
    ])
}

/// Prints on standard error the cost of an open page for the server's threads.
fn watch_page(plan: &Plan, name: &str, server: u32, admin: SocketAddr) -> io::Result<()> {
    let endpoint = || Schedstat::of_threads(server, |thread| thread.starts_with("ringserve-admin"));
    let shards = || Schedstat::of_threads(server, |thread| !thread.starts_with("ringserve-admin"));
    let asked = Instant::now();
    let mut page = Page::open(admin)?;
    let first = asked.elapsed();
    let before = (endpoint()?, shards()?);
    let reports = page.watch(Duration::from_secs(plan.seconds))?;
    let spent = (endpoint()?.since(before.0), shards()?.since(before.1));
    let each_second = |spent: Schedstat| spent.cpu_ns as f64 / 1000.0 / plan.seconds as f64;
    eprintln!(
        "{name}: an open page had its first report after {:.2} s and {reports} in {} s, for {:.0} µs/s of the endpoint's thread \
         and {:.0} µs/s of all others",
        first.as_secs_f64(),
        plan.seconds,
        each_second(spent.0),
        each_second(spent.1)
    );
    Ok(())
}

/// Ends a server and its connections, and waits until the kernel has freed their sockets, so that
/// they are not counted for the next server.
fn end(child: Child, holders: Holders, connections: usize) -> io::Result<()> {
    let freed = connections as u64 * 2 * 99 / 100;
    let few = tcp_sockets()?.saturating_sub(freed);
    drop((holders, child));
    let began = Instant::now();
    while tcp_sockets()? > few && began.elapsed() < GONE_MAX {
        sleep(Duration::from_millis(20));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn load_that_does_not_fit_is_refused_with_what_does() {
        let available = RESERVE_BYTES + 1000 * PAIR_BYTES;
        assert!(enough_memory(1000, available).is_ok());
        let why = enough_memory(1001, available).unwrap_err().to_string();
        assert!(why.contains("--connections 1001") && why.ends_with("ask for 1000 or fewer"), "{why}");
        assert!(enough_memory(1, 0).unwrap_err().to_string().ends_with("ask for 0 or fewer"));
    }

    #[test]
    fn both_ends_of_a_connection_are_open_files() {
        assert!(enough_open_files(500, "100\t0\t1100\n").is_ok());
        let why = enough_open_files(501, "100\t0\t1100\n").unwrap_err().to_string();
        assert!(why.contains("fs.file-max is 1100") && why.contains("ask for 500 or fewer"), "{why}");
        assert!(enough_open_files(1, "100 0").is_err());
    }
}
