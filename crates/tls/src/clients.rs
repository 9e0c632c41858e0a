//! Which clients a server believes.

use std::path::PathBuf;

use crate::version::{Believed, Version};
use crate::{Pem, TlsError};

/// Certificates of clients: whose are believed, and whether each client must have one.
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
    /// Each client must show a certificate of an authority in the PEM file `authorities`.
    ///
    /// # Errors
    /// If the file cannot be read. What is in it is looked at when the server starts.
    pub fn required(authorities: impl Into<PathBuf>) -> Result<Clients, TlsError> {
        Ok(Clients::of(Pem::file(authorities)?, true))
    }

    /// A client may show one. One that is not of an authority in the file is refused.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn optional(authorities: impl Into<PathBuf>) -> Result<Clients, TlsError> {
        Ok(Clients::of(Pem::file(authorities)?, false))
    }

    /// The same, of a text.
    pub fn of(authorities: Pem, required: bool) -> Clients {
        Clients { authorities, revoked: Vec::new(), required }
    }

    /// Certificates in these lists (PEM) are refused, and those of authorities that gave none too. A list that is over its time
    /// still counts.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn revoked(self, lists: impl Into<PathBuf>) -> Result<Clients, TlsError> {
        Ok(self.revoked_by(Pem::file(lists)?))
    }

    /// The same, of a text.
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

    /// What decides, and what it decides by: where that changes, a session of before must not be resumed.
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
        let clients = version.clients(Believed { authorities, revoked, required: self.required });
        Ok((clients.map_err(|error| self.authorities.error(error))?, decides_by))
    }
}
