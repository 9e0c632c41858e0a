//! The server of the drill: a process with one shard that is set as its row needs it.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fs;
use std::io::BufRead;
use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

use ringserve::admission::Admission;
use ringserve::framing::Lines;
use ringserve::limits::ServerLimits;
use ringserve::overload::{Load, Shed};
use ringserve::server::Driver;
use ringserve::{CloseReason, Cx, Frame, Limits, Server, ServerHandle, Service};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use super::rows::Row;
use crate::client::Failure;

/// A mark that the service recognizes.
pub(super) const MARK: u8 = b'!';

/// The most bytes that the shard of the rows `memory` and `burst` may hold and receive.
const HELD_MAX: usize = 64 << 20;
const RECEIVED_MAX: usize = 64 << 20;

/// The most memory that its process may have used, in MiB: held bytes take up to a quarter more,
/// and 20 MiB are for all else.
pub(super) const PEAK_MAX_MIB: f64 = ((HELD_MAX + HELD_MAX / 4 + RECEIVED_MAX) >> 20) as f64 + 20.0;

/// The reply to a line that asks for one that is not read.
const HEAVY: usize = 1 << 20;

/// Connections per second of one address, and at once, from which on a server of the row `prefix`
/// limits it.
const ADDRESS_RATE: (u32, u32) = (1000, 1000);

/// The server's report of itself.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Told {
    pub(super) accepted: u64,
    /// Packets that its accept queues lost.
    pub(super) lost: u64,
    /// Connections closed because the shard held too much.
    pub(super) closed_for_memory: u64,
    /// Connections that ended, by the names of their reasons.
    pub(super) closed: BTreeMap<String, u64>,
    /// Seconds for which the shard ran, and could have run without a CPU.
    cpu: f64,
    cpu_wait: f64,
    /// Seconds since the start.
    ran_for: f64,
    /// The most memory that the process has used, in MiB.
    pub(super) peak_mib: f64,
}

impl Told {
    /// The share of the time in which others had the CPU.
    pub(super) fn starved(&self) -> f64 {
        if self.ran_for > 0.0 { self.cpu_wait / self.ran_for } else { 0.0 }
    }
}

/// Computes for some CPU time, and sheds requests that are not marked.
struct Work {
    time: Duration,
    sheds: bool,
}

fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs() as u32)
}

impl Service for Work {
    type Session = ();
    type Error = Infallible;

    async fn call(&self, cx: &Cx<'_, ()>, line: Frame) -> Result<(), Infallible> {
        match line.first() {
            Some(b'w' | &MARK) => {
                let until = cpu_time() + self.time;
                while cpu_time() < until {
                    std::hint::spin_loop();
                }
                cx.reply("done");
            }
            Some(b'h') => cx.reply(vec![b'x'; HEAVY]),
            _ => cx.reply(line),
        }
        Ok(())
    }

    fn shed(&self, cx: &Cx<'_, ()>, line: &Frame, _load: Load) -> Shed {
        if !self.sheds || line.first() != Some(&b'w') {
            return Shed::Serve;
        }
        cx.reply("busy");
        Shed::Answered
    }
}

fn start(
    row: Row,
    driver: Driver,
    addr: SocketAddr,
    work: (Duration, bool),
) -> Result<ServerHandle, Failure> {
    let limits = Limits::default().idle_timeout(None);
    // Descriptors that are kept for upstreams are not available to clients.
    let all = ServerLimits::default().upstreams_max(0);
    let server = Server::bind(addr).framing(Lines::default()).shards(1).driver(driver).limits(limits);
    let server = server.server_limits(all.clone());
    let server = match row {
        Row::Goodput | Row::Marked | Row::Return => server,
        Row::Prefix => {
            let (per_second, burst) = ADDRESS_RATE;
            server.admission(Admission::default().address_rate(per_second, burst))
        }
        Row::Memory | Row::Burst => {
            server.server_limits(all.held_bytes_max(HELD_MAX).receive_bytes_max(RECEIVED_MAX))
        }
    };
    let (time, sheds) = work;
    let started = server.start(move |_shard| Work { time, sheds });
    started.map_err(|error| Failure(format!("the server of the drill does not start: {error}")))
}

/// The most memory that this process has used so far; nothing if the kernel does not report it.
fn peak_mib() -> f64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let kib =
        status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB")?.parse().ok());
    kib.unwrap_or(f64::NAN) / 1024.0
}

fn told(running: &ServerHandle, since: Instant) -> Told {
    let (stats, times) = (running.stats_now(), running.control().shard_times());
    Told {
        accepted: stats.counters.accepted,
        lost: running.accept_queues().iter().filter_map(|queue| queue.lost).sum(),
        closed_for_memory: stats.counters.closed_for(CloseReason::MemoryLimit),
        closed: stats
            .counters
            .each_reason()
            .filter(|(_, count)| *count > 0)
            .map(|(reason, count)| (reason.name().to_owned(), count))
            .collect(),
        cpu: times.iter().map(|of| of.cpu.as_secs_f64()).sum(),
        cpu_wait: times.iter().map(|of| of.cpu_wait.as_secs_f64()).sum(),
        ran_for: since.elapsed().as_secs_f64(),
        peak_mib: peak_mib(),
    }
}

/// Serves until its input ends. A line `tell` orders a report of its counts, and `again` restarts
/// it at its address.
pub fn serve(row: Row, driver: Driver, micros: u64, sheds: bool) -> Result<u8, Failure> {
    let work = (Duration::from_micros(micros), sheds);
    let mut running = start(row, driver, SocketAddr::from(([127, 0, 0, 1], 0)), work)?;
    let mut since = Instant::now();
    let addr = *running.local_addrs().first().ok_or_else(|| Failure("it has no address".to_owned()))?;
    println!("listening {addr}");
    for line in std::io::stdin().lock().lines() {
        match line?.as_str() {
            "tell" => {
                let told = serde_json::to_string(&told(&running, since));
                println!("{}", told.map_err(|error| Failure(error.to_string()))?);
            }
            "again" => {
                running.abort();
                // Its counts and the way it ended do not matter.
                let _ = running.wait();
                running = again(row, driver, addr, work)?;
                since = Instant::now();
                println!("listening {addr}");
            }
            _ => break,
        }
    }
    running.abort();
    Ok(0)
}

/// Starts at an address that another server used a moment ago.
fn again(
    row: Row,
    driver: Driver,
    addr: SocketAddr,
    work: (Duration, bool),
) -> Result<ServerHandle, Failure> {
    let mut tries = 0;
    loop {
        match start(row, driver, addr, work) {
            // A client's connect may have taken the port as its own for a moment.
            Err(_) if tries < 50 => {
                tries += 1;
                thread::sleep(Duration::from_millis(10));
            }
            started => return started,
        }
    }
}
