//! Sources of the backends of an upstream, if they are not given.

use std::fmt;
use std::io;
use std::pin::Pin;
use std::rc::Rc;

use ringserve_server::Shard;

use crate::backend::Backend;

/// A source of backends, such as a registry of services.
///
/// It runs on one shard of the process at a time, of those that have a client of the upstream, and
/// on another one if that ends. Where it returns, whether with an error or without, it is begun
/// again, after 1 s at first and 30 s at most if it found nothing meanwhile.
///
/// ```no_run
/// use std::io;
/// use std::time::Duration;
///
/// use ringserve::Shard;
/// use ringserve::upstream::{Backends, Discover, Upstream};
///
/// /// A line `ADDRESS:PORT` for each backend, from a registry that speaks lines.
/// struct Registry;
///
/// impl Discover for Registry {
///     async fn run(&self, shard: &Shard, backends: &Backends) -> io::Result<()> {
///         let mut registry = shard.connect("registry.internal:9000").await?;
///         let mut text = Vec::new();
///         while let Some(bytes) = registry.read_frame().await? {
///             text.extend_from_slice(&bytes);
///         }
///         let text = String::from_utf8_lossy(&text);
///         backends.set(text.lines());
///         shard.sleep(Duration::from_secs(30)).await;
///         Ok(())
///     }
/// }
///
/// let upstream = Upstream::discover("web", Registry);
/// # let _ = upstream;
/// ```
pub trait Discover: Send + Sync + 'static {
    /// Finds the backends, and follows their changes.
    ///
    /// # Errors
    /// Why they are not to be found. The backends that are known stay, and the error is logged once
    /// until one is found again.
    fn run(&self, shard: &Shard, backends: &Backends) -> impl Future<Output = io::Result<()>>;
}

/// The backends of an upstream, for its source.
#[derive(Clone)]
pub struct Backends {
    found: Rc<dyn Fn(io::Result<Vec<Backend>>)>,
}

impl Backends {
    pub(crate) fn new(found: impl Fn(io::Result<Vec<Backend>>) + 'static) -> Backends {
        Backends { found: Rc::new(found) }
    }

    /// Replaces the backends, as [`Upstream::set_backends`](crate::Upstream::set_backends) does. An
    /// answer that is empty, or smaller than
    /// [`Upstream::min_backends`](crate::Upstream::min_backends), changes nothing and is logged.
    pub fn set<B: Into<Backend>>(&self, backends: impl IntoIterator<Item = B>) {
        (self.found)(Ok(backends.into_iter().map(Into::into).collect()));
    }

    /// Says that the backends are not to be found now, for a source that goes on by itself. Those
    /// that are known stay, and the error is logged once until some are found again.
    pub fn not_found(&self, error: io::Error) {
        (self.found)(Err(error));
    }
}

impl fmt::Debug for Backends {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Backends")
    }
}

/// A source behind a pointer.
pub(crate) trait Source: Send + Sync {
    fn begin<'s>(
        &'s self,
        shard: &'s Shard,
        backends: &'s Backends,
    ) -> Pin<Box<dyn Future<Output = io::Result<()>> + 's>>;
}

impl<D: Discover> Source for D {
    fn begin<'s>(
        &'s self,
        shard: &'s Shard,
        backends: &'s Backends,
    ) -> Pin<Box<dyn Future<Output = io::Result<()>> + 's>> {
        Box::pin(self.run(shard, backends))
    }
}
