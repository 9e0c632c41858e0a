//! Who is at the other end of a connection.

use std::fmt;
use std::net::SocketAddr;

use ringserve_core::{Asked, Outlet, PeerCredentials};

/// The other end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    pub(crate) addr: Option<SocketAddr>,
    pub(crate) listener: u16,
    pub(crate) asked: Asked,
}

impl Peer {
    pub(crate) fn of(outlet: &Outlet) -> Peer {
        Peer { addr: outlet.peer(), listener: outlet.listener(), asked: outlet.asked() }
    }

    /// One of which nothing else is known yet.
    pub(crate) fn new(addr: Option<SocketAddr>, listener: u16) -> Peer {
        Peer { addr, listener, asked: Asked::default() }
    }

    /// Its address. `None` on a Unix socket, for a peer that was gone before it could be asked, and where
    /// [`SocketOptions::peer_address`](crate::net::SocketOptions::peer_address) is off.
    pub fn addr(&self) -> Option<SocketAddr> {
        self.addr
    }

    /// Which address of this host it connected to. `None` on a Unix socket, and where
    /// [`SocketOptions::local_address`](crate::net::SocketOptions::local_address) is off, as it is by default.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.asked.local
    }

    /// The process at the other end of a Unix socket. `None` for all others, and where
    /// [`SocketOptions::peer_credentials`](crate::net::SocketOptions::peer_credentials) is off, as it is by default.
    pub fn credentials(&self) -> Option<PeerCredentials> {
        self.asked.credentials
    }

    /// Which of the server's listeners it connected to, in the order of
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
