//! The options, with their ranges and defaults.

use std::time::Duration;

use super::asks::SocketQueries;

/// Options of the server's sockets. They are set on the listeners, and Linux hands them on to each
/// accepted socket, so they cost nothing for a connection. Each is read back at the start: a
/// refusal of the kernel is an error, and a value that it cuts or rounds is logged and kept in
/// [`ServerHandle::socket_option_warnings`](crate::ServerHandle::socket_option_warnings).
///
/// Unix sockets take only `backlog` and `unix_mode`: the other options are TCP's, and the buffers
/// of an accepted Unix socket follow `net.core.wmem_default` and `net.core.rmem_default`, whatever
/// its listener had. On an [adopted](crate::listen::adopt) socket only those are set that
/// connections inherit.
///
/// ```
/// use ringserve::net::SocketOptions;
///
/// let options = SocketOptions::default().keep_alive(None).backlog(1024);
/// assert!(options.no_delay);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SocketOptions {
    /// Connections that may wait to be accepted, for each shard and address, or for all shards
    /// together at a Unix socket; 1 to 2^31 - 1. The kernel cuts it to `net.core.somaxconn` (4096
    /// by default). Default 4096.
    pub backlog: u32,
    /// `TCP_NODELAY`: small replies leave at once. Replies leave in batches already, so waiting for
    /// more would only add delay. Default on.
    pub no_delay: bool,
    /// Reads the peer's address of each accepted connection. If it is off,
    /// [`Peer::addr`](crate::Peer::addr) and the log have none, and with io_uring a connection
    /// costs one system call less (`getpeername`): for servers behind a proxy or load balancer,
    /// whose address says nothing. The server reads addresses for all of its services if one of
    /// them wants them, or expects a PROXY header. On by default.
    pub peer_address: bool,
    /// Reads the local address of each accepted connection
    /// ([`Peer::local_addr`](crate::Peer::local_addr)), which costs one system call (`getsockname`)
    /// and about 160 bytes for each connection. For listeners at `0.0.0.0` or `[::]` whose service
    /// depends on it; other listeners have one address
    /// ([`ServerHandle::listeners`](crate::ServerHandle::listeners)). Default off.
    pub local_address: bool,
    /// Reads the process at the other end of each connection of a Unix socket
    /// ([`Peer::credentials`](crate::Peer::credentials)), which costs one system call
    /// (`getsockopt`) and about 160 bytes for each connection. Default off.
    pub peer_credentials: bool,
    /// `SO_KEEPALIVE`: the kernel probes silent peers, so that a peer that vanished without a FIN
    /// is noticed even if the idle limit is off. Default as [`KeepAlive::default`].
    pub keep_alive: Option<KeepAlive>,
    /// `TCP_USER_TIMEOUT`: how long sent bytes, or probes, may stay without acknowledgement before
    /// the kernel gives the connection up; in milliseconds, at least 1 ms. Without it that takes
    /// about 15 minutes. Default 180 s: longer than an outage a user sits through, and the time
    /// that all probes of [`KeepAlive::default`] take.
    ///
    /// It decides for silent connections too: after that much silence the first unanswered probe
    /// ends the connection, whatever [`KeepAlive::probes`] says. If that leaves fewer probes, a
    /// warning at the start says so.
    pub user_timeout: Option<Duration>,
    /// `TCP_NOTSENT_LOWAT`: unsent bytes that the kernel takes for a connection. It bounds the
    /// kernel memory of a slow reader, whose send buffer may grow to megabytes
    /// (`net.ipv4.tcp_wmem`); further bytes stay in the outbox, where they count against its marks.
    /// Default 128 KiB.
    pub not_sent_bytes_max: Option<u32>,
    /// `SO_SNDBUF`: bytes of each connection's send buffer, 1 to 2^30. The kernel takes at most
    /// `net.core.wmem_max` and at least some 2 KiB, and doubles the number for its bookkeeping.
    /// **This turns off its tuning**, which lets the buffer grow with the path up to
    /// `net.ipv4.tcp_wmem` and is usually better: set it to bound the kernel's memory, not for
    /// speed. Default: tuned.
    pub send_buffer_bytes: Option<u32>,
    /// `SO_RCVBUF`: bytes of each connection's receive buffer, 1 to 2^30; as above, with
    /// `net.core.rmem_max`, 1 KiB and `net.ipv4.tcp_rmem`. It also bounds the window that peers
    /// see, from the first packet on. Default: tuned.
    pub receive_buffer_bytes: Option<u32>,
    /// `TCP_FASTOPEN`: connections that may be served, for each shard and address, before their
    /// handshake is over: a peer that was here before sends its first bytes with its first packet
    /// and saves a round trip. 1 to 2^31 - 1. The kernel cuts it to `net.core.somaxconn`, and needs
    /// a `net.ipv4.tcp_fastopen` of 2, or 3 for both directions, where 1 is the default. The
    /// network may repeat such a packet, so the first request must be one that may come twice.
    /// Default off.
    pub fast_open: Option<u32>,
    /// `TCP_DEFER_ACCEPT`: a connection is accepted when its first bytes arrive, so that a silent
    /// one costs the server nothing; 1 s to 9 h. After that time the kernel accepts it all the
    /// same, at the next answer of its peer. The kernel counts repetitions of its answer, after 1
    /// s, 3 s, 7 s and so on, and takes the next of these times. For protocols in which the peer
    /// speaks first: a server's greeting would come late. Default off.
    pub defer_accept: Option<Duration>,
    /// `TCP_CONGESTION`: the congestion control of each connection, 1 to 15 ASCII letters, as
    /// `cubic` or `bbr`. It must be in `net.ipv4.tcp_available_congestion_control`, and for a
    /// process without `CAP_NET_ADMIN` in `net.ipv4.tcp_allowed_congestion_control`. Default:
    /// `net.ipv4.tcp_congestion_control`.
    pub congestion: Option<String>,
    /// `SO_INCOMING_CPU`: each shard's listener takes the connections whose first packet was
    /// handled on the CPU that the shard is pinned to; by default the kernel spreads them evenly.
    /// It needs pinned shards ([`Server::pin`](crate::Server::pin)) and Linux 6.2; older kernels
    /// rarely look at it. It helps where the network card has a receive queue for each CPU (RSS, or
    /// RPS) and its interrupts stay there: a connection's packets and its shard then share a cache.
    /// Where few CPUs handle all packets, as on most virtual machines with one queue, few shards
    /// get all connections: see [`ServerStats::skew`](crate::stats::ServerStats::skew). Connections
    /// from a CPU without a shard are spread. Default off.
    pub incoming_cpu: bool,
    /// Permissions of the files of Unix sockets, 0 to 0o777, set before any peer can connect:
    /// connecting takes permission to write. Default: 0o777 less the process's umask. Abstract
    /// names have none: every process of the network namespace may connect.
    pub unix_mode: Option<u32>,
}

/// Probes of silent peers by the kernel, which counts whole seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct KeepAlive {
    /// Silence before the first probe (`TCP_KEEPIDLE`), 1 s to 32767 s. Default 120 s: below the
    /// 350 s after which load balancers of large clouds forget a connection.
    pub idle: Duration,
    /// Time between probes (`TCP_KEEPINTVL`), 1 s to 32767 s. Default 15 s.
    pub interval: Duration,
    /// Unanswered probes after which the kernel gives the connection up (`TCP_KEEPCNT`), 1 to 127.
    /// Default 4. Fewer are sent if [`SocketOptions::user_timeout`] is over first.
    pub probes: u32,
}

impl Default for SocketOptions {
    fn default() -> SocketOptions {
        SocketOptions {
            backlog: 4096,
            no_delay: true,
            peer_address: true,
            local_address: false,
            peer_credentials: false,
            keep_alive: Some(KeepAlive::default()),
            user_timeout: Some(Duration::from_secs(180)),
            not_sent_bytes_max: Some(128 << 10),
            send_buffer_bytes: None,
            receive_buffer_bytes: None,
            fast_open: None,
            defer_accept: None,
            congestion: None,
            incoming_cpu: false,
            unix_mode: None,
        }
    }
}

impl SocketOptions {
    ringserve_core::setters! {
        values {
            backlog: u32, no_delay: bool, peer_address: bool, local_address: bool, peer_credentials: bool,
            incoming_cpu: bool,
        }
        options {
            keep_alive: KeepAlive, user_timeout: Duration, not_sent_bytes_max: u32, send_buffer_bytes: u32,
            receive_buffer_bytes: u32, fast_open: u32, defer_accept: Duration,
            unix_mode: u32,
        }
    }

    /// The same for sockets to upstreams: what the program left as it is notices sooner that a peer
    /// vanished. There questions are lost, and a connection is quickly made again.
    pub(crate) fn for_upstreams(&self) -> SocketOptions {
        let (default, mut options) = (SocketOptions::default(), self.clone());
        if options.keep_alive == default.keep_alive {
            let (idle, interval) = (Duration::from_secs(15), Duration::from_secs(5));
            options.keep_alive = Some(KeepAlive { idle, interval, probes: 3 });
        }
        if options.user_timeout == default.user_timeout {
            options.user_timeout = Some(Duration::from_secs(30));
        }
        options
    }

    /// The facts that a shard reads of each connection.
    pub(crate) fn asks(&self) -> SocketQueries {
        SocketQueries { local: self.local_address, credentials: self.peer_credentials }
    }

    /// Sets [`congestion`](field@Self::congestion).
    #[must_use]
    pub fn congestion(mut self, name: impl Into<String>) -> Self {
        self.congestion = Some(name.into());
        self
    }
}

impl Default for KeepAlive {
    fn default() -> KeepAlive {
        KeepAlive { idle: Duration::from_secs(120), interval: Duration::from_secs(15), probes: 4 }
    }
}

impl KeepAlive {
    ringserve_core::setters! {
        values {
            idle: Duration, interval: Duration, probes: u32,
        }
    }
}
