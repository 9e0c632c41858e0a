//! Serving HTTP: what a server is started with.

use std::error::Error as StdError;
use std::rc::Rc;

use hyper::body::{Body, Incoming};
use hyper::service::Service;
use hyper::{Request, Response};

use super::connection::{Http, HttpError};
use super::options::HttpOptions;
use crate::server::builder::Server;
use crate::server::error::Error;
use crate::server::running::ServerHandle;
use crate::shard::handle::Shard;
use crate::stream::byte_stream::Stream;

impl Server {
    /// Serves HTTP/1.1 and HTTP/2, and waits as [`serve`](Server::serve) does. `factory` is called on each shard's thread and
    /// makes its hyper service. See [the module](crate::http).
    ///
    /// # Errors
    /// Those of [`serve`](Server::serve).
    pub fn serve_http<S, B>(self, factory: impl Fn(&Shard) -> S + Send + Sync + 'static) -> Result<(), Error>
    where
        S: Service<Request<Incoming>, Response = Response<B>> + 'static,
        S::Future: 'static,
        S::Error: Into<Box<dyn StdError + Send + Sync>>,
        B: Body + 'static,
        B::Error: Into<Box<dyn StdError + Send + Sync>>,
    {
        self.serve_http_with(HttpOptions::default(), factory)
    }

    /// As [`serve_http`](Server::serve_http), with options.
    ///
    /// # Errors
    /// Those of [`serve`](Server::serve), and [`Error::Limits`] if [`HttpOptions::check`] refuses the options.
    pub fn serve_http_with<S, B>(
        self,
        options: HttpOptions,
        factory: impl Fn(&Shard) -> S + Send + Sync + 'static,
    ) -> Result<(), Error>
    where
        S: Service<Request<Incoming>, Response = Response<B>> + 'static,
        S::Future: 'static,
        S::Error: Into<Box<dyn StdError + Send + Sync>>,
        B: Body + 'static,
        B::Error: Into<Box<dyn StdError + Send + Sync>>,
    {
        options.check().map_err(Error::Limits)?;
        self.serve_stream(move |shard| handler(Http::new(shard, &options), factory(shard)))
    }

    /// Starts a server of HTTP/1.1 and HTTP/2 on threads of its own. See [`serve_http`](Server::serve_http) and
    /// [`start`](Server::start).
    ///
    /// # Errors
    /// Those of [`start`](Server::start).
    pub fn start_http<S, B>(
        self,
        factory: impl Fn(&Shard) -> S + Send + Sync + 'static,
    ) -> Result<ServerHandle, Error>
    where
        S: Service<Request<Incoming>, Response = Response<B>> + 'static,
        S::Future: 'static,
        S::Error: Into<Box<dyn StdError + Send + Sync>>,
        B: Body + 'static,
        B::Error: Into<Box<dyn StdError + Send + Sync>>,
    {
        self.start_http_with(HttpOptions::default(), factory)
    }

    /// As [`start_http`](Server::start_http), with options.
    ///
    /// # Errors
    /// Those of [`start`](Server::start), and [`Error::Limits`] if [`HttpOptions::check`] refuses the options.
    pub fn start_http_with<S, B>(
        self,
        options: HttpOptions,
        factory: impl Fn(&Shard) -> S + Send + Sync + 'static,
    ) -> Result<ServerHandle, Error>
    where
        S: Service<Request<Incoming>, Response = Response<B>> + 'static,
        S::Future: 'static,
        S::Error: Into<Box<dyn StdError + Send + Sync>>,
        B: Body + 'static,
        B::Error: Into<Box<dyn StdError + Send + Sync>>,
    {
        options.check().map_err(Error::Limits)?;
        self.start_stream(move |shard| handler(Http::new(shard, &options), factory(shard)))
    }
}

/// What a shard does with each of its connections.
fn handler<S, B>(http: Http, service: S) -> impl AsyncFn(Stream) -> Result<(), HttpError> + 'static
where
    S: Service<Request<Incoming>, Response = Response<B>> + 'static,
    S::Future: 'static,
    S::Error: Into<Box<dyn StdError + Send + Sync>>,
    B: Body + 'static,
    B::Error: Into<Box<dyn StdError + Send + Sync>>,
{
    let service = Rc::new(service);
    async move |stream| http.serve(stream, service.clone()).await
}
