//! The TLS of all listeners of a server.

use std::fmt;
use std::sync::Arc;

use crate::{Tls, TlsError, TlsListener};

/// The TLS of a running server (`ServerHandle::tls`).
#[derive(Clone, Default)]
pub struct ServerTls {
    listeners: Arc<[TlsListener]>,
}

impl ServerTls {
    /// Uses `tls` for new connections from now on, at every address that has TLS. Open connections
    /// keep their certificates. If addresses have different certificates, keep a [`TlsListener`] of
    /// each instead.
    ///
    /// # Errors
    /// If `tls` cannot be used. Then the old one stays.
    pub fn replace(&self, tls: Tls) -> Result<(), TlsError> {
        self.listeners.iter().try_for_each(|listener| listener.replace(tls.clone()))
    }

    /// Reads the files of certificates, keys and authorities again, of every address that has TLS.
    /// It waits for the disk: call it on a thread that is not a shard.
    ///
    /// # Errors
    /// The first address whose files cannot be used: its old certificates stay, and so do those of
    /// later addresses.
    pub fn reload(&self) -> Result<(), TlsError> {
        self.listeners.iter().try_for_each(TlsListener::reload)
    }
}

impl ServerTls {
    /// The certificates in use that expire first, for each name, of every address that has TLS.
    /// None of an address whose configuration of rustls is the program's.
    pub fn expiries(&self) -> Vec<CertificateExpiry> {
        let of = |(listener, tls): (usize, &TlsListener)| {
            let each = tls.expiries().into_iter();
            each.map(move |(name, not_after)| CertificateExpiry { listener, name, not_after })
                .collect::<Vec<_>>()
        };
        self.listeners.iter().enumerate().flat_map(of).collect()
    }
}

/// The time at which a certificate expires.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CertificateExpiry {
    /// The place of the address among those that have TLS, from 0.
    pub listener: usize,
    /// The name for which clients ask; empty for the certificate of all others.
    pub name: String,
    /// In seconds since the beginning of 1970.
    pub not_after: u64,
}

impl fmt::Debug for ServerTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ServerTls").field(&self.listeners).finish()
    }
}

impl FromIterator<TlsListener> for ServerTls {
    fn from_iter<I: IntoIterator<Item = TlsListener>>(listeners: I) -> ServerTls {
        ServerTls { listeners: listeners.into_iter().collect() }
    }
}
