//! Configurations of rustls 0.24.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use ringserve_core::{Channel, Transport};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use rustls_next::crypto::cipher::{
    AeadKey, EncodableVersion, InboundOpaque, Iv, NONCE_LEN, OutboundPlain, Record,
};
use rustls_next::crypto::tls13::HkdfExpander;
use rustls_next::crypto::{
    CertificateIdentity, Credentials, CryptoProvider, Identity, SelectedCredential, TicketProducer,
};
use rustls_next::enums::{ContentType, ProtocolVersion};
use rustls_next::error::{AlertDescription, PeerIncompatible};
use rustls_next::server::danger::ClientVerifier;
use rustls_next::server::{
    ClientHello, NoServerSessionStorage, PreferServerOrder, ServerCredentialResolver, WebPkiClientVerifier,
};
use rustls_next::{
    Connection, Error, KeyLog, RootCertStore, ServerConfig, ServerSide, Tcp, Tls13CipherSuite,
};
use webpki::CertRevocationList;

use crate::TlsError;
use crate::channel::{Common, Rules, TlsChannel};
use crate::key_log::KeyLogFile;
use crate::names::{KeyError, Names};
use crate::tickets::{Cipher, KEY_LEN, Ticketer};
use crate::version::{Believed, Parts, Server, Version};

/// rustls 0.24 with a provider.
pub(crate) struct Next(pub(crate) Arc<CryptoProvider>);

/// What decides about clients.
pub(crate) struct Believing {
    verifier: Arc<dyn ClientVerifier>,
    roots: RootCertStore,
    revoked: Vec<CertRevocationList<'static>>,
    provider: Arc<CryptoProvider>,
}

impl Believing {
    /// What the verifier does, by the same library. rustls lets no other code ask one. The error is the alert.
    pub(super) fn verify_again(
        &self,
        chain: &CertificateIdentity<'_>,
        now: UnixTime,
    ) -> Result<(), AlertDescription> {
        let certificate = webpki::EndEntityCert::try_from(&chain.end_entity).map_err(alert_of)?;
        let revoked: Vec<_> = self.revoked.iter().collect();
        // An error is that there is no list.
        let revocation = webpki::RevocationOptionsBuilder::new(&revoked).ok().map(|options| options.build());
        let mapping = self.provider.signature_verification_algorithms.mapping();
        let algorithms: Vec<_> = mapping.iter().flat_map(|(_, algorithms)| *algorithms).copied().collect();
        let (roots, others) = (&self.roots.roots, &chain.intermediates);
        let usage = webpki::KeyUsage::client_auth();
        let verified = certificate.verify_for_usage(&algorithms, roots, others, now, usage, revocation, None);
        verified.map(drop).map_err(alert_of)
    }
}

/// The alert that rustls sends of a certificate that is refused.
fn alert_of(error: webpki::Error) -> AlertDescription {
    match error {
        webpki::Error::CertExpired { .. } | webpki::Error::CertNotValidYet { .. } => {
            AlertDescription::CertificateExpired
        }
        webpki::Error::CertRevoked => AlertDescription::CertificateRevoked,
        webpki::Error::UnknownIssuer | webpki::Error::UnknownRevocationStatus => AlertDescription::UnknownCa,
        _ => AlertDescription::BadCertificate,
    }
}

impl Version for Next {
    type Key = Credentials;
    type Clients = Arc<Believing>;

    const SESSIONS: &str = "rustls 0.24 ";

    fn random(&self, bytes: &mut [u8]) -> bool {
        self.0.secure_random.fill(bytes).is_ok()
    }

    fn cipher(&self, secret: &[u8]) -> Option<Box<dyn Cipher>> {
        let suites = &self.0.tls13_cipher_suites;
        let suite = *suites.iter().find(|suite| suite.aead_alg.key_len() == KEY_LEN)?;
        let expander = suite.hkdf_provider.extract_from_secret(Some(b"ringserve tickets"), secret);
        Some(Box::new(OfSuite { provider: self.0.clone(), suite, expander }))
    }

    fn key(
        &self,
        chain: Vec<CertificateDer<'static>>,
        key: PrivateKeyDer<'static>,
    ) -> Result<Credentials, KeyError> {
        let other = |error: &dyn std::fmt::Display| KeyError::Other(error.to_string());
        let identity = Identity::from_cert_chain(chain).map_err(|error| other(&Error::from(error)))?;
        Credentials::from_der(Arc::new(identity), key, &self.0).map_err(|error| match error {
            Error::InconsistentKeys(_) => KeyError::Unfit,
            error => other(&error),
        })
    }

    fn clients(&self, believed: Believed) -> Result<Arc<Believing>, TlsError> {
        let Believed { authorities, revoked: lists, required } = believed;
        let mut roots = RootCertStore::empty();
        for authority in authorities {
            roots.add(authority).map_err(TlsError::new)?;
        }
        let revoked = lists
            .iter()
            .map(|list| webpki::OwnedCertRevocationList::from_der(list).map(Into::into))
            .collect::<Result<_, _>>()
            .map_err(TlsError::new)?;
        let mut verifier = WebPkiClientVerifier::builder(Arc::new(roots.clone()), &self.0).with_crls(lists);
        if !required {
            verifier = verifier.allow_unauthenticated();
        }
        let verifier = Arc::new(verifier.build().map_err(TlsError::new)?);
        Ok(Arc::new(Believing { verifier, roots, revoked, provider: self.0.clone() }))
    }

    fn server(self, parts: Parts<Next>) -> Result<Arc<dyn Server>, TlsError> {
        let Parts { names, clients, ticketer, tickets_sent, alpn, key_log } = parts;
        let verifier = match &clients {
            Some(clients) => clients.verifier.clone(),
            None => WebPkiClientVerifier::no_client_auth(),
        };
        let mut config = ServerConfig::builder(self.0)
            .with_client_cert_verifier(verifier)
            .with_server_credential_resolver(Arc::new(names))
            .map_err(TlsError::new)?;
        // All of them are good; scanners want the server to choose.
        config.cipher_suite_selector = &PreferServerOrder;
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.ticketer = ticketer.map(|ticketer| Arc::new(ticketer) as Arc<dyn TicketProducer>);
        if let Some(count) = tickets_sent {
            (config.send_tls13_tickets.default, config.send_tls13_tickets.max) = (count, count);
        }
        config.alpn_protocols = alpn.into_iter().map(Into::into).collect();
        if let Some(key_log) = key_log {
            config.key_log = Arc::new(key_log);
        }
        server(Arc::new(config), clients)
    }
}

/// A configuration, if connections can be made of it.
pub(crate) fn server(
    config: Arc<ServerConfig>,
    clients: Option<Arc<Believing>>,
) -> Result<Arc<dyn Server>, TlsError> {
    if config.max_early_data_size > 0 {
        return Err(TlsError::early_data());
    }
    // What rustls refuses it refuses for each connection.
    Connection::<ServerSide, Tcp>::new(config.clone()).map_err(TlsError::new)?;
    Ok(Arc::new(NextServer { config, clients }))
}

struct NextServer {
    config: Arc<ServerConfig>,
    clients: Option<Arc<Believing>>,
}

impl Server for NextServer {
    fn transport(&self, alpn: Option<&[&str]>, rules: Rules) -> Box<dyn Transport> {
        // A copy, since the count of the shared one would be written by all shards.
        let mut config = (*self.config).clone();
        if let Some(protocols) = alpn {
            config.alpn_protocols = protocols.iter().map(|name| name.as_bytes().to_vec().into()).collect();
        }
        let common = Rc::new(Common::new(rules, self.clients.clone()));
        Box::new(OfShard { config: Arc::new(config), common })
    }
}

struct OfShard {
    config: Arc<ServerConfig>,
    common: Rc<Common<Believing>>,
}

impl Transport for OfShard {
    fn begin(&self, out: &mut Vec<u8>) -> Option<Box<dyn Channel>> {
        let connection = Connection::<ServerSide, Tcp>::new(self.config.clone()).ok()?;
        Some(Box::new(TlsChannel::new(connection, self.common.clone(), out)))
    }
}

impl ServerCredentialResolver for Names<Credentials> {
    fn resolve(&self, hello: &ClientHello<'_>) -> Result<SelectedCredential, Error> {
        let keys = self.of(hello.server_name().map(|name| name.as_ref()));
        keys.iter()
            .find_map(|key| key.signer(hello.signature_schemes()))
            .ok_or_else(|| PeerIncompatible::NoSignatureSchemesInCommon.into())
    }
}

impl KeyLog for KeyLogFile {
    fn log(&self, label: &str, client_random: &[u8], secret: &[u8]) {
        self.append(label, client_random, secret);
    }
}

impl TicketProducer for Ticketer {
    fn encrypt(&self, session: &[u8]) -> Option<Vec<u8>> {
        self.seal(session)
    }

    fn decrypt(&self, ticket: &[u8]) -> Option<Vec<u8>> {
        self.open(ticket)
    }

    fn lifetime(&self) -> Duration {
        self.lifetime()
    }
}

/// The cipher of a suite of TLS 1.3.
struct OfSuite {
    provider: Arc<CryptoProvider>,
    suite: &'static Tls13CipherSuite,
    /// Of the secret.
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
        let mut cipher = self.suite.aead_alg.encrypter(AeadKey::from(key), Iv::from(nonce));
        let mut sealed = vec![0; cipher.encrypted_payload_len(plain.len())];
        let plain = Record::new(ContentType::ApplicationData, VERSION, OutboundPlain::Single(plain));
        let written = cipher.encrypt(plain, 0, &mut sealed).ok()?.payload.len();
        sealed.truncate(written);
        Some(sealed)
    }

    fn open(&self, key: [u8; KEY_LEN], nonce: [u8; NONCE_LEN], sealed: &mut [u8]) -> Option<Vec<u8>> {
        let mut cipher = self.suite.aead_alg.decrypter(AeadKey::from(key), Iv::from(nonce));
        let record = Record::new(ContentType::ApplicationData, VERSION, InboundOpaque(sealed));
        Some(cipher.decrypt(record, 0).ok()?.payload.to_vec())
    }
}

const VERSION: EncodableVersion = EncodableVersion::Legacy(ProtocolVersion::TLSv1_2);
