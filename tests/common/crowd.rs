//! As many connections as a ring holds here, held by a process of their own: both ends together would be more descriptors
//! than a process may have.

use std::io::{BufRead, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use super::child::{Process, is_child};
use super::{Lab, SOON, eventually};

/// Nearly as many as a table of 20 000 entries holds, with room for what the process has open beside them.
pub const CONNECTIONS: usize = 18_000;

/// The child: connects to the address in its first line, sends `bytes` on each connection, and holds all until it reads
/// another line.
pub fn hold(bytes: &[u8]) {
    if !is_child() {
        return;
    }
    let mut lines = std::io::stdin().lock().lines().map(Result::unwrap);
    let addr: SocketAddr = lines.next().unwrap().parse().unwrap();
    let mut held = Vec::with_capacity(CONNECTIONS);
    let started = Instant::now();
    while held.len() < CONNECTIONS {
        match TcpStream::connect(addr) {
            Ok(stream) => held.push(stream),
            // Seen once on a machine that ran benchmarks beside, for a reason that was not said: so it is said, and tried again.
            Err(error) => {
                println!("connection {} of {CONNECTIONS}: {error}", held.len());
                assert!(started.elapsed() < SOON, "connects fail on and on");
                std::thread::park_timeout(Duration::from_millis(50));
            }
        }
    }
    // So that every one of them has a receive that was used.
    held.iter_mut().for_each(|stream| stream.write_all(bytes).unwrap());
    println!("\nall are held");
    lines.next();
}

/// The connections of the child `test`, each of which sent so many bytes. `None` where a process may not have them.
#[track_caller]
pub fn of(lab: &Lab, test: &str, bytes: usize) -> Option<Process> {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    if limit.maximum.is_some_and(|max| max < 20_000) {
        eprintln!("not tested: the hard RLIMIT_NOFILE is below 20 000");
        return None;
    }
    let mut child = Process::start(test);
    child.say(&lab.addr().to_string());
    child.line_after("all are held");
    lab.holds(CONNECTIONS);
    eventually("the bytes of each arrive", SOON, || {
        lab.report().counters.bytes_received == (CONNECTIONS * bytes) as u64
    });
    Some(child)
}

/// CPU time of this process's shards, and of the threads that the kernel works with for their rings.
#[derive(Clone, Copy, Default)]
pub struct Cpu {
    shards: Duration,
    workers: Duration,
}

impl Cpu {
    /// Since their start. Threads that ended are not among them.
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

    /// Prints what was used for each connection from `self` to `end`. Nothing is judged by it.
    pub fn print_each(self, end: Cpu, what: &str) {
        let each = |from: Duration, to: Duration| to.saturating_sub(from) / CONNECTIONS as u32;
        let (shard, worker) = (each(self.shards, end.shards), each(self.workers, end.workers));
        eprintln!("{what}: {shard:.2?} each on the shard's thread, {worker:.2?} on the kernel's workers");
    }
}
