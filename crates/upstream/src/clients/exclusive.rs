//! A client that asks one question at a time on each connection.

use std::cell::Cell;
use std::fmt;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use ringserve_server::framing::Framing;
use ringserve_server::net::{Framed, FramedError, is_local_failure};
use ringserve_server::{Frame, Shard, Stream};

use super::request::Request;
use crate::backend::Counts;
use crate::connect::connect_counted;
use crate::error::UpstreamError;
use crate::health;
use crate::policy::backoff;
use crate::pool::{Connection, Happened, Lent, NotLent, Pool, Pools, nanos};
use crate::upstream::Upstream;
use crate::view::{Choice, Member, View};

/// Connections on which a question was not sent because they had ended, until the question counts as lost.
const TAKEN_BACK_MAX: u32 = 8;

impl Upstream {
    /// A client of this shard that asks one question at a time on each connection, for protocols whose answers have no ids. Connections
    /// are kept for the next question, within the [`PoolLimits`](crate::PoolLimits). Made in a factory; clones share the connections.
    ///
    /// ```no_run
    /// use std::convert::Infallible;
    ///
    /// use ringserve::framing::LengthPrefix;
    /// use ringserve::upstream::{Exclusive, Request, Upstream};
    /// use ringserve::{Cx, Frame, Server, Service};
    ///
    /// struct Front {
    ///     answers: Exclusive<LengthPrefix>,
    /// }
    ///
    /// impl Service for Front {
    ///     type Session = ();
    ///     type Error = Infallible;
    ///
    ///     async fn call(&self, cx: &Cx<'_, ()>, question: Frame) -> Result<(), Infallible> {
    ///         match self.answers.ask(Request::new(&question).idempotent()).await {
    ///             Ok(answer) => cx.reply(answer),
    ///             Err(error) => cx.reply(format!("no answer: {error}")),
    ///         }
    ///         Ok(())
    ///     }
    /// }
    ///
    /// fn main() -> Result<(), ringserve::Error> {
    ///     let answers = Upstream::new("answers", ["10.0.0.11:9000", "10.0.0.12:9000"]);
    ///     Server::bind("127.0.0.1:7000")
    ///         .framing(LengthPrefix::default())
    ///         .serve(move |shard| Front { answers: answers.exclusive(shard, LengthPrefix::default()) })
    /// }
    /// ```
    pub fn exclusive<F: Framing + Clone>(&self, shard: &Shard, framing: F) -> Exclusive<F> {
        let view = Rc::new(View::new(self, shard, Pool::new));
        let frame_bytes_max: Rc<Cell<Option<usize>>> = Rc::default();
        let (upstream, on, bytes_max) = (self.clone(), shard.clone(), frame_bytes_max.clone());
        let connect = move |member: Rc<Member<Pool<Framed<F>>>>| {
            let (upstream, on, framing, bytes_max) =
                (upstream.clone(), on.clone(), framing.clone(), bytes_max.get());
            Box::pin(async move {
                let stream = connect_counted(&on, upstream.settings(), &member.state, None).await?;
                let framed = stream.framed(framing);
                Ok(match bytes_max {
                    Some(bytes) => framed.frame_bytes_max(bytes),
                    None => framed,
                })
            }) as Pin<Box<dyn Future<Output = io::Result<Framed<F>>>>>
        };
        health::begin(self, shard);
        Exclusive { pools: Pools::new(view, Box::new(connect)), frame_bytes_max }
    }
}

/// A client of an [`Upstream`] on one shard, which asks one question at a time on each connection.
/// See [`Upstream::exclusive`].
///
/// A call that is dropped closes its connection, so a late answer meets no other question. An answer too many closes its connection
/// too.
pub struct Exclusive<F: Framing> {
    pools: Rc<Pools<Framed<F>>>,
    frame_bytes_max: Rc<Cell<Option<usize>>>,
}

impl<F: Framing> Clone for Exclusive<F> {
    fn clone(&self) -> Exclusive<F> {
        Exclusive { pools: self.pools.clone(), frame_bytes_max: self.frame_bytes_max.clone() }
    }
}

impl<F: Framing> Exclusive<F> {
    /// The largest answer, with its header; see [`Framed::frame_bytes_max`]. Holds for connections made from now on.
    pub fn frame_bytes_max(self, bytes: usize) -> Exclusive<F> {
        self.frame_bytes_max.set(Some(bytes));
        self
    }

    /// Asks a backend, and waits for its answer.
    ///
    /// # Errors
    /// [`UpstreamError`]. A question that did not leave this process was asked of every backend that may be asked; one that left is asked
    /// again only if it is [idempotent](Request::idempotent).
    pub async fn ask<'q>(&self, request: impl Into<Request<'q>>) -> Result<Frame, UpstreamError> {
        let (request, view) = (request.into(), &self.pools.view);
        let time = request.timeout.unwrap_or(view.upstream.settings().answer_timeout);
        let until = view.now().saturating_add(nanos(time));
        let mut tries =
            Tries { request, tried: Vec::new(), sent: 0, taken_back: 0, is_fresh: false, last: None };
        view.count_request();
        let mut is_first = true;
        loop {
            let Some(mut choice) = view.choose(&tries.tried, None).or_else(|| tries.same_again(view)) else {
                view.upstream.state().count_refused();
                return Err(tries.last.unwrap_or(UpstreamError::NoBackend));
            };
            if !std::mem::take(&mut is_first) {
                view.upstream.state().count_retry();
            }
            // A backend that was given little of the time is not to blame for all of it.
            let is_to_blame = until.saturating_sub(choice.begun()) >= nanos(time) / 2;
            let tried = self.attempt(&choice, &tries, until).await;
            let broken = match tried {
                Ok(answer) => {
                    choice.succeeded();
                    return Ok(answer);
                }
                Err(broken) => broken,
            };
            match broken.is_failure(is_to_blame) {
                true => choice.failed(),
                false => choice.says_nothing(),
            }
            let member = choice.member().clone();
            drop(choice);
            let wait = tries.next(view, member, broken)?;
            if wait > 0 {
                view.shard.sleep(Duration::from_nanos(wait)).await;
            }
        }
    }

    async fn attempt(
        &self,
        choice: &Choice<Pool<Framed<F>>>,
        tries: &Tries<'_, F>,
        until: u64,
    ) -> Result<Frame, Broken> {
        let (view, member) = (&self.pools.view, choice.member());
        let left = |now: u64| Duration::from_nanos(until.saturating_sub(now));
        let taken = self.pools.take(member, tries.is_fresh);
        let lent = match view.shard.timeout(left(choice.begun()), taken).await {
            Ok(Ok(lent)) => lent,
            Ok(Err(NotLent::Failed(error))) => return Err(Broken::NotConnected(error)),
            Ok(Err(NotLent::Full)) => return Err(Broken::NotAsked(UpstreamError::Full)),
            Ok(Err(NotLent::TooLate)) => return Err(Broken::NotLent),
            Err(_elapsed) => return Err(Broken::NotAsked(UpstreamError::TimedOut)),
        };
        let left = left(view.now());
        if left.is_zero() {
            return Err(Broken::NotAsked(UpstreamError::TimedOut));
        }
        let asked = view.shard.timeout(left, exchange(lent, tries.request.payload)).await;
        let asked = asked.unwrap_or(Err(Broken::Late));
        let counts = &member.state.counts;
        match &asked {
            Err(Broken::TakenBack) => Counts::add(&counts.unsent, 1),
            Err(Broken::Lost { .. }) => Counts::add(&counts.lost, 1),
            _ => {}
        }
        asked
    }
}

/// Why a try led to no answer.
enum Broken {
    NotConnected(io::Error),
    /// The connection had ended, and nothing of the question left.
    TakenBack,
    Lost {
        is_reused: bool,
        /// This process ended it.
        is_ours: bool,
    },
    /// The question has no frame.
    Unfit(io::Error),
    /// The answer is none.
    Malformed(io::Error),
    /// No connection to this backend was free in time, which is for want of room as likely as not.
    NotLent,
    /// There is no room, or no time, to ask any backend.
    NotAsked(UpstreamError),
    Late,
}

impl Broken {
    /// Whether it counts against the backend. One that ended an idle connection may have done so before it heard the question.
    fn is_failure(&self, is_to_blame: bool) -> bool {
        match self {
            Broken::NotConnected(error) => !is_local_failure(error),
            Broken::Lost { is_reused, is_ours } => !is_reused && !is_ours,
            Broken::Malformed(_) => true,
            Broken::Late => is_to_blame,
            Broken::TakenBack | Broken::Unfit(_) | Broken::NotLent | Broken::NotAsked(_) => false,
        }
    }
}

/// The tries of a question.
struct Tries<'q, F: Framing> {
    request: Request<'q>,
    tried: Vec<Rc<Member<Pool<Framed<F>>>>>,
    /// Those that may have reached a backend.
    sent: u32,
    taken_back: u32,
    /// The next one takes no idle connection.
    is_fresh: bool,
    last: Option<UpstreamError>,
}

impl<F: Framing> Tries<'_, F> {
    /// Decides whether there is another try, and after how many nanoseconds.
    fn next(
        &mut self,
        view: &Rc<View<Pool<Framed<F>>>>,
        member: Rc<Member<Pool<Framed<F>>>>,
        broken: Broken,
    ) -> Result<u64, UpstreamError> {
        match broken {
            Broken::NotConnected(error) if is_local_failure(&error) => Err(UpstreamError::Failed(error)),
            // What did not leave is asked of another one, free of charge: a refused connection costs a backend nothing.
            Broken::NotConnected(error) => {
                self.tried.push(member);
                self.last = Some(UpstreamError::Failed(error));
                Ok(0)
            }
            Broken::TakenBack => {
                self.taken_back += 1;
                self.is_fresh = true;
                if self.taken_back > TAKEN_BACK_MAX { Err(UpstreamError::Lost) } else { Ok(0) }
            }
            Broken::Lost { is_reused, .. } => {
                self.sent += 1;
                let settings = &view.upstream.settings().retry;
                let may = self.request.is_idempotent && self.sent < settings.tries_max;
                if !may || !view.upstream.state().may_retry(view.now()) {
                    return Err(UpstreamError::Lost);
                }
                // A new connection to the only backend may do where a kept one was dead.
                self.is_fresh = is_reused;
                self.tried.push(member);
                self.last = Some(UpstreamError::Lost);
                Ok(backoff::before_try(self.sent, view.shard.random()))
            }
            Broken::Unfit(error) | Broken::Malformed(error) => Err(UpstreamError::Failed(error)),
            Broken::NotLent => {
                self.tried.push(member);
                self.last = Some(UpstreamError::TimedOut);
                Ok(0)
            }
            Broken::NotAsked(error) => Err(error),
            Broken::Late => Err(UpstreamError::TimedOut),
        }
    }

    /// Another try at the backend where a kept connection was dead, if no other one is left.
    fn same_again(&self, view: &Rc<View<Pool<Framed<F>>>>) -> Option<Choice<Pool<Framed<F>>>> {
        let (_last, before) = self.tried.split_last()?;
        if self.is_fresh { view.choose(before, None) } else { None }
    }
}

/// Asks on a connection, and gives it back behind the answer.
async fn exchange<F: Framing>(mut lent: Lent<Framed<F>>, question: &[u8]) -> Result<Frame, Broken> {
    let is_reused = lent.is_reused();
    let framed = lent.connection();
    framed
        .queue(question)
        .map_err(|error| Broken::Unfit(io::Error::new(io::ErrorKind::InvalidInput, error)))?;
    let queued = framed.stream().unsent_bytes();
    match framed.next().await {
        // What came before the question left is the answer to no question.
        Some(Ok(_)) if take_back(framed.stream(), queued) => Err(Broken::TakenBack),
        Some(Ok(answer)) => {
            lent.give_back();
            Ok(answer)
        }
        Some(Err(error @ (FramedError::Payload(_) | FramedError::Limits(_)))) => {
            Err(Broken::Unfit(error.into()))
        }
        Some(Err(error @ FramedError::Malformed(_))) => Err(Broken::Malformed(error.into())),
        _ if take_back(framed.stream(), queued) => Err(Broken::TakenBack),
        Some(Err(FramedError::Connection(error))) => {
            Err(Broken::Lost { is_reused, is_ours: is_local_failure(&error) })
        }
        None | Some(Err(_)) => Err(Broken::Lost { is_reused, is_ours: false }),
    }
}

/// Takes a question back of which nothing left: it would leave with the end of its connection. False if some of it did.
fn take_back(stream: &Stream, queued: usize) -> bool {
    let is_whole = queued > 0 && stream.unsent_bytes() == queued && stream.outbox_bytes() == queued;
    if is_whole {
        stream.abort();
    }
    is_whole
}

impl<F: Framing> Connection for Framed<F> {
    fn poll_idle(&mut self, task: &mut Context<'_>) -> Poll<Happened> {
        // A question that its answer overtook, or the begin of an answer too many.
        if self.stream().outbox_bytes() > 0 || self.unfinished_bytes() > 0 {
            return Poll::Ready(Happened::Stray);
        }
        match self.poll_next(task) {
            Poll::Ready(None | Some(Err(FramedError::Connection(_)))) => Poll::Ready(Happened::Ended),
            Poll::Ready(Some(_)) => Poll::Ready(Happened::Stray),
            Poll::Pending if self.unfinished_bytes() > 0 => Poll::Ready(Happened::Stray),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl<F: Framing> fmt::Debug for Exclusive<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Exclusive").field(&self.pools.view.upstream).finish()
    }
}
