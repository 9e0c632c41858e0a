//! A client whose questions and answers have ids.

use std::cell::Cell;
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
    /// A client of this shard whose calls share connections, for protocols whose questions and
    /// answers have ids, such as those of remote calls. `write` makes a question of an id and a
    /// payload, `id` finds the id of an answer. Made in a factory; clones share the connections.
    ///
    /// Ids go up from 1 on each connection, up to [`id_max`](Multiplexed::id_max). One is used
    /// again only once its answer came, also where its call was dropped.
    ///
    /// ```no_run
    /// use ringserve::framing::LengthPrefix;
    /// use ringserve::upstream::{Multiplexed, Upstream};
    /// use ringserve::{Frame, Shard};
    ///
    /// /// Four bytes of an id, then the payload.
    /// fn client(upstream: &Upstream, shard: &Shard) -> Multiplexed<LengthPrefix> {
    ///     let id = |answer: &Frame| Some(u32::from_be_bytes(*answer.first_chunk()?).into());
    ///     let write = |id: u64, payload: &[u8], out: &mut Vec<u8>| {
    ///         out.extend_from_slice(&(id as u32).to_be_bytes());
    ///         out.extend_from_slice(payload);
    ///     };
    ///     upstream.multiplexed(shard, LengthPrefix::default(), id, write)
    /// }
    /// ```
    pub fn multiplexed<F: Framing + Clone>(
        &self,
        shard: &Shard,
        framing: F,
        id: impl Fn(&Frame) -> Option<u64> + 'static,
        write: impl Fn(u64, &[u8], &mut Vec<u8>) + 'static,
    ) -> Multiplexed<F> {
        let id_max = Rc::new(Cell::new(u64::from(u32::MAX)));
        let max = id_max.clone();
        let write = Rc::new(move |id: u64, payload: &[u8]| {
            let mut question = Vec::with_capacity(payload.len() + 16);
            write(id, payload, &mut question);
            question
        });
        let matching = move || Matcher::by_id(max.get());
        Multiplexed { asker: Asker::new(self, shard, framing, matching, Rc::new(id), write), id_max }
    }
}

/// A client of an [`Upstream`] on one shard whose questions and answers have ids. See
/// [`Upstream::multiplexed`].
///
/// An answer with an unknown id, or without one, ends its connection, and what is under way on it
/// is lost: it would be an answer to a question that was answered already, or to none. The id of a
/// call that is dropped stays in use until its answer came; 64 of them, or one for longer than
/// [`Upstream::answer_timeout`], end the connection too.
pub struct Multiplexed<F: Framing + Clone> {
    asker: Rc<Asker<F>>,
    id_max: Rc<Cell<u64>>,
}

impl<F: Framing + Clone> Clone for Multiplexed<F> {
    fn clone(&self) -> Multiplexed<F> {
        Multiplexed { asker: self.asker.clone(), id_max: self.id_max.clone() }
    }
}

impl<F: Framing + Clone> Multiplexed<F> {
    /// The largest answer, with its header; see [`Framed::frame_bytes_max`]. Holds for connections
    /// made from now on.
    pub fn frame_bytes_max(self, bytes: usize) -> Multiplexed<F> {
        self.asker.frame_bytes_max.set(Some(bytes));
        self
    }

    /// Questions under way on a connection; at least 1, 1024 by default. Where all connections to
    /// all backends have as many, a call fails with [`Full`](UpstreamError::Full).
    pub fn in_flight_max(self, questions: usize) -> Multiplexed<F> {
        self.asker.in_flight_max.set(questions.max(1));
        self
    }

    /// Connections to a backend; at least 1, 4 by default. Another one is made when the others have
    /// 32 questions under way.
    pub fn connections_max(self, connections: usize) -> Multiplexed<F> {
        self.asker.connections_max.set(connections.max(1));
        self
    }

    /// The largest id, behind which ids begin again at 1; at least 1, 2^32 - 1 by default. Holds
    /// for connections made from now on.
    pub fn id_max(self, id: u64) -> Multiplexed<F> {
        self.id_max.set(id);
        self
    }

    /// Exchanges what a protocol wants first on each new connection, as
    /// [`Exclusive::setup`](crate::Exclusive::setup).
    pub fn setup(self, setup: impl AsyncFn(&mut Framed<F>) -> io::Result<()> + 'static) -> Multiplexed<F> {
        self.asker.set_setup(setup);
        self
    }

    /// Asks a backend, and waits for its answer, whole and with its id. A call that is dropped has
    /// asked all the same, once it was polled.
    ///
    /// # Errors
    /// [`UpstreamError`]. A question that did not leave this process is asked of another backend;
    /// one that left is asked again only if it is [idempotent](Request::idempotent).
    pub async fn ask<'q>(&self, request: impl Into<Request<'q>>) -> Result<Frame, UpstreamError> {
        self.asker.ask(request.into()).await
    }
}

impl<F: Framing + Clone> fmt::Debug for Multiplexed<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Multiplexed").field(self.asker.upstream()).finish()
    }
}
