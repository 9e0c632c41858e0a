//! Taking connections out of a listener's queue, also where `accept4` is refused, and closing
//! listeners.
//!
//! A close resets every connection in the queue, so the queue is emptied first, and none may enter
//! it meanwhile:
//!
//! * A TCP listener drops packets that begin a connection. The client sends its packet again after
//!   a second. By then the socket is closed, and the client is refused, or reaches another process
//!   that shares the port. Handshakes that had begun are completed, and enter the queue: so the
//!   queue is checked for another [`HANDSHAKE`].
//! * A Unix listener is shut down for reading: connects are refused at once, and the queue stays.
//!   Shards share the queue, each by a descriptor, and each closes its own once it finds the queue
//!   empty.
//! * A TCP listener of this server alone is shut down as it is closed, since a child that was
//!   forked without exec may have another descriptor of it: new connections would wait in a queue
//!   from which no shard accepts.
//! * An adopted listener is left alone: others accept from its queue, now or later, and a change of
//!   the socket would affect them. They keep its queue when this one of several descriptors is
//!   closed.

use std::io;
use std::net::Shutdown;
use std::ops::Deref;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ringserve_core::AcceptEnd;
use socket2::{Domain, SockAddr, SockFilter, SockRef, Socket};

use crate::shared::report::{is_refused, log};

/// The longest time that a handshake which had begun may take to enter the queue: a round trip
/// within a continent, short compared with a drain. The kernel does not report whether one is under
/// way. On loopback none is: handshakes end within the client's call (measured: nothing lost in 290
/// rounds without this wait).
const HANDSHAKE: Duration = Duration::from_millis(50);

/// The most connections taken from a queue in one turn: a quarter of what a turn may bring by
/// default.
pub(crate) const TAKEN_IN_A_TURN: usize = 64;

/// Pause of a queue that is empty, or whose next connection could not be taken for lack of a
/// descriptor; and how many pauses in a row the latter may cause: a second, in which a draining
/// server releases many descriptors.
const PAUSE: Duration = Duration::from_millis(10);
const PAUSES_MAX: u32 = 100;

/// The longest time for which a queue is emptied, whatever is in it: its connections may wait for
/// descriptors, and where new ones cannot be turned away they may keep coming. A shard that aborted
/// everything gives up what its driver has not ended 5 s later, and a listener must not be part of
/// that.
const EMPTIED_MAX: Duration = Duration::from_secs(3);

/// Drops packets with SYN and without ACK. The filter sees a packet from its TCP header on.
const NO_NEWCOMERS: [SockFilter; 5] = [
    // Byte 13 has the flags; SYN is 0x02, ACK 0x10.
    SockFilter::new((libc::BPF_LD | libc::BPF_B | libc::BPF_ABS) as u16, 0, 0, 13),
    SockFilter::new((libc::BPF_ALU | libc::BPF_AND | libc::BPF_K) as u16, 0, 0, 0x12),
    SockFilter::new((libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16, 0, 1, 0x02),
    SockFilter::new((libc::BPF_RET | libc::BPF_K) as u16, 0, 0, 0),
    SockFilter::new((libc::BPF_RET | libc::BPF_K) as u16, 0, 0, u32::MAX),
];

/// A listening socket, which is shut down as it is closed if no other process or driver accepts
/// from it.
#[derive(Debug)]
pub(crate) struct ListeningSocket {
    socket: Socket,
    is_adopted: bool,
}

impl ListeningSocket {
    /// Refuses new connections, and resets those in the queue, also where a forked child has the
    /// socket too.
    pub(crate) fn shut_down(&self) {
        // Each shard has a descriptor of a Unix socket, and connects are refused once one of them
        // stops.
        if !self.is_adopted && !matches!(self.socket.domain(), Ok(Domain::UNIX)) {
            let _ = self.socket.shutdown(Shutdown::Both);
        }
    }
}

impl Deref for ListeningSocket {
    type Target = Socket;

    fn deref(&self) -> &Socket {
        &self.socket
    }
}

impl AsFd for ListeningSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for ListeningSocket {
    fn drop(&mut self) {
        self.shut_down();
    }
}

/// A listening socket that is given to a driver, with its ownership.
#[derive(Debug)]
pub struct Listener {
    /// The driver's alone, except while a [gauge](crate::ListenerGauge) reads.
    socket: Arc<ListeningSocket>,
    /// Whether its connections are accepted one by one.
    one_by_one: bool,
    filter: Arc<FilterState>,
}

impl Listener {
    /// Takes a socket that only the drivers of one server own: its end is the end of the listener.
    pub fn own(socket: impl Into<OwnedFd>) -> Listener {
        Listener::new(socket.into(), false)
    }

    /// Takes a socket that other processes, or other parts of this one, accept from as well, now or
    /// later. It has to be non-blocking, since another owner may take a connection for which one
    /// driver is woken.
    pub fn adopted(socket: impl Into<OwnedFd>) -> Listener {
        Listener::new(socket.into(), true)
    }

    fn new(socket: OwnedFd, is_adopted: bool) -> Listener {
        let socket = Arc::new(ListeningSocket { socket: Socket::from(socket), is_adopted });
        Listener { socket, one_by_one: false, filter: Arc::default() }
    }

    /// Makes an io_uring accept one connection per turn. Otherwise a single accept brings the whole
    /// queue, including connections beyond the number that the shard wants after the first of them.
    /// With epoll a turn brings no more than its budget.
    pub fn one_by_one(&mut self) {
        self.one_by_one = true;
    }

    pub(crate) fn is_one_by_one(&self) -> bool {
        self.one_by_one || self.is_shared()
    }

    pub(crate) fn filter(&self) -> &Arc<FilterState> {
        &self.filter
    }

    /// True if [`adopted`](Listener::adopted) made it.
    pub fn is_adopted(&self) -> bool {
        self.socket.is_adopted
    }

    /// True if other drivers accept from the same queue. A Unix socket has no `SO_REUSEPORT`.
    pub fn is_shared(&self) -> bool {
        self.is_adopted() || SockRef::from(self).domain().is_ok_and(|domain| domain == Domain::UNIX)
    }

    pub(crate) fn socket(&self) -> &Arc<ListeningSocket> {
        &self.socket
    }

    pub(crate) fn into_parts(self) -> (Arc<ListeningSocket>, Arc<FilterState>) {
        (self.socket, self.filter)
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// The state of a listener's filter.
#[derive(Debug, Default)]
pub(crate) struct FilterState {
    /// The listener had a filter: accepted sockets may have inherited it, also those accepted
    /// before it was removed.
    was_set: AtomicBool,
    /// New connections are turned away by a filter that must stay. Locked while a filter is set.
    is_closing: Mutex<bool>,
}

impl FilterState {
    /// True if accepted sockets may have a filter, which they run for each segment.
    #[inline]
    pub(crate) fn is_inherited(&self) -> bool {
        self.was_set.load(Ordering::Relaxed)
    }

    /// Sets a filter, unless the last one is set.
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn set(&self, socket: &Socket, program: &[SockFilter]) -> io::Result<()> {
        let is_closing = self.is_closing.lock().unwrap_or_else(PoisonError::into_inner);
        if *is_closing {
            return Ok(());
        }
        if program.is_empty() {
            return match socket.detach_filter() {
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
                detached => detached,
            };
        }
        // Set before the first connection can inherit the filter.
        self.was_set.store(true, Ordering::Relaxed);
        socket.attach_filter(program)
    }

    /// Sets the last filter.
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn close(&self, socket: &Socket, program: &[SockFilter]) -> io::Result<()> {
        let mut is_closing = self.is_closing.lock().unwrap_or_else(PoisonError::into_inner);
        *is_closing = true;
        socket.attach_filter(program)
    }
}

/// Takes a connection, which is close-on-exec and, if `nonblocking`, does not block.
///
/// # Errors
/// Those of `accept(2)`.
pub(crate) fn accept(listener: &Socket, nonblocking: bool) -> io::Result<(Socket, SockAddr)> {
    let flags = libc::SOCK_CLOEXEC | if nonblocking { libc::SOCK_NONBLOCK } else { 0 };
    match listener.accept4(flags) {
        // `accept4` is not in the kernel, or hidden by a sandbox.
        Err(error) if is_refused(&error) => {
            let (socket, peer) = listener.accept_raw()?;
            socket.set_cloexec(true)?;
            socket.set_nonblocking(nonblocking)?;
            Ok((socket, peer))
        }
        accepted => accepted,
    }
}

/// Turns new connections away, so that [`take`] does not wait. Returns the time for which
/// handshakes that had begun may still arrive.
///
/// # Errors
/// If the socket cannot be made non-blocking, and must not be asked for queued connections.
pub(crate) fn turn_newcomers_away(listener: &Socket, filter: &FilterState) -> io::Result<Duration> {
    listener.set_nonblocking(true)?;
    let (turned, late) = match listener.domain() {
        Ok(Domain::UNIX) => (listener.shutdown(Shutdown::Read), Duration::ZERO),
        _ => (filter.close(listener, &NO_NEWCOMERS), HANDSHAKE),
    };
    if let Err(error) = turned {
        log::debug!(%error, "connections may be made until the listener is closed, and some are then reset");
    }
    Ok(late)
}

/// Takes the connection that has waited longest.
///
/// # Errors
/// The `errno`, which [`Refusal::of`] classifies.
pub(crate) fn take(listener: SockRef<'_>) -> Result<Socket, i32> {
    match accept(&listener, false) {
        Ok((socket, _)) => Ok(socket),
        Err(error) => Err(error.raw_os_error().unwrap_or(libc::EIO)),
    }
}

/// The reason why the kernel took no connection out of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The queue is empty.
    Empty,
    /// One connection was gone before it was accepted (`accept(2)` lists these); the next one may
    /// be there.
    Gone,
    /// There is no descriptor or no memory now.
    NoDescriptor,
    /// The listener no longer accepts connections.
    Broken,
}

impl Refusal {
    pub(crate) fn of(errno: i32) -> Refusal {
        match errno {
            // A Unix socket that was shut down returns EINVAL.
            libc::EAGAIN | libc::EINVAL => Refusal::Empty,
            libc::ECONNABORTED | libc::ECONNRESET | libc::EINTR | libc::EPROTO => Refusal::Gone,
            libc::ENETDOWN | libc::ENETUNREACH | libc::EHOSTDOWN | libc::EHOSTUNREACH | libc::ENONET => {
                Refusal::Gone
            }
            libc::ENOPROTOOPT | libc::EOPNOTSUPP | libc::ETIMEDOUT | libc::ENOSR => Refusal::Gone,
            libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM => Refusal::NoDescriptor,
            _ => Refusal::Broken,
        }
    }
}

/// Connections in a row that may be gone before they are accepted. A listener that keeps reporting
/// this is broken.
const GONE_MAX: u32 = 16;

/// Connections in a row that were gone before they were accepted.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Gone(u32);

impl Gone {
    /// The end of an accept that the kernel refused with `errno`; `None` where the next connection
    /// is accepted at once.
    pub(crate) fn end_of(&mut self, errno: i32) -> Option<AcceptEnd> {
        let is_gone = Refusal::of(errno) == Refusal::Gone;
        self.0 = if is_gone { self.0 + 1 } else { 0 };
        match errno {
            _ if is_gone && self.0 < GONE_MAX => return None,
            libc::EMFILE => Some(AcceptEnd::Descriptors),
            libc::ENFILE => Some(AcceptEnd::SystemFiles),
            errno => Some(AcceptEnd::Error(errno)),
        }
        .inspect(|_| self.0 = 0)
    }
}

/// A queue that is being emptied.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueueDrain {
    /// The end of the time in which connections may come.
    until: Duration,
    /// The time of the next attempt; `None` for at once.
    retry_at: Option<Duration>,
    /// Pauses since a connection was last taken.
    pauses: u32,
}

impl QueueDrain {
    /// Notes that new connections are turned away since `now`; earlier handshakes may arrive for
    /// `late`.
    pub(crate) fn new(now: Duration, late: Duration) -> QueueDrain {
        QueueDrain { until: now + late, retry_at: None, pauses: 0 }
    }

    /// The time for which the queue is still left alone.
    pub(crate) fn rest(&self, now: Duration) -> Duration {
        self.retry_at.map_or(Duration::ZERO, |at| at.saturating_sub(now))
    }

    /// Notes that a connection was taken.
    pub(crate) fn went_on(&mut self) {
        (self.retry_at, self.pauses) = (None, 0);
    }

    /// True if the listener has to be closed now, whatever is in its queue.
    pub(crate) fn is_out_of_time(&self, listener: u16, now: Duration) -> bool {
        let over = now >= self.until + EMPTIED_MAX;
        if over {
            log::warn!(
                listener,
                "a listener is closed, and its queue is reset: connections came faster than they could be taken in"
            );
        }
        over
    }

    /// Notes that the kernel refused. True if the listener has to be closed now.
    pub(crate) fn is_over(&mut self, listener: u16, errno: i32, now: Duration) -> bool {
        match Refusal::of(errno) {
            Refusal::Gone => false,
            Refusal::Empty => {
                self.retry_at = Some(self.until.min(now + PAUSE));
                now >= self.until
            }
            Refusal::NoDescriptor if self.pauses < PAUSES_MAX && now < self.until + EMPTIED_MAX => {
                self.pauses += 1;
                self.retry_at = Some(now + PAUSE);
                false
            }
            Refusal::NoDescriptor => {
                log::warn!(
                    listener,
                    errno,
                    "a listener is closed with connections in its queue, which are reset, or left to the other owners of an adopted \
                     socket: there was no descriptor for them; RLIMIT_NOFILE or fs.file-max is too low for what the server holds"
                );
                true
            }
            Refusal::Broken => {
                log::warn!(listener, errno, "a listener is closed before its queue is known to be empty");
                true
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connection_that_is_gone_pauses_nothing_until_sixteen_are() {
        let gone = [
            libc::ECONNABORTED,
            libc::ECONNRESET,
            libc::EINTR,
            libc::EPROTO,
            libc::ENETDOWN,
            libc::ENETUNREACH,
            libc::EHOSTDOWN,
            libc::EHOSTUNREACH,
            libc::ENONET,
            libc::ENOPROTOOPT,
            libc::EOPNOTSUPP,
            libc::ETIMEDOUT,
            libc::ENOSR,
        ];
        let mut in_a_row = Gone::default();
        for errno in gone {
            assert_eq!(in_a_row.end_of(errno), None, "{errno}");
        }
        for _ in gone.len()..15 {
            assert_eq!(in_a_row.end_of(libc::EPROTO), None);
        }
        assert_eq!(in_a_row.end_of(libc::ENOPROTOOPT), Some(AcceptEnd::Error(libc::ENOPROTOOPT)));
        assert_eq!(in_a_row.end_of(libc::ENOPROTOOPT), None, "behind the pause it begins again");
        assert_eq!(in_a_row.end_of(libc::EMFILE), Some(AcceptEnd::Descriptors));
        assert_eq!(in_a_row.end_of(libc::EBADF), Some(AcceptEnd::Error(libc::EBADF)));
    }

    #[test]
    fn want_of_descriptors_is_waited_out_and_then_given_up() {
        let mut now = Duration::from_secs(5);
        let mut emptying = QueueDrain::new(now, Duration::ZERO);
        for _ in 0..PAUSES_MAX {
            assert!(!emptying.is_over(0, libc::EMFILE, now));
            assert_eq!(emptying.rest(now), PAUSE);
            now += PAUSE;
            assert_eq!(emptying.rest(now), Duration::ZERO);
        }
        let mut other = emptying;
        assert!(emptying.is_over(0, libc::EMFILE, now));
        other.went_on();
        assert!(!other.is_over(0, libc::ENFILE, now), "a connection was taken: patience begins again");
    }

    #[test]
    fn a_long_queue_does_not_wait_for_descriptors_without_end() {
        let began = Duration::from_secs(5);
        let mut now = began;
        let mut emptying = QueueDrain::new(now, HANDSHAKE);
        while !emptying.is_over(0, libc::EMFILE, now) {
            now += emptying.rest(now);
            emptying.went_on();
        }
        assert_eq!(now, began + HANDSHAKE + EMPTIED_MAX);
    }

    #[test]
    fn queue_that_never_ends_is_given_up() {
        let now = Duration::from_secs(5);
        let mut emptying = QueueDrain::new(now, HANDSHAKE);
        emptying.went_on();
        let end = now + HANDSHAKE + EMPTIED_MAX;
        assert!(!emptying.is_out_of_time(0, end - PAUSE) && emptying.is_out_of_time(0, end));
    }

    #[test]
    fn an_empty_queue_is_looked_at_until_handshakes_had_their_time() {
        let mut now = Duration::from_secs(5);
        let mut emptying = QueueDrain::new(now, HANDSHAKE);
        let mut looks = 0;
        while !emptying.is_over(0, libc::EAGAIN, now) {
            now += emptying.rest(now);
            looks += 1;
        }
        assert_eq!((now, looks), (Duration::from_secs(5) + HANDSHAKE, 5));
    }

    #[test]
    fn an_empty_queue_is_over_and_a_lost_connection_is_not() {
        let now = Duration::ZERO;
        for (errno, over) in [
            (libc::EAGAIN, true),
            (libc::EINVAL, true),
            (libc::EBADF, true),
            (libc::ECONNABORTED, false),
            (libc::EINTR, false),
        ] {
            let mut emptying = QueueDrain::new(now, Duration::ZERO);
            assert_eq!(emptying.is_over(0, errno, now), over, "{errno}");
            assert_eq!(emptying.rest(now), Duration::ZERO);
        }
    }
}
