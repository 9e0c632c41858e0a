//! State that the steps of a request share.

use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::rc::Rc;

use hyper::body::Incoming;
use hyper::header::HeaderValue;
use hyper::http::request::Parts;
use hyper::{Request, Response};
use ringserve_server::Shard;
use ringserve_server::http::ClientInfo;

use super::body::GatewayBody;
use super::shard_routes::{ShardRoutes, Snapshot};
use crate::client::request_body::BodyError;
use crate::fields::forwarded::{ForwardingRules, NoAddress};

/// A gateway of a shard.
pub(super) struct Inner {
    pub(super) shard: Shard,
    pub(super) routes: Rc<ShardRoutes>,
    pub(super) options: Options,
}

/// Settings for the requests of all routes.
#[derive(Clone)]
pub(super) struct Options {
    pub(super) telling: ForwardingRules,
    pub(super) has_underscores: bool,
    pub(super) has_access_log: bool,
    pub(super) fallback: Option<Fallback>,
}

/// The answer of a gateway, or of its fallback.
pub(super) type Answer = Pin<Box<dyn Future<Output = Result<Response<GatewayBody>, BodyError>>>>;

/// A service for the rest.
pub(super) type Fallback = Rc<dyn Fn(Request<Incoming>) -> Answer>;

/// A request, and what is known of it.
pub(super) struct ProxyRequest {
    pub(super) gateway: Rc<Inner>,
    pub(super) snapshot: Rc<Snapshot>,
    pub(super) parts: Parts,
    pub(super) client: Option<ClientInfo>,
    pub(super) authority: HeaderValue,
    /// The form in which it is sent. `None` as it came.
    pub(super) path: Option<String>,
}

impl ProxyRequest {
    pub(super) fn addr(&self) -> Option<SocketAddr> {
        self.client.as_ref()?.peer().addr()
    }

    /// The client's address, as trusted proxies say it.
    pub(super) fn ip(&self) -> Result<Option<IpAddr>, NoAddress> {
        self.gateway.options.telling.client_ip(&self.parts.headers, self.addr())
    }

    /// The path that is sent.
    pub(super) fn path(&self) -> &str {
        self.path.as_deref().unwrap_or(self.parts.uri.path())
    }
}
