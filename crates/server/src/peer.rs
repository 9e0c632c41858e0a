//! The other end of a connection.

use std::fmt;
use std::net::SocketAddr;

use ringserve_core::proxy::ProxyFacts;
use ringserve_core::{Outlet, PeerCredentials, SocketFacts};

/// The other end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    pub(crate) addr: Option<SocketAddr>,
    pub(crate) via: Option<SocketAddr>,
    pub(crate) is_proxy: bool,
    pub(crate) listener: u16,
    pub(crate) asked: SocketFacts,
}

impl Peer {
    pub(crate) fn of(outlet: &Outlet) -> Peer {
        let ProxyFacts { via, destination } = outlet.proxied();
        let mut asked = outlet.asked();
        asked.local = destination.or(asked.local);
        Peer { addr: outlet.peer(), via, is_proxy: false, listener: outlet.listener(), asked }
    }

    /// A peer of which only address and listener are known.
    pub(crate) fn new(addr: Option<SocketAddr>, listener: u16) -> Peer {
        Peer { addr, via: None, is_proxy: false, listener, asked: SocketFacts::default() }
    }

    /// The address of the peer, behind a proxy that of the client. One of IPv4 is shown as such wherever it came, also at `[::]` and
    /// in a PROXY header of IPv6: `::ffff:192.0.2.1` is `192.0.2.1`. `None` on a Unix socket, for a peer that was gone before the
    /// kernel was asked, and where [`SocketOptions::peer_address`](crate::net::SocketOptions::peer_address) is off.
    pub fn addr(&self) -> Option<SocketAddr> {
        self.addr
    }

    /// The proxy through which the peer came, where [`addr`](Peer::addr) is taken from its PROXY header. `None` for a peer that
    /// came directly, for a proxy that speaks for itself, and for a proxy at a Unix socket, which has no address.
    pub fn via(&self) -> Option<SocketAddr> {
        self.via
    }

    /// True for a proxy whose header has not been read, as [`Server::admit`](crate::Server::admit) sees it first. A policy on
    /// addresses of clients waits for the second call.
    pub fn is_proxy(&self) -> bool {
        self.is_proxy
    }

    /// The local address that the peer connected to: of this host, or of the proxy through which it came. `None` on a Unix
    /// socket, and for peers that came directly while
    /// [`SocketOptions::local_address`](crate::net::SocketOptions::local_address) is off, as it is by default.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.asked.local
    }

    /// The process at the other end of a Unix socket, which may be a proxy: see [`via`](Peer::via). `None` for TCP, and while
    /// [`SocketOptions::peer_credentials`](crate::net::SocketOptions::peer_credentials) is off, as it is by default, unless an
    /// [`Admission`](crate::admission::Admission) counts users.
    pub fn credentials(&self) -> Option<PeerCredentials> {
        self.asked.credentials
    }

    /// The listener that the peer connected to, counted in the order of
    /// [`ServerHandle::listeners`](crate::ServerHandle::listeners).
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
