//! Sockets of clients in virtual time: calls that would wait leave a waker.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use crate::connection::{Connection, Direction, Side};
use crate::shared::Shared;
use crate::state::NEVER;

/// Names a connection of a [`Network`](crate::Network), for as long as either end is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnectionId(pub(crate) u32);

/// A client's TCP socket. Dropping it closes it, as `close(2)` does: with FIN after the written
/// bytes, or with a reset if bytes that arrived were not read.
///
/// Each call does as much as it can at once. A call that would wait returns [`Poll::Pending`] and
/// wakes the task of its context later, the last one for reading and the last one for writing.
pub struct Socket {
    shared: Arc<Shared>,
    place: Place,
}

#[derive(Clone, Copy)]
enum Place {
    /// `at` is the end of the handshake, once it has begun.
    Connecting {
        from: IpAddr,
        to: SocketAddr,
        at: Option<Duration>,
    },
    Connected {
        number: u32,
        side: Side,
        addrs: (SocketAddr, SocketAddr),
    },
    Failed,
}

impl Socket {
    pub(crate) fn connecting(shared: Arc<Shared>, from: IpAddr, to: SocketAddr) -> Socket {
        Socket { shared, place: Place::Connecting { from, to, at: None } }
    }

    /// Connects. It waits for a place in the listener's backlog (4096), and for the end of a
    /// partition, without a limit.
    ///
    /// # Errors
    /// `ConnectionRefused` if there is no listener; `NotConnected` after an error.
    pub fn poll_connect(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let Place::Connecting { from, to, at } = &mut self.place else {
            return Poll::Ready(self.end().map(drop));
        };
        let mut state = self.shared.lock();
        let now = state.now();
        let until = *at.get_or_insert_with(|| now.saturating_add(state.handshake()));
        if now < until {
            state.connect_later(until, cx.waker());
            return Poll::Pending;
        }
        let uneven = self.shared.plan.has_faults();
        let connected = match state.connect(*from, *to, None, uneven) {
            Err(libc::EAGAIN) => {
                state.connect_later(NEVER, cx.waker());
                return Poll::Pending;
            }
            Err(errno) => {
                self.place = Place::Failed;
                Err(io::Error::from_raw_os_error(errno))
            }
            Ok(number) => {
                let addrs = state.connection(number).addrs();
                self.place = Place::Connected { number, side: Side::Client, addrs };
                Ok(())
            }
        };
        drop(state);
        self.note(&[1, u64::from(connected.is_ok())]);
        Poll::Ready(connected)
    }

    /// Reads what has arrived into `into`; 0 bytes at the end of the stream.
    ///
    /// # Errors
    /// `ConnectionReset`, and `BrokenPipe` for a reset after the peer's FIN; `NotConnected` before
    /// the connect.
    pub fn poll_read(&mut self, cx: &mut Context<'_>, into: &mut [u8]) -> Poll<io::Result<usize>> {
        let read = self.poll(cx, Direction::Read, |connection, side| connection.read(side, into));
        if let Poll::Ready(Ok(len)) = read {
            self.shared.note_bytes(&[2, len as u64], &into[..len]);
        }
        read
    }

    /// Writes as many bytes as both sockets have room for, 256 KiB that the peer did not read, and
    /// returns how many.
    ///
    /// # Errors
    /// `ConnectionReset` once and `BrokenPipe` afterwards; `NotConnected` before the connect.
    pub fn poll_write(&mut self, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = self.poll(cx, Direction::Write, |connection, side| connection.write(side, bytes));
        if let Poll::Ready(written) = &written {
            self.note(&[3, written.as_ref().map_or(u64::MAX, |len| *len as u64)]);
        }
        written
    }

    /// Sends FIN after the written bytes; reading continues.
    ///
    /// # Errors
    /// `NotConnected` before the connect and after a reset.
    pub fn shutdown(&mut self) -> io::Result<()> {
        let (number, side) = self.end()?;
        let mut state = self.shared.lock();
        let shut = state.connection(number).shut_down(side);
        state.notify_end(number, side.other());
        drop(state);
        self.note(&[4, u64::from(shut.is_ok())]);
        shut.map_err(io::Error::from_raw_os_error)
    }

    /// Closes it with a reset. Bytes that the peer has not received by then are lost.
    pub fn reset(mut self) {
        self.close(true);
    }

    /// The connection, for manual actions of a [`Network`](crate::Network). `None` before the
    /// connect.
    pub fn connection(&self) -> Option<ConnectionId> {
        self.end().ok().map(|(number, _)| ConnectionId(number))
    }

    /// Its own address. `None` before the connect.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.addrs().map(|(local, _)| local)
    }

    /// The peer's address. `None` before the connect.
    pub fn peer_addr(&self) -> Option<SocketAddr> {
        self.addrs().map(|(_, peer)| peer)
    }

    fn addrs(&self) -> Option<(SocketAddr, SocketAddr)> {
        match self.place {
            Place::Connected { side: Side::Client, addrs, .. } => Some(addrs),
            Place::Connected { side: Side::Server, addrs: (client, server), .. } => Some((server, client)),
            Place::Connecting { .. } | Place::Failed => None,
        }
    }

    fn end(&self) -> io::Result<(u32, Side)> {
        match self.place {
            Place::Connected { number, side, .. } => Ok((number, side)),
            Place::Connecting { .. } | Place::Failed => Err(io::Error::from_raw_os_error(libc::ENOTCONN)),
        }
    }

    fn poll<T>(
        &mut self,
        cx: &mut Context<'_>,
        direction: Direction,
        act: impl FnOnce(&mut Connection, Side) -> Result<T, i32>,
    ) -> Poll<io::Result<T>> {
        let (number, side) = self.end()?;
        let mut state = self.shared.lock();
        let done = act(state.connection(number), side);
        if let Err(libc::EAGAIN) = done {
            state.wait(number, side, direction, cx.waker());
            return Poll::Pending;
        }
        state.notify_end(number, side.other());
        Poll::Ready(done.map_err(io::Error::from_raw_os_error))
    }

    fn close(&mut self, abort: bool) {
        if let Place::Connected { number, side, .. } = std::mem::replace(&mut self.place, Place::Failed) {
            self.shared.note(&[5, number.into(), u64::from(abort)]);
            self.shared.lock().close(number, side, abort);
        }
    }

    /// Adds an event of this socket to the hash.
    fn note(&self, words: &[u64]) {
        self.shared.note(&[self.end().map_or(u64::MAX, |(number, _)| number.into())]);
        self.shared.note(words);
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        self.close(false);
    }
}

impl fmt::Debug for Socket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.addrs() {
            Some((local, peer)) => write!(f, "Socket({local} to {peer})"),
            None => write!(f, "Socket(not connected)"),
        }
    }
}

/// A listening socket of a client, to which servers connect as to an upstream. Dropping it resets
/// connections that were not accepted.
pub struct SocketListener {
    shared: Arc<Shared>,
    listener: usize,
    addr: SocketAddr,
}

impl SocketListener {
    pub(crate) fn new(shared: Arc<Shared>, listener: usize, addr: SocketAddr) -> SocketListener {
        SocketListener { shared, listener, addr }
    }

    /// The next connection. One task may wait.
    pub fn poll_accept(&mut self, cx: &mut Context<'_>) -> Poll<Socket> {
        let mut state = self.shared.lock();
        let Some(number) = state.take_queued(self.listener) else {
            state.listeners.get_mut(self.listener).waker = Some(cx.waker().clone());
            return Poll::Pending;
        };
        let addrs = state.connection(number).addrs();
        let place = Place::Connected { number, side: Side::Server, addrs };
        Poll::Ready(Socket { shared: self.shared.clone(), place })
    }

    /// The address it listens at.
    pub fn local_addr(&self) -> SocketAddr {
        self.addr
    }
}

impl Drop for SocketListener {
    fn drop(&mut self) {
        self.shared.lock().close_listener(self.listener);
    }
}

impl fmt::Debug for SocketListener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SocketListener({})", self.addr)
    }
}
