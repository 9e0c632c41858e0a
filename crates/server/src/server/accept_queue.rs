//! What waits to be accepted, and what was lost there: the kernel knows, in `/proc/net`.

use std::net::{IpAddr, SocketAddr};
use std::{fs, io};

/// The state of a listening socket in `/proc/net/tcp`.
const LISTEN: &str = "0A";

/// The kernel's queues of connections that are established and not accepted yet, over all listening sockets of an address.
///
/// A connection that finds its queue full is dropped without a word: its peer tries again after a second, then after
/// two, and so on, and believes meanwhile that it is connected. That is latency that a server's own figures do not show.
///
/// Read from `/proc/net/tcp`, `/proc/net/tcp6` and `/proc/net/netstat`, which takes the kernel time in proportion to the
/// sockets of the machine: for a look now and then, not for each request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct AcceptQueueStats {
    /// Connections that wait now. At [`SocketOptions::backlog`](crate::net::SocketOptions::backlog), for each shard, those that
    /// come are dropped.
    pub waiting: u64,
    /// Connections dropped because a queue was full, since the start of the network namespace and over all its listening
    /// sockets, not only these: `ListenOverflows` of `nstat -az`. A value that grows is the sign.
    pub overflows: u64,
    /// Connections dropped at listening sockets for any reason, overflows included: `ListenDrops`.
    pub drops: u64,
}

impl AcceptQueueStats {
    /// The queues of this address, of whichever process.
    ///
    /// # Errors
    /// If `/proc/net` cannot be read.
    pub fn of(addr: SocketAddr) -> io::Result<AcceptQueueStats> {
        let netstat = fs::read_to_string("/proc/net/netstat")?;
        let table = if addr.is_ipv4() { "/proc/net/tcp" } else { "/proc/net/tcp6" };
        Ok(AcceptQueueStats {
            waiting: waiting_in(&fs::read_to_string(table)?, addr),
            overflows: counter_in(&netstat, "ListenOverflows"),
            drops: counter_in(&netstat, "ListenDrops"),
        })
    }
}

/// The sum of the queues of the sockets that listen at `addr`.
fn waiting_in(table: &str, addr: SocketAddr) -> u64 {
    let name = name_of(addr);
    let queue = |line: &str| {
        let mut fields = line.split_ascii_whitespace().skip(1);
        let (local, state) = (fields.next()?, fields.nth(1)?);
        let (_, received) = fields.next()?.split_once(':')?;
        if local != name || state != LISTEN {
            return None;
        }
        u64::from_str_radix(received, 16).ok()
    };
    table.lines().filter_map(queue).sum()
}

/// As the kernel writes it: each 32 bits of the address as the machine holds them, and the port.
fn name_of(addr: SocketAddr) -> String {
    let word = |bytes: &[u8]| {
        let bytes = bytes.try_into().expect("four bytes");
        format!("{:08X}", u32::from_ne_bytes(bytes))
    };
    let ip: String = match addr.ip() {
        IpAddr::V4(ip) => word(&ip.octets()),
        IpAddr::V6(ip) => ip.octets().chunks(4).map(word).collect(),
    };
    format!("{ip}:{:04X}", addr.port())
}

/// A counter of `TcpExt`: a line of names, then a line of values. 0 if there is none of that name.
fn counter_in(netstat: &str, name: &str) -> u64 {
    let mut lines = netstat.lines().filter_map(|line| line.strip_prefix("TcpExt: "));
    let (Some(names), Some(values)) = (lines.next(), lines.next()) else { return 0 };
    let mut both = names.split(' ').zip(values.split(' '));
    both.find(|(known, _)| *known == name).and_then(|(_, value)| value.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when\n\
        \x20  0: 0100007F:1B58 00000000:0000 0A 00000000:00000011 00:00000000 00000000     0        0 1\n\
        \x20  1: 0100007F:1B58 00000000:0000 0A 00000000:00000002 00:00000000 00000000     0        0 2\n\
        \x20  2: 0100007F:1B58 0100007F:D431 01 00000000:00000040 00:00000000 00000000     0        0 3\n\
        \x20  3: 00000000:1B58 00000000:0000 0A 00000000:00000007 00:00000000 00000000     0        0 4\n";

    #[test]
    fn the_queues_of_all_shards_add_up_and_no_others() {
        assert_eq!(waiting_in(TABLE, "127.0.0.1:7000".parse().unwrap()), 19);
        assert_eq!(waiting_in(TABLE, "0.0.0.0:7000".parse().unwrap()), 7);
        assert_eq!(waiting_in(TABLE, "127.0.0.1:7001".parse().unwrap()), 0);
    }

    #[test]
    fn addresses_are_named_as_the_kernel_does() {
        assert_eq!(name_of("127.0.0.1:7000".parse().unwrap()), "0100007F:1B58");
        assert_eq!(name_of("[::1]:80".parse().unwrap()), "00000000000000000000000001000000:0050");
    }

    #[test]
    fn counters_are_found_by_name() {
        let netstat = "TcpExt: A ListenOverflows ListenDrops\nTcpExt: 1 22 333\nIpExt: A\nIpExt: 9\n";
        assert_eq!((counter_in(netstat, "ListenOverflows"), counter_in(netstat, "ListenDrops")), (22, 333));
        assert_eq!(counter_in(netstat, "B"), 0);
        assert_eq!(counter_in("", "A"), 0);
    }
}
