//! Failures of calls and ends of connections, as they are reported to a service.

use std::fmt;

use ringserve_core::{Account, CloseReason, ConnId, Outlet};

use ringserve_base::peer::Peer;

/// The reason why a call ends its connection, for [`Service::failed`](crate::Service::failed).
#[derive(Debug)]
#[non_exhaustive]
pub enum Failure<'a, E> {
    /// The call returned an error.
    Error(&'a E),
    /// The call was pending for longer than
    /// [`Limits::handler_timeout`](crate::Limits::handler_timeout).
    TimedOut,
    /// The call or the framing panicked, with this message.
    Panicked(&'a str),
}

impl<E: fmt::Display> fmt::Display for Failure<'_, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Error(error) => write!(f, "failed: {error}"),
            Failure::TimedOut => f.write_str("timed out"),
            Failure::Panicked(message) => write!(f, "panicked: {message}"),
        }
    }
}

/// A connection that ended and takes no more bytes.
#[doc(alias = "Closed")]
pub struct CloseCx<'a, S> {
    session: &'a S,
    outlet: &'a Outlet,
    reason: CloseReason,
    account: Option<Account>,
}

impl<'a, S> CloseCx<'a, S> {
    pub(crate) fn new(
        session: &'a S,
        outlet: &'a Outlet,
        reason: CloseReason,
        account: Option<Account>,
    ) -> CloseCx<'a, S> {
        CloseCx { session, outlet, reason, account }
    }

    /// The same end with another session and reason.
    #[cfg(feature = "tokio")]
    pub(crate) fn with<T>(&self, session: &'a T, reason: CloseReason) -> CloseCx<'a, T> {
        CloseCx { session, outlet: self.outlet, reason, account: self.account }
    }

    /// The same end with a part of the session, for a wrapped service; as
    /// [`Cx::map_session`](crate::Cx::map_session) for an open connection.
    #[doc(alias = "project")]
    pub fn map_session<T>(&self, part: impl FnOnce(&'a S) -> &'a T) -> CloseCx<'a, T> {
        CloseCx {
            session: part(self.session),
            outlet: self.outlet,
            reason: self.reason,
            account: self.account,
        }
    }

    /// The session of the connection.
    pub fn session(&self) -> &'a S {
        self.session
    }

    /// The id that the connection had on its shard. A connection that takes its place has another.
    pub fn id(&self) -> ConnId {
        self.outlet.id()
    }

    /// The other end of the connection.
    pub fn peer(&self) -> Peer {
        Peer::of(self.outlet)
    }

    /// The counts of the connection, if its service keeps [accounts](crate::Service::ACCOUNTS), or
    /// its [server](crate::Server::accounts) does.
    pub fn account(&self) -> Option<Account> {
        self.account
    }

    /// The reason of the end. [`CloseReason::closed_by`] names the side that ended the connection.
    pub fn reason(&self) -> CloseReason {
        self.reason
    }
}

impl<S> fmt::Debug for CloseCx<'_, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Closed").field("id", &self.id()).field("reason", &self.reason).finish_non_exhaustive()
    }
}
