//! A client that lends pooled connections of any protocol.

use std::fmt;
use std::io;
use std::pin::Pin;
use std::rc::Rc;

use ringserve_server::{Shard, Stream};

use super::call::Call;
use crate::backend::Backend;
use crate::connect::connect_counted;
use crate::health;
use crate::names;
use crate::pool::{Connection, Pool, Pools};
use crate::upstream::Upstream;
use crate::view::{Member, View};

impl Upstream {
    /// A client of this shard that lends connections of any protocol, one request at a time on
    /// each, for clients that are written by hand: those of HTTP, SMTP, databases. Connections are
    /// kept for the next request, within the [`PoolLimits`](crate::PoolLimits). Made in a factory;
    /// clones share the connections.
    ///
    /// `setup` makes a connection of the protocol from a new stream to a backend, and may exchange
    /// a greeting or a password first. It runs within
    /// [`connect_timeout`](Upstream::connect_timeout), and its failure is that of the connection.
    ///
    /// ```no_run
    /// use std::io;
    /// use std::task::{Context, Poll};
    ///
    /// use ringserve::upstream::{Backend, Connection, Connections, IdleEvent, Outcome, Upstream, UpstreamError};
    /// use ringserve::{Shard, Stream};
    ///
    /// struct Plain(Stream);
    ///
    /// impl Connection for Plain {
    ///     fn poll_idle(&mut self, task: &mut Context<'_>) -> Poll<IdleEvent> {
    ///         match self.0.poll_read_frame(task) {
    ///             Poll::Pending => Poll::Pending,
    ///             Poll::Ready(Ok(Some(_))) => Poll::Ready(IdleEvent::Stray),
    ///             Poll::Ready(_) => Poll::Ready(IdleEvent::Ended),
    ///         }
    ///     }
    /// }
    ///
    /// fn client(upstream: &Upstream, shard: &Shard) -> Connections<Plain> {
    ///     upstream.connections(shard, async |mut stream: Stream, _backend: &Backend| -> io::Result<Plain> {
    ///         stream.write_all(b"HELLO\n").await?;
    ///         Ok(Plain(stream))
    ///     })
    /// }
    ///
    /// async fn ask(client: &Connections<Plain>, question: &[u8]) -> Result<Vec<u8>, UpstreamError> {
    ///     let mut call = client.call().idempotent();
    ///     loop {
    ///         let mut connection = call.take().await?;
    ///         connection.0.queue(question);
    ///         match connection.0.read_frame().await {
    ///             Ok(Some(answer)) => {
    ///                 let answer = answer.to_vec();
    ///                 connection.finish(Outcome::Answered);
    ///                 connection.give_back();
    ///                 return Ok(answer);
    ///             }
    ///             Ok(None) | Err(_) => call.retry(&mut connection, Outcome::Lost)?,
    ///         }
    ///     }
    /// }
    /// ```
    pub fn connections<C: Connection>(
        &self,
        shard: &Shard,
        setup: impl AsyncFn(Stream, &Backend) -> io::Result<C> + 'static,
    ) -> Connections<C> {
        let view = Rc::new(View::new(self, shard, Pool::new));
        let (upstream, on, setup) = (self.clone(), shard.clone(), Rc::new(setup));
        let connect = move |member: Rc<Member<Pool<C>>>| {
            let (upstream, on, setup) = (upstream.clone(), on.clone(), setup.clone());
            Box::pin(async move {
                let set_up = async |stream| setup(stream, &member.state.backend).await;
                connect_counted(&on, upstream.settings(), &member.state, None, set_up).await
            }) as Pin<Box<dyn Future<Output = io::Result<C>>>>
        };
        health::begin(self, shard, &view);
        names::begin(self, shard, &view);
        Connections { pools: Pools::new(view, Box::new(connect)) }
    }
}

/// A client of an [`Upstream`] on one shard, which lends connections of any protocol. See
/// [`Upstream::connections`].
pub struct Connections<C: Connection> {
    pub(super) pools: Rc<Pools<C>>,
}

impl<C: Connection> Clone for Connections<C> {
    fn clone(&self) -> Connections<C> {
        Connections { pools: self.pools.clone() }
    }
}

impl<C: Connection> Connections<C> {
    /// Begins a request, which has [`Upstream::answer_timeout`] and may be tried once, unless it
    /// [says](Call::idempotent) otherwise.
    pub fn call(&self) -> Call<C> {
        Call::new(&self.pools)
    }

    /// The upstream.
    pub fn upstream(&self) -> &Upstream {
        &self.pools.view.upstream
    }
}

impl<C: Connection> fmt::Debug for Connections<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Connections").field(&self.pools.view.upstream).finish()
    }
}
