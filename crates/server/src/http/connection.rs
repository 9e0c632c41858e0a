//! One connection.

use std::error::Error as StdError;
use std::fmt;
use std::future::{Future, poll_fn};
use std::io;
use std::pin::{Pin, pin};
use std::time::Duration;

use hyper::body::{Body, Incoming};
use hyper::server::conn::{http1, http2};
use hyper::service::Service;
use hyper::{Request, Response};
use tracing::debug;

use super::detect::{Detected, Replayed, detect};
use super::{HttpOptions, HttpVersions, ShardExecutor, ShardTimer};
use crate::shard::{DrainBegins, Shard};
use crate::stream::Stream;

/// Serves streams of a shard as HTTP. There is one for each shard, as it has the shard's timers.
#[derive(Debug)]
pub struct Http {
    http1: http1::Builder,
    http2: http2::Builder<ShardExecutor>,
    versions: HttpVersions,
    first_bytes: Option<Duration>,
}

impl Http {
    /// For the streams of `shard`.
    ///
    /// # Panics
    /// As [`HttpOptions::http1`] and [`HttpOptions::http2`] do.
    pub fn new(shard: &Shard, options: &HttpOptions) -> Http {
        let timer = ShardTimer::new(shard);
        Http {
            http1: options.http1(timer.clone()),
            http2: options.http2(ShardExecutor::new(shard), timer),
            versions: options.versions,
            first_bytes: options.header_read,
        }
    }

    /// Serves one connection with `service`, to its end. When the server shuts down it ends after what was asked until
    /// then.
    ///
    /// # Errors
    /// What hyper found wrong, with the peer's requests or with the service. Not that the peer vanished or was silent for
    /// too long.
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
        let mut drain = stream.shard().stopping_begins();
        let mut stream = Replayed::new(stream);
        let detected = match self.versions {
            HttpVersions::Http1 => Detected::Other,
            _ => detect(&mut stream, self.first_bytes, &mut drain).await.map_err(Cause::FirstBytes)?,
        };
        match (detected, self.versions) {
            (Detected::Nothing, _) => return Ok(()),
            (Detected::Other, HttpVersions::Http2) => return Err(Cause::NotHttp2),
            (Detected::Other, _) => {
                let connection = pin!(self.http1.serve_connection(stream, service));
                until_drained(connection, drain, http1::Connection::graceful_shutdown).await
            }
            (Detected::Http2, _) => {
                let connection = pin!(self.http2.serve_connection(stream, service));
                until_drained(connection, drain, http2::Connection::graceful_shutdown).await
            }
        }
        .map_err(Cause::Hyper)
    }
}

/// Waits for the end of a connection, which it is told to come to once the server shuts down.
async fn until_drained<C: Future>(
    mut connection: Pin<&mut C>,
    mut drain: DrainBegins,
    shut_down: impl Fn(Pin<&mut C>),
) -> C::Output {
    let mut drains = false;
    poll_fn(|task| {
        if !drains && Pin::new(&mut drain).poll(task).is_ready() {
            drains = true;
            shut_down(connection.as_mut());
        }
        connection.as_mut().poll(task)
    })
    .await
}

/// Why a connection of HTTP failed.
#[derive(Debug)]
pub struct HttpError {
    cause: Cause,
}

#[derive(Debug)]
enum Cause {
    FirstBytes(io::Error),
    NotHttp2,
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

    /// False if it only says that the peer is gone, from which `nothing_comes` any more, or was silent for too long.
    fn is_failure(&self, nothing_comes: bool) -> bool {
        match &self.cause {
            // Then the peer is gone or silent.
            Cause::FirstBytes(_) => false,
            Cause::NotHttp2 => true,
            // What came was wrong, even if nothing comes any more.
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

impl StdError for HttpError {}
