//! What bounds HTTP.

use std::time::Duration;

use hyper::server::conn::{http1, http2};

use super::{ShardExecutor, ShardTimer};

/// Which protocols a server speaks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HttpVersions {
    /// Both, told by the first bytes of a connection.
    #[default]
    Both,
    /// HTTP/1.1 alone (and 1.0).
    Http1,
    /// HTTP/2 with prior knowledge alone.
    Http2,
}

/// Bounds of HTTP, beside the [`Limits`](crate::Limits) of the connections below.
///
/// A client of HTTP/1.1 may half-close its connection after its requests (`nc -N`): each request that arrived whole is still
/// answered, to the last byte. A FIN alone therefore cancels no service; a reset does, at once. A client that never reads
/// its answer is closed by [`Limits::write_stalled`](crate::Limits::write_stalled).
///
/// ```
/// use ringserve_server::http::HttpOptions;
///
/// let options = HttpOptions { streams_max: 1000, ..HttpOptions::default() };
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HttpOptions {
    /// Which protocols are spoken. Default both.
    pub versions: HttpVersions,
    /// Time for the head of a request of HTTP/1.1, from the first moment the server waits for it: so a connection that is
    /// kept alive and asks for nothing ends after this time too. With HTTP/2, and until it is clear which one it is, the
    /// time for the first 24 bytes. Off with `None`: then [`Limits::first_frame`](crate::Limits::first_frame) and
    /// [`Limits::idle`](crate::Limits::idle) are all there is. Default 30 s, as hyper has it.
    pub header_read: Option<Duration>,
    /// Bytes of the head of a request, at most [`buffer_bytes_max`](HttpOptions::buffer_bytes_max). More is answered with
    /// 431. Default 16 KiB, what hyper takes with HTTP/2: a browser with many cookies stays below it.
    pub header_bytes_max: u32,
    /// Header fields of a request of HTTP/1.1. More are answered with 431. Default 100; any other number costs an
    /// allocation for each request.
    pub headers_max: usize,
    /// Whether a connection of HTTP/1.1 takes another request after the first. Default true.
    pub keep_alive: bool,
    /// Bytes that a connection of HTTP/1.1 buffers in each direction, 8 KiB or more. Default 64 KiB: a peer that sends or
    /// makes the server send without end can make it hold twice as much, beside the outbox.
    pub buffer_bytes_max: usize,
    /// Requests of one connection of HTTP/2 at once. Default 200, as hyper has it.
    pub streams_max: u32,
    /// Bytes a peer may send on one stream of HTTP/2 before the service reads. Default 1 MiB, as hyper has it: less bounds
    /// the speed of uploads over long ways.
    pub stream_window_bytes: u32,
    /// The same for all streams of a connection together: what it can make the server hold of bodies. Default 1 MiB.
    pub connection_window_bytes: u32,
    /// Bytes of one stream of HTTP/2 that are kept for sending before its service is held back. Default 400 KiB, as hyper has
    /// it; [`streams_max`](HttpOptions::streams_max) times this is what a peer that reads nothing can make the server hold.
    pub send_bytes_max: usize,
    /// Time after which a silent peer of HTTP/2 is asked for a sign of life. Default off.
    pub ping: Option<Duration>,
    /// Time it has for that; then the connection is closed. Default 20 s.
    pub ping_answer: Duration,
    /// Whether responses have a `date` header. Default true.
    pub date: bool,
}

/// What hyper has on its stack.
const HEADERS_MAX: usize = 100;

impl Default for HttpOptions {
    fn default() -> HttpOptions {
        HttpOptions {
            versions: HttpVersions::Both,
            header_read: Some(Duration::from_secs(30)),
            header_bytes_max: 16 << 10,
            headers_max: HEADERS_MAX,
            keep_alive: true,
            buffer_bytes_max: 64 << 10,
            streams_max: 200,
            stream_window_bytes: 1 << 20,
            connection_window_bytes: 1 << 20,
            send_bytes_max: 400 << 10,
            ping: None,
            ping_answer: Duration::from_secs(20),
            date: true,
        }
    }
}

impl HttpOptions {
    /// A builder of hyper's for HTTP/1.1 with these bounds, and a shard's timers.
    ///
    /// # Panics
    /// If [`buffer_bytes_max`](HttpOptions::buffer_bytes_max) is below 8 KiB.
    pub fn http1(&self, timer: ShardTimer) -> http1::Builder {
        let mut builder = http1::Builder::new();
        builder
            .timer(timer)
            // Else a FIN behind the request cancels its answer. hyper also reads ahead for that FIN then.
            .half_close(true)
            .header_read_timeout(self.header_read)
            .max_header_size(self.header_bytes_max as usize)
            .max_buf_size(self.buffer_bytes_max)
            .keep_alive(self.keep_alive)
            .auto_date_header(self.date);
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
        let mut builder = http2::Builder::new(executor);
        builder
            .timer(timer)
            .max_header_list_size(self.header_bytes_max)
            .max_concurrent_streams(self.streams_max)
            .initial_stream_window_size(self.stream_window_bytes)
            .initial_connection_window_size(self.connection_window_bytes)
            .max_send_buf_size(self.send_bytes_max)
            .keep_alive_interval(self.ping)
            .keep_alive_timeout(self.ping_answer)
            .auto_date_header(self.date);
        builder
    }
}
