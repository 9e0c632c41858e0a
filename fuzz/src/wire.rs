//! The driver's side of one connection, with the rules for the shard that submits operations on it.
//!
//! Operations and completions cross: a stop may be submitted in the turn in which the end for which
//! it is too late is delivered. Then it asks for nothing.

use std::collections::VecDeque;

use ringserve_buf::Block;
use ringserve_core::{Batch, CloseHow, ConnId, Op, Time};

use crate::framings::{Kind, Start};

/// An operation in flight.
#[derive(Debug, Default)]
pub struct Flight {
    /// It is with the driver.
    pub armed: bool,
    /// A stop was requested.
    pub stopping: bool,
    /// The turn in which its last end was delivered.
    ended: u64,
}

impl Flight {
    /// Submits it.
    pub fn start(&mut self, what: &str) {
        assert!(!self.armed, "two of them in flight: {what}");
        (self.armed, self.stopping) = (true, false);
    }

    /// Requests its stop.
    pub fn stop(&mut self, turn: u64, what: &str) {
        let met = self.ended == turn;
        assert!(met || (self.armed && !self.stopping), "stop of what is not in flight: {what}, {self:?}");
        self.stopping = self.armed;
    }

    /// Checks that it is in flight, or ended in this turn.
    fn look(&self, turn: u64) {
        let met = self.ended == turn;
        assert!(met || (self.armed && !self.stopping), "a look at what is not in flight: {self:?}");
    }

    /// Delivers its end.
    pub fn end(&mut self, turn: u64) {
        (self.armed, self.stopping, self.ended) = (false, false, turn);
    }
}

/// A connection between its `Adopt` and its `Closed`, and the peer on its other end.
#[derive(Debug)]
pub struct Wire {
    /// Its name.
    pub id: ConnId,
    /// The number of its peer.
    pub peer: usize,
    /// The connect, for an upstream.
    pub connect: Flight,
    /// The receive.
    pub receive: Flight,
    /// Whether the receive ends with the first bytes.
    pub once: bool,
    /// The block of the receive, and its most bytes, unless it is into a buffer.
    pub into: Option<(Box<Block>, usize)>,
    /// The send.
    pub send: Flight,
    /// The bytes being sent.
    pub batch: Option<Box<Batch>>,
    /// A shutdown is in flight.
    pub shutdown: bool,
    /// A shutdown was submitted.
    pub shut: bool,
    /// The close in flight.
    pub close: Option<CloseHow>,
    /// Bytes of the peer that the driver has not delivered yet.
    pub unread: VecDeque<u8>,
    /// The stream from the peer is over.
    pub read_over: bool,
}

impl Wire {
    /// Creates the state of a socket that was just adopted.
    pub fn new(id: ConnId, peer: usize) -> Wire {
        Wire {
            id,
            peer,
            connect: Flight::default(),
            receive: Flight::default(),
            once: false,
            into: None,
            send: Flight::default(),
            batch: None,
            shutdown: false,
            shut: false,
            close: None,
            unread: VecDeque::new(),
            read_over: false,
        }
    }

    /// True if the shard needs nothing from the driver that the driver may never do.
    pub fn is_ending(&self) -> bool {
        self.close.is_some()
            || self.shutdown
            || self.connect.stopping
            || self.send.stopping
            || self.receive.stopping
    }

    /// Takes an operation on this connection.
    pub fn submit(&mut self, op: Op, turn: u64) {
        assert!(self.close.is_none(), "{op:?} after the close");
        let stops = matches!(op, Op::ConnectStop { .. });
        assert!(stops || !self.connect.armed, "{op:?} before it is connected");
        match op {
            Op::Receive { .. } | Op::ReceiveOnce { .. } | Op::ReceiveInto { .. } => {
                assert!(!self.read_over, "receive after the end of the stream");
                self.receive.start("receive");
                self.once = !matches!(op, Op::Receive { .. });
                if let Op::ReceiveInto { block, most, .. } = op {
                    let most = most as usize;
                    assert!((1..=block.room()).contains(&most), "{most} bytes into {block:?}");
                    self.into = Some((block, most));
                }
            }
            Op::ConnectStop { .. } => self.connect.stop(turn, "connect"),
            Op::ReceiveStop { .. } | Op::ShutdownInput { .. } => self.receive.stop(turn, "receive"),
            Op::Probe { .. } => self.receive.look(turn),
            Op::Send { batch, .. } => {
                assert!(!batch.is_empty(), "nothing to send");
                self.send.start("send");
                self.batch = Some(batch);
            }
            Op::SendStop { .. } => self.send.stop(turn, "send"),
            Op::Shutdown { .. } => {
                assert!(!self.shut, "a second shutdown");
                (self.shutdown, self.shut) = (true, true);
            }
            Op::Close { how, .. } => {
                let idle = !self.receive.armed && !self.send.armed && !self.shutdown;
                assert!(idle, "close while something is in flight: {self:?}");
                self.close = Some(how);
            }
            other => panic!("{other:?} is not about one connection"),
        }
    }
}

/// The bytes that a peer and the service exchanged, as they should be.
#[derive(Debug, Default)]
pub struct Talk {
    /// Every byte delivered to the shard.
    pub received: Vec<u8>,
    /// Bytes of it that became frames.
    pub cut: usize,
    /// Every byte the service replied.
    pub owed: Vec<u8>,
    /// Bytes of it that the kernel took.
    pub taken: usize,
    /// A frame was found to be bad.
    pub bad: bool,
    /// Time at which the last byte arrived.
    pub heard: Time,
    /// Time at which the first of the waiting calls began to wait, or the last one ended.
    pub waits_since: Time,
    /// The service was informed that nothing more will arrive.
    pub input_end_notified: bool,
    /// Time at which the connection ended.
    pub ended: Option<Time>,
    /// The service accepted it in `open`.
    pub opened: bool,
}

impl Talk {
    /// The start of the bytes that are not frames yet.
    pub fn next(&self, kind: Kind, max: usize) -> Start<'_> {
        let rest = &self.received[self.cut..];
        if kind == Kind::Raw && rest.is_empty() { Start::Part } else { kind.start(rest, max) }
    }

    /// Panics unless these bytes are the next ones owed to the peer.
    #[track_caller]
    pub fn check_batch(&self, batch: &Batch) {
        let mut rest = &self.owed[self.taken..];
        for piece in batch.pieces() {
            rest = rest.strip_prefix(piece).expect("what is sent is not what was replied");
        }
        assert_eq!(self.owed.len() - self.taken - rest.len(), batch.len());
    }
}
