//! Services that wrap services.
//!
//! Each is a plain struct that wraps a [`Service`](crate::Service) and is one, so they stack:
//!
//! ```
//! use std::time::Duration;
//!
//! use ringserve::middleware::{Calls, ConcurrencyLimit, Observe, TimeLimit};
//! # use ringserve::{Cx, Frame, Server, Service};
//! # struct Echo;
//! # impl Service for Echo {
//! #     type Session = ();
//! #     type Error = std::convert::Infallible;
//! #     async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Self::Error> {
//! #         cx.reply(frame);
//! #         Ok(())
//! #     }
//! # }
//!
//! let calls = Calls::default();
//! let seen = calls.clone();
//! let running = Server::bind("127.0.0.1:0").start(move |_shard| {
//!     let limited = ConcurrencyLimit::new(Echo, 100);
//!     Observe::new(TimeLimit::new(limited, Duration::from_secs(5)), calls.on_shard())
//! })?;
//! assert_eq!(seen.counts().begun, 0);
//! # running.shutdown();
//! # running.wait()?;
//! # Ok::<(), ringserve::Error>(())
//! ```
//!
//! The outer middleware sees a call first: here the wait for a turn counts towards the timeout, and
//! the observer sees the whole.
//!
//! Each shard has its own, as it has its own service. A call that finishes at once passes through
//! them without an allocation, a lock or a clock read.
//!
//! To write a middleware, wrap a service and delegate every method of the trait: a method that is
//! left out does what its default does, and the inner service never sees the call.
//!
//! # With a session
//!
//! A middleware with state for each connection has a session around that of the inner service. Its
//! `open` makes both, and all other methods hand on a [`Cx`](crate::Cx::map_session) or a
//! [`CloseCx`](crate::CloseCx::map_session) of the inner session:
//!
//! ```
//! use std::cell::Cell;
//!
//! use ringserve::service::{CloseCx, Failure, OpenCx, Refusal, Session};
//! use ringserve::{Cx, Frame, Service, framing::FrameError};
//!
//! /// Answers `calls_max` calls of each connection, refuses the next one, and closes.
//! struct Allowance<S> {
//!     service: S,
//!     calls_max: u32,
//! }
//!
//! /// What a connection used of its allowance, and the session of the service inside.
//! struct Used<T> {
//!     calls: Cell<u32>,
//!     inner: T,
//! }
//!
//! impl<T: Session> Session for Used<T> {}
//!
//! impl<S: Service> Service for Allowance<S> {
//!     type Session = Used<S::Session>;
//!     type Error = S::Error;
//!     const ACCOUNTS: bool = S::ACCOUNTS;
//!     const PIECES: bool = S::PIECES;
//!     const REORDERS: bool = S::REORDERS;
//!
//!     async fn open(&self, opening: &OpenCx<'_>) -> Result<Self::Session, Refusal> {
//!         Ok(Used { calls: Cell::new(0), inner: self.service.open(opening).await? })
//!     }
//!
//!     async fn call(&self, cx: &Cx<'_, Self::Session>, frame: Frame) -> Result<(), S::Error> {
//!         let used = cx.session();
//!         if used.calls.get() == self.calls_max {
//!             cx.reply("enough");
//!             cx.close();
//!             return Ok(());
//!         }
//!         used.calls.set(used.calls.get() + 1);
//!         self.service.call(&cx.map_session(|used| &used.inner), frame).await
//!     }
//!
//!     fn failed(&self, cx: &Cx<'_, Self::Session>, failure: &Failure<'_, S::Error>) {
//!         self.service.failed(&cx.map_session(|used| &used.inner), failure);
//!     }
//!
//!     fn malformed(&self, cx: &Cx<'_, Self::Session>, error: &FrameError) {
//!         self.service.malformed(&cx.map_session(|used| &used.inner), error);
//!     }
//!
//!     fn draining(&self, cx: &Cx<'_, Self::Session>) {
//!         self.service.draining(&cx.map_session(|used| &used.inner));
//!     }
//!
//!     fn heartbeat(&self, cx: &Cx<'_, Self::Session>) {
//!         self.service.heartbeat(&cx.map_session(|used| &used.inner));
//!     }
//!
//!     fn input_ended(&self, cx: &Cx<'_, Self::Session>) {
//!         self.service.input_ended(&cx.map_session(|used| &used.inner));
//!     }
//!
//!     fn close(&self, closed: &CloseCx<'_, Self::Session>) {
//!         self.service.close(&closed.map_session(|used| &used.inner));
//!     }
//! }
//! # use ringserve::testing::TestConn;
//! # struct Counts;
//! # impl Service for Counts {
//! #     type Session = Cell<u32>;
//! #     type Error = std::convert::Infallible;
//! #     async fn call(&self, cx: &Cx<'_, Cell<u32>>, _: Frame) -> Result<(), Self::Error> {
//! #         cx.session().set(cx.session().get() + 10);
//! #         cx.reply(&cx.session().get().to_string());
//! #         Ok(())
//! #     }
//! # }
//! # let mut conn = TestConn::open(|_shard| Allowance { service: Counts, calls_max: 2 });
//! # assert_eq!(conn.call("a").replies, [b"10"]);
//! # assert_eq!(conn.call("b").replies, [b"20"]);
//! # assert_eq!(conn.call("c").replies, [b"enough"]);
//! # assert!(conn.is_closed());
//! ```
//!
//! Both sessions lie in the connection's one block, so the middleware costs each connection the
//! bytes of its part and no allocation. A pending call keeps the projected `Cx`, three pointers,
//! for each middleware.
//!
//! # Around streams
//!
//! [`stream`](crate::stream()) takes a function, so a function around it is its middleware:
//!
//! ```no_run
//! use std::io;
//! use std::time::Duration;
//!
//! use ringserve::{Server, Stream, stream};
//!
//! /// Gives each connection `time`.
//! fn within(
//!     time: Duration,
//!     handler: impl AsyncFn(Stream) -> io::Result<()> + 'static,
//! ) -> impl AsyncFn(Stream) -> io::Result<()> + 'static {
//!     async move |stream: Stream| {
//!         let shard = stream.shard().clone();
//!         shard.timeout(time, handler(stream)).await.map_err(|_elapsed| io::ErrorKind::TimedOut)?
//!     }
//! }
//!
//! async fn echo(mut stream: Stream) -> io::Result<()> {
//!     while let Some(bytes) = stream.read_frame().await? {
//!         stream.queue(bytes);
//!         stream.ready().await?;
//!     }
//!     Ok(())
//! }
//!
//! # fn main() -> Result<(), ringserve::Error> {
//! Server::bind("127.0.0.1:7000").serve(|_shard| stream(within(Duration::from_secs(3600), echo)))
//! # }
//! ```
//!
//! # Around HTTP
//!
//! `http` takes a service of hyper's, so layers of tower and others fit, by
//! `hyper_util::service::TowerToHyperService`. A function around one is a layer too:
//!
//! ```no_run
//! # use std::convert::Infallible;
//! use ringserve::http::hyper::body::{Body, Incoming};
//! use ringserve::http::hyper::header::{HeaderValue, SERVER};
//! use ringserve::http::hyper::service::{Service, service_fn};
//! use ringserve::http::hyper::{Request, Response};
//! use ringserve::{Server, http};
//!
//! /// Names the server in each answer.
//! fn named<S, B: Body>(inner: S) -> impl Service<Request<Incoming>, Response = Response<B>, Error = S::Error, Future: 'static>
//! where
//!     S: Service<Request<Incoming>, Response = Response<B>, Future: 'static> + 'static,
//!     S::Error: std::error::Error + Send + Sync,
//! {
//!     service_fn(move |request| {
//!         let answer = inner.call(request);
//!         async move {
//!             let mut answer = answer.await?;
//!             answer.headers_mut().insert(SERVER, HeaderValue::from_static("ringserve"));
//!             Ok(answer)
//!         }
//!     })
//! }
//!
//! # async fn hello(_request: Request<Incoming>) -> Result<Response<String>, Infallible> {
//! #     Ok(Response::new("hello".into()))
//! # }
//! # fn main() -> Result<(), ringserve::Error> {
//! Server::bind("127.0.0.1:8080").serve(|_shard| http(named(service_fn(hello))))
//! # }
//! ```

mod adaptive_limit;
pub(crate) mod calls;
mod concurrency_limit;
mod observe;
pub(crate) mod permits;
mod rate_limit;
mod sojourn;
mod timeout;

pub use adaptive_limit::{AdaptiveLimit, Gradient2};
pub use calls::{Calls, ShardCalls};
pub use concurrency_limit::ConcurrencyLimit;
pub use observe::{CallEnd, CallObserver, Observe};
pub use rate_limit::{RateLimit, RateLimitError};
pub use timeout::{TimeLimit, TimeLimitError};
