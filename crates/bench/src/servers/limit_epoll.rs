//! The limit of epoll: a bare edge-triggered loop that echoes raw bytes.
//!
//! One read buffer for all connections; the reply is tried at once, and only the rest that did not
//! fit is kept, with its connection, until the socket is writable again. A connection with kept
//! bytes is not read.

use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};

use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};

/// Bytes of the read buffer. 64 KiB moves a large transfer in few calls and fits the L2 cache.
const BUFFER_BYTES: usize = 64 * 1024;

/// Events taken at a time. Enough for 1000 active connections in one call, 12 KiB of memory.
const EVENTS_MAX: usize = 1024;

/// Event data of the listener; connections use their slot.
const LISTENER: u64 = u64::MAX;

/// A connection and the bytes that did not fit into its socket.
struct Connection {
    stream: TcpStream,
    kept: Vec<u8>,
}

/// Whether a connection continues.
#[derive(PartialEq, Eq)]
enum Fate {
    Open,
    Closed,
}

/// Serves `listener` until the process ends.
pub(super) fn run(listener: TcpListener) -> io::Result<()> {
    let epoll = epoll::create(CreateFlags::CLOEXEC)?;
    // Level-triggered, so that connections left in the backlog (out of descriptors) are seen again.
    epoll::add(&epoll, &listener, EventData::new_u64(LISTENER), EventFlags::IN)?;

    let mut connections: Vec<Option<Connection>> = Vec::new();
    let mut free: Vec<usize> = Vec::new();
    let mut buffer = vec![0; BUFFER_BYTES];
    let mut events = Vec::with_capacity(EVENTS_MAX);
    loop {
        events.clear();
        match epoll::wait(&epoll, spare_capacity(&mut events), None) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => return Err(error.into()),
        }
        for event in &events {
            if event.data.u64() == LISTENER {
                while let Ok((stream, _)) = listener.accept() {
                    stream.set_nonblocking(true)?;
                    let slot = free.pop().unwrap_or(connections.len());
                    let flags = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
                    epoll::add(&epoll, &stream, EventData::new_u64(slot as u64), flags)?;
                    let connection = Some(Connection { stream, kept: Vec::new() });
                    if slot == connections.len() {
                        connections.push(connection);
                    } else {
                        connections[slot] = connection;
                    }
                }
                continue;
            }
            let slot = event.data.u64() as usize;
            // A slot has one event at most in each wait, so one that was freed in this very loop
            // and reused by an accept has no older event left.
            let Some(connection) = connections.get_mut(slot).and_then(Option::as_mut) else {
                continue;
            };
            if connection.progress(&mut buffer, event.flags) == Fate::Closed {
                connections[slot] = None;
                free.push(slot);
            }
        }
    }
}

impl Connection {
    /// Sends the kept bytes, then echoes until the socket is empty or full.
    fn progress(&mut self, buffer: &mut [u8], flags: EventFlags) -> Fate {
        if !self.kept.is_empty() {
            let kept = std::mem::take(&mut self.kept);
            if self.send(&kept) == Fate::Closed {
                return Fate::Closed;
            }
        }
        // The end of the peer's bytes causes no further edge: then read until the end, not only
        // until a short read.
        let ending = flags.intersects(EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR);
        while self.kept.is_empty() {
            match self.stream.read(buffer) {
                Ok(0) => return Fate::Closed,
                Ok(count) => {
                    if self.send(&buffer[..count]) == Fate::Closed {
                        return Fate::Closed;
                    }
                    if count < buffer.len() && !ending {
                        return Fate::Open;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Fate::Open,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return Fate::Closed,
            }
        }
        Fate::Open
    }

    /// Sends `bytes`, keeping those that do not fit.
    fn send(&mut self, mut bytes: &[u8]) -> Fate {
        while !bytes.is_empty() {
            match self.stream.write(bytes) {
                Ok(count) => bytes = &bytes[count..],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.kept.extend_from_slice(bytes);
                    return Fate::Open;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return Fate::Closed,
            }
        }
        Fate::Open
    }
}
