//! A TCP connection as values: two streams of bytes, and an end of it on each side.
//!
//! The behaviour of Linux on loopback, as far as a peer or a server can observe it:
//!
//! * A stream holds the bytes of its sender's socket and of its receiver's. Only the latter have
//!   arrived.
//! * FIN comes after all bytes. A reset does not: bytes that have not arrived are lost, bytes that
//!   have arrived are read first, then the error, once, then the end.
//! * Closing with bytes unread is a reset, and so is the answer to bytes for an end that was
//!   closed.
//! * After the peer's FIN a reset reads as `EPIPE`, otherwise as `ECONNRESET`.
//!
//! In virtual time sent bytes may be in flight for a while, in order. A connection that is held
//! delivers nothing.

use std::collections::{BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use std::time::Duration;

use crate::faults::{Fault, Injector};

/// One of the two ends, and the stream of the bytes that it writes.
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

/// An end of a connection, as the file table of a ring holds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct File {
    pub(crate) connection: u32,
    pub(crate) side: Side,
}

/// A message from one end to the other.
#[derive(Clone, Copy, Debug)]
enum News {
    Bytes(usize),
    Fin,
    Reset,
}

/// Bytes that were written and not read.
#[derive(Debug)]
struct Stream {
    bytes: VecDeque<u8>,
    /// Number of bytes in flight, which are at the end.
    late: usize,
    /// Messages in flight, and the time at which each arrives if it is the first.
    on_the_way: VecDeque<(Duration, News)>,
    /// Bytes that the receiving socket holds; later ones are with the sender.
    receive_room: usize,
    /// Bytes that both sockets hold.
    room: usize,
    /// FIN comes after the bytes.
    fin: bool,
    /// FIN has arrived.
    fin_came: bool,
}

impl Stream {
    /// Bytes that could be read.
    fn arrived(&self) -> usize {
        self.bytes.len() - self.late
    }

    fn clear(&mut self) {
        self.bytes.clear();
        self.late = 0;
    }

    /// Forgets the bytes of the sender's socket.
    fn truncate(&mut self) {
        self.bytes.truncate(self.receive_room.min(self.arrived()));
        self.late = 0;
    }
}

#[derive(Debug, Default)]
struct End {
    closed: bool,
    /// The `errno` of the next call; 0 for none.
    error: i32,
    /// The end has learned of a reset.
    reset: bool,
    /// Wakers of the reader and of the writer, for any change.
    wakers: [Option<Waker>; 2],
}

/// The event that a waker waits for.
#[derive(Clone, Copy)]
pub(crate) enum Direction {
    Read,
    Write,
}

/// Times at which messages may arrive by themselves, with the connection, for all connections of a
/// network: the next arrival of each connection that is not held, and some past ones.
#[derive(Clone, Debug, Default)]
pub(crate) struct Agenda(Arc<Mutex<BTreeSet<(Duration, u32)>>>);

impl Agenda {
    pub(crate) fn lock(&self) -> MutexGuard<'_, BTreeSet<(Duration, u32)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The times of a connection in virtual time.
#[derive(Debug)]
struct Pace {
    number: u32,
    agenda: Agenda,
    injector: Injector,
    now: Duration,
    /// Nothing arrives.
    held: bool,
}

/// A connection between two ends of a network, with the bytes in flight.
#[derive(Debug)]
pub(crate) struct Connection {
    client: SocketAddr,
    server: SocketAddr,
    /// The rings that are notified when something changes, by side; `None` for a client without a
    /// ring, and while the connection waits for a ring that is not created.
    pub(crate) rings: [Option<i32>; 2],
    /// Changes of a side that the other one may need to know.
    changed: [bool; 2],
    streams: [Stream; 2],
    ends: [End; 2],
    pace: Option<Box<Pace>>,
}

impl Connection {
    /// Creates a connection. Each socket's send buffer has `send_room` bytes, the client's receive
    /// buffer `window`.
    pub(crate) fn new(client: SocketAddr, server: SocketAddr, send_room: usize, window: usize) -> Connection {
        let stream = |receive_room| Stream {
            bytes: VecDeque::new(),
            late: 0,
            on_the_way: VecDeque::new(),
            receive_room,
            room: send_room + receive_room,
            fin: false,
            fin_came: false,
        };
        Connection {
            client,
            server,
            rings: [None; 2],
            changed: [false; 2],
            streams: [stream(send_room), stream(window)],
            ends: Default::default(),
            pace: None,
        }
    }

    /// Puts the connection into virtual time, with faults of the injector. Arrivals go on the
    /// agenda under this number.
    pub(crate) fn paced(self, number: u32, agenda: Agenda, injector: Injector) -> Connection {
        let pace = Pace { number, agenda, injector, now: Duration::ZERO, held: false };
        Connection { pace: Some(Box::new(pace)), ..self }
    }

    /// Sets the virtual time.
    pub(crate) fn set_now(&mut self, now: Duration) {
        if let Some(pace) = &mut self.pace {
            pace.now = now;
        }
    }

    /// Holds all arrivals, or lets those that waited arrive with the next
    /// [`deliver`](Connection::deliver).
    pub(crate) fn hold(&mut self, held: bool) {
        if let Some(pace) = &mut self.pace {
            pace.held = held;
        }
    }

    /// The time at which something arrives by itself.
    pub(crate) fn next_arrival(&self) -> Option<Duration> {
        if self.pace.as_ref().is_none_or(|pace| pace.held) {
            return None;
        }
        self.streams.iter().filter_map(|stream| stream.on_the_way.front()).map(|(at, _)| *at).min()
    }

    /// Delivers everything that is due, and puts the next arrival on the agenda. True for each end
    /// at which something changed.
    pub(crate) fn deliver(&mut self) -> [bool; 2] {
        let mut notified = [false; 2];
        while let Some(at) = self.next_arrival()
            && self.pace.as_ref().is_some_and(|pace| at <= pace.now)
        {
            for from in [Side::Client, Side::Server] {
                let on_the_way = &mut self.stream(from).on_the_way;
                if on_the_way.front().is_none_or(|(due, _)| *due > at) {
                    continue;
                }
                let Some((_, news)) = on_the_way.pop_front() else { continue };
                self.arrive(from, news);
                notified[from.other() as usize] = true;
            }
        }
        if let (Some(pace), Some(at)) = (&self.pace, self.next_arrival()) {
            pace.agenda.lock().insert((at, pace.number));
        }
        notified
    }

    /// Sends a message to the other end, which arrives now or later, after all that are in flight.
    fn send(&mut self, from: Side, news: News) {
        let Some(pace) = &mut self.pace else { return self.arrive(from, news) };
        let (latency, held, now) = (pace.injector.latency(), pace.held, pace.now);
        let stream = &mut self.streams[from as usize];
        if latency.is_zero() && !held && stream.on_the_way.is_empty() {
            return self.arrive(from, news);
        }
        pace.agenda.lock().insert((now + latency, pace.number));
        if let News::Bytes(len) = news {
            stream.late += len;
        }
        stream.on_the_way.push_back((now + latency, news));
    }

    fn arrive(&mut self, from: Side, news: News) {
        let to = from.other();
        match news {
            News::Bytes(len) => {
                let stream = self.stream(from);
                stream.late = stream.late.saturating_sub(len);
                if self.ends[to as usize].closed {
                    // The answer is a reset.
                    self.stream(from).clear();
                    self.reset_by(to);
                }
            }
            News::Fin => self.stream(from).fin_came = true,
            News::Reset => {
                if std::mem::replace(&mut self.ends[to as usize].reset, true) {
                    return;
                }
                let stream = self.stream(from);
                let fin_came = stream.fin_came && stream.bytes.len() <= stream.receive_room;
                stream.truncate();
                let after_fin = fin_came && !self.stream(to).fin;
                self.stream(to).clear();
                self.ends[to as usize].error = if after_fin { libc::EPIPE } else { libc::ECONNRESET };
            }
        }
    }

    /// Breaks the connection between its ends: both find a reset.
    pub(crate) fn break_off(&mut self) {
        for side in [Side::Client, Side::Server] {
            let stream = self.stream(side);
            stream.on_the_way.clear();
            stream.truncate();
            let end = &mut self.ends[side as usize];
            if !std::mem::replace(&mut end.reset, true) {
                end.error = libc::ECONNRESET;
            }
            self.changed[side as usize] = true;
        }
    }

    /// Sets the waker for changes at this end.
    pub(crate) fn wait(&mut self, side: Side, direction: Direction, waker: &Waker) {
        let place = &mut self.ends[side as usize].wakers[direction as usize];
        if !place.as_ref().is_some_and(|old| old.will_wake(waker)) {
            *place = Some(waker.clone());
        }
    }

    /// The waiters at this end.
    pub(crate) fn take_wakers(&mut self, side: Side) -> impl Iterator<Item = Waker> + use<'_> {
        self.ends[side as usize].wakers.iter_mut().filter_map(Option::take)
    }

    /// Panics if the parts disagree.
    fn invariants(&self) {
        for stream in &self.streams {
            assert!(stream.late <= stream.bytes.len() && stream.bytes.len() <= stream.room);
            assert!(stream.fin || !stream.fin_came, "FIN has come that was not sent");
        }
    }

    /// The client's address, and the server's.
    pub(crate) fn addrs(&self) -> (SocketAddr, SocketAddr) {
        (self.client, self.server)
    }

    /// True if this side changed something since the last call.
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
        self.streams[side.other() as usize].arrived()
    }

    /// True if a read by `side` would bring bytes, an error or the end.
    pub(crate) fn is_readable(&self, side: Side) -> bool {
        let stream = &self.streams[side.other() as usize];
        let end = &self.ends[side as usize];
        stream.arrived() > 0 || stream.fin_came || end.reset || end.error != 0
    }

    /// True if this end has learned of a reset.
    pub(crate) fn is_reset(&self, side: Side) -> bool {
        self.ends[side as usize].reset
    }

    pub(crate) fn is_closed(&self, side: Side) -> bool {
        self.ends[side as usize].closed
    }

    /// True once both ends are closed: neither is used again.
    pub(crate) fn is_gone(&self) -> bool {
        self.ends.iter().all(|end| end.closed)
    }

    /// Reads available bytes: 0 bytes at the end, `EAGAIN` if there are none yet.
    pub(crate) fn read(&mut self, side: Side, into: &mut [u8]) -> Result<usize, i32> {
        let len = self.peek(side, into)?;
        self.stream(side.other()).bytes.drain(..len);
        self.changed[side as usize] = true;
        Ok(len)
    }

    /// Does [`read`](Connection::read), but leaves the bytes in place.
    pub(crate) fn peek(&mut self, side: Side, into: &mut [u8]) -> Result<usize, i32> {
        let stream = self.stream(side.other());
        if stream.arrived() > 0 {
            let len = into.len().min(stream.arrived());
            let (first, second) = stream.bytes.as_slices();
            let cut = len.min(first.len());
            into[..cut].copy_from_slice(&first[..cut]);
            into[cut..len].copy_from_slice(&second[..len - cut]);
            return Ok(len);
        }
        let ended = stream.fin_came;
        self.take_error(side)?;
        if ended || self.is_reset(side) { Ok(0) } else { Err(libc::EAGAIN) }
    }

    /// Writes as many bytes as there is room for, `EAGAIN` if there is none.
    pub(crate) fn write(&mut self, side: Side, bytes: &[u8]) -> Result<usize, i32> {
        if self.pace.as_mut().is_some_and(|pace| pace.injector.strike(Fault::ConnectionResets)) {
            self.break_off();
        }
        self.take_error(side)?;
        if self.is_reset(side) || self.stream(side).fin {
            return Err(libc::EPIPE);
        }
        self.changed[side as usize] = true;
        let stream = self.stream(side);
        let len = bytes.len().min(stream.room - stream.bytes.len());
        if len == 0 && !bytes.is_empty() {
            return Err(libc::EAGAIN);
        }
        stream.bytes.extend(&bytes[..len]);
        self.send(side, News::Bytes(len));
        self.invariants();
        Ok(len)
    }

    /// Sends FIN after the written bytes.
    pub(crate) fn shut_down(&mut self, side: Side) -> Result<(), i32> {
        if self.is_reset(side) {
            return Err(libc::ENOTCONN);
        }
        self.end_stream(side);
        self.changed[side as usize] = true;
        Ok(())
    }

    /// Closes an end, `abort` with a reset.
    pub(crate) fn close(&mut self, side: Side, abort: bool) {
        if abort || self.unread(side) > 0 {
            self.reset_by(side);
        }
        if !self.is_reset(side) {
            self.end_stream(side);
        }
        // None of the incoming bytes is read.
        self.stream(side.other()).clear();
        self.ends[side as usize].closed = true;
        self.invariants();
    }

    fn end_stream(&mut self, side: Side) {
        if !std::mem::replace(&mut self.stream(side).fin, true) {
            self.send(side, News::Fin);
        }
    }

    fn reset_by(&mut self, side: Side) {
        if std::mem::replace(&mut self.ends[side as usize].reset, true) {
            return;
        }
        self.stream(side.other()).clear();
        self.send(side, News::Reset);
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
        assert!(connection.is_reset(Server));
    }

    #[test]
    fn a_reset_behind_fin_reads_as_a_broken_pipe() {
        let mut connection = connection();
        connection.shut_down(Client).unwrap();
        connection.close(Client, true);
        assert_eq!(read(&mut connection, Server), Err(libc::EPIPE));
    }
}
