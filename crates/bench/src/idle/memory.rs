//! Memory as the kernel counts it: of a process, and its own.

use std::{fs, io};

/// The kernel's memory of the whole machine, in bytes, and the available memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Kernel {
    /// Small objects: sockets, files, inodes, operations of rings.
    pub(super) slab: u64,
    /// The part of it that `available` counts as free. Sockets' inodes and directory entries are in
    /// it, and are not free.
    pub(super) reclaimable: u64,
    /// Stacks of threads, page tables, and memory of each CPU.
    pub(super) others: u64,
    /// Memory of sockets for bytes in transit.
    pub(super) buffers: u64,
    /// `MemAvailable`: the kernel's estimate of memory that could be used without swapping.
    pub(super) available: u64,
}

impl Kernel {
    pub(super) fn now() -> io::Result<Kernel> {
        let (meminfo, sockstat) =
            (fs::read_to_string("/proc/meminfo")?, fs::read_to_string("/proc/net/sockstat")?);
        let page = rustix::param::page_size() as u64;
        Kernel::parse(&meminfo, &sockstat, page)
            .ok_or_else(|| io::Error::other("/proc/meminfo or /proc/net/sockstat lacks a line"))
    }

    fn parse(meminfo: &str, sockstat: &str, page_bytes: u64) -> Option<Kernel> {
        let bytes = |name| kib(meminfo, name).map(|kib| kib * 1024);
        Some(Kernel {
            slab: bytes("Slab:")?,
            reclaimable: bytes("SReclaimable:")?,
            others: bytes("KernelStack:")? + bytes("PageTables:")? + bytes("Percpu:").unwrap_or(0),
            buffers: tcp(sockstat, "mem")? * page_bytes,
            available: bytes("MemAvailable:")?,
        })
    }

    /// All memory that counts as the kernel's.
    pub(super) fn used(self) -> u64 {
        self.slab + self.others + self.buffers
    }

    /// The available memory, if all that became reclaimable since `start` belongs to sockets.
    pub(super) fn left_since(self, start: Kernel) -> u64 {
        self.available.saturating_sub(self.reclaimable.saturating_sub(start.reclaimable))
    }
}

/// TCP sockets that exist, of the whole machine: both ends of each connection on loopback.
pub(super) fn tcp_sockets() -> io::Result<u64> {
    let text = fs::read_to_string("/proc/net/sockstat")?;
    let count = tcp(&text, "alloc").ok_or_else(|| io::Error::other("/proc/net/sockstat lacks TCP alloc"))?;
    Ok(count)
}

/// `RssAnon` of a process, in bytes.
pub(super) fn anonymous_bytes(pid: u32) -> io::Result<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let kib = kib(&status, "RssAnon:").ok_or_else(|| io::Error::other("no RssAnon in /proc/PID/status"))?;
    Ok(kib * 1024)
}

/// The number of a line such as `Slab:  715364 kB`.
fn kib(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.trim().strip_suffix(" kB")?.parse().ok())
}

/// The number after `name` in the line `TCP: inuse 26 orphan 0 tw 7689 alloc 26 mem 36`.
fn tcp(sockstat: &str, name: &str) -> Option<u64> {
    let line = sockstat.lines().find_map(|line| line.strip_prefix("TCP:"))?;
    let mut words = line.split_ascii_whitespace().skip_while(|word| *word != name);
    words.nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMINFO: &str = "MemTotal:       24684084 kB\nMemAvailable:   23846472 kB\nKReclaimable:     624872 kB\n\
        Slab:             715364 kB\nSReclaimable:     624872 kB\nSUnreclaim:        90492 kB\n\
        KernelStack:        2128 kB\nPageTables:         2088 kB\nSecPageTables:         7 kB\nPercpu:              808 kB\n";
    const SOCKSTAT: &str =
        "sockets: used 34\nTCP: inuse 26 orphan 0 tw 7689 alloc 27 mem 36\nUDP: inuse 0 mem 9\n";

    #[test]
    fn kernel_memory_is_slab_stacks_tables_and_socket_buffers() {
        let kernel = Kernel::parse(MEMINFO, SOCKSTAT, 4096).unwrap();
        assert_eq!(kernel.used(), (715_364 + 2128 + 2088 + 808 + 36 * 4) * 1024);
    }

    #[test]
    fn a_file_that_lacks_a_line_is_no_zero() {
        for name in ["Slab:", "KernelStack:", "PageTables:", "MemAvailable:"] {
            let without = MEMINFO.replacen(&format!("\n{name}"), "\nX:", 1);
            assert_eq!(Kernel::parse(&without, SOCKSTAT, 4096), None, "{name}");
        }
        assert_eq!(Kernel::parse(MEMINFO, "sockets: used 34\n", 4096), None);
    }

    #[test]
    fn reclaimable_memory_is_not_left() {
        let start = Kernel { reclaimable: 10, available: 1000, ..Kernel::default() };
        let later = Kernel { reclaimable: 110, available: 800, ..Kernel::default() };
        assert_eq!((start.left_since(start), later.left_since(start)), (1000, 700));
        assert_eq!(start.left_since(later), 1000);
    }

    #[test]
    fn sockets_are_told_apart_by_name() {
        assert_eq!(
            (tcp(SOCKSTAT, "inuse"), tcp(SOCKSTAT, "alloc"), tcp(SOCKSTAT, "mem")),
            (Some(26), Some(27), Some(36))
        );
        assert_eq!(tcp(SOCKSTAT, "none"), None);
    }
}
