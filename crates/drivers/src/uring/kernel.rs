//! The kernel interface: what passes between the two halves of the io_uring driver, as plain
//! values.
//!
//! Above it lies the bookkeeping ([`Uring`](crate::Uring)), below it a [`Kernel`]: the real one
//! ([`SystemKernel`](crate::SystemKernel)) or a simulated one, which needs no `unsafe`.
//!
//! Ownership passes with the operation: a batch is moved into its [`RawOp::Send`] and comes back in
//! that operation's [`RawCqe`]; an accepted descriptor, or a new one, belongs to the kernel half
//! until a [`RawOp::Install`] or [`RawOp::CloseFd`] names it. So the half that passes pointers to
//! the kernel also owns the memory that they point to.
//!
//! Receive buffers are lent and taken back by the bookkeeping half, which owns the [`KernelSide`];
//! it lends it to [`Kernel::reap`], so that a simulated kernel can write the bytes of a completion
//! at the moment the completion is reaped.

use std::net::SocketAddr;
use std::task::Waker;
use std::time::Duration;

use ringserve_buf::{Block, KernelSide};
use ringserve_core::{Address, Batch, CloseHow, ConnId, PeerCredentials};

/// The multishot operation goes on: more completions follow.
pub const F_MORE: u32 = 1 << 1;
/// A buffer was used; its id is in the upper half of the flags.
pub const F_BUFFER: u32 = 1 << 0;
/// The bit of the flags at which the buffer id starts.
pub const BUFFER_SHIFT: u32 = 16;

/// The kind of an operation: the upper 4 bits of a `user_data`. Operations on a connection have 1
/// to 11 there, and 12 to 15 are free; the other 60 bits are the connection's [`ConnId::bits`]. All
/// others share 0, and are distinguished by the 8 bits below, of which 5 to 255 are free; the
/// lowest 16 bits are the number of a listener, where there is one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// Receive into provided buffers.
    Receive = 1,
    /// Send.
    Send = 2,
    /// Shutdown of one side.
    Shutdown = 3,
    /// Close of a connection's descriptor.
    Close = 4,
    /// Connect.
    Connect = 5,
    /// Installation of a descriptor as a connection; it posts a completion only when it failed.
    Install = 6,
    /// Peek at what a receive would find.
    Probe = 7,
    /// Cancel of a receive.
    CancelReceive = 8,
    /// Cancel of a send.
    CancelSend = 9,
    /// Cancel of a connect.
    CancelConnect = 10,
    /// Receive into a block.
    ReceiveInto = 11,
    /// An operation that nothing waits for; it posts a completion only when it failed.
    Ignored = CONTROL,
    /// Multishot accept.
    Accept = CONTROL + 1,
    /// Cancel of an accept.
    CancelAccept = CONTROL + 2,
    /// Read of the wake-up descriptor.
    Wake = CONTROL + 3,
    /// End of the kernel half's own timer: a wait was over.
    Timer = CONTROL + 4,
}

/// The first of the kinds that name no connection.
const CONTROL: u8 = 16;

impl Kind {
    /// Builds a `user_data`.
    #[inline]
    pub fn with(self, bits: u64) -> u64 {
        let kind = self as u64;
        let (kind, free) =
            if self as u8 >= CONTROL { ((kind - u64::from(CONTROL)) << 52, 52) } else { (kind << 60, 60) };
        debug_assert_eq!(bits >> free, 0);
        kind | bits
    }

    /// The operation that a `user_data` names; `None` for values that no operation has.
    #[inline]
    pub fn of(user_data: u64) -> Option<Kind> {
        Some(match user_data >> 60 {
            0 => return Kind::of_control((user_data >> 52) as u8),
            1 => Kind::Receive,
            2 => Kind::Send,
            3 => Kind::Shutdown,
            4 => Kind::Close,
            5 => Kind::Connect,
            6 => Kind::Install,
            7 => Kind::Probe,
            8 => Kind::CancelReceive,
            9 => Kind::CancelSend,
            10 => Kind::CancelConnect,
            11 => Kind::ReceiveInto,
            _ => return None,
        })
    }

    fn of_control(which: u8) -> Option<Kind> {
        Some(match which {
            0 => Kind::Ignored,
            1 => Kind::Accept,
            2 => Kind::CancelAccept,
            3 => Kind::Wake,
            4 => Kind::Timer,
            _ => return None,
        })
    }
}

/// The way in which a send is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendMode {
    /// Sends the bytes that fit at once (`MSG_DONTWAIT`). It completes within the [`Kernel::enter`]
    /// that submits it.
    Try,
    /// Like `Try`, but when everything fitted its completion does not end the wait of that
    /// [`Kernel::enter`]; it is there when something else does.
    TryQuietly,
    /// Sends all bytes, however long that takes (`MSG_WAITALL`). A short result only after a cancel
    /// or an error.
    All,
}

/// An operation for the kernel.
///
/// Operations are carried out in the order they are submitted, as far as they complete at once.
#[derive(Debug)]
pub enum RawOp {
    /// Multishot accept, or an accept of a single connection where other rings accept from the same
    /// queue. Completions: descriptors, with [`F_MORE`] on all but the last one, or an error.
    Accept {
        /// Index of the listener.
        listener: u16,
    },
    /// Installs a descriptor as connection `id`, in its slot. No completion unless it failed: then
    /// every operation on the connection ends with `EBADF`.
    Install {
        /// The connection.
        id: ConnId,
        /// Descriptor from an accept's completion, or from [`Kernel::open_socket`]. It is closed,
        /// or belongs to the connection afterwards.
        fd: i32,
    },
    /// Closes an accepted descriptor. No completion unless it failed.
    CloseFd {
        /// Descriptor from an accept's completion.
        fd: i32,
    },
    /// Connects an installed socket. One completion: 0 or an error.
    Connect {
        /// The connection.
        id: ConnId,
        /// The address to connect to, which [`Kernel::open_socket`] was given for this socket.
        address: Box<Address>,
    },
    /// Cancels a connect. One completion: 0, `ENOENT` if it ended already, or `EALREADY`.
    CancelConnect {
        /// The connection.
        id: ConnId,
    },
    /// Multishot receive into provided buffers. Completions: lengths with [`F_BUFFER`] and the
    /// buffer's id, and [`F_MORE`] on all but the last one; 0 at the end of the stream; or an
    /// error.
    Receive {
        /// The connection.
        id: ConnId,
    },
    /// Receive into one provided buffer. One completion, like the last one of [`RawOp::Receive`].
    ReceiveOnce {
        /// The connection.
        id: ConnId,
    },
    /// Receive after the bytes of a block. One completion, once bytes came: their number, 0 at the
    /// end of the stream, or an error. The block is the kernel half's until then;
    /// [`Kernel::take_block`] returns it.
    ReceiveInto {
        /// The connection.
        id: ConnId,
        /// The block to fill.
        block: Box<Block>,
        /// The most bytes to receive: at least 1, and the block has room for them.
        most: u32,
    },
    /// Looks at what a receive would find, and leaves it there (`MSG_PEEK | MSG_DONTWAIT`). One
    /// completion, within the [`Kernel::enter`] that submits it: 1 if there are bytes, 0 at the end
    /// of the stream, `EAGAIN` if there is nothing, or the error, which the socket then no longer
    /// reports.
    Probe {
        /// The connection.
        id: ConnId,
    },
    /// Send from the start of the batch. One completion, which returns the batch as it was.
    Send {
        /// The connection.
        id: ConnId,
        /// The bytes to send; not empty.
        batch: Box<Batch>,
        /// The way in which the send is made.
        mode: SendMode,
    },
    /// `shutdown(SHUT_WR)`. One completion.
    Shutdown {
        /// The connection.
        id: ConnId,
    },
    /// `shutdown(SHUT_RD)`: a receive that is armed ends. One completion, of [`Kind::Shutdown`],
    /// after that end.
    ShutdownInput {
        /// The connection.
        id: ConnId,
    },
    /// Closes the connection's descriptor. One completion.
    Close {
        /// The connection.
        id: ConnId,
        /// With FIN or with RST.
        how: CloseHow,
    },
    /// Cancels an accept. One completion: 0, `ENOENT` if it ended already, or `EALREADY`.
    CancelAccept {
        /// Index of the listener.
        listener: u16,
    },
    /// Cancels a receive of any kind; completions as for [`RawOp::CancelAccept`].
    CancelReceive {
        /// The connection.
        id: ConnId,
    },
    /// Cancels a send; completions as for [`RawOp::CancelAccept`].
    CancelSend {
        /// The connection.
        id: ConnId,
    },
    /// Completes when another thread wants the turn to return.
    ReadWake,
}

impl RawOp {
    /// The `user_data` its completions carry.
    pub fn user_data(&self) -> u64 {
        match self {
            RawOp::Accept { listener } => Kind::Accept.with(u64::from(*listener)),
            RawOp::Install { id, .. } => Kind::Install.with(id.bits()),
            RawOp::CloseFd { .. } => Kind::Ignored.with(0),
            RawOp::Connect { id, .. } => Kind::Connect.with(id.bits()),
            RawOp::CancelConnect { id } => Kind::CancelConnect.with(id.bits()),
            RawOp::Receive { id } | RawOp::ReceiveOnce { id } => Kind::Receive.with(id.bits()),
            RawOp::ReceiveInto { id, .. } => Kind::ReceiveInto.with(id.bits()),
            RawOp::Probe { id } => Kind::Probe.with(id.bits()),
            RawOp::Send { id, .. } => Kind::Send.with(id.bits()),
            RawOp::Shutdown { id } | RawOp::ShutdownInput { id } => Kind::Shutdown.with(id.bits()),
            RawOp::Close { id, .. } => Kind::Close.with(id.bits()),
            RawOp::CancelAccept { listener } => Kind::CancelAccept.with(u64::from(*listener)),
            RawOp::CancelReceive { id } => Kind::CancelReceive.with(id.bits()),
            RawOp::CancelSend { id } => Kind::CancelSend.with(id.bits()),
            RawOp::ReadWake => Kind::Wake.with(0),
        }
    }
}

/// A completion from the kernel.
#[derive(Debug)]
pub struct RawCqe {
    /// The operation's `user_data`.
    pub user_data: u64,
    /// Its result, or a negative `errno`.
    pub res: i32,
    /// [`F_MORE`], [`F_BUFFER`] and the buffer id.
    pub flags: u32,
    /// The batch of a [`RawOp::Send`]; `None` for all others.
    pub batch: Option<Box<Batch>>,
}

impl RawCqe {
    /// A completion that returns no batch.
    pub fn new(user_data: u64, res: i32, flags: u32) -> RawCqe {
        RawCqe { user_data, res, flags, batch: None }
    }

    /// The connection, for kinds that name one.
    pub fn id(&self) -> ConnId {
        ConnId::from_bits(self.user_data)
    }

    /// The buffer, if one was used.
    pub fn buffer(&self) -> Option<u16> {
        (self.flags & F_BUFFER != 0).then_some((self.flags >> BUFFER_SHIFT) as u16)
    }
}

/// A [`SendMode::TryQuietly`] that fitted.
#[derive(Debug)]
pub struct SentQuietly {
    /// The connection.
    pub id: ConnId,
    /// The number of sent bytes of the batch.
    pub bytes: i32,
    /// The batch as it was given.
    pub batch: Box<Batch>,
}

/// The lower half of the io_uring driver.
pub trait Kernel {
    /// The type of [`Driver::Descriptor`](ringserve_core::Driver::Descriptor).
    type Descriptor: Send;

    /// Queues an operation for the next [`enter`](Kernel::enter).
    ///
    /// # Errors
    /// Returns the operation if the submission queue is full.
    fn submit(&mut self, op: RawOp) -> Result<(), RawOp>;

    /// The number of queue entries that the next [`enter`](Kernel::enter) would submit.
    fn queued(&mut self) -> usize;

    /// Adds a lent buffer at the tail of the buffer ring. The ring has room: never more than
    /// [`buffer_ring_entries`](Kernel::buffer_ring_entries) are in it.
    fn provide(&mut self, side: &mut KernelSide, buffer: u16);

    /// The most buffers in the buffer ring.
    fn buffer_ring_entries(&self) -> usize;

    /// Replaces the buffer ring by an empty one. Called only while no receive is in flight: every
    /// buffer that was in the ring may then be taken back. False if the kernel refuses; then
    /// nothing has changed.
    fn renew_buffer_ring(&mut self) -> bool;

    /// Submits the queued operations and lets the kernel post completions. With `wait_for` above 0
    /// it blocks until that many completions can be reaped (a [`SendMode::TryQuietly`] that fitted
    /// is none) or the timeout is over; when it could not submit everything it does not block.
    ///
    /// # Errors
    /// The `errno`. `EINTR`, `ETIME`, `EBUSY`, `EAGAIN` and `ENOMEM` are not failures, but it may
    /// have submitted or waited less than asked.
    fn enter(&mut self, wait_for: u32, timeout: Option<Duration>) -> Result<(), i32>;

    /// Takes the oldest completion.
    fn reap(&mut self, side: &mut KernelSide) -> Option<RawCqe>;

    /// Returns the block of a [`RawOp::ReceiveInto`], right after its completion was reaped, once
    /// for each: as many bytes as the completion reports were written after those that the block
    /// counts.
    fn take_block(&mut self, _id: ConnId) -> Option<(Box<Block>, usize)> {
        None
    }

    /// Takes the oldest send that fitted and has no completion itself. None is returned before
    /// every completion was reaped.
    fn reap_quiet(&mut self) -> Option<SentQuietly>;

    /// True if [`reap`](Kernel::reap) would return something.
    fn has_completions(&mut self) -> bool;

    /// True if [`reap_quiet`](Kernel::reap_quiet) would return something, once every completion was
    /// reaped.
    fn has_quiet(&mut self) -> bool;

    /// True if the kernel holds back completions, or work that leads to some, until the next
    /// [`enter`](Kernel::enter).
    fn has_task_work(&mut self) -> bool;

    /// True while the completion queue overflows: an [`enter`](Kernel::enter) brings the rest once
    /// there is room.
    fn is_overflowing(&mut self) -> bool;

    /// The peer's address, for a descriptor from an accept's completion. `None` for Unix sockets
    /// and for a peer that is gone.
    fn peer_of(&mut self, fd: i32) -> Option<SocketAddr>;

    /// The address of this host that the peer connected to, for such a descriptor. `None` for Unix
    /// sockets, and where it is unknown.
    fn local_of(&mut self, _fd: i32) -> Option<SocketAddr> {
        None
    }

    /// The process at the other end of a Unix socket, for such a descriptor.
    fn credentials_of(&mut self, _fd: i32) -> Option<PeerCredentials> {
        None
    }

    /// Removes the listener's filter from such a descriptor, which inherits it and would run it for
    /// each segment. True if that took a system call.
    fn drop_filter(&mut self, _listener: u16, _fd: i32) -> bool {
        false
    }

    /// True if the listener's socket has other owners, who accept from its queue now or later: the
    /// driver leaves it unchanged when it stops accepting.
    fn is_adopted(&self, _listener: u16) -> bool {
        false
    }

    /// Stops new connections from queueing at the listener, which was not adopted. Queued
    /// connections can still be taken, and so can those that arrive within the time returned: their
    /// handshake had begun.
    fn turn_newcomers_away(&mut self, listener: u16) -> Duration;

    /// Takes a connection out of the listener's queue, without waiting; the descriptor is like one
    /// of an accept's completion. Only after [`turn_newcomers_away`](Kernel::turn_newcomers_away),
    /// or once before an adopted listener is closed.
    ///
    /// # Errors
    /// The `errno`; `EAGAIN` if the queue is empty.
    fn take_queued(&mut self, listener: u16) -> Result<i32, i32>;

    /// Closes the listening socket, or this driver's descriptor of one that was adopted. No accept
    /// is in flight there.
    fn close_listener(&mut self, listener: u16);

    /// The time of a clock that never goes back.
    fn now(&mut self) -> Duration;

    /// Creates a socket for a connection to `address`; the descriptor is like one of an accept's
    /// completion.
    ///
    /// # Errors
    /// The `errno`.
    fn open_socket(&mut self, address: &Address) -> Result<i32, i32>;

    /// Ends a [`RawOp::ReadWake`], from any thread.
    fn waker(&self) -> Waker;

    /// Gives away a descriptor of an accept's completion. `None` if this half does not own it.
    fn hand_over(&mut self, fd: i32) -> Option<Self::Descriptor>;

    /// Takes over a connected stream socket; the descriptor is like one of an accept's completion.
    fn take_over(&mut self, descriptor: Self::Descriptor) -> i32;

    /// Does [`Driver::readiness`](ringserve_core::Driver::readiness). The default is for a kernel
    /// half that can only block.
    ///
    /// # Errors
    /// The `errno`.
    fn readiness(&mut self) -> Result<Self::Descriptor, i32> {
        Err(libc::EOPNOTSUPP)
    }

    /// Makes the descriptor of [`readiness`](Kernel::readiness) readable after this time, which is
    /// 21 ms or more.
    fn rouse_in(&mut self, _time: Duration) {}

    /// Ends every operation, within a bound. True if none is left that could read or write memory;
    /// false if the caller has to leak the receive memory instead.
    fn finish(&mut self, side: &mut KernelSide) -> bool;
}

#[cfg(test)]
mod tests {
    use super::*;

    const OF_CONNECTIONS: [Kind; 11] = [
        Kind::Receive,
        Kind::Send,
        Kind::Shutdown,
        Kind::Close,
        Kind::Connect,
        Kind::Install,
        Kind::Probe,
        Kind::CancelReceive,
        Kind::CancelSend,
        Kind::CancelConnect,
        Kind::ReceiveInto,
    ];
    const OF_NONE: [Kind; 5] = [Kind::Ignored, Kind::Accept, Kind::CancelAccept, Kind::Wake, Kind::Timer];

    #[test]
    fn kind_and_what_it_is_of_are_read_from_user_data() {
        let id = ConnId::new(ConnId::SLOTS_MAX - 1, u64::MAX >> 28);
        for kind in OF_CONNECTIONS {
            let cqe = RawCqe::new(kind.with(id.bits()), 0, 0);
            assert_eq!((Kind::of(cqe.user_data), cqe.id()), (Some(kind), id));
        }
        for kind in OF_NONE {
            let user_data = kind.with(u64::from(u16::MAX));
            assert_eq!((Kind::of(user_data), user_data as u16), (Some(kind), u16::MAX));
        }
        assert_eq!([5 << 52, 255 << 52, 12 << 60, 15 << 60].map(Kind::of), [None; 4]);
    }
}
