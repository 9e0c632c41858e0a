//! A trial of a driver on a pair of Unix sockets: a receive, then a send.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use ringserve_core::{Batch, Budget, Completion, ConnId, Driver, Op, ReceiveEnd, SendEnd, Wait};

use crate::shared::report::SetupError;
use crate::shared::wait::now;

/// Bound of each step. It takes microseconds; a machine so busy that one takes this long gets
/// epoll.
const STEP_TIME: Duration = Duration::from_secs(2);

/// The names of a trial's steps, and of the causes of errors.
pub(crate) struct Steps {
    pub(crate) wait: &'static str,
    pub(crate) receive: &'static str,
    pub(crate) send: &'static str,
    pub(crate) refused: fn(&'static str, io::Error) -> SetupError,
}

/// A driver that is tried, step by step.
pub(crate) struct Trial<D> {
    pub(crate) driver: D,
    steps: Steps,
    seen: Vec<Completion>,
}

impl<D: Driver> Trial<D> {
    pub(crate) fn new(driver: D, steps: Steps) -> Trial<D> {
        Trial { driver, steps, seen: Vec::new() }
    }

    pub(crate) fn turn(&mut self, wait: Wait) -> Result<(), SetupError> {
        self.driver
            .turn(wait, Budget::default(), &mut self.seen)
            .map_err(|errno| self.refused(self.steps.wait, errno))
    }

    fn refused(&self, step: &'static str, errno: i32) -> SetupError {
        (self.steps.refused)(step, io::Error::from_raw_os_error(errno))
    }

    /// Turns until there is a completion, within the bound.
    pub(crate) fn next(&mut self, step: &'static str) -> Result<Completion, SetupError> {
        let deadline = now() + STEP_TIME;
        while self.seen.is_empty() {
            let left = deadline.saturating_sub(now());
            if left.is_zero() {
                return Err(SetupError::Trial { step, seen: "nothing".into() });
            }
            self.turn(Wait::For(left))?;
        }
        Ok(self.seen.remove(0))
    }

    pub(crate) fn receives(&mut self, near: &mut UnixStream, id: ConnId) -> Result<(), SetupError> {
        let step = self.steps.receive;
        near.write_all(b"ping").map_err(SetupError::failed("a write to a socket pair"))?;
        match self.next(step)? {
            Completion::Received { id: of, lease } if of == id && *lease == *b"ping" => Ok(()),
            Completion::ReceiveEnded { end: ReceiveEnd::Error(errno), .. } => Err(self.refused(step, errno)),
            seen => Err(SetupError::Trial { step, seen: format!("{seen:?}") }),
        }
    }

    pub(crate) fn sends(&mut self, near: &mut UnixStream, id: ConnId) -> Result<(), SetupError> {
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
        // The bytes are there, as the completion reported. No socket option is set: a sandbox that
        // refuses those is not the driver's fault.
        let read = near.set_nonblocking(true).and_then(|()| near.read_exact(&mut pong));
        match read {
            Ok(()) if pong == *b"pong" => Ok(()),
            other => Err(SetupError::Trial { step, seen: format!("{other:?}, {pong:?}") }),
        }
    }
}
