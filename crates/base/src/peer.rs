//! The other end of a connection.

use std::fmt;
use std::net::SocketAddr;

use ringserve_core::proxy::ProxyFacts;
use ringserve_core::{Outlet, PeerCredentials, SocketFacts};

/// The other end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    addr: Option<SocketAddr>,
    via: Option<SocketAddr>,
    is_proxy: bool,
    listener: u16,
    asked: SocketFacts,
}

impl Peer {
    /// The peer of a connection.
    #[doc(hidden)]
    pub fn of(outlet: &Outlet) -> Peer {
        let ProxyFacts { via, destination } = outlet.proxied();
        let mut asked = outlet.asked();
        asked.local = destination.or(asked.local);
        Peer { addr: outlet.peer(), via, is_proxy: false, listener: outlet.listener(), asked }
    }

    /// A peer of which only address and listener are known.
    #[doc(hidden)]
    pub fn new(addr: Option<SocketAddr>, listener: u16) -> Peer {
        Peer { addr, via: None, is_proxy: false, listener, asked: SocketFacts::default() }
    }

    /// The same, known to be a proxy that speaks first, or not.
    #[doc(hidden)]
    pub fn as_proxy(self, is_proxy: bool) -> Peer {
        Peer { is_proxy, ..self }
    }

    /// The number of the listener.
    #[doc(hidden)]
    #[inline]
    pub fn listener_id(&self) -> u16 {
        self.listener
    }

    /// The facts that the kernel was asked for.
    #[doc(hidden)]
    pub fn asked(&self) -> SocketFacts {
        self.asked
    }

    /// The same, to add some.
    #[doc(hidden)]
    pub fn asked_mut(&mut self) -> &mut SocketFacts {
        &mut self.asked
    }

    /// The address of the peer, behind a proxy that of the client. One of IPv4 is shown as such
    /// wherever it came, also at `[::]` and in a PROXY header of IPv6: `::ffff:192.0.2.1` is
    /// `192.0.2.1`. `None` on a Unix socket, for a peer that was gone before the kernel was asked,
    /// and where `SocketOptions::peer_address` is off.
    pub fn addr(&self) -> Option<SocketAddr> {
        self.addr
    }

    /// The proxy through which the peer came, where [`addr`](Peer::addr) is taken from its PROXY
    /// header. `None` for a peer that came directly, for a proxy that speaks for itself, and for a
    /// proxy at a Unix socket, which has no address.
    pub fn via(&self) -> Option<SocketAddr> {
        self.via
    }

    /// True for a proxy whose header has not been read, as `Server::admit` sees it first. A policy
    /// on addresses of clients waits for the second call.
    pub fn is_proxy(&self) -> bool {
        self.is_proxy
    }

    /// The local address that the peer connected to: of this host, or of the proxy through which it
    /// came. `None` on a Unix socket, and for peers that came directly while
    /// `SocketOptions::local_address` is off, as it is by default.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.asked.local
    }

    /// The process at the other end of a Unix socket, which may be a proxy: see [`via`](Peer::via).
    /// `None` for TCP, and while `SocketOptions::peer_credentials` is off, as it is by default,
    /// unless an `Admission` counts users.
    pub fn credentials(&self) -> Option<PeerCredentials> {
        self.asked.credentials
    }

    /// The listener that the peer connected to, counted in the order of
    /// `ServerHandle::listeners`.
    pub fn listener(&self) -> usize {
        usize::from(self.listener)
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.addr {
            Some(addr) => addr.fmt(f),
            None => f.write_str("unknown"),
        }
    }
}
