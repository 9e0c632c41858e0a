//! A simulated TCP connection: the bytes that each side wrote, how many the other got, and how many
//! were owed.
//!
//! No byte is stored twice. All bytes that the peer will ever send lie in `wire`, and the socket
//! buffer towards the server is the part between `read` and `sent`; the bytes that the service owes
//! lie in `owed`, and the buffer towards the peer is the part between `delivered` and `taken`. The
//! kernel compares each byte that it takes from the server with the one owed at that place.

use std::collections::VecDeque;

use ringserve_core::CloseReason;

use crate::bytes::{self, AnyFraming};
use crate::clocks::{Clocks, Sealed, WriteRate};
use crate::pace::Pace;
use crate::plan::NEVER;

/// A frame of the peer's script, as places in `wire`.
#[derive(Clone, Copy, Debug)]
pub struct Scripted {
    /// Start of its payload.
    pub payload: usize,
    /// End of its payload.
    pub payload_end: usize,
    /// End of the frame.
    pub end: usize,
}

/// The place of the server's end of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// The peer has not connected yet.
    Nowhere,
    /// In a listener's backlog.
    Backlog,
    /// An accepted descriptor.
    Descriptor,
    /// In the file table.
    Table,
    /// Closed.
    Closed,
}

/// Reasons for which a connection may end abnormally. Bits of [`Sock::excuses`].
pub mod excuse {
    /// The peer or the network reset it.
    pub const RESET: u32 = 1;
    /// The peer broke the framing.
    pub const GARBAGE: u32 = 2;
    /// The service closed it.
    pub const CLOSED: u32 = 4;
    /// The service aborted it.
    pub const ABORTED: u32 = 8;
    /// `open` refused it.
    pub const REFUSED: u32 = 16;
    /// A handler failed.
    pub const FAILED: u32 = 32;
    /// A handler panicked.
    pub const PANICKED: u32 = 64;
    /// A reply could not be framed.
    pub const UNFRAMED: u32 = 128;
    /// The outbox was over its limit.
    pub const FULL: u32 = 256;
    /// The kernel returned another error.
    pub const SYSTEM: u32 = 512;
    /// It never became a connection in the file table.
    pub const NOT_INSTALLED: u32 = 1024;
    /// Its receive ended and the shard was not informed.
    pub const SILENT: u32 = 2048;
    /// The service closed it for an upstream that failed.
    pub const UPSTREAM: u32 = 4096;
}

/// A peer and its connection, with the bytes that each side owes the other.
#[derive(Debug)]
pub struct Sock {
    /// Its number, from which all its bytes come.
    pub tag: usize,
    /// The listener to which it connects.
    pub listener: u16,
    /// It is an upstream, to which the server connects.
    pub upstream: bool,
    /// The two are connected, if an upstream accepted.
    pub connected: bool,
    /// The script of the other end.
    pub peer: Peer,
    /// The place of the server's end.
    pub place: Place,

    /// Everything the peer will ever send.
    pub wire: Vec<u8>,
    /// The frames in it.
    pub frames: Vec<Scripted>,
    /// Bytes the peer sent.
    pub sent: usize,
    /// Bytes the kernel gave to the server, reaped or not.
    pub read: usize,
    /// Bytes that reached the core before it closed the input.
    pub arrived: usize,
    /// The shard drains, and no longer decodes arriving bytes.
    pub cut: bool,
    /// Bytes passed to the service.
    pub handed: usize,
    /// Frames passed to the service.
    pub seen: usize,
    /// The rate of these frames.
    pub pace: Pace,
    /// Time at which the rate of its frames last held them back.
    pub paced_at: u64,
    /// Frames the service is done with.
    pub done: usize,
    /// The peer sent FIN.
    pub peer_fin: bool,
    /// The server was informed of it.
    pub fin_read: bool,
    /// The core was informed of it.
    pub fin_heard: bool,
    /// The connection was reset: by the peer, the network or the server.
    pub reset: bool,
    /// The `errno` of the next operation.
    pub error: i32,
    /// A probe took it: a receive that finds the end afterwards is not at the peer's FIN.
    pub error_probed: bool,

    /// All bytes that the service replied.
    pub owed: Vec<u8>,
    /// Bytes the kernel took from the server.
    pub taken: usize,
    /// Bytes the peer read.
    pub delivered: usize,
    /// The service ended its side of the stream.
    pub writing_ended: bool,
    /// The server asked for FIN.
    pub fin_asked: bool,
    /// FIN follows the taken bytes.
    pub server_fin: bool,
    /// Both directions of the server's end are gone.
    pub server_closed: bool,

    /// The service accepted it in `open`.
    pub opened: bool,
    /// Time at which it was adopted, by the server's clock.
    pub opened_at: u64,
    /// Time at which it was accepted: the same, unless its `open` waited.
    pub accepted_at: u64,
    /// Time of the first turn after that which checked for cuts of a drain; 0 before it.
    pub looked_at_from: u64,
    /// The calls that wait, as tasks, the oldest first.
    pub waiting: Vec<u32>,
    /// No other call may begin.
    pub calls_full: bool,
    /// Those of them that wait until there is room in the outbox.
    pub wants_room: usize,
    /// Time at which the first of those calls began, or another one ended.
    pub waiting_since: u64,
    /// The service holds it open, until it closes it.
    pub held: bool,
    /// The service was informed that nothing more will arrive.
    pub input_end_notified: bool,
    /// The basis for judging the time limits.
    pub clocks: Clocks,
    /// End in `owed` of each heartbeat that the peer has not seen yet.
    pub pings: VecDeque<usize>,
    /// The turn in which the core made its last send.
    pub sent_turn: u64,
    /// Time of that send.
    pub sent_at: u64,
    /// The rate at which the peer takes sent bytes.
    pub rate: WriteRate,
    /// The core has a send in flight.
    pub untold: bool,
    /// Time at which the kernel last took a byte of a reply.
    pub taken_at: u64,
    /// Time at which a completion for it last reached the core, or a handler finished.
    pub active_at: u64,
    /// Time of the last event that keeps it from being idle.
    pub used_at: u64,
    /// The same as of the start of this turn: time limits are applied before the completions of the
    /// turn.
    pub used_before: u64,
    /// Time at which the server last read nothing of it.
    pub unread_at: u64,
    /// Time and reason of the end that the service received.
    pub ended: Option<(u64, CloseReason)>,
    /// The deadline that the service gave it, by the server's clock.
    pub deadline: Option<u64>,
    /// Turns for which it has been open beyond its limits.
    pub overdue: u32,
    /// Bits of [`excuse`].
    pub excuses: u32,
}

impl Sock {
    /// Creates a connection before its start.
    pub fn new(tag: usize, listener: u16, peer: Peer) -> Sock {
        Sock {
            tag,
            listener,
            upstream: false,
            connected: true,
            peer,
            place: Place::Nowhere,
            wire: Vec::new(),
            frames: Vec::new(),
            sent: 0,
            read: 0,
            arrived: 0,
            cut: false,
            handed: 0,
            seen: 0,
            pace: Pace::default(),
            paced_at: 0,
            done: 0,
            peer_fin: false,
            fin_read: false,
            fin_heard: false,
            reset: false,
            error: 0,
            error_probed: false,
            owed: Vec::new(),
            taken: 0,
            delivered: 0,
            writing_ended: false,
            fin_asked: false,
            server_fin: false,
            server_closed: false,
            opened: false,
            opened_at: 0,
            accepted_at: 0,
            looked_at_from: 0,
            waiting: Vec::new(),
            calls_full: false,
            wants_room: 0,
            waiting_since: 0,
            held: false,
            input_end_notified: false,
            clocks: Clocks::default(),
            pings: VecDeque::new(),
            sent_turn: 0,
            sent_at: 0,
            rate: WriteRate::default(),
            untold: false,
            taken_at: 0,
            active_at: 0,
            used_at: 0,
            used_before: 0,
            unread_at: 0,
            ended: None,
            deadline: None,
            overdue: 0,
            excuses: 0,
        }
    }

    /// Adds a frame to the peer's script.
    pub fn script(&mut self, framing: AnyFraming, len: usize) {
        let start = self.wire.len();
        framing.write(&mut self.wire, bytes::payload(self.tag, self.frames.len(), len));
        let payload = start + framing.head();
        self.frames.push(Scripted { payload, payload_end: payload + len, end: self.wire.len() });
    }

    /// Bytes in the socket buffer towards the server.
    #[inline]
    pub fn unread(&self) -> usize {
        self.sent - self.read
    }

    /// True if the peer sent all bytes of its script, the server took them, and neither side closed
    /// or reset.
    pub fn has_sent_all(&self) -> bool {
        self.read == self.wire.len() && !self.reset && !self.peer_fin
    }

    /// Bytes in the socket buffer towards the peer.
    #[inline]
    pub fn undelivered(&self) -> usize {
        self.taken - self.delivered
    }

    /// True if a receive would end or bring bytes.
    #[inline]
    pub fn is_readable(&self) -> bool {
        self.sent > self.read || self.error != 0 || self.reset || (self.peer_fin && !self.fin_read)
    }

    /// Ends its `open`: all times of its peer begin, except that of its bytes.
    pub fn let_in(&mut self, now: u64) {
        self.opened_at = now;
        self.touch(now);
        self.clocks.start(now);
        self.clocks.call_done(now, true);
    }

    /// Notes that the connection is active at `now`, the time of this turn.
    pub fn touch(&mut self, now: u64) {
        self.active_at = now;
        if self.used_at != now {
            self.used_before = self.used_at;
            self.used_at = now;
        }
    }

    /// Time at which something last kept it from being idle, without the completions of this turn.
    pub fn was_used(&self, now: u64) -> u64 {
        if self.used_at == now { self.used_before } else { self.used_at }
    }

    /// Its state at `now`, if it ends.
    pub fn sealed(&self, now: u64, half: bool) -> Sealed {
        let (waiting, waiting_since) = (self.waiting.len(), self.waiting_since);
        let (used_at, unseen) = (self.was_used(now), self.has_unseen());
        let owed = self.taken < self.owed.len();
        let pace = self.pace;
        Sealed { at: now, waiting, waiting_since, used_at, unseen, owed, half, ended: self.fin_heard, pace }
    }

    /// True if bytes arrived after the last frame that the service has seen.
    pub fn has_unseen_bytes(&self) -> bool {
        self.arrived > self.seen.checked_sub(1).map_or(0, |last| self.frames[last].end)
    }

    /// True if a whole frame arrived that the service has not seen.
    fn has_unseen(&self) -> bool {
        self.frames.get(self.seen).is_some_and(|frame| frame.end <= self.arrived)
    }

    /// True if one of these excuses applies.
    pub fn may(&self, excuses: u32) -> bool {
        self.excuses & excuses != 0
    }

    /// Adds a reply's bytes to those owed.
    pub fn owe(&mut self, framing: AnyFraming, payload: &[u8]) {
        framing.write(&mut self.owed, payload);
    }

    /// Checks `bytes` that the kernel takes from a send of the server.
    pub fn take(&mut self, bytes: &[u8], now: u64) {
        let from = self.taken;
        let owed = self.owed.get(from..from + bytes.len());
        if owed != Some(bytes) {
            let right = owed.map_or(0, |owed| owed.iter().zip(bytes).take_while(|(a, b)| a == b).count());
            panic!(
                "connection {}: a send holds bytes that are not owed: {} bytes at {from} of {}, wrong from {}",
                self.tag,
                bytes.len(),
                self.owed.len(),
                from + right
            );
        }
        self.taken += bytes.len();
        self.taken_at = now;
    }
}

/// The way in which a peer ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// FIN once every reply was read.
    Fin,
    /// FIN right after the last byte.
    HalfClose,
    /// RST, after it sent this number of bytes.
    Reset(usize),
    /// Nothing: it waits for the server.
    Wait,
    /// It does not close when the server does.
    Ignore,
}

/// A peer and its position in its script.
#[derive(Debug)]
pub struct Peer {
    /// Time of its next action.
    pub next_at: u64,
    /// It has to act soon, since something changed.
    pub kicked: bool,
    /// The most nanoseconds between two actions.
    pub gap: u64,
    /// Bytes sent in one action.
    pub send_max: usize,
    /// Bytes read in one action.
    pub read_max: usize,
    /// It does not read before this.
    pub reads_from: u64,
    /// Frames it sends before it wants answers.
    pub window: usize,
    /// The way in which it ends.
    pub end: End,
    /// From a number of bytes on: how few it sends at a time, and how rarely.
    pub crawls: Option<(usize, usize, u64)>,
    /// Heartbeats it answers.
    pub answers: usize,
    /// It has seen the end of the server's bytes, or a reset.
    pub saw_end: bool,
    /// It does nothing more.
    pub finished: bool,
}

impl Peer {
    /// True if it reads as soon as there are bytes, and closes when the server does.
    pub fn reads(&self, now: u64) -> bool {
        self.reads_from <= now
    }

    /// True if it reads at all.
    pub fn ever_reads(&self) -> bool {
        self.reads_from != NEVER
    }
}
