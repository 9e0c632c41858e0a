//! The service that a shard serves.

use std::fmt;
use std::rc::Rc;

use bytes::Bytes;
use hyper::body::{Body, Incoming};
use hyper::service::Service;
use hyper::{Request, Response};
use ipnet::IpNet;
use ringserve_server::Shard;

use super::body::GatewayBody;
use super::handling::handle;
use super::shard_routes::ShardRoutes;
use super::state::{Answer, Inner, Options};
use crate::client::request_body::{BodyError, boxed};
use crate::fields::forwarded::{ForwardedFields, ForwardingRules};
use crate::table::routes::Routes;

/// A reverse proxy of one shard: a service of hyper's, for [`http`](ringserve_server::http()).
/// Clones are the same one.
///
/// ```no_run
/// use ringserve::upstream::Upstream;
/// use ringserve::{Server, http};
/// use ringserve_gateway::{Gateway, HttpUpstream, Route, RouteTable, Routes};
///
/// fn main() -> Result<(), Box<dyn std::error::Error>> {
///     let web = HttpUpstream::new(Upstream::new("web", ["10.0.0.11:80", "10.0.0.12:80"]));
///     let table = RouteTable::new().route("/static/*", Route::to(&web))?.route("/*", Route::to(&web))?;
///     let routes = Routes::new(table)?;
///     Ok(Server::bind("0.0.0.0:8080").serve(move |shard| http(Gateway::new(&routes, shard)))?)
/// }
/// ```
#[derive(Clone)]
pub struct Gateway {
    inner: Rc<Inner>,
}

impl Gateway {
    /// A gateway on `shard`, made in the factory of a service. It uses these routes as they are,
    /// and as they are replaced.
    pub fn new(routes: &Routes, shard: &Shard) -> Gateway {
        let telling = ForwardingRules {
            forwarded: ForwardedFields::default(),
            trusted: Vec::new(),
            has_via: true,
            has_request_id: true,
        };
        let options = Options { telling, has_underscores: false, has_access_log: false, fallback: None };
        let routes = Rc::new(ShardRoutes::new(routes, shard));
        Gateway { inner: Rc::new(Inner { shard: shard.clone(), routes, options }) }
    }

    fn with(self, change: impl FnOnce(&mut Options)) -> Gateway {
        let Inner { shard, routes, options } = &*self.inner;
        let mut options = options.clone();
        change(&mut options);
        Gateway { inner: Rc::new(Inner { shard: shard.clone(), routes: routes.clone(), options }) }
    }

    /// Hands requests that no route takes, and those of
    /// [`Route::fallback`](crate::Route::fallback), to a service of hyper's, as they came, but for
    /// the path: it has the form in which routes are matched, and one without such a form gets 400.
    /// Without a fallback they get 404.
    pub fn fallback<S, B>(self, service: S) -> Gateway
    where
        S: Service<Request<Incoming>, Response = Response<B>> + 'static,
        S::Future: 'static,
        S::Error: Into<BodyError>,
        B: Body<Data = Bytes> + 'static,
        B::Error: Into<BodyError>,
    {
        let fallback = move |request| {
            let answer = service.call(request);
            Box::pin(async move {
                let answer = answer.await.map_err(Into::into)?;
                Ok(answer.map(|body| GatewayBody::other(boxed(body))))
            }) as Answer
        };
        self.with(|options| options.fallback = Some(Rc::new(fallback)))
    }

    /// Sets the fields by which upstreams are informed of the client.
    /// [`ForwardedFields::XForwarded`] by default.
    pub fn forwarded(self, how: ForwardedFields) -> Gateway {
        self.with(|options| options.telling.forwarded = how)
    }

    /// Networks of proxies before this one: what they say of their clients is passed on and added
    /// to, and the client's address for [`Route::allow`](crate::Route::allow) and
    /// [`Route::rate`](crate::Route::rate) is the last one of `x-forwarded-for` (of `forwarded`,
    /// with [`ForwardedFields::Rfc7239`]) that is not in them. What others say is removed. None by
    /// default.
    pub fn trusted(self, networks: impl IntoIterator<Item = IpNet>) -> Gateway {
        self.with(|options| options.telling.trusted = networks.into_iter().collect())
    }

    /// Whether requests get a `via` (RFC 9110, 7.6.3). True by default.
    pub fn via(self, is_on: bool) -> Gateway {
        self.with(|options| options.telling.has_via = is_on)
    }

    /// Whether requests get an `x-request-id` of 128 random bits, unless a trusted proxy sent one.
    /// True by default. It is no secret.
    pub fn request_id(self, is_on: bool) -> Gateway {
        self.with(|options| options.telling.has_request_id = is_on)
    }

    /// Whether fields whose names have a `_` are passed on. Many servers take `x_forwarded_for` for
    /// `x-forwarded-for`, so they are dropped by default.
    pub fn underscores(self, are_kept: bool) -> Gateway {
        self.with(|options| options.has_underscores = are_kept)
    }

    /// Whether each request has an event of `tracing` at level INFO with the target
    /// `ringserve::access::gateway` when its answer begins, refusals included: its route, upstream,
    /// backend, tries, status, and the seconds until then. Off by default.
    pub fn access_log(self, is_on: bool) -> Gateway {
        self.with(|options| options.has_access_log = is_on)
    }
}

impl Service<Request<Incoming>> for Gateway {
    type Response = Response<GatewayBody>;
    type Error = BodyError;
    type Future = Answer;

    fn call(&self, request: Request<Incoming>) -> Answer {
        Box::pin(handle(self.inner.clone(), request))
    }
}

impl fmt::Debug for Gateway {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gateway").field("shard", &self.inner.shard.index()).finish_non_exhaustive()
    }
}
