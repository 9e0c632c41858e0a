//! Services: the trait that users implement, and what a factory may return.

use std::error::Error;
use std::fmt;
use std::future::{Future, ready};
use std::pin::Pin;

use ringserve_core::framing::{AsFramingState, FrameError, TypedFraming};
use ringserve_core::{Frame, Limits};

use super::closed::{CloseCx, Failure};
use super::cx::Cx;
use super::handle::Shard;
use super::opening::{OpenCx, Refusal, Session, by_default};
use crate::overload::{Load, Shed};

/// Handles the frames of a server.
///
/// Each shard has one value, made on the shard's thread by the factory that
/// [`Server::serve`](crate::Server::serve) is given. All calls come from that thread, so a service
/// need not be `Send` and may keep its state in `Cell` and `RefCell`.
///
/// ```
/// use ringserve::{Cx, Frame, Service};
///
/// struct Echo;
///
/// impl Service for Echo {
///     type Session = ();
///     type Error = std::convert::Infallible;
///
///     async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Self::Error> {
///         cx.reply(frame);
///         Ok(())
///     }
/// }
/// ```
///
/// `H` is the head that the framing hands over with each frame ([`TypedFraming::Head`]); most
/// framings have none. Wrap a service of frames with heads in [`with_heads`].
pub trait Service<H = ()>: Sized + 'static {
    /// State of one connection, made by [`open`](Service::open). Several calls may use it at once,
    /// so they share it: changes need `Cell` or `RefCell`, as in the service itself.
    type Session: Session;

    /// The error of a call. The connection is closed after its queued replies, and the error is
    /// logged once.
    type Error: fmt::Display;

    /// Keeps an [account](CloseCx::account) of each connection, for access logs and bills. It costs
    /// 56 bytes for each connection, in chunks of 256 connections, and a few instructions for each
    /// frame. Off by default, at no cost.
    const ACCOUNTS: bool = false;

    /// True if frames are pieces of a stream of bytes that have to be handled in order, as a
    /// codec's are. A middleware has the value of the service inside. Default false.
    const PIECES: bool = false;

    /// True for a middleware in which a call may wait while later calls of its connection overtake
    /// it. Around a service of [`PIECES`](Service::PIECES) a connection may then have one call at a
    /// time: a server with [`Limits::calls_in_flight_max`] above 1 does not start. Default false.
    const REORDERS: bool = false;

    /// Makes the session of a connection that was accepted, or refuses the connection. A greeting
    /// or a rejection message may be queued here. By default the session is made by `Default`; a
    /// service whose session is not `Default` has to write this method.
    ///
    /// `open` may wait, for a look-up or an authentication. Meanwhile received frames wait, up to
    /// [`Limits::inbox_bytes_high`]. A future that does not wait is never stored and allocates
    /// nothing.
    ///
    /// A pending future is dropped, without a call of [`close`](Service::close), when
    /// [`Limits::open_timeout`] is over, the peer resets the connection, or the server ends it. The
    /// peer's FIN does not drop it, since requests may have arrived before the FIN. A drain closes
    /// the connection if the peer has sent nothing yet, and otherwise answers its frames.
    ///
    /// # Errors
    /// A [`Refusal`] closes the connection after the queued replies, without a call of
    /// [`close`](Service::close).
    fn open(&self, opening: &OpenCx<'_>) -> impl Future<Output = Result<Self::Session, Refusal>> {
        const {
            assert!(
                Self::Session::DEFAULT.is_some(),
                "a session without `Default` is made by `Service::open`: write that method"
            );
        }
        let _ = opening;
        ready(by_default())
    }

    /// Handles one frame. By default the next frame of the connection is handed over when this
    /// future is done ([`Limits::calls_in_flight_max`]); other connections go on meanwhile. A
    /// future that never waits is never stored: it runs straight from the completion, without an
    /// allocation.
    ///
    /// The end of the connection drops a pending future.
    ///
    /// # Errors
    /// An error closes this connection after its queued replies.
    fn call(
        &self,
        cx: &Cx<'_, Self::Session>,
        frame: Frame<H>,
    ) -> impl Future<Output = Result<(), Self::Error>>;

    /// Decides about a frame that an overloaded shard would shed: queue the protocol's reply for
    /// "busy" here, at little cost, or let the frame be [served](Shed::Serve) all the same. Called
    /// before [`call`](Service::call), which follows only if the frame is served, from
    /// [`Load::Shedding`] on, for a share of the frames that grows with the length of the shard's
    /// turns ([`Overload`](crate::overload::Overload)). By default each frame is served.
    ///
    /// A framing may hand a message over in pieces, with a call of this method for each: serve the
    /// further pieces of a message whose first one was served.
    ///
    /// ```
    /// use ringserve::overload::{Load, Shed};
    /// use ringserve::{Cx, Frame, Service};
    ///
    /// struct Store;
    ///
    /// impl Service for Store {
    ///     type Session = ();
    ///     type Error = std::convert::Infallible;
    ///
    ///     async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Self::Error> {
    ///         cx.reply(frame);
    ///         Ok(())
    ///     }
    ///
    ///     fn shed(&self, cx: &Cx<'_, ()>, frame: &Frame, _load: Load) -> Shed {
    ///         if frame.starts_with(b"PING") {
    ///             return Shed::Serve;
    ///         }
    ///         cx.reply("-BUSY");
    ///         Shed::Answered
    ///     }
    /// }
    /// ```
    fn shed(&self, cx: &Cx<'_, Self::Session>, frame: &Frame<H>, load: Load) -> Shed {
        let _ = (cx, frame, load);
        Shed::Serve
    }

    /// Handles an error of the peer's framing. Replies queued here are sent, then the connection is
    /// closed.
    fn malformed(&self, cx: &Cx<'_, Self::Session>, error: &FrameError) {
        let _ = (cx, error);
    }

    /// Handles the first failure of a call of the connection: an error,
    /// [`Limits::handler_timeout`], or a panic. Replies queued here are sent, then the connection
    /// is closed. After a panic without such a reply it is reset. The server logs the failure, so
    /// the service need not.
    fn failed(&self, cx: &Cx<'_, Self::Session>, failure: &Failure<'_, Self::Error>) {
        let _ = (cx, failure);
    }

    /// Handles the begin of a shutdown: the moment for a goodbye. Called once for each open
    /// connection, before
    /// [`ServerLimits::drain_timeout`](crate::limits::ServerLimits::drain_timeout) resets it, and
    /// for a connection that opens later right after its `open`. A server with many connections
    /// calls it for some of them in each turn.
    ///
    /// Frames that arrived earlier may be handed over after this call. A service that closes the
    /// connection here leaves them unanswered; if it does not, the drain answers them first.
    fn draining(&self, cx: &Cx<'_, Self::Session>) {
        let _ = cx;
    }

    /// Asks a silent peer for a sign of life: queue a ping of the protocol here. Called when
    /// nothing came for [`Limits::heartbeat_interval`](crate::Limits::heartbeat_interval). Any byte
    /// is an answer; after [`Limits::heartbeats_missed_max`](crate::Limits::heartbeats_missed_max)
    /// calls without one the connection is closed. Not called while the outbox is over its high
    /// mark.
    fn heartbeat(&self, cx: &Cx<'_, Self::Session>) {
        let _ = cx;
    }

    /// Handles the end of the input of a connection that is [held open](Cx::hold_open): the peer
    /// sent FIN, and all its frames were handed over. The service has to close the connection, now
    /// or later; by default it does so now.
    fn input_ended(&self, cx: &Cx<'_, Self::Session>) {
        cx.close();
    }

    /// Handles the end of the connection. Called once for each successful [`open`](Service::open),
    /// when no future of the connection is left.
    fn close(&self, closed: &CloseCx<'_, Self::Session>) {
        let _ = closed;
    }
}

/// A value that a factory may return for a server with the framing `F`: a [`Service`],
/// [`with_heads`], [`stream`](crate::stream()), `http`, a `Result` with one of them, or
/// [`from_future`] with a future of any of these.
#[diagnostic::on_unimplemented(
    message = "a factory returns a `Service`, `stream(..)`, `http(..)`, a `Result` with one, or `from_future(..)` with a future of \
               one, and not `{Self}`",
    note = "`stream(..)` and `http(..)` take the bytes as they come: leave out `Server::framing`",
    note = "a service of frames with a head is given as `with_heads(..)`"
)]
pub trait IntoService<F: TypedFraming> {
    /// The service.
    type Service: Service<F::Head, Session: AsFramingState<F::State>>;

    /// Returns the service, or the future that makes it. On an error the server does not start.
    ///
    /// # Errors
    /// Those of the factory and of the future.
    fn into_service(self, shard: &Shard) -> Result<FactoryOutput<Self::Service>, FactoryError>;

    /// The names of the protocols that the service speaks, as TLS knows them (ALPN), the preferred
    /// one first.
    #[doc(hidden)]
    fn protocols() -> &'static [&'static str] {
        &[]
    }

    /// Switches off the limits that do not apply to such a service.
    #[doc(hidden)]
    fn adjust(limits: &mut Limits) {
        let _ = limits;
    }
}

impl<S: Service<Session: AsFramingState<F::State>>, F: TypedFraming<Head = ()>> IntoService<F> for S {
    type Service = S;

    fn into_service(self, _shard: &Shard) -> Result<FactoryOutput<S>, FactoryError> {
        Ok(FactoryOutput::Now(self))
    }
}

impl<S: IntoService<F>, F: TypedFraming, E: Into<Box<dyn Error + Send + Sync>>> IntoService<F>
    for Result<S, E>
{
    type Service = S::Service;

    fn into_service(self, shard: &Shard) -> Result<FactoryOutput<S::Service>, FactoryError> {
        self.map_err(Into::into)?.into_service(shard)
    }

    fn adjust(limits: &mut Limits) {
        S::adjust(limits);
    }

    fn protocols() -> &'static [&'static str] {
        S::protocols()
    }
}

/// Makes a service of frames with heads out of `service`, for a framing that hands heads over.
///
/// ```
/// use ringserve::framing::{Cut, EncodeError, FrameError, Outbox, Payload, TypedFraming};
/// use ringserve::{Cx, Frame, Server, Service, service::with_heads};
///
/// /// A byte that says what follows, one that counts it, then as many bytes.
/// #[derive(Clone)]
/// struct Tagged;
///
/// impl TypedFraming for Tagged {
///     type State = ();
///     /// The first byte.
///     type Head = u8;
///
///     fn cut(&self, _: &mut (), bytes: &[u8], _: usize) -> Result<Cut<u8>, FrameError> {
///         let &[head, len, ref rest @ ..] = bytes else { return Ok(Cut::More(2 - bytes.len())) };
///         let len = usize::from(len);
///         Ok(match len.checked_sub(rest.len()) {
///             None | Some(0) => Cut::Frame { skip: 2, len, consumed: 2 + len, head },
///             Some(missing) => Cut::More(missing),
///         })
///     }
///
///     fn write(&self, payload: Payload<'_>, out: &mut Outbox<'_>) -> Result<(), EncodeError> {
///         out.payload(payload);
///         Ok(())
///     }
/// }
///
/// struct Log;
///
/// impl Service<u8> for Log {
///     type Session = ();
///     type Error = &'static str;
///
///     async fn call(&self, cx: &Cx<'_, ()>, frame: Frame<u8>) -> Result<(), &'static str> {
///         match frame.head() {
///             b'e' => cx.reply(frame),
///             b'q' => cx.close(),
///             _ => return Err("no such request"),
///         }
///         Ok(())
///     }
/// }
///
/// # fn main() -> Result<(), ringserve::Error> {
/// # if false {
/// Server::bind("127.0.0.1:7000").framing(Tagged).serve(|_shard| with_heads(Log))
/// # } else { Ok(()) }
/// # }
/// ```
pub fn with_heads<S>(service: S) -> WithHeads<S> {
    WithHeads(service)
}

/// A service of frames with heads, made by [`with_heads`].
#[derive(Clone, Debug)]
pub struct WithHeads<S>(S);

impl<S, F> IntoService<F> for WithHeads<S>
where
    F: TypedFraming,
    S: Service<F::Head, Session: AsFramingState<F::State>>,
{
    type Service = S;

    fn into_service(self, _shard: &Shard) -> Result<FactoryOutput<S>, FactoryError> {
        Ok(FactoryOutput::Now(self.0))
    }
}

/// The reason why a factory made no service.
#[doc(alias = "NoService")]
pub type FactoryError = Box<dyn Error + Send + Sync>;

/// The result of a factory.
#[doc(alias = "Made")]
#[non_exhaustive]
pub enum FactoryOutput<S, E = FactoryError> {
    /// A service.
    Now(S),
    /// A future that makes the service.
    Later(FactoryFuture<S, E>),
}

/// A future that makes a service, on its shard.
#[doc(alias = "Making")]
pub type FactoryFuture<S, E = FactoryError> = Pin<Box<dyn Future<Output = Result<S, E>>>>;

impl<S: 'static, E: 'static> FactoryOutput<S, E> {
    /// Applies `then` to the service or the error: now if it is there, else once the future is
    /// done.
    ///
    /// # Errors
    /// Those of `then`, if it runs now.
    pub(crate) fn map<T, G>(
        self,
        then: impl FnOnce(Result<S, E>) -> Result<T, G> + 'static,
    ) -> Result<FactoryOutput<T, G>, G> {
        Ok(match self {
            FactoryOutput::Now(service) => FactoryOutput::Now(then(Ok(service))?),
            FactoryOutput::Later(making) => FactoryOutput::Later(Box::pin(async { then(making.await) })),
        })
    }
}

impl<S, E> fmt::Debug for FactoryOutput<S, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            FactoryOutput::Now(_) => "Now",
            FactoryOutput::Later(_) => "Later",
        })
    }
}

/// Lets a factory wait: for a pool that connects, a file, another server. The output of the future
/// is anything that a factory may return at once: a service, or a `Result` with one.
///
/// ```no_run
/// use ringserve::factory::from_future;
/// use ringserve::{Cx, Frame, Server, Service, Shard, Stream, framing::Lines};
///
/// struct Echo {
///     log: Stream,
/// }
/// # impl Service for Echo {
/// #     type Session = ();
/// #     type Error = std::convert::Infallible;
/// #     async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Self::Error> {
/// #         cx.reply(frame);
/// #         Ok(())
/// #     }
/// # }
///
/// async fn echo(shard: Shard) -> std::io::Result<Echo> {
///     Ok(Echo { log: shard.connect("10.0.0.9:514").await? })
/// }
///
/// # fn main() -> Result<(), ringserve::Error> {
/// Server::bind("127.0.0.1:7000").framing(Lines::default()).serve(|shard| from_future(echo(shard.clone())))
/// # }
/// ```
///
/// The future runs on the shard's own loop, or in its [runtime](crate::Server::runtime), and may do
/// what a task of the shard may: connect, sleep, [spawn](Shard::spawn), [block
/// elsewhere](Shard::spawn_blocking). It is first polled when the factories of all services on all
/// shards have returned. So register a [`Mesh`](crate::sync::Mesh) in the factory and not in the
/// future: then all shards are in it by the first poll. A shard that has not registered is
/// [gone](crate::sync::AskError::Gone) for questions.
///
/// No shard accepts a connection before all services of all shards exist: peers wait in the
/// kernel's queue. The first error or panic ends the start and drops every other future. So does
/// the order to stop: SIGINT and SIGTERM in [`serve`](crate::Server::serve), the future of
/// [`run_until`](crate::Server::run_until),
/// [`ServerControl::shutdown`](crate::ServerControl::shutdown). After 10 s a log line names the
/// services that the start waits for;
/// [`ServerLimits::start_timeout`](crate::limits::ServerLimits::start_timeout) bounds the wait.
#[doc(alias = "starting")]
pub fn from_future<Fut: Future>(future: Fut) -> FromFuture<Fut> {
    FromFuture(future)
}

/// A future that makes a service, wrapped by [`from_future`].
#[doc(alias = "Starting")]
#[derive(Debug)]
pub struct FromFuture<Fut>(Fut);

impl<F, Fut, Make> IntoService<F> for FromFuture<Fut>
where
    F: TypedFraming,
    Fut: Future<Output = Make> + 'static,
    Make: IntoService<F>,
{
    type Service = Make::Service;

    fn into_service(self, shard: &Shard) -> Result<FactoryOutput<Make::Service>, FactoryError> {
        let shard = shard.clone();
        Ok(FactoryOutput::Later(Box::pin(async move {
            match self.0.await.into_service(&shard)? {
                FactoryOutput::Now(service) => Ok(service),
                FactoryOutput::Later(making) => making.await,
            }
        })))
    }

    fn adjust(limits: &mut Limits) {
        Make::adjust(limits);
    }

    fn protocols() -> &'static [&'static str] {
        Make::protocols()
    }
}

/// The methods of a service that do not depend on its error, all handed to the field `service`.
macro_rules! delegate_to_service {
    ($service:ty, $head:ty) => {
        $crate::shard::face::service::delegate_to_service!(
            $service,
            $head,
            <$service as $crate::Service<$head>>::REORDERS
        );
    };
    ($service:ty, $head:ty, $reorders:expr) => {
        const ACCOUNTS: bool = <$service as $crate::Service<$head>>::ACCOUNTS;
        const PIECES: bool = <$service as $crate::Service<$head>>::PIECES;
        const REORDERS: bool = $reorders;

        fn open(
            &self,
            opening: &$crate::OpenCx<'_>,
        ) -> impl Future<Output = Result<Self::Session, $crate::Refusal>> {
            self.service.open(opening)
        }

        fn shed(
            &self,
            cx: &$crate::Cx<'_, Self::Session>,
            frame: &$crate::Frame<$head>,
            load: $crate::overload::Load,
        ) -> $crate::overload::Shed {
            self.service.shed(cx, frame, load)
        }

        fn malformed(&self, cx: &$crate::Cx<'_, Self::Session>, error: &$crate::framing::FrameError) {
            self.service.malformed(cx, error);
        }

        fn draining(&self, cx: &$crate::Cx<'_, Self::Session>) {
            self.service.draining(cx);
        }

        fn heartbeat(&self, cx: &$crate::Cx<'_, Self::Session>) {
            self.service.heartbeat(cx);
        }

        fn input_ended(&self, cx: &$crate::Cx<'_, Self::Session>) {
            self.service.input_ended(cx);
        }

        fn close(&self, closed: &$crate::CloseCx<'_, Self::Session>) {
            self.service.close(closed);
        }
    };
}
pub(crate) use delegate_to_service;
