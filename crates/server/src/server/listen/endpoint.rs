//! Where a service is reached, and what holds for it there.

use std::fmt;
use std::net::ToSocketAddrs;
use std::path::PathBuf;
use std::sync::Arc;

use ringserve_core::Limits;
use ringserve_core::framing::{Raw, TypedFraming};

use super::addr::Binds;
use crate::peer::Peer;
use crate::server::socket_options::options::SocketOptions;
use crate::shard::state::Admit;

/// A TCP address, on every address it resolves to. Port 0 finds a free port. One that cannot be resolved is reported at the
/// start. `[::]` and IPv4 go together as with [`Server::listen`](crate::Server::listen).
pub fn tcp(addr: impl ToSocketAddrs) -> Endpoint {
    Endpoint(Binds::default().ip(addr))
}

/// A Unix socket. See [`Server::listen_unix`](crate::Server::listen_unix) for its file, its permissions and abstract names.
pub fn unix(path: impl Into<PathBuf>) -> Endpoint {
    Endpoint(Binds::default().unix(path))
}

/// Several endpoints of one service, of which more is to be said. A list that is told nothing goes to
/// [`Server::service`](crate::Server::service) as it is.
pub fn endpoints(list: impl IntoEndpoints<Framing = Raw>) -> Endpoints<Raw> {
    list.into_endpoints()
}

/// Where a service is reached: made by [`tcp`] and [`unix`].
#[derive(Debug)]
pub struct Endpoint(Binds);

impl Endpoint {
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

    /// As [`Endpoints::admit`].
    pub fn admit(self, admit: impl Fn(&Peer) -> bool + Send + Sync + 'static) -> Endpoints<Raw> {
        endpoints(self).admit(admit)
    }
}

/// The endpoints of one service, and what holds for its connections. What is not said here is as the server was told:
/// [`Server::limits`](crate::Server::limits), [`Server::sockets`](crate::Server::sockets),
/// [`Server::admit`](crate::Server::admit).
pub struct Endpoints<F = Raw> {
    pub(in crate::server) binds: Binds,
    pub(in crate::server) framing: F,
    pub(in crate::server) name: Option<String>,
    pub(in crate::server) limits: Option<Limits>,
    pub(in crate::server) sockets: Option<SocketOptions>,
    pub(in crate::server) admit: Option<Admit>,
}

impl<F> Endpoints<F> {
    /// How bytes become frames. Without it each frame is whatever arrived together.
    pub fn framing<G: TypedFraming + Clone + Send>(self, framing: G) -> Endpoints<G> {
        Endpoints {
            framing,
            binds: self.binds,
            name: self.name,
            limits: self.limits,
            sockets: self.sockets,
            admit: self.admit,
        }
    }

    /// The name of the service in [figures](crate::stats::ServiceStats), in the log and in errors. By default it is the first
    /// address. Two services may not have one name.
    pub fn name(self, name: impl Into<String>) -> Endpoints<F> {
        Endpoints { name: Some(name.into()), ..self }
    }

    /// The limits of its connections.
    pub fn limits(self, limits: Limits) -> Endpoints<F> {
        Endpoints { limits: Some(limits), ..self }
    }

    /// What the kernel is told about its sockets.
    pub fn sockets(self, sockets: SocketOptions) -> Endpoints<F> {
        Endpoints { sockets: Some(sockets), ..self }
    }

    /// Decides about each of its connections when it is accepted. See [`Server::admit`](crate::Server::admit).
    pub fn admit(self, admit: impl Fn(&Peer) -> bool + Send + Sync + 'static) -> Endpoints<F> {
        Endpoints { admit: Some(Arc::new(admit)), ..self }
    }
}

impl<F> fmt::Debug for Endpoints<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Endpoints")
            .field("binds", &self.binds)
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

/// What [`Server::service`](crate::Server::service) takes: an [`Endpoint`], an array, a `Vec` or a tuple of up to four of them, or
/// [`Endpoints`].
pub trait IntoEndpoints {
    /// How the bytes of their connections become frames.
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
        Endpoints { binds, framing: Raw, name: None, limits: None, sockets: None, admit: None }
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
