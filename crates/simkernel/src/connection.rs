//! A TCP connection as values: two streams of bytes, and an end of it on each side.
//!
//! What Linux does on loopback, as far as a peer or a server can tell:
//!
//! * A stream holds what its sender's socket holds and what its receiver's does. Only the latter has arrived.
//! * FIN comes behind all bytes. A reset does not: what has not arrived is gone, what has arrived is read first, then
//!   the error, once, then the end.
//! * Closing with bytes unread is a reset, and so is the answer to bytes for an end that was closed.
//! * After the peer's FIN a reset reads as `EPIPE`, else as `ECONNRESET`.

use std::collections::VecDeque;
use std::net::SocketAddr;

/// One of the two ends, and the stream of what it writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Client,
    Server,
}

impl Side {
    pub(crate) fn other(self) -> Side {
        match self {
            Side::Client => Side::Server,
            Side::Server => Side::Client,
        }
    }
}

/// Bytes that were written and not read.
#[derive(Debug)]
struct Stream {
    bytes: VecDeque<u8>,
    /// Bytes that the receiving socket holds; those behind them are with the sender.
    receive_room: usize,
    /// Bytes that both sockets hold.
    room: usize,
    /// FIN comes behind the bytes.
    fin: bool,
}

impl Stream {
    fn fin_arrived(&self) -> bool {
        self.fin && self.bytes.len() <= self.receive_room
    }
}

#[derive(Debug, Default)]
struct End {
    closed: bool,
    /// The `errno` of the next call that looks; 0 for none.
    error: i32,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Connection {
    client: SocketAddr,
    server: SocketAddr,
    /// The rings that are told when something changes, by side; `None` for a client that is none, and while it waits to be
    /// accepted by one that is not made.
    pub(crate) rings: [Option<i32>; 2],
    /// Something changed, by side, that the other one may want to know.
    changed: [bool; 2],
    streams: [Stream; 2],
    ends: [End; 2],
    reset: bool,
}

impl Connection {
    /// A new one. Each socket's buffer for sending has `send_room` bytes, the client's for receiving `window`.
    pub(crate) fn new(client: SocketAddr, server: SocketAddr, send_room: usize, window: usize) -> Connection {
        let stream = |receive_room| Stream {
            bytes: VecDeque::new(),
            receive_room,
            room: send_room + receive_room,
            fin: false,
        };
        Connection {
            client,
            server,
            rings: [None; 2],
            changed: [false; 2],
            streams: [stream(send_room), stream(window)],
            ends: Default::default(),
            reset: false,
        }
    }

    /// The client's address, and the server's.
    pub(crate) fn addrs(&self) -> (SocketAddr, SocketAddr) {
        (self.client, self.server)
    }

    /// True if this side changed something since this was asked last.
    pub(crate) fn take_changed(&mut self, side: Side) -> bool {
        std::mem::take(&mut self.changed[side as usize])
    }

    fn stream(&mut self, writer: Side) -> &mut Stream {
        &mut self.streams[writer as usize]
    }

    fn take_error(&mut self, side: Side) -> Result<(), i32> {
        match std::mem::take(&mut self.ends[side as usize].error) {
            0 => Ok(()),
            errno => Err(errno),
        }
    }

    /// Bytes that `side` could read.
    pub(crate) fn unread(&self, side: Side) -> usize {
        self.streams[side.other() as usize].bytes.len()
    }

    /// True if a read by `side` would bring bytes, an error or the end.
    pub(crate) fn is_readable(&self, side: Side) -> bool {
        let stream = &self.streams[side.other() as usize];
        !stream.bytes.is_empty() || stream.fin || self.reset || self.ends[side as usize].error != 0
    }

    pub(crate) fn is_reset(&self) -> bool {
        self.reset
    }

    /// True once both ends are closed: no end looks again.
    pub(crate) fn is_gone(&self) -> bool {
        self.ends.iter().all(|end| end.closed)
    }

    /// Reads what is there: 0 bytes at the end, `EAGAIN` if nothing is there yet.
    pub(crate) fn read(&mut self, side: Side, into: &mut [u8]) -> Result<usize, i32> {
        let len = self.peek(side, into)?;
        self.stream(side.other()).bytes.drain(..len);
        self.changed[side as usize] = true;
        Ok(len)
    }

    /// As [`read`](Connection::read), but bytes stay where they are.
    pub(crate) fn peek(&mut self, side: Side, into: &mut [u8]) -> Result<usize, i32> {
        let stream = self.stream(side.other());
        if !stream.bytes.is_empty() {
            let len = into.len().min(stream.bytes.len());
            let (first, second) = stream.bytes.as_slices();
            let cut = len.min(first.len());
            into[..cut].copy_from_slice(&first[..cut]);
            into[cut..len].copy_from_slice(&second[..len - cut]);
            return Ok(len);
        }
        let ended = stream.fin;
        self.take_error(side)?;
        if ended || self.reset { Ok(0) } else { Err(libc::EAGAIN) }
    }

    /// Writes what there is room for, `EAGAIN` if there is none.
    pub(crate) fn write(&mut self, side: Side, bytes: &[u8]) -> Result<usize, i32> {
        self.take_error(side)?;
        if self.reset || self.stream(side).fin {
            return Err(libc::EPIPE);
        }
        self.changed[side as usize] = true;
        if self.ends[side.other() as usize].closed {
            // They leave, and what comes back is a reset.
            self.reset_by(side.other());
            return Ok(bytes.len());
        }
        let stream = self.stream(side);
        let len = bytes.len().min(stream.room - stream.bytes.len());
        if len == 0 && !bytes.is_empty() {
            return Err(libc::EAGAIN);
        }
        stream.bytes.extend(&bytes[..len]);
        Ok(len)
    }

    /// FIN behind what was written.
    pub(crate) fn shut_down(&mut self, side: Side) -> Result<(), i32> {
        if self.reset {
            return Err(libc::ENOTCONN);
        }
        self.stream(side).fin = true;
        self.changed[side as usize] = true;
        Ok(())
    }

    /// Closes an end, `abort` with a reset.
    pub(crate) fn close(&mut self, side: Side, abort: bool) {
        if abort || self.unread(side) > 0 {
            self.reset_by(side);
        }
        self.stream(side).fin = true;
        // Nobody is left to read.
        self.stream(side.other()).bytes.clear();
        self.ends[side as usize].closed = true;
    }

    fn reset_by(&mut self, side: Side) {
        if self.reset {
            return;
        }
        let other = side.other();
        let after_fin = self.stream(side).fin_arrived() && !self.stream(other).fin;
        self.ends[other as usize].error = if after_fin { libc::EPIPE } else { libc::ECONNRESET };
        let stream = self.stream(side);
        stream.bytes.truncate(stream.receive_room);
        self.stream(other).bytes.clear();
        self.reset = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Side::{Client, Server};

    fn connection() -> Connection {
        Connection::new(([127, 0, 0, 1], 1).into(), ([127, 0, 0, 1], 2).into(), 100, 10)
    }

    fn read(connection: &mut Connection, side: Side) -> Result<Vec<u8>, i32> {
        let mut bytes = [0; 1000];
        connection.read(side, &mut bytes).map(|len| bytes[..len].to_vec())
    }

    #[test]
    fn bytes_come_in_order_and_fin_behind_them() {
        let mut connection = connection();
        assert_eq!(read(&mut connection, Server), Err(libc::EAGAIN));
        assert_eq!(connection.write(Client, b"abc"), Ok(3));
        assert_eq!(connection.write(Client, b"de"), Ok(2));
        connection.shut_down(Client).unwrap();
        assert_eq!(connection.write(Client, b"f"), Err(libc::EPIPE));
        assert_eq!(read(&mut connection, Server), Ok(b"abcde".to_vec()));
        assert_eq!([read(&mut connection, Server), read(&mut connection, Server)], [Ok(vec![]), Ok(vec![])]);
        assert_eq!(connection.write(Server, b"g"), Ok(1), "the other direction is open");
    }

    #[test]
    fn a_stream_holds_what_both_sockets_hold() {
        let mut connection = connection();
        assert_eq!(connection.write(Server, &[1; 500]), Ok(110));
        assert_eq!(connection.write(Server, &[1]), Err(libc::EAGAIN));
        assert_eq!(read(&mut connection, Client).unwrap().len(), 110);
    }

    #[test]
    fn a_reset_leaves_what_arrived_and_is_told_once() {
        let mut connection = connection();
        connection.write(Server, &[1; 50]).unwrap();
        connection.write(Client, b"never read").unwrap();
        connection.close(Server, true);
        assert_eq!(read(&mut connection, Client), Ok(vec![1; 10]));
        assert_eq!(read(&mut connection, Client), Err(libc::ECONNRESET));
        assert_eq!(read(&mut connection, Client), Ok(vec![]));
        assert_eq!(connection.write(Client, b"x"), Err(libc::EPIPE));
        assert_eq!(connection.shut_down(Client), Err(libc::ENOTCONN));
        connection.close(Client, false);
        assert!(connection.is_gone());
    }

    #[test]
    fn a_close_with_bytes_unread_is_a_reset() {
        let mut connection = connection();
        connection.write(Server, b"reply").unwrap();
        connection.close(Client, false);
        assert_eq!(read(&mut connection, Server), Err(libc::ECONNRESET));
    }

    #[test]
    fn bytes_for_a_closed_end_are_answered_with_a_reset() {
        let mut connection = connection();
        connection.close(Client, false);
        assert_eq!(read(&mut connection, Server), Ok(vec![]));
        assert_eq!(connection.write(Server, b"reply"), Ok(5));
        assert_eq!(connection.write(Server, b"reply"), Err(libc::EPIPE));
        assert!(connection.is_reset());
    }

    #[test]
    fn a_reset_behind_fin_reads_as_a_broken_pipe() {
        let mut connection = connection();
        connection.shut_down(Client).unwrap();
        connection.close(Client, true);
        assert_eq!(read(&mut connection, Server), Err(libc::EPIPE));
    }
}
