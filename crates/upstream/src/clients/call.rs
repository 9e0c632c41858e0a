//! A request over pooled connections, with its tries.

use std::fmt;
use std::io;
use std::rc::Rc;
use std::time::Duration;

use ringserve_server::net::is_local_failure;

use super::hedged::Visits;
use super::pooled::{Outcome, PooledConnection};
use crate::error::UpstreamError;
use crate::policy::backoff;
use crate::policy::maglev::hash;
use crate::pool::{Connection, NotLent, Pool, Pools, nanos};
use crate::view::{Choice, Member, View};

/// Connections on which a request was not sent because they had ended, until the request counts as
/// lost.
const TAKEN_BACK_MAX: u32 = 8;

/// A request to an [`Upstream`](crate::Upstream) over its [`Connections`](crate::Connections), with
/// all its tries: which backends it was at, how often it may be sent, and until when.
pub struct Call<C: Connection> {
    pools: Rc<Pools<C>>,
    begun: u64,
    /// The same until something was waited for: then the clock is read again.
    now: Option<u64>,
    until: u64,
    is_idempotent: bool,
    key: Option<u64>,
    tried: Vec<Rc<Member<Pool<C>>>>,
    /// The backends at which this request is or was, for a second one beside it.
    visited: Option<Rc<Visits<Pool<C>>>>,
    /// Another one goes on if this one fails.
    is_beside: bool,
    /// Tries that may have reached a backend.
    sent: u32,
    taken_back: u32,
    /// The next try takes no idle connection.
    is_fresh: bool,
    /// A backend where a kept connection was dead: a new one may do, if no other backend is left.
    stale: Option<Rc<Member<Pool<C>>>>,
    /// A choice was made before.
    is_retry: bool,
    /// Nanoseconds to wait before the next try.
    wait: u64,
    last: Option<UpstreamError>,
}

impl<C: Connection> Call<C> {
    pub(super) fn new(pools: &Rc<Pools<C>>) -> Call<C> {
        pools.view.count_request();
        let begun = pools.view.now();
        let time = pools.view.upstream.settings().answer_timeout;
        Call {
            pools: pools.clone(),
            begun,
            now: Some(begun),
            until: begun.saturating_add(nanos(time)),
            is_idempotent: false,
            key: None,
            tried: Vec::new(),
            visited: None,
            is_beside: false,
            sent: 0,
            taken_back: 0,
            is_fresh: false,
            stale: None,
            is_retry: false,
            wait: 0,
            last: None,
        }
    }

    /// Says that the request may be sent twice: a lost one is, as far as [`Retry`](crate::Retry)
    /// goes.
    pub fn idempotent(self) -> Call<C> {
        Call { is_idempotent: true, ..self }
    }

    /// Asks the backend that the key belongs to, such as that of a tenant or of an object that is
    /// cached there, whatever [`Balance`](crate::Balance) says. Keys are spread by weight, and few
    /// of them move where a backend comes or leaves. Where theirs may not be asked, or has no
    /// connection, all requests with a key go to the same other one. A key that many requests have
    /// loads its backend with all of them.
    pub fn key(self, key: impl AsRef<[u8]>) -> Call<C> {
        self.hashed_key(Some(hash(key.as_ref())))
    }

    pub(super) fn hashed_key(self, key: Option<u64>) -> Call<C> {
        Call { key, ..self }
    }

    /// Time limit of the request with all tries, from its begin, instead of
    /// [`Upstream::answer_timeout`](crate::Upstream::answer_timeout).
    pub fn timeout(self, time: Duration) -> Call<C> {
        Call { until: self.begun.saturating_add(nanos(time)), ..self }
    }

    /// Notes where the request is.
    pub(super) fn visits(self, visited: &Rc<Visits<Pool<C>>>) -> Call<C> {
        Call { visited: Some(visited.clone()), ..self }
    }

    /// Leaves out the backends where another try of this request is, and ends with that.
    pub(super) fn beside(self, visited: &Visits<Pool<C>>, until: u64) -> Call<C> {
        Call { tried: visited.all(), until, is_beside: true, ..self }
    }

    /// When its time is over, in nanoseconds.
    pub(super) fn until(&self) -> u64 {
        self.until
    }

    /// The time that is left.
    pub fn left(&self) -> Duration {
        Duration::from_nanos(self.until.saturating_sub(self.view().now()))
    }

    /// Takes a connection: chooses a backend where this request was not yet, and lends an idle
    /// connection to it or makes one. A backend that cannot be connected to, or has no connection
    /// to spare, is left for the next one.
    ///
    /// # Errors
    /// [`NoBackend`](UpstreamError::NoBackend), or why the last one had no connection:
    /// [`Full`](UpstreamError::Full), [`TimedOut`](UpstreamError::TimedOut) or
    /// [`Failed`](UpstreamError::Failed). Where this process lacks what it takes, such as a
    /// descriptor, no other backend is tried; [`is_local_failure`] tells.
    pub async fn take(&mut self) -> Result<PooledConnection<C>, UpstreamError> {
        if let wait @ 1.. = std::mem::take(&mut self.wait) {
            self.view().shard.sleep(Duration::from_nanos(wait)).await;
        }
        if self.view().upstream.is_unresolved() {
            self.now = None;
            self.view().is_resolved(self.until).await;
        }
        loop {
            let Some(mut choice) = self.choose() else {
                if !self.is_beside {
                    self.view().upstream.state().count_refused();
                }
                return Err(self.last.take().unwrap_or(UpstreamError::NoBackend));
            };
            if std::mem::replace(&mut self.is_retry, true) {
                self.view().upstream.state().count_retry();
            }
            if let Some(visited) = &self.visited {
                visited.add(choice.member());
            }
            if choice.begun() >= self.until {
                choice.says_nothing();
                return Err(UpstreamError::TimedOut);
            }
            if !self.is_fresh
                && let Some(lent) = self.pools.take_idle(choice.member(), choice.begun())
            {
                return Ok(PooledConnection::new(lent, choice));
            }
            let left = Duration::from_nanos(self.until.saturating_sub(choice.begun()));
            let taken = self.pools.take(choice.member(), self.is_fresh);
            let not_lent = match self.view().shard.timeout(left, taken).await {
                Ok(Ok(lent)) => return Ok(PooledConnection::new(lent, choice)),
                Ok(Err(not_lent)) => not_lent,
                Err(_elapsed) => {
                    choice.says_nothing();
                    return Err(UpstreamError::TimedOut);
                }
            };
            self.passes_over(choice, not_lent)?;
        }
    }

    /// A backend that this request was not at, or else the one where a kept connection was dead.
    fn choose(&mut self) -> Option<Choice<Pool<C>>> {
        let view = &self.pools.view;
        let now = self.now.take().unwrap_or_else(|| view.now());
        let choice = match self.key {
            Some(key) => view.choose_by_key(now, key, &self.tried, None),
            None => view.choose_at(now, &self.tried, None),
        };
        if choice.is_some() {
            return choice;
        }
        let stale = self.stale.take()?;
        let others: Vec<_> =
            self.tried.iter().filter(|member| !Rc::ptr_eq(member, &stale)).cloned().collect();
        self.pools.view.choose(&others, None)
    }

    /// Leaves a backend without a connection for the next one. That costs nothing of the budget:
    /// nothing was sent.
    fn passes_over(&mut self, mut choice: Choice<Pool<C>>, not_lent: NotLent) -> Result<(), UpstreamError> {
        let error = match not_lent {
            NotLent::Failed(error) if is_local_failure(&error) => {
                choice.says_nothing();
                return Err(UpstreamError::Failed(error));
            }
            NotLent::Failed(error) => {
                choice.failed();
                UpstreamError::Failed(error)
            }
            // For want of room, as likely as not.
            NotLent::Full => {
                choice.says_nothing();
                UpstreamError::Full
            }
            NotLent::TooLate => {
                choice.says_nothing();
                UpstreamError::TimedOut
            }
        };
        self.last = Some(error);
        self.tried.push(choice.member().clone());
        Ok(())
    }

    /// Notes how a try ended, and allows another one, which [`take`](Call::take) begins: where
    /// nothing left, where the request is [idempotent](Call::idempotent) and
    /// [`Retry`](crate::Retry) has tries and budget left. Drop or give back the connection before.
    ///
    /// # Errors
    /// If there is no further try: [`Lost`](UpstreamError::Lost),
    /// [`TimedOut`](UpstreamError::TimedOut), or [`Failed`](UpstreamError::Failed) for an answer
    /// that is none.
    pub fn retry(
        &mut self,
        connection: &mut PooledConnection<C>,
        outcome: Outcome,
    ) -> Result<(), UpstreamError> {
        let time = self.until.saturating_sub(self.begun);
        let is_to_blame = self.until.saturating_sub(connection.begun()) >= time / 2;
        // A backend that was given little of the time is not to blame for all of it.
        connection.finish(match outcome {
            Outcome::TimedOut if !is_to_blame => Outcome::Unknown,
            outcome => outcome,
        });
        let error = match outcome {
            Outcome::Unsent => {
                self.taken_back += 1;
                self.is_fresh = true;
                return if self.taken_back > TAKEN_BACK_MAX { Err(UpstreamError::Lost) } else { Ok(()) };
            }
            Outcome::Lost | Outcome::Aborted => UpstreamError::Lost,
            Outcome::TimedOut => return Err(UpstreamError::TimedOut),
            _ => UpstreamError::Failed(io::Error::other("the backend failed the request")),
        };
        self.sent += 1;
        let view = &self.pools.view;
        let may = self.is_idempotent && self.sent < view.upstream.settings().retry.tries_max;
        if !may || !view.upstream.state().may_retry(view.now()) {
            return Err(error);
        }
        self.wait = backoff::before_try(self.sent, view.shard.random());
        self.is_fresh = connection.is_reused() && outcome != Outcome::Failed;
        self.stale = self.is_fresh.then(|| connection.member().clone());
        self.last = Some(error);
        self.tried.push(connection.member().clone());
        Ok(())
    }

    fn view(&self) -> &Rc<View<Pool<C>>> {
        &self.pools.view
    }
}

impl<C: Connection> fmt::Debug for Call<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Call")
            .field("upstream", &self.view().upstream)
            .field("tried", &self.tried.len())
            .field("sent", &self.sent)
            .finish()
    }
}
