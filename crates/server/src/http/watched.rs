//! What stands between hyper and a service, so that a request is watched and can be ended.

use std::any::Any;
use std::io::IoSlice;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use hyper::body::{Body, Buf, Bytes, Frame, Incoming, SizeHint};
use hyper::header::{CONNECTION, HeaderValue, RETRY_AFTER};
use hyper::rt::Executor;
use hyper::service::Service;
use hyper::{Request, Response, StatusCode, Version};
use pin_project_lite::pin_project;
use ringserve_core::internals::OWNED_BYTES_MIN;

use super::host::has_valid_host;
#[cfg(feature = "websocket")]
use super::upgrade::{self, Offered};
use super::watch::{Excess, Watch, Watching, request_bytes};

/// There are no upgrades.
#[cfg(not(feature = "websocket"))]
enum Offered {}

use crate::shard::handle::Shard;

/// Which requests may be shed.
pub(super) type MayShed = Rc<dyn Fn(&Request<Incoming>) -> bool>;

/// A service each of whose requests is watched.
pub(super) struct Watched<S> {
    service: S,
    watch: Rc<Watch>,
    may_shed: Option<MayShed>,
    shard: Shard,
}

impl<S> Watched<S> {
    pub(super) fn new(service: S, watch: Rc<Watch>, may_shed: Option<MayShed>, shard: &Shard) -> Watched<S> {
        Watched { service, watch, may_shed, shard: shard.clone() }
    }

    /// Why a request is answered without the service, if it is.
    #[inline]
    fn refuses(&self, request: &Request<Incoming>) -> Option<Refused> {
        if !has_valid_host(request) {
            return Some(Refused::Host);
        }
        let may_shed = self.may_shed.as_ref()?;
        if self.shard.sheds().is_none() || !may_shed(request) {
            return None;
        }
        self.watch.count_shed();
        self.shard.note_shed();
        // Within twice the time in which a stage is left, and not all at once.
        Some(Refused::Busy { retry_after: 1 + (self.shard.random() % 4) as u8 })
    }
}

/// Why a request is answered without the service.
#[derive(Clone, Copy, Debug)]
pub(super) enum Refused {
    /// It has not one host that is valid.
    Host,
    /// It is shed, and may come again after so many seconds.
    Busy { retry_after: u8 },
}

impl Refused {
    #[cold]
    fn answer<B>(self) -> Response<Tracked<B>> {
        let mut response = Response::new(Tracked::Nothing);
        let (status, name, value) = match self {
            // Where the next request begins may be another's opinion.
            Refused::Host => (StatusCode::BAD_REQUEST, CONNECTION, HeaderValue::from_static("close")),
            // Its connection stays.
            Refused::Busy { retry_after } => {
                (StatusCode::SERVICE_UNAVAILABLE, RETRY_AFTER, u16::from(retry_after).into())
            }
        };
        *response.status_mut() = status;
        response.headers_mut().insert(name, value);
        response
    }
}

impl<S, B> Service<Request<Incoming>> for Watched<S>
where
    S: Service<Request<Incoming>, Response = Response<B>>,
    B: 'static,
{
    type Response = Response<Tracked<B>>;
    type Error = S::Error;
    type Future = Answering<S::Future>;

    #[cfg_attr(not(feature = "websocket"), expect(unused_mut, reason = "upgrades change it"))]
    fn call(&self, mut request: Request<Incoming>) -> Answering<S::Future> {
        // hyper extends a request that asks for something else than HTTP, whose bytes may come then.
        let upgrades = cfg!(feature = "websocket") && !request.extensions().is_empty();
        let streams = upgrades && request.version() == Version::HTTP_2;
        if !self.watch.is_http2() {
            self.watch.note_request(request_bytes(&request));
        }
        let watching = self.watch.begin(!request.body().is_end_stream() || streams);
        if let Some(refused) = self.refuses(&request) {
            return Answering { future: None, watching, offered: None, refused };
        }
        #[cfg(feature = "websocket")]
        let offered = upgrades.then(|| upgrade::offer(&mut request, &self.shard, &self.watch, &watching));
        #[cfg(not(feature = "websocket"))]
        let offered = None;
        Answering { future: Some(self.service.call(request)), watching, offered, refused: Refused::Host }
    }
}

pin_project! {
    /// The future of a service, which answers by itself when the request is beyond its bounds, or shed.
    pub(super) struct Answering<F> {
        // `None` for a request that is refused.
        #[pin]
        future: Option<F>,
        watching: Rc<Watching>,
        offered: Option<Offered>,
        refused: Refused,
    }
}

impl<F, B, E> Future for Answering<F>
where
    F: Future<Output = Result<Response<B>, E>>,
{
    type Output = Result<Response<Tracked<B>>, E>;

    fn poll(self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        if let Some(excess) = this.watching.excess() {
            this.watching.set_answered();
            return Poll::Ready(Ok(refusal(excess, this.watching.is_http2())));
        }
        let Some(future) = this.future.as_pin_mut() else {
            this.watching.set_answered();
            let mut response = this.refused.answer();
            say_the_end(&mut response, this.watching);
            return Poll::Ready(Ok(response));
        };
        let mut response = ready!(future.poll(task))?;
        say_the_end(&mut response, this.watching);
        this.watching.set_answered();
        #[cfg(feature = "websocket")]
        if this.offered.take().is_some() {
            if response.status() != StatusCode::SWITCHING_PROTOCOLS {
                this.watching.forget_upgrade();
            }
            if this.watching.is_http2() && response.status().is_success() {
                // hyper makes a task that sends what comes instead, before another request begins.
                this.watching.await_task();
            }
        }
        let watching = this.watching.clone();
        Poll::Ready(Ok(response.map(|body| Tracked::Of { body, watching })))
    }
}

/// The last answer of a connection of HTTP/1.1 says so, while the server drains.
#[inline]
fn say_the_end<B>(response: &mut Response<B>, watching: &Watching) {
    if watching.is_last() && response.status() != StatusCode::SWITCHING_PROTOCOLS {
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
}

/// The answer to a request beyond its bounds.
fn refusal<B>(excess: Excess, http2: bool) -> Response<Tracked<B>> {
    let mut response = Response::new(Tracked::Nothing);
    *response.status_mut() = match excess {
        Excess::RequestBody => StatusCode::REQUEST_TIMEOUT,
        _ => StatusCode::SERVICE_UNAVAILABLE,
    };
    if !http2 {
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    }
    response
}

pin_project! {
    /// The body of a response, whose pieces are counted until hyper is done with them.
    #[project = TrackedProjection]
    pub(super) enum Tracked<B> {
        Of {
            #[pin]
            body: B,
            watching: Rc<Watching>,
        },
        Nothing,
    }
}

impl<B: Body + 'static> Body for Tracked<B> {
    type Data = Piece<B::Data>;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        task: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Piece<B::Data>>, B::Error>>> {
        let TrackedProjection::Of { body, watching } = self.project() else { return Poll::Ready(None) };
        if watching.waits_for_room() || watching.waits_for_memory(body.size_hint().lower(), task) {
            return Poll::Pending;
        }
        let frame = ready!(body.poll_frame(task));
        Poll::Ready(frame.map(|frame| Ok(frame?.map_data(|data| Piece::new(data, watching.clone())))))
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Tracked::Of { body, .. } => body.is_end_stream(),
            Tracked::Nothing => true,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Tracked::Of { body, .. } => body.size_hint(),
            Tracked::Nothing => SizeHint::with_exact(0),
        }
    }
}

/// A piece of a body.
pub(super) struct Piece<D: Buf> {
    data: D,
    watching: Rc<Watching>,
    /// Where it began, if its bytes are shared.
    shared: Option<usize>,
}

impl<D: Buf + 'static> Piece<D> {
    fn new(data: D, watching: Rc<Watching>) -> Piece<D> {
        watching.hold(data.remaining());
        let bytes = (&data as &dyn Any).downcast_ref::<Bytes>();
        let shared = bytes.filter(|bytes| bytes.len() >= OWNED_BYTES_MIN).map(|bytes| {
            watching.share(bytes);
            bytes.as_ptr().addr()
        });
        Piece { data, watching, shared }
    }
}

impl<D: Buf> Buf for Piece<D> {
    fn remaining(&self) -> usize {
        self.data.remaining()
    }

    fn chunk(&self) -> &[u8] {
        self.data.chunk()
    }

    fn chunks_vectored<'a>(&'a self, pieces: &mut [IoSlice<'a>]) -> usize {
        self.data.chunks_vectored(pieces)
    }

    fn advance(&mut self, bytes: usize) {
        self.data.advance(bytes);
        self.watching.let_go(bytes, true);
    }

    fn copy_to_bytes(&mut self, len: usize) -> Bytes {
        let bytes = self.data.copy_to_bytes(len);
        self.watching.let_go(len, true);
        bytes
    }
}

impl<D: Buf> Drop for Piece<D> {
    fn drop(&mut self) {
        self.watching.let_go(self.data.remaining(), false);
        if let Some(address) = self.shared {
            self.watching.unshare(address);
        }
    }
}

/// Runs the streams of one connection of HTTP/2 on its shard.
#[derive(Clone)]
pub(super) struct StreamExecutor {
    shard: Shard,
    watch: Rc<Watch>,
}

impl StreamExecutor {
    pub(super) fn new(shard: &Shard, watch: Rc<Watch>) -> StreamExecutor {
        StreamExecutor { shard: shard.clone(), watch }
    }
}

impl<F: Future<Output = ()> + 'static> Executor<F> for StreamExecutor {
    fn execute(&self, future: F) {
        match self.watch.take_next() {
            Some(watching) => {
                watching.set_task(true);
                self.shard.spawn(WatchedStream { future, watching });
            }
            // What comes of CONNECT.
            None => {
                self.shard.spawn(future);
            }
        }
    }
}

pin_project! {
    /// One stream of HTTP/2. When it ends early, hyper's future is dropped, and that resets the stream.
    struct WatchedStream<F> {
        #[pin]
        future: F,
        watching: Rc<Watching>,
    }
}

impl<F: Future<Output = ()>> Future for WatchedStream<F> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<()> {
        let this = self.project();
        let ends = this.watching.is_answered() && this.watching.excess().is_some();
        if !ends && this.future.poll(task).is_pending() {
            this.watching.keep_waker(task.waker());
            return Poll::Pending;
        }
        this.watching.set_task(false);
        Poll::Ready(())
    }
}
