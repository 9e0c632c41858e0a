//! The kernel's counts for IPv4 sockets, from `/proc/net`: unread bytes, and drops.

use std::collections::HashMap;
use std::fs;
use std::net::SocketAddr;

/// Bytes from each of these peers that came to the socket at `at` and were not received.
pub fn unread(at: SocketAddr, peers: &[SocketAddr]) -> Vec<usize> {
    let table = to_take(at);
    peers.iter().map(|peer| table.get(&name(*peer)).copied().unwrap_or(0)).collect()
}

/// The bytes to receive, for each peer of the sockets at `at`.
fn to_take(at: SocketAddr) -> HashMap<String, usize> {
    let table = fs::read_to_string("/proc/net/tcp").expect("Linux has /proc");
    let at = name(at);
    let entry = |line: &str| {
        let mut words = line.split_whitespace().skip(1);
        let (_here, peer, _state) = (words.next().filter(|here| *here == at)?, words.next()?, words.next()?);
        let (_send, receive) = words.next()?.split_once(':')?;
        Some((peer.to_owned(), usize::from_str_radix(receive, 16).ok()?))
    };
    // With other tests at the same time the table has thousands of lines.
    table.lines().filter(|line| line.contains(&at)).filter_map(entry).collect()
}

/// The state of a listening socket.
const LISTEN: &str = "0A";

/// Connections that wait to be accepted at the sockets that listen at `at`, of any process.
pub fn accept_queue(at: SocketAddr) -> u64 {
    let table = fs::read_to_string("/proc/net/tcp").expect("Linux has /proc");
    let at = name(at);
    let waiting = |line: &str| {
        let mut words = line.split_whitespace().skip(1);
        let (here, _peer, state) = (words.next()?, words.next()?, words.next()?);
        let (_send, receive) = words.next()?.split_once(':')?;
        (here == at && state == LISTEN).then(|| u64::from_str_radix(receive, 16).ok())?
    };
    table.lines().filter_map(waiting).sum()
}

/// Drops at listeners of this network namespace, for any reason: `ListenDrops` of `nstat -az`.
pub fn listen_drops() -> u64 {
    tcp_counter("ListenDrops").expect("the kernel counts them")
}

/// Number of times that a listener's queue of this network namespace had no room, which makes a
/// drop a loss.
pub fn listen_overflows() -> u64 {
    let overflows = tcp_counter("ListenOverflows").expect("the kernel counts them");
    overflows + tcp_counter("TCPReqQFullDrop").unwrap_or(0)
}

/// A counter of `nstat -az` for this network namespace, by its name without `TcpExt`.
pub fn tcp_counter(name: &str) -> Option<u64> {
    let netstat = fs::read_to_string("/proc/net/netstat").expect("Linux has /proc");
    let mut lines = netstat.lines().filter_map(|line| line.strip_prefix("TcpExt: "));
    let (names, values) = (lines.next()?, lines.next()?);
    let mut both = names.split(' ').zip(values.split(' '));
    both.find(|(found, _)| *found == name).and_then(|(_, value)| value.parse().ok())
}

/// An address as the table writes it: the four bytes as a number of this machine, then the port.
fn name(addr: SocketAddr) -> String {
    let SocketAddr::V4(addr) = addr else { panic!("{addr} is not in this table") };
    format!("{:08X}:{:04X}", u32::from_ne_bytes(addr.ip().octets()), addr.port())
}
