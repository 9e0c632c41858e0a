//! Endpoints of a service, with their options.

use std::fmt;
use std::net::ToSocketAddrs;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use ringserve_admission::Admission;
use ringserve_admission::proxy_protocol::ProxyProtocol;
use ringserve_base::peer::Peer;
use ringserve_core::framing::{Raw, TypedFraming};
use ringserve_core::{Limits, Transport};
use ringserve_drivers::take_activated;

use super::config::given::ServiceConfig;
use super::listen::addr::Binds;
use super::listen::transport::MakeTransport;
use crate::socket_options::options::SocketOptions;

/// A TCP address, on every address that it resolves to. Port 0 finds a free port. An address that
/// cannot be resolved is an error of the start. `[::]` and IPv4 go together as in
/// [`Server::listen`](crate::Server::listen).
pub fn tcp(addr: impl ToSocketAddrs + fmt::Debug) -> Endpoint {
    Endpoint(Binds::default().ip(addr))
}

/// A Unix socket. See [`Server::listen_unix`](crate::Server::listen_unix) for its file, its
/// permissions and abstract names.
pub fn unix(path: impl Into<PathBuf>) -> Endpoint {
    Endpoint(Binds::default().unix(path))
}

/// A socket that listens already: a [`TcpListener`](std::net::TcpListener) or a
/// [`UnixListener`](std::os::unix::net::UnixListener) of the standard library, or a descriptor of
/// such a socket. Another descriptor is an error of the start
/// ([`Error::Address`](crate::Error::Address)).
///
/// The socket may have other owners: the service manager that made it, the next instance of this
/// program, a duplicate in this process. The server does nothing to it that keeps them from
/// accepting. A shutdown stops accepting and closes this server's descriptors: accepted connections
/// are served, queued and later ones wait for the next owner, and the file of a Unix socket stays.
/// If this server was the last owner, the kernel then resets the queue, which a server that binds
/// the address itself [does not let happen](crate::ServerHandle::shutdown).
///
/// * All shards accept from its one queue, as from that of a Unix socket. A shard that pauses at
///   [`connections_max`](crate::limits::ServerLimits::connections_max) may take one connection
///   more, for which the kernel may have woken it in the place of another owner; if no other shard
///   has room, the connection waits there for a place.
/// * It is made non-blocking, for every owner: between wake-up and accept another owner may have
///   taken the connection.
/// * Of [`SocketOptions`] those are set that an accepted connection inherits, for every owner's
///   connections. `backlog`, `fast_open`, `defer_accept`, `incoming_cpu` and `unix_mode` are left
///   to the socket's maker.
///
/// ```no_run
/// use std::net::TcpListener;
///
/// use ringserve::listen::adopt;
/// # use ringserve::{Cx, Frame, Server, Service};
/// # struct Echo;
/// # impl Service for Echo {
/// #     type Session = ();
/// #     type Error = std::convert::Infallible;
/// #     async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Self::Error> {
/// #         cx.reply(frame);
/// #         Ok(())
/// #     }
/// # }
/// # fn drop_privileges() {}
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let listener = TcpListener::bind("0.0.0.0:80")?;
/// drop_privileges();
/// Server::new().service(adopt(listener), |_shard| Echo).serve()?;
/// # Ok(())
/// # }
/// ```
pub fn adopt(listener: impl Into<OwnedFd>) -> Endpoint {
    Endpoint(Binds::default().adopted(listener.into()))
}

/// Takes the sockets with this name that a service manager handed to the process, as systemd does
/// by socket activation (`sd_listen_fds(3)`), and [adopts](adopt) them. `None` if there are none,
/// or they were taken before, so that a program can be started both ways.
///
/// The name is that of `FileDescriptorName=`, by default that of the socket unit (`app.socket`),
/// and `unknown` where the manager gives none. The first call reads `LISTEN_PID`, `LISTEN_FDS` and
/// `LISTEN_FDNAMES`, and makes all these sockets close-on-exec. The variables stay, and mean
/// nothing to child processes, whose number is not `LISTEN_PID`.
///
/// ```no_run
/// use ringserve::listen::{systemd, tcp};
///
/// let endpoint = systemd("web").unwrap_or_else(|| tcp("0.0.0.0:8080"));
/// ```
#[doc(alias = "activated")]
pub fn systemd(name: &str) -> Option<Endpoint> {
    let sockets = take_activated(name);
    let all = |sockets: Vec<OwnedFd>| sockets.into_iter().fold(Binds::default(), Binds::adopted);
    (!sockets.is_empty()).then(|| Endpoint(all(sockets)))
}

/// Several endpoints of one service, to set framing, name or limits for them. A list without
/// settings goes to [`Server::service`](crate::Server::service) as it is.
pub fn endpoints(list: impl IntoEndpoints<Framing = Raw>) -> Endpoints<Raw> {
    list.into_endpoints()
}

/// An endpoint of a service, made by [`tcp`], [`unix`], [`adopt`] and [`systemd`].
#[derive(Debug)]
pub struct Endpoint(pub(crate) Binds);

impl Endpoint {
    /// Expects a header of the PROXY protocol at the begin of each connection, which names the
    /// client.
    ///
    /// ```no_run
    /// use ringserve::listen::{ProxyProtocol, endpoints, tcp};
    /// use ringserve::{Cx, Frame, Server, Service, framing::Lines};
    /// # struct Echo;
    /// # impl Service for Echo {
    /// #     type Session = ();
    /// #     type Error = std::convert::Infallible;
    /// #     async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Self::Error> {
    /// #         cx.reply(frame);
    /// #         Ok(())
    /// #     }
    /// # }
    ///
    /// # fn main() -> Result<(), ringserve::Error> {
    /// let balancers = ProxyProtocol::from(["10.0.0.0/8", "fd00::/8"]);
    /// Server::new()
    ///     .service(
    ///         endpoints((tcp("0.0.0.0:7000").proxy_protocol(balancers), tcp("127.0.0.1:7001"))).framing(Lines::default()),
    ///         |_shard| Echo,
    ///     )
    ///     .serve()
    /// # }
    /// ```
    pub fn proxy_protocol(self, protocol: ProxyProtocol) -> Endpoint {
        Endpoint(self.0.proxy_protocol(protocol))
    }

    /// Puts a [transport](crate::transport) between socket and framing of its connections. `make`
    /// makes one value on each shard, at the start. The handshake follows the [PROXY
    /// header](Endpoint::proxy_protocol), and comes before [`Service::open`](crate::Service::open).
    pub fn transport<T: Transport>(self, make: impl Fn() -> T + Send + Sync + 'static) -> Endpoint {
        Endpoint(self.0.transport(MakeTransport::new(make)))
    }

    /// Limits who is let in at this endpoint, in the place of the limits of its service and of the
    /// server. It counts apart from other endpoints, and cannot have a rate of all
    /// ([`Admission::accept_rate`]). See [`Server::admission`](crate::Server::admission).
    ///
    /// ```no_run
    /// use ringserve::admission::Admission;
    /// use ringserve::listen::tcp;
    ///
    /// let everywhere = tcp("0.0.0.0:7000").listener_admission(Admission::default().per_address(20).connections_max(50_000));
    /// let inside = tcp("10.0.0.1:7001");
    /// # let _ = [everywhere, inside];
    /// ```
    pub fn listener_admission(self, admission: Admission) -> Endpoint {
        Endpoint(self.0.admission(admission))
    }

    /// As [`Endpoints::framing`].
    pub fn framing<F: TypedFraming + Clone + Send>(self, framing: F) -> Endpoints<F> {
        endpoints(self).framing(framing)
    }

    /// As [`Endpoints::name`].
    pub fn name(self, name: impl Into<String>) -> Endpoints<Raw> {
        endpoints(self).name(name)
    }

    /// As [`Endpoints::limits`].
    pub fn limits(self, limits: Limits) -> Endpoints<Raw> {
        endpoints(self).limits(limits)
    }

    /// As [`Endpoints::sockets`].
    pub fn sockets(self, sockets: SocketOptions) -> Endpoints<Raw> {
        endpoints(self).sockets(sockets)
    }

    /// As [`Endpoints::admission`].
    pub fn admission(self, admission: Admission) -> Endpoints<Raw> {
        endpoints(self).admission(admission)
    }

    /// As [`Endpoints::admit`].
    pub fn admit(self, admit: impl Fn(&Peer) -> bool + Send + Sync + 'static) -> Endpoints<Raw> {
        endpoints(self).admit(admit)
    }

    /// As [`Endpoints::access_log`].
    pub fn access_log(self, access_log: bool) -> Endpoints<Raw> {
        endpoints(self).access_log(access_log)
    }

    /// As [`Endpoints::drains_after`].
    pub fn drains_after(self, service: impl Into<String>) -> Endpoints<Raw> {
        endpoints(self).drains_after(service)
    }
}

/// The endpoints of one service, with settings for its connections. A setting that is left out is
/// taken from the server: [`Server::limits`](crate::Server::limits),
/// [`Server::sockets`](crate::Server::sockets), [`Server::admit`](crate::Server::admit),
/// [`Server::admission`](crate::Server::admission),
/// [`Server::access_log`](crate::Server::access_log).
pub struct Endpoints<F = Raw> {
    pub(super) framing: F,
    pub(super) config: ServiceConfig,
}

impl<F> Endpoints<F> {
    /// Sets how bytes become frames. Without a framing each frame is a piece of received bytes.
    pub fn framing<G: TypedFraming + Clone + Send>(self, framing: G) -> Endpoints<G> {
        Endpoints { framing, config: self.config }
    }

    /// Names the service in [figures](crate::stats::ServiceStats), in the log and in errors. By
    /// default it has its first address for a name. Two services may not have one name.
    pub fn name(self, name: impl Into<String>) -> Endpoints<F> {
        Endpoints { config: ServiceConfig { name: Some(name.into()), ..self.config }, ..self }
    }

    /// Sets the limits of its connections.
    pub fn limits(self, limits: Limits) -> Endpoints<F> {
        Endpoints { config: ServiceConfig { limits: Some(limits), ..self.config }, ..self }
    }

    /// Sets the options of its sockets.
    pub fn sockets(self, sockets: SocketOptions) -> Endpoints<F> {
        Endpoints { config: ServiceConfig { sockets: Some(sockets), ..self.config }, ..self }
    }

    /// Limits who is let in to this service, in the place of the server's limits. It counts apart
    /// from other services, and cannot have a rate of all ([`Admission::accept_rate`]), which holds
    /// for all services together. An endpoint that has [its own](Endpoint::listener_admission)
    /// keeps that. See [`Server::admission`](crate::Server::admission).
    pub fn admission(self, admission: Admission) -> Endpoints<F> {
        Endpoints { config: ServiceConfig { admission: Some(admission), ..self.config }, ..self }
    }

    /// Decides about each of its connections when it is accepted. See
    /// [`Server::admit`](crate::Server::admit).
    pub fn admit(self, admit: impl Fn(&Peer) -> bool + Send + Sync + 'static) -> Endpoints<F> {
        Endpoints { config: ServiceConfig { admit: Some(Arc::new(admit)), ..self.config }, ..self }
    }

    /// Writes a line to the [access log](crate::access_log) for each of its connections that ended,
    /// or none. See [`Server::access_log`](crate::Server::access_log).
    pub fn access_log(self, access_log: bool) -> Endpoints<F> {
        Endpoints { config: ServiceConfig { access_log: Some(access_log), ..self.config }, ..self }
    }

    /// In the [shutdown](crate::ServerHandle::shutdown) of the server has its connections served as
    /// before until no connection of the service with this [name](Endpoints::name) is left on any
    /// shard. May be called for several services. Their connections have
    /// [`Service::draining`](crate::Service::draining), and their moments, then.
    ///
    /// Its listeners are closed with those of all other services: connections that come later
    /// belong to another server.
    /// [`ServerLimits::drain_timeout`](crate::limits::ServerLimits::drain_timeout) bounds the drain
    /// of all services together, so that clients that stay leave it no time.
    ///
    /// Connections that end by themselves, as [streams](crate::stream()), await
    /// [`Shard::service_ended`](crate::Shard::service_ended).
    ///
    /// ```no_run
    /// use ringserve::listen::tcp;
    /// use ringserve::{Cx, Frame, Server, Service, framing::Lines};
    /// # struct Store;
    /// # impl Service for Store {
    /// #     type Session = ();
    /// #     type Error = std::convert::Infallible;
    /// #     async fn call(&self, cx: &Cx<'_, ()>, frame: Frame) -> Result<(), Self::Error> {
    /// #         cx.reply(frame);
    /// #         Ok(())
    /// #     }
    /// # }
    /// # use Store as Replica;
    ///
    /// # fn main() -> Result<(), ringserve::Error> {
    /// // A replica receives what the last client wrote.
    /// let clients = tcp("0.0.0.0:7000").framing(Lines::default()).name("clients");
    /// let replica = tcp("10.0.0.1:7001").framing(Lines::default()).drains_after("clients");
    /// Server::new().service(clients, |_shard| Store).service(replica, |_shard| Replica).serve()
    /// # }
    /// ```
    ///
    /// A name that no service has, and services that wait for each other, are an error of the start
    /// ([`Error::Services`](crate::Error::Services)), which names both.
    pub fn drains_after(mut self, service: impl Into<String>) -> Endpoints<F> {
        self.config.drains_after.push(service.into());
        self
    }
}

impl<F> fmt::Debug for Endpoints<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoints")
            .field("binds", &self.config.binds)
            .field("name", &self.config.name)
            .finish_non_exhaustive()
    }
}

/// Endpoints that [`Server::service`](crate::Server::service) takes: an [`Endpoint`], an array, a
/// `Vec`, a tuple of up to four of them, or [`Endpoints`].
pub trait IntoEndpoints {
    /// The framing of their connections.
    type Framing: TypedFraming + Clone + Send;

    /// All of them.
    fn into_endpoints(self) -> Endpoints<Self::Framing>;
}

impl<F: TypedFraming + Clone + Send> IntoEndpoints for Endpoints<F> {
    type Framing = F;

    fn into_endpoints(self) -> Endpoints<F> {
        self
    }
}

impl IntoEndpoints for Endpoint {
    type Framing = Raw;

    fn into_endpoints(self) -> Endpoints<Raw> {
        [self].into_endpoints()
    }
}

impl IntoEndpoints for Vec<Endpoint> {
    type Framing = Raw;

    fn into_endpoints(self) -> Endpoints<Raw> {
        let binds = self.into_iter().fold(Binds::default(), |all, Endpoint(more)| all.and(more));
        Endpoints { framing: Raw, config: ServiceConfig { binds, ..ServiceConfig::default() } }
    }
}

impl<const N: usize> IntoEndpoints for [Endpoint; N] {
    type Framing = Raw;

    fn into_endpoints(self) -> Endpoints<Raw> {
        Vec::from(self).into_endpoints()
    }
}

macro_rules! tuples_into_endpoints {
    ($($endpoint:ident)*) => {
        impl IntoEndpoints for ($(tuples_into_endpoints!(@ $endpoint),)*) {
            type Framing = Raw;

            fn into_endpoints(self) -> Endpoints<Raw> {
                let ($($endpoint,)*) = self;
                [$($endpoint),*].into_endpoints()
            }
        }
    };
    (@ $endpoint:ident) => { Endpoint };
}
tuples_into_endpoints!(a b);
tuples_into_endpoints!(a b c);
tuples_into_endpoints!(a b c d);
