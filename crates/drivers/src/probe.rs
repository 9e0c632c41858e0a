//! Does io_uring work here, or epoll? Found out by doing, since versions do not tell: hosts filter system calls and
//! operations, and kernels have features taken out or brought in.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use io_uring::IoUring;
use ringserve_buf::PoolConfig;
use ringserve_core::{Batch, Budget, CloseHow, Completion, ConnId, Driver, Op, ReceiveEnd, SendEnd, Wait};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::Timespec;
use socket2::Socket;

use crate::epoll::{Epoll, EpollConfig};
use crate::shared::accept::{accept, is_refused};
use crate::shared::report::SetupError;
use crate::uring::SystemKernel;
use crate::uring::Uring;
use crate::uring::UringConfig;

/// Each step takes microseconds; a machine so busy that one takes this long gets epoll.
const STEP_TIME: Duration = Duration::from_secs(2);

/// What a driver's trial calls its steps, and how it names the cause of an error.
struct Steps {
    wait: &'static str,
    receive: &'static str,
    send: &'static str,
    refused: fn(&'static str, io::Error) -> SetupError,
}

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

const EPOLL: Steps =
    Steps { wait: "epoll_wait", receive: "recvfrom", send: "sendto", refused: SetupError::from_epoll };

/// How long a closed connection's peer is given to see it. It takes microseconds, or does not come.
const CLOSE_TIME: Duration = Duration::from_millis(200);

/// What a trial found.
#[derive(Clone, Debug)]
pub struct Found {
    /// What the ring ran with, in a line for the log.
    pub description: String,
    /// True if a connection in the ring's own table is closed when it is told to, while an older receive is
    /// armed (Linux 6.13). If not, set [`UringConfig::plain_descriptors`].
    pub direct_descriptors: bool,
}

/// Runs a trial that makes rings, on another thread, which has ended when this returns.
///
/// The end of a ring is work for the thread that made it, some time after the ring was closed: there it interrupts calls
/// that wait with a bound (`EINTR`). The thread that starts a server is the program's, and is left alone.
///
/// # Errors
/// Those of the trial, or that there is no thread for it.
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

/// Tries io_uring with all that the driver needs, on a ring that is gone afterwards: set-up, file table, buffer ring, then
/// a receive and a send on a pair of Unix sockets. The calling thread makes no ring.
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
    let pool = PoolConfig { buffer_bytes: 256, buffers_max: 4, poison: false };
    let config = UringConfig {
        submission_entries: 8,
        completion_entries: 64,
        connections: 4,
        pool,
        ..UringConfig::default()
    };
    let mut trial = Trial { driver: Uring::new(&config, Vec::new())?, steps: RING, seen: Vec::new() };
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

/// Tries epoll with all that the driver needs: it accepts, receives and sends, on Unix sockets.
///
/// # Errors
/// Names the call that is refused.
pub fn probe_epoll() -> Result<(), SetupError> {
    let pool = PoolConfig { buffer_bytes: 256, buffers_max: 4, poison: false };
    let config = EpollConfig { connections: 4, pool, ..EpollConfig::default() };
    let failed = |call| move |error| SetupError::from_epoll(call, error);
    let (mut near, far) = UnixStream::pair().map_err(failed("socketpair"))?;
    // It does not listen, so that this ends with EINVAL where nothing refuses the call.
    let asked = accept(&Socket::from(far.try_clone().map_err(failed("fcntl"))?), true);
    if let Err(error) = asked
        && is_refused(&error)
    {
        return Err(SetupError::Epoll { call: "accept", error });
    }
    let mut trial = Trial { driver: Epoll::new(&config, Vec::new())?, steps: EPOLL, seen: Vec::new() };
    far.set_nonblocking(true).map_err(failed("fcntl"))?;
    let socket = trial.driver.take_over(far.into());
    let id = ConnId::new(0, 1);
    trial.driver.submit(Op::Adopt { id, socket });
    trial.driver.submit(Op::Receive { id });
    trial.turn(Wait::No)?;
    trial.receives(&mut near, id)?;
    trial.sends(&mut near, id)
}

/// Tries whether there are rings at all, for what brings its own.
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

struct Trial<D> {
    driver: D,
    steps: Steps,
    seen: Vec<Completion>,
}

impl Trial<Uring<SystemKernel>> {
    fn connection(&mut self, slot: u32) -> Result<(UnixStream, ConnId), SetupError> {
        let (near, far) =
            UnixStream::pair().map_err(|error| SetupError::Descriptors { what: "a socket pair", error })?;
        let socket = self.driver.take_over(far.into());
        let id = ConnId::new(slot, 1);
        self.driver.submit(Op::Adopt { id, socket });
        Ok((near, id))
    }

    /// True if the peer of a second connection sees its close, though the first one's receive is older and
    /// armed.
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
        // Where it fails there is nothing to read.
        let _ = poll(&mut [PollFd::new(&near, PollFlags::IN)], Some(&bound));
        Ok(matches!(near.read(&mut [0; 1]), Ok(0)))
    }
}

impl<D: Driver> Trial<D> {
    fn turn(&mut self, wait: Wait) -> Result<(), SetupError> {
        self.driver
            .turn(wait, Budget::default(), &mut self.seen)
            .map_err(|errno| self.refused(self.steps.wait, errno))
    }

    fn refused(&self, step: &'static str, errno: i32) -> SetupError {
        (self.steps.refused)(step, io::Error::from_raw_os_error(errno))
    }

    /// Turns until there is a completion, within the bound.
    fn next(&mut self, step: &'static str) -> Result<Completion, SetupError> {
        let deadline = Instant::now() + STEP_TIME;
        while self.seen.is_empty() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(SetupError::Trial { step, seen: "nothing".into() });
            }
            self.turn(Wait::For(left))?;
        }
        Ok(self.seen.remove(0))
    }

    fn receives(&mut self, near: &mut UnixStream, id: ConnId) -> Result<(), SetupError> {
        let step = self.steps.receive;
        near.write_all(b"ping").map_err(SetupError::failed("a write to a socket pair"))?;
        match self.next(step)? {
            Completion::Received { id: of, lease } if of == id && *lease == *b"ping" => Ok(()),
            Completion::ReceiveEnded { end: ReceiveEnd::Error(errno), .. } => Err(self.refused(step, errno)),
            seen => Err(SetupError::Trial { step, seen: format!("{seen:?}") }),
        }
    }

    fn sends(&mut self, near: &mut UnixStream, id: ConnId) -> Result<(), SetupError> {
        let step = self.steps.send;
        let mut batch = Box::new(Batch::new());
        batch.put(b"pong");
        self.driver.submit(Op::Send { id, batch });
        match self.next(step)? {
            Completion::Sent { end: SendEnd::Done, .. } => {}
            Completion::Sent { end: SendEnd::Error(errno), .. } => {
                return Err(self.refused(step, errno));
            }
            seen => return Err(SetupError::Trial { step, seen: format!("{seen:?}") }),
        }
        let mut pong = [0; 4];
        // It is there, as the completion said. No socket option is set: a sandbox that refuses those is not the driver's.
        let read = near.set_nonblocking(true).and_then(|()| near.read_exact(&mut pong));
        match read {
            Ok(()) if pong == *b"pong" => Ok(()),
            other => Err(SetupError::Trial { step, seen: format!("{other:?}, {pong:?}") }),
        }
    }
}
