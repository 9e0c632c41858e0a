//! Bounds of HTTP.

use std::time::Duration;

use hyper::server::conn::{http1, http2};

use ringserve_core::LimitError;

use super::runtime::{ShardExecutor, ShardTimer};

/// Which protocols a server speaks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum HttpVersions {
    /// Both, distinguished by the first bytes of a connection.
    #[default]
    Both,
    /// HTTP/1.1 alone (and 1.0).
    Http1,
    /// HTTP/2 with prior knowledge alone.
    Http2,
}

/// Bounds of HTTP, in addition to the [`Limits`](crate::Limits) of the connections below.
///
/// Bytes that hyper holds for a connection count in
/// [`ServerLimits::held_bytes_max`](crate::limits::ServerLimits::held_bytes_max): of responses the
/// bytes that it has not passed on, of the peer's bytes at most those read since the oldest request
/// began that may have an unread body, and no more than
/// [`buffer_bytes_max`](HttpOptions::buffer_bytes_max), or with HTTP/2
/// [`connection_window_bytes`](HttpOptions::connection_window_bytes) and
/// [`header_bytes_max`](HttpOptions::header_bytes_max). So a connection whose body streams for
/// long, as in calls of gRPC that stream, counts with all of that, whether the service reads or
/// not.
///
/// A client of HTTP/1.1 may half-close its connection after its requests (`nc -N`): each request
/// that arrived whole is still answered, to the last byte. A FIN alone therefore cancels no
/// service; a reset does, at once. A client that never reads its answer is closed by
/// [`Limits::write_stall_timeout`](crate::Limits::write_stall_timeout).
///
/// ```
/// use ringserve::http::HttpOptions;
///
/// let options = HttpOptions::default().streams_max(1000);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HttpOptions {
    /// Which protocols are spoken. Default both.
    pub versions: HttpVersions,
    /// Time for the head of a request of HTTP/1.1, from the first moment the server waits for it:
    /// so a connection that is kept alive and asks for nothing ends after this time too. With
    /// HTTP/2, and until it is clear which one it is, the time for the first 24 bytes. What a
    /// service of HTTP/1.1 reads of a body after its answer may come meanwhile, at
    /// [`body_bytes_per_second_min`](HttpOptions::body_bytes_per_second_min) over this time. Off
    /// with `None`: then [`Limits::first_frame_timeout`](crate::Limits::first_frame_timeout) and
    /// [`Limits::idle_timeout`](crate::Limits::idle_timeout) are all there is. Default 30 s, as
    /// hyper has it.
    pub header_timeout: Option<Duration>,
    /// Bytes of the head of a request, at most [`buffer_bytes_max`](HttpOptions::buffer_bytes_max).
    /// More is answered with 431, and an endless row of CONTINUATION frames closes the connection.
    /// Default 16 KiB, what hyper takes with HTTP/2: a browser with many cookies stays below it.
    pub header_bytes_max: u32,
    /// Header fields of a request of HTTP/1.1. More are answered with 431. Default 100; any other
    /// number costs an allocation for each request.
    pub headers_max: usize,
    /// Whether a connection of HTTP/1.1 takes another request after the first. Default true.
    pub keep_alive: bool,
    /// Bytes that a connection of HTTP/1.1 buffers in each direction, 8 KiB or more. Default 64
    /// KiB: a peer that sends or makes the server send without end can make it hold twice as much,
    /// in addition to the outbox.
    pub buffer_bytes_max: usize,
    /// Requests of one connection of HTTP/2 at once. Default 200, as hyper has it.
    pub streams_max: u32,
    /// Bytes a peer may send on one stream of HTTP/2 before the service reads. Default 1 MiB, as
    /// hyper has it: less bounds the speed of uploads over long ways.
    pub stream_window_bytes: u32,
    /// The same for all streams of a connection together: what it can make the server hold of
    /// bodies. Default 1 MiB.
    pub connection_window_bytes: u32,
    /// Bytes of one stream of HTTP/2 that are kept for sending before its service is held back.
    /// Default 400 KiB, as hyper has it.
    pub send_bytes_max: usize,
    /// The same for all streams of a connection of HTTP/2 together, 1 byte to 1 GiB: beyond it,
    /// only streams of which nothing is kept make their next piece. This and one piece for each of
    /// [`streams_max`](HttpOptions::streams_max) streams is what a peer that reads nothing can make
    /// the server hold, in addition to the outbox, until [`rate_window`](HttpOptions::rate_window)
    /// is over. A service that gives a body as one piece is not held back within it. Default 4 MiB:
    /// ten streams at full speed.
    pub connection_send_bytes_max: usize,
    /// Time after which a silent peer of HTTP/2 is asked for a sign of life. Default off.
    pub ping_interval: Option<Duration>,
    /// Time it has for that; then the connection is closed. Default 20 s.
    pub ping_timeout: Duration,
    /// Bytes a second that a peer has to send of a request's body while the service waits for it,
    /// and to take of a response while it has to be sent, up to 1 GiB; 0 is no bound. A body that
    /// comes too slowly is answered with 408, or its connection reset where the response began. A
    /// response that goes too slowly ends with its connection, or with its stream where the peer
    /// keeps that stream's window closed. Request bodies are measured one by one with HTTP/1.1.
    /// With HTTP/2 they are measured together, and
    /// [`response_timeout`](HttpOptions::response_timeout) ends those that do not come: hyper gives
    /// the service its own [`Incoming`](hyper::body::Incoming), which has no stream number, so it
    /// cannot be seen which body the service waits for and whose bytes arrive. Default 240, as
    /// [`Limits::read_bytes_per_second_min`](crate::Limits::read_bytes_per_second_min).
    pub body_bytes_per_second_min: usize,
    /// Time over which that is measured, 10 ms to an hour; it ends a peer up to two fifths of it
    /// late. Default 30 s: a reader that pauses for less loses nothing.
    pub rate_window: Duration,
    /// Time for the service to begin its response, 10 ms to a year; up to two fifths of
    /// [`rate_window`](HttpOptions::rate_window) longer and never shorter. Time in which the
    /// connection brings [`body_bytes_per_second_min`](HttpOptions::body_bytes_per_second_min) for
    /// each of its requests that has a body and no response does not count for them. Then the
    /// service's future is dropped and the peer answered with 503. It bounds clients of HTTP/1.1
    /// that vanish with a FIN, and bodies of HTTP/2 that stop. More, or `None`, suits long polling
    /// and calls of gRPC whose response begins late. Default 60 s, as proxies give their upstreams.
    pub response_timeout: Option<Duration>,
    /// Time from the head of a request to the last byte of its response, 10 ms to a year, with the
    /// same precision. Then the peer is answered with 503, or where the response began its stream
    /// of HTTP/2 or connection of HTTP/1.1 is reset. Default off, since downloads and streams take
    /// as long as they take.
    pub request_timeout: Option<Duration>,
    /// Time without a request after which GOAWAY asks a connection of HTTP/2 to end, 10 ms to a
    /// year, whatever PING, SETTINGS or WINDOW_UPDATE it sends; one that stays is reset a
    /// [`rate_window`](HttpOptions::rate_window) later. With HTTP/1.1
    /// [`header_timeout`](HttpOptions::header_timeout) is this limit. Default 10 min, as
    /// [`Limits::idle_timeout`](crate::Limits::idle_timeout).
    pub http2_idle_timeout: Option<Duration>,
    /// Streams of HTTP/2 that a peer opened and reset before the server looked at them. More close
    /// the connection: so rapid resets cost the server nothing. Default 20, as hyper has it.
    pub pending_resets_max: usize,
    /// Streams of a connection of HTTP/2 that the server reset because of the peer's errors. More
    /// close the connection. Default 1024, as hyper has it.
    pub error_resets_max: usize,
    /// Whether a client of HTTP/2 may open a WebSocket on a stream (RFC 8441), with an extended
    /// CONNECT that the service is asked: one that takes CONNECT answers it as any other, and must
    /// not say 200 to it. Without it browsers open a connection of HTTP/1.1 for it. Default true
    /// with the feature `websocket`.
    pub websocket_streams: bool,
    /// Whether responses have a `date` header. Default true. In a simulation they have none: hyper
    /// takes it from the system's clock, which no seed decides.
    pub date: bool,
}

/// The number of headers for which hyper has room on its stack.
const HEADERS_MAX: usize = 100;

/// Whether requests may ask for WebSocket on a stream of HTTP/2.
const HAS_WEBSOCKET: bool = cfg!(feature = "websocket");

impl Default for HttpOptions {
    fn default() -> HttpOptions {
        HttpOptions {
            versions: HttpVersions::Both,
            header_timeout: Some(Duration::from_secs(30)),
            header_bytes_max: 16 << 10,
            headers_max: HEADERS_MAX,
            keep_alive: true,
            buffer_bytes_max: 64 << 10,
            streams_max: 200,
            stream_window_bytes: 1 << 20,
            connection_window_bytes: 1 << 20,
            send_bytes_max: 400 << 10,
            connection_send_bytes_max: 4 << 20,
            ping_interval: None,
            ping_timeout: Duration::from_secs(20),
            body_bytes_per_second_min: 240,
            rate_window: Duration::from_secs(30),
            response_timeout: Some(Duration::from_secs(60)),
            request_timeout: None,
            http2_idle_timeout: Some(Duration::from_secs(600)),
            pending_resets_max: 20,
            error_resets_max: 1024,
            websocket_streams: HAS_WEBSOCKET,
            date: true,
        }
    }
}

impl HttpOptions {
    /// Refuses values out of range, naming them. A server checks them at its start.
    ///
    /// # Errors
    /// The first thing found.
    pub fn check(&self) -> Result<(), LimitError> {
        let (kib, gib) = (1u64 << 10, 1u64 << 30);
        let numbers = [
            // The first, as it bounds another one.
            ("HttpOptions::buffer_bytes_max", self.buffer_bytes_max as u64, 8 * kib, gib),
            ("HttpOptions::header_bytes_max", self.header_bytes_max.into(), 1, self.buffer_bytes_max as u64),
            ("HttpOptions::headers_max", self.headers_max as u64, 1, 1 << 15),
            ("HttpOptions::streams_max", self.streams_max.into(), 1, (1 << 31) - 1),
            ("HttpOptions::stream_window_bytes", self.stream_window_bytes.into(), 1, (1 << 31) - 1),
            // hyper never takes less than the protocol begins with.
            ("HttpOptions::connection_window_bytes", self.connection_window_bytes.into(), 1, (1 << 31) - 1),
            ("HttpOptions::send_bytes_max", self.send_bytes_max as u64, 1, 4 * gib - 1),
            ("HttpOptions::connection_send_bytes_max", self.connection_send_bytes_max as u64, 1, gib),
            ("HttpOptions::body_bytes_per_second_min", self.body_bytes_per_second_min as u64, 0, gib),
        ];
        for (name, value, min, max) in numbers {
            in_range(name, value, min, max)?;
        }
        let (hour, year) = (Duration::from_secs(3600), Duration::from_secs(365 * 24 * 3600));
        let times = [
            ("HttpOptions::rate_window", Some(self.rate_window), hour),
            ("HttpOptions::response_timeout", self.response_timeout, year),
            ("HttpOptions::request_timeout", self.request_timeout, year),
            ("HttpOptions::http2_idle_timeout", self.http2_idle_timeout, year),
        ];
        let min = Duration::from_millis(10);
        for (name, time, max) in times {
            if let Some(value) = time.filter(|time| !(min..=max).contains(time)) {
                let may_be_off = name != "HttpOptions::rate_window";
                return Err(LimitError::Time { name, value, min, max, may_be_off });
            }
        }
        Ok(())
    }

    ringserve_core::setters! {
        values {
            versions: HttpVersions, header_bytes_max: u32, headers_max: usize, keep_alive: bool,
            buffer_bytes_max: usize, streams_max: u32, stream_window_bytes: u32,
            connection_window_bytes: u32, send_bytes_max: usize, connection_send_bytes_max: usize,
            ping_timeout: Duration, body_bytes_per_second_min: usize, rate_window: Duration,
            pending_resets_max: usize, error_resets_max: usize, websocket_streams: bool, date: bool,
        }
        options {
            header_timeout: Duration, ping_interval: Duration, response_timeout: Duration,
            request_timeout: Duration, http2_idle_timeout: Duration,
        }
    }

    /// A builder of hyper's for HTTP/1.1 with these bounds, and a shard's timers.
    ///
    /// # Panics
    /// If [`buffer_bytes_max`](HttpOptions::buffer_bytes_max) is below 8 KiB.
    pub fn http1(&self, timer: ShardTimer) -> http1::Builder {
        let has_date = self.has_date(&timer);
        let mut builder = http1::Builder::new();
        builder
            .timer(timer)
            // Else a FIN behind the request cancels its answer. hyper also reads ahead for that FIN
            // then.
            .half_close(true)
            .header_read_timeout(self.header_timeout)
            .max_header_size(self.header_bytes_max as usize)
            .max_buf_size(self.buffer_bytes_max)
            .keep_alive(self.keep_alive)
            .auto_date_header(has_date);
        if self.headers_max != HEADERS_MAX {
            builder.max_headers(self.headers_max);
        }
        builder
    }

    /// A builder of hyper's for HTTP/2 with these bounds, whose tasks and timers are a shard's.
    ///
    /// # Panics
    /// If [`send_bytes_max`](HttpOptions::send_bytes_max) is 4 GiB or more.
    pub fn http2(&self, executor: ShardExecutor, timer: ShardTimer) -> http2::Builder<ShardExecutor> {
        self.build_http2(executor, timer)
    }

    pub(super) fn build_http2<E: Clone>(&self, executor: E, timer: ShardTimer) -> http2::Builder<E> {
        let has_date = self.has_date(&timer);
        let mut builder = http2::Builder::new(executor);
        builder
            .timer(timer)
            .max_header_list_size(self.header_bytes_max)
            .max_concurrent_streams(self.streams_max)
            .initial_stream_window_size(self.stream_window_bytes)
            .initial_connection_window_size(self.connection_window_bytes)
            .max_send_buf_size(self.send_bytes_max)
            .max_pending_accept_reset_streams(self.pending_resets_max)
            .max_local_error_reset_streams(self.error_resets_max)
            .keep_alive_interval(self.ping_interval)
            .keep_alive_timeout(self.ping_timeout)
            .auto_date_header(has_date);
        if self.websocket_streams {
            builder.enable_connect_protocol();
        }
        builder
    }

    fn has_date(&self, timer: &ShardTimer) -> bool {
        self.date && !timer.is_simulated()
    }
}

fn in_range(name: &'static str, value: u64, min: u64, max: u64) -> Result<(), LimitError> {
    if (min..=max).contains(&value) { Ok(()) } else { Err(LimitError::Range { name, value, min, max }) }
}
