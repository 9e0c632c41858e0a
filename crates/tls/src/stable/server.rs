//! Configurations of rustls 0.23.

use std::rc::Rc;
use std::sync::Arc;

use ringserve_core::{Transport, TransportConn};
use rustls::crypto::CryptoProvider;
use rustls::crypto::cipher::{
    AeadKey, InboundOpaqueMessage, Iv, MessageDecrypter, MessageEncrypter, NONCE_LEN, OutboundPlainMessage,
};
use rustls::crypto::tls13::HkdfExpander;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{
    ClientHello, NoServerSessionStorage, ProducesTickets, ResolvesServerCert, UnbufferedServerConnection,
    WebPkiClientVerifier,
};
use rustls::sign::CertifiedKey;
use rustls::{
    ContentType, Error, KeyLog, ProtocolVersion, RootCertStore, ServerConfig, SupportedCipherSuite,
    Tls13CipherSuite,
};

use crate::TlsError;
use crate::channel::{Common, Rules, TlsChannel};
use crate::key_log::KeyLogFile;
use crate::names::{KeyError, Names};
use crate::tickets::{Cipher, KEY_LEN, Ticketer};
use crate::version::{ClientTrust, Parts, Server, Version};

/// rustls 0.23 with a provider.
pub(crate) struct Stable(pub(crate) Arc<CryptoProvider>);

impl Version for Stable {
    type Key = CertifiedKey;
    type Clients = Arc<dyn ClientCertVerifier>;

    const SESSIONS: &str = "";

    fn random(&self, bytes: &mut [u8]) -> bool {
        self.0.secure_random.fill(bytes).is_ok()
    }

    fn cipher(&self, secret: &[u8]) -> Option<Box<dyn Cipher>> {
        let suite = self.0.cipher_suites.iter().find_map(|suite| match suite {
            SupportedCipherSuite::Tls13(suite) if suite.aead_alg.key_len() == KEY_LEN => Some(*suite),
            _ => None,
        })?;
        let expander = suite.hkdf_provider.extract_from_secret(Some(b"ringserve tickets"), secret);
        Some(Box::new(OfSuite { provider: self.0.clone(), suite, expander }))
    }

    fn key(
        &self,
        chain: Vec<CertificateDer<'static>>,
        key: PrivateKeyDer<'static>,
    ) -> Result<CertifiedKey, KeyError> {
        CertifiedKey::from_der(chain, key, &self.0).map_err(|error| match error {
            Error::InconsistentKeys(_) => KeyError::Unfit,
            error => KeyError::Other(error.to_string()),
        })
    }

    fn clients(&self, believed: ClientTrust) -> Result<Self::Clients, TlsError> {
        let mut roots = RootCertStore::empty();
        for authority in believed.authorities {
            roots.add(authority).map_err(TlsError::new)?;
        }
        let mut verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), self.0.clone())
            .with_crls(believed.revoked);
        if !believed.required {
            verifier = verifier.allow_unauthenticated();
        }
        verifier.build().map(|verifier| verifier as Self::Clients).map_err(TlsError::new)
    }

    fn server(self, parts: Parts<Stable>) -> Result<Arc<dyn Server>, TlsError> {
        let Parts { names, clients, ticketer, tickets_sent, alpn, key_log } = parts;
        let mut config = ServerConfig::builder_with_provider(self.0)
            .with_safe_default_protocol_versions()
            .map_err(TlsError::new)?
            .with_client_cert_verifier(clients.clone().unwrap_or_else(WebPkiClientVerifier::no_client_auth))
            .with_cert_resolver(Arc::new(names));
        // All of them are good; scanners want the server to choose.
        config.ignore_client_order = true;
        config.session_storage = Arc::new(NoServerSessionStorage {});
        if let Some(ticketer) = ticketer {
            config.ticketer = Arc::new(ticketer);
        }
        config.send_tls13_tickets = tickets_sent.unwrap_or(config.send_tls13_tickets);
        config.alpn_protocols = alpn;
        if let Some(key_log) = key_log {
            config.key_log = Arc::new(key_log);
        }
        server(Arc::new(config), clients)
    }
}

/// Creates a configuration, if connections can be created with it.
pub(crate) fn server(
    config: Arc<ServerConfig>,
    clients: Option<Arc<dyn ClientCertVerifier>>,
) -> Result<Arc<dyn Server>, TlsError> {
    if config.max_early_data_size > 0 {
        return Err(TlsError::early_data());
    }
    // If rustls refuses it, it does so for each connection.
    UnbufferedServerConnection::new(config.clone()).map_err(TlsError::new)?;
    Ok(Arc::new(StableServer { config, clients }))
}

struct StableServer {
    config: Arc<ServerConfig>,
    /// The verifier of clients, if they are asked for certificates.
    clients: Option<Arc<dyn ClientCertVerifier>>,
}

impl Server for StableServer {
    fn transport(&self, alpn: Option<&[&str]>, rules: Rules) -> Box<dyn Transport> {
        // Copied, since all shards would write the count of the shared one.
        let mut config = (*self.config).clone();
        if let Some(protocols) = alpn {
            config.alpn_protocols = protocols.iter().map(|name| name.as_bytes().to_vec()).collect();
        }
        let common = Rc::new(Common::new(rules, self.clients.clone()));
        Box::new(OfShard { config: Arc::new(config), common })
    }

    fn config(&self) -> Arc<ServerConfig> {
        self.config.clone()
    }
}

struct OfShard {
    config: Arc<ServerConfig>,
    common: Rc<Common<dyn ClientCertVerifier>>,
}

impl Transport for OfShard {
    fn begin(&self, out: &mut Vec<u8>) -> Option<Box<dyn TransportConn>> {
        let connection = UnbufferedServerConnection::new(self.config.clone()).ok()?;
        Some(Box::new(TlsChannel::new(connection, self.common.clone(), out)))
    }
}

impl ResolvesServerCert for Names<CertifiedKey> {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let keys = self.of(hello.server_name());
        let usable = keys.iter().find(|key| key.key.choose_scheme(hello.signature_schemes()).is_some());
        // With a key that the client cannot use, rustls reports `handshake_failure`; without one it
        // denies access.
        usable.or(keys.first()).cloned()
    }
}

impl KeyLog for KeyLogFile {
    fn log(&self, label: &str, client_random: &[u8], secret: &[u8]) {
        self.append(label, client_random, secret);
    }
}

impl ProducesTickets for Ticketer {
    fn enabled(&self) -> bool {
        true
    }

    fn lifetime(&self) -> u32 {
        self.lifetime().as_secs() as u32
    }

    fn encrypt(&self, session: &[u8]) -> Option<Vec<u8>> {
        self.seal(session)
    }

    fn decrypt(&self, ticket: &[u8]) -> Option<Vec<u8>> {
        self.open(ticket)
    }
}

/// The cipher of a suite of TLS 1.3.
struct OfSuite {
    provider: Arc<CryptoProvider>,
    suite: &'static Tls13CipherSuite,
    /// Expands the secret.
    expander: Box<dyn HkdfExpander>,
}

impl Cipher for OfSuite {
    fn hash(&self, bytes: &[u8]) -> Vec<u8> {
        self.suite.common.hash_provider.hash(bytes).as_ref().to_vec()
    }

    fn expand(&self, info: &[&[u8]], key: &mut [u8; KEY_LEN]) -> bool {
        self.expander.expand_slice(info, key).is_ok()
    }

    fn random(&self, bytes: &mut [u8]) -> bool {
        self.provider.secure_random.fill(bytes).is_ok()
    }

    fn seal(&self, key: [u8; KEY_LEN], nonce: [u8; NONCE_LEN], plain: &[u8]) -> Option<Vec<u8>> {
        let mut cipher: Box<dyn MessageEncrypter> =
            self.suite.aead_alg.encrypter(AeadKey::from(key), Iv::new(nonce));
        let plain = OutboundPlainMessage {
            typ: ContentType::ApplicationData,
            version: ProtocolVersion::TLSv1_3,
            payload: plain.into(),
        };
        Some(cipher.encrypt(plain, 0).ok()?.payload.as_ref().to_vec())
    }

    fn open(&self, key: [u8; KEY_LEN], nonce: [u8; NONCE_LEN], sealed: &mut [u8]) -> Option<Vec<u8>> {
        let mut cipher: Box<dyn MessageDecrypter> =
            self.suite.aead_alg.decrypter(AeadKey::from(key), Iv::new(nonce));
        let message =
            InboundOpaqueMessage::new(ContentType::ApplicationData, ProtocolVersion::TLSv1_2, sealed);
        Some(cipher.decrypt(message, 0).ok()?.payload.to_vec())
    }
}
