//! Who is at the other end of a connection.

use std::fmt;
use std::net::SocketAddr;

use ringserve_core::Outlet;

/// The other end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    pub(crate) addr: Option<SocketAddr>,
    pub(crate) listener: u16,
}

impl Peer {
    pub(crate) fn of(outlet: &Outlet) -> Peer {
        Peer { addr: outlet.peer(), listener: outlet.listener() }
    }

    /// Its address. `None` on a Unix socket, for a peer that was gone before it could be asked, and where
    /// [`SocketOptions::peer_address`](crate::net::SocketOptions::peer_address) is off.
    pub fn addr(&self) -> Option<SocketAddr> {
        self.addr
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
