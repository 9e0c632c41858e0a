//! A connection to a backend of HTTP/1.1, over hyper's.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::io;
use std::rc::Rc;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::Incoming;
use hyper::client::conn::TrySendError;
use hyper::client::conn::http1::{Builder, SendRequest};
use hyper::{Request, Response};
use ringserve_server::net::is_local_failure;
use ringserve_server::task::JoinHandle;
use ringserve_server::{Shard, Stream};
use ringserve_upstream::{Connection, IdleEvent};

use super::news::News;
use super::request_body::RequestBody;

/// Bytes of an answer's head at most, and what hyper reads at once of a body.
pub(super) const HEAD_BYTES_MAX: usize = 64 << 10;

/// A connection, whose drop closes it.
pub(crate) struct Http1Connection {
    sender: SendRequest<RequestBody>,
    shared: Rc<Shared>,
    /// hyper's side of it.
    task: JoinHandle<()>,
}

/// News of hyper's side.
#[derive(Default)]
struct Shared {
    news: News,
    /// Who sent a request with which the connection may become something else.
    wants_stream: Cell<bool>,
    /// The connection, and what hyper had read of it, once it did.
    stream: RefCell<Option<(Stream, Bytes)>>,
}

/// The end of a request that has no answer.
pub(crate) enum SendError {
    /// Nothing of it left.
    Unsent(Box<Request<RequestBody>>),
    /// The backend says that it did not look at it.
    Refused,
    /// Some of it left, or may have.
    Lost { is_ours: bool },
    /// The bytes that came are no answer.
    Malformed(hyper::Error),
    /// Its body broke: the client's connection did, or it is too long.
    Body,
}

impl SendError {
    /// Of what hyper gives back nothing left; else the version of HTTP says what the error is.
    pub(super) fn of(
        mut failed: TrySendError<Request<RequestBody>>,
        of_version: impl FnOnce(hyper::Error) -> SendError,
    ) -> SendError {
        match failed.take_message() {
            Some(request) => SendError::Unsent(Box::new(request)),
            None => of_version(failed.into_error()),
        }
    }
}

/// Why a request that was handed to hyper has no answer.
fn send_error(error: hyper::Error) -> SendError {
    match () {
        () if error.is_user() => SendError::Body,
        () if error.is_parse() => SendError::Malformed(error),
        () => SendError::Lost { is_ours: io_error(&error).is_some_and(is_local_failure) },
    }
}

impl Http1Connection {
    /// Speaks HTTP/1.1 on a stream, by a task of the shard.
    pub(crate) async fn begin(shard: &Shard, stream: Stream) -> io::Result<Http1Connection> {
        let mut builder = Builder::new();
        builder.max_buf_size(HEAD_BYTES_MAX);
        let (sender, connection) = builder.handshake(stream).await.map_err(io::Error::other)?;
        let shared = Rc::new(Shared::default());
        let told = shared.clone();
        let task = shard.spawn(async move {
            let mut connection = connection;
            let ended = poll_fn(|task| connection.poll_without_shutdown(task)).await;
            if told.wants_stream.get() {
                let parts = connection.into_parts();
                *told.stream.borrow_mut() = Some((parts.io, parts.read_buf));
            }
            told.news.end(match ended {
                Err(error) if is_stray(&error) => IdleEvent::Stray,
                _ => IdleEvent::Ended,
            });
        });
        Ok(Http1Connection { sender, shared, task })
    }

    /// Sends a request, and waits for the head of its answer.
    pub(crate) async fn send(
        &mut self,
        request: Request<RequestBody>,
    ) -> Result<Response<Incoming>, SendError> {
        let sent = self.sender.try_send_request(request).await;
        sent.map_err(|failed| SendError::of(failed, send_error))
    }

    /// Says that the answer to the next request may be that the connection becomes something else.
    pub(crate) fn can_switch(&self) {
        self.shared.wants_stream.set(true);
    }

    /// The stream behind an answer of 101, with what hyper had read of it.
    pub(crate) async fn stream(&mut self) -> io::Result<(Stream, Bytes)> {
        poll_fn(|task| self.shared.news.poll(task)).await;
        let taken = self.shared.stream.take();
        taken.ok_or_else(|| io::ErrorKind::ConnectionReset.into())
    }
}

impl Drop for Http1Connection {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// True for bytes that answer no request.
fn is_stray(error: &hyper::Error) -> bool {
    io_error(error).is_none() && !error.is_incomplete_message() && !error.is_canceled() && !error.is_closed()
}

pub(super) fn io_error(error: &hyper::Error) -> Option<&io::Error> {
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        if let Some(error) = error.downcast_ref() {
            return Some(error);
        }
        cause = error.source();
    }
    None
}

impl Connection for Http1Connection {
    fn poll_idle(&mut self, task: &mut Context<'_>) -> Poll<IdleEvent> {
        match self.shared.news.poll(task) {
            Poll::Pending if self.sender.is_closed() => Poll::Ready(IdleEvent::Ended),
            news => news,
        }
    }
}
