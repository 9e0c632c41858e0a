//! Certificates by the names that clients ask for.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};

use crate::{Pem, TlsError};

/// Certificates by name: the full name, the name with its first label replaced by `*`, or any name.
///
/// ```text
///   www.example.org ──▶ "www.example.org" ──▶ "*.example.org" ──▶ the default
/// ```
pub(crate) struct Names<K> {
    named: HashMap<String, Vec<Arc<K>>>,
    default: Vec<Arc<K>>,
}

impl<K> Default for Names<K> {
    fn default() -> Names<K> {
        Names { named: HashMap::new(), default: Vec::new() }
    }
}

/// The reason why a key is refused.
pub(crate) enum KeyError {
    /// It belongs to another certificate.
    Unfit,
    Other(String),
}

/// One second after the year 9999, the last that a certificate can name.
const END_OF_TIMES: u64 = 253_402_300_800;

/// Checks of the times of certificates.
#[derive(Default)]
pub(crate) struct Times {
    /// Certificates in use. Refusing one of them would keep the others from being renewed.
    pub(crate) in_use: Vec<CertificateDer<'static>>,
    /// Faults of certificates in use.
    pub(crate) warnings: Vec<TlsError>,
}

impl<K> Names<K> {
    /// Adds a certificate for `name`, or for all other names. Of several for one name, a client
    /// gets the first that it can use. `make` creates a key from both.
    pub(crate) fn add(
        &mut self,
        name: Option<&str>,
        chain: &Pem,
        key: &Pem,
        make: impl FnOnce(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) -> Result<K, KeyError>,
        times: &mut Times,
    ) -> Result<(), TlsError> {
        let key = Arc::new(certified(chain, key, make, times)?);
        match name {
            Some(name) => self.named.entry(normal(name)?).or_default().push(key),
            None => self.default.push(key),
        }
        Ok(())
    }

    /// The names, in order.
    pub(crate) fn names(&self) -> Vec<&str> {
        let mut names: Vec<_> = self.named.keys().map(String::as_str).collect();
        names.sort_unstable();
        names
    }

    pub(crate) fn of(&self, name: Option<&str>) -> &[Arc<K>] {
        let Some(name) = name else { return &self.default };
        // rustls reports the name without a trailing dot, but in the client's case.
        let name = name.to_ascii_lowercase();
        if let Some(keys) = self.named.get(&name) {
            return keys;
        }
        let wildcard = name.split_once('.').and_then(|(_, rest)| self.named.get(&format!("*.{rest}")));
        wildcard.unwrap_or(&self.default)
    }
}

impl<K> fmt::Debug for Names<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Names").field(&self.names()).finish()
    }
}

/// The name in lower case, without a trailing dot.
fn normal(name: &str) -> Result<String, TlsError> {
    let normal = name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase();
    let labels = normal.strip_prefix("*.").unwrap_or(&normal);
    match rustls::pki_types::DnsName::try_from(labels) {
        Ok(_) => Ok(normal),
        Err(_) => Err(TlsError::new(format_args!(
            "`{name}` is no name for a certificate: one is as `www.example.org` or `*.example.org`"
        ))),
    }
}

/// A chain with its matching key, of which the first certificate is valid now.
fn certified<K>(
    chain: &Pem,
    key: &Pem,
    make: impl FnOnce(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) -> Result<K, KeyError>,
    times: &mut Times,
) -> Result<K, TlsError> {
    let certificates = chain.certificates()?;
    match check_time(chain, &certificates[0]) {
        Err(error) if times.in_use.contains(&certificates[0]) => times.warnings.push(error),
        checked => checked?,
    }
    make(certificates, key.key()?).map_err(|error| match error {
        KeyError::Unfit => key.error(match chain.path() {
            Some(chain) => format!("is not the key of the certificate in {}", chain.display()),
            None => "is not the key of the certificate".into(),
        }),
        KeyError::Other(error) => key.error(error),
    })
}

/// The time at which the first certificate of a chain expires, in seconds since the beginning of
/// 1970; `None` if it cannot be read.
pub(crate) fn not_after(chain: &Pem) -> Option<u64> {
    let certificates = chain.certificates().ok()?;
    let certificate = webpki::EndEntityCert::try_from(&certificates[0]).ok()?;
    // The time is checked first, and at this end the certificate has expired.
    let end = UnixTime::since_unix_epoch(Duration::from_secs(END_OF_TIMES));
    match certificate.verify_for_usage(&[], &[], &[], end, webpki::KeyUsage::server_auth(), None, None) {
        Err(webpki::Error::CertExpired { not_after, .. }) => Some(not_after.as_secs()),
        _ => None,
    }
}

fn check_time(pem: &Pem, certificate: &CertificateDer<'_>) -> Result<(), TlsError> {
    let certificate = webpki::EndEntityCert::try_from(certificate)
        .map_err(|error| pem.error(format_args!("has a certificate that cannot be read: {error}")))?;
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let now = UnixTime::since_unix_epoch(now);
    // The time is checked first. It does not matter here that no authority vouches for the
    // certificate.
    match certificate.verify_for_usage(&[], &[], &[], now, webpki::KeyUsage::server_auth(), None, None) {
        Err(webpki::Error::CertExpired { time, not_after }) => {
            let days = (time.as_secs() - not_after.as_secs()) / 86_400;
            Err(pem.error(format_args!("the certificate expired {days} days ago")))
        }
        Err(webpki::Error::CertNotValidYet { time, not_before }) => {
            let days = (not_before.as_secs() - time.as_secs()).div_ceil(86_400);
            Err(pem.error(format_args!("the certificate is not valid before {days} days from now")))
        }
        _ => Ok(()),
    }
}
