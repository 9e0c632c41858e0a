//! A trial of whether io_uring works here. Kernel versions do not show that: hosts filter system
//! calls and operations, and kernels have features removed or backported.

use std::io::{self, Read};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Duration;

use io_uring::IoUring;
use ringserve_buf::PoolConfig;
use ringserve_core::{CloseHow, Completion, ConnId, Driver, Op, Wait};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::Timespec;
use socket2::{Domain, SockAddr, Socket, Type};

use super::SystemKernel;
use crate::shared::accept::Listener;
use crate::shared::report::SetupError;
use crate::shared::trial::{Steps, Trial};
use crate::uring::{Uring, UringConfig};

const RING: Steps = Steps {
    wait: "io_uring_enter",
    receive: "a multishot receive into a buffer ring",
    send: "a send",
    refused: |step, error| match error.raw_os_error() {
        Some(libc::EINVAL) if step == RING.receive => {
            SetupError::TooOld { missing: "multishot receive", since: "6.0", error }
        }
        _ => SetupError::from_call(step, error),
    },
};

/// Time in which a closed connection's peer has to see it. It takes microseconds, or never happens.
const CLOSE_TIME: Duration = Duration::from_millis(200);

/// The result of a trial.
#[derive(Clone, Debug)]
pub struct Found {
    /// The ring's features, in a line for the log.
    pub description: String,
    /// True if a connection in the ring's own table is closed at once while an older receive is
    /// armed (Linux 6.13). If not, set [`UringConfig::plain_descriptors`].
    pub direct_descriptors: bool,
}

/// Runs a trial that creates rings, on another thread, which has ended when this returns.
///
/// The end of a ring is work for the thread that created it, some time after the ring was closed:
/// there it interrupts calls that wait with a bound (`EINTR`). The thread that starts a server is
/// the program's, and must not be disturbed.
///
/// # Errors
/// Those of the trial, or that no thread could be started for it.
pub fn try_apart<T: Send>(trial: impl FnOnce() -> Result<T, SetupError> + Send) -> Result<T, SetupError> {
    let subscriber = tracing::dispatcher::get_default(Clone::clone);
    let with_log = || tracing::dispatcher::with_default(&subscriber, trial);
    thread::scope(|scope| {
        let builder = thread::Builder::new().name("ringserve-trial".to_owned());
        let started = builder.spawn_scoped(scope, with_log);
        let thread = started.map_err(SetupError::failed("a thread to try io_uring on"))?;
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Tries io_uring with everything the driver needs, on a temporary ring: set-up, file table, buffer
/// ring, then a receive and a send on a pair of Unix sockets. The calling thread creates no ring.
///
/// # Errors
/// Names the cause and the fix.
///
/// ```
/// match ringserve_drivers::probe() {
///     Ok(found) => println!("{}", found.description),
///     Err(error) => println!("epoll instead: {error}"),
/// }
/// ```
pub fn probe() -> Result<Found, SetupError> {
    try_apart(try_out)
}

fn try_out() -> Result<Found, SetupError> {
    let mut trial = Trial::of_a_ring(Vec::new())?;
    let description = trial.driver.describe();
    let (mut near, id) = trial.connection(0)?;
    trial.driver.submit(Op::Receive { id });
    // Seccomp may let rings be made but not entered.
    trial.turn(Wait::No)?;
    trial.receives(&mut near, id)?;
    trial.sends(&mut near, id)?;
    let direct_descriptors = trial.closes_beside_an_armed_receive()?;
    Ok(Found { description, direct_descriptors })
}

/// Tries whether a ring accepts, from a Unix listener without a file. [`probe`] does not need one:
/// a sandbox that refuses such a listener does not refuse io_uring.
///
/// # Errors
/// Names the cause and the fix.
pub fn probe_accept() -> Result<(), SetupError> {
    const STEP: &str = "a multishot accept";
    try_apart(|| {
        let (listener, addr) = listener().map_err(SetupError::failed("a Unix listener without a file"))?;
        let mut trial = Trial::of_a_ring(vec![Listener::own(listener)])?;
        trial.driver.submit(Op::Accept { listener: 0 });
        trial.turn(Wait::No)?;
        let peer = unix_socket().map_err(SetupError::failed("a Unix socket"))?;
        peer.connect(&addr).map_err(SetupError::failed("a connect to a Unix socket"))?;
        match trial.next(STEP)? {
            Completion::Accepted { socket, .. } => {
                trial.driver.submit(Op::Refuse { socket });
                trial.turn(Wait::No)
            }
            seen => Err(SetupError::Trial { step: STEP, seen: format!("{seen:?}") }),
        }
    })
}

fn unix_socket() -> io::Result<Socket> {
    Socket::new(Domain::UNIX, Type::STREAM, None)
}

/// A Unix listener without a file, at a name that the kernel chooses.
fn listener() -> io::Result<(Socket, SockAddr)> {
    let socket = unix_socket()?;
    socket.bind(&SockAddr::unix("")?)?;
    socket.listen(1)?;
    let addr = socket.local_addr()?;
    Ok((socket, addr))
}

/// Tries whether rings can be created at all, for runtimes that bring their own.
///
/// # Errors
/// Names the cause and the fix.
pub fn probe_ring() -> Result<(), SetupError> {
    try_apart(|| {
        let ring = IoUring::new(2).map_err(|error| SetupError::from_call("io_uring_setup", error))?;
        let entered = ring.submitter().submit();
        entered.map(drop).map_err(|error| SetupError::from_call("io_uring_enter", error))
    })
}

impl Trial<Uring<SystemKernel>> {
    /// Creates a trial of a small ring with everything the driver needs, which accepts from
    /// `listeners`.
    fn of_a_ring(listeners: Vec<Listener>) -> Result<Self, SetupError> {
        let config = UringConfig {
            submission_entries: 8,
            completion_entries: 64,
            connections: 4,
            pool: PoolConfig { buffer_bytes: 256, buffers_max: 4, poison: false },
            // Its peers have no address.
            peer_addresses: false,
            ..UringConfig::default()
        };
        Ok(Trial::new(Uring::new(&config, listeners)?, RING))
    }

    fn connection(&mut self, slot: u32) -> Result<(UnixStream, ConnId), SetupError> {
        let (near, far) =
            UnixStream::pair().map_err(|error| SetupError::Descriptors { what: "a socket pair", error })?;
        let socket = self.driver.take_over(far.into());
        let id = ConnId::new(slot, 1);
        self.driver.submit(Op::Adopt { id, socket });
        Ok((near, id))
    }

    /// True if the peer of a second connection sees its close, though the first one's receive is
    /// older and armed.
    fn closes_beside_an_armed_receive(&mut self) -> Result<bool, SetupError> {
        const STEP: &str = "a close";
        let (mut near, id) = self.connection(1)?;
        self.driver.submit(Op::Close { id, how: CloseHow::Orderly });
        match self.next(STEP)? {
            Completion::Closed { .. } => {}
            seen => return Err(SetupError::Trial { step: STEP, seen: format!("{seen:?}") }),
        }
        let failed = SetupError::failed("a socket pair");
        near.set_nonblocking(true).map_err(failed)?;
        let bound = Timespec { tv_sec: 0, tv_nsec: CLOSE_TIME.subsec_nanos().into() };
        // If this fails there is nothing to read.
        let _ = poll(&mut [PollFd::new(&near, PollFlags::IN)], Some(&bound));
        Ok(matches!(near.read(&mut [0; 1]), Ok(0)))
    }
}
