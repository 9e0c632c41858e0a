//! Backends that are the addresses of a name.

use std::io;
use std::time::Duration;

use ringserve_server::Shard;
use ringserve_server::net::Destination;

use crate::backend::Backend;
use crate::discover::{Backends, Discover};
use crate::policy::part_of;
use crate::upstream::Upstream;

/// A name with a port whose addresses are the backends of an upstream. See [`Upstream::names`].
#[derive(Clone, Debug)]
pub struct Names {
    name: Box<str>,
    refresh: Duration,
}

impl Names {
    /// A name with a port, such as `"db.internal:5432"`.
    pub fn new(name: &str) -> Names {
        Names { name: name.into(), refresh: Duration::from_secs(30) }
    }

    /// The time between two look-ups, more or less a tenth, and at least 5 s. 30 s by default.
    pub fn refresh(self, time: Duration) -> Names {
        Names { refresh: time.max(Duration::from_secs(5)), ..self }
    }
}

impl From<&str> for Names {
    fn from(name: &str) -> Names {
        Names::new(name)
    }
}

impl From<String> for Names {
    fn from(name: String) -> Names {
        Names::new(&name)
    }
}

impl Upstream {
    /// An upstream whose backends are the addresses of a name with a port, by `getaddrinfo` on a
    /// thread beside the shards. They are looked up in the background, every 30 s unless
    /// [`Names::refresh`] says otherwise: no request waits for a look-up but those before the first
    /// one ended, for [`PoolLimits::wait_max`](crate::PoolLimits::wait_max) at most.
    ///
    /// Knowledge of a backend belongs to its address, in whatever order addresses are returned. A
    /// name that does not resolve, or has no address, changes nothing: the addresses of before
    /// stay, and a server whose name never resolved starts and has [no
    /// backend](crate::UpstreamError::NoBackend). After a failure the next look-up comes within 1
    /// s, and later ones within 30 s.
    ///
    /// [`Backend::host`] is the name, as a TLS certificate has it.
    ///
    /// ```
    /// use std::time::Duration;
    ///
    /// use ringserve::upstream::{Names, Upstream};
    ///
    /// let often = Names::new("answers.internal:9000").refresh(Duration::from_secs(5));
    /// let answers = Upstream::names("answers", often);
    /// # let _ = (answers, Upstream::names("web", "web.internal:80"));
    /// ```
    pub fn names(name: &str, of: impl Into<Names>) -> Upstream {
        Upstream::discover(name, of.into())
    }
}

impl Discover for Names {
    async fn run(&self, shard: &Shard, backends: &Backends) -> io::Result<()> {
        let name = Destination::from(&*self.name);
        let host = self.name.rsplit_once(':').map_or("", |(host, _port)| host);
        loop {
            let found = shard.resolve(name.clone()).await?;
            backends.set(found.into_iter().map(|addr| Backend::new(addr).host_name(host)));
            let nanos = self.refresh.as_nanos() as u64;
            let wait = nanos / 10 * 9 + part_of(nanos / 5, shard.random());
            shard.sleep(Duration::from_nanos(wait)).await;
        }
    }
}
