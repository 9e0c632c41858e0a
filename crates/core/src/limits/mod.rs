//! Limits of services, connections and servers, with their checks, and in the form that a shard
//! keeps.
// May use: tables, time.
// Begin with: `Limits`; `own.rs` has those of one connection.

mod error;
mod own;
mod read_rate;
mod times;

use core::time::Duration;

pub use error::LimitError;
pub(crate) use error::ordered;
pub use own::ConnLimits;
pub(crate) use read_rate::{Meter, Meters, ReadRates};
pub(crate) use times::{RATE_WINDOW, Times};

use error::{TIME_MIN, in_order, in_range, time_in_range, times_in_range};

/// Limits of a service and of each of its connections. Every default is safe on the open Internet.
/// [`check`](Limits::check) refuses sets that contradict each other; [`fitted`](Limits::fitted)
/// lowers those that cost memory. Limits that all services of a server share are in
/// [`ServerLimits`].
///
/// A time limit that runs out while the shard is away, in a call that blocks it or since the
/// process is stopped, is judged once the shard has looked at what the peer sent meanwhile, up to
/// 1.1 s later.
///
/// ```
/// use std::time::Duration;
///
/// use ringserve::Limits;
///
/// let limits = Limits::default().frame_bytes_max(4096).idle_timeout(Duration::from_secs(60)).heartbeat_interval(None);
/// assert_eq!(limits.check(), Ok(()));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Limits {
    /// Bytes of one frame on the wire, 1 to 1 GiB. Default 1 MiB. A peer can make the server hold
    /// this much before its first frame is whole. The buffer of a frame doubles as bytes arrive.
    /// From 32 KiB on it may be a reused one, which may be twice as large as the frame.
    pub frame_bytes_max: usize,
    /// Bytes queued for one connection and not yet accepted by the kernel, at which the service
    /// gets no more of its frames. Default 256 KiB.
    pub outbox_bytes_high: usize,
    /// Bytes queued at which the service gets frames again; below `outbox_bytes_high`. Default 64
    /// KiB.
    pub outbox_bytes_low: usize,
    /// Bytes queued at which a connection is closed because its service produces without end; at
    /// least `outbox_bytes_high`. Default 64 MiB.
    pub outbox_bytes_max: usize,
    /// Bytes received for one connection and not yet handed to the service, at which receiving
    /// stops. Bytes already on their way still arrive: at most 1 MiB. Default 64 KiB.
    pub inbox_bytes_high: usize,
    /// Time until the first whole frame, from the accept, or from the end of an
    /// [`open`](Limits::open_timeout) that waited. Default 30 s: a mobile client on a bad line
    /// needs seconds.
    pub first_frame_timeout: Option<Duration>,
    /// Time that a connection may be idle before it is closed. Queued replies are sent first.
    /// [`idle_counts`](Limits::idle_counts) selects the bytes that end idleness; a connection with
    /// a pending call is not idle, and the end of that call starts the time again. Default 10 min,
    /// above the 5 min of common client pools, so that clients close first.
    pub idle_timeout: Option<Duration>,
    /// The bytes that keep a connection from being idle: received, sent or either. Default either.
    pub idle_counts: IdleActivity,
    /// Time for which the peer may take no byte of queued data before its connection is reset.
    /// Default 30 s.
    pub write_stall_timeout: Option<Duration>,
    /// Bytes a second that a peer must take while data is queued for it, 0 to 1 GiB, measured over
    /// 10 s, or over `write_stall_timeout` if that is shorter; 0 switches the limit off. A peer
    /// that takes everything is never too slow, and time with nothing queued does not count. A peer
    /// that takes nothing has until `write_stall_timeout`, or 10 s if that is off. Default 240:
    /// slower than any modem. It ends a peer that takes a few bytes now and then to keep its
    /// connection and outbox forever.
    pub write_bytes_per_second_min: usize,
    /// Bytes a second that a peer must send while a frame is half received, measured over 10 s; 0
    /// switches the limit off. Time in which the server holds the connection back does not count.
    /// Default 240: slower than any modem. It ends a peer that sends a byte now and then to keep
    /// its connection and half a frame forever.
    pub read_bytes_per_second_min: usize,
    /// Frames that a peer may send in a second, up to 1 million; 0, the default, switches the limit
    /// off. A peer may send at once what it did not use within the last second, so in any time of
    /// `t` seconds the service gets at most `limit × (1 + t)` frames. A frame that is handed out in
    /// pieces counts once for each, and bytes of a stream once for each receive: bound the bytes of
    /// those. [`when_read_too_fast`](Limits::when_read_too_fast) decides what happens to frames
    /// that come faster. A connection with this limit or the next costs 56 bytes more.
    pub read_frames_per_second_max: u32,
    /// Bytes of frames that a peer may send in a second, up to 1 GiB; 0, the default, switches the
    /// limit off. At most `limit × (1 + t)` bytes, and the rest of one frame, reach the service in
    /// any time of `t` seconds: a frame that is larger than the remaining allowance is handed out,
    /// and the next one waits until it is paid for. Not below `read_bytes_per_second_min`.
    pub read_bytes_per_second_max: usize,
    /// Treatment of a peer that sends faster than `read_frames_per_second_max` or
    /// `read_bytes_per_second_max`. Default [`HoldBack`](ReadRateAction::HoldBack).
    pub when_read_too_fast: ReadRateAction,
    /// Time that a call may stay pending before its connection is closed. Queued replies are sent
    /// first. Each of several calls in flight has this time. Default 60 s, as proxies give their
    /// upstreams.
    pub handler_timeout: Option<Duration>,
    /// Time that [`Service::open`] may stay pending before its connection is closed. Queued replies
    /// are sent first. `first_frame_timeout` begins when `open` returns. Default 10 s: a look-up of
    /// the peer's address takes less, or fails.
    ///
    /// [`Service::open`]: https://docs.rs/ringserve/latest/ringserve/trait.Service.html
    pub open_timeout: Option<Duration>,
    /// Time from the accept to the last byte of the PROXY header, at a listener that expects one;
    /// at least 3 s, after which a SYN/ACK that was lost twice has arrived, and at most
    /// `handshake_timeout`. Default 5 s: a proxy sends the header with its first packet.
    pub proxy_header_timeout: Option<Duration>,
    /// Time from the accept to the call of [`Service::open`], the PROXY header and the handshake of
    /// a transport included. Bytes that arrive do not extend it. Default 10 s.
    ///
    /// [`Service::open`]: https://docs.rs/ringserve/latest/ringserve/trait.Service.html
    pub handshake_timeout: Option<Duration>,
    /// Silence of the peer after which [`Service::heartbeat`] asks for a sign of life. Default off,
    /// since only a service knows how its protocol asks.
    ///
    /// [`Service::heartbeat`]: https://docs.rs/ringserve/latest/ringserve/trait.Service.html
    pub heartbeat_interval: Option<Duration>,
    /// Unanswered heartbeats, 1 to 255, after which the connection is closed: one
    /// `heartbeat_interval` after the last of them. Any byte is an answer. Default 3.
    pub heartbeats_missed_max: u8,
    /// Calls of one connection that may be pending at once, 1 to 65535. Default 1: replies keep the
    /// order of the frames. A higher value suits protocols whose replies carry the number of their
    /// request.
    pub calls_in_flight_max: u16,
    /// Tasks of one connection ([`Cx::spawn_on_connection`]) at once, 1 to 65535; further ones are
    /// refused. Each holds its future, which [`ServerLimits::held_bytes_max`] does not count.
    /// Default 64.
    ///
    /// [`Cx::spawn_on_connection`]: https://docs.rs/ringserve/latest/ringserve/struct.Cx.html
    pub connection_tasks_max: u16,
    /// Time that a closing connection waits for the peer to close too. It begins when the last byte
    /// and FIN are queued in the kernel, whether or not the peer took them by then; input is
    /// dropped meanwhile. An earlier close could destroy the last reply on its way. Default 2 s.
    pub linger_timeout: Duration,
}

/// Limits that all services of a server share: connections, memory, upstreams and the shutdown.
/// Every default is safe on the open Internet. [`check`](ServerLimits::check) refuses values out of
/// range, [`check_service`](ServerLimits::check_service) a service that does not fit into them. If
/// the program sets no limits, a server takes the defaults, [fitted](ServerLimits::fitted) into the
/// memory that the process may use.
///
/// ```
/// use std::time::Duration;
///
/// use ringserve::limits::ServerLimits;
///
/// let limits = ServerLimits::default().connections_max(50_000).drain_timeout(Duration::from_secs(10));
/// assert_eq!(limits.check(), Ok(()));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ServerLimits {
    /// Connections of the whole server at once, 1 to 16 million for each shard, shared equally by
    /// the shards. At the limit accepting pauses and new connections wait in the backlog; no peer
    /// is dropped. Default 1 000 000, less if the driver holds fewer. Unused room costs nothing.
    pub connections_max: usize,
    /// Connections of each listener and shard that are not open yet because their PROXY header or
    /// handshake is not whole; 1 to 16 million. Default 4096: sources that send nothing get no more
    /// of the table than that for each such listener, and no more memory than that many handshakes
    /// take, a few KiB each with TLS.
    ///
    /// From half of the limit on such a connection has less time: [`Limits::handshake_timeout`] at
    /// half of it, 3 s at the limit. At the limit one of them is reset for each new connection: the
    /// oldest that sent no byte and is older than 1 s, else the oldest that is older than 3 s. It
    /// counts as [`HandshakeTimeout`](crate::CloseReason::HandshakeTimeout) or
    /// [`ProxyTimeout`](crate::CloseReason::ProxyTimeout). A connection that waits for the shard
    /// stays. If none may be reset, accepting pauses at that listener, and at no other. While
    /// `connections_max` is reached one is reset in the same way, of the listener that has most of
    /// them.
    pub handshakes_max: usize,
    /// Bytes that all connections of one shard hold together in outboxes, unread frames, pending
    /// calls and HTTP buffers. Default 1 GiB; at least `outbox_bytes_max`, `frame_bytes_max` and
    /// `inbox_bytes_high`.
    ///
    /// From three quarters of the limit on, a connection with a pending call begins no other, and
    /// one whose frames are not taken is not received from. Above the limit connections are closed
    /// until the rest fits: those that hold most first, compared by powers of two. A connection
    /// that holds less than 4 KiB in one of these places is closed only if no other is left. The
    /// driver keeps their bytes in flight for a moment more: until it gives them back no call
    /// begins or goes on while both together are above the limit. So the process uses at most a
    /// quarter more than this limit, in addition to the receive buffers.
    ///
    /// A pending call counts with the size of its future, about 300 bytes, and with its frame if
    /// that is on the heap. Memory that a handler allocates is not counted; receive buffers have
    /// `receive_bytes_max`. Blocks kept for the next large frames and replies are added: a
    /// sixteenth of this limit for each kind, at most 32 and 16 MiB. Below 16 KiB a service needs
    /// [`Limits`] that fit, since the defaults would be lowered to less than 8 KiB a frame.
    pub held_bytes_max: usize,
    /// Receive buffers of one shard together, at least one buffer and at most 32768 of them,
    /// allocated in steps of 1 MiB as needed. Default 64 MiB. When frames kept by handlers pin half
    /// of them, further frames are copied before the service gets them. Bytes that wait for a call
    /// or for the reader of a stream stay in their buffers only while at most a quarter is pinned.
    pub receive_bytes_max: usize,
    /// Bytes of one receive buffer, 64 to 16 MiB. Default 16 KiB.
    pub receive_buffer_bytes: usize,
    /// Time to connect to an upstream ([`Shard::connect`]). If it is off, the kernel tries for
    /// about two minutes, and the wait for a Unix socket with a full queue is unlimited. Default 10
    /// s.
    ///
    /// [`Shard::connect`]: https://docs.rs/ringserve/latest/ringserve/struct.Shard.html
    pub connect_timeout: Option<Duration>,
    /// Connections to upstreams that each shard may have at once, in addition to accepted ones.
    /// Each takes an entry of the ring's table, 8 bytes of kernel memory, and `RLIMIT_NOFILE`
    /// bounds that table: if both together exceed it, upstreams get at most half. Default 1024.
    pub upstreams_max: usize,
    /// Threads for blocking calls ([`Shard::spawn_blocking`]), 1 to 1024 for the whole server.
    /// Default 64: such calls usually wait for a disk or another server. A thread starts when it is
    /// needed and ends after 10 s without work. Each has a stack of 2 MiB, of which only touched
    /// pages take memory.
    ///
    /// [`Shard::spawn_blocking`]: https://docs.rs/ringserve/latest/ringserve/struct.Shard.html
    pub blocking_threads_max: usize,
    /// Blocking calls that may wait for a thread, 0 to 1 million for the whole server; further ones
    /// are refused. Default 1024: with 64 threads and 10 ms for a call the last one waits 160 ms.
    /// Each costs the memory that its function holds.
    pub blocking_queue_max: usize,
    /// Time that the factories of all services may take at startup, futures of [`from_future`]
    /// included. Above it the start fails with an error that names the service and the shard. 17 ms
    /// to a year. Off by default: a log line names both after 10 s.
    ///
    /// [`from_future`]: https://docs.rs/ringserve/latest/ringserve/factory/fn.from_future.html
    pub start_timeout: Option<Duration>,
    /// Time that connections have to finish when the server shuts down; the rest is reset. Default
    /// 25 s: Kubernetes kills after 30 s, which leaves 5 s for connections that do not even end by
    /// a reset.
    pub drain_timeout: Duration,
    /// Time for which the server goes on as before after the order to shut down, 0 to a year, while
    /// [`Shard::is_draining`] already returns true: load balancers need a few readiness probes
    /// before they stop sending connections. `drain_timeout` begins after it, so both together plus
    /// 5 s must be below the time after which the supervisor kills the process. Default 0.
    ///
    /// [`Shard::is_draining`]: https://docs.rs/ringserve/latest/ringserve/struct.Shard.html
    pub drain_delay: Duration,
    /// Time over which connections are closed once the server shuts down and `drain_delay` is over,
    /// 0 to `drain_timeout`: each at its own moment, in random order, so that their peers do not
    /// all come back to other servers at once. Until then requests are answered as before, and a
    /// connection that owes nothing at its moment is closed. The last moment is 1 s before
    /// `drain_timeout` is over, or half of it if that is less: a longer spread is cut to that.
    ///
    /// `None`, the default, is 1 s for each 1000 connections that the server has then, at most half
    /// of `drain_timeout`. 0 closes all at once. A shard keeps 8 bytes for each connection
    /// meanwhile.
    pub drain_spread: Option<Duration>,
}

/// A server with two shards and nothing to do: 6 MiB resident.
const FIXED_BYTES: u64 = 8 << 20;

/// Memory of an idle connection: 251 bytes of the process; 3.8 KB of the kernel for the socket and
/// 0.9 KB for the receive.
const CONNECTION_BYTES: usize = 5 << 10;

/// The lowest value: below it there would be no room for a frame of a few KiB.
const HELD_MIN: usize = 256 << 10;
/// The lowest value for default limits. Half of it suffices for the heads of HTTP and for the lines
/// of most protocols.
const HELD_BY_DEFAULT_MIN: usize = 16 << 10;
const RECEIVE_BUFFERS_MIN: usize = 16;

/// The bytes that keep a connection from being idle. No choice adds a cost to a frame: the time is
/// noted for each completion.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
#[doc(alias = "IdleCounts")]
pub enum IdleActivity {
    /// Bytes that the peer sends, and bytes that it takes. A peer that only listens stays as long
    /// as the server has data for it and [`Limits::write_stall_timeout`] sees the peer take it. The
    /// limit rests while bytes are being sent.
    #[default]
    Either,
    /// Only bytes that the peer sends. A peer that only listens must send something within
    /// [`Limits::idle_timeout`], if only the answer to [`Service::heartbeat`], whatever the server
    /// sends to it. Time in which the server leaves the peer's bytes unread does not count.
    ///
    /// [`Service::heartbeat`]: https://docs.rs/ringserve/latest/ringserve/trait.Service.html
    Received,
    /// Only bytes that the peer takes, and the end of a pending call. A peer whose frames get no
    /// reply, such as pings without an answer, cannot stay by sending them. The limit rests while
    /// bytes are being sent; [`Limits::write_stall_timeout`] checks whether the peer takes any.
    Sent,
}

/// Treatment of a peer that sends faster than it may: [`Limits::read_frames_per_second_max`] and
/// [`Limits::read_bytes_per_second_max`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
#[doc(alias = "WhenTooFast")]
pub enum ReadRateAction {
    /// Its frames wait, in their order, until it may send them. At [`Limits::inbox_bytes_high`]
    /// receiving stops, so that the rest waits with the peer. No reply is lost, but each may be
    /// late: the delay is in steps of 17 ms. Such a peer is not idle, even if its FIN follows the
    /// waiting frames: it keeps its place for at most `inbox_bytes_high` and a frame at this rate.
    /// A shutdown of the server hands out received frames at once.
    #[default]
    HoldBack,
    /// Its connection is closed ([`CloseReason::ReadTooFast`](crate::CloseReason::ReadTooFast))
    /// once a whole frame came too early. Queued replies are sent first. A frame with more bytes
    /// than a second allows leaves a debt to the next one, however slowly it came itself.
    Close,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            frame_bytes_max: 1 << 20,
            outbox_bytes_high: 256 << 10,
            outbox_bytes_low: 64 << 10,
            outbox_bytes_max: 64 << 20,
            inbox_bytes_high: 64 << 10,
            first_frame_timeout: Some(Duration::from_secs(30)),
            idle_timeout: Some(Duration::from_secs(600)),
            idle_counts: IdleActivity::Either,
            write_stall_timeout: Some(Duration::from_secs(30)),
            write_bytes_per_second_min: 240,
            read_bytes_per_second_min: 240,
            read_frames_per_second_max: 0,
            read_bytes_per_second_max: 0,
            when_read_too_fast: ReadRateAction::HoldBack,
            handler_timeout: Some(Duration::from_secs(60)),
            open_timeout: Some(Duration::from_secs(10)),
            proxy_header_timeout: Some(Duration::from_secs(5)),
            handshake_timeout: Some(Duration::from_secs(10)),
            heartbeat_interval: None,
            heartbeats_missed_max: 3,
            calls_in_flight_max: 1,
            connection_tasks_max: 64,
            linger_timeout: Duration::from_secs(2),
        }
    }
}

impl Default for ServerLimits {
    fn default() -> ServerLimits {
        ServerLimits {
            connections_max: 1_000_000,
            handshakes_max: 4096,
            held_bytes_max: 1 << 30,
            receive_bytes_max: 64 << 20,
            receive_buffer_bytes: 16 << 10,
            connect_timeout: Some(Duration::from_secs(10)),
            upstreams_max: 1024,
            blocking_threads_max: 64,
            blocking_queue_max: 1024,
            start_timeout: None,
            drain_timeout: Duration::from_secs(25),
            drain_delay: Duration::ZERO,
            drain_spread: None,
        }
    }
}

impl Limits {
    /// Refuses values out of range, and pairs that contradict each other.
    ///
    /// # Errors
    /// The first fault found, with names and values.
    pub fn check(&self) -> Result<(), LimitError> {
        let gib = 1u64 << 30;
        let bytes = [
            ("Limits::frame_bytes_max", self.frame_bytes_max, gib),
            ("Limits::outbox_bytes_high", self.outbox_bytes_high, 2 * gib),
            ("Limits::outbox_bytes_max", self.outbox_bytes_max, 2 * gib),
            ("Limits::inbox_bytes_high", self.inbox_bytes_high, gib),
            ("Limits::heartbeats_missed_max", self.heartbeats_missed_max.into(), 255),
            ("Limits::calls_in_flight_max", self.calls_in_flight_max.into(), 65535),
            ("Limits::connection_tasks_max", self.connection_tasks_max.into(), 65535),
        ];
        for (name, value, max) in bytes {
            in_range(name, value as u64, 1, max)?;
        }
        in_range("Limits::write_bytes_per_second_min", self.write_bytes_per_second_min as u64, 0, gib)?;
        in_range("Limits::read_bytes_per_second_min", self.read_bytes_per_second_min as u64, 0, gib)?;
        in_range("Limits::read_frames_per_second_max", self.read_frames_per_second_max.into(), 0, 1_000_000)?;
        in_range("Limits::read_bytes_per_second_max", self.read_bytes_per_second_max as u64, 0, gib)?;
        if self.read_bytes_per_second_max > 0 {
            let [least, most] = [self.read_bytes_per_second_min, self.read_bytes_per_second_max];
            ordered("Limits::read_bytes_per_second_min", least, "Limits::read_bytes_per_second_max", most)?;
        }
        times_in_range([
            ("Limits::first_frame_timeout", self.first_frame_timeout),
            ("Limits::idle_timeout", self.idle_timeout),
            ("Limits::write_stall_timeout", self.write_stall_timeout),
            ("Limits::handler_timeout", self.handler_timeout),
            ("Limits::open_timeout", self.open_timeout),
            ("Limits::handshake_timeout", self.handshake_timeout),
            ("Limits::heartbeat_interval", self.heartbeat_interval),
        ])?;
        time_in_range("Limits::linger_timeout", self.linger_timeout, TIME_MIN, false)?;

        if let Some(header) = self.proxy_header_timeout {
            time_in_range("Limits::proxy_header_timeout", header, PROXY_HEADER_MIN, true)?;
        }
        in_order(
            "Limits::heartbeat_interval",
            self.heartbeat_interval,
            "Limits::idle_timeout",
            self.idle_timeout,
        )?;
        let handshake = self.handshake_timeout;
        in_order(
            "Limits::proxy_header_timeout",
            self.proxy_header_timeout,
            "Limits::handshake_timeout",
            handshake,
        )?;
        ordered(
            "Limits::outbox_bytes_low",
            self.outbox_bytes_low,
            "Limits::outbox_bytes_high",
            self.outbox_bytes_high,
        )?;
        ordered(
            "Limits::outbox_bytes_high",
            self.outbox_bytes_high,
            "Limits::outbox_bytes_max",
            self.outbox_bytes_max,
        )
    }

    /// These limits, lowered so that one outbox or one frame takes at most half of what a shard of
    /// such a server may hold. Nothing is raised.
    ///
    /// If the program sets no limits, a service takes the defaults, fitted into those of its
    /// server.
    pub fn fitted(self, server: &ServerLimits) -> Limits {
        let most = server.held_bytes_max / 2;
        let outbox_bytes_max = self.outbox_bytes_max.min(most);
        let outbox_bytes_high = self.outbox_bytes_high.min(outbox_bytes_max);
        Limits {
            frame_bytes_max: self.frame_bytes_max.min(most),
            outbox_bytes_high,
            outbox_bytes_low: self.outbox_bytes_low.min(outbox_bytes_high / 2),
            outbox_bytes_max,
            inbox_bytes_high: self.inbox_bytes_high.min(most),
            ..self
        }
    }

    /// The limits that bound [`held_bytes_max`](ServerLimits::held_bytes_max) of a shard from
    /// below.
    fn held_bytes(&self) -> [(&'static str, usize); 3] {
        [
            ("Limits::outbox_bytes_max", self.outbox_bytes_max),
            ("Limits::frame_bytes_max", self.frame_bytes_max),
            ("Limits::inbox_bytes_high", self.inbox_bytes_high),
        ]
    }

    crate::setters! {
        values {
            frame_bytes_max: usize, outbox_bytes_high: usize, outbox_bytes_low: usize, outbox_bytes_max: usize,
            inbox_bytes_high: usize, idle_counts: IdleActivity, write_bytes_per_second_min: usize,
            read_bytes_per_second_min: usize, read_frames_per_second_max: u32, read_bytes_per_second_max: usize,
            when_read_too_fast: ReadRateAction, heartbeats_missed_max: u8, calls_in_flight_max: u16, connection_tasks_max: u16,
            linger_timeout: Duration,
        }
        options {
            first_frame_timeout: Duration, idle_timeout: Duration, write_stall_timeout: Duration,
            handler_timeout: Duration, open_timeout: Duration, proxy_header_timeout: Duration, handshake_timeout: Duration,
            heartbeat_interval: Duration,
        }
    }
}

impl ServerLimits {
    /// Refuses values out of range.
    ///
    /// # Errors
    /// The first fault found.
    pub fn check(&self) -> Result<(), LimitError> {
        in_range("ServerLimits::connections_max", self.connections_max as u64, 1, u64::MAX)?;
        in_range("ServerLimits::handshakes_max", self.handshakes_max as u64, 1, 1 << 24)?;
        in_range("ServerLimits::held_bytes_max", self.held_bytes_max as u64, 1, u64::MAX)?;
        in_range("ServerLimits::upstreams_max", self.upstreams_max as u64, 0, 1 << 23)?;
        in_range("ServerLimits::blocking_threads_max", self.blocking_threads_max as u64, 1, 1024)?;
        in_range("ServerLimits::blocking_queue_max", self.blocking_queue_max as u64, 0, 1_000_000)?;
        in_range("ServerLimits::receive_buffer_bytes", self.receive_buffer_bytes as u64, 64, 16 << 20)?;
        let buffer = self.receive_buffer_bytes as u64;
        in_range("ServerLimits::receive_bytes_max", self.receive_bytes_max as u64, buffer, buffer << 15)?;
        times_in_range([
            ("ServerLimits::connect_timeout", self.connect_timeout),
            ("ServerLimits::start_timeout", self.start_timeout),
        ])?;
        time_in_range("ServerLimits::drain_timeout", self.drain_timeout, TIME_MIN, false)?;
        time_in_range("ServerLimits::drain_delay", self.drain_delay, Duration::ZERO, false)?;
        in_order(
            "ServerLimits::drain_spread",
            self.drain_spread,
            "ServerLimits::drain_timeout",
            Some(self.drain_timeout),
        )
    }

    /// Refuses a service if one of its connections may hold more than the whole shard.
    ///
    /// # Errors
    /// The first contradiction found, or a fault that [`Limits::check`] finds.
    pub fn check_service(&self, service: &Limits) -> Result<(), LimitError> {
        service.check()?;
        service.held_bytes().into_iter().try_for_each(|(name, bytes)| {
            ordered(name, bytes, "ServerLimits::held_bytes_max", self.held_bytes_max)
        })
    }

    /// Refuses a [`held_bytes_max`](ServerLimits::held_bytes_max) into which the limits of a
    /// service that sets none cannot be [fitted](Limits::fitted): below 16 KiB its frames and
    /// outboxes would have less than 8 KiB.
    ///
    /// # Errors
    /// [`LimitError::HeldBytes`].
    pub fn check_defaults(&self) -> Result<(), LimitError> {
        let (value, min) = (self.held_bytes_max as u64, HELD_BY_DEFAULT_MIN as u64);
        if value < min { Err(LimitError::HeldBytes { value, min }) } else { Ok(()) }
    }

    /// These limits, lowered so that a server of `shards` shards fits into `memory_bytes`:
    /// connections, receive memory, outboxes and unfinished frames. Nothing is raised; if nothing
    /// fits, all are as small as they may be.
    ///
    /// 8 MiB are left for code, stacks and rings. The rest is divided:
    ///
    /// | part | for |
    /// |---|---|
    /// | 1/4 | connections, at 5 KiB each: their state, and the kernel's socket |
    /// | 1/8 | [`receive_bytes_max`](ServerLimits::receive_bytes_max) of all shards |
    /// | 1/4 | [`held_bytes_max`](ServerLimits::held_bytes_max) of all shards; an outbox or a frame may have half of a shard's |
    /// | 3/8 | a reserve: socket buffers, the allocator's loss, memory of calls before it counts, the service |
    ///
    /// If the program sets no limits, a server takes the defaults, fitted into the memory that the
    /// process may use.
    ///
    /// ```
    /// use ringserve_core::{Limits, ServerLimits};
    ///
    /// let server = ServerLimits::default().fitted(40 << 20, 2);
    /// assert_eq!((server.connections_max, server.held_bytes_max), (1638, 4 << 20));
    /// assert_eq!(server.check_service(&Limits::default().fitted(&server)), Ok(()));
    /// ```
    pub fn fitted(self, memory_bytes: u64, shards: usize) -> ServerLimits {
        let rest = usize::try_from(memory_bytes.saturating_sub(FIXED_BYTES)).unwrap_or(usize::MAX);
        let shards = shards.max(1);
        ServerLimits {
            connections_max: self.connections_max.min((rest / 4 / CONNECTION_BYTES).max(1)),
            held_bytes_max: self.held_bytes_max.min((rest / 4 / shards).max(HELD_MIN)),
            receive_bytes_max: self
                .receive_bytes_max
                .min((rest / 8 / shards).max(RECEIVE_BUFFERS_MIN * self.receive_buffer_bytes)),
            ..self
        }
    }

    /// These limits, raised so that a shard may hold as much as one connection of the service may.
    pub fn with_room_for(self, service: &Limits) -> ServerLimits {
        let held_bytes_max = service.held_bytes().iter().fold(self.held_bytes_max, |most, of| most.max(of.1));
        ServerLimits { held_bytes_max, ..self }
    }

    /// The most memory that `shards` shards together hold under these limits in receive buffers,
    /// outboxes and unfinished frames.
    pub fn memory_bytes(&self, shards: usize) -> u64 {
        (self.held_bytes_max as u64)
            .saturating_add(self.receive_bytes_max as u64)
            .saturating_mul(shards as u64)
    }

    /// The most receive buffers of a shard.
    pub fn receive_buffers_max(&self) -> usize {
        self.receive_bytes_max / self.receive_buffer_bytes
    }

    crate::setters! {
        values {
            connections_max: usize, handshakes_max: usize, held_bytes_max: usize, receive_bytes_max: usize, receive_buffer_bytes: usize,
            upstreams_max: usize, blocking_threads_max: usize, blocking_queue_max: usize,
            drain_timeout: Duration, drain_delay: Duration,
        }
        options {
            connect_timeout: Duration, start_timeout: Duration,
        }
    }

    /// Sets [`drain_spread`](field@Self::drain_spread); `None` goes by the number of connections.
    #[must_use]
    pub fn drain_spread(mut self, time: impl Into<Option<Duration>>) -> Self {
        self.drain_spread = time.into();
        self
    }
}

/// Defines a method for each field: users change defaults without a struct literal, so fields can
/// be added.
#[doc(hidden)]
#[macro_export]
macro_rules! setters {
    (values { $($value:ident: $type:ty,)* } $(options { $($option:ident: $inside:ty,)* })?) => {
        $(
            #[doc = concat!("Sets [`", stringify!($value), "`](field@Self::", stringify!($value), ").")]
            #[must_use]
            pub fn $value(mut self, $value: $type) -> Self {
                self.$value = $value;
                self
            }
        )*
        $($(
            #[doc = concat!("Sets [`", stringify!($option), "`](field@Self::", stringify!($option), "); `None` is off.")]
            #[must_use]
            pub fn $option(mut self, $option: impl Into<Option<$inside>>) -> Self {
                self.$option = $option.into();
                self
            }
        )*)?
    };
}

/// The lowest [`Limits::proxy_header_timeout`]: TCP sends a SYN/ACK again after 1 s and 3 s.
const PROXY_HEADER_MIN: Duration = Duration::from_secs(3);

#[cfg(test)]
mod tests;
