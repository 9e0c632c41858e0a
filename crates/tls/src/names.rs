//! Certificates by the names that clients ask for.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;

use crate::{Pem, TlsError};

/// Certificates by name: the full name, the name with its first label replaced by `*`, or any name.
///
/// ```text
///   www.example.org ──▶ "www.example.org" ──▶ "*.example.org" ──▶ the default
/// ```
#[derive(Default)]
pub(crate) struct Names {
    named: HashMap<String, Vec<Arc<CertifiedKey>>>,
    default: Vec<Arc<CertifiedKey>>,
}

/// Checks of the times of certificates.
#[derive(Default)]
pub(crate) struct Times {
    /// Certificates in use. Refusing one of them would keep the others from being renewed.
    pub(crate) in_use: Vec<CertificateDer<'static>>,
    /// Faults of certificates in use.
    pub(crate) warnings: Vec<TlsError>,
}

impl Names {
    /// Adds a certificate for `name`, or for any name. Of several for one name, the first that the client can use is taken.
    pub(crate) fn add(
        &mut self,
        name: Option<&str>,
        chain: &Pem,
        key: &Pem,
        provider: &CryptoProvider,
        times: &mut Times,
    ) -> Result<(), TlsError> {
        let key = Arc::new(certified(chain, key, provider, times)?);
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

    fn of(&self, name: Option<&str>) -> &[Arc<CertifiedKey>] {
        let Some(name) = name else { return &self.default };
        // rustls has it without a trailing dot, but as the client wrote it.
        let name = name.to_ascii_lowercase();
        if let Some(keys) = self.named.get(&name) {
            return keys;
        }
        let wildcard = name.split_once('.').and_then(|(_, rest)| self.named.get(&format!("*.{rest}")));
        wildcard.unwrap_or(&self.default)
    }
}

impl ResolvesServerCert for Names {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let keys = self.of(hello.server_name());
        keys.iter().find(|key| key.key.choose_scheme(hello.signature_schemes()).is_some()).cloned()
    }
}

impl fmt::Debug for Names {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Names").field(&self.names()).finish()
    }
}

/// In lower case, without a trailing dot.
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

/// A chain with its key. They fit, and the first certificate is within its time.
fn certified(
    chain: &Pem,
    key: &Pem,
    provider: &CryptoProvider,
    times: &mut Times,
) -> Result<CertifiedKey, TlsError> {
    let certificates = chain.certificates()?;
    match check_time(chain, &certificates[0]) {
        Err(error) if times.in_use.contains(&certificates[0]) => times.warnings.push(error),
        checked => checked?,
    }
    let private = key.key()?;
    CertifiedKey::from_der(certificates, private, provider).map_err(|error| match error {
        rustls::Error::InconsistentKeys(_) => key.error(match chain.path() {
            Some(chain) => format!("is not the key of the certificate in {}", chain.display()),
            None => "is not the key of the certificate".into(),
        }),
        error => key.error(error),
    })
}

fn check_time(pem: &Pem, certificate: &CertificateDer<'_>) -> Result<(), TlsError> {
    let certificate = webpki::EndEntityCert::try_from(certificate)
        .map_err(|error| pem.error(format_args!("has a certificate that cannot be read: {error}")))?;
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let now = UnixTime::since_unix_epoch(now);
    // Its time is checked first. That no authority vouches for it does not matter here.
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
