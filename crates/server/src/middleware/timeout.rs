//! A bound on the time of each call.

use std::fmt;
use std::time::Duration;

use crate::cx::Cx;
use crate::service::{Service, delegate_to_service};
use ringserve_core::Frame;

/// Gives each call so much time, and drops it then, which closes its connection with a [`TimeoutError::Elapsed`].
///
/// [`Limits::handler`](crate::Limits::handler) bounds all calls of a server in the same way, to about 16 ms; this one is to
/// about a millisecond, is for one service or a part of a stack, and tells in the log how long the call was given. A call
/// that is done at once costs no timer and no look at the clock.
///
/// A service that wants to answer a call which takes too long, instead of closing, uses [`Cx::deadline`] inside.
#[derive(Clone, Debug)]
pub struct Timeout<S> {
    service: S,
    time: Duration,
}

impl<S> Timeout<S> {
    /// Each call of `service` gets `time`, from its first poll.
    pub fn new(service: S, time: Duration) -> Timeout<S> {
        Timeout { service, time }
    }

    /// The service inside.
    pub fn inner(&self) -> &S {
        &self.service
    }
}

impl<S: Service> Service for Timeout<S> {
    type Session = S::Session;
    type Error = TimeoutError<S::Error>;

    async fn call(&self, cx: &Cx<'_, S::Session>, frame: Frame) -> Result<(), Self::Error> {
        match cx.deadline(self.time, self.service.call(cx, frame)).await {
            Ok(result) => result.map_err(TimeoutError::Service),
            Err(_elapsed) => Err(TimeoutError::Elapsed(self.time)),
        }
    }

    delegate_to_service!();
}

/// Why a call through [`Timeout`] failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TimeoutError<E> {
    /// It was not done within this time.
    Elapsed(Duration),
    /// The service inside failed.
    Service(E),
}

impl<E: fmt::Display> fmt::Display for TimeoutError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TimeoutError::Elapsed(time) => write!(f, "the call was not done within {time:?}"),
            TimeoutError::Service(error) => error.fmt(f),
        }
    }
}

impl<E: std::error::Error + 'static> std::error::Error for TimeoutError<E> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            TimeoutError::Elapsed(_) => None,
            // It is shown as it is, so its cause is the next one.
            TimeoutError::Service(error) => error.source(),
        }
    }
}
