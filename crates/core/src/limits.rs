//! Bounds, with their checks.

use core::fmt;
use core::time::Duration;

use crate::wheel::STEP;

/// The bounds of a service and of each of its connections. Each has a default that is safe on the open Internet;
/// [`check`](Limits::check) refuses sets that contradict each other, and [`fitted`](Limits::fitted) lowers those that cost
/// memory. What all services of a server have together is in [`ServerLimits`].
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
    /// Bytes of one frame on the wire, 1 to 1 GiB. Default 1 MiB. A connection can make the server hold this
    /// much before its first frame is whole. The memory doubles as bytes come; a block that is used again for a frame, of
    /// which 32 KiB came, may be twice as large as the frame.
    pub frame_bytes_max: usize,
    /// Bytes queued and not yet taken by the kernel, for one connection, at which its frames are no longer
    /// handed to the service. Default 256 KiB.
    pub outbox_bytes_high: usize,
    /// Bytes queued at which they are handed on again; below `outbox_bytes_high`. Default 64 KiB.
    pub outbox_bytes_low: usize,
    /// Bytes queued at which a connection is closed, since its service produces without end; at least
    /// `outbox_bytes_high`. Default 64 MiB.
    pub outbox_bytes_max: usize,
    /// Bytes received and not yet handed to the service, for one connection, at which receiving stops. What is
    /// on the way then still arrives: at most one turn's worth, 1 MiB. Default 64 KiB.
    pub inbox_bytes_high: usize,
    /// Time from being accepted, or from the end of an [`open`](Limits::open_timeout) that waited, to the first whole frame.
    /// Default 30 s: a mobile client on a bad line needs seconds, an attacker wants forever.
    pub first_frame_timeout: Option<Duration>,
    /// Time in which nothing happens that [`idle_counts`](Limits::idle_counts), while no call waits; then the connection is
    /// closed, after the replies that were queued. The end of a call that waited counts as something that happens. Default
    /// 10 min, above the 5 min of common client pools, so that clients close first.
    pub idle_timeout: Option<Duration>,
    /// What keeps a connection from being idle: bytes either way, or only those that the peer sends, or takes. Default either.
    pub idle_counts: IdleCounts,
    /// Time in which the peer takes no byte of what is being sent. Default 30 s.
    pub write_stall_timeout: Option<Duration>,
    /// Bytes a second that a peer takes at least while something is being sent to it, 0 to 1 GiB, measured over 10 s, or over
    /// `write_stall_timeout` if that is shorter; 0 is no bound. A peer that takes everything that it is sent is never too
    /// slow, and time in which nothing is queued does not count. One that takes nothing has until `write_stall_timeout`, or, if
    /// that is off, 10 s. Default 240: slower than any modem, and it ends a peer that takes a little now and then to keep
    /// its connection and outbox for ever.
    pub write_bytes_per_second_min: usize,
    /// Bytes a second that a peer sends at least while a frame is half received, measured over 10 s; 0 is no bound.
    /// Time in which the server itself holds the connection back does not count. Default 240: slower than any modem,
    /// and it ends a peer that sends a byte now and then to keep a connection and its half frame for ever.
    pub read_bytes_per_second_min: usize,
    /// Time that a call may wait: then it is dropped and its connection closed, after the replies that were queued. Each of
    /// several calls in flight has that time. Default 60 s, as proxies give their upstreams.
    pub handler_timeout: Option<Duration>,
    /// Time that [`Service::open`] may wait: then it is dropped and its connection closed, after what it had queued.
    /// `first_frame_timeout` begins when it is done. Default 10 s: what a peer waits for before it may speak, such as a look-up
    /// of its address, takes less or fails.
    ///
    /// [`Service::open`]: https://docs.rs/ringserve/latest/ringserve/trait.Service.html
    pub open_timeout: Option<Duration>,
    /// Time from being accepted to the last byte of the PROXY header, at a listener that expects one; at least 3 s, the time
    /// after which a SYN/ACK that was lost twice is there, and at most `handshake_timeout`. Default 5 s: a proxy sends it
    /// with its first packet.
    pub proxy_header_timeout: Option<Duration>,
    /// Time from being accepted to being open, with everything that comes before [`Service::open`] is called: the PROXY header,
    /// and the handshake of a transport. The first byte does not end it. Default 10 s.
    ///
    /// [`Service::open`]: https://docs.rs/ringserve/latest/ringserve/trait.Service.html
    pub handshake_timeout: Option<Duration>,
    /// Time without a byte from the peer after which [`Service::heartbeat`] asks for a sign of life. Default off, since
    /// only a service knows how its protocol asks.
    ///
    /// [`Service::heartbeat`]: https://docs.rs/ringserve/latest/ringserve/trait.Service.html
    pub heartbeat_interval: Option<Duration>,
    /// Heartbeats that may stay without an answer, 1 to 255; when the time after the last one is over the connection
    /// is closed. Any byte is an answer. Default 3.
    pub heartbeats_missed_max: u8,
    /// Calls of one connection that may wait at once, 1 to 65535. Default 1: a connection's replies come in the order
    /// of its frames. More suits protocols whose replies carry the number of their request.
    pub calls_in_flight_max: u16,
    /// Tasks of one connection ([`Cx::spawn_on_connection`]) at once, 1 to 65535; a further one is refused. Each holds its
    /// future, which [`ServerLimits::held_bytes_max`] does not count. Default 64.
    ///
    /// [`Cx::spawn_on_connection`]: https://docs.rs/ringserve/latest/ringserve/struct.Cx.html
    pub connection_tasks_max: u16,
    /// Time that a closed connection's peer gets to close too, while its input is thrown away: closing earlier
    /// could destroy the last reply on its way. Default 2 s.
    pub linger_timeout: Duration,
}

/// The bounds of a server, whatever its services: connections, memory, upstreams and the end. Each has a default that is safe on
/// the open Internet. [`check`](ServerLimits::check) refuses values out of range, [`check_service`](ServerLimits::check_service)
/// a service that could not live within them. A server that is given none [fits](ServerLimits::fitted) the defaults into the
/// memory that it may use.
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
    /// Connections of the whole server at once, 1 to 16 million for each shard. Each shard takes its equal
    /// share. At the limit accepting pauses and the backlog pushes back; no peer is dropped. Default 1 000 000,
    /// less where the driver holds fewer. Costs nothing until they come.
    pub connections_max: usize,
    /// Connections of each shard that are not open yet, since what comes before [`Service::open`] is not whole, as a PROXY
    /// header or a handshake; 1 to 16 million. At the limit accepting pauses. Default 4096: with
    /// [`Limits::handshake_timeout`] no source gets more of the table than that by saying nothing.
    ///
    /// [`Service::open`]: https://docs.rs/ringserve/latest/ringserve/trait.Service.html
    pub handshakes_max: usize,
    /// Bytes that all connections of one shard hold together in outboxes, in frames that are not handed out, in calls that
    /// wait and in the buffers of HTTP. Beyond, those that hold most are closed until the rest is below: in the order of the
    /// powers of two of what they hold, and of connections that hold less than 4 KiB in one of these only if no other is there.
    /// From three quarters of it on a connection of which a call waits begins no other, and one that takes no frames is not
    /// received from. At least `outbox_bytes_max`, `frame_bytes_max` and `inbox_bytes_high`. Default 1 GiB.
    ///
    /// A call that waits counts with the size of its future, about 300 bytes, and with its frame if that is on the heap.
    /// What a handler allocates is not counted, nor are receive buffers, which have `receive_bytes_max`. Memory of large frames and
    /// replies that is kept for the next ones comes on top: a sixteenth of this for each, and 32 and 16 MiB at most.
    pub held_bytes_max: usize,
    /// Receive buffers of one shard together, at least one buffer and at most 32768 of them. They are taken in
    /// steps of 1 MiB as they are needed. Default 64 MiB. When frames kept by handlers pin half of it, frames
    /// are copied before they are handed out.
    pub receive_bytes_max: usize,
    /// Bytes of one receive buffer, 64 to 16 MiB. Default 16 KiB.
    pub receive_buffer_bytes: usize,
    /// Time to make a connection to an upstream ([`Shard::connect`]). Without it the kernel tries for about
    /// two minutes. Default 10 s.
    ///
    /// [`Shard::connect`]: https://docs.rs/ringserve/latest/ringserve/struct.Shard.html
    pub connect_timeout: Option<Duration>,
    /// Connections to upstreams that each shard may have at once, beside those it accepts. The ring's table has a place
    /// for each, 8 bytes of kernel memory, and is bound by `RLIMIT_NOFILE`: where both together exceed that, these get
    /// half of it at most. Default 1024.
    pub upstreams_max: usize,
    /// Threads for calls that block ([`Shard::spawn_blocking`]), 1 to 1024 for the whole server. Default 64: such calls mostly
    /// wait, for a disk or another server. None is started before it is needed, and one that was idle for 10 s ends. Each has a
    /// stack of 2 MiB, of which the memory that it touches is used.
    ///
    /// [`Shard::spawn_blocking`]: https://docs.rs/ringserve/latest/ringserve/struct.Shard.html
    pub blocking_threads_max: usize,
    /// Calls that block and wait for one of these threads, 0 to 1 million for the whole server; further ones are refused.
    /// Default 1024: with 64 threads and 10 ms for a call the last one waits 160 ms. Each costs what its function holds.
    pub blocking_queue_max: usize,
    /// Time that the factories of all services may take at the start, the futures of [`starting`] among them. Beyond, the start
    /// ends with an error that names the service and the shard that are waited for. 17 ms to a year. Off by default: a line
    /// of the log names them after 10 s.
    ///
    /// [`starting`]: https://docs.rs/ringserve/latest/ringserve/fn.starting.html
    pub start_timeout: Option<Duration>,
    /// Time that connections get to finish when the server shuts down; what is left then is reset. Default 25 s: Kubernetes
    /// kills after 30 s, and what does not end even when it is reset is given up 5 s later.
    pub drain_timeout: Duration,
    /// Time after the order to shut down in which the server goes on as before, 0 to a year, while
    /// [`Shard::is_draining`] already says so: for load balancers that learn from a readiness probe that no more
    /// connections are to come, and need a few probes for it. `drain_timeout` begins after it, so both together with 5 s should be
    /// below the time after which the process is killed. Default 0.
    ///
    /// [`Shard::is_draining`]: https://docs.rs/ringserve/latest/ringserve/struct.Shard.html
    pub drain_delay: Duration,
}

/// A server with two shards and nothing to do: 6 MiB resident.
const FIXED_BYTES: u64 = 8 << 20;

/// An idle connection takes 256 bytes of the process, and of the kernel 3.8 KB for its socket and 0.9 KB for its receive.
const CONNECTION_BYTES: usize = 5 << 10;

/// Below these no frame of a few KiB would pass.
const HELD_MIN: usize = 256 << 10;
const RECEIVE_BUFFERS_MIN: usize = 16;

/// What keeps a connection from being idle. Neither costs anything for a frame: the time is noted for each completion.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum IdleCounts {
    /// Bytes from the peer and bytes that it took. A peer that only listens stays for as long as the server has something for it,
    /// which [`Limits::write_stall_timeout`] sees it take. The limit rests while bytes are being sent.
    #[default]
    Either,
    /// Bytes from the peer alone. One that listens must say something within [`Limits::idle_timeout`], if only the answer to
    /// [`Service::heartbeat`], whatever it is sent. Time in which the server itself holds its input back does not count.
    ///
    /// [`Service::heartbeat`]: https://docs.rs/ringserve/latest/ringserve/trait.Service.html
    Received,
    /// Bytes that the peer took, and the end of a call that waited. A peer whose frames bring it nothing, such as pings without an
    /// answer, does not stay by sending them. The limit rests while bytes are being sent, of which
    /// [`Limits::write_stall_timeout`] sees whether the peer takes any.
    Sent,
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
            idle_counts: IdleCounts::Either,
            write_stall_timeout: Some(Duration::from_secs(30)),
            write_bytes_per_second_min: 240,
            read_bytes_per_second_min: 240,
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
        }
    }
}

/// Limits of one connection that differ from those of its service, for as long as it lives or until others are set. What is not
/// set is as the service's [`Limits`] say.
///
/// ```
/// use std::time::Duration;
///
/// use ringserve_core::{ConnLimits, IdleCounts};
///
/// // A client that promised a sign of life every minute.
/// let keeps_alive = ConnLimits::default().idle_timeout(Duration::from_secs(90)).idle_counts(IdleCounts::Received);
/// // A peer that did not log in yet.
/// let stranger = ConnLimits::default().frame_bytes_max(4096);
/// // A call that waits for as long as its peer does.
/// let patient = ConnLimits::default().handler_timeout(None);
/// # let _ = (keeps_alive, stranger, patient);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConnLimits {
    frame_bytes_max: Option<usize>,
    idle_timeout: Option<Option<Duration>>,
    idle_counts: Option<IdleCounts>,
    handler_timeout: Option<Option<Duration>>,
    heartbeat_interval: Option<Option<Duration>>,
}

impl ConnLimits {
    /// As [`Limits::frame_bytes_max`], from the next frame on, also of those that were received already. A frame that was begun and is
    /// beyond it already is too large.
    #[must_use]
    pub fn frame_bytes_max(self, bytes: usize) -> ConnLimits {
        ConnLimits { frame_bytes_max: Some(bytes), ..self }
    }

    /// As [`Limits::idle_timeout`]; `None` is off.
    #[must_use]
    pub fn idle_timeout(self, time: impl Into<Option<Duration>>) -> ConnLimits {
        ConnLimits { idle_timeout: Some(time.into()), ..self }
    }

    /// As [`Limits::idle_counts`].
    #[must_use]
    pub fn idle_counts(self, counts: IdleCounts) -> ConnLimits {
        ConnLimits { idle_counts: Some(counts), ..self }
    }

    /// As [`Limits::handler_timeout`], also for calls that wait already; `None` is off.
    #[must_use]
    pub fn handler_timeout(self, time: impl Into<Option<Duration>>) -> ConnLimits {
        ConnLimits { handler_timeout: Some(time.into()), ..self }
    }

    /// As [`Limits::heartbeat_interval`]; `None` is off.
    #[must_use]
    pub fn heartbeat_interval(self, time: impl Into<Option<Duration>>) -> ConnLimits {
        ConnLimits { heartbeat_interval: Some(time.into()), ..self }
    }

    /// What holds for a connection of a service with such limits.
    pub(crate) fn over(&self, service: &Limits) -> Limits {
        Limits {
            frame_bytes_max: self.frame_bytes_max.unwrap_or(service.frame_bytes_max),
            idle_timeout: self.idle_timeout.unwrap_or(service.idle_timeout),
            idle_counts: self.idle_counts.unwrap_or(service.idle_counts),
            handler_timeout: self.handler_timeout.unwrap_or(service.handler_timeout),
            heartbeat_interval: self.heartbeat_interval.unwrap_or(service.heartbeat_interval),
            ..service.clone()
        }
    }
}

/// Which limit is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LimitError {
    /// A value is out of its range.
    Range {
        /// The limit.
        name: &'static str,
        /// Its value; durations in milliseconds.
        value: u64,
        /// The smallest allowed.
        min: u64,
        /// The largest allowed.
        max: u64,
    },
    /// Two values contradict each other.
    Order {
        /// The limit that must be the smaller one.
        small: &'static str,
        /// Its value.
        small_value: u64,
        /// The limit that must be the larger one.
        large: &'static str,
        /// Its value.
        large_value: u64,
    },
}

impl fmt::Display for LimitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LimitError::Range { name, value, min, max } => {
                write!(f, "{name} is {value}; it must be {min} to {max}")
            }
            LimitError::Order { small, small_value, large, large_value } => {
                write!(f, "{small} is {small_value} and {large} is {large_value}; {small} must not be larger")
            }
        }
    }
}

impl core::error::Error for LimitError {}

impl Limits {
    /// Refuses values out of range and sets that contradict each other, naming both.
    ///
    /// # Errors
    /// The first thing found.
    pub fn check(&self) -> Result<(), LimitError> {
        let gib = 1u64 << 30;
        let bytes = [
            ("frame_bytes_max", self.frame_bytes_max, gib),
            ("outbox_bytes_high", self.outbox_bytes_high, 2 * gib),
            ("outbox_bytes_max", self.outbox_bytes_max, 2 * gib),
            ("inbox_bytes_high", self.inbox_bytes_high, gib),
            ("heartbeats_missed_max", self.heartbeats_missed_max.into(), 255),
            ("calls_in_flight_max", self.calls_in_flight_max.into(), 65535),
            ("connection_tasks_max", self.connection_tasks_max.into(), 65535),
        ];
        for (name, value, max) in bytes {
            in_range(name, value as u64, 1, max)?;
        }
        in_range("write_bytes_per_second_min", self.write_bytes_per_second_min as u64, 0, gib)?;
        in_range("read_bytes_per_second_min", self.read_bytes_per_second_min as u64, 0, gib)?;
        times_in_range([
            ("first_frame_timeout", self.first_frame_timeout),
            ("idle_timeout", self.idle_timeout),
            ("write_stall_timeout", self.write_stall_timeout),
            ("handler_timeout", self.handler_timeout),
            ("open_timeout", self.open_timeout),
            ("handshake_timeout", self.handshake_timeout),
            ("heartbeat_interval", self.heartbeat_interval),
            ("linger_timeout", Some(self.linger_timeout)),
        ])?;

        if let Some(header) = self.proxy_header_timeout {
            in_range("proxy_header_timeout", millis(header), millis(PROXY_HEADER_MIN), YEAR)?;
        }
        let in_order = [
            ("heartbeat_interval", self.heartbeat_interval, "idle_timeout", self.idle_timeout),
            ("proxy_header_timeout", self.proxy_header_timeout, "handshake_timeout", self.handshake_timeout),
        ];
        for (small, small_time, large, large_time) in in_order {
            if let (Some(small_time), Some(large_time)) = (small_time, large_time) {
                let millis = |time| usize::try_from(millis(time)).unwrap_or(usize::MAX);
                ordered(small, millis(small_time), large, millis(large_time))?;
            }
        }
        ordered("outbox_bytes_low", self.outbox_bytes_low, "outbox_bytes_high", self.outbox_bytes_high)?;
        ordered("outbox_bytes_high", self.outbox_bytes_high, "outbox_bytes_max", self.outbox_bytes_max)
    }

    /// These limits, lowered so that an outbox or a frame may have half of what a shard of such a server may hold. None is
    /// raised.
    ///
    /// A service whose program sets no limits has the defaults, fitted into those of its server.
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

    /// The limits that a shard's [`held_bytes_max`](ServerLimits::held_bytes_max) must not be below.
    fn held_bytes(&self) -> [(&'static str, usize); 3] {
        [
            ("outbox_bytes_max", self.outbox_bytes_max),
            ("frame_bytes_max", self.frame_bytes_max),
            ("inbox_bytes_high", self.inbox_bytes_high),
        ]
    }

    crate::setters! {
        values {
            frame_bytes_max: usize, outbox_bytes_high: usize, outbox_bytes_low: usize, outbox_bytes_max: usize,
            inbox_bytes_high: usize, idle_counts: IdleCounts, write_bytes_per_second_min: usize,
            read_bytes_per_second_min: usize, heartbeats_missed_max: u8, calls_in_flight_max: u16, connection_tasks_max: u16,
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
    /// The first thing found.
    pub fn check(&self) -> Result<(), LimitError> {
        in_range("connections_max", self.connections_max as u64, 1, u64::MAX)?;
        in_range("handshakes_max", self.handshakes_max as u64, 1, 1 << 24)?;
        in_range("held_bytes_max", self.held_bytes_max as u64, 1, u64::MAX)?;
        in_range("upstreams_max", self.upstreams_max as u64, 0, 1 << 23)?;
        in_range("blocking_threads_max", self.blocking_threads_max as u64, 1, 1024)?;
        in_range("blocking_queue_max", self.blocking_queue_max as u64, 0, 1_000_000)?;
        in_range("receive_buffer_bytes", self.receive_buffer_bytes as u64, 64, 16 << 20)?;
        let buffer = self.receive_buffer_bytes as u64;
        in_range("receive_bytes_max", self.receive_bytes_max as u64, buffer, buffer << 15)?;
        times_in_range([
            ("connect_timeout", self.connect_timeout),
            ("start_timeout", self.start_timeout),
            ("drain_timeout", Some(self.drain_timeout)),
        ])?;
        in_range("drain_delay", millis(self.drain_delay), 0, YEAR)
    }

    /// Refuses a service of which one connection may hold more than all together.
    ///
    /// # Errors
    /// The first contradiction found, and what [`Limits::check`] finds.
    pub fn check_service(&self, service: &Limits) -> Result<(), LimitError> {
        service.check()?;
        service
            .held_bytes()
            .into_iter()
            .try_for_each(|(name, bytes)| ordered(name, bytes, "held_bytes_max", self.held_bytes_max))
    }

    /// These limits, lowered so that a server of `shards` shards fits into `memory_bytes`: connections, receive memory, and what
    /// outboxes and unfinished frames hold. None is raised, and all are as small as they may be where nothing fits.
    ///
    /// 8 MiB are left for code, stacks and rings, and of the rest:
    ///
    /// | part | for |
    /// |---|---|
    /// | 1/4 | connections, at 5 KiB each: their state, and the kernel's socket |
    /// | 1/8 | [`receive_bytes_max`](ServerLimits::receive_bytes_max) of all shards |
    /// | 1/4 | [`held_bytes_max`](ServerLimits::held_bytes_max) of all shards; an outbox or a frame may have half of a shard's |
    /// | 3/8 | nothing: what sockets buffer, the allocator's loss, what calls build before it counts, the service |
    ///
    /// A server whose program sets no limits has the defaults, fitted into what the process may use.
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

    /// These limits, raised so that a shard may hold what one connection of the service may.
    pub fn with_room_for(self, service: &Limits) -> ServerLimits {
        let held_bytes_max = service.held_bytes().iter().fold(self.held_bytes_max, |most, of| most.max(of.1));
        ServerLimits { held_bytes_max, ..self }
    }

    /// The most memory that all of `shards` shards hold by these limits in receive buffers, outboxes and unfinished frames.
    pub fn memory_bytes(&self, shards: usize) -> u64 {
        (self.held_bytes_max as u64)
            .saturating_add(self.receive_bytes_max as u64)
            .saturating_mul(shards as u64)
    }

    /// Receive buffers a shard may have.
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
}

/// A method for each field, so that users change defaults without the struct's literal, which could get no field more.
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

/// [`Limits::proxy_header_timeout`] at least: TCP sends a SYN/ACK again after 1 s and 3 s.
const PROXY_HEADER_MIN: Duration = Duration::from_secs(3);

/// In milliseconds.
const YEAR: u64 = 365 * 24 * 3600 * 1000;

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

fn times_in_range<const N: usize>(times: [(&'static str, Option<Duration>); N]) -> Result<(), LimitError> {
    let step = STEP.as_millis() as u64 + 1;
    let set = times.into_iter().filter_map(|(name, time)| Some((name, time?)));
    set.into_iter().try_for_each(|(name, time)| in_range(name, millis(time), step, YEAR))
}

fn in_range(name: &'static str, value: u64, min: u64, max: u64) -> Result<(), LimitError> {
    if (min..=max).contains(&value) { Ok(()) } else { Err(LimitError::Range { name, value, min, max }) }
}

pub(crate) fn ordered(
    small: &'static str,
    small_value: usize,
    large: &'static str,
    large_value: usize,
) -> Result<(), LimitError> {
    if small_value <= large_value {
        return Ok(());
    }
    Err(LimitError::Order { small, small_value: small_value as u64, large, large_value: large_value as u64 })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::string::ToString;

    #[test]
    fn the_defaults_hold_together() {
        assert_eq!(ServerLimits::default().check(), Ok(()));
        assert_eq!(ServerLimits::default().check_service(&Limits::default()), Ok(()));
    }

    #[test]
    fn limits_fit_into_any_memory_and_contradict_each_other_in_none() {
        for shards in [0, 1, 2, 64, 1024] {
            for shift in 0..=64 {
                let bytes = 1u64.checked_shl(shift).unwrap_or(u64::MAX);
                let server = ServerLimits::default().fitted(bytes, shards);
                let limits = Limits::default().fitted(&server);
                assert_eq!(server.check(), Ok(()), "{bytes} bytes, {shards} shards");
                assert_eq!(server.check_service(&limits), Ok(()), "{bytes} bytes, {shards} shards");
                let least = (HELD_MIN + RECEIVE_BUFFERS_MIN * server.receive_buffer_bytes) * shards;
                let fits = server.memory_bytes(shards) <= bytes / 2 + least as u64;
                assert!(fits, "{bytes} bytes, {shards} shards: {server:?}");
            }
        }
        let server = ServerLimits::default();
        assert_eq!(server.clone().fitted(64 << 30, 2), server);
        assert_eq!(Limits::default().fitted(&server), Limits::default());
        let own = ServerLimits { held_bytes_max: 1 << 20, ..server };
        assert_eq!(own.fitted(64 << 30, 2).held_bytes_max, 1 << 20, "no limit is raised");
    }

    #[test]
    fn a_server_has_room_for_what_one_connection_may_hold() {
        let little = ServerLimits { held_bytes_max: 1 << 20, ..ServerLimits::default() };
        let error = little.check_service(&Limits::default()).unwrap_err().to_string();
        assert!(error.starts_with("outbox_bytes_max is 67108864 and held_bytes_max is 1048576"), "{error}");
        assert_eq!(little.with_room_for(&Limits::default()).check_service(&Limits::default()), Ok(()));
    }

    #[test]
    fn a_contradiction_names_both_limits() {
        let limits = Limits { outbox_bytes_low: 10, outbox_bytes_high: 5, ..Limits::default() };
        let text = limits.check().unwrap_err().to_string();
        assert!(text.starts_with("outbox_bytes_low is 10 and outbox_bytes_high is 5"), "{text}");
    }

    #[test]
    fn a_value_out_of_range_is_named_with_its_range() {
        let limits = Limits { first_frame_timeout: Some(Duration::ZERO), ..Limits::default() };
        assert!(
            limits.check().unwrap_err().to_string().starts_with("first_frame_timeout is 0; it must be 17 to")
        );
        let limits = Limits::default().proxy_header_timeout(Duration::from_secs(2));
        assert!(
            limits
                .check()
                .unwrap_err()
                .to_string()
                .starts_with("proxy_header_timeout is 2000; it must be 3000 to")
        );
        let limits = Limits::default().handshake_timeout(Duration::from_secs(4));
        let text = limits.check().unwrap_err().to_string();
        assert!(text.starts_with("proxy_header_timeout is 5000 and handshake_timeout is 4000"), "{text}");
        let limits = ServerLimits { handshakes_max: 0, ..ServerLimits::default() };
        assert!(limits.check().is_err());
        let limits = ServerLimits { receive_bytes_max: 1, ..ServerLimits::default() };
        assert!(limits.check().is_err());
        let limits = ServerLimits { drain_delay: Duration::MAX, ..ServerLimits::default() };
        assert!(limits.check().unwrap_err().to_string().starts_with("drain_delay is "));
    }
}
