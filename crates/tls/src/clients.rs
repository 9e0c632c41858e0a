//! Certificates of clients.

use std::path::PathBuf;
use std::sync::Arc;

use rustls::RootCertStore;
use rustls::crypto::CryptoProvider;
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;

use crate::{Pem, TlsError};

/// Certificates of clients: trusted authorities, and whether each client must have a certificate.
///
/// ```no_run
/// use ringserve_tls::{Clients, Tls};
///
/// # fn main() -> Result<(), ringserve_tls::TlsError> {
/// let tls = Tls::server().clients(Clients::required("ca.pem")?.revoked("ca.crl")?);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Clients {
    authorities: Pem,
    revoked: Vec<Pem>,
    required: bool,
}

impl Clients {
    /// Requires a certificate of an authority in the PEM file `authorities` from each client.
    ///
    /// # Errors
    /// If the file cannot be read. Its content is checked when the server starts.
    pub fn required(authorities: impl Into<PathBuf>) -> Result<Clients, TlsError> {
        Ok(Clients::of(Pem::file(authorities)?, true))
    }

    /// Lets clients show a certificate. One that is not of an authority in the file is refused.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn optional(authorities: impl Into<PathBuf>) -> Result<Clients, TlsError> {
        Ok(Clients::of(Pem::file(authorities)?, false))
    }

    /// Takes authorities from a text; `required` as in [`required`](Clients::required) and [`optional`](Clients::optional).
    pub fn of(authorities: Pem, required: bool) -> Clients {
        Clients { authorities, revoked: Vec::new(), required }
    }

    /// Refuses certificates in these lists (PEM), and certificates of authorities without a list. An expired list still counts.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn revoked(self, lists: impl Into<PathBuf>) -> Result<Clients, TlsError> {
        Ok(self.revoked_by(Pem::file(lists)?))
    }

    /// Takes revocation lists from a text, as [`revoked`](Clients::revoked).
    pub fn revoked_by(mut self, lists: Pem) -> Clients {
        self.revoked.push(lists);
        self
    }

    pub(crate) fn read_again(&self) -> Result<Clients, TlsError> {
        let revoked = self.revoked.iter().map(Pem::read_again).collect::<Result<_, _>>()?;
        Ok(Clients { authorities: self.authorities.read_again()?, revoked, required: self.required })
    }

    pub(crate) fn files(&self) -> impl Iterator<Item = &Pem> {
        [&self.authorities].into_iter().chain(&self.revoked)
    }

    /// Makes the verifier.
    pub(crate) fn verifier(&self, provider: &Arc<CryptoProvider>) -> Result<Verifier, TlsError> {
        let mut decides_by = vec![vec![u8::from(self.required)]];
        let mut roots = RootCertStore::empty();
        for authority in self.authorities.certificates()? {
            decides_by.push(authority.to_vec());
            roots.add(authority).map_err(|error| {
                self.authorities.error(format_args!("has a certificate that cannot be parsed: {error}"))
            })?;
        }
        let mut verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone());
        for pem in &self.revoked {
            let lists = pem.revocation_lists()?;
            for list in &lists {
                webpki::BorrowedCertRevocationList::from_der(list).map_err(|error| {
                    pem.error(format_args!("has a revocation list that cannot be parsed: {error}"))
                })?;
                decides_by.push(list.to_vec());
            }
            verifier = verifier.with_crls(lists);
        }
        if !self.required {
            verifier = verifier.allow_unauthenticated();
        }
        let verifier = verifier.build().map_err(|error| self.authorities.error(error))?;
        Ok(Verifier { verifier, decides_by })
    }
}

/// The verifier of clients.
pub(crate) struct Verifier {
    pub(crate) verifier: Arc<dyn ClientCertVerifier>,
    /// A change of this ends the sessions made before.
    pub(crate) decides_by: Vec<Vec<u8>>,
}
