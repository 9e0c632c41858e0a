//! One connection.

use std::error::Error as StdError;
use std::fmt;
use std::future::{Future, poll_fn};
use std::io;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::body::{Body, Incoming};
use hyper::server::conn::{http1, http2};
use hyper::service::Service;
use hyper::{Request, Response};
use ringserve_base::lines::debug;
use ringserve_core::framing::FrameError;
use ringserve_core::{CloseReason, LimitError, Time};

use super::detect::{Detected, Replayed, detect};
use super::leaving::{Leaving, Step};
use super::options::{HttpOptions, HttpVersions};
use super::runtime::{ShardTimer, ShardTimerSleep};
use super::watch::{Bounds, Excess, Next, Watch};
use super::watched::{Serving, StreamExecutor, Watched};
use crate::shard::face::handle::Shard;
use crate::stream::byte_stream::Stream;
use crate::stream::fate::Fate;

/// Serves streams of a shard as HTTP. There is one for each shard, as it has the shard's timers.
pub struct Http {
    http1: http1::Builder,
    options: HttpOptions,
    bounds: Bounds,
    timer: ShardTimer,
    serving: Serving,
}

impl Http {
    /// For the streams of `shard`.
    ///
    /// # Errors
    /// A fault that [`HttpOptions::check`] finds. A factory that returns it keeps the server from
    /// its start.
    pub fn new(shard: &Shard, options: &HttpOptions) -> Result<Http, LimitError> {
        options.check()?;
        let timer = ShardTimer::new(shard);
        let (mut http1, bounds) = (options.http1(timer.clone()), Bounds::new(options));
        // hyper would read the clock and allocate for each request. `Heads` does so for each time
        // that the peer is waited for.
        http1.header_read_timeout(None);
        Ok(Http { http1, options: options.clone(), bounds, timer, serving: Serving::default() })
    }

    /// Says which requests may be shed, as [`HttpService::shed`](super::HttpService::shed).
    #[must_use]
    pub fn shed(self, may_shed: impl Fn(&Request<Incoming>) -> bool + 'static) -> Http {
        let serving = Serving { may_shed: Some(Rc::new(may_shed)), ..self.serving };
        Http { serving, ..self }
    }

    /// Whether each request has a line in the access log, as
    /// [`HttpService::access_log`](super::HttpService::access_log).
    #[must_use]
    pub fn access_log(self, on: bool) -> Http {
        let serving = Serving { logs: on, ..self.serving };
        Http { serving, ..self }
    }

    pub(super) fn serving(self, serving: Serving) -> Http {
        Http { serving, ..self }
    }

    /// Serves one connection with `service`, to its end. When the server shuts down it ends after
    /// what was asked until then.
    ///
    /// # Errors
    /// A fault that hyper found, of the peer's requests or of the service, or the bound of
    /// [`HttpOptions`] that the connection exceeded. A peer that vanished or was silent for too
    /// long is none.
    pub async fn serve<S, B>(&self, stream: Stream, service: S) -> Result<(), HttpError>
    where
        S: Service<Request<Incoming>, Response = Response<B>>,
        S::Future: 'static,
        S::Error: Into<Box<dyn StdError + Send + Sync>>,
        B: Body + 'static,
        B::Error: Into<Box<dyn StdError + Send + Sync>>,
    {
        let (fate, id, shard) = (stream.fate(), stream.id(), stream.shard().index());
        let Err(cause) = self.run(stream, service).await else { return Ok(()) };
        let error = HttpError { cause };
        if error.is_failure(fate.nothing_comes()) {
            fate.ends_for(error.reason());
            return Err(error);
        }
        debug!(shard, %id, %error, "HTTP ended by its peer");
        Ok(())
    }

    async fn run<S, B>(&self, stream: Stream, service: S) -> Result<(), Cause>
    where
        S: Service<Request<Incoming>, Response = Response<B>>,
        S::Future: 'static,
        S::Error: Into<Box<dyn StdError + Send + Sync>>,
        B: Body + 'static,
        B::Error: Into<Box<dyn StdError + Send + Sync>>,
    {
        let (shard, fate) = (stream.shard().clone(), stream.fate());
        let watch = Watch::new(self.bounds, Some(stream.fate()));
        let mut stream = Replayed::new(stream, watch.clone());
        let versions = self.options.versions;
        let detected = match versions {
            HttpVersions::Http1 => Detected::Other,
            _ => detect(&mut stream, self.options.header_timeout).await.map_err(Cause::FirstBytes)?,
        };
        let service = Watched::new(service, watch.clone(), self.serving.clone(), &shard);
        let timer = &self.timer;
        let (tick, head_time) = (self.bounds.tick, self.options.header_timeout);
        let watched = WatchedConnection { watch: &watch, fate, shard: &shard, timer, tick, head_time };
        match (detected, versions) {
            (Detected::Nothing, _) => Ok(()),
            (Detected::Other, HttpVersions::Http2) => Err(Cause::NotHttp2),
            (Detected::Other, _) => {
                let mut connection = self.http1.serve_connection(stream, service);
                watched.run(Pin::new(&mut connection), http1::Connection::graceful_shutdown).await?;
                if let Some(begin) = watch.take_upgrade() {
                    let parts = connection.into_parts();
                    begin(parts.io.into_stream(), parts.read_buf).await;
                }
                Ok(())
            }
            (Detected::Http2, _) => {
                watch.set_http2();
                let executor = StreamExecutor::new(&shard, watch.clone());
                let builder = self.options.build_http2(executor, self.timer.clone());
                let connection = pin!(builder.serve_connection(stream, service));
                watched.run(connection, http2::Connection::graceful_shutdown).await
            }
        }
    }
}

impl fmt::Debug for Http {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Http").field("options", &self.options).finish_non_exhaustive()
    }
}

/// A connection whose bounds are looked after.
struct WatchedConnection<'a> {
    watch: &'a Watch,
    fate: Fate,
    shard: &'a Shard,
    timer: &'a ShardTimer,
    tick: Duration,
    /// For the head of a request of HTTP/1.1.
    head_time: Option<Duration>,
}

/// Until when the head of the next request has to be there.
#[derive(Default)]
struct Heads {
    /// `None` while a request runs.
    until: Option<Time>,
    /// Bytes that were read when that was set.
    read: u64,
    /// Goes off then or earlier.
    sleep: Option<ShardTimerSleep>,
}

impl WatchedConnection<'_> {
    /// Waits for the end of the connection, to which it is ordered at its moment once the server
    /// shuts down.
    async fn run<C: Future<Output = hyper::Result<()>>>(
        &self,
        mut connection: Pin<&mut C>,
        shut_down: impl Fn(Pin<&mut C>),
    ) -> Result<(), Cause> {
        let mut leaving = Leaving::new(self.shard.stopping());
        let (mut sleep, mut rest): (Option<ShardTimerSleep>, Option<ShardTimerSleep>) = Default::default();
        let mut heads = Heads::default();
        poll_fn(|task| {
            if sleep.as_mut().is_some_and(|sleep| Pin::new(sleep).poll(task).is_ready()) {
                sleep = None;
                let next = self.watch.tick(self.fate.outbox_bytes());
                match next {
                    Next::Abort(excess) => {
                        self.fate.abort();
                        return Poll::Ready(Err(Cause::Excess(excess)));
                    }
                    Next::ShutDown => shut_down(connection.as_mut()),
                    Next::GoOn | Next::Pause => {}
                }
                if next != Next::Pause {
                    self.sets(&mut sleep, task);
                }
            }
            loop {
                if let Poll::Ready(end) = connection.as_mut().poll(task) {
                    if self.watch.is_cut_off() {
                        self.fate.abort();
                    }
                    return Poll::Ready(match self.watch.exceeded() {
                        Some(excess) => Err(Cause::Excess(excess)),
                        None => end.map_err(Cause::Hyper),
                    });
                }
                // Only now, since what is there was read.
                match leaving.poll(task, self.shard, self.timer, self.watch, &self.fate) {
                    Poll::Ready(Step::ShutDown) => shut_down(connection.as_mut()),
                    Poll::Ready(Step::Close) => return Poll::Ready(Ok(())),
                    Poll::Pending => break,
                }
            }
            if sleep.is_none() && self.watch.take_began() {
                self.sets(&mut sleep, task);
            }
            if self.watch.is_http2() {
                self.ends_rests(&mut rest, task);
            } else if self.is_silent(&mut heads, task) {
                return Poll::Ready(Err(Cause::Silent));
            }
            Poll::Pending
        })
        .await
    }

    /// True if the head of a request of HTTP/1.1 did not come in time. No request sets a sleep: one
    /// that goes off early is set again. A service may answer first and read then: what comes of
    /// that body at its rate is waited for too.
    fn is_silent(&self, heads: &mut Heads, task: &mut Context<'_>) -> bool {
        let Some(time) = self.head_time else { return false };
        let time_read = self.watch.take_time();
        if self.watch.take_headed() {
            heads.until = None;
        }
        if !self.watch.awaits_head() {
            return false;
        }
        let now = || time_read.unwrap_or_else(|| self.timer.time());
        if heads.until.is_none() {
            (heads.until, heads.read) = (Some(now() + time), self.watch.bytes_read());
        }
        while let Some(until) = heads.until {
            let sleep = heads.sleep.get_or_insert_with(|| self.timer.until(until));
            if Pin::new(sleep).poll(task).is_pending() {
                return false;
            }
            heads.sleep = None;
            let now = self.timer.time();
            if now >= until {
                if !self.watch.body_came(heads.read, time) {
                    return true;
                }
                (heads.until, heads.read) = (Some(now + time), self.watch.bytes_read());
            }
        }
        false
    }

    /// Waits for the time of uploads that were answered early.
    fn ends_rests(&self, sleep: &mut Option<ShardTimerSleep>, task: &mut Context<'_>) {
        loop {
            if sleep.as_mut().is_some_and(|sleep| Pin::new(sleep).poll(task).is_pending()) {
                return;
            }
            if sleep.take().is_some() {
                self.watch.with_rests(|rests| rests.pass_time(self.timer.time()));
                self.watch.say_rests();
            }
            let Some(next) = self.watch.with_rests(|rests| rests.next()) else { return };
            *sleep = Some(self.timer.until(next));
        }
    }

    fn sets(&self, sleep: &mut Option<ShardTimerSleep>, task: &mut Context<'_>) {
        let sleep = sleep.insert(self.timer.after(self.tick));
        if Pin::new(sleep).poll(task).is_ready() {
            // The clock went on by a whole tick meanwhile.
            task.waker().wake_by_ref();
        }
    }
}

/// Why a connection of HTTP failed.
pub struct HttpError {
    cause: Cause,
}

#[derive(Debug)]
enum Cause {
    FirstBytes(io::Error),
    NotHttp2,
    /// No head of a request came in time.
    Silent,
    Excess(Excess),
    Hyper(hyper::Error),
}

impl HttpError {
    /// hyper's error, if it is one.
    pub fn hyper(&self) -> Option<&hyper::Error> {
        match &self.cause {
            Cause::Hyper(error) => Some(error),
            _ => None,
        }
    }

    /// On whose account it is, for a failure.
    fn reason(&self) -> CloseReason {
        match &self.cause {
            Cause::Excess(Excess::RequestBody) => CloseReason::ReadTooSlow,
            Cause::Excess(Excess::ResponseBody) => CloseReason::WriteTooSlow,
            Cause::Excess(Excess::Answer | Excess::Request) => CloseReason::HandlerTimeout,
            Cause::Excess(Excess::Memory) => CloseReason::MemoryLimit,
            Cause::Hyper(error) if error.is_user() => CloseReason::HandlerError,
            _ => CloseReason::BadFrame(FrameError::Malformed("what came is no HTTP that is served here")),
        }
    }

    /// False if it only says that the peer is gone, from which `nothing_comes`, or was silent for
    /// too long.
    fn is_failure(&self, nothing_comes: bool) -> bool {
        match &self.cause {
            // Then the peer is gone or silent.
            Cause::FirstBytes(_) | Cause::Silent => false,
            Cause::NotHttp2 => true,
            Cause::Excess(excess) => *excess != Excess::Idle,
            // The peer sent something wrong, even if nothing comes from it now.
            Cause::Hyper(error) if error.is_parse() => true,
            // The service's own error, unless that is of the body it read.
            Cause::Hyper(error) if error.is_user() => !(nothing_comes && is_caused_by_connection(error)),
            Cause::Hyper(error) => !error.is_timeout() && !nothing_comes,
        }
    }
}

/// True if an error of hyper's or of the system is among the causes.
fn is_caused_by_connection(error: &hyper::Error) -> bool {
    let mut cause = error.source();
    while let Some(error) = cause {
        if error.is::<io::Error>()
            || error.downcast_ref().is_some_and(|error: &hyper::Error| !error.is_user())
        {
            return true;
        }
        cause = error.source();
    }
    false
}

impl fmt::Display for HttpError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let error = match &self.cause {
            Cause::FirstBytes(error) => return error.fmt(f),
            Cause::Excess(excess) => return excess.fmt(f),
            Cause::Silent => return f.write_str("no request came within HttpOptions::header_timeout"),
            Cause::NotHttp2 => return f.write_str("the peer does not speak HTTP/2"),
            Cause::Hyper(error) => error,
        };
        // hyper leaves its cause out.
        error.fmt(f)?;
        let mut cause = error.source();
        while let Some(error) = cause {
            write!(f, ": {error}")?;
            cause = error.source();
        }
        Ok(())
    }
}

ringserve_buf::debug_is_display!(HttpError);

impl StdError for HttpError {}
