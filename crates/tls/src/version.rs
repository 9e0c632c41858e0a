//! The parts of a listener's TLS that depend on the version of rustls.

use std::sync::Arc;

use ringserve_core::Transport;
use rustls::ServerConfig;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};

use crate::TlsError;
use crate::channel::Rules;
use crate::key_log::KeyLogFile;
use crate::names::{KeyError, Names};
use crate::tickets::{Cipher, Ticketer};

/// A provider of cryptography, with its version of rustls.
pub(crate) trait Version: Sized {
    /// A certificate with its key.
    type Key;
    /// The verifier of clients.
    type Clients;

    /// Identifies the sessions of a version, which no other version accepts. Tickets depend on it.
    const SESSIONS: &str;

    /// Fills `bytes` with random ones. False if the system gives none.
    fn random(&self, bytes: &mut [u8]) -> bool;

    /// The cipher of tickets, if the provider supports it.
    fn cipher(&self, secret: &[u8]) -> Option<Box<dyn Cipher>>;

    /// Creates a key from a chain and its key, if they match.
    fn key(
        &self,
        chain: Vec<CertificateDer<'static>>,
        key: PrivateKeyDer<'static>,
    ) -> Result<Self::Key, KeyError>;

    fn clients(&self, believed: ClientTrust) -> Result<Self::Clients, TlsError>;

    fn server(self, parts: Parts<Self>) -> Result<Arc<dyn Server>, TlsError>;
}

/// The certificates of clients that are trusted.
pub(crate) struct ClientTrust {
    pub(crate) authorities: Vec<CertificateDer<'static>>,
    pub(crate) revoked: Vec<CertificateRevocationListDer<'static>>,
    pub(crate) required: bool,
}

/// The parts of a configuration. `None` keeps the default of rustls.
pub(crate) struct Parts<V: Version> {
    pub(crate) names: Names<V::Key>,
    pub(crate) clients: Option<V::Clients>,
    /// Without a ticketer no client resumes by a ticket.
    pub(crate) ticketer: Option<Ticketer>,
    pub(crate) tickets_sent: Option<usize>,
    pub(crate) alpn: Vec<Vec<u8>>,
    pub(crate) key_log: Option<KeyLogFile>,
}

/// A configuration that was checked.
pub(crate) trait Server: Send + Sync {
    /// Creates the shared state of one shard's connections. `alpn` has precedence over the
    /// configuration's protocols.
    fn transport(&self, alpn: Option<&[&str]>, rules: Rules) -> Box<dyn Transport>;

    /// The configuration in rustls' form.
    fn config(&self) -> Arc<ServerConfig>;
}
