//! What a listener's TLS is made with, of one version of rustls.

use std::sync::Arc;

use ringserve_core::Transport;
use rustls::ServerConfig;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};

use crate::TlsError;
use crate::channel::Rules;
use crate::key_log::KeyLogFile;
use crate::names::{KeyError, Names};
use crate::tickets::{Cipher, Ticketer};

/// A provider of cryptography, with the version of rustls that it is of.
pub(crate) trait Version: Sized {
    /// A certificate with its key.
    type Key;
    /// What decides about clients.
    type Clients;

    /// A session of one version is none of another's. Part of what tickets depend on.
    const SESSIONS: &str;

    /// Fills `bytes` by chance. False if the system gives none.
    fn random(&self, bytes: &mut [u8]) -> bool;

    /// What tickets are sealed with, where the provider has what that needs.
    fn cipher(&self, secret: &[u8]) -> Option<Box<dyn Cipher>>;

    /// A chain with its key, if they fit.
    fn key(
        &self,
        chain: Vec<CertificateDer<'static>>,
        key: PrivateKeyDer<'static>,
    ) -> Result<Self::Key, KeyError>;

    fn clients(&self, believed: Believed) -> Result<Self::Clients, TlsError>;

    fn server(self, parts: Parts<Self>) -> Result<Arc<dyn Server>, TlsError>;
}

/// Which certificates of clients are believed.
pub(crate) struct Believed {
    pub(crate) authorities: Vec<CertificateDer<'static>>,
    pub(crate) revoked: Vec<CertificateRevocationListDer<'static>>,
    pub(crate) required: bool,
}

/// What a configuration is made of. What is `None` is as it is in rustls.
pub(crate) struct Parts<V: Version> {
    pub(crate) names: Names<V::Key>,
    pub(crate) clients: Option<V::Clients>,
    /// Without one no client resumes by a ticket.
    pub(crate) ticketer: Option<Ticketer>,
    pub(crate) tickets_sent: Option<usize>,
    pub(crate) alpn: Vec<Vec<u8>>,
    pub(crate) key_log: Option<KeyLogFile>,
}

/// A configuration that was looked at.
pub(crate) trait Server: Send + Sync {
    /// What the connections of one shard have in common. `alpn` goes before what the configuration says.
    fn transport(&self, alpn: Option<&[&str]>, rules: Rules) -> Box<dyn Transport>;

    /// As rustls has it.
    fn config(&self) -> Arc<ServerConfig>;
}
