//! Addresses to listen at, or to connect to.

use alloc::boxed::Box;
use alloc::string::String;
use core::fmt;
use core::net::{IpAddr, SocketAddr};

/// An address to listen at, or to connect to. Its text is an IP address with its port, such as
/// `[::1]:7000`, or `unix:` and a path, such as `unix:/run/app.sock`; with an abstract name
/// `unix:@app`.
///
/// ```
/// use ringserve::net::Address;
///
/// assert_eq!(Address::unix("/run/app.sock").to_string(), "unix:/run/app.sock");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Address {
    /// An IP address and a port.
    Ip(SocketAddr),
    /// The path of a Unix domain socket, of 1 to 107 bytes. A path that begins with a zero byte is
    /// an abstract name.
    Unix(Box<[u8]>),
}

impl Address {
    /// A Unix domain socket. A path that begins with `@` is an abstract name, without a file.
    pub fn unix(path: impl AsRef<[u8]>) -> Address {
        let mut path: Box<[u8]> = path.as_ref().into();
        if let Some(first) = path.first_mut().filter(|first| **first == b'@') {
            *first = 0;
        }
        Address::Unix(path)
    }

    /// The IP address and port, if it has one.
    pub fn as_ip(&self) -> Option<SocketAddr> {
        match self {
            Address::Ip(addr) => Some(*addr),
            Address::Unix(_) => None,
        }
    }

    /// The bytes of the Unix socket's path, if it has one; those of an abstract name follow a zero
    /// byte.
    pub fn as_unix(&self) -> Option<&[u8]> {
        match self {
            Address::Ip(_) => None,
            Address::Unix(path) => Some(path),
        }
    }
}

impl From<SocketAddr> for Address {
    fn from(addr: SocketAddr) -> Address {
        Address::Ip(addr)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Ip(addr) => addr.fmt(f),
            Address::Unix(path) => match path.split_first() {
                Some((0, name)) => write!(f, "unix:@{}", String::from_utf8_lossy(name)),
                _ => write!(f, "unix:{}", String::from_utf8_lossy(path)),
            },
        }
    }
}

/// One form for each address: an IPv4 address that `[::]` or a proxy writes as one of IPv6
/// (`::ffff:192.0.2.1`) is one of IPv4.
#[inline]
pub fn canonical(addr: SocketAddr) -> SocketAddr {
    match addr.ip().to_canonical() {
        IpAddr::V4(ip) => SocketAddr::new(ip.into(), addr.port()),
        IpAddr::V6(_) => addr,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    #[test]
    fn ipv4_address_has_one_form() {
        for (addr, form) in [
            ("[::ffff:192.0.2.1]:7", "192.0.2.1:7"),
            ("192.0.2.1:7", "192.0.2.1:7"),
            ("[fe80::1%3]:7", "[fe80::1%3]:7"),
            ("[::192.0.2.1]:7", "[::192.0.2.1]:7"),
        ] {
            assert_eq!(canonical(addr.parse().unwrap()), form.parse().unwrap(), "{addr}");
        }
    }

    #[test]
    fn an_address_reads_as_users_write_it() {
        let ip = Address::from("[::1]:80".parse::<SocketAddr>().unwrap());
        assert_eq!((ip.to_string().as_str(), ip.as_ip().is_some(), ip.as_unix()), ("[::1]:80", true, None));
        assert_eq!(Address::unix("/run/x.sock").to_string(), "unix:/run/x.sock");
        assert_eq!(Address::unix("@x").to_string(), "unix:@x");
        assert_eq!(Address::unix("@x").as_unix(), Some(&b"\0x"[..]));
    }
}
