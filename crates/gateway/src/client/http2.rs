//! A connection to a backend of HTTP/2, over hyper's.

use std::io;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::body::Incoming;
use hyper::client::conn::http2::{Builder, SendRequest};
use hyper::http::uri::Scheme;
use hyper::{Request, Response};
use ringserve_server::http::{ShardExecutor, ShardTimer};
use ringserve_server::net::is_local_failure;
use ringserve_server::task::JoinHandle;
use ringserve_server::{Shard, Stream};
use ringserve_upstream::{Connection, IdleEvent};

use super::connection::{HEAD_BYTES_MAX, SendError, io_error};
use super::news::News;
use super::request_body::RequestBody;

/// Bytes of an answer that a backend may send before the client took them.
const WINDOW: u32 = 256 << 10;

/// After this time without a byte a backend is asked whether it is still there, while a request
/// waits for it.
const PING_AFTER: Duration = Duration::from_secs(10);

/// The time for the answer to that.
const PING_MAX: Duration = Duration::from_secs(10);

/// A connection with a request at a time, whose drop closes it.
pub(crate) struct Http2Connection {
    pub(super) scheme: Scheme,
    sender: SendRequest<RequestBody>,
    news: Rc<News>,
    /// hyper's side of it.
    task: JoinHandle<()>,
}

impl Http2Connection {
    /// Speaks HTTP/2 on a stream, by tasks of the shard.
    pub(crate) async fn begin(
        shard: &Shard,
        timer: &ShardTimer,
        scheme: Scheme,
        stream: Stream,
    ) -> io::Result<Http2Connection> {
        let mut builder = Builder::new(ShardExecutor::new(shard));
        builder
            .timer(timer.clone())
            .initial_stream_window_size(WINDOW)
            .initial_connection_window_size(WINDOW)
            .max_header_list_size(HEAD_BYTES_MAX as u32)
            .keep_alive_interval(PING_AFTER)
            .keep_alive_timeout(PING_MAX);
        let (sender, connection) = builder.handshake(stream).await.map_err(io::Error::other)?;
        let news = Rc::new(News::default());
        let of_task = news.clone();
        let task = shard.spawn(async move {
            _ = connection.await;
            of_task.end(IdleEvent::Ended);
        });
        Ok(Http2Connection { scheme, sender, news, task })
    }

    /// Sends a request, and waits for the head of its answer.
    pub(crate) async fn send(
        &mut self,
        request: Request<RequestBody>,
    ) -> Result<Response<Incoming>, SendError> {
        let sent = self.sender.try_send_request(request).await;
        sent.map_err(|failed| SendError::of(failed, send_error))
    }
}

impl Drop for Http2Connection {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Why a request that was handed to hyper has no answer.
fn send_error(error: hyper::Error) -> SendError {
    let cause = std::error::Error::source(&error).and_then(|cause| cause.downcast_ref::<h2::Error>());
    let Some(cause) = cause else {
        return SendError::Lost { is_ours: io_error(&error).is_some_and(is_local_failure) };
    };
    if let Some(error) = cause.get_io() {
        return SendError::Lost { is_ours: is_local_failure(error) };
    }
    // RFC 9113, 8.7: of what a backend refuses, or leaves out as it goes, nothing was done.
    let is_refused = cause.reason() == Some(h2::Reason::REFUSED_STREAM);
    if cause.is_remote() && (is_refused || cause.is_go_away() && cause.reason() == Some(h2::Reason::NO_ERROR))
    {
        return SendError::Refused;
    }
    if cause.is_library() { SendError::Malformed(error) } else { SendError::Lost { is_ours: false } }
}

impl Connection for Http2Connection {
    fn poll_idle(&mut self, task: &mut Context<'_>) -> Poll<IdleEvent> {
        match self.news.poll(task) {
            Poll::Pending if self.sender.is_closed() => Poll::Ready(IdleEvent::Ended),
            news => news,
        }
    }
}
