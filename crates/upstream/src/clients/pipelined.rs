//! A client whose questions go ahead of the answers, which come in order.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::rc::Rc;

use ringserve_server::framing::Framing;
use ringserve_server::net::Framed;
use ringserve_server::{Frame, Shard};

use super::request::Request;
use super::shared::{Asker, Matcher};
use crate::error::UpstreamError;
use crate::upstream::Upstream;

impl Upstream {
    /// A client of this shard whose calls share connections, for protocols whose answers come in
    /// the order of their questions, as those of Redis and memcached do. Made in a factory; clones
    /// share the connections.
    ///
    /// ```no_run
    /// use std::convert::Infallible;
    ///
    /// use ringserve::framing::Lines;
    /// use ringserve::upstream::{Pipelined, Upstream};
    /// use ringserve::{Cx, Frame, Server, Service};
    ///
    /// struct Front {
    ///     answers: Pipelined<Lines>,
    /// }
    ///
    /// impl Service for Front {
    ///     type Session = ();
    ///     type Error = Infallible;
    ///
    ///     async fn call(&self, cx: &Cx<'_, ()>, question: Frame) -> Result<(), Infallible> {
    ///         match self.answers.ask(&question).await {
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
    ///         .framing(Lines::default())
    ///         .serve(move |shard| Front { answers: answers.pipelined(shard, Lines::default()) })
    /// }
    /// ```
    pub fn pipelined<F: Framing + Clone>(&self, shard: &Shard, framing: F) -> Pipelined<F> {
        let matching = || Matcher::InOrder(VecDeque::new());
        let write = Rc::new(|_id: u64, payload: &[u8]| payload.to_vec());
        Pipelined { asker: Asker::new(self, shard, framing, matching, Rc::new(|_: &Frame| None), write) }
    }
}

/// A client of an [`Upstream`] on one shard whose answers come in the order of their questions. See
/// [`Upstream::pipelined`].
///
/// A call that is dropped keeps its place in the order until its answer came, so that no other call
/// gets it. 64 such places, or one for longer than [`Upstream::answer_timeout`], end the
/// connection, as does an answer without a question; what is under way on it is lost then. A second
/// answer to a question looks like the answer to the next one while others wait: ask one that is
/// not trusted by [`Exclusive`](crate::Exclusive).
pub struct Pipelined<F: Framing + Clone> {
    asker: Rc<Asker<F>>,
}

impl<F: Framing + Clone> Clone for Pipelined<F> {
    fn clone(&self) -> Pipelined<F> {
        Pipelined { asker: self.asker.clone() }
    }
}

impl<F: Framing + Clone> Pipelined<F> {
    /// The largest answer, with its header; see [`Framed::frame_bytes_max`]. Holds for connections
    /// made from now on.
    pub fn frame_bytes_max(self, bytes: usize) -> Pipelined<F> {
        self.asker.frame_bytes_max.set(Some(bytes));
        self
    }

    /// Questions under way on a connection; at least 1, 1024 by default. Where all connections to
    /// all backends have as many, a call fails with [`Full`](UpstreamError::Full).
    pub fn in_flight_max(self, questions: usize) -> Pipelined<F> {
        self.asker.in_flight_max.set(questions.max(1));
        self
    }

    /// Connections to a backend; at least 1, 4 by default. Another one is made when the others have
    /// 32 questions under way.
    pub fn connections_max(self, connections: usize) -> Pipelined<F> {
        self.asker.connections_max.set(connections.max(1));
        self
    }

    /// Exchanges what a protocol wants first on each new connection, as
    /// [`Exclusive::setup`](crate::Exclusive::setup).
    pub fn setup(self, setup: impl AsyncFn(&mut Framed<F>) -> io::Result<()> + 'static) -> Pipelined<F> {
        self.asker.set_setup(setup);
        self
    }

    /// Asks a backend, and waits for its answer. A call that is dropped has asked all the same,
    /// once it was polled.
    ///
    /// # Errors
    /// [`UpstreamError`]. A question that did not leave this process is asked of another backend;
    /// one that left is asked again only if it is [idempotent](Request::idempotent).
    pub async fn ask<'q>(&self, request: impl Into<Request<'q>>) -> Result<Frame, UpstreamError> {
        self.asker.ask(request.into()).await
    }
}

impl<F: Framing + Clone> fmt::Debug for Pipelined<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Pipelined").field(self.asker.upstream()).finish()
    }
}
