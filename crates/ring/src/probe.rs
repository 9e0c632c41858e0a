//! Does io_uring work here? Found out by doing, since versions do not tell: hosts filter system calls and
//! operations, and kernels have features taken out or brought in.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use ringserve_buf::PoolConfig;
use ringserve_core::{Batch, Budget, CloseHow, Completion, ConnId, Driver, Op, ReceiveEnd, SendEnd, Wait};

use crate::config::UringConfig;
use crate::error::SetupError;
use crate::kernel::SystemKernel;
use crate::uring::Uring;

/// Each step takes microseconds; a machine so busy that one takes this long gets epoll.
const STEP_TIME: Duration = Duration::from_secs(2);

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
/// match ringserve_ring::probe() {
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
    let mut trial = Trial { ring: Uring::new(&config, Vec::new())?, seen: Vec::new() };
    let description = trial.ring.describe();
    let (mut near, id) = trial.connection(0)?;
    trial.ring.submit(Op::Receive { id });
    // Seccomp may let rings be made but not entered.
    trial.turn(Wait::No)?;
    trial.receives(&mut near, id)?;
    trial.sends(&mut near, id)?;
    let direct_descriptors = trial.closes_beside_an_armed_receive()?;
    Ok(Found { description, direct_descriptors })
}

struct Trial {
    ring: Uring<SystemKernel>,
    seen: Vec<Completion>,
}

impl Trial {
    fn connection(&mut self, slot: u32) -> Result<(UnixStream, ConnId), SetupError> {
        let (near, far) =
            UnixStream::pair().map_err(|error| SetupError::Descriptors { what: "a socket pair", error })?;
        let socket = self.ring.take_over(far.into());
        let id = ConnId::new(slot, 1);
        self.ring.submit(Op::Adopt { id, socket });
        Ok((near, id))
    }

    fn turn(&mut self, wait: Wait) -> Result<(), SetupError> {
        self.ring
            .turn(wait, Budget::default(), &mut self.seen)
            .map_err(|errno| SetupError::from_call("io_uring_enter", io::Error::from_raw_os_error(errno)))
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
        const STEP: &str = "a multishot receive into a buffer ring";
        near.write_all(b"ping").map_err(SetupError::failed("a write to a socket pair"))?;
        match self.next(STEP)? {
            Completion::Received { id: of, lease } if of == id && *lease == *b"ping" => Ok(()),
            Completion::ReceiveEnded { end: ReceiveEnd::Error(libc::EINVAL), .. } => {
                Err(SetupError::TooOld {
                    missing: "multishot receive",
                    since: "6.0",
                    error: io::Error::from_raw_os_error(libc::EINVAL),
                })
            }
            Completion::ReceiveEnded { end: ReceiveEnd::Error(errno), .. } => {
                Err(SetupError::from_call(STEP, io::Error::from_raw_os_error(errno)))
            }
            seen => Err(SetupError::Trial { step: STEP, seen: format!("{seen:?}") }),
        }
    }

    fn sends(&mut self, near: &mut UnixStream, id: ConnId) -> Result<(), SetupError> {
        const STEP: &str = "a send";
        let mut batch = Box::new(Batch::new());
        batch.put(b"pong");
        self.ring.submit(Op::Send { id, batch });
        match self.next(STEP)? {
            Completion::Sent { end: SendEnd::Done, .. } => {}
            Completion::Sent { end: SendEnd::Error(errno), .. } => {
                return Err(SetupError::from_call(STEP, io::Error::from_raw_os_error(errno)));
            }
            seen => return Err(SetupError::Trial { step: STEP, seen: format!("{seen:?}") }),
        }
        let mut pong = [0; 4];
        let read = near.set_read_timeout(Some(STEP_TIME)).and_then(|()| near.read_exact(&mut pong));
        match read {
            Ok(()) if pong == *b"pong" => Ok(()),
            other => Err(SetupError::Trial { step: STEP, seen: format!("{other:?}, {pong:?}") }),
        }
    }

    /// True if the peer of a second connection sees its close, though the first one's receive is older and
    /// armed.
    fn closes_beside_an_armed_receive(&mut self) -> Result<bool, SetupError> {
        const STEP: &str = "a close";
        let (mut near, id) = self.connection(1)?;
        self.ring.submit(Op::Close { id, how: CloseHow::Orderly });
        match self.next(STEP)? {
            Completion::Closed { .. } => {}
            seen => return Err(SetupError::Trial { step: STEP, seen: format!("{seen:?}") }),
        }
        near.set_read_timeout(Some(CLOSE_TIME)).map_err(SetupError::failed("a socket pair"))?;
        Ok(matches!(near.read(&mut [0; 1]), Ok(0)))
    }
}
