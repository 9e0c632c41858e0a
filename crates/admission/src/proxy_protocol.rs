//! Listeners for connections that come through proxies.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use ipnet::IpNet;
use ringserve_core::Address;
use ringserve_core::proxy::HeaderRules;

use crate::lists::network;

/// The range of `header_bytes_max`: the size that every receiver has to take, and the largest that
/// the length field can say.
const HEADER_BYTES: (usize, usize) = (536, 16 + 65_535);

/// The PROXY protocol at a listener: the sources whose headers are believed, and the largest
/// header. For `Endpoint::proxy_protocol` and `Server::proxy_protocol`.
///
/// Each connection begins with a header of version 1 or 2, or it is closed. The server never
/// guesses from received bytes whether a header is there: a client that got in without one could as
/// well send one, and claim any address. Clients that connect directly have another listener of the
/// same service. `Service::open` and everything behind it see the client in `Peer::addr` and
/// `Peer::local_addr`, and the proxy in `Peer::via`.
///
/// | received | outcome |
/// |---|---|
/// | a header for `TCP4`, `TCP6` | the client is the peer |
/// | `UNKNOWN`, `LOCAL`, no or a Unix address, a family of datagrams | the proxy is the peer, as in its health checks |
/// | a source outside of the networks | reset, `ProxyUntrusted` |
/// | anything else, a wrong checksum, more than [`header_bytes_max`](ProxyProtocol::header_bytes_max) | closed, `ProxyBadHeader` |
/// | half a header, or nothing, for `Limits::proxy_header_timeout` | closed, `ProxyTimeout` |
/// | FIN before the first byte | closed, `ProxyNoHeader` |
///
/// A header costs no allocation. From the first connection through a proxy on, each slot of the
/// connection table costs about 100 bytes, in pieces of 256 slots.
///
/// ```
/// # mod ringserve {
/// #     pub mod listen {
/// #         pub use ringserve_admission::proxy_protocol::ProxyProtocol;
/// #     }
/// # }
/// use ringserve::listen::ProxyProtocol;
///
/// let balancers = ProxyProtocol::from(["10.0.0.0/8", "fd00::/8"]);
/// # let _ = balancers;
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProxyProtocol {
    networks: Vec<IpNet>,
    /// The first network that could not be parsed.
    unclear: Option<String>,
    header_bytes_max: usize,
    keeps_tlvs: bool,
}

impl Default for ProxyProtocol {
    /// Believes every peer of a Unix socket, whose permissions say which may connect. At a TCP
    /// address it would believe none, which the start refuses.
    fn default() -> ProxyProtocol {
        ProxyProtocol { networks: Vec::new(), unclear: None, header_bytes_max: 4096, keeps_tlvs: false }
    }
}

impl ProxyProtocol {
    /// Sets the largest header of version 2, 536 to 65551 bytes. Default 4096: a header with the
    /// certificate of a client may need more. A connection holds at most that much before it is
    /// open.
    #[must_use]
    pub fn header_bytes_max(self, bytes: usize) -> ProxyProtocol {
        ProxyProtocol { header_bytes_max: bytes, ..self }
    }

    /// Keeps fields of version 2 in addition to the addresses, for `Cx::tlvs` and `OpenCx::tlvs`:
    /// the name that the client asked for, its certificate, the proxy's name for the connection.
    /// One allocation for each connection that brings some, of their size. Off by default.
    #[must_use]
    pub fn keep_tlvs(self) -> ProxyProtocol {
        ProxyProtocol { keeps_tlvs: true, ..self }
    }

    /// Refuses settings that fit no listener, or not the one at `addr`.
    #[doc(hidden)]
    pub fn check(&self, addr: &Address) -> io::Result<()> {
        let wrong = |text: String| Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        if let Some(text) = &self.unclear {
            return wrong(format!(
                "{text:?} is no network whose PROXY headers could be trusted; write ADDRESS/BITS"
            ));
        }
        let (min, max) = HEADER_BYTES;
        if !(min..=max).contains(&self.header_bytes_max) {
            return wrong(format!(
                "ProxyProtocol::header_bytes_max is {}; it must be {min} to {max}",
                self.header_bytes_max
            ));
        }
        if self.networks.is_empty() && addr.as_ip().is_some() {
            return wrong(format!(
                "no network is named whose PROXY headers are trusted at {addr}; name those of the proxies, such as \
                 ProxyProtocol::from([\"10.0.0.0/8\"])"
            ));
        }
        Ok(())
    }
}

/// Networks whose headers are believed, each an address with a prefix length, such as `10.0.0.0/8`,
/// or an address alone. IPv4 may be written as IPv6 (`::ffff:10.0.0.0/104`).
impl<T: AsRef<str>> FromIterator<T> for ProxyProtocol {
    fn from_iter<I: IntoIterator<Item = T>>(networks: I) -> ProxyProtocol {
        let mut protocol = ProxyProtocol::default();
        for text in networks {
            match network(text.as_ref()) {
                Some(network) => protocol.networks.push(network),
                None => _ = protocol.unclear.get_or_insert_with(|| text.as_ref().to_owned()),
            }
        }
        protocol
    }
}

impl<T: AsRef<str>, const N: usize> From<[T; N]> for ProxyProtocol {
    fn from(networks: [T; N]) -> ProxyProtocol {
        networks.into_iter().collect()
    }
}

impl<T: AsRef<str>> From<Vec<T>> for ProxyProtocol {
    fn from(networks: Vec<T>) -> ProxyProtocol {
        networks.into_iter().collect()
    }
}

/// The proxies that one listener believes.
pub struct Trust {
    protocol: ProxyProtocol,
    /// A Unix socket, whose permissions say which peers may connect.
    is_unix: bool,
}

impl Trust {
    /// True if a header from `source` is believed.
    pub fn includes(&self, source: Option<SocketAddr>) -> bool {
        let Some(source) = source.filter(|_| !self.is_unix) else { return self.is_unix };
        self.protocol.networks.iter().any(|network| network.contains(&source.ip()))
    }
}

/// The listeners of a server that expect headers, by number; empty if none does.
#[derive(Clone, Default)]
pub struct Proxies(Arc<[Option<Trust>]>);

impl Proxies {
    /// The settings of the listeners in their order, each with the proxies that it believes, if
    /// any.
    pub fn of<'a>(listeners: impl Iterator<Item = (&'a Address, Option<&'a ProxyProtocol>)>) -> Proxies {
        let trust = |(addr, protocol): (&Address, Option<&ProxyProtocol>)| {
            let is_unix = addr.as_unix().is_some();
            protocol.cloned().map(|protocol| Trust { protocol, is_unix })
        };
        let all: Arc<[_]> = listeners.map(trust).collect();
        if all.iter().any(Option::is_some) { Proxies(all) } else { Proxies::default() }
    }

    /// The proxies of a listener, if it expects headers.
    pub fn at(&self, listener: u16) -> Option<&Trust> {
        self.0.get(usize::from(listener))?.as_ref()
    }

    /// The listeners that expect headers.
    pub fn expected(&self) -> impl Iterator<Item = (u16, HeaderRules)> {
        self.0.iter().enumerate().filter_map(|(listener, trust)| {
            let ProxyProtocol { header_bytes_max, keeps_tlvs, .. } = trust.as_ref()?.protocol;
            Some((listener as u16, HeaderRules { bytes_max: header_bytes_max, keeps_tlvs }))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip() -> Address {
        Address::Ip(([0, 0, 0, 0], 7000).into())
    }

    #[test]
    fn network_is_an_address_with_or_without_its_bits() {
        let networks =
            ["10.0.0.0/8", "fd00::/8", "192.0.2.7", "::ffff:203.0.113.0/120", "::ffff:198.51.100.9"];
        let protocol = ProxyProtocol::from(networks);
        protocol.check(&ip()).unwrap();
        let trust = Trust { protocol, is_unix: false };
        for (source, is_trusted) in [
            ("10.255.0.1:7", true),
            ("11.0.0.1:7", false),
            ("[fd12::1]:7", true),
            ("[fe80::1]:7", false),
            ("192.0.2.7:7", true),
            ("192.0.2.8:7", false),
            ("203.0.113.77:7", true),
            ("203.0.114.77:7", false),
            ("198.51.100.9:7", true),
        ] {
            assert_eq!(trust.includes(source.parse().ok()), is_trusted, "{source}");
        }
        assert!(!trust.includes(None), "a peer without an address");
        let unix = Trust { protocol: ProxyProtocol::default(), is_unix: true };
        assert!(unix.includes(None));
    }

    #[test]
    fn what_cannot_hold_is_named() {
        let refused = |protocol: ProxyProtocol| protocol.check(&ip()).unwrap_err().to_string();
        for text in ["10.0.0.0/33", "localhost", "10.0.0.0/8 ", "", "10.0/8"] {
            let error = refused(ProxyProtocol::from(["10.0.0.0/8", text]));
            assert!(error.starts_with(&format!("{text:?} is no network")), "{error}");
        }
        let none: [&str; 0] = [];
        assert_eq!(
            refused(ProxyProtocol::from(none)),
            "no network is named whose PROXY headers are trusted at 0.0.0.0:7000; name those of the proxies, such as \
             ProxyProtocol::from([\"10.0.0.0/8\"])"
        );
        ProxyProtocol::default().check(&Address::unix("a")).unwrap();
        for bytes in [535, 65_552] {
            let error = refused(ProxyProtocol::from(["::/0"]).header_bytes_max(bytes));
            assert_eq!(error, format!("ProxyProtocol::header_bytes_max is {bytes}; it must be 536 to 65551"));
        }
    }
}
