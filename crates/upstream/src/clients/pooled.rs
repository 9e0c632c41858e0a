//! A connection that a request uses.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::rc::Rc;

use crate::backend::{Backend, Counts};
use crate::pool::{Connection, Lent, Pool};
use crate::view::{Choice, Member};

/// The end of a request at a backend.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The backend answered.
    Answered,
    /// The connection had ended, and nothing of the request left: it may be sent elsewhere.
    Unsent,
    /// The request left, or a part of it, and the connection ended before an answer came.
    Lost,
    /// The same, and this process ended the connection, as
    /// [`is_local_failure`](ringserve_server::net::is_local_failure) tells: the backend is not to
    /// blame.
    Aborted,
    /// The answer was none, or says that the backend cannot serve it.
    Failed,
    /// The time was over. The backend is to blame where it had at least half of it.
    TimedOut,
    /// An event that says nothing about the backend, such as a client that left.
    Unknown,
}

/// A connection that a [`Call`](crate::Call) uses, with its place at a backend. It derefs to the
/// connection.
///
/// Its drop closes the connection; [`give_back`](PooledConnection::give_back) keeps it. Until then
/// the request counts as in flight.
pub struct PooledConnection<C: Connection> {
    lent: Lent<C>,
    choice: Choice<Pool<C>>,
}

impl<C: Connection> PooledConnection<C> {
    pub(super) fn new(lent: Lent<C>, choice: Choice<Pool<C>>) -> PooledConnection<C> {
        PooledConnection { lent, choice }
    }

    /// The backend.
    pub fn backend(&self) -> &Backend {
        &self.choice.state().backend
    }

    /// True if the connection was used or idle before, so that its end may have crossed the
    /// request.
    pub fn is_reused(&self) -> bool {
        self.lent.is_reused()
    }

    /// Notes how the request ended: an answer's time counts for the choice of later requests, a
    /// failure for [ejection](crate::Upstream::ejection). The first outcome counts; one that is
    /// followed by another try belongs to [`Call::retry`](crate::Call::retry), and one that was
    /// given none says that the request was given up.
    pub fn finish(&mut self, outcome: Outcome) {
        if self.choice.is_settled() {
            return;
        }
        let counts = &self.choice.state().counts;
        match outcome {
            Outcome::Unsent => Counts::add(&counts.unsent, 1),
            Outcome::Lost | Outcome::Aborted => Counts::add(&counts.lost, 1),
            _ => {}
        }
        match outcome {
            Outcome::Answered => self.choice.succeeded(),
            Outcome::Failed | Outcome::TimedOut => self.choice.failed(),
            // One that ended an idle connection may have done so before it received the request.
            Outcome::Lost if !self.is_reused() => self.choice.failed(),
            Outcome::Lost | Outcome::Aborted | Outcome::Unsent | Outcome::Unknown => {
                self.choice.says_nothing()
            }
        }
    }

    /// Gives the connection back for the next request. It is closed all the same if it is [not
    /// idle](Connection::poll_idle): what is left on it may be the answer to another request.
    pub fn give_back(self) {
        let now = self.choice.settled_at();
        self.lent.give_back(now);
    }

    /// Takes the connection out of the pool, for one that becomes something else, such as a tunnel:
    /// it counts no longer in [`PoolLimits::connections_max`](crate::PoolLimits::connections_max),
    /// and its end closes it. The request counts as in flight until then, so bound what is detached
    /// by a number of your own: each is a descriptor.
    ///
    /// ```
    /// use ringserve_upstream::{Connection, Outcome, PooledConnection};
    ///
    /// fn to_tunnel<C: Connection>(mut connection: PooledConnection<C>) -> PooledConnection<C> {
    ///     connection.finish(Outcome::Answered);
    ///     connection.detach();
    ///     connection
    /// }
    /// ```
    pub fn detach(&mut self) {
        self.lent.detach();
    }

    pub(super) fn member(&self) -> &Rc<Member<Pool<C>>> {
        self.choice.member()
    }

    /// When the backend was chosen, in nanoseconds.
    pub(super) fn begun(&self) -> u64 {
        self.choice.begun()
    }
}

impl<C: Connection> Deref for PooledConnection<C> {
    type Target = C;

    fn deref(&self) -> &C {
        self.lent.connection()
    }
}

impl<C: Connection> DerefMut for PooledConnection<C> {
    fn deref_mut(&mut self) -> &mut C {
        self.lent.connection_mut()
    }
}

impl<C: Connection> fmt::Debug for PooledConnection<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PooledConnection")
            .field("backend", &self.backend().name())
            .field("is_reused", &self.is_reused())
            .finish()
    }
}
