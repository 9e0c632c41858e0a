//! What a service is told of a failure, and of the end of a connection.

use std::fmt;

use ringserve_core::{Account, CloseReason, ConnId, Outlet};

use crate::peer::Peer;

/// Why a call ends its connection, for [`Service::failed`](crate::Service::failed).
#[derive(Debug)]
#[non_exhaustive]
pub enum Failure<'a, E> {
    /// It returned an error.
    Error(&'a E),
    /// It waited for longer than [`Limits::handler_timeout`](crate::Limits::handler_timeout).
    TimedOut,
    /// It panicked, or the framing did, with this message.
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

/// A connection that ended. Nothing can be sent to it any more.
pub struct Closed<'a, S> {
    session: &'a S,
    outlet: &'a Outlet,
    reason: CloseReason,
    account: Option<Account>,
}

impl<'a, S> Closed<'a, S> {
    pub(crate) fn new(
        session: &'a S,
        outlet: &'a Outlet,
        reason: CloseReason,
        account: Option<Account>,
    ) -> Closed<'a, S> {
        Closed { session, outlet, reason, account }
    }

    /// The same end with another session, and for another reason.
    #[cfg(feature = "codec")]
    pub(crate) fn with<T>(&self, session: &'a T, reason: CloseReason) -> Closed<'a, T> {
        Closed { session, outlet: self.outlet, reason, account: self.account }
    }

    /// The same end with a part of the session, for a service inside whose session that part is, as
    /// [`Cx::project`](crate::Cx::project) is of a connection.
    pub fn project<T>(&self, part: impl FnOnce(&'a S) -> &'a T) -> Closed<'a, T> {
        Closed {
            session: part(self.session),
            outlet: self.outlet,
            reason: self.reason,
            account: self.account,
        }
    }

    /// The connection's state.
    pub fn session(&self) -> &'a S {
        self.session
    }

    /// The name that the connection had on its shard. The next one in its place has another.
    pub fn id(&self) -> ConnId {
        self.outlet.id()
    }

    /// Who was on the other end.
    pub fn peer(&self) -> Peer {
        Peer::of(self.outlet)
    }

    /// What was counted of it, for a service that asks for [accounts](crate::Service::ACCOUNTS).
    pub fn account(&self) -> Option<Account> {
        self.account
    }

    /// Why it ended. [`CloseReason::closed_by`] says who ended it.
    pub fn reason(&self) -> CloseReason {
        self.reason
    }
}

impl<S> fmt::Debug for Closed<'_, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Closed").field("id", &self.id()).field("reason", &self.reason).finish_non_exhaustive()
    }
}
