//! From a wish to be connected to an upstream to its stream.

use std::cell::Cell;
use std::fmt;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use ringserve_core::Address;

use super::byte_stream::Stream;
use crate::shard::attempts::{Attempt, Progress};
use crate::shard::handle::Shard;

impl Shard {
    /// Connects to an upstream, over the shard's own driver. The connection is a [`Stream`](crate::Stream) like an accepted one, and
    /// dropping it closes it.
    ///
    /// An address is an IP address with a port, or [`Address::unix`]; names are not resolved, since that blocks. Socket
    /// options are those of accepted connections ([`SocketOptions`](crate::net::SocketOptions)). Of the
    /// [`Limits`](crate::Limits) those of outboxes, `inbox_bytes_high`, `write_stall_timeout`, `write_bytes_per_second_min` and `linger_timeout` hold for each, with
    /// counters of their own, and `held_bytes_max` for all connections of the shard together; there is no limit on how long an
    /// upstream may be silent.
    ///
    /// When the server shuts down, connections to upstreams stay until the last accepted one is closed; then what is queued
    /// for them leaves, and they are closed.
    ///
    /// ```no_run
    /// use std::net::SocketAddr;
    /// use ringserve::net::copy_bidirectional;
    /// use ringserve::{Server, Stream, stream};
    ///
    /// # fn main() -> Result<(), ringserve::Error> {
    /// let upstream: SocketAddr = ([127, 0, 0, 1], 8000).into();
    /// Server::bind("127.0.0.1:7000").serve(move |_shard| {
    ///     stream(async move |mut client: Stream| {
    ///         let mut upstream = client.shard().connect(upstream).await?;
    ///         copy_bidirectional(&mut client, &mut upstream).await.map_err(|broken| broken.error)
    ///     })
    /// })
    /// # }
    /// ```
    ///
    /// # Errors
    /// The kernel's, as `ConnectionRefused`; `TimedOut` after [`ServerLimits::connect_timeout`](crate::limits::ServerLimits::connect_timeout); `ResourceBusy` if
    /// the shard has [`ServerLimits::upstreams_max`](crate::limits::ServerLimits::upstreams_max) of them.
    pub fn connect(&self, address: impl Into<Address>) -> Connecting {
        Connecting::new(address.into(), self)
    }
}

/// Waits for a connection to an upstream. See [`Shard::connect`]. Dropping it gives the attempt up.
#[must_use = "a future does nothing until it is awaited"]
pub struct Connecting {
    attempt: Rc<Attempt>,
    shard: Shard,
}

impl Connecting {
    fn new(address: Address, shard: &Shard) -> Connecting {
        let attempt =
            Rc::new(Attempt { progress: Cell::new(Progress::Asked(address)), waker: Cell::default() });
        shard.upstream_requests().ask(attempt.clone());
        shard.remote().announce_upstreams();
        Connecting { attempt, shard: shard.clone() }
    }
}

impl Future for Connecting {
    type Output = io::Result<Stream>;

    fn poll(self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<io::Result<Stream>> {
        match self.attempt.progress.take() {
            Progress::Done(result) => {
                Poll::Ready(result.map(|shared| Stream::new(shared, self.shard.clone())))
            }
            other => {
                self.attempt.progress.set(other);
                self.attempt.waker.set(Some(task.waker().clone()));
                Poll::Pending
            }
        }
    }
}

impl Drop for Connecting {
    fn drop(&mut self) {
        match self.attempt.progress.take() {
            Progress::Connecting(id) => {
                self.shard.upstream_requests().give_up(id);
                self.shard.remote().announce_upstreams();
            }
            // No task will ever read or write it.
            Progress::Done(Ok(shared)) => shared.close(),
            _ => {}
        }
    }
}

impl fmt::Debug for Connecting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Connecting")
    }
}
