//! Why a request has no answer.

use std::fmt;
use std::io;

/// The reason why an upstream gave no answer, or no connection.
#[non_exhaustive]
pub enum UpstreamError {
    /// As many calls of this shard wait for a connection as
    /// [`PoolLimits::waiting_max`](crate::PoolLimits::waiting_max) allows.
    Full,
    /// No backend may be asked: there is none, or all are drained, or down and not asked all the
    /// same ([`Upstream::panic_below`](crate::Upstream::panic_below)).
    NoBackend,
    /// The time of the request was over, or it waited for a connection for longer than
    /// [`PoolLimits::wait_max`](crate::PoolLimits::wait_max).
    TimedOut,
    /// The request left, and the connection ended before an answer came. The backend may have done
    /// what it was asked for.
    Lost,
    /// No connection could be made, or what was received is no answer: the error of the last try.
    Failed(io::Error),
}

impl fmt::Display for UpstreamError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            UpstreamError::Full => f.write_str("too many calls wait for a connection to the upstream"),
            UpstreamError::NoBackend => f.write_str("no backend of the upstream may be asked"),
            UpstreamError::TimedOut => f.write_str("the upstream was too late"),
            UpstreamError::Lost => f.write_str("the upstream ended the connection before its answer"),
            UpstreamError::Failed(error) => error.fmt(f),
        }
    }
}

ringserve_buf::debug_is_display!(UpstreamError);

impl std::error::Error for UpstreamError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            // The other texts are complete.
            UpstreamError::Failed(error) => error.source(),
            _ => None,
        }
    }
}

impl From<UpstreamError> for io::Error {
    fn from(error: UpstreamError) -> io::Error {
        let kind = match error {
            UpstreamError::Failed(error) => return error,
            UpstreamError::Full => io::ErrorKind::ResourceBusy,
            UpstreamError::NoBackend => io::ErrorKind::NotConnected,
            UpstreamError::TimedOut => io::ErrorKind::TimedOut,
            UpstreamError::Lost => io::ErrorKind::UnexpectedEof,
        };
        io::Error::new(kind, error)
    }
}
