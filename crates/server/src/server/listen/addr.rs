//! Where a server listens.

use std::fmt;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
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

/// Listeners at most: beyond, something is wrong with the list.
const LISTENERS_MAX: usize = 1024;

/// What the program asked for, in its order.
#[derive(Debug)]
pub(crate) struct Binds {
    addrs: Vec<ListenAddr>,
    /// The first one that cannot be resolved.
    failed: Option<io::Error>,
}

impl Binds {
    pub(crate) fn new() -> Binds {
        Binds { addrs: Vec::new(), failed: None }
    }

    pub(crate) fn ip(mut self, addr: impl ToSocketAddrs) -> Binds {
        match addr.to_socket_addrs() {
            Ok(found) => {
                let before = self.addrs.len();
                for addr in found.map(ListenAddr::Ip) {
                    // A name may resolve to an address twice. Port 0 is another port each time.
                    if !self.addrs[before..].contains(&addr) || is_any_port(&addr) {
                        self.addrs.push(addr);
                    }
                }
                if self.addrs.len() == before {
                    self.fail(io::Error::new(io::ErrorKind::InvalidInput, "it resolves to no address"));
                }
            }
            Err(error) => self.fail(error),
        }
        self
    }

    pub(crate) fn unix(mut self, path: impl Into<PathBuf>) -> Binds {
        self.addrs.push(ListenAddr::Unix(path.into()));
        self
    }

    fn fail(&mut self, error: io::Error) {
        self.failed.get_or_insert(error);
    }

    /// All of them, if each can be resolved and none comes twice.
    pub(crate) fn all(self) -> io::Result<Vec<ListenAddr>> {
        let wrong = |text: String| Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        if let Some(error) = self.failed {
            return Err(error);
        }
        if self.addrs.len() > LISTENERS_MAX {
            return wrong(format!("there are {} of them; {LISTENERS_MAX} is the most", self.addrs.len()));
        }
        for (n, addr) in self.addrs.iter().enumerate() {
            if self.addrs[..n].contains(addr) && !is_any_port(addr) {
                return wrong(format!("{addr} is given twice"));
            }
        }
        Ok(self.addrs)
    }
}

fn is_any_port(addr: &ListenAddr) -> bool {
    addr.as_ip().is_some_and(|addr| addr.port() == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_given_twice_is_named_and_free_ports_are_not() {
        let twice = Binds::new().ip("127.0.0.1:7").unix("a").ip("127.0.0.1:7").all().unwrap_err();
        assert!(twice.to_string().ends_with("127.0.0.1:7 is given twice"), "{twice}");
        let twice = Binds::new().unix("a").unix("a").all().unwrap_err();
        assert!(twice.to_string().ends_with("unix:a is given twice"), "{twice}");
        assert_eq!(Binds::new().ip("127.0.0.1:0").ip("127.0.0.1:0").all().unwrap().len(), 2);
        let none = Binds::new().ip(&[][..]).all().unwrap_err();
        assert!(none.to_string().ends_with("it resolves to no address"), "{none}");
    }
}
