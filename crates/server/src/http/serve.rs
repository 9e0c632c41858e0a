//! Serving HTTP: what a factory returns.

use std::error::Error;
use std::fmt;
use std::future::Future;
use std::rc::Rc;

use hyper::body::{Body, Incoming};
use hyper::service::Service;
use hyper::{Request, Response};
use ringserve_core::Limits;
use ringserve_core::framing::Raw;

use super::connection::{Http, HttpError};
use super::options::HttpOptions;
use super::watched::Serving;
use crate::shard::face::handle::Shard;
use crate::shard::face::service::{FactoryError, FactoryOutput, IntoService};
use crate::stream::byte_stream::Stream;
use crate::stream::service::{HandleStream, Streams, adjust};

/// Serves HTTP/1.1 and HTTP/2 with a service of hyper's: what a factory returns. [The
/// module](mod@crate::http) says what is bounded. A function or closure becomes such a service by
/// hyper's `service_fn`.
///
/// ```no_run
/// use std::convert::Infallible;
///
/// use ringserve::http::hyper::body::Incoming;
/// use ringserve::http::hyper::service::service_fn;
/// use ringserve::http::hyper::{Request, Response};
/// use ringserve::http::HttpOptions;
/// use ringserve::{Server, http};
///
/// async fn hello(_request: Request<Incoming>) -> Result<Response<String>, Infallible> {
///     Ok(Response::new("hello".into()))
/// }
///
/// fn main() -> Result<(), ringserve::Error> {
///     Server::bind("127.0.0.1:8080")
///         .serve(|_shard| http(service_fn(hello)).options(HttpOptions::default().streams_max(1000)))
/// }
/// ```
pub fn http<S, B>(service: S) -> HttpService<S>
where
    S: Service<Request<Incoming>, Response = Response<B>> + 'static,
    S::Future: 'static,
    S::Error: Into<Box<dyn Error + Send + Sync>>,
    B: Body + 'static,
    B::Error: Into<Box<dyn Error + Send + Sync>>,
{
    HttpService { service, options: HttpOptions::default(), serving: Serving::default() }
}

/// The service that [`http`] makes of one of hyper's.
pub struct HttpService<S> {
    service: S,
    options: HttpOptions,
    serving: Serving,
}

impl<S> HttpService<S> {
    /// Bounds. The server does not start with those that [`HttpOptions::check`] refuses:
    /// [`Error::Limits`](crate::Error::Limits).
    #[must_use]
    pub fn options(self, options: HttpOptions) -> HttpService<S> {
        HttpService { options, ..self }
    }

    /// Says which requests may be shed: while the shard is asked for more than it can do, those of
    /// a share of all requests for which `may_shed` is true are answered with 503 and
    /// `retry-after`, without the service, and their connections stay. The share follows how long
    /// the shard's turns are, as with [`Service::shed`](crate::Service::shed). Without this call no
    /// request is shed. Each one is counted in
    /// [`ConnStats::frames_shed`](crate::stats::ConnStats::frames_shed).
    ///
    /// As with any answer to a request of HTTP/1.1 whose body is not read, what has not come of
    /// that body by then costs the connection.
    ///
    /// ```no_run
    /// # use std::convert::Infallible;
    /// # use ringserve::http::hyper::body::Incoming;
    /// # use ringserve::http::hyper::service::service_fn;
    /// # use ringserve::http::hyper::{Request, Response};
    /// # use ringserve::{Server, http};
    /// # async fn hello(_request: Request<Incoming>) -> Result<Response<String>, Infallible> {
    /// #     Ok(Response::new("hello".into()))
    /// # }
    /// # fn main() -> Result<(), ringserve::Error> {
    /// Server::bind("127.0.0.1:8080")
    ///     .serve(|_shard| http(service_fn(hello)).shed(|request| request.uri().path() != "/healthz"))
    /// # }
    /// ```
    #[must_use]
    pub fn shed(self, may_shed: impl Fn(&Request<Incoming>) -> bool + 'static) -> HttpService<S> {
        let serving = Serving { may_shed: Some(Rc::new(may_shed)), ..self.serving };
        HttpService { serving, ..self }
    }

    /// Whether each request has a line in the access log, once its answer is through or cut: an
    /// event of `tracing` at level INFO with the target `ringserve::access::http` and the fields
    /// `shard`, `id`, `peer`, `via`, `version`, `method`, `path` (without the query), `status`,
    /// `bytes` (of the answer's body), `seconds` and `whole`. Default false. [The access
    /// log](crate::access_log) of connections has one line for each of these, whatever this says.
    ///
    /// All text from the client is escaped: the path has visible ASCII alone. The lines are not
    /// limited, and a subscriber that blocks keeps the shard from its other connections;
    /// `ringserve::log` hands lines to a thread, and drops them when it is behind.
    ///
    /// ```no_run
    /// # use std::convert::Infallible;
    /// # use ringserve::http::hyper::body::Incoming;
    /// # use ringserve::http::hyper::service::service_fn;
    /// # use ringserve::http::hyper::{Request, Response};
    /// # use ringserve::{Server, http};
    /// # async fn hello(_request: Request<Incoming>) -> Result<Response<String>, Infallible> {
    /// #     Ok(Response::new("hello".into()))
    /// # }
    /// # fn main() -> Result<(), ringserve::Error> {
    /// Server::bind("127.0.0.1:8080").serve(|_shard| http(service_fn(hello)).access_log(true))
    /// # }
    /// ```
    #[must_use]
    pub fn access_log(self, on: bool) -> HttpService<S> {
        let serving = Serving { logs: on, ..self.serving };
        HttpService { serving, ..self }
    }
}

impl<S, B> IntoService<Raw> for HttpService<S>
where
    S: Service<Request<Incoming>, Response = Response<B>> + 'static,
    S::Future: 'static,
    S::Error: Into<Box<dyn Error + Send + Sync>>,
    B: Body + 'static,
    B::Error: Into<Box<dyn Error + Send + Sync>>,
{
    type Service = Streams<OnShard<S>>;

    fn into_service(self, shard: &Shard) -> Result<FactoryOutput<Self::Service>, FactoryError> {
        let http = Http::new(shard, &self.options)?.serving(self.serving);
        Ok(FactoryOutput::Now(Streams::new(shard, OnShard { http, service: Rc::new(self.service) })))
    }

    fn adjust(limits: &mut Limits) {
        adjust(limits);
    }

    fn protocols() -> &'static [&'static str] {
        &["h2", "http/1.1"]
    }
}

impl<S> fmt::Debug for HttpService<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpService").field("options", &self.options).finish_non_exhaustive()
    }
}

/// A shard's service, and what it takes to serve it.
pub struct OnShard<S> {
    http: Http,
    service: Rc<S>,
}

impl<S, B> HandleStream for OnShard<S>
where
    S: Service<Request<Incoming>, Response = Response<B>> + 'static,
    S::Future: 'static,
    S::Error: Into<Box<dyn Error + Send + Sync>>,
    B: Body + 'static,
    B::Error: Into<Box<dyn Error + Send + Sync>>,
{
    type Result = Result<(), HttpError>;

    fn handle(&self, stream: Stream) -> impl Future<Output = Self::Result> {
        self.http.serve(stream, self.service.clone())
    }
}
