//! Certificates, keys and revocation lists as text.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use ringserve_files::Stamp;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer};

use crate::TlsError;

/// The text of a PEM file: certificates, a key, or revocation lists.
#[derive(Clone)]
pub struct Pem {
    file: Option<(PathBuf, Stamp)>,
    text: Arc<[u8]>,
}

impl Pem {
    /// Reads `file`.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn file(file: impl Into<PathBuf>) -> Result<Pem, TlsError> {
        let file = file.into();
        let read = ringserve_files::read(&file, u64::MAX)
            .map_err(|error| TlsError::of(Some(&file), format_args!("cannot be read: {error}")))?;
        Ok(Pem { file: Some((file, read.stamp)), text: read.bytes.into() })
    }

    /// Reads the file again; returns a text without a file as it is.
    ///
    /// # Errors
    /// If it cannot be read.
    pub(crate) fn read_again(&self) -> Result<Pem, TlsError> {
        match &self.file {
            Some((file, _)) => Pem::file(file),
            None => Ok(self.clone()),
        }
    }

    /// The file from which it was read.
    pub(crate) fn path(&self) -> Option<&Path> {
        self.file.as_ref().map(|(file, _)| &**file)
    }

    /// The stamp of the file when it was read.
    pub(crate) fn stamp(&self) -> Option<Stamp> {
        self.file.as_ref().map(|(_, stamp)| *stamp)
    }

    pub(crate) fn error(&self, cause: impl fmt::Display) -> TlsError {
        TlsError::of(self.path(), cause)
    }

    /// All certificates in the text, at least one.
    pub(crate) fn certificates(&self) -> Result<Vec<CertificateDer<'static>>, TlsError> {
        let all: Vec<_> = CertificateDer::pem_slice_iter(&self.text)
            .collect::<Result<_, _>>()
            .map_err(|error| self.error(format_args!("is no PEM file: {error}")))?;
        if all.is_empty() {
            return Err(self.error("has no certificate"));
        }
        Ok(all)
    }

    /// The first private key in the text.
    pub(crate) fn key(&self) -> Result<PrivateKeyDer<'static>, TlsError> {
        PrivateKeyDer::from_pem_slice(&self.text).map_err(|error| match error {
            pem::Error::NoItemsFound => self.error("has no private key"),
            error => self.error(format_args!("has no private key that can be read: {error}")),
        })
    }

    /// All revocation lists in the text, at least one.
    pub(crate) fn revocation_lists(&self) -> Result<Vec<CertificateRevocationListDer<'static>>, TlsError> {
        let all: Vec<_> = CertificateRevocationListDer::pem_slice_iter(&self.text)
            .collect::<Result<_, _>>()
            .map_err(|error| self.error(format_args!("is no PEM file: {error}")))?;
        if all.is_empty() {
            return Err(self.error("has no revocation list"));
        }
        Ok(all)
    }
}

impl From<String> for Pem {
    fn from(text: String) -> Pem {
        Pem { file: None, text: text.into_bytes().into() }
    }
}

impl From<&str> for Pem {
    fn from(text: &str) -> Pem {
        Pem::from(text.to_owned())
    }
}

/// The key is not printed.
impl fmt::Debug for Pem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.file {
            Some((file, _)) => write!(f, "Pem({})", file.display()),
            None => write!(f, "Pem({} bytes)", self.text.len()),
        }
    }
}
