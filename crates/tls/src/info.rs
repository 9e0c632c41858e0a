//! Facts of a handshake.

use std::fmt;
use std::sync::Arc;

use rustls::ProtocolVersion;
use rustls::pki_types::CertificateDer;

/// The facts of a connection's handshake.
#[derive(Clone)]
pub struct TlsInfo {
    pub(crate) version: ProtocolVersion,
    pub(crate) cipher_suite: rustls::CipherSuite,
    pub(crate) alpn: Option<Box<[u8]>>,
    pub(crate) server_name: Option<Arc<str>>,
    pub(crate) resumed: bool,
    pub(crate) identity: Option<Identity>,
}

impl TlsInfo {
    /// `TLSv1_3` or `TLSv1_2`.
    pub fn version(&self) -> &'static str {
        self.version.as_str().unwrap_or("unknown")
    }

    /// The name of the cipher suite in rustls: `TLS13_AES_256_GCM_SHA384`.
    pub fn cipher_suite(&self) -> &'static str {
        self.cipher_suite.as_str().unwrap_or("unknown")
    }

    /// The protocol that both ends agreed on (ALPN): `b"h2"`.
    pub fn alpn(&self) -> Option<&[u8]> {
        self.alpn.as_deref()
    }

    /// The name that the client asked for (SNI), in lower case.
    pub fn server_name(&self) -> Option<&str> {
        self.server_name.as_deref()
    }

    /// True if the client resumed an earlier session. The certificates are those that it showed
    /// then.
    pub fn is_resumed(&self) -> bool {
        self.resumed
    }

    /// The verified certificate of the peer. At a server only if [`Clients`](crate::Clients) are
    /// asked for theirs.
    pub fn identity(&self) -> Option<&Identity> {
        self.identity.as_ref()
    }
}

impl fmt::Debug for TlsInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsInfo")
            .field("version", &self.version())
            .field("cipher_suite", &self.cipher_suite())
            .field("alpn", &self.alpn().map(String::from_utf8_lossy))
            .field("server_name", &self.server_name)
            .field("resumed", &self.resumed)
            .field("identity", &self.identity)
            .finish()
    }
}

/// The certificate of a peer, with those of its chain.
#[derive(Clone)]
pub struct Identity(pub(crate) Box<[CertificateDer<'static>]>);

impl Identity {
    /// The certificates as DER, the peer's first.
    pub fn chain(&self) -> impl Iterator<Item = &[u8]> {
        self.0.iter().map(|certificate| &**certificate)
    }

    /// The DNS names in the certificate (`subjectAltName`), such as `client.example.org`.
    pub fn dns_names(&self) -> impl Iterator<Item = &str> {
        self.certificate()
            .into_iter()
            .flat_map(|certificate| certificate.valid_dns_names().collect::<Vec<_>>())
    }

    /// The URIs in the certificate (`subjectAltName`), such as `spiffe://example.org/billing`.
    pub fn uris(&self) -> impl Iterator<Item = &str> {
        self.certificate()
            .into_iter()
            .flat_map(|certificate| certificate.valid_uri_names().collect::<Vec<_>>())
    }

    fn certificate(&self) -> Option<webpki::EndEntityCert<'_>> {
        webpki::EndEntityCert::try_from(self.0.first()?).ok()
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.dns_names().chain(self.uris()).collect();
        f.debug_tuple("Identity").field(&names).finish()
    }
}
