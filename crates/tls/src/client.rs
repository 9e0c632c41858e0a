//! TLS of connections to other servers.

use std::fmt;
use std::rc::Rc;
use std::sync::Arc;

use ringserve_core::{Transport, TransportConn};
use rustls::client::UnbufferedClientConnection;
use rustls::pki_types::ServerName;
use rustls::server::danger::ClientCertVerifier;
use rustls::{ClientConfig, RootCertStore};

use crate::channel::{Common, Rules, TlsChannel};
use crate::{Pem, Tls, TlsError, provider};

/// TLS of connections to upstreams: the trusted authorities, and the client's certificate. Clones
/// share the sessions that are resumed.
///
/// ```no_run
/// use ringserve_tls::{Pem, Tls};
///
/// # fn main() -> Result<(), ringserve_tls::TlsError> {
/// let client = Tls::client(Pem::file("ca.pem")?)?;
/// let transport = client.to("db.example.org")?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct TlsClient {
    config: Arc<ClientConfig>,
}

impl Tls {
    /// Creates TLS for servers whose certificates must be issued by an authority in `authorities`.
    /// `/etc/ssl/certs/ca-certificates.crt` has those that Debian trusts.
    ///
    /// # Errors
    /// If a text is not PEM of that kind, or there is no cryptography.
    pub fn client(authorities: Pem) -> Result<TlsClient, TlsError> {
        Tls::client_of(authorities, None)
    }

    /// Creates TLS like [`client`](Tls::client), with a chain and a key for servers that ask for a
    /// certificate.
    ///
    /// # Errors
    /// If a text is not PEM of that kind, key and certificate do not fit, or there is no
    /// cryptography.
    pub fn client_with(authorities: Pem, chain: Pem, key: Pem) -> Result<TlsClient, TlsError> {
        Tls::client_of(authorities, Some((chain, key)))
    }

    fn client_of(authorities: Pem, shown: Option<(Pem, Pem)>) -> Result<TlsClient, TlsError> {
        let mut roots = RootCertStore::empty();
        for authority in authorities.certificates()? {
            roots.add(authority).map_err(|error| {
                authorities.error(format_args!("has a certificate that cannot be parsed: {error}"))
            })?;
        }
        let config = ClientConfig::builder_with_provider(provider::provider()?)
            .with_safe_default_protocol_versions()
            .map_err(TlsError::new)?
            .with_root_certificates(roots);
        let config = match shown {
            None => config.with_no_client_auth(),
            Some((chain, key)) => config
                .with_client_auth_cert(chain.certificates()?, key.key()?)
                .map_err(|error| key.error(error))?,
        };
        Ok(TlsClient { config: Arc::new(config) })
    }
}

/// Gives access to everything that rustls can do.
impl From<Arc<ClientConfig>> for TlsClient {
    fn from(config: Arc<ClientConfig>) -> TlsClient {
        TlsClient { config }
    }
}

impl TlsClient {
    /// Sets the protocols that are offered (ALPN), the preferred one first: `["h2", "http/1.1"]`.
    /// None by default. The one that the server chose is [`TlsInfo::alpn`](crate::TlsInfo::alpn);
    /// one that knows none of them may refuse the connection.
    pub fn alpn<P: Into<Vec<u8>>>(self, protocols: impl IntoIterator<Item = P>) -> TlsClient {
        let mut config = (*self.config).clone();
        config.alpn_protocols = protocols.into_iter().map(Into::into).collect();
        TlsClient { config: Arc::new(config) }
    }

    /// The transport of connections to the server with this name, a DNS name or an IP address,
    /// which its certificate must have.
    ///
    /// # Errors
    /// If `name` is neither.
    pub fn to(&self, name: &str) -> Result<Rc<TlsClientTransport>, TlsError> {
        let name = ServerName::try_from(name.to_owned()).map_err(|_| {
            TlsError::new(format_args!(
                "`{name}` is no name of a server: one is as `db.example.org`, or an address"
            ))
        })?;
        let common = Rc::new(Common::new(Rules::default(), None));
        Ok(Rc::new(TlsClientTransport { config: self.config.clone(), name, common }))
    }
}

impl fmt::Debug for TlsClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TlsClient")
    }
}

/// TLS of connections to one server, on one shard.
pub struct TlsClientTransport {
    config: Arc<ClientConfig>,
    name: ServerName<'static>,
    common: Rc<Common<dyn ClientCertVerifier>>,
}

impl Transport for TlsClientTransport {
    fn begin(&self, out: &mut Vec<u8>) -> Option<Box<dyn TransportConn>> {
        let connection = UnbufferedClientConnection::new(self.config.clone(), self.name.clone()).ok()?;
        Some(Box::new(TlsChannel::new(connection, self.common.clone(), out)))
    }
}

impl fmt::Debug for TlsClientTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TlsClientTransport({:?})", self.name)
    }
}
