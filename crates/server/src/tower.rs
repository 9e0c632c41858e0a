//! Services of tower as services of this crate, for stacks that exist already; with the feature
//! `tower`, which is off by default.
//!
//! [`Tower`] makes a [`Service`] of any [`tower_service::Service`] that takes a [`Request`] and
//! returns a [reply](IntoReply):
//!
//! ```no_run
//! use std::convert::Infallible;
//!
//! use ringserve::tower::{Request, Tower};
//! use ringserve::{Frame, Server, framing::Lines};
//! use tower::service_fn;
//!
//! async fn echo(request: Request) -> Result<Frame, Infallible> {
//!     Ok(request.frame)
//! }
//!
//! # fn main() -> Result<(), ringserve::Error> {
//! Server::bind("127.0.0.1:7000").framing(Lines::default()).serve(|_shard| Tower::new(service_fn(echo)))
//! # }
//! ```
//!
//! # Ready, then called
//!
//! `poll_ready` is called before each `call`, with no other call in between. Calls that find the
//! service not ready wait, first in, first out; only the first of them polls, as tower's contract
//! demands.
//!
//! # No clones
//!
//! A tower service is called by `&mut`, and servers usually clone it for each connection or
//! request. Here a shard has one value and never clones it, so it need not be `Clone` or `Send`. A
//! value that clones of a layer would share, such as the permits of tower's `ConcurrencyLimit`,
//! then counts for the shard. To share it among all shards, make one service outside of the factory
//! and give each shard a clone; such a service must be `Send + Sync`.
//!
//! # Layers that need a runtime
//!
//! `tower::timeout`, `limit::RateLimit`, `retry` with a back-off and `buffer` use tokio's timer or
//! spawn on tokio: on a shard outside of tokio they panic at their first use.
//! [`TimeLimit`](crate::middleware::TimeLimit) uses the shard's own timers.
//! `limit::ConcurrencyLimit`, `load_shed`, `filter`, `util` (maps, boxes, `service_fn`) and `steer`
//! work anywhere.
//!
//! # Errors
//!
//! An error of `poll_ready` or of the response's future is an error of the call: it is logged, and
//! closes the connection. To answer with it instead, as for requests that `load_shed` rejects, map
//! it to a response by `ServiceExt::map_result`.

use std::cell::RefCell;
use std::fmt;
use std::future::poll_fn;
use std::task::Poll;

use bytes::Bytes;
use ringserve_base::peer::Peer;
use ringserve_core::{ConnId, Frame};

use crate::middleware::permits::Permits;
use crate::shard::face::cx::Cx;
use crate::shard::face::service::Service;

/// A frame with its origin.
#[derive(Debug)]
#[non_exhaustive]
pub struct Request {
    /// The frame. It does not leave its core, see [`Frame`]; for layers that need `Send`, copy it
    /// by `map_request`.
    pub frame: Frame,
    /// The sender.
    pub peer: Peer,
    /// The id of the connection, unique on its shard.
    pub id: ConnId,
}

/// A tower service as a service. See the [module](self).
pub struct Tower<T> {
    service: RefCell<T>,
    /// The right to poll the service for readiness, and to call it then.
    turn: Permits,
}

impl<T> Tower<T> {
    /// Serves each frame with `service`.
    pub fn new(service: T) -> Tower<T> {
        Tower { service: RefCell::new(service), turn: Permits::new(1) }
    }

    /// Uses the tower service. Not to be called from within it.
    ///
    /// # Panics
    /// If the service is being called.
    pub fn with<R>(&self, look: impl FnOnce(&mut T) -> R) -> R {
        look(&mut self.service.borrow_mut())
    }
}

impl<T> Service for Tower<T>
where
    T: tower_service::Service<Request> + 'static,
    T::Response: IntoReply,
    T::Error: fmt::Display,
{
    type Session = ();
    type Error = T::Error;

    async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), T::Error> {
        let mut request = Some(Request { frame, peer: cx.peer(), id: cx.id() });
        let response = {
            let _turn = self.turn.acquire().await;
            poll_fn(|task| {
                let mut service = self.service.borrow_mut();
                match service.poll_ready(task) {
                    Poll::Ready(Ok(())) => {
                        Poll::Ready(Ok(request.take().map(|request| service.call(request))))
                    }
                    Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
                    Poll::Pending => Poll::Pending,
                }
            })
            .await?
        };
        if let Some(response) = response {
            response.await?.reply(cx);
        }
        Ok(())
    }
}

impl<T: fmt::Debug> fmt::Debug for Tower<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tower").field("service", &self.service).finish_non_exhaustive()
    }
}

/// A response of a tower service that becomes replies. A service that wants more of the connection
/// than replies is a [`Service`] by itself.
pub trait IntoReply {
    /// Queues the replies, if there are any.
    fn reply<S: 'static>(self, cx: &Cx<'_, S>);
}

/// No reply.
impl IntoReply for () {
    fn reply<S: 'static>(self, _cx: &Cx<'_, S>) {}
}

/// A reply, or none.
impl<T: IntoReply> IntoReply for Option<T> {
    fn reply<S: 'static>(self, cx: &Cx<'_, S>) {
        if let Some(reply) = self {
            reply.reply(cx);
        }
    }
}

/// Several replies.
impl<T: IntoReply, const N: usize> IntoReply for [T; N] {
    fn reply<S: 'static>(self, cx: &Cx<'_, S>) {
        self.into_iter().for_each(|reply| reply.reply(cx));
    }
}

/// One frame, lent if it is large. See [`Cx::reply`].
impl IntoReply for Frame {
    fn reply<S: 'static>(self, cx: &Cx<'_, S>) {
        cx.reply(self);
    }
}

macro_rules! replies_bytes {
    ($($bytes:ty),*) => {$(
        /// One frame with these bytes.
        impl IntoReply for $bytes {
            fn reply<S: 'static>(self, cx: &Cx<'_, S>) {
                let bytes: &[u8] = self.as_ref();
                cx.reply(bytes);
            }
        }
    )*};
}

replies_bytes!(Bytes, Vec<u8>, String, &'static str, &'static [u8]);
