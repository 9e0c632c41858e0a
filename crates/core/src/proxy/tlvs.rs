//! Fields of a version 2 block after the addresses: type, length, value.

use alloc::rc::Rc;
use core::fmt;

const ALPN: u8 = 0x01;
const AUTHORITY: u8 = 0x02;
pub(super) const CRC32C: u8 = 0x03;
pub(super) const UNIQUE_ID: u8 = 0x05;
pub(super) const SSL: u8 = 0x20;
const SSL_VERSION: u8 = 0x21;
const SSL_CN: u8 = 0x22;
const SSL_CIPHER: u8 = 0x23;
const NETNS: u8 = 0x30;

/// The part of an SSL field before the fields inside.
const SSL_FIXED: usize = 5;

/// The fields in `bytes`; ends with `None` at a field that goes beyond them.
pub(super) fn fields(bytes: &[u8]) -> impl Iterator<Item = Option<(u8, &[u8])>> {
    let mut left = bytes;
    core::iter::from_fn(move || {
        if left.is_empty() {
            return None;
        }
        let field = first(left);
        left = field.map_or(&[], |(_, _, behind)| behind);
        Some(field.map(|(kind, value, _)| (kind, value)))
    })
}

/// The first field, and the bytes after it.
fn first(bytes: &[u8]) -> Option<(u8, &[u8], &[u8])> {
    let (&[kind, high, low], rest) = bytes.split_first_chunk::<3>()?;
    let (value, behind) = rest.split_at_checked(u16::from_be_bytes([high, low]).into())?;
    Some((kind, value, behind))
}

/// True if all fields inside an SSL field end inside.
pub(super) fn is_ssl(value: &[u8]) -> bool {
    value.get(SSL_FIXED..).is_some_and(|inside| fields(inside).all(|field| field.is_some()))
}

/// Facts that a proxy sent about a client in addition to its address, in version 2 of the PROXY
/// protocol. A clone copies nothing.
///
/// They are as true as the proxy is: the networks of `ProxyProtocol` say which proxies are
/// believed.
#[derive(Clone, PartialEq, Eq)]
pub struct Tlvs {
    bytes: Rc<[u8]>,
}

impl Tlvs {
    /// The fields in these bytes, one after the other. A field that goes beyond them is left out.
    pub fn of(bytes: &[u8]) -> Tlvs {
        Tlvs { bytes: bytes.into() }
    }

    /// All fields in their order: the number of the type, and the value. Fields of vendors are
    /// included, such as `0xEA` of AWS, `0xEE` of Azure and `0xE0` of Google.
    pub fn iter(&self) -> impl Iterator<Item = (u8, &[u8])> {
        fields(&self.bytes).flatten()
    }

    /// The value of the first field of a type.
    pub fn value(&self, kind: u8) -> Option<&[u8]> {
        self.iter().find(|field| field.0 == kind).map(|field| field.1)
    }

    /// The protocol that client and proxy agreed on, such as `h2`.
    pub fn alpn(&self) -> Option<&[u8]> {
        self.value(ALPN)
    }

    /// The name that the client asked for (SNI). `None` also if it is not UTF-8.
    pub fn authority(&self) -> Option<&str> {
        text(self.value(AUTHORITY)?)
    }

    /// The proxy's name for the connection, at most 128 bytes, as in the proxy's log.
    pub fn unique_id(&self) -> Option<&[u8]> {
        self.value(UNIQUE_ID)
    }

    /// The network namespace in which the proxy accepted the connection.
    pub fn network_namespace(&self) -> Option<&str> {
        text(self.value(NETNS)?)
    }

    /// The client's TLS towards the proxy, if the proxy sent it.
    pub fn ssl(&self) -> Option<ProxiedSsl<'_>> {
        self.value(SSL).filter(|value| is_ssl(value)).map(|value| ProxiedSsl { value })
    }
}

impl fmt::Debug for Tlvs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}

fn text(value: &[u8]) -> Option<&str> {
    core::str::from_utf8(value).ok()
}

/// The connection of a client to its proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProxiedSsl<'a> {
    /// At least [`SSL_FIXED`] bytes.
    value: &'a [u8],
}

impl<'a> ProxiedSsl<'a> {
    /// True if the client is connected by TLS.
    pub fn is_tls(&self) -> bool {
        self.client(1)
    }

    /// True if the client showed a certificate, in this connection or in an earlier one whose
    /// session it resumed.
    pub fn has_certificate(&self) -> bool {
        self.client(2 | 4)
    }

    /// True if the client showed a certificate that the proxy verified.
    pub fn is_verified(&self) -> bool {
        self.has_certificate() && self.value[1..SSL_FIXED] == [0; 4]
    }

    /// The version of TLS, such as `TLSv1.3`.
    pub fn version(&self) -> Option<&'a str> {
        self.text(SSL_VERSION)
    }

    /// The common name of the client's certificate.
    pub fn common_name(&self) -> Option<&'a str> {
        self.text(SSL_CN)
    }

    /// The cipher, such as `TLS_AES_256_GCM_SHA384`.
    pub fn cipher(&self) -> Option<&'a str> {
        self.text(SSL_CIPHER)
    }

    /// All fields in their order: the number of the type, and the value.
    pub fn iter(&self) -> impl Iterator<Item = (u8, &'a [u8])> + use<'a> {
        fields(&self.value[SSL_FIXED..]).flatten()
    }

    fn client(&self, bits: u8) -> bool {
        self.value[0] & bits != 0
    }

    fn text(&self, kind: u8) -> Option<&'a str> {
        self.iter().find(|field| field.0 == kind).and_then(|field| text(field.1))
    }
}
