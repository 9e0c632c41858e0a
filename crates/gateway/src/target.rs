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

struct Inner {
    upstream: Upstream,
    replay_bytes_max: usize,
}

impl HttpUpstream {
    /// From an upstream, which is asked by HTTP/1.1: a request at a time on each of its pooled
    /// connections.
    ///
    /// ```
    /// use ringserve::upstream::Upstream;
    /// use ringserve_gateway::HttpUpstream;
    ///
    /// let web = HttpUpstream::new(Upstream::new("web", ["10.0.0.11:80", "10.0.0.12:80"]));
    /// # let _ = web;
    /// ```
    pub fn new(upstream: Upstream) -> HttpUpstream {
        HttpUpstream { inner: Arc::new(Inner { upstream, replay_bytes_max: 64 << 10 }) }
    }

    /// Sets how many bytes of a request's body are kept until the answer begins, so that the
    /// request can be sent to another backend; 0 keeps none. 64 KiB by default. Of a longer body
    /// nothing is kept, and its request is sent once.
    pub fn replay_bytes_max(self, bytes: usize) -> HttpUpstream {
        let upstream = self.inner.upstream.clone();
        HttpUpstream { inner: Arc::new(Inner { upstream, replay_bytes_max: bytes }) }
    }

    /// The group of servers.
    pub fn upstream(&self) -> &Upstream {
        &self.inner.upstream
    }

    /// The name of the upstream.
    pub fn name(&self) -> &str {
        self.inner.upstream.name()
    }

    pub(crate) fn kept_bytes_max(&self) -> usize {
        self.inner.replay_bytes_max
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
