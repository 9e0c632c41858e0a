//! Backends that are found by DNS itself: addresses with their TTLs, and SRV records.
// May use: the sources of backends. Begin with: `Dns`.
// `thread` asks name servers, `answer` reads what they say. Nothing here runs on a shard but
// `Discover::run`.

mod answer;
mod thread;

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use ringserve_server::Shard;
use tracing::warn;

use crate::backend::Backend;
use crate::discover::{Backends, Discover};
use crate::names::system::Names;
use crate::upstream::Upstream;

/// The configuration of the host's resolver.
const RESOLV_CONF: &str = "/etc/resolv.conf";

/// A name whose backends are found by DNS itself, and looked up again when their TTL is over. It
/// comes with the feature `dns`.
///
/// Name servers are asked by hickory-resolver, over UDP and TCP, on one thread of the process that
/// serves all upstreams. It reads `/etc/resolv.conf` and `/etc/hosts` for each look-up, so that a
/// change of either needs no restart. In a simulation it asks name servers of the real network:
/// take [`Names`] there.
///
/// ```
/// use ringserve::upstream::{Dns, Upstream};
///
/// let addresses = Upstream::discover("db", Dns::addresses("db.internal:5432"));
/// let services = Upstream::srv("api", "_api._tcp.internal");
/// # let _ = (addresses, services);
/// ```
#[derive(Debug)]
pub struct Dns {
    wanted: DnsQuery,
    servers: Servers,
    ttl_min: Duration,
    ttl_max: Duration,
    /// The configuration was refused, for which there is a line already.
    is_refused: AtomicBool,
}

/// The records that are looked for.
#[derive(Clone, Debug)]
enum DnsQuery {
    /// A and AAAA of a name with a port, as it was given.
    Addresses(Box<str>),
    /// SRV of a name, and the addresses of their targets.
    Services(Box<str>),
}

/// The name servers that are asked.
#[derive(Clone, Debug)]
enum Servers {
    /// Those of this file.
    File(PathBuf),
    These(Vec<SocketAddr>),
}

impl Dns {
    fn new(wanted: DnsQuery) -> Dns {
        Dns {
            wanted,
            servers: Servers::File(RESOLV_CONF.into()),
            ttl_min: Duration::from_secs(5),
            ttl_max: Duration::from_secs(3600),
            is_refused: AtomicBool::default(),
        }
    }

    /// The addresses of a name with a port, such as `"db.internal:5432"`. Where this host has no
    /// route to IPv6 those are left out, if there are others.
    pub fn addresses(name: &str) -> Dns {
        Dns::new(DnsQuery::Addresses(name.into()))
    }

    /// The SRV records of a service, such as `"_api._tcp.internal"`: each address of a target is a
    /// backend with the record's port, [weight](Backend::weight) and [priority](Backend::priority),
    /// and the target as its [host](Backend::host). A weight of 0 is 1. At most 256 records are
    /// used.
    pub fn services(name: &str) -> Dns {
        Dns::new(DnsQuery::Services(name.into()))
    }

    /// Asks this name server, in place of those of `/etc/resolv.conf`. Called again it adds another
    /// one.
    pub fn server(mut self, addr: SocketAddr) -> Dns {
        match &mut self.servers {
            Servers::These(servers) => servers.push(addr),
            Servers::File(_) => self.servers = Servers::These(vec![addr]),
        }
        self
    }

    /// Reads another file in place of `/etc/resolv.conf`.
    pub fn resolv_conf(self, path: impl AsRef<Path>) -> Dns {
        Dns { servers: Servers::File(path.as_ref().to_owned()), ..self }
    }

    /// The bounds between which a TTL is believed: 5 s and 1 h by default, `min` at least 100 ms.
    /// Of several records the shortest TTL counts.
    pub fn ttl_between(self, min: Duration, max: Duration) -> Dns {
        let ttl_min = min.max(Duration::from_millis(100));
        Dns { ttl_min, ttl_max: max.max(ttl_min), ..self }
    }
}

impl Upstream {
    /// An upstream whose backends are the SRV records of a service, such as `"_api._tcp.internal"`.
    /// They are looked up in the background, whenever their TTL is over: a backend that a new
    /// answer has is asked within a second, and one that it does not have gets no further request.
    /// See [`Dns::services`]. A look-up that fails, or has no records, changes nothing.
    ///
    /// A file `/etc/resolv.conf` that cannot be used is the error of the look-up, and is logged.
    pub fn srv(name: &str, service: &str) -> Upstream {
        Upstream::discover(name, Dns::services(service))
    }
}

impl Discover for Dns {
    async fn run(&self, shard: &Shard, backends: &Backends) -> io::Result<()> {
        loop {
            let found = thread::ask(self.wanted.clone(), self.servers.clone()).await;
            let answer = match (found, &self.wanted) {
                // Addresses are known to the system's resolver, too.
                (Err(thread::Failure::Configuration(error)), DnsQuery::Addresses(name)) => {
                    if !self.is_refused.swap(true, Relaxed) {
                        warn!("{error}: {name} is looked up by getaddrinfo, which tells no TTL");
                    }
                    return Names::new(name).run(shard, backends).await;
                }
                (Err(failed), _) => return Err(failed.into()),
                (Ok(answer), _) => answer,
            };
            self.is_refused.store(false, Relaxed);
            backends.set(answer.backends.into_iter().map(Backend::from));
            shard.sleep(answer.ttl.clamp(self.ttl_min, self.ttl_max)).await;
        }
    }
}
