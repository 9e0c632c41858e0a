//! Where a server listens.

use std::fmt;
use std::net::SocketAddr;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use ringserve_core::Address;

/// Where a server listens. As text an IP address with its port, as `[::1]:7000`, or `unix:` and the path, as
/// `unix:/run/app.sock`.
///
/// ```
/// use ringserve::ListenAddr;
///
/// assert_eq!(ListenAddr::Unix("/run/app.sock".into()).to_string(), "unix:/run/app.sock");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ListenAddr {
    /// An IP address and a port.
    Ip(SocketAddr),
    /// The path of a Unix socket as it was given, or `@` and an abstract name.
    Unix(PathBuf),
}

impl ListenAddr {
    /// The IP address, if it is one.
    pub fn as_ip(&self) -> Option<SocketAddr> {
        match self {
            ListenAddr::Ip(addr) => Some(*addr),
            ListenAddr::Unix(_) => None,
        }
    }

    /// The path of the Unix socket, if it is one.
    pub fn as_unix(&self) -> Option<&Path> {
        match self {
            ListenAddr::Ip(_) => None,
            ListenAddr::Unix(path) => Some(path),
        }
    }
}

/// So that one server can connect to where another one listens.
impl From<ListenAddr> for Address {
    fn from(addr: ListenAddr) -> Address {
        match addr {
            ListenAddr::Ip(addr) => Address::Ip(addr),
            ListenAddr::Unix(path) => Address::unix(path.into_os_string().into_vec()),
        }
    }
}

impl From<SocketAddr> for ListenAddr {
    fn from(addr: SocketAddr) -> ListenAddr {
        ListenAddr::Ip(addr)
    }
}

impl fmt::Display for ListenAddr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ListenAddr::Ip(addr) => addr.fmt(f),
            ListenAddr::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}
