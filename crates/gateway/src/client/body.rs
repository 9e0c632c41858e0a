//! The body of an answer, which gives its connection back at its end.

use std::fmt;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use ringserve_server::Shard;
use ringserve_server::time::Sleep;
use ringserve_upstream::PooledConnection;

use super::http::HttpConnection;
use super::request_body::BodyKeeper;

/// The body of an upstream's answer. Its end gives the connection back for the next request; its
/// drop before that closes it.
pub struct UpstreamBody {
    incoming: Incoming,
    /// The connection, until the end of the body.
    held: Option<Held>,
    sleep: Option<Pin<Box<Sleep>>>,
}

/// Everything that an answer holds until its body is there.
pub(super) struct Held {
    pub(super) shard: Shard,
    pub(super) connection: PooledConnection<HttpConnection>,
    pub(super) request: BodyKeeper,
    /// The time for which the backend may pause.
    pub(super) idle_max: Duration,
    /// The backend closes the connection behind the answer.
    pub(super) is_last: bool,
    /// The bytes behind the answer are no HTTP.
    pub(super) is_switch: bool,
}

impl UpstreamBody {
    pub(super) fn new(incoming: Incoming, held: Held) -> UpstreamBody {
        let is_switch = held.is_switch;
        let mut body = UpstreamBody { incoming, held: Some(held), sleep: None };
        if body.incoming.is_end_stream() && !is_switch {
            body.end();
        }
        body
    }

    /// All of it came.
    fn end(&mut self) {
        self.sleep = None;
        let Some(held) = self.held.take() else { return };
        // An answer that came before its question was sent whole: the rest of that would be read as
        // the next one.
        if held.request.is_ended() && !held.is_last {
            held.connection.give_back();
        }
    }

    /// Takes the connection, for what follows an answer of 101.
    pub(crate) fn into_connection(mut self) -> Option<PooledConnection<HttpConnection>> {
        self.held.take().map(|held| held.connection)
    }
}

impl Drop for UpstreamBody {
    fn drop(&mut self) {
        // Of HTTP/2 the rest is one stream's, which ends with `incoming`.
        if let Some(held) = self.held.take()
            && held.connection.is_http2()
            && held.request.is_ended()
        {
            held.connection.give_back();
        }
    }
}

impl Body for UpstreamBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        task: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        let this = &mut *self;
        match Pin::new(&mut this.incoming).poll_frame(task) {
            Poll::Ready(None) => {
                this.end();
                Poll::Ready(None)
            }
            Poll::Ready(Some(Ok(frame))) => {
                this.sleep = None;
                // Nothing follows trailers, and hyper asks for nothing more.
                if frame.is_trailers() || this.incoming.is_end_stream() {
                    this.end();
                }
                Poll::Ready(Some(Ok(frame)))
            }
            Poll::Ready(Some(Err(error))) => {
                this.held = None;
                Poll::Ready(Some(Err(io::Error::other(error))))
            }
            Poll::Pending => {
                let Some(held) = &this.held else { return Poll::Pending };
                let sleep = this.sleep.get_or_insert_with(|| Box::pin(held.shard.sleep(held.idle_max)));
                if sleep.as_mut().poll(task).is_pending() {
                    return Poll::Pending;
                }
                this.held = None;
                let error = "the upstream paused for too long within its answer";
                Poll::Ready(Some(Err(io::Error::new(io::ErrorKind::TimedOut, error))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.incoming.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.incoming.size_hint()
    }
}

impl fmt::Debug for UpstreamBody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UpstreamBody").field("is_end_stream", &self.is_end_stream()).finish_non_exhaustive()
    }
}
