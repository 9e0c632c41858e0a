//! A peer's address in three words. They cost less to copy than the standard library's type, and
//! can be stored one by one where another thread reads them.
//!
//! ```text
//!   first    2 bits: none, IPv4, IPv6   port   IPv4 address, or IPv6 scope
//!   others   IPv6 address
//! ```

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

/// In the first word, above its port and the 32 bits of an IPv4 address or of an IPv6 scope.
const PORT_SHIFT: u32 = 32;
const V4: u64 = 1 << 48;
const V6: u64 = 2 << 48;

/// The address of a peer, or none. It lacks the IPv6 flow label: the kernel gives none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PeerWords(pub [u64; 3]);

impl PeerWords {
    /// True if the other two words are part of it. Otherwise they are zero.
    #[inline]
    pub fn is_long(&self) -> bool {
        self.0[0] & V6 != 0
    }
}

impl From<Option<SocketAddr>> for PeerWords {
    fn from(peer: Option<SocketAddr>) -> PeerWords {
        let port = |peer: SocketAddr| u64::from(peer.port()) << PORT_SHIFT;
        match peer {
            Some(SocketAddr::V4(v4)) => {
                PeerWords([V4 | port(v4.into()) | u64::from(v4.ip().to_bits()), 0, 0])
            }
            Some(SocketAddr::V6(v6)) => {
                let bits = v6.ip().to_bits();
                PeerWords([V6 | port(v6.into()) | u64::from(v6.scope_id()), (bits >> 64) as u64, bits as u64])
            }
            None => PeerWords::default(),
        }
    }
}

impl From<PeerWords> for Option<SocketAddr> {
    fn from(PeerWords([first, high, low]): PeerWords) -> Option<SocketAddr> {
        let (port, rest) = ((first >> PORT_SHIFT) as u16, first as u32);
        match first & (V4 | V6) {
            V4 => Some(SocketAddr::new(IpAddr::V4(Ipv4Addr::from_bits(rest)), port)),
            V6 => {
                let ip = Ipv6Addr::from_bits(u128::from(high) << 64 | u128::from(low));
                Some(SocketAddr::V6(SocketAddrV6::new(ip, port, 0, rest)))
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_comes_back_from_its_words() {
        for peer in [
            "0.0.0.0:0",
            "10.1.2.3:5511",
            "255.255.255.255:65535",
            "[::]:0",
            "[2001:db8::7]:65535",
            "[fe80::1%7]:1",
        ] {
            let peer: SocketAddr = peer.parse().unwrap();
            assert_eq!(Option::from(PeerWords::from(Some(peer))), Some(peer));
        }
        assert_eq!(Option::<SocketAddr>::from(PeerWords::from(None)), None);
    }
}
