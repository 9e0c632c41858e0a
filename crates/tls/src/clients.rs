//! Certificates of clients.

use std::path::PathBuf;

use crate::version::{ClientTrust, Version};
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

    /// Lets clients send a certificate. One that is not issued by an authority in the file is
    /// refused.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn optional(authorities: impl Into<PathBuf>) -> Result<Clients, TlsError> {
        Ok(Clients::of(Pem::file(authorities)?, false))
    }

    /// Takes authorities from a text; `required` as in [`required`](Clients::required) and
    /// [`optional`](Clients::optional).
    pub fn of(authorities: Pem, required: bool) -> Clients {
        Clients { authorities, revoked: Vec::new(), required }
    }

    /// Refuses certificates in these lists (PEM), and certificates of authorities without a list.
    /// An expired list still counts.
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

    /// Returns the verifier, and what its decisions depend on: if that changes, an earlier session
    /// must not be resumed.
    pub(crate) fn verifier<V: Version>(&self, version: &V) -> Result<(V::Clients, Vec<Vec<u8>>), TlsError> {
        let mut decides_by = vec![vec![u8::from(self.required)]];
        let authorities = self.authorities.certificates()?;
        for authority in &authorities {
            decides_by.push(authority.to_vec());
            webpki::anchor_from_trusted_cert(authority).map_err(|error| {
                self.authorities.error(format_args!("has a certificate that is none: {error}"))
            })?;
        }
        let mut revoked = Vec::new();
        for pem in &self.revoked {
            for list in pem.revocation_lists()? {
                webpki::BorrowedCertRevocationList::from_der(&list).map_err(|error| {
                    pem.error(format_args!("has a revocation list that is none: {error}"))
                })?;
                decides_by.push(list.to_vec());
                revoked.push(list);
            }
        }
        let clients = version.clients(ClientTrust { authorities, revoked, required: self.required });
        Ok((clients.map_err(|error| self.authorities.error(error))?, decides_by))
    }
}
