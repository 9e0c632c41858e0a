//! An upstream of HTTP: the group of servers, and how HTTP is spoken to them.

use std::fmt;
use std::sync::Arc;

use ringserve_upstream::Upstream;

/// An [`Upstream`] that speaks HTTP. Clones are the same one: they share the connections of a
/// shard.
///
/// Each shard of a gateway keeps an idle connection of HTTP/1.1 at about 10 KB, 8 KiB of which is
/// what hyper reads into.
#[derive(Clone)]
pub struct HttpUpstream {
    inner: Arc<Inner>,
}

#[derive(Clone)]
struct Inner {
    upstream: Upstream,
    replay_bytes_max: usize,
    tunnels_max: usize,
    protocol: UpstreamProtocol,
}

/// The version of HTTP that is spoken to backends.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UpstreamProtocol {
    /// HTTP/1.1.
    #[default]
    Http1,
    /// HTTP/2 from the first byte, as backends of gRPC speak it. Below TLS the
    /// [transport](Upstream::transport) has to offer `h2` (ALPN).
    Http2,
    /// HTTP/2 on connections below TLS whose backend chose `h2` (ALPN), HTTP/1.1 on all others.
    /// With the feature `tls`; without it always HTTP/1.1.
    Negotiated,
}

impl HttpUpstream {
    /// From an upstream, which is asked by HTTP/1.1: a request at a time on each of its pooled
    /// connections. Where requests come in bursts,
    /// [`PoolLimits::idle_max`](ringserve_upstream::PoolLimits::idle_max) is worth raising: a
    /// connection beyond it is closed behind its request.
    ///
    /// ```
    /// use ringserve::upstream::Upstream;
    /// use ringserve_gateway::HttpUpstream;
    ///
    /// let web = HttpUpstream::new(Upstream::new("web", ["10.0.0.11:80", "10.0.0.12:80"]));
    /// # let _ = web;
    /// ```
    pub fn new(upstream: Upstream) -> HttpUpstream {
        let protocol = UpstreamProtocol::default();
        let inner = Inner { upstream, replay_bytes_max: 64 << 10, tunnels_max: 1024, protocol };
        HttpUpstream { inner: Arc::new(inner) }
    }

    /// Sets the version of HTTP that is spoken to its backends, [`UpstreamProtocol::Http1`] by
    /// default. A connection of HTTP/2 has a request at a time too, and can be no tunnel: up to
    /// [`PoolLimits::connections_max`](ringserve_upstream::PoolLimits::connections_max) requests of
    /// a shard are at a backend at once. A body of an answer that its client does not take is held
    /// up to 256 KiB.
    ///
    /// ```
    /// use ringserve::upstream::Upstream;
    /// use ringserve_gateway::{HttpUpstream, UpstreamProtocol};
    ///
    /// let health = Upstream::new("health", ["10.0.0.11:50051"]);
    /// let health = HttpUpstream::new(health).protocol(UpstreamProtocol::Http2);
    /// # let _ = health;
    /// ```
    pub fn protocol(self, protocol: UpstreamProtocol) -> HttpUpstream {
        HttpUpstream { inner: Arc::new(Inner { protocol, ..(*self.inner).clone() }) }
    }

    /// Sets how many bytes of a request's body are kept until the answer begins, so that the
    /// request can be sent to another backend; 0 keeps none. 64 KiB by default. Of a longer body
    /// nothing is kept, and its request is sent once.
    pub fn replay_bytes_max(self, bytes: usize) -> HttpUpstream {
        HttpUpstream { inner: Arc::new(Inner { replay_bytes_max: bytes, ..(*self.inner).clone() }) }
    }

    /// Sets how many tunnels to its backends a shard of a gateway has at once; a request for one
    /// more is answered with 503. 1024 by default. They do not count in
    /// [`PoolLimits::connections_max`](ringserve_upstream::PoolLimits::connections_max). Each is a
    /// descriptor on either side, and an ephemeral port.
    pub fn tunnels_max(self, tunnels: usize) -> HttpUpstream {
        HttpUpstream { inner: Arc::new(Inner { tunnels_max: tunnels, ..(*self.inner).clone() }) }
    }

    /// The group of servers.
    pub fn upstream(&self) -> &Upstream {
        &self.inner.upstream
    }

    /// The name of the upstream.
    pub fn name(&self) -> &str {
        self.inner.upstream.name()
    }

    pub(crate) fn spoken(&self) -> UpstreamProtocol {
        self.inner.protocol
    }

    pub(crate) fn kept_bytes_max(&self) -> usize {
        self.inner.replay_bytes_max
    }

    pub(crate) fn most_tunnels(&self) -> usize {
        self.inner.tunnels_max
    }

    /// A number that is this one's as long as it lives.
    pub(crate) fn key(&self) -> usize {
        Arc::as_ptr(&self.inner).addr()
    }
}

impl From<Upstream> for HttpUpstream {
    fn from(upstream: Upstream) -> HttpUpstream {
        HttpUpstream::new(upstream)
    }
}

impl fmt::Debug for HttpUpstream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("HttpUpstream").field(&self.name()).finish()
    }
}
