//! Facts of the machine under a server: what the kernel's tables hold, what it dropped, and how
//! long CPUs were waited for.
//!
//! [`read`] takes some ten files of `/proc` and `/sys`, tens of microseconds each, whatever the
//! number of connections is: cheap enough for each second. A file that is not there, as in some
//! sandboxes and with modules that are not loaded, leaves its figure out.
//!
//! ```
//! # mod ringserve {
//! #     pub use ringserve_base::machine;
//! # }
//! let host = ringserve::machine::read();
//! if let Some(descriptors) = &host.descriptors {
//!     println!("{} of {} descriptors", descriptors.now, descriptors.max);
//! }
//! ```

#[doc(hidden)]
pub mod files;

use std::collections::HashMap;
use std::fs;
use std::time::Duration;

use files::{GroupFiles, MachineFiles};

/// Descriptors that are counted one by one at most, where the kernel does not tell their number: a
/// million take a third of a second.
const COUNTED_MAX: usize = 1 << 14;

/// Bytes of a page, in which the kernel counts memory of sockets. Larger ones exist on other
/// processors than x86-64, where the bytes of [`TcpMemory`] come out too low by the same factor;
/// its shares are right.
const PAGE_BYTES: u64 = 4096;

/// Facts of the machine. Totals count since its boot, or since the network namespace of the process
/// was made.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
#[doc(alias = "HostStats")]
pub struct MachineStats {
    /// Connections that the firewall tracks; `None` if its module is not loaded. At the limit
    /// packets of new connections are dropped, without a word to either side.
    pub conntrack: Option<Usage>,
    /// Packets that the firewall dropped because it could not track their connection.
    pub conntrack_drops: u64,
    /// Descriptors of this process, with the soft `RLIMIT_NOFILE`. `None` before Linux 6.2 if there
    /// are more than 16 384.
    pub descriptors: Option<Usage>,
    /// Open files of the whole machine, with `fs.file-max`.
    pub open_files: Option<Usage>,
    /// Memory of TCP sockets of the whole machine.
    pub tcp_memory: Option<TcpMemory>,
    /// Sockets without a process that still have bytes to send, with `net.ipv4.tcp_max_orphans`.
    /// Above it the kernel resets.
    pub orphans: Option<Usage>,
    /// Sockets in TIME_WAIT, with `net.ipv4.tcp_max_tw_buckets`. Above it the state is left out.
    pub time_wait: Option<Usage>,
    /// The time for which a control group with a quota of CPU time held the process back; `None`
    /// without a quota.
    pub throttling: Option<Throttling>,
    /// Times of all CPUs together, for the share that the hypervisor took.
    pub cpu: Option<CpuTicks>,
    /// The share of the last ten seconds, 0 to 1, in which some task of the machine waited for a
    /// CPU (PSI).
    pub cpu_pressure: Option<f64>,
    /// The same for memory.
    pub memory_pressure: Option<f64>,
    /// Packets that listeners dropped for any reason: in most cases first ones, at full accept
    /// queues (`ListenDrops`).
    pub listen_drops: u64,
    /// First packets that were dropped because a queue of handshakes was full and cookies are off
    /// (`TCPReqQFullDrop`).
    pub handshakes_dropped: u64,
    /// Cookies that were sent because a queue of handshakes was full (`SyncookiesSent`).
    pub syn_cookies_sent: u64,
    /// Times that the kernel pruned the received bytes of sockets, for memory (`PruneCalled`).
    pub tcp_pruned: u64,
    /// Connections that the kernel aborted for memory (`TCPAbortOnMemory`).
    pub tcp_memory_aborts: u64,
    /// Packets that were dropped before any socket saw them, because the queue of a CPU was full
    /// (`net.core.netdev_max_backlog`): those of all network namespaces.
    pub packets_dropped: u64,
    /// Packets that arrived at devices of this network namespace and were dropped there for any
    /// reason, those of a full queue of a CPU among them (`/proc/net/dev`).
    pub device_drops: u64,
    /// Times that a CPU did not get through its packets within its budget
    /// (`net.core.netdev_budget`).
    pub packets_squeezed: u64,
}

/// The used part of something that has a limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Usage {
    /// The number in use.
    pub now: u64,
    /// The limit.
    pub max: u64,
}

impl Usage {
    fn of(now: Option<u64>, max: Option<u64>) -> Option<Usage> {
        Some(Usage { now: now?, max: max? })
    }

    /// The part that is used: 1 if all is. 0 where there is no limit.
    pub fn share(&self) -> f64 {
        if self.max == 0 { 0.0 } else { self.now as f64 / self.max as f64 }
    }
}

/// Memory of TCP sockets, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TcpMemory {
    /// The memory that sockets hold.
    pub now: u64,
    /// From here on the kernel presses sockets to hold less (the second value of
    /// `net.ipv4.tcp_mem`).
    pub pressure: u64,
    /// From here on it gives them nothing (the third value).
    pub max: u64,
}

/// The effect of a quota of CPU time on the process, of the control group that was hit most.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Throttling {
    /// The least quota of all groups above the process, in CPUs.
    pub quota_cpus: f64,
    /// Periods of the quota in which something ran.
    pub periods: u64,
    /// Those in which the quota was used up before the end.
    pub throttled: u64,
    /// For how long threads that could run were held back, of all threads together.
    pub throttled_time: Duration,
}

/// Times of all CPUs since the boot, in ticks of the kernel's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CpuTicks {
    /// All of them.
    pub all: u64,
    /// Those in which a CPU would have run, and the hypervisor gave it to another machine.
    pub stolen: u64,
}

/// Reads the facts of this machine, as this process sees them. In a process without a free
/// descriptor no file can be opened, and nearly all are left out; the admin endpoint keeps the
/// files open, and has them then too.
pub fn read() -> MachineStats {
    read_of(&MachineFiles::here())
}

/// Reads the facts of a machine.
#[doc(hidden)]
pub fn read_of(machine: &MachineFiles) -> MachineStats {
    let sockets = sockets(machine);
    let socket = |name: &str| sockets.get(name).copied();
    let tcp = counters(machine, "/proc/net/netstat", "TcpExt: ");
    let tcp = |name: &str| tcp.get(name).copied().unwrap_or(0);
    let files = machine.numbers("/proc/sys/fs/file-nr");
    let (packets_dropped, packets_squeezed) = packets(machine);
    MachineStats {
        conntrack: Usage::of(
            machine.sysctl("net.netfilter.nf_conntrack_count"),
            machine.sysctl("net.netfilter.nf_conntrack_max"),
        ),
        conntrack_drops: conntrack_drops(machine),
        descriptors: Usage::of(open_descriptors(machine), soft_limit(machine, "Max open files")),
        open_files: Usage::of(files.first().copied(), files.get(2).copied()),
        tcp_memory: tcp_memory(machine, socket("mem")),
        orphans: Usage::of(socket("orphan"), machine.sysctl("net.ipv4.tcp_max_orphans")),
        time_wait: Usage::of(socket("tw"), machine.sysctl("net.ipv4.tcp_max_tw_buckets")),
        throttling: throttling(machine),
        cpu: ticks(machine),
        cpu_pressure: pressure(machine, "cpu"),
        memory_pressure: pressure(machine, "memory"),
        listen_drops: tcp("ListenDrops"),
        handshakes_dropped: tcp("TCPReqQFullDrop"),
        syn_cookies_sent: tcp("SyncookiesSent"),
        tcp_pruned: tcp("PruneCalled"),
        tcp_memory_aborts: tcp("TCPAbortOnMemory"),
        packets_dropped,
        device_drops: device_drops(machine),
        packets_squeezed,
    }
}

/// The number of times that a queue of a listener of the network namespace had no room: its accept
/// queue (`ListenOverflows`), or that of its handshakes, where cookies are off (`TCPReqQFullDrop`).
/// `None` if it cannot be read.
#[doc(hidden)]
pub fn queue_overflows(machine: &MachineFiles) -> Option<u64> {
    let tcp = counters(machine, "/proc/net/netstat", "TcpExt: ");
    Some(tcp.get("ListenOverflows")? + tcp.get("TCPReqQFullDrop").unwrap_or(&0))
}

/// The least CPU quota of the control groups of the process and all groups above, in CPUs; `None`
/// without one.
#[doc(hidden)]
pub fn cpu_quota(machine: &MachineFiles) -> Option<f64> {
    quotas(machine).into_iter().map(|(cpus, _)| cpus).min_by(f64::total_cmp)
}

/// A soft limit by its name in `/proc/self/limits`. `u64::MAX` where there is none.
#[doc(hidden)]
pub fn soft_limit(machine: &MachineFiles, name: &str) -> Option<u64> {
    limits(machine, name).map(|(soft, _)| soft)
}

/// The soft and the hard limit.
pub(crate) fn limits(machine: &MachineFiles, name: &str) -> Option<(u64, u64)> {
    let text = machine.text("/proc/self/limits")?;
    let mut values = text.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace();
    let mut value = || match values.next()? {
        "unlimited" => Some(u64::MAX),
        number => number.parse().ok(),
    };
    Some((value()?, value()?))
}

/// The numbers of the line of TCP in `/proc/net/sockstat`, by their names.
fn sockets(machine: &MachineFiles) -> HashMap<String, u64> {
    let text = machine.text("/proc/net/sockstat").unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix("TCP: ")).unwrap_or_default();
    let words: Vec<&str> = line.split_whitespace().collect();
    let pairs = words.chunks_exact(2);
    pairs.filter_map(|pair| Some((pair[0].to_owned(), pair[1].parse().ok()?))).collect()
}

/// Two lines with the same beginning: names, and their numbers.
fn counters(machine: &MachineFiles, path: &str, begin: &str) -> HashMap<String, u64> {
    let text = machine.text(path).unwrap_or_default();
    let mut lines = text.lines().filter_map(|line| line.strip_prefix(begin));
    let (names, numbers) = (lines.next().unwrap_or_default(), lines.next().unwrap_or_default());
    let both = names.split_whitespace().zip(numbers.split_whitespace());
    both.filter_map(|(name, number)| Some((name.to_owned(), number.parse().ok()?))).collect()
}

/// Since Linux 6.2 the size of the directory is their number. Before it is zero, and this one is
/// open while it is listed.
#[doc(hidden)]
pub fn open_descriptors(machine: &MachineFiles) -> Option<u64> {
    let folder = machine.place("/proc/self/fd");
    if let Some(count) = fs::metadata(&folder).ok().map(|found| found.len()).filter(|count| *count > 0) {
        return Some(count);
    }
    let count = fs::read_dir(folder).ok()?.take(COUNTED_MAX + 2).count();
    (1..=COUNTED_MAX + 1).contains(&count).then(|| count as u64 - 1)
}

fn tcp_memory(machine: &MachineFiles, pages: Option<u64>) -> Option<TcpMemory> {
    let marks = machine.numbers("/proc/sys/net/ipv4/tcp_mem");
    let bytes = |pages: u64| pages.saturating_mul(PAGE_BYTES);
    Some(TcpMemory { now: bytes(pages?), pressure: bytes(*marks.get(1)?), max: bytes(*marks.get(2)?) })
}

/// Packets that were dropped, and times that a CPU was squeezed: one line for each CPU, in
/// hexadecimal.
fn packets(machine: &MachineFiles) -> (u64, u64) {
    let text = machine.text("/proc/net/softnet_stat").unwrap_or_default();
    let of_line = |line: &str| {
        let column = |n| line.split_whitespace().nth(n).and_then(|word| u64::from_str_radix(word, 16).ok());
        (column(1).unwrap_or(0), column(2).unwrap_or(0))
    };
    text.lines().map(of_line).fold((0, 0), |sum, line| (sum.0 + line.0, sum.1 + line.1))
}

/// Two lines of names, then one for each device: `eth0:`, with bytes, packets, errors and drops of
/// what it received.
fn device_drops(machine: &MachineFiles) -> u64 {
    let text = machine.text("/proc/net/dev").unwrap_or_default();
    let of_line = |line: &str| line.split_once(':')?.1.split_whitespace().nth(3)?.parse::<u64>().ok();
    text.lines().filter_map(of_line).sum()
}

/// A line of names, then one for each CPU, in hexadecimal.
fn conntrack_drops(machine: &MachineFiles) -> u64 {
    let text = machine.text("/proc/net/stat/nf_conntrack").unwrap_or_default();
    let mut lines = text.lines();
    let names: Vec<&str> = lines.next().unwrap_or_default().split_whitespace().collect();
    let columns: Vec<usize> = (0..)
        .zip(&names)
        .filter(|(_, name)| matches!(**name, "drop" | "early_drop"))
        .map(|(n, _)| n)
        .collect();
    let of_line = |line: &str| {
        let words: Vec<&str> = line.split_whitespace().collect();
        let column = |n: &usize| words.get(*n).and_then(|word| u64::from_str_radix(word, 16).ok());
        columns.iter().filter_map(column).sum::<u64>()
    };
    lines.map(of_line).sum()
}

/// The first line of `/proc/stat`. Times of guests are in those of users already.
fn ticks(machine: &MachineFiles) -> Option<CpuTicks> {
    let text = machine.text("/proc/stat")?;
    let line = text.lines().next()?.strip_prefix("cpu ")?;
    let ticks: Vec<u64> = line.split_whitespace().take(8).map_while(|word| word.parse().ok()).collect();
    Some(CpuTicks { all: ticks.iter().sum(), stolen: *ticks.get(7)? })
}

/// `some avg10=1.25 ..`, in percent.
fn pressure(machine: &MachineFiles, of: &str) -> Option<f64> {
    let text = machine.text(&format!("/proc/pressure/{of}"))?;
    let line = text.lines().find_map(|line| line.strip_prefix("some "))?;
    let percent: f64 = line.split_whitespace().find_map(|word| word.strip_prefix("avg10="))?.parse().ok()?;
    percent.is_finite().then_some(percent / 100.0)
}

/// Each quota in CPUs, with the text of `cpu.stat` of its group.
fn quotas(machine: &MachineFiles) -> Vec<(f64, String)> {
    let files = GroupFiles { controller: "cpu", second: &["cpu.max"], first: &["cpu.cfs_quota_us"] };
    let quota = |file: files::GroupFile| {
        let mut words = file.text.split_whitespace().map(|word| word.parse::<f64>().ok());
        let quota = words.next()??;
        // In a file beside, in the first version.
        let period = || machine.text_at(&file.folder.join("cpu.cfs_period_us"))?.trim().parse().ok();
        let period = words.next().flatten().or_else(period).unwrap_or(100_000.0);
        let stat = machine.text_at(&file.folder.join("cpu.stat")).unwrap_or_default();
        (quota > 0.0 && period > 0.0).then_some((quota / period, stat))
    };
    machine.group_files(&files).into_iter().filter_map(quota).collect()
}

fn throttling(machine: &MachineFiles) -> Option<Throttling> {
    let quotas = quotas(machine);
    let quota_cpus = quotas.iter().map(|(cpus, _)| *cpus).min_by(f64::total_cmp)?;
    let of_group = |(_, stat): &(f64, String)| {
        let number = |name: &str| {
            let line = stat.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
            line.and_then(|number| number.trim().parse::<u64>().ok())
        };
        // Nanoseconds in the first version.
        let time = number("throttled_usec").map(Duration::from_micros);
        let time = time.or_else(|| number("throttled_time").map(Duration::from_nanos));
        Throttling {
            quota_cpus,
            periods: number("nr_periods").unwrap_or(0),
            throttled: number("nr_throttled").unwrap_or(0),
            throttled_time: time.unwrap_or_default(),
        }
    };
    quotas.iter().map(of_group).max_by_key(|found| found.throttled)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_tells_what_every_linux_has() {
        let host = read();
        let descriptors = host.descriptors.unwrap();
        assert!(descriptors.now >= 3 && descriptors.max >= descriptors.now, "{descriptors:?}");
        let held: Vec<fs::File> = (0..100).map(|_| fs::File::open("/dev/null").unwrap()).collect();
        let more = read().descriptors.unwrap();
        // Other tests of this process open and close some meanwhile.
        assert!(more.now >= descriptors.now + 50, "{} are open, and {more:?} are told", held.len());
        assert!(host.cpu.is_some_and(|cpu| cpu.all > 0 && cpu.stolen <= cpu.all));
        assert!(host.tcp_memory.is_some_and(|memory| 0 < memory.pressure && memory.pressure <= memory.max));
        assert!(host.orphans.is_some() && host.time_wait.is_some());
    }

    #[test]
    fn figures_are_found_in_their_files() {
        let root = std::env::temp_dir().join(format!("ringserve-host-{}", std::process::id()));
        let plant = |path: &str, text: &str| {
            let place = root.join(path);
            fs::create_dir_all(place.parent().unwrap()).unwrap();
            fs::write(place, text).unwrap();
        };
        plant(
            "proc/net/sockstat",
            "sockets: used 9\nTCP: inuse 4 orphan 2 tw 7 alloc 5 mem 30\nUDP: inuse 1 mem 1\n",
        );
        plant("proc/sys/net/ipv4/tcp_mem", "10 20 40\n");
        plant("proc/sys/net/ipv4/tcp_max_orphans", "100\n");
        plant("proc/sys/net/ipv4/tcp_max_tw_buckets", "200\n");
        plant("proc/sys/fs/file-nr", "1024\t0\t5000\n");
        plant("proc/net/stat/nf_conntrack", "entries  found drop early_drop\n0a 01 02 10\n0a 00 01 00\n");
        plant("proc/sys/net/netfilter/nf_conntrack_count", "10\n");
        plant("proc/sys/net/netfilter/nf_conntrack_max", "40\n");
        plant(
            "proc/net/netstat",
            "TcpExt: SyncookiesSent ListenDrops TCPReqQFullDrop ListenOverflows\nTcpExt: 1 2 3 4\nIpExt: A\nIpExt: 9\n",
        );
        plant("proc/net/softnet_stat", "00 0000000a 00000001 0\n00 00000002 00000002 0\n");
        plant(
            "proc/net/dev",
            "Inter-|   Receive  |  Transmit\n face |bytes    packets errs drop fifo|bytes\n    lo: 9 8 7 6 5 0\n  eth0:90 80 70 1 0 0\n",
        );
        plant("proc/pressure/memory", "some avg10=12.50 avg60=1.00\nfull avg10=3.00\n");
        plant("proc/self/cgroup", "0::/a/b\n");
        plant("sys/fs/cgroup/a/cpu.max", "150000 100000\n");
        plant(
            "sys/fs/cgroup/a/cpu.stat",
            "usage_usec 5\nnr_periods 10\nnr_throttled 4\nthrottled_usec 2500\n",
        );
        plant("sys/fs/cgroup/a/b/cpu.max", "max 100000\n");
        let host = read_of(&MachineFiles::below(&root));
        let overflows = queue_overflows(&MachineFiles::below(&root));
        fs::remove_dir_all(&root).unwrap();
        assert_eq!((overflows, queue_overflows(&MachineFiles::below(&root))), (Some(7), None));
        let expected = MachineStats {
            conntrack: Some(Usage { now: 10, max: 40 }),
            conntrack_drops: 0x13,
            open_files: Some(Usage { now: 1024, max: 5000 }),
            tcp_memory: Some(TcpMemory { now: 30 * 4096, pressure: 20 * 4096, max: 40 * 4096 }),
            orphans: Some(Usage { now: 2, max: 100 }),
            time_wait: Some(Usage { now: 7, max: 200 }),
            throttling: Some(Throttling {
                quota_cpus: 1.5,
                periods: 10,
                throttled: 4,
                throttled_time: Duration::from_micros(2500),
            }),
            memory_pressure: Some(0.125),
            listen_drops: 2,
            handshakes_dropped: 3,
            syn_cookies_sent: 1,
            packets_dropped: 12,
            device_drops: 7,
            packets_squeezed: 3,
            ..MachineStats::default()
        };
        assert_eq!(host, expected);
        assert_eq!(host.conntrack.map(|tracked| tracked.share()), Some(0.25));
        assert_eq!(read_of(&MachineFiles::below("/nonexistent")), MachineStats::default());
    }

    #[test]
    fn kept_files_tell_what_they_have_now() {
        let root = std::env::temp_dir().join(format!("ringserve-kept-files-{}", std::process::id()));
        let file = "/proc/net/softnet_stat";
        let plant = |text: &str| {
            let place = root.join("proc/net/softnet_stat");
            fs::create_dir_all(place.parent().unwrap()).unwrap();
            fs::write(place, text).unwrap();
        };
        plant("00 00000001 00000002\n");
        let machine = MachineFiles::below(&root).keeping();
        assert_eq!(packets(&machine), (1, 2));
        // Longer than what is read at first.
        plant(&"00 00000001 00000001\n".repeat(1000));
        assert_eq!(packets(&machine), (1000, 1000));
        // Nothing can open it now, as where descriptors are used up.
        fs::remove_dir_all(&root).unwrap();
        assert_eq!(packets(&machine), (1000, 1000));
        assert_eq!(machine.text("/proc/net/other"), None);
        assert_eq!(MachineFiles::below(&root).text(file), None);
    }
}
