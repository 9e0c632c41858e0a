//! The layer between hyper and a service, so that a request is watched and can be ended.

use std::any::Any;
use std::cell::OnceCell;
use std::io::IoSlice;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, ready};

use hyper::body::{Body, Buf, Bytes, Frame, Incoming, SizeHint};
use hyper::header::{CONNECTION, HeaderValue, RETRY_AFTER};
use hyper::http::Extensions;
use hyper::rt::Executor;
use hyper::service::Service;
use hyper::{Method, Request, Response, StatusCode, Version};
use pin_project_lite::pin_project;
use ringserve_core::internals::OWNED_BYTES_MIN;

use super::access::{Logged, Site};
use super::host::has_valid_host;
use super::tunnel::Seed;
use super::upgrade::{self, Offered};
use super::watch::{Excess, SeedBytes, Watch, Watching, request_bytes};
use crate::client_info::ClientInfo;

use crate::shard::face::handle::Shard;

/// Which requests may be shed.
pub(super) type MayShed = Rc<dyn Fn(&Request<Incoming>) -> bool>;

/// The options for serving the requests of a service.
#[derive(Clone, Default)]
pub(super) struct Serving {
    pub(super) may_shed: Option<MayShed>,
    /// Each has a line in the access log.
    pub(super) logs: bool,
}

/// A service each of whose requests is watched.
pub(super) struct Watched<S> {
    service: S,
    watch: Rc<Watch>,
    serving: Serving,
    shard: Shard,
    /// The extensions of each request, once there was one: of its client; and as a map for a
    /// request that has no others.
    client: OnceCell<ClientInfo>,
    extensions: OnceCell<Extensions>,
    site: OnceCell<Rc<Site>>,
}

impl<S> Watched<S> {
    pub(super) fn new(service: S, watch: Rc<Watch>, serving: Serving, shard: &Shard) -> Watched<S> {
        let (client, extensions, site) = Default::default();
        Watched { service, watch, serving, shard: shard.clone(), client, extensions, site }
    }

    fn client(&self) -> Option<&ClientInfo> {
        if self.client.get().is_none() {
            _ = self.client.set(self.watch.client_info(self.shard.index())?);
        }
        self.client.get()
    }

    /// Tells a request who asks, which has other extensions or not.
    #[inline]
    fn introduce(&self, request: &mut Request<Incoming>, has_others: bool) {
        let Some(client) = self.client() else { return };
        if has_others {
            request.extensions_mut().insert(client.clone());
            return;
        }
        // A copy costs less than to insert into an empty map.
        let extensions = self.extensions.get_or_init(|| {
            let mut extensions = Extensions::new();
            extensions.insert(client.clone());
            extensions
        });
        *request.extensions_mut() = extensions.clone();
    }

    /// The line of a request in the access log.
    fn line(&self, request: &Request<Incoming>) -> Logged {
        let Some(client) = self.client().filter(|_| self.serving.logs) else { return Logged::default() };
        let site = self.site.get_or_init(|| Site::new(&self.shard, &self.watch, client));
        Logged::new(site, request)
    }

    /// Why a request is answered without the service, if it is.
    #[inline]
    fn refuses(&self, request: &Request<Incoming>) -> Option<Refused> {
        if !has_valid_host(request) {
            return Some(Refused::Invalid);
        }
        let may_shed = self.serving.may_shed.as_ref()?;
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
    Invalid,
    /// It is shed, and may come again after `retry_after` seconds.
    Busy { retry_after: u8 },
}

impl Refused {
    #[cold]
    fn answer<B>(self) -> Response<Tracked<B>> {
        let mut response = Response::new(Tracked::Nothing);
        let (status, name, value) = match self {
            // Where the next request begins may be another's opinion.
            Refused::Invalid => (StatusCode::BAD_REQUEST, CONNECTION, HeaderValue::from_static("close")),
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
    B: Body + 'static,
{
    type Response = Response<Tracked<B>>;
    type Error = S::Error;
    type Future = Answering<S::Future>;

    fn call(&self, mut request: Request<Incoming>) -> Answering<S::Future> {
        // hyper extends a request that asks for something else than HTTP, whose bytes may come
        // then.
        let upgrades = !request.extensions().is_empty();
        let streams = upgrades && request.version() == Version::HTTP_2;
        if !self.watch.is_http2() {
            self.watch.note_request(request_bytes(&request));
        }
        let watching = self.watch.begin(!request.body().is_end_stream() || streams);
        let line = self.line(&request);
        if let Some(refused) = self.refuses(&request) {
            return Answering { future: None, watching, switch: None, refused, line };
        }
        let switch = if upgrades { Some(self.switch(&mut request, &watching)) } else { None };
        self.introduce(&mut request, upgrades);
        Answering {
            future: Some(self.service.call(request)),
            watching,
            switch,
            refused: Refused::Invalid,
            line,
        }
    }
}

/// The continuation of a connection, or a stream of HTTP/2, where its request is answered so.
struct Switch {
    is_connect: bool,
    /// With HTTP/1.1, and what it holds; `None` where the service was promised nothing.
    seed: Option<(Seed, SeedBytes)>,
    /// A number by which the service may find its connection, until it answered.
    _offered: Offered,
}

impl<S> Watched<S> {
    #[cold]
    fn switch(&self, request: &mut Request<Incoming>, watching: &Rc<Watching>) -> Box<Switch> {
        Box::new(Switch {
            is_connect: request.method() == Method::CONNECT,
            seed: if watching.is_http2() {
                None
            } else {
                Seed::plant(request).map(|seed| (seed, SeedBytes::hold(&self.watch)))
            },
            _offered: upgrade::offer(request.extensions_mut(), &self.shard, &self.watch, watching),
        })
    }
}

impl Switch {
    /// True if this is the answer with which something else than HTTP begins.
    fn begins_with(&self, status: StatusCode, is_http2: bool) -> bool {
        (self.is_connect && status.is_success()) || (!is_http2 && status == StatusCode::SWITCHING_PROTOCOLS)
    }

    /// The service answered, and something else begins or not.
    fn settle(self, begins: bool, watching: &Rc<Watching>) {
        if !begins {
            watching.forget_upgrade();
        } else if watching.is_http2() {
            // hyper makes a task that sends what comes instead, before another request begins.
            watching.await_task();
            watching.set_upgraded();
        } else if let Some((seed, _)) = self.seed {
            watching.begins(seed);
        }
    }
}

pin_project! {
    /// The future of a service, which answers by itself when the request is beyond its bounds, or
    /// shed.
    pub(super) struct Answering<F> {
        // `None` for a request that is refused.
        #[pin]
        future: Option<F>,
        watching: Rc<Watching>,
        // Few have one, and all are moved with it.
        switch: Option<Box<Switch>>,
        refused: Refused,
        line: Logged,
    }
}

impl<F, B, E> Future for Answering<F>
where
    F: Future<Output = Result<Response<B>, E>>,
    B: Body + 'static,
{
    type Output = Result<Response<Tracked<B>>, E>;

    fn poll(self: Pin<&mut Self>, task: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let instead = match (this.watching.excess(), this.future.as_pin_mut()) {
            (Some(excess), _) => refusal(excess, this.watching.is_http2()),
            (None, None) => this.refused.answer(),
            (None, Some(future)) => {
                let response = ready!(future.poll(task))?;
                let switch = this.switch.take();
                return Poll::Ready(Ok(answered(response, this.watching, switch, std::mem::take(this.line))));
            }
        };
        this.watching.set_answered();
        Poll::Ready(Ok(in_its_place(instead, this.watching, std::mem::take(this.line))))
    }
}

/// The service answered.
#[inline]
fn answered<B: Body>(
    mut response: Response<B>,
    watching: &Rc<Watching>,
    switch: Option<Box<Switch>>,
    line: Logged,
) -> Response<Tracked<B>> {
    let status = response.status();
    let begins = switch.as_ref().is_some_and(|switch| switch.begins_with(status, watching.is_http2()));
    if !begins {
        say_the_end(&mut response, watching);
    }
    watching.set_answered();
    if let Some(switch) = switch {
        switch.settle(begins, watching);
    }
    line.answered(&response);
    let watching = watching.clone();
    response.map(|body| Tracked::Of { body, watching, line })
}

/// An answer that is not the service's.
#[cold]
fn in_its_place<B: Body + 'static>(
    mut response: Response<Tracked<B>>,
    watching: &Watching,
    line: Logged,
) -> Response<Tracked<B>> {
    say_the_end(&mut response, watching);
    line.answered(&response);
    response
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
            line: Logged,
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
        let TrackedProjection::Of { mut body, watching, line } = self.project() else {
            return Poll::Ready(None);
        };
        if watching.waits_for_room() || watching.waits_for_memory(body.size_hint().lower(), task) {
            return Poll::Pending;
        }
        let frame = ready!(body.as_mut().poll_frame(task)).transpose().inspect_err(|_| watching.cut_off())?;
        line.made(frame.as_ref(), &*body);
        let piece = |data| Piece::new(data, watching.clone(), line.clone());
        Poll::Ready(frame.map(|frame| Ok(frame.map_data(piece))))
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
    line: Logged,
    /// The address of its beginning, if its bytes are shared.
    shared: Option<usize>,
}

impl<D: Buf + 'static> Piece<D> {
    fn new(data: D, watching: Rc<Watching>, line: Logged) -> Piece<D> {
        watching.hold(data.remaining());
        line.piece(data.remaining());
        let bytes = (&data as &dyn Any).downcast_ref::<Bytes>();
        let shared = bytes.filter(|bytes| bytes.len() >= OWNED_BYTES_MIN).map(|bytes| {
            watching.share(bytes);
            bytes.as_ptr().addr()
        });
        Piece { data, watching, line, shared }
    }
}

impl<D: Buf> Piece<D> {
    /// The connection has bytes of it.
    fn sent(&self, bytes: usize) {
        self.watching.let_go(bytes, true);
        self.line.sent(bytes);
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
        self.sent(bytes);
    }

    fn copy_to_bytes(&mut self, len: usize) -> Bytes {
        let bytes = self.data.copy_to_bytes(len);
        self.sent(len);
        bytes
    }
}

impl<D: Buf> Drop for Piece<D> {
    fn drop(&mut self) {
        let left = self.data.remaining();
        // Mostly all of it was sent.
        if left > 0 {
            self.watching.let_go(left, false);
        }
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
                watching.begin_task();
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
    /// One stream of HTTP/2. When it ends early, hyper's future is dropped, and that resets the
    /// stream.
    struct WatchedStream<F> {
        #[pin]
        future: F,
        watching: Rc<Watching>,
    }

    impl<F> PinnedDrop for WatchedStream<F> {
        fn drop(this: Pin<&mut Self>) {
            this.watching.end_task();
        }
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
        Poll::Ready(())
    }
}
