//! The driver boundary: operations go out, completions come in.
//!
//! What a driver must supply, all of it and nothing else, so that one body of tests can hold every driver to it. A
//! driver owns the sockets and the tables that belong to them; `core` knows them by [`ConnId`] and [`Socket`].
//!
//! | operation | completions it leads to |
//! |---|---|
//! | [`Op::Accept`] | any number of [`Completion::Accepted`], then one [`Completion::AcceptEnded`] |
//! | [`Op::AcceptStop`] | makes the above end with [`AcceptEnd::Stopped`], if it has not ended yet |
//! | [`Op::StopListening`] | any number of [`Completion::Accepted`], then one [`Completion::AcceptEnded`] with [`AcceptEnd::Closed`] |
//! | [`Op::Adopt`], [`Op::Refuse`] | none |
//! | [`Op::Connect`] | one [`Completion::Connected`] |
//! | [`Op::ConnectStop`] | makes the above come soon, if it has not come yet, mostly with `ECANCELED` |
//! | [`Op::Receive`] | any number of [`Completion::Received`], then one [`Completion::ReceiveEnded`] |
//! | [`Op::ReceiveOnce`] | at most one [`Completion::Received`], then one [`Completion::ReceiveEnded`] |
//! | [`Op::ReceiveInto`] | one [`Completion::Filled`], as soon as bytes came, at the end, on an error, or stopped |
//! | [`Op::ReceiveStop`] | makes one of the above end with [`ReceiveEnd::Stopped`], if it has not ended yet |
//! | [`Op::ShutdownInput`] | makes one of the above end soon, in any way, if it has not ended yet |
//! | [`Op::Probe`] | none |
//! | [`Op::Send`] | one [`Completion::Sent`], when all is sent, on an error, or stopped |
//! | [`Op::SendStop`] | makes the above come with [`SendEnd::Stopped`], if it has not come yet |
//! | [`Op::Shutdown`] | one [`Completion::ShutDown`] |
//! | [`Op::Close`] | one [`Completion::Closed`]; the slot's next [`Op::Adopt`] or [`Op::Connect`] may come after it |
//!
//! Rules for the submitting shard: one receive, of whichever kind, one send, one shutdown in flight on a connection, and none of them before it
//! is connected; a `Stop` only while its operation is in flight, and once; `ShutdownInput` takes the place of a
//! `ReceiveStop`, and nothing but stops and the close follow it; `Close` only when nothing is in flight;
//! everything for an id lies between its `Adopt` or `Connect` and its `Closed`. A connection that could not be made is
//! closed too. `StopListening` comes once for a listener, whether or not an accept is in flight there, also after an
//! `AcceptStop`; no `Accept` follows it. An accept in flight ends with it, unless its own end is on the way
//! already and comes first: only [`AcceptEnd::Closed`] says that the socket is closed.
//!
//! A listener may be adopted: others own its socket too, and accept from its queue, now or later. A driver accepts from it as
//! from any other one. With `StopListening` it does nothing to the socket but to close its own descriptor of it: newcomers
//! are not turned away, and what is queued stays for the other owners, but for what an accept in flight took.
//!
//! Rules for a driver: bytes of one connection arrive in order and none is lost, also when a receive is
//! stopped while bytes are on the way; every buffer, batch and block comes back exactly once, a block not before nothing can
//! write to it any more, nor is it moved until then, whatever becomes of its connection; an empty pool, a full
//! queue, an interrupted call or a multishot that ended by itself is the driver's own affair and shows only in
//! [`DriverStats`].

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::net::SocketAddr;
use core::task::Waker;
use core::time::Duration;

use ringserve_buf::{Block, LeaseMut, Pool};

use crate::{Address, Batch, ConnId};

/// An accepted socket that is not a connection yet: what to call it is the driver's affair. Each one goes
/// back in exactly one [`Op::Adopt`], [`Op::Refuse`] or [`Driver::hand_over`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Socket(pub u64);

/// The process at the other end of a Unix socket, as it was when it connected (`SO_PEERCRED`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PeerCredentials {
    /// Its number; `None` if it cannot be seen from this process namespace.
    pub pid: Option<u32>,
    /// Its effective user.
    pub uid: u32,
    /// Its effective group.
    pub gid: u32,
}

/// What is asked of a driver.
#[derive(Debug)]
pub enum Op {
    /// Accept on listener number `listener` until told to stop.
    Accept {
        /// Index of the listener, in the order the driver was given them.
        listener: u16,
    },
    /// Stop accepting.
    AcceptStop {
        /// The listener that accepts.
        listener: u16,
    },
    /// Turn newcomers away, take what is queued at the listener, and close the listening socket. One that was adopted is closed
    /// alone, and its queue stays.
    StopListening {
        /// The listener that is closed.
        listener: u16,
    },
    /// The socket is connection `id` from now on.
    Adopt {
        /// The new connection.
        id: ConnId,
        /// What was accepted.
        socket: Socket,
    },
    /// Close a socket that becomes no connection.
    Refuse {
        /// What was accepted.
        socket: Socket,
    },
    /// Connection `id` is made from now on, to a listener elsewhere.
    Connect {
        /// The new connection.
        id: ConnId,
        /// Where to.
        address: Box<Address>,
    },
    /// Give up the connect in flight.
    ConnectStop {
        /// The connection.
        id: ConnId,
    },
    /// Receive until told to stop, or the stream ends.
    Receive {
        /// The connection.
        id: ConnId,
    },
    /// Receive once, what is there or comes first: then the receive ends as if it had been told to stop.
    ReceiveOnce {
        /// The connection.
        id: ConnId,
    },
    /// Receive once, behind the bytes of a block. It is the driver's until the completion.
    ReceiveInto {
        /// The connection.
        id: ConnId,
        /// Where to.
        block: Box<Block>,
        /// Bytes at most: no more than the block has room for, and at least 1.
        most: u32,
    },
    /// Stop receiving. What arrived before is delivered first.
    ReceiveStop {
        /// The connection.
        id: ConnId,
    },
    /// Receive no more, since the connection is to be closed. What arrives from here on is lost.
    ShutdownInput {
        /// The connection.
        id: ConnId,
    },
    /// See whether the receive in flight, which brought nothing for long, would tell if there were anything. If not, the
    /// driver makes it do so.
    Probe {
        /// The connection.
        id: ConnId,
    },
    /// Send all of the batch.
    Send {
        /// The connection.
        id: ConnId,
        /// What to send; never empty.
        batch: Box<Batch>,
    },
    /// Give up the send in flight; its completion tells what left.
    SendStop {
        /// The connection.
        id: ConnId,
    },
    /// Send FIN after what was sent; receiving goes on.
    Shutdown {
        /// The connection.
        id: ConnId,
    },
    /// Close the socket and forget the id.
    Close {
        /// The connection.
        id: ConnId,
        /// With FIN or with RST.
        how: CloseHow,
    },
}

/// How a socket is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CloseHow {
    /// The kernel goes on sending what it holds, then FIN. Input that was not read turns it into a reset.
    Orderly,
    /// RST at once; what was not sent is dropped.
    Abort,
}

/// A driver's answer.
#[derive(Debug)]
pub enum Completion {
    /// A new socket, to be adopted or refused.
    Accepted {
        /// Where it was accepted.
        listener: u16,
        /// The socket.
        socket: Socket,
        /// The peer's address; `None` for Unix sockets and for a peer that is gone already.
        peer: Option<SocketAddr>,
    },
    /// Accepting ended; no queued connection is lost.
    AcceptEnded {
        /// Where.
        listener: u16,
        /// Why.
        end: AcceptEnd,
    },
    /// A connect ended.
    Connected {
        /// The connection.
        id: ConnId,
        /// Or the `errno`: there is no connection, and the id is to be closed.
        result: Result<(), i32>,
    },
    /// Bytes arrived; never empty.
    Received {
        /// The connection.
        id: ConnId,
        /// The bytes, which are nowhere else.
        lease: LeaseMut,
    },
    /// A receive into a block ended.
    Filled {
        /// The connection.
        id: ConnId,
        /// The block, with the bytes behind those that it had.
        block: Box<Block>,
        /// How many came: 0 unless the end is [`ReceiveEnd::Stopped`].
        bytes: usize,
        /// Why it ended; [`ReceiveEnd::Stopped`] also where bytes came.
        end: ReceiveEnd,
    },
    /// Receiving ended.
    ReceiveEnded {
        /// The connection.
        id: ConnId,
        /// Why.
        end: ReceiveEnd,
    },
    /// A send ended.
    Sent {
        /// The connection.
        id: ConnId,
        /// The batch, advanced by what was sent; empty if all was.
        batch: Box<Batch>,
        /// Why it ended.
        end: SendEnd,
    },
    /// A shutdown was carried out, or the connection was gone before.
    ShutDown {
        /// The connection.
        id: ConnId,
    },
    /// The socket is closed and its slot may be adopted again.
    Closed {
        /// The connection that was.
        id: ConnId,
    },
}

impl Completion {
    /// The connection it is about, if it is about one.
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

/// Why accepting ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AcceptEnd {
    /// It was told to.
    Stopped,
    /// The listening socket is closed, as [`Op::StopListening`] told: the listener accepts no more.
    Closed,
    /// The process has as many descriptors as it may (`EMFILE`).
    Descriptors,
    /// The system has as many files as it may (`ENFILE`).
    SystemFiles,
    /// Any other error, as its `errno`: try again later.
    Error(i32),
}

/// Why receiving ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReceiveEnd {
    /// It was told to, or was for once.
    Stopped,
    /// The peer sent FIN.
    Eof,
    /// An error, as its `errno`: the connection is broken.
    Error(i32),
}

/// Why a send ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendEnd {
    /// All was sent.
    Done,
    /// It was told to.
    Stopped,
    /// An error, as its `errno`: the connection is broken.
    Error(i32),
}

/// How long a turn may block for the first completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Not at all.
    No,
    /// At most this long.
    For(Duration),
    /// Until something happens.
    Forever,
}

/// The most one turn takes from the driver, so that one busy peer cannot hold up the others. What is left
/// comes in the next turn, in order.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    /// Completions.
    pub completions: usize,
    /// Received bytes; the completion that reaches it is the last.
    pub bytes: usize,
}

impl Default for Budget {
    /// 256 completions, about a millisecond of echo at 4 µs each; 1 MiB, about the size of a core's cache.
    fn default() -> Budget {
        Budget { completions: 256, bytes: 1 << 20 }
    }
}

/// What [`Driver::give_back`] came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GivesBack {
    /// The kernel holds no more buffers than at the start, or takes no more than that in the next turn.
    Done,
    /// Receives that were told to stop have not ended.
    Waits,
    /// Nothing was taken back: a receive is armed that was not told to stop, or did not end in time.
    Refused,
}

/// What a driver counted since it started. Counts never fall.
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
    /// Operations that the kernel was told to cancel, by io_uring: it looks for each among all that the ring waits for, so
    /// its cost grows with the connections.
    pub cancels: u64,
    /// Times a stop did not find the operation it was for, which was in flight, and was made again.
    pub cancels_missed: u64,
    /// Receives that brought nothing for long and were looked at, by io_uring.
    pub probes: u64,
    /// Times the completion queue overflowed.
    pub overflows: u64,
    /// Times an operation waited for the next turn because the submission queue was full.
    pub submissions_delayed: u64,
}

impl DriverStats {
    /// Shows `visit` each count, always in the same order: for those who keep them as numbers.
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

/// The owner of a ring, of an epoll instance, or of a simulated kernel. It belongs to one shard, and is called on that shard's
/// thread; its [`waker`](Driver::waker) alone goes to other threads.
///
/// A shard calls [`turn`](Driver::turn), which may block. One that runs inside an event loop of another kind watches
/// [`readiness`](Driver::readiness) there instead. The order in which nothing is missed: the loop clears that the descriptor
/// was readable, then takes a turn with [`Wait::No`], then sleeps once [`begin`](Driver::begin) says that nothing is left.
pub trait Driver {
    /// An open descriptor that is on its way out of the driver or into it, and closes when it is dropped: an `OwnedFd`, which
    /// this crate cannot name.
    type Descriptor: Send;

    /// Takes an operation. It may be carried out now or in the next [`turn`](Driver::turn).
    fn submit(&mut self, op: Op);

    /// Submits what is queued, waits as told (not at all if something is there already) and appends what
    /// happened, within the budget.
    ///
    /// # Errors
    /// Only when the driver itself is broken, as the `errno`; the shard then ends.
    fn turn(&mut self, wait: Wait, budget: Budget, completions: &mut Vec<Completion>) -> Result<(), i32>;

    /// No task waits for the [`Completion::Sent`] of what is submitted until the next turn and fits at once: it
    /// may come with the next other completion instead of ending that turn's wait. Holds for one turn.
    ///
    /// It halves the system calls of an echo to a single connection. Not to be called while something
    /// depends on a send: a close or shutdown after it, a handler that waits for room, a paused receive.
    fn defer_sent(&mut self) {}

    /// Begins to take buffers back that the kernel holds and that no receive is armed for, so that
    /// [`Pool::trim`](ringserve_buf::Pool::trim) can give them back to the system. For a shard that is quiet: receives that
    /// are submitted before this is done are armed once it is, within 0.1 s. Call it again in the next turn while it answers
    /// [`GivesBack::Waits`].
    fn give_back(&mut self) -> GivesBack {
        GivesBack::Done
    }

    /// The memory that received bytes lie in.
    fn pool(&self) -> &Pool;

    /// False if a lease held beyond the turn pins so much (incremental buffers) that frames are to be copied before
    /// they are handed out.
    fn may_lend_beyond_turn(&self) -> bool {
        true
    }

    /// Counters.
    fn stats(&self) -> DriverStats;

    /// Connections this driver can hold at once.
    fn connections_max(&self) -> usize;

    /// Makes a turn return, from any thread. If none blocks, the next one that would block returns at once. What the waking
    /// thread did before is seen after that turn. Several wakes before a turn sees them may count as one.
    fn waker(&self) -> Waker;

    /// Which address of this host a peer connected to. The socket was accepted, and is not adopted or refused yet. `None` for
    /// Unix sockets, and where the driver cannot tell.
    fn local_of(&mut self, _socket: Socket) -> Option<SocketAddr> {
        None
    }

    /// The process at the other end of a Unix socket, which is neither adopted nor refused yet. `None` for all others.
    fn credentials_of(&mut self, _socket: Socket) -> Option<PeerCredentials> {
        None
    }

    /// Takes an accepted socket out of this driver, in the place of an [`Op::Adopt`] or [`Op::Refuse`]. `None` if there is no
    /// such socket, or no descriptor is left to name it; then it is closed.
    fn hand_over(&mut self, socket: Socket) -> Option<Self::Descriptor>;

    /// Takes over a connected stream socket, as if it had been accepted here: it goes back as each [`Socket`] does. It comes
    /// from [`hand_over`](Driver::hand_over) of another driver of this kind.
    fn take_over(&mut self, descriptor: Self::Descriptor) -> Socket;

    /// A descriptor that becomes readable, as an edge, whenever something happened that a turn would bring. It is not to be
    /// read, and may become readable for nothing. To be called once, before the first turn.
    ///
    /// # Errors
    /// The `errno`, if there is no descriptor left, the kernel refuses, or the driver can only block.
    fn readiness(&mut self) -> Result<Self::Descriptor, i32>;

    /// Before a shard sleeps at [`readiness`](Driver::readiness): submits what is queued, and sees to it that what comes due
    /// in the driver itself makes the descriptor readable. If a receive waits for a buffer, the next one that is freed wakes
    /// what [`Pool::wake_when_freed`] was given. True if a turn would bring something now. After
    /// [`defer_sent`](Driver::defer_sent) the ends of sends that fitted at once do not count, those of earlier turns neither.
    ///
    /// # Errors
    /// Those of [`turn`](Driver::turn).
    fn begin(&mut self) -> Result<bool, i32>;
}
