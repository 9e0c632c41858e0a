//! Fill level of a listener's accept queue, and the packets that the kernel discarded there: two
//! `getsockopt`, without privilege and without reading the other sockets of the machine.
//!
//! | value | option | field |
//! |---|---|---|
//! | waiting, capacity | `TCP_INFO` | `tcpi_unacked`, `tcpi_sacked`, which mean this for a listener alone |
//! | dropped | `SO_MEMINFO` (Linux 4.12) | `SK_MEMINFO_DROPS` |
//!
//! A gauge does not hold its listener: a descriptor of it would keep it listening after its driver
//! closed it, and the kernel would go on giving connections to a queue that is never emptied.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use socket2::{Domain, Socket};

use crate::shared::accept::{Listener, ListeningSocket};
use crate::shared::socket_options::get;

/// Reads the accept queue of one TCP listener, from any thread, until its drivers close it.
#[derive(Debug)]
pub struct ListenerGauge {
    /// Each driver's descriptor of the one socket.
    sockets: Vec<Weak<ListeningSocket>>,
    /// The last count of drops, of which the kernel reports the lowest 32 bits. Locked during a
    /// read, so that no thread widens a count by one that is older.
    dropped: Mutex<u64>,
}

/// A reading of [`ListenerGauge::read`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueReading {
    /// Connections that are established and not accepted yet.
    pub waiting: u32,
    /// The backlog, as the system limited it. The queue takes one connection more: the kernel
    /// checks whether it has more than that.
    pub capacity: u32,
    /// Packets that the kernel discarded there since the socket listens, for any reason: first
    /// packets of a handshake for which the queue had no room, packets that a filter refuses, and
    /// packets that a peer repeats though the first one was answered. `None` before Linux 4.12.
    pub dropped: Option<u64>,
}

impl ListenerGauge {
    /// Creates a gauge of the one socket that all these descriptors refer to. `None` if there is
    /// none, or it is no TCP socket: the kernel reports nothing about a Unix socket, and drops no
    /// peer there.
    pub fn of<'a>(descriptors: impl IntoIterator<Item = &'a Listener>) -> Option<ListenerGauge> {
        let is_ip = |socket: &Socket| matches!(socket.domain(), Ok(Domain::IPV4 | Domain::IPV6));
        let sockets: Vec<_> = descriptors.into_iter().map(Listener::socket).collect();
        let is_gauged = sockets.first().is_some_and(|socket| is_ip(socket));
        let sockets = sockets.into_iter().map(Arc::downgrade).collect();
        is_gauged.then(|| ListenerGauge { sockets, dropped: Mutex::new(0) })
    }

    /// Reads the queue. `None` once the socket is closed, or no longer listens.
    pub fn read(&self) -> Option<QueueReading> {
        // Held for these two calls alone: if the listener's driver closes it meanwhile, the socket
        // is closed after them.
        let socket = self.sockets.iter().find_map(Weak::upgrade)?;
        let info: TcpInfo = get(&socket, libc::IPPROTO_TCP, libc::TCP_INFO).ok()?;
        let (waiting, capacity) = queue_in(&info)?;
        let mut last = self.dropped.lock().unwrap_or_else(PoisonError::into_inner);
        let drops = get::<MemInfo>(&socket, libc::SOL_SOCKET, libc::SO_MEMINFO).ok();
        let drops = drops.map(|info| info[libc::SK_MEMINFO_DROPS as usize]);
        let dropped = drops.map(|drops| {
            *last = widened(*last, drops);
            *last
        });
        Some(QueueReading { waiting, capacity, dropped })
    }
}

/// The first fields of `struct tcp_info`: eight bytes, of which the first is the state, and numbers
/// of 32 bits.
type TcpInfo = [u32; 8];

/// The numbers that `SO_MEMINFO` writes.
type MemInfo = [u32; 9];

/// `TCP_LISTEN` of the kernel.
const LISTEN: u8 = 10;

/// Waiting and capacity. `None` for a socket that does not listen: there the same fields count
/// segments in flight.
fn queue_in(info: &TcpInfo) -> Option<(u32, u32)> {
    let [state, ..] = info[0].to_ne_bytes();
    let [.., unacked, sacked] = *info;
    (state == LISTEN).then_some((unacked, sacked))
}

/// A count whose lowest 32 bits are `low` and which is no less than `last`.
fn widened(last: u64, low: u32) -> u64 {
    last + u64::from(low.wrapping_sub(last as u32))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::net::{SocketAddr, TcpListener, TcpStream};

    use socket2::{SockAddr, Type};

    use super::*;

    const BACKLOG: i32 = 4;

    fn listener() -> (Socket, SocketAddr) {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.bind(&SockAddr::from(SocketAddr::from(([127, 0, 0, 1], 0)))).unwrap();
        socket.listen(BACKLOG).unwrap();
        let addr = socket.local_addr().unwrap().as_socket().unwrap();
        (socket, addr)
    }

    /// Does not wait for the end of the handshake, which does not come while the queue is full.
    fn begins_to_connect(addr: SocketAddr) -> Socket {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.set_nonblocking(true).unwrap();
        let _in_progress = socket.connect(&addr.into());
        socket
    }

    /// `ListenDrops` of the network namespace.
    fn listen_drops() -> u64 {
        let netstat = fs::read_to_string("/proc/net/netstat").unwrap();
        let mut lines = netstat.lines().filter_map(|line| line.strip_prefix("TcpExt: "));
        let mut both = lines.next().unwrap().split(' ').zip(lines.next().unwrap().split(' '));
        both.find(|(name, _)| *name == "ListenDrops").unwrap().1.parse().unwrap()
    }

    #[test]
    fn full_queue_takes_one_beyond_its_backlog_and_loses_the_rest() {
        let (socket, addr) = listener();
        let listener = Listener::own(socket);
        let gauge = ListenerGauge::of([&listener]).unwrap();
        let backlog = BACKLOG as u32;
        assert_eq!(gauge.read(), Some(QueueReading { waiting: 0, capacity: backlog, dropped: Some(0) }));
        let before = listen_drops();
        let queued: Vec<Socket> = (0..=backlog).map(|_| begins_to_connect(addr)).collect();
        assert!(queued.iter().all(|peer| peer.peer_addr().is_ok()), "their handshakes are done");
        let full = QueueReading { waiting: backlog + 1, capacity: backlog, dropped: Some(0) };
        assert_eq!(gauge.read(), Some(full));
        let late: Vec<Socket> = (0..7).map(|_| begins_to_connect(addr)).collect();
        let read = gauge.read().unwrap();
        assert_eq!((read.waiting, read.capacity), (full.waiting, full.capacity));
        // They may have repeated their packets by now, and listeners of other tests may lose some
        // too.
        let (dropped, drops) = (read.dropped.unwrap(), listen_drops() - before);
        assert!((7..=drops).contains(&dropped), "{dropped} dropped here and {drops} in the namespace");
        // Their packets were dropped, so they know that they are not connected.
        assert!(late.iter().all(|peer| peer.peer_addr().is_err()));
    }

    #[test]
    fn gauge_of_a_closed_listener_reads_nothing_and_keeps_none_open() {
        let (socket, addr) = listener();
        let other = socket.try_clone().unwrap();
        let (one, other) = (Listener::adopted(socket), Listener::adopted(other));
        let gauge = ListenerGauge::of([&one, &other]).unwrap();
        drop(one);
        assert!(gauge.read().is_some(), "another driver has it");
        drop(other);
        assert_eq!(gauge.read(), None);
        assert!(TcpStream::connect(addr).is_err());
    }

    #[test]
    fn socket_that_does_not_listen_has_no_queue() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let connected = Listener::own(stream);
        assert_eq!(ListenerGauge::of([&connected]).unwrap().read(), None);
        let ended = Listener::own(listener);
        let gauge = ListenerGauge::of([&ended]).unwrap();
        ended.socket().shutdown(std::net::Shutdown::Both).unwrap();
        assert_eq!(gauge.read(), None);
    }

    #[test]
    fn unix_listeners_have_no_gauge() {
        let (socket, _) = Socket::pair(Domain::UNIX, Type::STREAM, None).unwrap();
        assert!(ListenerGauge::of([&Listener::own(socket)]).is_none());
        assert!(ListenerGauge::of([]).is_none());
    }

    #[test]
    fn count_of_drops_goes_on_where_the_kernel_begins_again() {
        let near_the_end = u32::MAX - 2;
        let wide = widened(0, near_the_end);
        assert_eq!(wide, u64::from(near_the_end));
        assert_eq!(widened(wide, near_the_end), wide);
        assert_eq!(widened(wide, 4), wide + 7);
        assert_eq!(widened(widened(wide, 4), 4), wide + 7);
    }
}
