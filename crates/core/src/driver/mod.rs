//! The driver boundary: operations go out, completions come in.
//!
//! This room has everything that a driver must supply, and nothing else, so that one set of tests
//! covers every driver. A driver owns the sockets and their tables; `core` knows them by [`ConnId`]
//! and [`Socket`].
//!
//! | operation | completions |
//! |---|---|
//! | [`Op::Accept`] | any number of [`Completion::Accepted`], then one [`Completion::AcceptEnded`] |
//! | [`Op::AcceptStop`] | ends the accept with [`AcceptEnd::Stopped`], if it has not ended yet |
//! | [`Op::StopListening`] | any number of [`Completion::Accepted`], then one [`Completion::AcceptEnded`] with [`AcceptEnd::Closed`] |
//! | [`Op::Adopt`], [`Op::Refuse`] | none |
//! | [`Op::Connect`] | one [`Completion::Connected`] |
//! | [`Op::ConnectStop`] | ends the connect soon, if it has not ended yet, usually with `ECANCELED` |
//! | [`Op::Receive`] | any number of [`Completion::Received`], then one [`Completion::ReceiveEnded`] |
//! | [`Op::ReceiveOnce`] | at most one [`Completion::Received`], or several in a row if it may fill several buffers, then one [`Completion::ReceiveEnded`] |
//! | [`Op::ReceiveInto`] | one [`Completion::Filled`], as soon as bytes came, at the end, on an error, or stopped |
//! | [`Op::ReceiveStop`] | ends one of the receives with [`ReceiveEnd::Stopped`], if it has not ended yet |
//! | [`Op::ShutdownInput`] | ends one of the receives soon, in any way, if it has not ended yet |
//! | [`Op::Probe`] | none |
//! | [`Op::Send`] | one [`Completion::Sent`], after all bytes, on an error, or stopped |
//! | [`Op::SendStop`] | ends the send with [`SendEnd::Stopped`], if it has not ended yet |
//! | [`Op::Shutdown`] | one [`Completion::ShutDown`] |
//! | [`Op::Close`] | one [`Completion::Closed`]; the slot's next [`Op::Adopt`] or [`Op::Connect`] may come after it |
//!
//! Rules for the submitting shard: at most one receive of any kind, one send and one shutdown are
//! in flight on a connection, and none of them before it is connected; a `Stop` comes only while
//! its operation is in flight, and once; `ShutdownInput` takes the place of a `ReceiveStop`, and
//! only stops and the close follow it; `Close` comes only when nothing is in flight; everything for
//! an id lies between its `Adopt` or `Connect` and its `Closed`. A connection that could not be
//! made is closed too. `StopListening` comes once for a listener, whether or not an accept is in
//! flight there, even after an `AcceptStop`; no `Accept` follows it. An accept in flight ends with
//! it, unless its own end is already on the way and comes first: only [`AcceptEnd::Closed`] says
//! that the socket is closed.
//!
//! A listener may be adopted: its socket has other owners, which accept from its queue, now or
//! later. A driver accepts from it as from any other one. At `StopListening` it only closes its own
//! descriptor: new connections are not turned away, and the queue stays for the other owners,
//! except a connection that an accept in flight took.
//!
//! Rules for a driver: bytes of one connection arrive in order and none is lost, even if a receive
//! is stopped while bytes are on the way; every buffer, batch and block comes back exactly once. A
//! block comes back, and is moved, only when nothing can write to it any longer, whatever becomes
//! of its connection. An empty pool, a full queue, an interrupted call and a multishot that ended
//! by itself are handled inside the driver and show only in [`DriverStats`].
// May use: bytes, tables.
// Begin with: `Op` and `Completion`, then `Driver`.

mod address;

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::net::SocketAddr;
use core::task::Waker;
use core::time::Duration;

use ringserve_buf::{Block, LeaseMut, Pool};

use crate::{Batch, ConnId};

pub use address::Address;
pub use address::canonical;

/// An accepted socket that is not a connection yet, by a number of the driver's choice. Each one
/// goes back in exactly one [`Op::Adopt`], [`Op::Refuse`] or [`Driver::hand_over`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Socket(pub u64);

/// The process at the other end of a Unix socket, as it was when it connected (`SO_PEERCRED`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PeerCredentials {
    /// The process number; `None` if it cannot be seen from this process namespace.
    pub pid: Option<u32>,
    /// Its effective user.
    pub uid: u32,
    /// Its effective group.
    pub gid: u32,
}

/// A request to a driver.
#[derive(Debug)]
pub enum Op {
    /// Accept on listener number `listener` until stopped. A driver may deliver no further
    /// connections while many that it delivered are neither adopted nor refused.
    Accept {
        /// Index of the listener, in the order the driver was given them.
        listener: u16,
    },
    /// Stop accepting.
    AcceptStop {
        /// The listener that accepts.
        listener: u16,
    },
    /// Turn new connections away, take in the listener's queue, and close the listening socket. An
    /// adopted socket is only closed, and its queue stays.
    StopListening {
        /// The listener that is closed.
        listener: u16,
    },
    /// The socket is connection `id` from now on.
    Adopt {
        /// The new connection.
        id: ConnId,
        /// The accepted socket.
        socket: Socket,
    },
    /// Close a socket that becomes no connection.
    Refuse {
        /// The accepted socket.
        socket: Socket,
    },
    /// Make connection `id`, to a remote listener.
    Connect {
        /// The new connection.
        id: ConnId,
        /// The address to connect to.
        address: Box<Address>,
    },
    /// Give up the connect in flight.
    ConnectStop {
        /// The connection.
        id: ConnId,
    },
    /// Receive until stopped, or until the stream ends.
    Receive {
        /// The connection.
        id: ConnId,
    },
    /// Receive once, bytes that are there or the next ones: then the receive ends as if it had been
    /// stopped.
    ReceiveOnce {
        /// The connection.
        id: ConnId,
        /// It may fill several buffers at once, as many as the driver likes; else one.
        several: bool,
    },
    /// Receive once, after the bytes of a block, which belongs to the driver until the completion.
    ReceiveInto {
        /// The connection.
        id: ConnId,
        /// The block to receive into.
        block: Box<Block>,
        /// The most bytes to receive: no more than the block has room for, and at least 1.
        most: u32,
    },
    /// Stop receiving. Bytes that arrived before are delivered first.
    ReceiveStop {
        /// The connection.
        id: ConnId,
    },
    /// Receive no more, since the connection is to be closed. Later bytes are lost.
    ShutdownInput {
        /// The connection.
        id: ConnId,
    },
    /// Check whether the receive in flight, which brought nothing for long, would report available
    /// bytes. If not, the driver repairs that.
    Probe {
        /// The connection.
        id: ConnId,
    },
    /// Send all of the batch.
    Send {
        /// The connection.
        id: ConnId,
        /// The bytes to send; never empty.
        batch: Box<Batch>,
    },
    /// Give up the send in flight; its completion says how much was sent.
    SendStop {
        /// The connection.
        id: ConnId,
    },
    /// Send FIN after the sent bytes; receiving goes on.
    Shutdown {
        /// The connection.
        id: ConnId,
    },
    /// Close the socket and forget the id.
    Close {
        /// The connection.
        id: ConnId,
        /// Closes with FIN or with RST.
        how: CloseHow,
    },
}

/// The way in which a socket is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CloseHow {
    /// The kernel goes on sending its bytes, then FIN. Unread input turns it into a reset.
    Orderly,
    /// RST at once; unsent bytes are dropped.
    Abort,
}

/// A driver's answer.
#[derive(Debug)]
pub enum Completion {
    /// A new socket, to be adopted or refused.
    Accepted {
        /// The listener.
        listener: u16,
        /// The socket.
        socket: Socket,
        /// The peer's address; `None` for Unix sockets and for a peer that is gone already.
        peer: Option<SocketAddr>,
    },
    /// Accepting ended; no queued connection is lost.
    AcceptEnded {
        /// The listener.
        listener: u16,
        /// The reason.
        end: AcceptEnd,
    },
    /// A connect ended.
    Connected {
        /// The connection.
        id: ConnId,
        /// Or the `errno`: there is no connection, and the id has to be closed.
        result: Result<(), i32>,
    },
    /// Bytes arrived; never empty.
    Received {
        /// The connection.
        id: ConnId,
        /// The bytes, which no other lease shows.
        lease: LeaseMut,
    },
    /// A receive into a block ended.
    Filled {
        /// The connection.
        id: ConnId,
        /// The block, with the new bytes after its former ones.
        block: Box<Block>,
        /// The number of new bytes: 0 unless the end is [`ReceiveEnd::Stopped`].
        bytes: usize,
        /// The reason of the end; [`ReceiveEnd::Stopped`] also if bytes came.
        end: ReceiveEnd,
    },
    /// Receiving ended.
    ReceiveEnded {
        /// The connection.
        id: ConnId,
        /// The reason.
        end: ReceiveEnd,
    },
    /// A send ended.
    Sent {
        /// The connection.
        id: ConnId,
        /// The batch, advanced by the sent bytes; empty if all of them were sent.
        batch: Box<Batch>,
        /// The reason of the end.
        end: SendEnd,
    },
    /// A shutdown was carried out, or the connection was gone before.
    ShutDown {
        /// The connection.
        id: ConnId,
    },
    /// The socket is closed and its slot may be adopted again.
    Closed {
        /// The former connection.
        id: ConnId,
    },
}

impl Completion {
    /// The connection of this completion, if it has one.
    #[inline]
    pub fn id(&self) -> Option<ConnId> {
        match self {
            Completion::Accepted { .. } | Completion::AcceptEnded { .. } => None,
            Completion::Connected { id, .. }
            | Completion::Received { id, .. }
            | Completion::Filled { id, .. }
            | Completion::ReceiveEnded { id, .. }
            | Completion::Sent { id, .. }
            | Completion::ShutDown { id }
            | Completion::Closed { id } => Some(*id),
        }
    }
}

/// The reason why accepting ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AcceptEnd {
    /// It was stopped.
    Stopped,
    /// The listening socket is closed, by [`Op::StopListening`]: the listener accepts no more.
    Closed,
    /// The process has as many descriptors as it may (`EMFILE`).
    Descriptors,
    /// The system has as many files as it may (`ENFILE`).
    SystemFiles,
    /// Any other error, as its `errno`: try again later.
    Error(i32),
}

/// The reason why receiving ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReceiveEnd {
    /// It was stopped, or was a receive for once.
    Stopped,
    /// The peer sent FIN.
    Eof,
    /// An error, as its `errno`: the connection is broken.
    Error(i32),
}

/// The reason why a send ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendEnd {
    /// All bytes were sent.
    Done,
    /// It was stopped.
    Stopped,
    /// An error, as its `errno`: the connection is broken.
    Error(i32),
}

/// The longest wait of a turn for its first completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// None.
    No,
    /// At most this time.
    For(Duration),
    /// Until something happens.
    Forever,
}

/// The most that one turn takes from the driver, so that one busy peer cannot hold up the others.
/// The rest comes in the next turn, in order.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    /// Completions.
    pub completions: usize,
    /// Received bytes; the completion that reaches this number is the last.
    pub bytes: usize,
}

impl Default for Budget {
    /// 256 completions, about a millisecond of echo at 4 µs each; 1 MiB, about the size of a core's
    /// cache.
    fn default() -> Budget {
        Budget { completions: 256, bytes: 1 << 20 }
    }
}

/// The result of [`Driver::give_back`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GivesBack {
    /// The kernel holds no more buffers than at the start, or takes no more than that in the next
    /// turn.
    Done,
    /// Receives that were asked to stop have not ended.
    Waits,
    /// Nothing was taken back: a receive is armed that was not asked to stop, or did not end in
    /// time.
    Refused,
}

/// Counters of a driver since its start. They never fall.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DriverStats {
    /// Turns taken.
    pub turns: u64,
    /// System calls that submit, wait or poll: `io_uring_enter`, `epoll_wait`.
    pub enters: u64,
    /// All other system calls: addresses, and with epoll each receive and send.
    pub calls: u64,
    /// Times a receive found the pool empty and was parked.
    pub receives_parked: u64,
    /// Receives armed, first and again.
    pub receives_armed: u64,
    /// Sends that did not fit at once and were finished later.
    pub sends_short: u64,
    /// Cancels by io_uring. The kernel searches for each operation among all that the ring waits
    /// for, so the cost grows with the connections.
    pub cancels: u64,
    /// Stops that did not find their operation, which was in flight, and were repeated.
    pub cancels_missed: u64,
    /// Probes of receives that brought nothing for long, by io_uring.
    pub probes: u64,
    /// Times the completion queue overflowed.
    pub overflows: u64,
    /// Times an operation waited for the next turn because the submission queue was full.
    pub submissions_delayed: u64,
}

impl DriverStats {
    /// Calls `visit` with each count, always in the same order: for code that keeps them as
    /// numbers.
    #[doc(hidden)]
    pub fn each_count(&mut self, visit: impl FnMut(&mut u64)) {
        let DriverStats {
            turns,
            enters,
            calls,
            receives_parked,
            receives_armed,
            sends_short,
            cancels,
            cancels_missed,
            probes,
            overflows,
            submissions_delayed,
        } = self;
        let counts = [
            turns,
            enters,
            calls,
            receives_parked,
            receives_armed,
            sends_short,
            cancels,
            cancels_missed,
            probes,
            overflows,
            submissions_delayed,
        ];
        counts.into_iter().for_each(visit);
    }
}

/// The owner of a ring, of an epoll instance, or of a simulated kernel. It belongs to one shard,
/// and is called on that shard's thread; only its [`waker`](Driver::waker) goes to other threads.
///
/// A shard calls [`turn`](Driver::turn), which may block. A shard inside an event loop of another
/// kind watches [`readiness`](Driver::readiness) instead. In this order nothing is missed: the loop
/// clears the readiness of the descriptor, takes a turn with [`Wait::No`], and sleeps once
/// [`begin`](Driver::begin) says that nothing is left.
pub trait Driver {
    /// An open descriptor that is on its way out of the driver or into it, and closes when it is
    /// dropped: an `OwnedFd`, which this crate cannot name.
    type Descriptor: Send;

    /// Takes an operation. It may be carried out now or in the next [`turn`](Driver::turn).
    fn submit(&mut self, op: Op);

    /// Submits queued operations, waits for at most `wait` (not at all if a completion is there
    /// already) and appends completions, within the budget.
    ///
    /// # Errors
    /// Only when the driver itself is broken, as the `errno`; the shard then ends.
    fn turn(&mut self, wait: Wait, budget: Budget, completions: &mut Vec<Completion>) -> Result<(), i32>;

    /// Declares that no task waits for the [`Completion::Sent`] of sends that are submitted until
    /// the next turn and fit at once: they may come with the next other completion instead of
    /// ending that turn's wait. Holds for one turn.
    ///
    /// It halves the system calls of an echo to a single connection. Not to be called while
    /// something depends on a send: a close or shutdown after it, a handler that waits for room, a
    /// paused receive.
    fn defer_sent(&mut self) {}

    /// Begins to take back buffers that the kernel holds without an armed receive, so that
    /// [`Pool::trim`](ringserve_buf::Pool::trim) can give them back to the system. For a quiet
    /// shard: receives that are submitted meanwhile are armed when it is done, within 0.1 s. Call
    /// it again in the next turn as long as it returns [`GivesBack::Waits`].
    fn give_back(&mut self) -> GivesBack {
        GivesBack::Done
    }

    /// The memory of received bytes.
    fn pool(&self) -> &Pool;

    /// The counters.
    fn stats(&self) -> DriverStats;

    /// Connections this driver can hold at once.
    fn connections_max(&self) -> usize;

    /// A waker that makes a turn return, from any thread. If none blocks, the next one that would
    /// block returns at once. Writes of the waking thread before the wake are visible after that
    /// turn. Several wakes before a turn sees them may count as one.
    fn waker(&self) -> Waker;

    /// The local address that a peer connected to. The socket was accepted, and is not adopted or
    /// refused yet. `None` for Unix sockets, and if the driver cannot tell.
    fn local_of(&mut self, _socket: Socket) -> Option<SocketAddr> {
        None
    }

    /// The process at the other end of a Unix socket that is neither adopted nor refused yet.
    /// `None` for TCP.
    fn credentials_of(&mut self, _socket: Socket) -> Option<PeerCredentials> {
        None
    }

    /// Takes an accepted socket out of this driver, in the place of an [`Op::Adopt`] or
    /// [`Op::Refuse`]. `None` if there is no such socket, or no descriptor is left to name it; then
    /// it is closed.
    fn hand_over(&mut self, socket: Socket) -> Option<Self::Descriptor>;

    /// Takes over a connected stream socket, as if it had been accepted here: it goes back as each
    /// [`Socket`] does. It comes from [`hand_over`](Driver::hand_over) of another driver of this
    /// kind.
    fn take_over(&mut self, descriptor: Self::Descriptor) -> Socket;

    /// A descriptor that becomes readable, as an edge, whenever a turn would bring something. It
    /// must not be read, and may become readable for nothing. To be called once, before the first
    /// turn.
    ///
    /// # Errors
    /// The `errno`, if there is no descriptor left, the kernel refuses, or the driver can only
    /// block.
    fn readiness(&mut self) -> Result<Self::Descriptor, i32>;

    /// Prepares a shard's sleep at [`readiness`](Driver::readiness): submits what is queued, and
    /// ensures that events which become due in the driver itself make the descriptor readable. If a
    /// receive waits for a buffer, the next one that is freed wakes the waker given to
    /// [`Pool::wake_when_freed`]. True if a turn would bring something now. After
    /// [`defer_sent`](Driver::defer_sent) the ends of sends that fitted at once do not count, not
    /// even those of earlier turns.
    ///
    /// # Errors
    /// Those of [`turn`](Driver::turn).
    fn begin(&mut self) -> Result<bool, i32>;
}
