//! PROXY headers towards upstreams.

use std::net::SocketAddr;

use ringserve_core::Address;
use ringserve_core::proxy::{CommandV2, Ends, write_v1, write_v2};

use ringserve_base::peer::Peer;

/// The header of the PROXY protocol at the begin of a connection to an upstream, for
/// [`Connecting::proxy_header`](crate::net::Connecting::proxy_header): it names the client to the
/// upstream.
///
/// It also says which address the client connected to: [`Peer::local_addr`] if that is known, else
/// the address of the listener, which says only the port if it is `0.0.0.0`. For a client without
/// an IP address it says `UNKNOWN`. An IPv4 address in the form of IPv6 is written as IPv4 if both
/// addresses are.
///
/// ```no_run
/// use ringserve::net::{ProxyHeader, copy_bidirectional};
/// use ringserve::{Server, Stream, stream};
///
/// # fn main() -> Result<(), ringserve::Error> {
/// Server::bind("127.0.0.1:7000").serve(|_shard| {
///     stream(async |mut client: Stream| {
///         let header = ProxyHeader::v2(&client.peer());
///         let mut upstream = client.shard().connect("127.0.0.1:8000").proxy_header(header).await?;
///         copy_bidirectional(&mut client, &mut upstream).await.map_err(|broken| broken.error)
///     })
/// })
/// # }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProxyHeader {
    version: Version,
    tlvs: Vec<(u8, Box<[u8]>)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    One(Peer),
    Two(Peer),
    LocalOne,
    Local,
}

impl ProxyHeader {
    fn of(version: Version) -> ProxyHeader {
        ProxyHeader { version, tlvs: Vec::new() }
    }

    /// A line of version 1, for upstreams that read nothing else.
    pub fn v1(client: &Peer) -> ProxyHeader {
        ProxyHeader::of(Version::One(*client))
    }

    /// A block of version 2, with a checksum.
    pub fn v2(client: &Peer) -> ProxyHeader {
        ProxyHeader::of(Version::Two(*client))
    }

    /// A block of version 2 that says `LOCAL`: the connection is the server's own, such as a health
    /// check.
    pub fn local() -> ProxyHeader {
        ProxyHeader::of(Version::Local)
    }

    /// A line of version 1 that says `UNKNOWN`, for the server's own connections: version 1 has no
    /// `LOCAL`. The receiver takes the server for the peer.
    pub fn local_v1() -> ProxyHeader {
        ProxyHeader::of(Version::LocalOne)
    }

    /// Adds a field to a block of version 2, such as those of
    /// [`Tlvs::iter`](crate::listen::Tlvs::iter): 0x02 is the name that the client asked for, 0x05
    /// a name for the connection. It does nothing in version 1; fields beyond 64 KiB together are
    /// left out.
    #[must_use]
    pub fn tlv(mut self, kind: u8, value: impl AsRef<[u8]>) -> ProxyHeader {
        self.tlvs.push((kind, value.as_ref().into()));
        self
    }

    /// The bytes that a server with these listeners sends.
    pub(super) fn encode(&self, listeners: &[Address]) -> Vec<u8> {
        let mut out = Vec::new();
        let fields = self.tlvs.iter().map(|(kind, value)| (*kind, &**value));
        match &self.version {
            Version::One(client) => write_v1(&mut out, ends(client, listeners)),
            Version::Two(client) => write_v2(&mut out, CommandV2::Proxy(ends(client, listeners)), fields),
            Version::LocalOne => write_v1(&mut out, None),
            Version::Local => write_v2(&mut out, CommandV2::Local, fields),
        }
        out
    }
}

fn ends(client: &Peer, listeners: &[Address]) -> Option<Ends> {
    let source = client.addr()?;
    let listener = || listeners.get(client.listener()).and_then(Address::as_ip);
    let unknown = || SocketAddr::new(source.ip(), 0);
    Some(Ends { source, destination: client.local_addr().or_else(listener).unwrap_or_else(unknown) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn client_is_named_with_what_it_connected_to() {
        let listeners = [Address::Ip(([0, 0, 0, 0], 443).into()), Address::unix("a")];
        let mut client = Peer::new(Some(([192, 0, 2, 1], 7).into()), 0);
        let line = |client: &Peer| String::from_utf8(ProxyHeader::v1(client).encode(&listeners)).unwrap();
        assert_eq!(line(&client), "PROXY TCP4 192.0.2.1 0.0.0.0 7 443\r\n");
        client.asked_mut().local = Some(([198, 51, 100, 7], 443).into());
        assert_eq!(line(&client), "PROXY TCP4 192.0.2.1 198.51.100.7 7 443\r\n");
        assert_eq!(line(&Peer::new(None, 1)), "PROXY UNKNOWN\r\n");
    }

    #[test]
    fn line_of_the_servers_own_names_no_client() {
        let line = ProxyHeader::local_v1().tlv(0x05, "seven").encode(&[Address::unix("a")]);
        assert_eq!(line, b"PROXY UNKNOWN\r\n");
    }

    #[test]
    fn block_has_the_fields_that_were_added() {
        let client = Peer::new(Some(([192, 0, 2, 1], 7).into()), 0);
        for (header, command) in [(ProxyHeader::v2(&client), 0x21), (ProxyHeader::local(), 0x20)] {
            let bytes = header.tlv(0x05, "seven").encode(&[]);
            assert_eq!(bytes[12], command);
            assert!(bytes.windows(8).any(|field| field == b"\x05\0\x05seven"));
        }
    }
}
