//! A client that asks one question at a time on each connection.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use ringserve_server::framing::Framing;
use ringserve_server::net::{Framed, FramedError, is_local_failure};
use ringserve_server::{Frame, Shard, Stream};

use super::call::Call;
use super::connections::Connections;
use super::hedged::{Visits, hedged};
use super::pooled::{Outcome, PooledConnection};
use super::request::Request;
use crate::backend::Backend;
use crate::error::UpstreamError;
use crate::pool::{Connection, IdleEvent};
use crate::upstream::Upstream;

/// Exchanges what a protocol wants first on a new connection.
type Setup<F> = dyn for<'c> Fn(&'c mut Framed<F>) -> Pin<Box<dyn Future<Output = io::Result<()>> + 'c>>;

impl Upstream {
    /// A client of this shard that asks one question at a time on each connection, for protocols
    /// whose answers have no ids. Connections are kept for the next question, within the
    /// [`PoolLimits`](crate::PoolLimits). Made in a factory; clones share the connections.
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
        let options: Rc<Options<F>> = Rc::default();
        let of_new = options.clone();
        let setup = async move |stream: Stream, _backend: &Backend| {
            let mut framed = stream.framed(framing.clone());
            if let Some(bytes) = of_new.frame_bytes_max.get() {
                framed = framed.frame_bytes_max(bytes);
            }
            let setup = of_new.setup.borrow().clone();
            if let Some(setup) = setup {
                setup(&mut framed).await?;
            }
            Ok(framed)
        };
        Exclusive { connections: self.connections(shard, setup), options }
    }
}

/// Options of new connections.
struct Options<F: Framing> {
    frame_bytes_max: Cell<Option<usize>>,
    setup: RefCell<Option<Rc<Setup<F>>>>,
}

impl<F: Framing> Default for Options<F> {
    fn default() -> Options<F> {
        Options { frame_bytes_max: Cell::default(), setup: RefCell::default() }
    }
}

/// A client of an [`Upstream`] on one shard, which asks one question at a time on each connection.
/// See [`Upstream::exclusive`].
///
/// A call that is dropped closes its connection, so a late answer meets no other question. An
/// answer too many closes its connection too.
pub struct Exclusive<F: Framing> {
    connections: Connections<Framed<F>>,
    options: Rc<Options<F>>,
}

impl<F: Framing> Clone for Exclusive<F> {
    fn clone(&self) -> Exclusive<F> {
        Exclusive { connections: self.connections.clone(), options: self.options.clone() }
    }
}

impl<F: Framing> Exclusive<F> {
    /// The largest answer, with its header; see [`Framed::frame_bytes_max`]. Holds for connections
    /// made from now on.
    pub fn frame_bytes_max(self, bytes: usize) -> Exclusive<F> {
        self.options.frame_bytes_max.set(Some(bytes));
        self
    }

    /// Exchanges what a protocol wants first on each new connection, such as a greeting or a
    /// password, before it is lent. It runs within [`Upstream::connect_timeout`], and its error is
    /// one of the connection. Holds for connections made from now on.
    ///
    /// ```no_run
    /// # use std::io;
    /// # use ringserve::Shard;
    /// # use ringserve::framing::Lines;
    /// # use ringserve::net::Framed;
    /// # use ringserve::upstream::{Exclusive, Upstream};
    /// # fn client(upstream: &Upstream, shard: &Shard) -> Exclusive<Lines> {
    /// upstream.exclusive(shard, Lines::default()).setup(async |connection: &mut Framed<Lines>| {
    ///     connection.queue(b"AUTH secret").map_err(io::Error::other)?;
    ///     match connection.next().await {
    ///         Some(Ok(answer)) if *answer == *b"OK" => Ok(()),
    ///         _ => Err(io::ErrorKind::PermissionDenied.into()),
    ///     }
    /// })
    /// # }
    /// ```
    pub fn setup(self, setup: impl AsyncFn(&mut Framed<F>) -> io::Result<()> + 'static) -> Exclusive<F> {
        let setup = Rc::new(setup);
        *self.options.setup.borrow_mut() = Some(Rc::new(move |connection| {
            let setup = setup.clone();
            Box::pin(async move { setup(connection).await })
        }));
        self
    }

    /// Asks a backend, and waits for its answer.
    ///
    /// # Errors
    /// [`UpstreamError`]. A question that did not leave this process was asked of every backend
    /// that may be asked; one that left is asked again only if it is
    /// [idempotent](Request::idempotent).
    pub async fn ask<'q>(&self, request: impl Into<Request<'q>>) -> Result<Frame, UpstreamError> {
        let (request, view) = (request.into(), &self.connections.pools.view);
        let call = request.call(&self.connections);
        let Some(delay) = view.hedge_delay().filter(|_| request.is_idempotent) else {
            return self.ask_by(call, request.payload).await;
        };
        let (visited, until) = (Rc::new(Visits::default()), call.until());
        let first = self.ask_by(call.visits(&visited), request.payload);
        let second = async {
            let call = request.call(&self.connections).beside(&visited, until);
            self.ask_by(call, request.payload).await
        };
        hedged(view, delay, first, second).await
    }

    /// Asks, with all tries.
    async fn ask_by(&self, mut call: Call<Framed<F>>, payload: &[u8]) -> Result<Frame, UpstreamError> {
        let shard = &self.connections.pools.view.shard;
        loop {
            let mut lent = call.take().await?;
            let asked = shard.timeout(call.left(), exchange(&mut lent, payload)).await;
            match asked.unwrap_or(Err(Broken::Ended(Outcome::TimedOut))) {
                Ok(answer) => {
                    lent.finish(Outcome::Answered);
                    lent.give_back();
                    return Ok(answer);
                }
                Err(Broken::Unfit(error)) => {
                    lent.finish(Outcome::Unknown);
                    return Err(UpstreamError::Failed(error));
                }
                Err(Broken::Malformed(error)) => {
                    lent.finish(Outcome::Failed);
                    return Err(UpstreamError::Failed(error));
                }
                Err(Broken::Ended(outcome)) => call.retry(&mut lent, outcome)?,
            }
        }
    }
}

/// Why a try led to no answer.
enum Broken {
    /// The question has no frame.
    Unfit(io::Error),
    /// The answer is none.
    Malformed(io::Error),
    Ended(Outcome),
}

/// Asks on a connection.
async fn exchange<F: Framing>(
    lent: &mut PooledConnection<Framed<F>>,
    question: &[u8],
) -> Result<Frame, Broken> {
    lent.queue(question)
        .map_err(|error| Broken::Unfit(io::Error::new(io::ErrorKind::InvalidInput, error)))?;
    let queued = lent.stream().unsent_bytes();
    match lent.next().await {
        // What came before the question left is the answer to no question.
        Some(Ok(_)) if take_back(lent.stream(), queued) => Err(Broken::Ended(Outcome::Unsent)),
        Some(Ok(answer)) => Ok(answer),
        Some(Err(error @ (FramedError::Payload(_) | FramedError::Limits(_)))) => {
            Err(Broken::Unfit(error.into()))
        }
        Some(Err(error @ FramedError::Malformed(_))) => Err(Broken::Malformed(error.into())),
        _ if take_back(lent.stream(), queued) => Err(Broken::Ended(Outcome::Unsent)),
        Some(Err(FramedError::Connection(error))) if is_local_failure(&error) => {
            Err(Broken::Ended(Outcome::Aborted))
        }
        None | Some(Err(_)) => Err(Broken::Ended(Outcome::Lost)),
    }
}

/// Takes a question back of which nothing left: it would leave with the end of its connection.
/// False if some of it did.
fn take_back(stream: &Stream, queued: usize) -> bool {
    let is_whole = queued > 0 && stream.unsent_bytes() == queued && stream.outbox_bytes() == queued;
    if is_whole {
        stream.abort();
    }
    is_whole
}

impl<F: Framing> Connection for Framed<F> {
    fn poll_idle(&mut self, task: &mut Context<'_>) -> Poll<IdleEvent> {
        // A question that its answer overtook, or the begin of an answer too many.
        if self.stream().outbox_bytes() > 0 || self.unfinished_bytes() > 0 {
            return Poll::Ready(IdleEvent::Stray);
        }
        match self.poll_next(task) {
            Poll::Ready(None | Some(Err(FramedError::Connection(_)))) => Poll::Ready(IdleEvent::Ended),
            Poll::Ready(Some(_)) => Poll::Ready(IdleEvent::Stray),
            Poll::Pending if self.unfinished_bytes() > 0 => Poll::Ready(IdleEvent::Stray),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl<F: Framing> fmt::Debug for Exclusive<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Exclusive").field(self.connections.upstream()).finish()
    }
}
