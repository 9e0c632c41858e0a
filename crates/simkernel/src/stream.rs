//! The client's end of a connection.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::connection::{Connection, Side};
use crate::shared::Shared;

/// A connected client with the interface of [`TcpStream`](std::net::TcpStream) that tests need.
/// Clones are the same end; dropping the last one closes it.
#[derive(Clone)]
pub struct BlockingStream {
    end: Arc<ClientEnd>,
}

/// State that clones share.
struct ClientEnd {
    shared: Arc<Shared>,
    number: u32,
    addrs: (SocketAddr, SocketAddr),
    options: Mutex<Options>,
}

#[derive(Clone, Copy, Default)]
struct Options {
    read_timeout: Option<Duration>,
    write_timeout: Option<Duration>,
    nonblocking: bool,
    reset_on_close: bool,
}

impl Drop for ClientEnd {
    fn drop(&mut self) {
        let reset = self.options().reset_on_close;
        let mut state = self.shared.lock();
        state.close(self.number, Side::Client, reset);
    }
}

impl ClientEnd {
    fn options(&self) -> Options {
        *self.options.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, set: impl FnOnce(&mut Options)) {
        set(&mut self.options.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Repeats an action until it does not have to wait, or the time is over.
    fn until<T>(
        &self,
        timeout: Option<Duration>,
        mut act: impl FnMut(&mut Connection) -> Result<T, i32>,
    ) -> io::Result<T> {
        let timeout = if self.options().nonblocking { Some(Duration::ZERO) } else { timeout };
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        let mut state = self.shared.lock();
        loop {
            match act(state.connection(self.number)) {
                Err(libc::EAGAIN) => {}
                done => {
                    state.notify_end(self.number, Side::Server);
                    return done.map_err(io::Error::from_raw_os_error);
                }
            }
            if deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                return Err(io::Error::from_raw_os_error(libc::EAGAIN));
            }
            state = self.shared.wait(state, deadline);
        }
    }
}

impl BlockingStream {
    pub(crate) fn new(shared: Arc<Shared>, number: u32, addrs: (SocketAddr, SocketAddr)) -> BlockingStream {
        BlockingStream { end: Arc::new(ClientEnd { shared, number, addrs, options: Mutex::default() }) }
    }

    /// Its own address.
    pub fn local_addr(&self) -> SocketAddr {
        self.end.addrs.0
    }

    /// The address to which it connected.
    pub fn peer_addr(&self) -> SocketAddr {
        self.end.addrs.1
    }

    /// Sets how long a read waits, without limit for `None`; then it fails with `WouldBlock`. Holds
    /// for all clones.
    pub fn set_read_timeout(&self, timeout: Option<Duration>) {
        self.end.set(|options| options.read_timeout = timeout);
    }

    /// Sets how long a write waits, like [`set_read_timeout`](BlockingStream::set_read_timeout).
    pub fn set_write_timeout(&self, timeout: Option<Duration>) {
        self.end.set(|options| options.write_timeout = timeout);
    }

    /// Sets whether a call that would have to wait fails with `WouldBlock` instead.
    pub fn set_nonblocking(&self, nonblocking: bool) {
        self.end.set(|options| options.nonblocking = nonblocking);
    }

    /// Sets whether the close is a reset, as with a linger time of zero.
    pub fn set_reset_on_close(&self, reset_on_close: bool) {
        self.end.set(|options| options.reset_on_close = reset_on_close);
    }

    /// Reads, but leaves everything in place.
    ///
    /// # Errors
    /// Those of a read.
    pub fn peek(&self, into: &mut [u8]) -> io::Result<usize> {
        self.end.until(self.end.options().read_timeout, |connection| connection.peek(Side::Client, into))
    }

    /// Ends writing. Ending reading means nothing here, as it means nothing to a TCP peer.
    ///
    /// # Errors
    /// `NotConnected` after a reset.
    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        match how {
            Shutdown::Read => Ok(()),
            Shutdown::Write | Shutdown::Both => {
                self.end.until(None, |connection| connection.shut_down(Side::Client))
            }
        }
    }
}

impl Read for BlockingStream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.end.until(self.end.options().read_timeout, |connection| connection.read(Side::Client, into))
    }
}

impl Write for BlockingStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.end.until(self.end.options().write_timeout, |connection| connection.write(Side::Client, bytes))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl fmt::Debug for BlockingStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BlockingStream({} to {})", self.local_addr(), self.peer_addr())
    }
}
