//! As many connections as a ring can hold here, held by another process: both ends together would
//! be more descriptors than a process may have.

use std::io::{BufRead, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use crate::child::{Process, is_child};
use crate::{Lab, SOON, eventually};

/// Nearly as many as a table of 20 000 entries holds, with room for other descriptors of the
/// process.
const CONNECTIONS: usize = 18_000;

/// Fewer than these prove nothing about the cost of many.
const CONNECTIONS_MIN: usize = 2000;

/// Connects that fail in a row until the machine's resources count as exhausted.
const FAILURES_MAX: u32 = 40;

/// The child: connects to the address in its first line, sends `bytes` on each connection, and
/// holds all until it reads another line.
pub fn hold(bytes: &[u8]) {
    if !is_child() {
        return;
    }
    let mut lines = std::io::stdin().lock().lines().map(Result::unwrap);
    let addr: SocketAddr = lines.next().unwrap().parse().unwrap();
    let mut held = Vec::with_capacity(CONNECTIONS);
    let mut failures = 0;
    while held.len() < CONNECTIONS && failures < FAILURES_MAX {
        match TcpStream::connect(addr) {
            Ok(stream) => {
                held.push(stream);
                failures = 0;
            }
            // A machine may have fewer ports, descriptors or less socket memory than its limits
            // say.
            Err(error) => {
                println!("connection {} of {CONNECTIONS}: {error}", held.len());
                failures += 1;
                std::thread::park_timeout(Duration::from_millis(50));
            }
        }
    }
    // So every one of them has a receive that was used.
    for (n, stream) in held.iter_mut().enumerate() {
        stream.write_all(bytes).unwrap_or_else(|error| panic!("bytes of connection {n}: {error}"));
    }
    println!("\nconnections held: {}", held.len());
    lines.next();
}

/// The child, and the number of its connections, each of which sent `bytes` bytes. `None` if a
/// process may not have them.
#[track_caller]
pub fn of<F: Fn()>(lab: &Lab, child: F, bytes: usize) -> Option<(Process, usize)> {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    if limit.maximum.is_some_and(|max| max < 20_000) {
        eprintln!("not tested: the hard RLIMIT_NOFILE is below 20 000");
        return None;
    }
    let mut child = Process::start(child);
    child.say(&lab.addr().to_string());
    let held: usize = child.line_after("connections held: ").parse().unwrap();
    assert!(held >= CONNECTIONS_MIN, "the machine gave {held} connections");
    lab.holds(held);
    eventually("the bytes of each arrive", SOON, || {
        lab.stats().counters.bytes_received == (held * bytes) as u64
    });
    Some((child, held))
}

/// CPU time of this process's shards, and of the kernel threads that work for their rings.
#[derive(Clone, Copy, Default)]
pub struct Cpu {
    shards: Duration,
    workers: Duration,
}

impl Cpu {
    /// CPU time since their start. Threads that ended are not included.
    pub fn now() -> Cpu {
        let mut cpu = Cpu::default();
        for task in std::fs::read_dir("/proc/self/task").expect("the process has threads") {
            let Ok(path) = task.map(|task| task.path()) else { continue };
            let read = |file: &str| std::fs::read_to_string(path.join(file)).unwrap_or_default();
            let (name, stat) = (read("comm"), read("schedstat"));
            let ran = stat.split(' ').next().and_then(|time| time.parse().ok()).map(Duration::from_nanos);
            match ran {
                Some(ran) if name.starts_with("ringserve-") => cpu.shards += ran,
                Some(ran) if name.starts_with("iou-wrk") => cpu.workers += ran,
                _ => {}
            }
        }
        cpu
    }

    /// Prints the usage for each of `connections` from `self` to `end`. Nothing is judged by it.
    pub fn print_each(self, end: Cpu, connections: usize, what: &str) {
        let each = |from: Duration, to: Duration| to.saturating_sub(from) / connections as u32;
        let (shard, worker) = (each(self.shards, end.shards), each(self.workers, end.workers));
        eprintln!("{what}: {shard:.2?} each on the shard's thread, {worker:.2?} on the kernel's workers");
    }
}
