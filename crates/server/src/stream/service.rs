//! The service below a stream, and the results of its future.

use std::cell::RefCell;
use std::convert::Infallible;
use std::fmt;
use std::future::{Future, poll_fn, ready};
use std::rc::Rc;

use ringserve_base::lines::LineLimit;
use ringserve_base::lines::info;
use ringserve_base::peer::Peer;
use ringserve_core::framing::Raw;
use ringserve_core::{ConnHead, Frame, Limits};

use super::byte_stream::Stream;
use crate::shard::face::closed::CloseCx;
use crate::shard::face::cx::Cx;
use crate::shard::face::handle::Shard;
use crate::shard::face::opening::{OpenCx, Refusal};
use crate::shard::face::service::{FactoryError, FactoryOutput, IntoService, Service};
use crate::shard::tasks::session::StreamSession;
use crate::shard::tasks::spawned::ResetsOnPanic;

/// The result of a [`Stream`](crate::Stream) handler: nothing, or a `Result` whose error is logged
/// and closes the connection as [`HandlerError`](crate::CloseReason::HandlerError).
pub trait StreamResult {
    /// The error of a handler.
    type Error: fmt::Display;

    /// The error, if there is one.
    fn error(self) -> Option<Self::Error>;
}

impl StreamResult for () {
    type Error = Infallible;

    fn error(self) -> Option<Self::Error> {
        None
    }
}

impl<T, E: fmt::Display> StreamResult for Result<T, E> {
    type Error = E;

    fn error(self) -> Option<E> {
        self.err()
    }
}

/// Serves connections as streams of bytes instead of frames. A factory returns it. `handler` is
/// called for each connection of the shard; its future runs on that shard and need not be `Send`.
///
/// All [`Limits`] apply but [`Limits::handler_timeout`] and [`Limits::calls_in_flight_max`]: a
/// stream may take as long as it likes. For [`Limits::first_frame_timeout`] the first byte counts.
/// A panic resets only its connection.
///
/// A handler may return `()` or a `Result` of any error that can be displayed. If it ends with a
/// bare `Ok(())` after a `?`, the compiler cannot infer the error's type: write
/// `std::io::Result::Ok(())`.
///
/// ```no_run
/// use ringserve::{Server, Stream, stream};
///
/// # fn main() -> Result<(), ringserve::Error> {
/// Server::bind("127.0.0.1:7000").serve(|_shard| {
///     stream(async |mut stream: Stream| {
///         while let Some(bytes) = stream.read_frame().await? {
///             stream.queue(bytes);
///             stream.ready().await?;
///         }
///         std::io::Result::Ok(())
///     })
/// })
/// # }
/// ```
pub fn stream<H, R>(handler: H) -> StreamService<H>
where
    H: AsyncFn(Stream) -> R + 'static,
    R: StreamResult + 'static,
{
    StreamService(handler)
}

/// A handler of streams as a service, made by [`stream`].
pub struct StreamService<H>(H);

impl<H, R> IntoService<Raw> for StreamService<H>
where
    H: AsyncFn(Stream) -> R + 'static,
    R: StreamResult + 'static,
{
    type Service = Streams<StreamService<H>>;

    fn into_service(self, shard: &Shard) -> Result<FactoryOutput<Self::Service>, FactoryError> {
        Ok(FactoryOutput::Now(Streams::new(shard, self)))
    }

    fn adjust(limits: &mut Limits) {
        adjust(limits);
    }
}

impl<H, R> HandleStream for StreamService<H>
where
    H: AsyncFn(Stream) -> R + 'static,
    R: StreamResult + 'static,
{
    type Result = R;

    fn handle(&self, stream: Stream) -> impl Future<Output = R> {
        (self.0)(stream)
    }
}

impl<H> fmt::Debug for StreamService<H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StreamService")
    }
}

/// A call waits here as long as its bytes are unread, which may be forever, and keeps their order.
pub(crate) fn adjust(limits: &mut Limits) {
    limits.handler_timeout = None;
    limits.calls_in_flight_max = 1;
}

/// The handler of a shard's streams.
pub trait HandleStream: 'static {
    /// The result of one connection.
    type Result: StreamResult;

    /// Serves one connection to its end.
    fn handle(&self, stream: Stream) -> impl Future<Output = Self::Result>;
}

/// Runs `handler` for each connection of a shard.
pub struct Streams<H> {
    handler: Rc<Handler<H>>,
    shard: Shard,
}

struct Handler<H> {
    handler: H,
    errors: RefCell<LineLimit>,
}

impl<H> Streams<H> {
    pub(crate) fn new(shard: &Shard, handler: H) -> Streams<H> {
        let handler = Handler { handler, errors: RefCell::default() };
        Streams { handler: Rc::new(handler), shard: shard.clone() }
    }
}

impl<H: HandleStream> Service for Streams<H> {
    type Session = StreamSession;
    type Error = Infallible;

    fn open(&self, opening: &OpenCx<'_>) -> impl Future<Output = Result<StreamSession, Refusal>> {
        let head = opening.head();
        head.hold_open();
        head.read_on();
        let session = StreamSession::default();
        let future = run(self.handler.clone(), head.clone(), self.shard.clone());
        session.task.set(Some(self.shard.tasks().spawn(Box::pin(future))));
        ready(Ok(session))
    }

    async fn call(&self, cx: &Cx<'_, StreamSession>, frame: Frame) -> Result<(), Infallible> {
        let session = cx.session();
        session.put(frame.into_lease());
        session.run_reader(self.shard.tasks());
        let mut first = true;
        poll_fn(|task| {
            let all_read = session.poll_all_read(task);
            if all_read.is_pending() && std::mem::take(&mut first) {
                session.spill();
            }
            all_read
        })
        .await;
        Ok(())
    }

    fn input_ended(&self, cx: &Cx<'_, StreamSession>) {
        cx.session().end_input();
        cx.session().run_reader(self.shard.tasks());
    }

    fn close(&self, closed: &CloseCx<'_, StreamSession>) {
        let session = closed.session();
        session.set_ended(closed.reason());
        let task = session.task.take();
        if let Some(task) = task {
            // One last poll shows the handler the error.
            self.shard.tasks().poll(task);
            self.shard.tasks().abort(task);
        }
        session.run_reader(self.shard.tasks());
    }
}

/// Runs a stream's handler. `head` is that of its connection, whose session is made before this is
/// polled.
async fn run<H: HandleStream>(handler: Rc<Handler<H>>, head: ConnHead, shard: Shard) {
    let Ok(shared) = head.clone().downcast::<StreamSession>() else { return };
    let _resets = ResetsOnPanic::new(head.clone(), shard.tasks().clone());
    let stream = Stream::new(shared, shard.clone());
    let result = handler.handler.handle(stream).await;
    if let Some(error) = result.error() {
        // What the peer sent may be the cause, so it is no warning.
        let told = handler.errors.borrow_mut().sample(shard.timers().now());
        if let Some(left_out) = told {
            let (id, peer) = (head.id(), Peer::of(&head));
            info!(shard = shard.index(), %id, %peer, %error, left_out, "stream failed, connection closed");
        }
        head.fail();
    }
}
