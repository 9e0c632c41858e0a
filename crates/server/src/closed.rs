//! The end of a connection, as its service is told of it.

use std::fmt;

use ringserve_core::{CloseReason, ConnId, Outlet};

use crate::peer::Peer;

/// A connection that ended. Nothing can be sent to it any more.
pub struct Closed<'a, S> {
    session: &'a S,
    outlet: &'a Outlet,
    reason: CloseReason,
}

impl<'a, S> Closed<'a, S> {
    pub(crate) fn new(session: &'a S, outlet: &'a Outlet, reason: CloseReason) -> Closed<'a, S> {
        Closed { session, outlet, reason }
    }

    /// The same end with another session, and for another reason.
    #[cfg(feature = "codec")]
    pub(crate) fn with<T>(&self, session: &'a T, reason: CloseReason) -> Closed<'a, T> {
        Closed { session, outlet: self.outlet, reason }
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
