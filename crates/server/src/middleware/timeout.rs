//! A bound on the time of each call.

use std::fmt;
use std::time::Duration;

use ringserve_core::Frame;

use crate::shard::face::closed::Failure;
use crate::shard::face::cx::Cx;
use crate::shard::face::service::{Service, delegate_to_service};

/// Bounds the time of each call. A call that takes longer is dropped, and its connection closed
/// with a [`TimeLimitError::Elapsed`].
///
/// [`Limits::handler_timeout`](crate::Limits::handler_timeout) bounds all calls of a server in the
/// same way, to about 16 ms. This bound is exact to about 1 ms, belongs to one service or a part of
/// a stack, and logs the time that the call had. A call that finishes at once costs no timer and no
/// clock read.
///
/// To answer a slow call instead of closing its connection, use [`Cx::timeout`] inside the service.
#[derive(Clone, Debug)]
pub struct TimeLimit<S> {
    service: S,
    time: Duration,
}

impl<S> TimeLimit<S> {
    /// Each call of `service` gets `time`, from its first poll.
    pub fn new(service: S, time: Duration) -> TimeLimit<S> {
        TimeLimit { service, time }
    }

    /// The service inside.
    pub fn inner(&self) -> &S {
        &self.service
    }
}

impl<S: Service<H>, H: 'static> Service<H> for TimeLimit<S> {
    type Session = S::Session;
    type Error = TimeLimitError<S::Error>;

    async fn call(&self, cx: &Cx<'_, S::Session>, frame: Frame<H>) -> Result<(), Self::Error> {
        match cx.timeout(self.time, self.service.call(cx, frame)).await {
            Ok(result) => result.map_err(TimeLimitError::Service),
            Err(_elapsed) => Err(TimeLimitError::Elapsed(self.time)),
        }
    }

    fn failed(&self, cx: &Cx<'_, S::Session>, failure: &Failure<'_, Self::Error>) {
        self.service.failed(
            cx,
            &match failure {
                Failure::Error(TimeLimitError::Service(error)) => Failure::Error(error),
                Failure::Error(TimeLimitError::Elapsed(_)) | Failure::TimedOut => Failure::TimedOut,
                Failure::Panicked(message) => Failure::Panicked(message),
            },
        );
    }

    delegate_to_service!(S, H);
}

/// The reason why a call through [`TimeLimit`] failed.
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum TimeLimitError<E> {
    /// The call was not done within this time.
    Elapsed(Duration),
    /// The inner service failed.
    Service(E),
}

impl<E: fmt::Display> fmt::Display for TimeLimitError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TimeLimitError::Elapsed(time) => write!(f, "the call was not done within {time:?}"),
            TimeLimitError::Service(error) => error.fmt(f),
        }
    }
}

ringserve_buf::debug_is_display!(TimeLimitError<E>, [E: fmt::Display]);

impl<E: std::error::Error + 'static> std::error::Error for TimeLimitError<E> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            TimeLimitError::Elapsed(_) => None,
            // The service's error is shown as it is, so its cause is the next one.
            TimeLimitError::Service(error) => error.source(),
        }
    }
}
